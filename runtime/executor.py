"""The executor: runs a program's steps on this rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from runtime import checkpoint
from runtime.action import Schedule
from runtime.asynchronous import AsynchronousRun
from runtime.batch import gather_rows, gather_rows_for_all
from runtime.carry import restored, written
from runtime.code import Code, make_ready
from runtime.errors import ScheduleError
from runtime.finite import not_finite, not_finite_anywhere, suspicion
from runtime.mesh import Mesh
from runtime.norm import clip_grad_norm
from runtime.paced import Pace, Pacer, clock_of, paced
from runtime.partition import servers_of, workers_of
from runtime.program import Program
from runtime.random import RandomState
from runtime.reducer import Reducer
from runtime.reduction import reduce_over_axes, sum_over_axes
from runtime.run import Run
from runtime.saving import Saving
from runtime.scaling import LossScale
from runtime.schedule import forward_only
from runtime.servers import Servers
from runtime.state import collect, load
from runtime.storage import Dense, Resident, Storage, materialise
from runtime.stripes import reduces_itself
from runtime.tied import sum_tied
from runtime.traffic import is_split_backward, with_gradients
from runtime.verdict import Telling, guarded, warn_of_skipped
from runtime.workers import Worker

_MAX_CODES = 16  # programs that are kept ready


class Executor:
    """Runs steps of a program on this rank of a mesh.

    `dense(fqn)` gives the dense tensors to start from; this rank keeps its own part alone. All ranks of the mesh construct
    one, and call the same methods in the same order. `random_by_element`: random masks as in one process (runtime/random.py).
    `loss_scale`: where to start with a scaled loss (runtime/scaling.py); the gradients that a step leaves are not scaled.
    `backend`: of torch.compile, for the blocks; None runs them as they are. Raises ScheduleError for one where the backward pass is split.
    `pacer`: the device is paced, and this says how long a program takes on it (runtime/paced.py).
    """

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        dense: Callable[[str], torch.Tensor],
        seed: int = 0,
        *,
        random_by_element: bool = False,
        loss_scale: LossScale | None = None,
        backend: str | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        self.mesh = mesh
        self.seed = seed
        self.num_steps = 0
        self.loss_scale = loss_scale
        self.step_was_skipped = False
        if backend is not None and is_split_backward(program):
            raise ScheduleError(f"schedule {program.schedule!r} splits the backward pass, which torch.compile makes one: choose 1f1b, gpipe or interleaved")
        self._random_by_element = random_by_element
        self._saving: Saving | None = None
        self._backend, self._pacer = backend, pacer
        self.pace: Pace | None = None  # of the present program, where the device is paced
        self._codes: list[Code] = []
        is_split, served_by, is_own = is_split_backward(program), servers_of(program), reduces_itself(program)
        self.storages: dict[int, Storage] = {
            s.index: materialise(s, dense, mesh, zero=program.zero, is_split_backward=is_split, is_served=bool(served_by), keeps_whole_grads=is_own)
            for s in program.stages
        }
        self.residents: tuple[Resident, ...] = tuple(r for s in program.stages for r in self.storages[s.index].residents)
        self.servers = Servers(self.trainable, served_by, workers_of(program), mesh) if program.sync == "ps" else None
        self.asynchronous: AsynchronousRun | None = None
        if program.sync == "async":
            worker = Worker(self.trainable, served_by, workers_of(program), program.staleness, mesh)
            self.asynchronous = AsynchronousRun(worker, mesh, self._reshard)
        self._own = mesh if self.asynchronous is None else self.asynchronous.own  # the ranks that step together
        self.reducer = Reducer(program, self.storages, mesh) if is_own else None
        self.carried: list[tuple[Resident, torch.Tensor]] = []  # to be added to the gradients of the next step
        self.rebind(program, dense)

    def rebind(self, program: Program, dense: Dense | None = None) -> None:
        """Run another program on the same parameters and buffers: other shapes, or the evaluation mode.

        `dense` gives the program's constants (default: it has none). Raises ValueError where parameters or buffers differ. The last programs stay
        ready, so that a change between training and evaluation costs nothing.
        """
        for code in self._codes:
            if code.program is program:
                self.code = code
                return
        for stage in program.stages:
            kept = {r.stored.name: r.stored for r in self.storages[stage.index].residents}
            for stored in stage.stored:
                if stored.kind == "constant":
                    continue
                if stored.name not in kept or (kept[stored.name].fqn, kept[stored.name].chunks) != (stored.fqn, stored.chunks):
                    raise ValueError(f"stage {stage.index} keeps no {stored.fqn!r} cut as {stored.chunks}: the programs differ in more than their rows")
            self.storages[stage.index].check_readers(stage)
        self.mesh.guard.is_new = True
        ranks = self._ranks_of(program)
        self.code = make_ready(program, self.storages, ranks, dense, self._backend)
        if self._pacer is not None:
            self.pace = self._pacer(program)
            self.code = paced(self.code, self.pace, ranks)
        self._codes.append(self.code)
        del self._codes[:-_MAX_CODES]

    @property
    def program(self) -> Program:
        return self.code.program

    @property
    def _at(self) -> Mesh:
        return self._ranks_of(self.program)

    def _ranks_of(self, program: Program) -> Mesh:
        """The ranks that run a program together."""
        return self._own if program.sync == "async" else self.mesh

    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for _, parameter in self.named_parameters()]

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters under the model's own names, in the order of the program."""
        return [(r.stored.fqn, r.tensor) for r in self.residents if isinstance(r.tensor, torch.nn.Parameter)]

    @cached_property
    def trainable(self) -> tuple[Resident, ...]:
        """The parameters that get a gradient, in the order of the program."""
        return tuple(r for r in self.residents if r.stored.kind == "parameter" and r.stored.requires_grad)

    def versions(self) -> tuple[int, ...]:
        """How often each parameter here was written to: other numbers where one has changed."""
        return tuple(r.local()._version for r in self.residents if r.stored.kind == "parameter")

    def zero_grad(self) -> None:
        for resident in self.trainable:
            resident.tensor.grad = None

    def step(self, batch: Any) -> torch.Tensor:
        """Forward and backward of all micro-batches of `batch` (global, or this rank's share).

        Returns the loss of the global batch, a scalar, the same on every rank. Gradients are added to those that are there,
        unless the loss or a gradient is not finite: such a step changes neither gradients nor buffers on any rank.
        Raises BatchError before anything runs where the batch is not what the program takes, StageError with the first error of
        the job where a rank fails, CommunicationError where a wait takes too long.
        """
        start_s, guard = time.monotonic(), self.mesh.guard
        with guarded(self.mesh), self._compiling():
            run = self._new_run(batch, self.code.actions, is_training=True)
            kept_grads = [(r, r.tensor.grad) for r in self.trainable if r.tensor.grad is not None]
            for resident, _ in kept_grads:  # partial sums of this step must not mix with complete gradients of earlier ones
                resident.tensor.grad = None
            early: list[Telling] = []  # beside the backward passes, where nothing that they give has to be told
            run.run(lambda: early.append(self._tell_early(run)) if self.code.has_all_sums else None)
            with self.mesh.recorder.action("reduce", "reduce"), torch.no_grad():
                self._reshard()
                grads = self._completed()
                suspicious = suspicion(grads.values(), self.mesh.device)
                loss, is_suspect = (early[0] if early else self._tell(run, suspicious)).result(suspicious)
                self._finish(run, kept_grads, grads, loss, self._faults(grads) if is_suspect else ())
            self.num_steps += 1
            guard.is_new, guard.patience_s = False, max(guard.patience_s, 5 * (time.monotonic() - start_s))
            self.mesh.recorder.phase = "between steps"
            return loss

    @property
    def _only_serves(self) -> bool:
        """Whether this rank has no micro-batches: it serves parameters and computes nothing."""
        return not self.code.micro_batches(self._at)

    def _tell(self, run: Run, suspicious: torch.Tensor | None) -> Telling:
        return Telling(self.program.stages, self._at, run.loss, suspicious, self.program.first_worker)

    def _tell_early(self, run: Run) -> Telling:
        with self.mesh.recorder.action("reduce", "reduce"):
            return self._tell(run, None)

    def _faults(self, grads: dict[Resident, torch.Tensor]) -> tuple[str, ...]:
        """Names of parameters whose gradient is not finite, the same on every rank."""
        named = ((r.stored.fqn, grad) for r, grad in grads.items())
        return not_finite(named) if self.code.has_all_sums else not_finite_anywhere(named, self._at)

    def _compiling(self) -> AbstractContextManager[None]:
        """The first step with torch.compile waits for the compiler, a process of its own: whoever is in it is not stuck."""
        return self.mesh.guard.waiting() if self._backend is not None and self.mesh.guard.is_new else nullcontext()

    def _completed(self) -> dict[Resident, torch.Tensor]:
        """The gradients of this rank as plain tensors, their sums made; those over the data axis not where the reducer makes them."""
        if self.reducer is None:
            if self._only_serves:
                for tensor in self.with_gradients():
                    tensor.grad = torch.zeros_like(tensor)
            else:
                reduce_over_axes(self.trainable, self._at)
                sum_tied(self.trainable, self.program.stage_ranks, self._at, self.program.meshes)
            if self.servers is not None:
                self.servers.push()
            return {r: r.local(r.tensor.grad) for r in self.trainable if r.tensor.grad is not None}
        grads = {r: grad for storage in self.storages.values() for r, grad in storage.take_grads().items()}
        sum_over_axes(grads, {r: tuple(axis for axis in r.stored.partial if axis != "dp") for r in grads}, self.mesh.axis)
        return grads

    def _deliver(self, sums: list[tuple[Resident, torch.Tensor]]) -> None:
        """Let sums over the data axis be the gradients."""
        for resident, total in sums:
            resident.tensor.grad = resident.like(total)
        if sums:
            sum_tied(self.trainable, self.program.stage_ranks, self.mesh)

    def drain(self) -> bool:
        """Add to the gradients what is pending, as one more step would, but compute nothing. Whether there was anything. All ranks call it."""
        with guarded(self.mesh), torch.no_grad():
            sums = self.reducer.drain() if self.reducer is not None else []
            kept = [(r, r.tensor.grad) for r in self.trainable if sums and r.tensor.grad is not None]
            for resident, _ in kept:
                resident.tensor.grad = None
            self._deliver(sums)
            self._add(kept)
            return bool(sums)

    def _add(self, grads: list[tuple[Resident, torch.Tensor]]) -> None:
        for resident, grad in grads:
            resident.tensor.grad = grad if resident.tensor.grad is None else grad + resident.tensor.grad

    def _finish(
        self, run: Run, kept_grads: list[tuple[Resident, torch.Tensor]], grads: dict[Resident, torch.Tensor], loss: torch.Tensor, faults: tuple[str, ...]
    ) -> None:
        """Take the step's gradients and buffers over, or leave them out. `faults`: parameters whose gradient is not finite."""
        self.step_was_skipped = bool(faults) or not bool(torch.isfinite(loss))
        if self.step_was_skipped:
            self.zero_grad()
            for resident, grad in kept_grads:
                resident.tensor.grad = grad
            self._report(loss, faults)
        else:
            if run.loss_factor != 1.0:
                for grad in grads.values():
                    grad.mul_(1.0 / run.loss_factor)
            if self.reducer is not None:
                self._deliver(self.reducer.reduce(grads))
            self._add(kept_grads)
            self._add(self.carried)
            self.carried = []
            self._write_buffers(run.updates)
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.after(not self.step_was_skipped)

    def _report(self, loss: torch.Tensor, faults: tuple[str, ...]) -> None:
        """Warn of a skipped step, on rank 0; not of a scaled loss that was too large, which is how its scale is found."""
        if (self._at is self.mesh and self.mesh.rank) or (self.loss_scale is not None and bool(torch.isfinite(loss))):
            return
        warn_of_skipped(self.num_steps, loss, faults)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients of the model so that their one norm is at most `max_norm`; returns the norm before, on every rank."""
        with self.mesh.recorder.action("clip", "reduce"), torch.no_grad():
            return clip_grad_norm(self.trainable, self._own, max_norm, norm_type)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Dense parameters and buffers under the model's own names, aliases included, on rank 0; empty on other ranks."""
        self._complete()
        return collect(self.residents, self.mesh, self.program.stage_ranks, lambda r: None if r.stored.kind == "constant" else r.tensor)

    def full_grads(self) -> dict[str, torch.Tensor]:
        """Dense gradients under the model's own names, aliases included, on rank 0; empty on other ranks."""
        if self.servers is None:
            return collect(self.trainable, self.mesh, self.program.stage_ranks, lambda r: r.tensor.grad)
        whole = {id(r): self.servers.whole(r.tensor.grad) for r in self.trainable if r.tensor.grad is not None}
        return collect(self.trainable, self.mesh, self.program.stage_ranks, lambda r: whole.get(id(r)))

    def pull(self, updated: Iterable[torch.Tensor]) -> None:
        """Bring parameters that their servers have updated into every replica. Raises as `step`."""
        assert self.servers is not None, "the program has no parameter servers"
        with guarded(self.mesh):
            self.servers.pull(updated)

    def with_gradients(self) -> frozenset[torch.Tensor]:
        """The parameters that a step leaves a gradient of."""
        found = with_gradients(self.program)
        return frozenset(r.tensor for r in self.trainable if (r.stage, r.stored.name) in found)

    def _settle(self) -> None:
        """Give all workers the servers' weights. Nothing where a step leaves them equal."""
        if self.asynchronous is not None:
            self.asynchronous.settle()

    def _take(self) -> None:
        """Give the servers of an asynchronous run the weights that were loaded."""
        if self.asynchronous is not None:
            self.asynchronous.take()

    def _complete(self) -> None:
        """Give all ranks the weights, those that only serve too."""
        self._settle()
        if self.servers is not None:
            with guarded(self.mesh):
                self.servers.refresh()

    def load_full_state_dict(self, dense: Callable[[str], torch.Tensor | None]) -> None:
        """Fill every parameter and buffer from `dense(name)` (None: not there), each rank its own part. Raises ValueError."""
        load(self.residents, dense)
        self._take()

    def save(self, path: str | os.PathLike, optimizer: torch.optim.Optimizer | None = None, *, wait: bool = True) -> Saving:
        """Write a checkpoint that loads under any plan and world size (runtime/checkpoint.py). Raises CheckpointError."""
        self.finish_saving()
        self._complete()
        progress = checkpoint.Progress(self.num_steps, self.loss_scale)
        with torch.no_grad():
            carried = written(self.reducer, self.carried, self.mesh)
            self._saving = checkpoint.save(path, self.residents, self.mesh, self.program.stage_ranks, progress, optimizer, carried, wait=wait)
        return self._saving

    def finish_saving(self) -> None:
        """Until a checkpoint that is being written in the background is in place, on every rank. Raises CheckpointError."""
        saving, self._saving = self._saving, None
        if saving is not None:
            checkpoint.together(self.mesh, saving.wait, "saving")

    def export(self, path: str | os.PathLike, keep: Callable[[str], bool]) -> None:
        """The model as safetensors under its own names (runtime/checkpoint.py). Raises CheckpointError."""
        self._complete()
        checkpoint.export(path, self.residents, self.mesh, self.program.stage_ranks, keep)

    def load(self, path: str | os.PathLike, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Read a checkpoint. Raises CheckpointError before anything is changed."""
        self.finish_saving()
        reader = checkpoint.Reader(path)
        progress = checkpoint.load(reader, self.residents, optimizer)
        with torch.no_grad():
            self.carried = restored(self.reducer, self.residents, reader.tensors, reader.tensor, self.mesh)
        self.num_steps = progress.num_steps
        if self.loss_scale is not None and progress.loss_scale is not None:
            self.loss_scale = progress.loss_scale
        self._take()

    def evaluate(self, batch: Any) -> torch.Tensor:
        """The loss of the global batch, without gradients and without writing buffers."""
        self._settle()
        with guarded(self.mesh):
            run = self._forward(batch)
            with self.mesh.recorder.action("reduce", "reduce"), torch.no_grad():
                return self._tell(run, None).result()[0]

    def predict(self, batch: Any) -> dict[str, torch.Tensor]:
        """The model's outputs by value name, on ranks whose stages hold them (rows of all data ranks in order); empty on others."""
        self._settle()
        with guarded(self.mesh):
            run = self._forward(batch)
            names = [name for stage in self.program.stages for name in stage.predictions]
            dealt, axis = self.program.micro_batches, self.mesh.axis("dp")
            gather = gather_rows if all(dealt) else gather_rows_for_all
            return {name: gather(run.predictions.get(name, []), dealt, axis) for name in names}

    def _new_run(self, batch: Any, actions: Schedule, *, is_training: bool) -> Run:
        self.mesh.recorder.clear()
        if self.pace is not None:
            clock_of(self.mesh).begin()

        def state(micro_batch: int, row_start: int) -> RandomState:
            return RandomState(self.seed, self.num_steps, micro_batch, row_start, self._random_by_element)

        factor = self.loss_scale.factor if self.loss_scale is not None else 1.0
        return Run(replace(self.code, actions=actions), self._at, batch, state, is_training, factor)

    def _forward(self, batch: Any) -> Run:
        run = self._new_run(batch, tuple(forward_only(own) for own in self.code.actions), is_training=False)
        with torch.no_grad():
            run.run()
        self._reshard()
        return run

    def _reshard(self) -> None:
        for storage in self.storages.values():
            storage.reshard()

    def _write_buffers(self, values: dict[str, torch.Tensor]) -> None:
        for stage in self.program.stages:
            by_name = {r.stored.name: r for r in self.storages[stage.index].residents}
            for buffer, value in stage.updates:
                by_name[buffer].tensor.copy_(values[value])
