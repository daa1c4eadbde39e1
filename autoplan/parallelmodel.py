"""A model that trains over all ranks of this job: what `parallelize` gives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from autoplan.agreement import Calls, from_first_rank, share_weights
from autoplan.api import Batch, load_cluster
from autoplan.arrange import arranged
from autoplan.clusterprices import prices_of
from autoplan.deal import data_shares
from autoplan.errors import UsageError
from autoplan.faults import told
from autoplan.forecast import Forecast, Measured
from autoplan.frontend import capture
from autoplan.graph import Graph
from autoplan.hooks import Hooks
from autoplan.lower import lower
from autoplan.moving import Meshes, check_move, rests_alike, shapes_source
from autoplan.optimizers import protect
from autoplan.pacing import pacer_of, rest_after_steps
from autoplan.plan import Plan, workers_of
from autoplan.planoptimizer import make_optimizer
from autoplan.precision import cast_batch
from autoplan.programs import Programs
from autoplan.refusals import refuse, refuse_without_loss, refuse_without_values
from autoplan.retarget import check_plan
from autoplan.schemes import tensor_axes
from autoplan.settings import Settings, plan_for, world_size
from autoplan.shapes import num_rows, shape_key
from autoplan.share import Share, check_data, share_of
from autoplan.simulate import forecast
from autoplan.skeleton import Skeleton
from autoplan.timeline import joined, measured, rank_events
from autoplan.weights import SafetensorsFolder, dense_source, dense_state, without_values
from costmodel.detect import detect
from runtime.executor import Executor
from runtime.guard import PATIENCE_S
from runtime.mesh import Mesh, build_mesh
from runtime.migrate import Side, move
from runtime.order import Record
from runtime.program import Program
from runtime.saving import Saving
from runtime.scaling import LossScale
from runtime.storage import Dense


class ParallelModel:
    """A model that trains over all ranks of this job. Made by `parallelize`."""

    def __init__(self, model: torch.nn.Module, settings: Settings) -> None:
        self.training = True
        self._model, self._settings = model, settings
        self._plan: Plan | None = None
        self._executor: Executor | None = None
        self._calls: Calls | None = None
        self._unset = without_values(model)
        self._programs: Programs | None = None
        self._alone: Programs | None = None  # of the steps that this rank does without the others
        self._meshes: Meshes | None = None
        self._hooks: Hooks | None = None

    def prepare(self, batch: Batch) -> None:
        """Capture, plan and place the model's tensors for batches like `batch`. Done once; later calls change nothing."""
        if self._executor is not None:
            return
        given, precision = self._model, self._settings.precision
        refuse(given)
        share_weights(given)
        skeleton = Skeleton(given, self._settings)
        graph = from_first_rank(lambda: capture(given, batch, self._settings.loss_fn, precision=precision))
        plan = plan_for(graph, self._settings, lambda: capture(given, batch, self._settings.loss_fn, check=False))
        check_plan(plan, graph, world_size())
        graph = arranged(graph, plan)
        batch = cast_batch(batch, precision)
        patience_s = self._settings.timeout_s or max(PATIENCE_S, 5 * plan.forecast.step_time_s)
        mesh = build_mesh(plan.axes, stage_meshes=plan.stage_meshes, zero_group=plan.zero_group, device=self._settings.device, patience_s=patience_s)
        self._programs, self._alone = (
            Programs(shape_key(batch, plan.global_batch), graph, plan, skeleton.capture, skeleton.check, is_shared=is_shared) for is_shared in (True, False)
        )
        self._plan, self._meshes = plan, Meshes(plan, mesh)
        program = self._program(batch, plan.global_batch, "train", mesh)
        self._calls, scale = Calls(mesh), LossScale() if precision == "fp16" else None
        with told():
            self._executor = self._made(program, mesh, dense_source(given, graph), (graph, plan), self._settings.seed, scale)
        self._model = skeleton.module  # the weights are the caller's
        skeleton.watch(self)
        self._hooks = Hooks(given)
        protect(self._executor.trainable, only_one_bit_adam=program.compression == "1bit-adam" and self._executor.reducer is not None)

    def _made(self, program: Program, mesh: Mesh, dense: Dense, of: tuple[Graph, Plan], seed: int, scale: LossScale | None) -> Executor:
        pacer = pacer_of(self._settings.cluster, of[1], of[0], mesh.rank)
        return Executor(program, mesh, dense, seed, random_by_element=True, loss_scale=scale, backend=self._settings.compile_backend, pacer=pacer)

    def _program(self, batch: Batch, rows: int, kind: str, mesh: Mesh) -> Program:
        """The program of this rank for a batch of `rows` rows."""
        return self._programs_of(kind).find(batch, rows, kind, mesh)

    def _programs_of(self, kind: str) -> Programs:
        """Shapes that one rank alone has seen are kept apart: all ranks have to agree on what is new in a call of all."""
        found = self._alone if self._steps_alone(kind) else self._programs
        assert found is not None
        return found

    def _steps_alone(self, kind: str) -> bool:
        """Whether this rank does it without the others: a step of an asynchronous worker."""
        return kind == "train" and self._plan is not None and self._plan.sync == "async"

    def move_to(self, plan: Plan, optimizer: torch.optim.Optimizer | None = None) -> int:
        """Go on under another plan of the same model and number of ranks: parameters, buffers and the state of `optimizer` (made for this
        model's parameters; it goes on with the new ones) move in place, bit for bit, without a disk.

        Every rank calls it between two steps, with gradients cleared. Where the plans differ in rows and schedule alone nothing
        moves. Returns the bytes of the dense tensors that were sent. `parameters()` are new objects afterwards where something moved. Raises
        UsageError for gradients that are not cleared, for plans with servers, and for an optimizer that works on dense copies; StalePlanError
        for a plan of another model.
        """
        executor, (graph, old) = self._ready("move_to").executor, self._first
        assert self._programs is not None and self._meshes is not None
        check_plan(plan, graph, world_size())
        check_move(old, plan, executor, optimizer)
        before, after = lower(old, graph), lower(plan, graph)
        mesh = self._meshes.of(plan, executor.mesh)
        own = lower(plan, graph, data_rank=mesh.axis("dp").index)[mesh.axis("pp").index]
        if rests_alike(before, after):
            executor.rebind(own, dense_source(self._model, graph))
            self._programs.restart(plan, own)
            self._plan = plan
            return 0
        with told():
            executor.finish_saving()  # the next executor knows nothing of what this one writes
            made = self._made(own, mesh, shapes_source(self._model, graph), (graph, plan), executor.seed, executor.loss_scale)
            made.num_steps = executor.num_steps
            sides = [Side(each.residents, each.mesh, each.program.stage_ranks) for each in (executor, made)]
            moved = move(sides[0], sides[1], optimizer)
        self._programs.restart(plan, own)
        self._plan, self._executor, self._calls = plan, made, Calls(mesh)
        protect(made.trainable)
        return moved

    @property
    def plan(self) -> Plan:
        """The plan that is executed."""
        return self._ready("plan")._plan  # type: ignore[return-value]

    @property
    def graph(self) -> Graph:
        """The captured graph, in the order of the plan's stages."""
        return self._ready("graph")._first[0]

    @property
    def executor(self) -> Executor:
        """The runtime below: its storage, mesh and recorder."""
        executor = self._ready("executor")._executor
        assert executor is not None
        return executor

    @property
    def _first(self) -> tuple[Graph, Plan]:
        assert self._programs is not None
        return self._programs.first

    def _ready(self, what: str) -> ParallelModel:
        if self._executor is None:
            raise UsageError(
                f"{what} is not there yet: {type(self._model).__name__} does not say what it takes, so planning waits for the first forward_backward(batch). "
                "Give an example batch to parallelize(model, batch), or call forward_backward first."
            )
        return self

    def train(self, mode: bool = True) -> ParallelModel:
        """Training mode; `forward_backward` needs it."""
        self.training = mode
        return self

    def eval(self) -> ParallelModel:
        """Evaluation mode: `forward_backward` refuses until `train()`."""
        return self.train(False)

    def forward_backward(self, batch: Batch | Share) -> torch.Tensor:
        """Run all micro-batches of a global batch (or of this rank's Share of one) and add to the gradients.

        Returns the loss of the global batch, the same scalar on every rank. Where the loss or a gradient is not finite, the step is
        skipped by all ranks alike: it adds nothing (`step_was_skipped`). Raises UsageError, before anything runs, for a batch that
        cannot be dealt to the ranks.
        """
        if not self.training:
            raise UsageError("forward_backward was called in evaluation mode: call train() first, or evaluate(batch).")
        run = self._executor.asynchronous if self._executor is not None else None
        if run is not None and not run.worker.works:
            raise UsageError("this rank serves and computes nothing: it makes no steps, call pm.finish(), which returns once all workers have ended")
        return self._run(batch, "train")

    def evaluate(self, batch: Batch | Share) -> torch.Tensor:
        """The loss of a global batch in evaluation mode; no gradients, buffers unchanged. The same scalar on every rank."""
        return self._run(batch, "evaluate")

    def predict(self, batch: Batch | Share) -> Any:
        """The model's output besides the loss, in evaluation mode, all rows in order, on the data rank 0 of the stage that makes it;
        None elsewhere. A tuple where there are several."""
        executor = self._bound(batch, "evaluate")
        with told():
            found = executor.predict(self._content(batch))
        outputs = tuple(found[name] for stage in executor.program.stages for name in stage.predictions)
        axes = (*tensor_axes(executor.program.axes), ("dp", 1), ("cp", 1), ("ep", 1))
        if not outputs or any(executor.mesh.axis(name).index for name, _ in axes):
            return None
        return outputs[0] if len(outputs) == 1 else outputs

    def _run(self, batch: Batch | Share, kind: str) -> torch.Tensor:
        executor = self._bound(batch, kind)
        content = self._content(batch)
        refuse_without_loss(self._model, self.graph)
        with told():
            return executor.step(content) if kind == "train" else executor.evaluate(content)

    def _content(self, batch: Batch | Share) -> Batch:
        """The tensors of a batch, in the precision that is computed in."""
        return cast_batch(batch.batch if isinstance(batch, Share) else batch, self._settings.precision)

    def _bound(self, batch: Batch | Share, kind: str) -> Executor:
        """The executor with the program for this batch."""
        if self._executor is None:
            self.prepare(batch.batch if isinstance(batch, Share) else batch)
        refuse_without_values(self._unset)
        assert self._calls is not None and self._hooks is not None
        executor = self.executor
        try:
            self._hooks.refuse_new()
            content = self._content(batch)
            rows = self._global_rows(batch)
            program = f"{kind} on {shape_key(content, rows)}"
        except Exception as error:
            if not self._steps_alone(kind):
                self._calls.refuse(str(error))
            raise
        with told():
            if not self._steps_alone(kind):
                self._calls.enter(program)
            if self._settings.check_data and not self._steps_alone(kind):
                check_data(content, executor.mesh, is_share=isinstance(batch, Share) or num_rows(content) != rows)
        program = self._program(content, rows, kind, executor.mesh)
        if program is not executor.program:
            graph = self._programs_of(kind).graph(content, program.global_rows)
            executor.rebind(program, dense_source(self._model, graph))
        return executor

    def _global_rows(self, batch: Batch | Share) -> int:
        """Rows of the global batch. Rows that are exactly this rank's share of the planned batch are taken for that share."""
        if isinstance(batch, Share):
            return batch.total
        rows, planned = num_rows(batch), self.plan.global_batch
        return planned if rows == data_shares(self.plan, planned)[self._reads] else rows

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """This rank's parameters, for an optimizer. A rank whose stages hold none gives one of no elements, since torch's optimizers
        refuse an empty list."""
        held = [parameter for _, parameter in self.named_parameters()]
        return iter(held or [torch.nn.Parameter(torch.empty(0))])

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters under the model's own names."""
        return iter(self._ready("parameters").executor.named_parameters())

    @property
    def num_steps(self) -> int:
        """Calls of `forward_backward` so far, those before a checkpoint that was loaded included."""
        return self._ready("num_steps").executor.num_steps

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last `forward_backward` added nothing, because its loss or a gradient was not finite. The same on every rank."""
        return self.executor.step_was_skipped

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in the next backward pass; 1 but for fp16. Gradients are given without it."""
        scale = self.executor.loss_scale
        return 1.0 if scale is None else scale.factor

    def optimizer(self, cls: type[torch.optim.Optimizer], params: Iterable[Any] | None = None, **options: Any) -> torch.optim.Optimizer:
        """`cls(params, **options)`, exact for whatever way the plan divides the parameters (autoplan/optimizers.py), or keeps them on
        parameter servers (autoplan/served.py).

        `params`: all parameters, or some of `parameters()` or `named_parameters()`, or groups of them. Every rank calls it. Raises
        UnsupportedOpError for an optimizer that needs all parameters in one place while they lie on several stages. Under 1-bit Adam `cls`
        is Adam or AdamW, and `warmup_steps` an option of it (autoplan/onebitadam.py).
        """
        return rest_after_steps(make_optimizer(cls, list(self.parameters() if params is None else params), self.executor, self.plan, options), self.executor)

    def finish(self) -> Record | None:
        """End an asynchronous run: every rank calls it after its last step, in its own time; returns once all have, with the servers' last
        weights in every replica, and what happened (runtime/order.py). None for plans whose ranks step together."""
        run = self.executor.asynchronous
        if run is None:
            return None
        if not run.worker.has_started:
            raise UsageError("pm.finish() ends a run that has not begun: no servers work before pm.optimizer(...) is made")
        with told():
            return run.finish()

    def forecast(self, rows: int | None = None) -> Forecast:
        """What this plan is predicted to take for a global batch of `rows` rows (default: the planned one), from the formulas."""
        settings, (graph, plan) = self._settings, self._ready("forecast")._first
        cluster = load_cluster(settings.cluster) if settings.cluster is not None else detect(world_size())
        programs = lower(plan, graph, rows)
        return forecast(programs, plan, graph, prices_of(cluster), overlap=cluster.overlaps)

    def drain(self) -> bool:
        """With `delay=1`, after the last batch: add the pending sum to the gradients, as one more `forward_backward` would, without a
        batch. Whether there was one; an optimizer step then applies it. Every rank calls it."""
        with told():
            return self.executor.drain()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients by one factor so that their global norm is at most `max_norm`; returns the norm before."""
        with told():
            return self.executor.clip_grad_norm_(max_norm, norm_type)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Dense parameters and buffers under the model's own names and shapes, on rank 0; empty elsewhere. Every rank calls it."""
        refuse_without_values(self._unset)
        kept = self._model.state_dict().keys()
        return {name: tensor for name, tensor in self.executor.full_state_dict().items() if name in kept}

    def full_grads(self) -> dict[str, torch.Tensor]:
        """Dense gradients by parameter name, on rank 0; empty elsewhere. Parameters without a gradient are left out.

        They are what the next optimizer step applies: with `compression` the sum of what was sent, with `delay` that of the batch before."""
        return self.executor.full_grads()

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor] | str | Path) -> None:
        """Write dense tensors, or a safetensors file or folder, into this rank's shards. A rank reads one tensor after the other and keeps
        its own part: a model on the meta device gets its weights without being anywhere whole. Raises UsageError for missing or unknown names."""
        source = state if isinstance(state, Mapping) else SafetensorsFolder(state)
        dense = dense_state(self._model, source)
        try:
            self.executor.load_full_state_dict(dense)
            self._unset = ()
        except ValueError as error:
            raise UsageError(str(error)) from error

    def save(self, path: str | Path, optimizer: torch.optim.Optimizer | None = None, *, wait: bool = True) -> Saving:
        """Write a checkpoint that loads under another plan and number of ranks. Atomic: the previous one stays until it is complete.

        Every rank calls it. Without `wait` training goes on while it is written, from a copy on the CPU of each stage's first rank; it is
        in place after `finish_saving()`, the next `save` or `load`, or the process' end.
        """
        refuse_without_values(self._unset)
        with told():
            return self.executor.save(path, optimizer, wait=wait)

    def finish_saving(self) -> None:
        """Return when a checkpoint that `save(wait=False)` began is in place. Every rank calls it."""
        with told():
            self.executor.finish_saving()

    def export(self, path: str | Path) -> None:
        """Write the model as a folder of safetensors files under its own names, those of `model.state_dict()`. Every rank calls it."""
        refuse_without_values(self._unset)
        kept = self._model.state_dict().keys()
        with told():
            self.executor.export(path, lambda name: name in kept)

    def load(self, path: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Read a checkpoint that `save` wrote, under any plan."""
        with told():
            self.executor.load(path, optimizer)
        self._unset = ()

    @property
    def timeline(self) -> Measured:
        """The last step as this rank measured it, in the form of `plan.forecast`: events, step time, tokens per second, MFU."""
        mesh = self.executor.mesh
        return measured(self.plan, joined([rank_events(mesh.recorder, mesh.rank)]))

    @property
    def data_rank(self) -> int:
        """This rank's place among the data-parallel replicas; that of the first for a rank that serves and computes nothing, which reads as that does."""
        return workers_of(self.plan).index(self._reads)

    @property
    def _reads(self) -> int:
        """The data rank whose rows this rank is given."""
        index = 0 if self.plan.stage_meshes else self.executor.mesh.axis("dp").index
        return index if index in workers_of(self.plan) else workers_of(self.plan)[0]

    @property
    def data_size(self) -> int:
        """Number of data-parallel replicas; 1 where stages have meshes of their own, whose ranks all take the global batch."""
        return 1 if self.plan.stage_meshes else len(workers_of(self.plan))

    def shard(self, batch: Batch) -> Share:
        """This rank's own rows of a global batch."""
        self.prepare(batch)
        return share_of(batch, data_shares(self.plan, num_rows(batch)), self._reads)
