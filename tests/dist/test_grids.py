"""Tensor parallelism on grids of ranks: 2D, 2.5D and 3D products move their closed forms, keep their fractions, and equal the plain ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import autoplan
from autoplan.lower import lower
from runtime.mesh import build_mesh
from runtime.program import Program
from runtime.sharded_ops import split_layer_norm
from tests.dist import parity
from tests.dist.launch import run_ranks
from tests.dist.parity import Case, run_cases
from tests.gridproducts import GOLDEN, Found, cube_product, cut, distance, plane_product, ring_elements
from tests.zoo import ZOO


class Layer(nn.Module):
    """A transformer layer between two products, with its loss."""

    def __init__(self, width: int = 32, heads: int = 4, classes: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.enter, self.leave = nn.Linear(width, width), nn.Linear(width, classes)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return F.cross_entropy(self.leave(x).flatten(0, 1), labels.flatten())


def layer() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Layer(), {"x": torch.randn(8, 6, 32), "labels": torch.randint(0, 12, (8, 6))}


class Products(nn.Module):
    """Nothing but products and what is done by element between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*widths, bias=False) for widths in WIDTHS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for product in self.layers:
            x = torch.tanh(product(x))
        return (x - y).square().mean()


@dataclass(frozen=True)
class Share:
    """Bytes that a rank has at rest, and that autograd keeps beside them from forward to backward; both as the plan says; elements that all ranks send."""

    parameter_bytes: int
    saved_bytes: int
    planned_parameter_bytes: int
    planned_saved_bytes: int
    sent: float


WIDTHS = ((16, 32), (32, 16)) * 2
WHOLE = Share(*(8 * 4 * 16 * 32, 8 * 8 * (16 + 32 + 16 + 32 + 16 + 16)) * 2, 0)  # 8 rows in fp64: what every product and tanh reads, and the difference


def local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def share_of(**how: Any) -> Share:
    torch.manual_seed(0)
    model, batch = Products().double(), {name: torch.randn(8, 16, dtype=torch.float64) for name in ("x", "y")}
    ranks = dist.get_world_size()
    pm = autoplan.parallelize(model, batch, cluster=f"cpu:1x{ranks}", constraints=autoplan.Constraints(**how), optimizer="sgd")
    own = {local(p).untyped_storage().data_ptr(): local(p).nbytes for p in pm.parameters()}
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = local(x).untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        pm.forward_backward(batch)
    memory = pm.plan.forecast.stages[0].memory
    mesh = pm.executor.mesh
    traffic = [use for use in mesh.recorder.traffic() if use.axis in mesh.axes and use.num_bytes > 16 * use.count]  # more than the loss
    sent = ring_elements(traffic, mesh.axes.values()) * ranks
    return Share(sum(own.values()), sum(size for place, size in kept.items() if place not in own), memory.parameters, memory.activations, sent)


def fraction(parameters: int, saved: int, sent: Callable[[int, int, int, bool], int], loss: int = 0) -> Share:
    """One in so many of the whole; `sent` of a product's MK, KN and MN and whether its input has a gradient, and `loss` besides."""
    shares = WHOLE.parameter_bytes // parameters, WHOLE.saved_bytes // saved
    return Share(*shares, *shares, loss + sum(sent(8 * k, k * n, 8 * n, place > 0) for place, (k, n) in enumerate(WIDTHS)))


GRID, DEPTH, CUBE = (("tpx", 2), ("tpy", 2)), (("tpd", 2), ("tpx", 2), ("tpy", 2)), (("tpx", 2), ("tpy", 2), ("tpz", 2))


def plane(axes: tuple[tuple[str, int], ...], *, sums_depth: bool) -> Found:
    mesh = build_mesh(axes, timeout_s=60)
    return plane_product(mesh.axis("tpd"), mesh.axis("tpx"), mesh.axis("tpy"), sums_depth=sums_depth)


def cube(*, keeps_gathered: bool) -> Found:
    mesh = build_mesh(CUBE, timeout_s=60)
    return cube_product(mesh.axis("tpx"), mesh.axis("tpy"), mesh.axis("tpz"), keeps_gathered=keeps_gathered)


def norm_of_large_numbers() -> float:
    axis = build_mesh((("tp", dist.get_world_size()),), timeout_s=60).axis("tp")
    x = 1e4 + torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    found = split_layer_norm(cut(x, 1, axis), (64,), axis=axis)
    return distance(found.double(), cut(F.layer_norm(x.double(), (64,)), 1, axis))


def unsummed(*args: Any, **how: Any) -> tuple[Program, ...]:
    """What a plan becomes, without the sums of gradients over depth."""
    drop = lambda stored: replace(stored, partial=tuple(axis for axis in stored.partial if axis != "tpd"))  # noqa: E731
    programs = lower(*args, **how)
    assert any("tpd" in stored.partial for program in programs for stage in program.stages for stored in stage.stored)
    return tuple(replace(program, stages=tuple(replace(s, stored=tuple(map(drop, s.stored))) for s in program.stages)) for program in programs)


def without_sums_over_depth() -> parity.Outcome:
    with patch("autoplan.programs.lower", unsummed):
        return run_cases([Case("mlp", constraints=dict(tensor="2.5d", tp=8), dtype="float64")])[0]


