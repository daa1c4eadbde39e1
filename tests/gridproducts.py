"""One product Y = X A^T on a grid of ranks, cut by hand: how far it is from the whole one, what it sends and what it keeps.

The grids of `autoplan/schemes.py`: in a plane rows of X lie on "tpd" and "tpx", features on "tpy"; in a cube the axes i, j, k divide as Bian et al. 2021 do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from runtime.collective import all_gather_vary, raw_all_reduce, reduce_scatter
from runtime.mesh import Axis
from runtime.record import Traffic
from runtime.sharded_ops import gathered_linear


@dataclass(frozen=True)
class Sizes:
    """Rows, input features, output features."""

    m: int
    k: int
    n: int


GOLDEN = Sizes(64, 96, 128)


@dataclass(frozen=True)
class Found:
    """`errors` of Y, of X's and of A's gradient, relative; elements that this rank sends by rings, by pass; elements that autograd keeps."""

    errors: tuple[float, float, float]
    forward: float
    backward: float
    kept: int
    rows: tuple[float, ...]  # the first feature of this rank's rows

    @property
    def sent(self) -> float:
        return self.forward + self.backward


def whole(sizes: Sizes) -> tuple[torch.Tensor, ...]:
    """x, A, c, and the gradients of sum(y c) by x and A, in fp64."""
    made = ((sizes.m, sizes.k), (sizes.n, sizes.k), (sizes.m, sizes.n))
    x, weight, c = (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed, shape in enumerate(made))
    return x, weight, c, c @ weight, c.t() @ x


def cut(x: torch.Tensor, dim: int, *axes: Axis) -> torch.Tensor:
    """This rank's part, the first axis outermost."""
    for axis in axes:
        x = x.chunk(axis.size, dim)[axis.index]
    return x.contiguous()


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def ring_elements(traffic: Iterable[Traffic], axes: Iterable[Axis], width: int = 8) -> float:
    """Elements that a rank sends, by rings, on average."""
    sizes = {axis.name: axis.size for axis in axes}
    return sum((2 if t.kind == "all_reduce" else 1) * (sizes[t.axis] - 1) / sizes[t.axis] * t.num_bytes / width for t in traffic)


def _found(axes: tuple[Axis, ...], kept: int, pairs: tuple[tuple[torch.Tensor, torch.Tensor], ...], x: torch.Tensor) -> Found:
    every = [use for recorder in {id(axis.recorder): axis.recorder for axis in axes}.values() for use in recorder.traffic()]
    forward, backward = ([use for use in every if (use.phase == "forward") == is_forward] for is_forward in (True, False))
    y, dx, dweight = (distance(found, wanted) for found, wanted in pairs)
    return Found((y, dx, dweight), ring_elements(forward, axes), ring_elements(backward, axes), kept, tuple(x.detach()[:, 0].tolist()))


def plane_product(d: Axis, i: Axis, j: Axis, sizes: Sizes = GOLDEN, *, sums_depth: bool = True) -> Found:
    """2D where `d` is one rank, else 2.5D: A lies on i and j alike at every depth."""
    x, weight, c, dx, dweight = whole(sizes)
    local_x = cut(cut(x, 0, d, i), 1, j).requires_grad_()
    local_weight = cut(cut(weight, 0, j), 1, i).requires_grad_()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        y = gathered_linear(local_x, local_weight, axes=(i, j), gathers=((1, 1, 1, sizes.k, 1), (0, 1, 1, sizes.k, 1)))
    for axis in (d, i, j):
        axis.recorder.phase = "backward"
    y.backward(cut(cut(c, 0, d, i), 1, j))
    assert local_x.grad is not None and local_weight.grad is not None
    grad = raw_all_reduce(local_weight.grad, d) if sums_depth else local_weight.grad
    wanted_y, wanted_dx = cut(cut(F.linear(x, weight), 0, d, i), 1, j), cut(cut(dx, 0, d, i), 1, j)
    return _found((d, i, j), sum(kept), ((y.detach(), wanted_y), (local_x.grad, wanted_dx), (grad, cut(cut(dweight, 0, j), 1, i))), local_x)


def cube_product(i: Axis, j: Axis, k: Axis, sizes: Sizes = GOLDEN, *, keeps_gathered: bool = False) -> Found:
    """What was gathered is kept for the backward pass, as Bian et al. count, or gathered again there."""
    q = j.size
    x, weight, c, dx, dweight = whole(sizes)
    local_x = cut(cut(x, 0, i, j), 1, k).requires_grad_()
    local_weight = cut(cut(weight, 0, j), 1, k, i).requires_grad_()
    kept: list[int] = []
    of_x, of_weight = (0, 1, sizes.m // q, 1), (1, 1, sizes.k // q, 1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        if keeps_gathered:
            part = F.linear(all_gather_vary(local_x, *of_x, axis=j), all_gather_vary(local_weight, *of_weight, axis=i))
        else:
            part = gathered_linear(local_x, local_weight, axes=(i, j), gathers=((1, *of_weight), (0, *of_x)))
        y = reduce_scatter(part, *of_x, axis=k)
    for axis in (i, j, k):
        axis.recorder.phase = "backward"
    y.backward(cut(cut(c, 0, i, k), 1, j))
    assert local_x.grad is not None and local_weight.grad is not None
    wanted_y, wanted_dx = cut(cut(F.linear(x, weight), 0, i, k), 1, j), cut(cut(dx, 0, i, j), 1, k)
    return _found((i, j, k), sum(kept), ((y.detach(), wanted_y), (local_x.grad, wanted_dx), (local_weight.grad, cut(cut(dweight, 0, j), 1, k, i))), local_x)
