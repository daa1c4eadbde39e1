"""Every collective against the dense computation that it stands for: values and gradients, on strided inputs, in any dtype.

Rank r of p makes a function of its part; the dense function sums what the ranks make. Gradients follow the layout table: a
WHOLE value has its complete cotangent on every rank, of a VARY reading each rank has a share.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from runtime import collective as c
from runtime.collective import Part
from runtime.mesh import Axis, build_mesh
from tests.dist.launch import run_ranks

PART, OTHER = Part(1, 2, 8, 3), Part(0, 1, 4, 1)  # dimension 1 of 48 entries seen as [2, 8, 3]; dimension 0 of 4 rows


def _dense(seed: int) -> torch.Tensor:
    return torch.randn(4, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _strided(x: torch.Tensor) -> torch.Tensor:
    """Equal to x, with rows and columns interleaved in memory."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] * 2), float("nan"), dtype=x.dtype) if x.is_floating_point() else x.new_zeros((*x.shape[:-1], x.shape[-1] * 2))
    wide = wide.transpose(0, 1).contiguous().transpose(0, 1)
    wide[..., ::2] = x
    return wide[..., ::2]


def _grad(function, x: torch.Tensor, cotangent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = x.clone().requires_grad_()
    out = function(_strided_view(leaf))
    out.backward(_strided(cotangent))
    assert leaf.grad is not None
    return out.detach(), leaf.grad


def _strided_view(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]


def _values(_: None) -> list[str]:
    """Names of the collectives whose value or gradient is wrong."""
    axis = build_mesh((("tp", dist.get_world_size()),), timeout_s=20).axis("tp")
    p, r = axis.size, axis.index
    x, g = _dense(0), _dense(1)
    mine = [_dense(10 + i) for i in range(p)]  # what each rank has of a partial sum
    shares = [_dense(20 + i) for i in range(p)]  # cotangents of VARY readings
    whole_sum, whole_share = sum(mine), sum(shares)

    def part(t: torch.Tensor, how: Part = PART) -> torch.Tensor:
        return how.parts(t, p)[r].contiguous()

    cases = {
        "vary": (lambda t: c.vary(t, axis=axis), x, shares[r], x, whole_share),
        "all_reduce": (lambda t: c.all_reduce(t, axis=axis), mine[r], g, whole_sum, g),
        "all_gather": (lambda t: c.all_gather(t, *PART, axis=axis), part(x), g, x, part(g)),
        "all_gather_vary": (lambda t: c.all_gather_vary(t, *PART, axis=axis), part(x), shares[r], x, part(whole_share)),
        "slice": (lambda t: c.slice(t, *PART, axis=axis), x, part(g), part(x), g),
        "reduce_scatter": (lambda t: c.reduce_scatter(t, *PART, axis=axis), mine[r], part(g), part(whole_sum), g),
        "all_to_all": (lambda t: c.all_to_all(t, *PART, *OTHER, axis=axis), part(x), part(g, OTHER), part(x, OTHER), part(g)),
        "share": (lambda t: c.share(t, axis=axis), x, g, x, g / p),
    }
    wrong = []
    for name, (function, given, cotangent, value, gradient) in cases.items():
        found, found_gradient = _grad(function, given, cotangent)
        if not torch.allclose(found, value, rtol=1e-13, atol=1e-13):
            wrong.append(name)
        if not torch.allclose(found_gradient, gradient, rtol=1e-13, atol=1e-13):
            wrong.append(f"{name} backward")
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
def test_values_and_gradients_are_those_of_the_dense_computation(world_size: int):
    assert run_ranks(_values, world_size, None) == [[]] * world_size


def _dtypes(_: None) -> list[str]:
    axis = build_mesh((("tp", 2),), timeout_s=20).axis("tp")
    wrong = []
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool, torch.uint8, torch.float32):
        x = (torch.arange(4 * 48).reshape(4, 48) % 5).to(dtype)
        mine = _strided(PART.parts(x, 2)[axis.index])
        if not torch.equal(c.all_gather(mine, *PART, axis=axis), x):
            wrong.append(f"all_gather {dtype}")
        if not torch.equal(c.all_to_all(mine, *PART, *OTHER, axis=axis), OTHER.parts(x, 2)[axis.index]):
            wrong.append(f"all_to_all {dtype}")
        if dtype != torch.bool:
            if not torch.equal(c.all_reduce(_strided(x), axis=axis), x + x):
                wrong.append(f"all_reduce {dtype}")
            if not torch.equal(c.reduce_scatter(_strided(x), *PART, axis=axis), PART.parts(x + x, 2)[axis.index]):
                wrong.append(f"reduce_scatter {dtype}")
    scalar = c.all_reduce(torch.tensor(3), axis=axis)
    column = torch.tensor([[5.0, 6.0], [5.0, 6.0]])[:, 0]  # a strided column, which gloo itself sends wrongly
    if scalar.item() != 6 or not torch.equal(c.all_reduce(column, axis=axis), torch.tensor([10.0, 10.0])):
        wrong.append("scalar or column")
    return wrong


def test_any_dtype_and_stride_is_right():
    assert run_ranks(_dtypes, 2, None) == [[], []]


def _recorded(_: None) -> list[tuple]:
    mesh = build_mesh((("dp", 2), ("tp", 2)), timeout_s=20)
    axis: Axis = mesh.axis("tp")
    x = torch.ones(4, 24)
    with mesh.recorder.action("F", "forward", 0, 0):
        c.all_reduce(x, axis=mesh.axis("dp"))
        c.all_gather(x, 1, 1, 48, 1, axis=axis)
        c.reduce_scatter(c.all_to_all(x, 1, 1, 48, 1, 0, 1, 4, 1, axis=axis), 0, 1, 2, 1, axis=axis)
    return [(t.kind, t.axis, t.num_bytes, t.count) for t in mesh.recorder.traffic()]


def test_traffic_is_recorded_with_the_bytes_of_the_whole_value():
    whole = 4 * 48 * 4
    expected = [("all_gather", "tp", whole, 1), ("all_reduce", "dp", 4 * 24 * 4, 1), ("all_to_all", "tp", whole, 1), ("reduce_scatter", "tp", 2 * 48 * 4, 1)]
    assert run_ranks(_recorded, 4, None) == [expected] * 4


def test_an_axis_of_one_rank_moves_nothing():
    axis = build_mesh((("tp", 1),)).axis("tp")
    x = torch.randn(4, 48, requires_grad=True)
    out = c.reduce_scatter(c.all_gather_vary(c.vary(x, axis=axis), *PART, axis=axis), *PART, axis=axis)
    c.all_to_all(c.slice(c.share(out, axis=axis), *PART, axis=axis), *PART, *OTHER, axis=axis).sum().backward()
    assert torch.equal(out, x) and torch.equal(x.grad, torch.ones_like(x)) and axis.recorder.traffic() == ()


def test_a_mesh_of_the_wrong_size_is_refused():
    with pytest.raises(ValueError, match="the mesh pp 2 x tp 2 needs 4 ranks, this job has 1"):
        build_mesh((("pp", 2), ("tp", 2)))
