"""Deferred sums of gradients: what the backward passes leave as partial sums is completed once a step.

all-reduce in flat buckets, one axis of the mesh after the other for each that a gradient is partial over. The buckets of an axis are under way
together, each begun as soon as it is put together: of S bytes in all, a bucket has S/4 at most, but no more than 25 MiB and no less than 1 MiB. The
sums stay in the buckets' memory: nothing is copied back.

Under ZeRO the data axis is FSDP2's and only local shards are summed here; parameter servers (runtime/servers.py) have it too.
Compressed and late sums over the data axis: runtime/reducer.py. Copies of a parameter on several stages: runtime/tied.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from runtime.collective import Begun, wait
from runtime.mesh import Axis, Mesh
from runtime.paceclock import PacedClock
from runtime.storage import Resident

BUCKET_BYTES = 25 * 2**20
_LEAST_BYTES, _IN_FLIGHT = 2**20, 4
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
    bucket by bucket, as each is put together, so that no more than one bucket is held twice."""
    for place, name in sorted({(place, name) for key in grads for place, name in enumerate(axes[key])}):
        axis = axis_of(name)
        if axis.size == 1:
            continue
        by_dtype: dict[torch.dtype, list[Key]] = {}
        for key, grad in grads.items():
            if axes[key][place : place + 1] == (name,):
                by_dtype.setdefault(grad.dtype, []).append(key)
        under_way: list[Begun] = []
        for members in by_dtype.values():
            rest = iter(members)
            for sizes in sum_buckets([grads[key].nbytes for key in members]):
                bucket = [next(rest) for _ in sizes]
                sums, begun = _begin_sum([grads[key] for key in bucket], axis)
                grads.update(zip(bucket, sums, strict=True))
                under_way += begun
        for begun in under_way:
            begun.wait()


def sum_limit_bytes(total: int) -> int:
    """Bytes of a bucket, of `total` in all that are summed at once."""
    return min(BUCKET_BYTES, max(_LEAST_BYTES, -(-total // _IN_FLIGHT)))


def sum_buckets(sizes: list[int]) -> Iterator[list[int]]:
    """The bytes of consecutive tensors that are summed at once, bucket by bucket."""
    return bucket_sizes(sizes, sum_limit_bytes(sum(sizes)))


def bucket_sizes(sizes: list[int], limit_bytes: int = BUCKET_BYTES) -> Iterator[list[int]]:
    """The bytes of consecutive tensors, bucket by bucket."""
    current: list[int] = []
    for size in sizes:
        if current and sum(current) + size > limit_bytes:
            yield current
            current = []
        current.append(size)
    if current:
        yield current


def all_reduce_bucket(tensors: list[torch.Tensor], axis: Axis) -> list[torch.Tensor]:
    """The sum of each tensor over the axis, by one collective: views of one new tensor (nothing new on an axis of one rank)."""
    if axis.size == 1:
        return tensors
    sums, begun = _begin_sum(tensors, axis)
    for one in begun:
        one.wait()
    return sums


def _begin_sum(tensors: list[torch.Tensor], axis: Axis) -> tuple[list[torch.Tensor], list[Begun]]:
    """What will be the sums, once what was begun is over. On a paced device all is over at once: its clock takes one after the other."""
    flat = torch.cat([t.flatten() for t in tensors])
    sums = [piece.view(tensor.shape) for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True)]

    def issue() -> Any:
        return dist.all_reduce(flat, group=axis.group, async_op=True)

    if isinstance(axis.recorder.clock, PacedClock):
        wait(axis, "all_reduce", flat.nbytes, issue)
        return sums, []
    return sums, [Begun(axis, "all_reduce", flat.nbytes, issue)]
