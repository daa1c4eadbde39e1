"""Deferred sums of gradients: what the backward passes leave as partial sums is completed once a step.

    axes of the mesh   all-reduce in flat buckets, one after the other for each axis a gradient is partial over
    tied stages        the copies of a parameter on several stages: summed by the first stage in stage order and sent back,
                       so that the copies stay equal bit for bit

Under ZeRO the data axis is FSDP2's and only local shards are summed here; parameter servers (runtime/servers.py) have it too.
Compressed and late sums over the data axis: runtime/reducer.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from runtime.call import spec_of
from runtime.collective import wait
from runtime.errors import failing
from runtime.mesh import Axis, Mesh
from runtime.paceclock import PacedClock
from runtime.storage import Resident

BUCKET_BYTES = 25 * 2**20


def deferred_axes(resident: Resident) -> tuple[str, ...]:
    """The axes over which this gradient is summed once a step, in order."""
    return tuple(name for name in resident.stored.partial if not ((resident.is_sharded or resident.is_served) and name == "dp"))


@dataclass(frozen=True, slots=True)
class Summand:
    """A local gradient, and the axes over which it is a partial sum."""

    grad: torch.Tensor
    axes: tuple[str, ...]


def reduce_over_axes(residents: tuple[Resident, ...], mesh: Mesh) -> None:
    """Complete the gradients over mesh axes, in place."""
    sum_over_axes([Summand(r.local(r.tensor.grad), deferred_axes(r)) for r in residents if r.tensor.grad is not None], mesh)


def sum_over_axes(summands: Sequence[Summand], mesh: Mesh) -> None:
    """Complete partial sums in place, all ranks in the same order."""
    for axis, grads in axis_buckets(summands, mesh):
        all_reduce_bucket(grads, axis)


def axis_buckets(summands: Sequence[Summand], mesh: Mesh) -> Iterator[tuple[Axis, list[torch.Tensor]]]:
    """The gradients that are summed together, in the order in which the sums are made."""
    keys = sorted({(place, name) for summand in summands for place, name in enumerate(summand.axes)})
    for place, name in keys:
        axis = mesh.axis(name)
        if axis.size == 1:
            continue
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for summand in summands:
            if summand.axes[place : place + 1] == (name,):
                by_dtype.setdefault(summand.grad.dtype, []).append(summand.grad)
        for grads in by_dtype.values():
            for bucket in buckets(grads):
                yield axis, bucket


def buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Consecutive tensors of at most BUCKET_BYTES together, or a single larger one."""
    rest = iter(tensors)
    for sizes in bucket_sizes([t.nbytes for t in tensors]):
        yield [next(rest) for _ in sizes]


def bucket_sizes(sizes: list[int]) -> Iterator[list[int]]:
    """The bytes of consecutive tensors, bucket by bucket."""
    current: list[int] = []
    for size in sizes:
        if current and sum(current) + size > BUCKET_BYTES:
            yield current
            current = []
        current.append(size)
    if current:
        yield current


def all_reduce_bucket(tensors: list[torch.Tensor], axis: Axis) -> None:
    """Sum each tensor over the axis in place, by one collective."""
    if axis.size == 1:
        return
    flat = torch.cat([t.flatten() for t in tensors])
    wait(axis, "all_reduce", flat.nbytes, lambda: dist.all_reduce(flat, group=axis.group, async_op=True))
    for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(piece.view_as(tensor))


def sum_tied(residents: tuple[Resident, ...], stage_ranks: tuple[int, ...], mesh: Mesh) -> None:
    """Sum the gradients of each tied parameter over the stages that keep it; afterwards all hold the sum.

    A stage without a gradient counts as zero. Parameters are taken in order of their names, the same on every rank.
    """
    tied = {r.stored.fqn: r.stored for r in residents if len(r.stored.stages) > 1 and r.stored.requires_grad and r.stored.kind == "parameter"}
    me = mesh.axis("pp").index
    for fqn in sorted(tied):
        own = sorted((r for r in residents if r.stored.fqn == fqn), key=lambda r: r.stage)
        grads = [r.local(r.tensor.grad) if r.tensor.grad is not None else torch.zeros_like(r.local()) for r in own]
        ranks = list(dict.fromkeys(stage_ranks[s] for s in sorted(tied[fqn].stages)))
        total = grads[0].clone()
        for grad in grads[1:]:
            total += grad
        if len(ranks) > 1:
            total = _star_sum(total, ranks, me, mesh)
        for resident in own:
            resident.tensor.grad = resident.like(total.clone())


def _star_sum(own: torch.Tensor, ranks: list[int], me: int, mesh: Mesh) -> torch.Tensor:
    """The sum over some "pp" coordinates, added by the first of them in order and sent back."""
    axis = mesh.axis("pp")
    up, down = mesh.channels["backward up"], mesh.channels["backward down"]
    first, others = ranks[0], ranks[1:]
    clock = axis.recorder.clock if isinstance(axis.recorder.clock, PacedClock) else None
    spec = spec_of(own)

    def send(tensor: torch.Tensor, to: int) -> None:
        start = axis.recorder.mark()
        sent = tensor if clock is None else clock.seal(tensor, axis.rank, axis.ranks[to])
        with failing(lambda: f"rank {mesh.rank}: send of a tied gradient to rank {axis.ranks[to]} on axis 'pp'", mesh.timeout_s):
            mesh.guard.wait_transfer(dist.isend(sent, axis.ranks[to], group=up if to > me else down), mesh.device)
        axis.recorder.add("send", "tied", tensor.nbytes, start)

    def receive(source: int) -> torch.Tensor:
        buffer = torch.empty_like(own, memory_format=torch.contiguous_format) if clock is None else clock.envelope(spec)
        with failing(lambda: f"rank {mesh.rank}: receive of a tied gradient from rank {axis.ranks[source]} on axis 'pp'", mesh.timeout_s):
            mesh.guard.wait_transfer(dist.irecv(buffer, axis.ranks[source], group=up if me > source else down), mesh.device)
        return buffer if clock is None else clock.opened(buffer, spec)

    if me != first:
        send(own.contiguous(), first)
        return receive(first)
    total = own.contiguous()
    for other in others:
        total = total + receive(other)
    for other in others:
        send(total, other)
    return total
