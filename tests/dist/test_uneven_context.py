"""Sequences that the ranks do not divide: attention, whole models and dropout equal the plain ones, whatever the number of ranks; fp64 on gloo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime.mesh import Axis, build_mesh
from runtime.pieces import count, most, start
from runtime.random import RandomState, use_state
from runtime.sharded.stochastic import attention
from runtime.sharded_ops import ring_attention, self_attention_ring
from tests.dist.context_models import run_context_cases
from tests.dist.launch import run_ranks
from tests.dist.test_context import case, check
from tests.dist.test_random_parity import _assert_equal, _two_steps

BATCH, HEADS, SEQ, DIM = 2, 4, 13, 6
RINGS = {"ring": ring_attention, "self": self_attention_ring}


@dataclass(frozen=True)
class Attention:
    ring: str
    key_heads: int = HEADS
    is_causal: bool = False
    mask: str = ""  # "padding", "bias"
    dropout_p: float = 0.0


OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"key_heads": 2, "is_causal": True},
    {"key_heads": 1, "mask": "padding"},
    {"mask": "bias", "dropout_p": 0.5},
    {"key_heads": 2, "is_causal": True, "dropout_p": 0.25},
]
ATTENTIONS = [Attention(ring, **options) for ring in RINGS for options in OPTIONS]


def _part(x: torch.Tensor, axis: Axis, *, is_grad: bool = False) -> torch.Tensor:
    """What a rank holds of dimension 2: its positions, and room filled with numbers that must not matter."""
    first, number = start(SEQ, axis.size, axis.index), count(SEQ, axis.size, axis.index)
    shape = (*x.shape[:2], most(SEQ, axis.size) - number, *x.shape[3:])
    return torch.cat([x[:, :, first : first + number], x.new_zeros(shape) if is_grad else x.new_full(shape, 7.0)], 2)


def _attend(cases: list[Attention]) -> list[tuple[Attention, dict[str, float]]]:
    axis = build_mesh((("cp", dist.get_world_size()),), timeout_s=60.0).axis("cp")
    return [(case, _one(case, axis)) for case in cases]


def _one(case: Attention, axis: Axis) -> dict[str, float]:
    def make(*shape: int, seed: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    q, k, v, grad = (make(BATCH, heads, SEQ, DIM, seed=n) for n, heads in enumerate((HEADS, case.key_heads, case.key_heads, HEADS)))
    mask = {"padding": torch.arange(SEQ).lt(torch.tensor([7, SEQ]).view(-1, 1, 1, 1)), "bias": make(1, HEADS, SEQ, SEQ, seed=5)}.get(case.mask)
    common: tuple[Any, ...] = (case.dropout_p, case.is_causal, None, case.key_heads != HEADS, "op")
    whole = dense_q, dense_k, dense_v = [x.clone().requires_grad_() for x in (q, k, v)]
    local = own_q, own_k, own_v = [_part(x, axis).requires_grad_() for x in (q, k, v)]
    with use_state(RandomState(3, 1, 0, exact=True)):
        true = attention(dense_q, dense_k, dense_v, mask, *common, rows=(0, 1, 1))
        own = mask if mask is None or mask.shape[2] == 1 else _part(mask, axis)
        out = RINGS[case.ring](own_q, own_k, own_v, own, *common, axis=axis, axes=(axis,), windows=((2, 1, SEQ, 1),), rows=(0, 1, 1), length=SEQ)
    true.backward(grad)
    out.backward(_part(grad, axis, is_grad=True))
    number = count(SEQ, axis.size, axis.index)
    found = {"out": (out, true)} | {name: (a.grad, b.grad) for name, a, b in zip("qkv", local, whole, strict=True)}
    errors = {}
    for name, (mine, dense) in found.items():
        assert mine is not None and dense is not None
        wanted = _part(dense, axis)[:, :, :number]
        errors[name] = ((mine[:, :, :number] - wanted).norm() / wanted.norm()).item()
    return errors


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_attention_over_a_sequence_of_unequal_parts_is_the_dense_one(num_ranks: int) -> None:
    for found in run_ranks(_attend, num_ranks, ATTENTIONS, timeout_s=120):
        for asked, errors in found:
            assert max(errors.values()) < 1e-10, f"{asked}: {errors}"


FOUR = [
    case("llama-13", cp=4),
    case("gpt2-13", cp=4, context="heads"),
    case("bert-13", cp=2, tp=2),
    case("llama-13", search=True, cp=2, tp=2, dp=1, pp=1),
]
MANY = [
    case("bert-13", cp=4, context="gather"),
    case("bert-13", cp=4, context="self"),
    case("llama-13", cp=4, context="self"),
    case("gpt2-13", cp=2, tp=2, context="heads"),
    case("gpt2-13", dp=2, cp=2, zero=3),
    case("llama-13", cp=2, pp=2, num_micro_batches=2, recompute="full"),
    case("llama-4-kv-13", cp=2, tp=2, context="heads"),
    case("mixtral-13", ep=2, cp=2),
    case("mixtral-13", cp=4),
    case("t5-13", cp=4),
    case("bert-13", search=True, cp=4, tp=1, dp=1, pp=1),
]


@pytest.mark.timeout(600)
def test_models_on_sequences_of_unequal_parts_equal_the_plain_ones() -> None:
    for outcome in run_ranks(run_context_cases, 4, FOUR, timeout_s=500)[0]:
        check(outcome)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_way_of_attention_and_other_axes_over_sequences_of_unequal_parts() -> None:
    for part in range(0, len(MANY), 4):
        for outcome in run_ranks(run_context_cases, 4, MANY[part : part + 4], timeout_s=800)[0]:
            check(outcome)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_loss_and_gradients_with_dropout_do_not_depend_on_the_number_of_ranks() -> None:
    divided = {2: [dict(cp=2), dict(cp=2, context="heads")], 3: [dict(cp=3, recompute="full")], 4: [dict(cp=4), dict(cp=2, tp=2), dict(cp=4, context="self")]}
    whole = run_ranks(_two_steps, 1, [{}], True, 13, timeout_s=280)[0][0]
    for num_ranks, plans in divided.items():
        for options, found in zip(plans, run_ranks(_two_steps, num_ranks, plans, True, 13, timeout_s=280)[0], strict=True):
            _assert_equal(found, whole, options)
