"""Experts on several ranks, tokens travelling to them, against all experts on one, on gloo ranks in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from runtime.mesh import build_mesh
from runtime.record import Traffic
from runtime.sharded_ops import dispatch_experts, experts
from tests.dist.launch import run_ranks

TOKENS, HIDDEN, FFN, EXPERTS, SLOTS = 12, 6, 5, 8, 2


def _dispatched(routing: str) -> tuple[dict[str, float], tuple[Traffic, ...]]:
    axis = build_mesh((("ep", dist.get_world_size()),), timeout_s=60.0).axis("ep")
    generator = torch.Generator().manual_seed(1)
    shapes = [(TOKENS, HIDDEN), (TOKENS, SLOTS), (EXPERTS, 2 * FFN, HIDDEN), (EXPERTS, HIDDEN, FFN), (TOKENS, HIDDEN)]
    x, weights, gate_up, down, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(SLOTS).indices
    if routing == "one":  # every token goes to the same two experts: most ranks receive nothing
        ids = torch.tensor([1, 0]).expand(TOKENS, SLOTS).contiguous()
    whole = [t.clone().requires_grad_() for t in (x, weights, gate_up, down)]
    true = experts(whole[0], ids, *whole[1:], "silu", EXPERTS)
    true.backward(grad)
    rows, held = (torch.arange(size).chunk(axis.size)[axis.index] for size in (TOKENS, EXPERTS))
    local = [t.clone().requires_grad_() for t in (x[rows], weights[rows], gate_up[held], down[held])]
    axis.recorder.clear()
    y = dispatch_experts(local[0], ids[rows], *local[1:], "silu", EXPERTS, axis=axis)
    with axis.recorder.action("B", "backward"):
        y.backward(grad[rows])
    wanted = [true.detach()[rows], *(t.grad[part] for t, part in zip(whole, (rows, rows, held, held), strict=True))]  # type: ignore[index]
    names = ("y", "x", "weights", "gate_up", "down")
    least = 1e-4 * max(t.norm().item() for t in wanted)
    found = {
        name: ((a - b).norm() / max(b.norm().item(), least)).item() for name, a, b in zip(names, [y.detach(), *(t.grad for t in local)], wanted, strict=True)
    }
    return found, axis.recorder.traffic()


@pytest.mark.parametrize("num_ranks, routing", [(2, "drawn"), (4, "drawn"), (4, "one")])
def test_tokens_that_travel_to_their_experts_give_the_dense_result(num_ranks: int, routing: str) -> None:
    rows = TOKENS * SLOTS * HIDDEN * 8
    for errors, sent in run_ranks(_dispatched, num_ranks, routing):
        assert max(errors.values()) < 1e-10, errors
        counts = num_ranks * EXPERTS * 8
        assert sent == (Traffic("all_to_all", "ep", "backward", 2 * rows, 2), Traffic("all_to_all", "ep", "forward", 2 * rows + counts, 3))
