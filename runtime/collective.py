"""Collectives, raw and differentiable: the communication that instructions name ("runtime.all_reduce", ...).

A dimension is seen as [outer, size, inner] and rank r of p holds `size/p` consecutive entries of the middle
one (`Chunk` in runtime/program.py). `size` is always the full length; `x` is the local tensor. Where p does not divide `size`, ranks
have room for one entry more than some of them hold (runtime/pieces.py): messages are of equal sizes, what is gathered is real, what
is cut is filled with copies, gradients with zeros. Each function has the backward pass of autoplan's layout table:

    function          forward         backward        reads
    vary              -               all_reduce      a copy by work that differs by rank
    all_reduce        all_reduce      -               a partial sum, whole
    all_gather        all_gather      slice           a part, whole
    all_gather_vary   all_gather      reduce_scatter  a part, whole, by work that differs by rank
    slice             slice           all_gather      a whole value, in part
    reduce_scatter    reduce_scatter  all_gather      a partial sum, in part
    all_to_all        all_to_all      all_to_all      a part, divided along another dimension
    share             -               / p             a copy whose complete gradient will be summed over the axis
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from runtime import pieces
from runtime.errors import failing
from runtime.mesh import Axis
from runtime.paceclock import PacedClock

# Named all_gather_single and reduce_scatter_single from torch 2.13 on.
gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_into: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Part(NamedTuple):
    """How a dimension is divided: `dim` is [outer, size, inner], cut along the middle."""

    dim: int
    outer: int
    size: int
    inner: int

    def parts(self, x: torch.Tensor, num_parts: int, *, is_grad: bool = False) -> torch.Tensor:
        """A whole tensor as [p, *local shape], a view where it can be; the rest of a part filled with copies, of a gradient with zeros."""
        each = pieces.most(self.size, num_parts)
        shape = x.shape
        seen = x.reshape(*shape[: self.dim], self.outer, self.size, self.inner, *shape[self.dim + 1 :])
        if self.size % num_parts:
            held = [(pieces.start(self.size, num_parts, r), pieces.count(self.size, num_parts, r)) for r in range(num_parts)]
            seen = seen.index_select(self.dim + 1, torch.tensor([first + min(i, num - 1) for first, num in held for i in range(each)], device=x.device))
            if is_grad:
                spare = torch.tensor([i >= num for _, num in held for i in range(each)], device=x.device)
                seen = seen.masked_fill_(spare.view(-1, *(1,) * (seen.dim() - self.dim - 2)), 0)
        cut = seen.unflatten(self.dim + 1, (num_parts, each))
        return cut.movedim(self.dim + 1, 0).flatten(self.dim + 1, self.dim + 3)

    def whole(self, parts: torch.Tensor) -> torch.Tensor:
        """The inverse of `parts`: [p, *local shape] -> whole."""
        num_parts, shape = parts.shape[0], parts.shape[1:]
        each = pieces.most(self.size, num_parts)
        cut = parts.reshape(num_parts, *shape[: self.dim], self.outer, each, self.inner, *shape[self.dim + 1 :]).movedim(0, self.dim + 1)
        if self.size % num_parts:
            held = [r * each + i for r in range(num_parts) for i in range(pieces.count(self.size, num_parts, r))]
            cut = cut.flatten(self.dim + 1, self.dim + 2).index_select(self.dim + 1, torch.tensor(held, device=parts.device))
        return cut.reshape(*shape[: self.dim], self.outer * self.size * self.inner, *shape[self.dim + 1 :])

    def local(self, num_parts: int) -> int:
        """Entries of the dimension that a rank has room for."""
        return self.outer * pieces.most(self.size, num_parts) * self.inner

    def check(self, x: torch.Tensor, length: int, num_parts: int) -> None:
        assert self.size >= num_parts, f"{self} does not divide into {num_parts}"
        assert x.shape[self.dim] == length, f"dimension {self.dim} of {tuple(x.shape)} should have {length} entries: {self} over {num_parts}"


def complete(axis: Axis, kind: str, num_bytes: int, issue: Callable[[], Any]) -> Any:
    """Run one collective to its end; the recorder's mark at its begin. `issue` starts it and returns its work (None: it is over already).

    Raises CommunicationError naming rank, axis and kind, and StageError where another rank fails meanwhile.
    """
    start, clock = axis.recorder.mark(), axis.recorder.clock
    ready_s = clock.ready_s() if isinstance(clock, PacedClock) else 0.0
    with failing(lambda: f"rank {axis.rank}: {kind} of {num_bytes} bytes on axis {axis.name!r} (ranks {list(axis.ranks)})", axis.timeout_s):
        work = issue()
        if work is not None:
            axis.guard.wait_collective(work, axis.device, axis.timeout_s)
        if isinstance(clock, PacedClock):
            moment = torch.tensor([ready_s], dtype=torch.float64)
            axis.guard.wait_collective(dist.all_reduce(moment, dist.ReduceOp.MAX, group=axis.group, async_op=True), axis.device, axis.timeout_s)
            clock.reach(moment.item() + clock.links.seconds(kind, axis.name, num_bytes, axis.ranks))
    return start


class Begun:
    """A collective that runs beside what its ranks do next. `issue` starts it and returns its work. Recorded until it is waited for; with
    `is_hidden`, beside passes, as taking no time.

    All ranks of the axis begin it at the same place among their collectives, and wait for it later, each where it likes.
    """

    def __init__(self, axis: Axis, kind: str, num_bytes: int, issue: Callable[[], Any], *, is_hidden: bool = False) -> None:
        self._axis, self._what = axis, f"rank {axis.rank}: {kind} of {num_bytes} bytes on axis {axis.name!r} (ranks {list(axis.ranks)})"
        self._record = None if is_hidden else axis.recorder.later(kind, axis.name, num_bytes)
        if is_hidden:
            start = axis.recorder.mark()
            axis.recorder.add(kind, axis.name, num_bytes, start, start)
        with failing(lambda: self._what, axis.timeout_s):
            self._work = issue()

    def wait(self) -> None:
        """Until it is over. Raises as `complete`."""
        with failing(lambda: self._what, self._axis.timeout_s):
            self._axis.guard.wait_collective(self._work, self._axis.device, self._axis.timeout_s)
        if self._record is not None:
            self._record()


def wait(axis: Axis, kind: str, num_bytes: int, issue: Callable[[], Any]) -> None:
    """`complete`, recorded as one collective."""
    axis.recorder.add(kind, axis.name, num_bytes, complete(axis, kind, num_bytes, issue))


def meet(axis: Axis, moment_s: float) -> torch.Tensor:
    """[ranks]: the moments at which the ranks of an axis come. Raises as `complete`."""
    came = torch.full((axis.size,), -math.inf, dtype=torch.float64)
    came[axis.index] = moment_s
    with failing(lambda: f"rank {axis.rank}: meeting of ranks {list(axis.ranks)}", axis.timeout_s):
        axis.guard.wait_collective(dist.all_reduce(came, dist.ReduceOp.MAX, group=axis.group, async_op=True), axis.device, axis.timeout_s)
    return came


def everyone(axis: Axis, value: Any) -> list[Any]:
    """`value` of every rank of an axis, in order. All of them call it. Raises CommunicationError."""
    if axis.size == 1:
        return [value]
    found: list[Any] = [None] * axis.size
    with axis.guard.waiting(), failing(lambda: f"rank {axis.rank}: exchange of objects on axis {axis.name!r} (ranks {list(axis.ranks)})", axis.timeout_s):
        dist.all_gather_object(found, value, group=axis.group)
    return found


def raw_all_reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum over the axis, a new tensor of x's shape."""
    out = x.clone(memory_format=torch.contiguous_format)
    if axis.size > 1:
        wait(axis, "all_reduce", out.nbytes, lambda: dist.all_reduce(out, group=axis.group, async_op=True))
    return out