def on_four() -> tuple[Any, ...]:
    return plane(GRID, sums_depth=True), norm_of_large_numbers(), share_of(tensor="2d", tp=4), run_cases(SEARCHED_4)


def on_eight() -> tuple[Any, ...]:
    products = plane(DEPTH, sums_depth=True), plane(DEPTH, sums_depth=False)
    shares = share_of(tensor="2.5d", tp=8), share_of(tensor="3d", tp=8)
    return *products, cube(keeps_gathered=False), cube(keeps_gathered=True), shares, without_sums_over_depth(), run_cases(SEARCHED_8, {**ZOO, "layer": layer})


SEARCHED_4 = [Case("mlp", constraints=dict(tensor="2d", tp=4), dtype="float64"), Case("gpt2", constraints=dict(tensor="2d", tp=4), dtype="float64")]
SEARCHED_8 = [Case("mlp", constraints=how, dtype="float64") for how in (dict(tensor="2.5d", tp=8), dict(tensor="1.5d", tp=4), dict(tensor="3d"))]
SEARCHED_8 += [Case("layer", constraints=dict(tensor="3d"), dtype="float64")]


def check(outcome: parity.Outcome) -> None:
    assert not outcome.refused, f"{outcome.case}: {outcome.refused}"
    assert outcome.missing == (), f"{outcome.case}: one side alone has {outcome.missing}"
    assert outcome.grad_error <= 1e-10 and outcome.weight_error <= 1e-10, f"{outcome.case}: {outcome}"
    for rank, held in enumerate(outcome.held):
        assert held.sent == held.planned_sent, f"{outcome.case}: rank {rank} sent {held.sent}, its program says {held.planned_sent}"


MK, KN, MN = GOLDEN.m * GOLDEN.k, GOLDEN.k * GOLDEN.n, GOLDEN.m * GOLDEN.n


@pytest.mark.timeout(600)
def test_a_plane_moves_the_volume_of_summa_and_keeps_a_quarter_of_everything() -> None:
    for product, norm_error, share, outcomes in run_ranks(on_four, 4, timeout_s=500):
        assert max(product.errors) <= 1e-10
        assert product.sent * 4 == 3 * (MK + KN) == 55296
        assert product.kept == (MK + KN) // 4, "nothing gathered is kept for the backward pass"
        assert share == fraction(4, 4, lambda mk, kn, mn, passes: (2 + passes) * (mk + kn), loss=8 * 16), "nothing is laid out anew between products"
        assert norm_error <= 1e-3, "the variance is taken about the mean"
        for outcome in outcomes:
            check(outcome)
        assert all(held.parameter_bytes == outcomes[0].dense_bytes // 4 for held in outcomes[0].held)


@pytest.mark.timeout(600)
def test_depth_holds_other_rows_and_sums_gradients_and_a_cube_keeps_an_eighth() -> None:
    ranks = run_ranks(on_eight, 8, timeout_s=500)
    for deep, apart, again, once, shares, _, outcomes in ranks:
        assert max(deep.errors) <= 1e-10
        assert deep.sent * 8 == 3 * (MK + 2 * KN) + 2 * KN == 116736
        assert deep.kept == MK // 8 + KN // 4
        assert apart.errors[2] > 1e-2, "without the sum over depth the weight's gradient is another one"
        assert max(*again.errors, *once.errors) <= 1e-10
        assert once.sent * 8 == 2 * (MK + KN + MN) == 53248, "the closed form of the paper"
        assert once.kept == (MK + KN) // 4, "which keeps what it gathered"
        assert again.sent * 8 == 53248 + MK + KN == 71680, "both operands are gathered again in the backward pass"
        assert again.kept == (MK + KN) // 8, "so that an eighth is kept"
        deeper = fraction(4, 8, lambda mk, kn, mn, passes: (2 + passes) * (mk + 2 * kn) + 2 * kn, loss=8 * 16)  # squares, summed whole
        eighth = fraction(8, 8, lambda mk, kn, mn, passes: 2 * (mk + kn + mn) + passes * (mk + kn))
        assert shares == (deeper, eighth), "every depth has its own rows and the weights of the plane; a cube divides all by eight; products come in pairs"
        for outcome in outcomes:
            check(outcome)
        cubes = [outcome for outcome in outcomes if outcome.case.constraints == dict(tensor="3d")]
        assert len(cubes) == 2
        for outcome in cubes:
            assert not any(use.kind == "all_to_all" for use in outcome.held[0].sent), "products come in pairs: nothing is laid out anew between them"
            assert {held.parameter_bytes for held in outcome.held} == {held.planned_parameter_bytes for held in outcome.held}
            assert outcome.held[0].parameter_bytes <= outcome.dense_bytes // 8 * 1.5, "biases and norms rest on two axes, matrices on three"
    mutant = ranks[0][5]  # rank 0 has the whole gradients
    assert mutant.grad_error > 1e-2 and mutant.weight_error > 1e-4, "without the sums over depth a whole model's gradients are others"
    assert len({rank[0].rows for rank in ranks}) == 8, "each rank has rows, or features, of its own"
