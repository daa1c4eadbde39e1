"""The sharded operators over gloo, in fp32 and fp64: dense results, recorded traffic, masks that agree."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from runtime.mesh import Axis, build_mesh
from runtime.random import RandomState, use_state
from runtime.record import Traffic
from runtime.sharded_ops import dropout, sync_batch_norm, vocab_cross_entropy, vocab_embedding
from tests.dist.launch import run_ranks

DTYPES = (torch.float64, torch.float32)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def tolerance(dtype: torch.dtype) -> float:
    return 1e-10 if dtype == torch.float64 else 1e-5


def make(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).requires_grad_()


def _tp() -> Axis:
    return build_mesh((("tp", dist.get_world_size()),), timeout_s=30.0).axis("tp")


def _summed(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def _gathered(x: torch.Tensor, sizes: list[int], dim: int = 0) -> torch.Tensor:
    shapes = [(*x.shape[:dim], size, *x.shape[dim + 1 :]) for size in sizes]
    parts = [x.contiguous() if rank == dist.get_rank() else x.new_empty(shape) for rank, shape in enumerate(shapes)]
    for rank, part in enumerate(parts):
        dist.broadcast(part, rank)
    return torch.cat(parts, dim)


def _batch_norm(dtype: torch.dtype, shares: list[int]) -> tuple[dict[str, float], tuple[Traffic, ...]]:
    axis = _tp()
    x, dy = (make(sum(shares), 4, 3, 3, dtype=dtype, seed=seed) for seed in (0, 3))
    weight, bias = make(4, dtype=dtype, seed=1), make(4, dtype=dtype, seed=2)
    mean, var = torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype)
    start = sum(shares[: axis.index])
    rows = slice(start, start + shares[axis.index])
    local = x.detach()[rows].requires_grad_()
    y, new_mean, new_var = sync_batch_norm(local, weight, bias, mean, var, 0.1, 1e-5, axis=axis, count=sum(shares) * 9)
    with axis.recorder.action("B", "backward"):
        grads = torch.autograd.grad(y, (local, weight, bias), dy.detach()[rows])
    traffic = axis.recorder.traffic()
    found = {
        "y": _gathered(y.detach(), shares),
        "mean": new_mean,
        "var": new_var,
        "dx": _gathered(grads[0], shares),
        "dweight": _summed(grads[1]),
        "dbias": _summed(grads[2]),
    }
    wanted_y = F.batch_norm(x, mean, var, weight, bias, training=True, momentum=0.1, eps=1e-5)
    dx, dweight, dbias = torch.autograd.grad(wanted_y, (x, weight, bias), dy.detach())
    wanted = {"y": wanted_y.detach(), "mean": mean, "var": var, "dx": dx, "dweight": dweight, "dbias": dbias}
    return {name: distance(found[name], wanted[name]) for name in found}, traffic


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shares", [[4, 4], [5, 2, 1]])
def test_batch_norm_over_ranks_is_the_full_batchs(dtype, shares):
    for distances, traffic in run_ranks(_batch_norm, len(shares), dtype, shares):
        assert max(distances.values()) < tolerance(dtype), distances
        size = 4 * dtype.itemsize
        assert traffic == (Traffic("all_reduce", "tp", "backward", 2 * size, 2), Traffic("all_reduce", "tp", "forward", 2 * size, 2))


def _language_head(dtype: torch.dtype, smoothing: float) -> tuple[dict[str, float], tuple[Traffic, ...]]:
    """An embedding and a tied head, both divided by vocabulary: the gradient of the table is the sum of both uses."""
    axis = _tp()
    table = make(12, 6, dtype=dtype, seed=0)
    ids = torch.randint(0, 12, (3, 5), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1).masked_fill(torch.arange(5) == 4, -100)

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=smoothing)

    wanted = loss_of(F.embedding(ids, table, padding_idx=3) @ table.t())
    (wanted_grad,) = torch.autograd.grad(wanted, table)

    local = table.detach().chunk(axis.size)[axis.index].clone().requires_grad_()
    hidden = _AllReduce.apply(vocab_embedding(local, ids, 3, axis=axis))
    logits = _Vary.apply(hidden) @ local.t()
    loss = vocab_cross_entropy(logits.flatten(0, 1), labels.flatten(), None, 2, -100, smoothing, axis=axis)
    traffic = axis.recorder.traffic()
    (grad,) = torch.autograd.grad(loss, local)
    assert axis.recorder.traffic() == traffic, "nothing is sent backward"
    return {"loss": distance(loss.detach(), wanted.detach()), "grad": distance(_gathered(grad, [12 // axis.size] * axis.size), wanted_grad)}, traffic


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return _summed(x)

    @staticmethod
    def backward(ctx, dy):
        return dy


class _Vary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return _summed(dy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("degree, smoothing", [(2, 0.0), (4, 0.1)])
def test_a_tied_vocabulary_divided_over_ranks_gives_the_dense_loss_and_gradient(dtype, degree, smoothing):
    for distances, traffic in run_ranks(_language_head, degree, dtype, smoothing):
        assert max(distances.values()) < tolerance(dtype), distances
        count = 3 + (smoothing > 0)
        assert traffic == (Traffic("all_reduce", "tp", "forward", count * 15 * dtype.itemsize, count),)


def _masks() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """On a 2 x 2 mesh: a replicated tensor, one divided by data, and one cut from the whole by element."""
    mesh = build_mesh((("dp", 2), ("tp", 2)), timeout_s=30.0)
    dp, tp = mesh.axis("dp"), mesh.axis("tp")
    x = torch.ones(4, 8)
    with use_state(RandomState(3, 0, 0)):
        replicated, divided = dropout(x, 0.5, "op"), dropout(x, 0.5, "op", axes=(dp,))
    with use_state(RandomState(3, 0, 0, row_start=2 * dp.index, exact=True)):
        exact = dropout(x[:2, :4], 0.5, "op", axes=(tp,), windows=((1, 1, 8, 1),), rows=(0, 1, 1))
    return replicated, divided, exact


def test_masks_agree_where_ranks_hold_the_same_and_are_cut_from_one_where_asked():
    ranks = run_ranks(_masks, 4)
    replicated, divided, exact = zip(*ranks, strict=True)
    assert all(torch.equal(mask, replicated[0]) for mask in replicated)
    assert torch.equal(divided[0], divided[1]) and torch.equal(divided[2], divided[3]) and not torch.equal(divided[0], divided[2])
    with use_state(RandomState(3, 0, 0, exact=True)):
        whole = dropout(torch.ones(4, 8), 0.5, "op", rows=(0, 1, 1))
    assert torch.equal(torch.cat([torch.cat(exact[:2], 1), torch.cat(exact[2:], 1)]), whole)