def raw_all_gather(x: torch.Tensor, part: Part, axis: Axis) -> torch.Tensor:
    if axis.size == 1:
        return x
    part.check(x, part.local(axis.size), axis.size)
    out = x.new_empty((axis.size, *x.shape))
    wait(axis, "all_gather", out.nbytes, lambda: gather_into(out.flatten(), x.contiguous().flatten(), group=axis.group, async_op=True))
    return part.whole(out)


def raw_slice(x: torch.Tensor, part: Part, axis: Axis, *, is_grad: bool = False) -> torch.Tensor:
    if axis.size == 1:
        return x
    part.check(x, part.outer * part.size * part.inner, axis.size)
    return part.parts(x, axis.size, is_grad=is_grad)[axis.index].contiguous()


def raw_reduce_scatter(x: torch.Tensor, part: Part, axis: Axis, *, is_grad: bool = False) -> torch.Tensor:
    if axis.size == 1:
        return x
    part.check(x, part.outer * part.size * part.inner, axis.size)
    parts = part.parts(x, axis.size, is_grad=is_grad).contiguous()
    out = torch.empty_like(parts[0])
    wait(axis, "reduce_scatter", parts.nbytes, lambda: scatter_into(out.flatten(), parts.flatten(), group=axis.group, async_op=True))
    return out


