"""Deferred sums of gradients: what the backward passes leave as partial sums is completed once a step.

all-reduce in flat buckets, one axis of the mesh after the other for each that a gradient is partial over. The sums stay in the
buckets' memory: nothing is copied back.

Under ZeRO the data axis is FSDP2's and only local shards are summed here; parameter servers (runtime/servers.py) have it too.
Compressed and late sums over the data axis: runtime/reducer.py. Copies of a parameter on several stages: runtime/tied.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from runtime.collective import wait
from runtime.mesh import Axis, Mesh
from runtime.storage import Resident

BUCKET_BYTES = 25 * 2**20
Key = TypeVar("Key", bound=Hashable)


def deferred_axes(resident: Resident) -> tuple[str, ...]:
    """The axes over which this gradient is summed once a step, in order."""
    return tuple(name for name in resident.stored.partial if not ((resident.is_sharded or resident.is_served) and name == "dp"))


def reduce_over_axes(residents: tuple[Resident, ...], mesh: Mesh) -> None:
    """Complete the gradients over mesh axes. They are parts of the buckets' memory afterwards."""
    summed = {name for name, axis in mesh.axes.items() if axis.size > 1}
    axes = {r: deferred_axes(r) for r in residents if r.stored.partial and r.tensor.grad is not None}
    axes = {r: own for r, own in axes.items() if not summed.isdisjoint(own)}
    grads = {r: r.local(r.tensor.grad) for r in axes}
    for resident in grads:
        resident.tensor.grad = None
    sum_over_axes(grads, axes, mesh.axis)
    for resident, grad in grads.items():
        resident.tensor.grad = resident.like(grad)


def sum_over_axes(grads: dict[Key, torch.Tensor], axes: Mapping[Key, tuple[str, ...]], axis_of: Callable[[str], Axis]) -> None:
    """Put complete sums in the place of `grads`, which are partial over `axes`; all ranks in the same order. What was there is let go of
    bucket by bucket, so that no more than one bucket is held twice."""
    for place, name in sorted({(place, name) for key in grads for place, name in enumerate(axes[key])}):
        axis = axis_of(name)
        if axis.size == 1:
            continue
        by_dtype: dict[torch.dtype, list[Key]] = {}
        for key, grad in grads.items():
            if axes[key][place : place + 1] == (name,):
                by_dtype.setdefault(grad.dtype, []).append(key)
        for members in by_dtype.values():
            rest = iter(members)
            for sizes in bucket_sizes([grads[key].nbytes for key in members]):
                bucket = [next(rest) for _ in sizes]
                grads.update(zip(bucket, all_reduce_bucket([grads[key] for key in bucket], axis), strict=True))


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


def all_reduce_bucket(tensors: list[torch.Tensor], axis: Axis) -> list[torch.Tensor]:
    """The sum of each tensor over the axis, by one collective: views of one new tensor (nothing new on an axis of one rank)."""
    if axis.size == 1:
        return tensors
    flat = torch.cat([t.flatten() for t in tensors])
    wait(axis, "all_reduce", flat.nbytes, lambda: dist.all_reduce(flat, group=axis.group, async_op=True))
    return [piece.view(tensor.shape) for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True)]
