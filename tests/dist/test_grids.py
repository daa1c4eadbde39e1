"""Tensor parallelism on grids of ranks: 2D, 2.5D and 3D products move their closed forms, keep their fractions, and equal the plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from runtime.collective import all_gather_vary, raw_all_reduce, reduce_scatter
from runtime.mesh import Axis, Mesh, build_mesh
from runtime.record import Traffic
from runtime.sharded_ops import gathered_linear, split_layer_norm
from tests.dist import parity
from tests.dist.launch import run_ranks
from tests.dist.parity import Case, run_cases
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


M, K, N = 64, 96, 128
GRID, DEPTH, CUBE = (("tpx", 2), ("tpy", 2)), (("tpd", 2), ("tpx", 2), ("tpy", 2)), (("tpx", 2), ("tpy", 2), ("tpz", 2))


def whole_product() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, A, y = x A^T and the gradients of sum(y c)."""
    x, weight = (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed, shape in enumerate(((M, K), (N, K))))
    c = torch.randn(M, N, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return x, weight, c, c @ weight, c.t() @ x


def wire_elements(traffic: tuple[Traffic, ...], mesh: Mesh) -> float:
    """Elements that a rank sends, by rings; times the number of ranks."""
    twice = {"all_reduce": 2.0}
    sizes = {name: axis.size for name, axis in mesh.axes.items()}
    sent = sum(twice.get(t.kind, 1.0) * (sizes[t.axis] - 1) / sizes[t.axis] * t.num_bytes / 8 for t in traffic)
    return sent * mesh.world_size


def cut(x: torch.Tensor, dim: int, *axes: Axis) -> torch.Tensor:
    """This rank's part, the first axis outermost."""
    for axis in axes:
        x = x.chunk(axis.size, dim)[axis.index]
    return x.contiguous()


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def plane_product(axes: tuple[tuple[str, int], ...], *, sums_depth: bool) -> dict[str, Any]:
    """2D where `axes` are two, 2.5D where depth comes before them."""
    mesh = build_mesh(axes, timeout_s=60)
    d, x_axis, y_axis = mesh.axis("tpd"), mesh.axis("tpx"), mesh.axis("tpy")
    x, weight, c, dx, dweight = whole_product()
    rows = (d, x_axis)
    local_x = cut(cut(x, 0, *rows), 1, y_axis).requires_grad_()
    local_weight = cut(cut(weight, 0, y_axis), 1, x_axis).requires_grad_()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        y = gathered_linear(local_x, local_weight, axes=(x_axis, y_axis), gathers=((1, 1, 1, K, 1), (0, 1, 1, K, 1)))
    with mesh.recorder.action("B", "backward"):
        y.backward(cut(cut(c, 0, *rows), 1, y_axis))
    assert local_x.grad is not None and local_weight.grad is not None
    grad = raw_all_reduce(local_weight.grad, d) if sums_depth else local_weight.grad
    wanted_y = cut(cut(F.linear(x, weight), 0, *rows), 1, y_axis)
    errors = (
        distance(y.detach(), wanted_y),
        distance(local_x.grad, cut(cut(dx, 0, *rows), 1, y_axis)),
        distance(grad, cut(cut(dweight, 0, y_axis), 1, x_axis)),
    )
    return {"errors": errors, "wire": wire_elements(mesh.recorder.traffic(), mesh), "kept": sum(kept), "rows": local_x.detach()[:, 0].tolist()}


def cube_product(*, keeps_gathered: bool) -> dict[str, Any]:
    """What was gathered is kept for the backward pass, as Bian et al. count, or gathered again there."""
    mesh = build_mesh(CUBE, timeout_s=60)
    i, j, k = (mesh.axis(name) for name in ("tpx", "tpy", "tpz"))
    x, weight, c, dx, dweight = whole_product()
    local_x = cut(cut(x, 0, i, j), 1, k).requires_grad_()
    local_weight = cut(cut(weight, 0, j), 1, k, i).requires_grad_()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        if keeps_gathered:
            part = F.linear(all_gather_vary(local_x, 0, 1, M // 2, 1, axis=j), all_gather_vary(local_weight, 1, 1, K // 2, 1, axis=i))
        else:
            part = gathered_linear(local_x, local_weight, axes=(i, j), gathers=((1, 1, 1, K // 2, 1), (0, 0, 1, M // 2, 1)))
        y = reduce_scatter(part, 0, 1, M // 2, 1, axis=k)
    with mesh.recorder.action("B", "backward"):
        y.backward(cut(cut(c, 0, i, k), 1, j))
    assert local_x.grad is not None and local_weight.grad is not None
    errors = (
        distance(y.detach(), cut(cut(F.linear(x, weight), 0, i, k), 1, j)),
        distance(local_x.grad, cut(cut(dx, 0, i, j), 1, k)),
        distance(local_weight.grad, cut(cut(dweight, 0, j), 1, k, i)),
    )
    return {"errors": errors, "wire": wire_elements(mesh.recorder.traffic(), mesh), "kept": sum(kept)}


def norm_of_large_numbers() -> float:
    axis = build_mesh((("tp", dist.get_world_size()),), timeout_s=60).axis("tp")
    x = 1e4 + torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    found = split_layer_norm(cut(x, 1, axis), (64,), axis=axis)
    return distance(found.double(), cut(F.layer_norm(x.double(), (64,)), 1, axis))


def on_four() -> tuple[Any, ...]:
    return plane_product(GRID, sums_depth=True), norm_of_large_numbers(), run_cases(SEARCHED_4)


def on_eight() -> tuple[Any, ...]:
    products = plane_product(DEPTH, sums_depth=True), plane_product(DEPTH, sums_depth=False)
    return *products, cube_product(keeps_gathered=False), cube_product(keeps_gathered=True), run_cases(SEARCHED_8, {**ZOO, "layer": layer})


SEARCHED_4 = [Case("mlp", constraints=dict(tensor="2d", tp=4), dtype="float64"), Case("gpt2", constraints=dict(tensor="2d", tp=4), dtype="float64")]
SEARCHED_8 = [Case("mlp", constraints=how, dtype="float64") for how in (dict(tensor="2.5d", tp=8), dict(tensor="1.5d", tp=4), dict(tensor="3d"))]
SEARCHED_8 += [Case("layer", constraints=dict(tensor="3d"), dtype="float64")]


def check(outcome: parity.Outcome) -> None:
    assert not outcome.refused, f"{outcome.case}: {outcome.refused}"
    assert outcome.missing == (), f"{outcome.case}: one side alone has {outcome.missing}"
    assert outcome.grad_error <= 1e-10 and outcome.weight_error <= 1e-10, f"{outcome.case}: {outcome}"
    for rank, held in enumerate(outcome.held):
        assert held.sent == held.planned_sent, f"{outcome.case}: rank {rank} sent {held.sent}, its program says {held.planned_sent}"


@pytest.mark.timeout(600)
def test_a_plane_moves_the_volume_of_summa_and_keeps_a_quarter_of_everything() -> None:
    for product, norm_error, outcomes in run_ranks(on_four, 4, timeout_s=500):
        assert max(product["errors"]) <= 1e-10
        assert product["wire"] == 3 * (M * K + K * N) == 55296
        assert product["kept"] == (M * K + N * K) // 4, "nothing gathered is kept for the backward pass"
        assert norm_error <= 1e-3, "the variance is taken about the mean"
        for outcome in outcomes:
            check(outcome)
        assert all(held.parameter_bytes == outcomes[0].dense_bytes // 4 for held in outcomes[0].held)


@pytest.mark.timeout(600)
def test_depth_holds_other_rows_and_sums_gradients_and_a_cube_keeps_an_eighth() -> None:
    ranks = run_ranks(on_eight, 8, timeout_s=500)
    for deep, unsummed, cube, kept, outcomes in ranks:
        assert max(deep["errors"]) <= 1e-10
        assert deep["wire"] == 3 * (M * K + 2 * K * N) + 2 * K * N == 116736
        assert unsummed["errors"][2] > 1e-2, "without the sum over depth the weight's gradient is another one"
        assert max(*cube["errors"], *kept["errors"]) <= 1e-10
        assert kept["wire"] == 2 * (M * K + K * N + M * N) == 53248, "the closed form of the paper"
        assert kept["kept"] == (M * K + N * K) // 4, "which keeps what it gathered"
        assert cube["wire"] == 53248 + M * K + K * N == 71680, "both operands are gathered again in the backward pass"
        assert cube["kept"] == (M * K + N * K) // 8, "so that an eighth is kept"
        for outcome in outcomes:
            check(outcome)
        cubes = [outcome for outcome in outcomes if outcome.case.constraints == dict(tensor="3d")]
        assert len(cubes) == 2
        for outcome in cubes:
            assert not any(use.kind == "all_to_all" for use in outcome.held[0].sent), "products come in pairs: nothing is laid out anew between them"
            assert {held.parameter_bytes for held in outcome.held} == {held.planned_parameter_bytes for held in outcome.held}
            assert outcome.held[0].parameter_bytes <= outcome.dense_bytes // 8 * 1.5, "biases and norms rest on two axes, matrices on three"
    assert ranks[0][0]["rows"] != ranks[4][0]["rows"]