def raw_all_to_all(x: torch.Tensor, gathered: Part, split: Part, axis: Axis, *, is_grad: bool = False) -> torch.Tensor:
    if axis.size == 1:
        return x
    gathered.check(x, gathered.local(axis.size), axis.size)
    split.check(x, split.outer * split.size * split.inner, axis.size)
    parts = split.parts(x, axis.size, is_grad=is_grad).contiguous()
    out = torch.empty_like(parts)
    wait(axis, "all_to_all", parts.nbytes * axis.size, lambda: dist.all_to_all_single(out, parts, group=axis.group, async_op=True))
    return gathered.whole(out)


class _Vary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return raw_all_reduce(grads[0], ctx.axis), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, known: torch.Tensor | None) -> torch.Tensor:
        return raw_all_reduce(x, axis) if known is None else known.view_as(known)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: Part, axis: Axis) -> torch.Tensor:
        ctx.part, ctx.axis = part, axis
        return raw_all_gather(x, part, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return raw_slice(grads[0], ctx.part, ctx.axis, is_grad=True), None, None


class _AllGatherVary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: Part, axis: Axis) -> torch.Tensor:
        ctx.part, ctx.axis = part, axis
        return raw_all_gather(x, part, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return raw_reduce_scatter(grads[0], ctx.part, ctx.axis, is_grad=True), None, None


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: Part, axis: Axis) -> torch.Tensor:
        ctx.part, ctx.axis = part, axis
        return raw_slice(x, part, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return raw_all_gather(grads[0], ctx.part, ctx.axis), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: Part, axis: Axis, known: torch.Tensor | None) -> torch.Tensor:
        ctx.part, ctx.axis = part, axis
        return raw_reduce_scatter(x, part, axis) if known is None else known.view_as(known)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return raw_all_gather(grads[0], ctx.part, ctx.axis), None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gathered: Part, split: Part, axis: Axis) -> torch.Tensor:
        ctx.gathered, ctx.split, ctx.axis = gathered, split, axis
        return raw_all_to_all(x, gathered, split, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return raw_all_to_all(grads[0], ctx.split, ctx.gathered, ctx.axis, is_grad=True), None, None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / ctx.axis.size, None


def vary(x: torch.Tensor, *, axis: Axis) -> torch.Tensor:
    """Read a whole value by work that differs by rank: identity; the gradient is summed over the axis."""
    return _Vary.apply(x, axis) if axis.size > 1 else x  # type: ignore[return-value]


def all_reduce(x: torch.Tensor, *, axis: Axis, known: torch.Tensor | None = None) -> torch.Tensor:
    """Complete a partial sum; the gradient passes unchanged. `known`: the sum, where it is there already."""
    return _AllReduce.apply(x, axis, known) if axis.size > 1 or known is not None else x  # type: ignore[return-value]


def all_gather(x: torch.Tensor, dim: int, outer: int, size: int, inner: int, *, axis: Axis) -> torch.Tensor:
    """The whole of a divided tensor; the gradient is sliced."""
    return _AllGather.apply(x, Part(dim, outer, size, inner), axis)  # type: ignore[return-value]


def all_gather_vary(x: torch.Tensor, dim: int, outer: int, size: int, inner: int, *, axis: Axis) -> torch.Tensor:
    """The whole of a divided tensor, read by work that differs by rank; the gradient is reduce-scattered."""
    return _AllGatherVary.apply(x, Part(dim, outer, size, inner), axis)  # type: ignore[return-value]


def slice(x: torch.Tensor, dim: int, outer: int, size: int, inner: int, *, axis: Axis) -> torch.Tensor:
    """This rank's part of a whole tensor; the gradient is gathered."""
    return _Slice.apply(x, Part(dim, outer, size, inner), axis)  # type: ignore[return-value]


def reduce_scatter(x: torch.Tensor, dim: int, outer: int, size: int, inner: int, *, axis: Axis, known: torch.Tensor | None = None) -> torch.Tensor:
    """This rank's part of the sum over the axis; the gradient is gathered. `known`: that part, where it is there already."""
    return _ReduceScatter.apply(x, Part(dim, outer, size, inner), axis, known)  # type: ignore[return-value]


def all_to_all(x: torch.Tensor, dim: int, outer: int, size: int, inner: int, dim2: int, outer2: int, size2: int, inner2: int, *, axis: Axis) -> torch.Tensor:
    """Gather the first description and divide the second; the gradient goes the other way."""
    return _AllToAll.apply(x, Part(dim, outer, size, inner), Part(dim2, outer2, size2, inner2), axis)  # type: ignore[return-value]


def share(x: torch.Tensor, *, axis: Axis) -> torch.Tensor:
    """Identity; the gradient is divided by the number of ranks, because a later sum over the axis counts it once for each."""
    return _Share.apply(x, axis) if axis.size > 1 else x  # type: ignore[return-value]
