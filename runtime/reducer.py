"""Sums of gradients over the data axis that the runtime makes itself: compressed, or one step late.

Micro-batches add to whole local gradients, under ZeRO too (FSDP2 gathers parameters, and reduces nothing). Once a step they are
completed over the other axes; then

    compression   runtime/exchange.py, with residuals that stay on this rank
    delay 1       the sum of this step starts in the background, and the gradients that the step leaves are the sum that the last step
                  started: the first step leaves none
    1-bit Adam    exact sums until the optimizer freezes its variance; from then on what is quantised is the momentum: with b = beta1, m the
                  momentum before the step and p ranks, rank k sends g_k + b/(1-b) m/p, and the step leaves the sum minus b/(1-b) m,
                  from which Adam makes (1-b) times the sum as its new momentum

A step that is skipped sends nothing and changes neither residuals nor what is pending.

Sources: Seide et al. 2014; CNTK's useAsyncAggregation (double buffering); Tang et al. 2021 (1-bit Adam).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from runtime.background import Background
from runtime.collective import scatter_into, wait
from runtime.exchange import Residuals, columns_of, exchange, tensor_of
from runtime.mesh import Axis, Mesh, twin_axis
from runtime.program import Program, row_range
from runtime.record import Recorder
from runtime.reduction import bucket_sizes, sum_over_axes
from runtime.storage import Resident, Storage, local_shape
from runtime.stripes import Layout, Matrix, program_layout, reduced


class Momenta(Protocol):
    """An optimizer whose momenta are compressed."""

    @property
    def is_frozen(self) -> bool:
        """Whether its warm-up is over: the same on every rank."""
        ...

    def momentum(self, parameter: torch.Tensor) -> tuple[torch.Tensor, float] | None:
        """(momentum, beta1) of a parameter; None where it has none yet."""
        ...


class Reducer:
    """The sums of one rank. `gradients` are the parameters that take part, in order."""

    def __init__(self, program: Program, storages: Mapping[int, Storage], mesh: Mesh) -> None:
        if mesh.replica_axis.size > 1:
            raise ValueError(f"zero_group={program.zero_group} with compressed or delayed gradients is not served: leave zero_group out, or use zero=0")
        self.mesh, self.delay, self.zero = mesh, program.delay, program.zero
        by_name = {(s.index, r.stored.name): r for s in program.stages for r in storages[s.index].residents}
        self.gradients: tuple[Resident, ...] = tuple(by_name[index, stored.name] for index, stored in reduced(program))
        self.layout: Layout | None = program_layout(program) if program.compression else None
        self.residuals = Residuals.zero(self.layout, mesh.axis("dp").index, mesh.device) if self.layout is not None else None
        self.momenta: Momenta | None = None
        self._axis = mesh.axis("dp")
        self._background: Background[list[torch.Tensor]] | None = None
        self._late: list[tuple[Resident, torch.Tensor]] = []  # gradients without a sum over the data axis, of the step that is pending
        self._pending: list[torch.Tensor] | None = None  # sums that are complete
        self._is_running = False
        if self.delay:
            self._axis = replace(twin_axis(mesh, "dp"), recorder=Recorder(clock=type(mesh.recorder.clock)(), phase="reduce"))
            self._background = Background(mesh.device, mesh.guard)

    @property
    def codec(self) -> str:
        """The codec in use, "" where sums are exact."""
        return self.layout.codec.name if self.layout is not None else ""

    def reduce(self, grads: dict[Resident, torch.Tensor]) -> list[tuple[Resident, torch.Tensor]]:
        """The gradients that this step leaves, as they lie at rest, from the whole local ones of every parameter that has one.

        `grads` are given away. All data ranks call it.
        """
        own = [grads.pop(r) if r in grads else self._nothing(r) for r in self.gradients]
        others = list(grads.items())
        grads.clear()
        if not self.delay:
            return [*zip(self.gradients, self._sums(own), strict=True), *others]
        last = self.drain()
        self.mesh.recorder.absorb(self._axis.recorder)
        assert self._background is not None
        self._background.start(lambda: self._sums(own), own)
        self._is_running, self._late = True, others
        return last

    def drain(self) -> list[tuple[Resident, torch.Tensor]]:
        """The sums that are pending, waited for; afterwards nothing is. Empty where nothing was."""
        self.settle()
        found = [*zip(self.gradients, self._pending, strict=True), *self._late] if self._pending is not None else []
        self._pending, self._late = None, []
        return found

    def settle(self) -> None:
        """Wait for what runs in the background; it stays pending."""
        if self._is_running:
            assert self._background is not None
            self._pending = self._background.result()
            self._is_running = False

    @property
    def pending(self) -> list[tuple[Resident, torch.Tensor]]:
        """The sums that the next step will leave, waited for."""
        self.settle()
        return [*zip(self.gradients, self._pending, strict=True), *self._late] if self._pending is not None else []

    def restore(self, sums: Sequence[tuple[Resident, torch.Tensor]]) -> None:
        """Let these be what the next step leaves."""
        self.drain()
        found = dict(sums)
        if found:
            self._pending = [found.pop(r) if r in found else torch.zeros_like(r.local()) for r in self.gradients]
            self._late = list(found.items())

    # -- sums -----------------------------------------------------------------------------------------------------------

    def _sums(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.layout is None or self.residuals is None or (self.codec == "1bit-adam" and not (self.momenta is not None and self.momenta.is_frozen)):
            return self._scattered(grads) if self.zero else self._summed(grads)
        shifts = self._add(grads)
        columns = self._by_matrix(exchange(self.layout, self._axis, self.residuals))
        out = []
        for i, resident in enumerate(self.gradients):
            out.append(_result(resident, self.layout.matrices[i], columns[i], shifts[i]))
            columns[i] = shifts[i] = None  # free
        return out

    def _nothing(self, resident: Resident) -> torch.Tensor:
        return torch.zeros(local_shape(resident.stored, self.mesh), dtype=resident.tensor.dtype, device=self.mesh.device)

    def _add(self, grads: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Add gradients to the residuals; returns what was added besides by all ranks together."""
        assert self.layout is not None and self.residuals is not None
        shifts: list[torch.Tensor | None] = []
        for i, (resident, matrix) in enumerate(zip(self.gradients, self.layout.matrices, strict=True)):
            residual, shift = self.residuals.own[i], None
            residual.add_(columns_of(grads[i], matrix))
            found = self.momenta.momentum(resident.tensor) if self.codec == "1bit-adam" and self.momenta is not None else None
            if found is not None:
                momentum, beta = found
                shift = columns_of(resident.local(momentum).to(residual.dtype), matrix) * (beta / (1 - beta))
                residual.add_(shift, alpha=1 / self._axis.size)
            shifts.append(shift)
        grads.clear()
        return shifts

    def _by_matrix(self, columns: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """This rank's part of each sum; None where it has no rows of it."""
        assert self.layout is not None
        if self.layout.is_gathered:
            return list(columns)
        found: list[torch.Tensor | None] = [None] * len(self.layout.matrices)
        for piece, part in zip(self.layout.owners[self._axis.index], columns, strict=True):
            found[piece.matrix] = part
        return found

    def _summed(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        sums = dict(enumerate(grads))
        grads.clear()
        sum_over_axes(sums, dict.fromkeys(sums, ("dp",)), lambda _: self._axis)
        return list(sums.values())

    def _scattered(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's rows of the sums, by reduce_scatters of padded rows, a bucket each."""
        found: dict[int, torch.Tensor] = {}
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            own = [i for i, grad in enumerate(grads) if grad.dtype == dtype]
            padded = [_padded(grads[i], self._axis.size) for i in own]
            at = 0
            for sizes in bucket_sizes([p.nbytes for p in padded]):
                group = slice(at, at + len(sizes))
                parts = _scatter(padded[group], self._axis)
                for i, part in zip(own[group], parts, strict=True):
                    local = self.gradients[i].local()
                    found[i] = part[: local.numel()].view(local.shape).clone()
                at += len(sizes)
        return [found[i] for i in range(len(grads))]


def _result(resident: Resident, matrix: Matrix, columns: torch.Tensor | None, shift: torch.Tensor | None) -> torch.Tensor:
    """A sum without `shift` as it lies at rest; `columns` None: this rank has no part of it."""
    local = resident.local()
    if columns is None:
        return torch.zeros_like(local)
    return tensor_of(columns if shift is None else columns - shift, matrix, local.shape).to(local.dtype)


def _padded(grad: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """[p, elements of one rank's rows], zeros at the end of the last rows."""
    rows = grad.reshape(grad.shape or (1,))
    each = row_range(rows.shape[0], 0, num_ranks)[1]
    out = rows.new_zeros((num_ranks * each, *rows.shape[1:]))
    out[: rows.shape[0]] = rows
    return out.view(num_ranks, -1)


def _scatter(padded: list[torch.Tensor], axis: Axis) -> list[torch.Tensor]:
    data = torch.cat(padded, dim=1).contiguous()
    out = data.new_empty(data.shape[1])
    wait(axis, "reduce_scatter", data.nbytes, lambda: scatter_into(out, data.flatten(), group=axis.group, async_op=True))
    return list(out.split([p.shape[1] for p in padded]))
