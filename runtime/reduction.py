"""Deferred sums of gradients: what the backward passes leave as partial sums is completed once a step.

all-reduce in flat buckets, one axis of the mesh after the other for each that a gradient is partial over.

Under ZeRO the data axis is FSDP2's and only local shards are summed here; parameter servers (runtime/servers.py) have it too.
Compressed and late sums over the data axis: runtime/reducer.py. Copies of a parameter on several stages: runtime/tied.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from runtime.collective import wait
from runtime.mesh import Axis, Mesh
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
