"""Context and expert parallelism of whole models equal the plain model, and send what their closed forms say; fp64 on gloo ranks."""

from __future__ import annotations

import math

import pytest

from tests.dist.context_models import run_context_cases
from tests.dist.launch import run_ranks
from tests.dist.parity import Case, Outcome
from tests.dist.test_exactness import check_share
from tests.zoo import HIDDEN, LAYERS, ROWS, SEQ

FP64 = 1e-10
FP32_LOSS = 1e-6  # transformers' causal losses and routers compute in fp32 whatever the weights are


def case(model: str, *, search: bool = False, **plan: object) -> Case:
    if search:
        return Case(model, constraints=plan, dtype="float64")
    return Case(model, plan=plan, splits_seed=0 if "tp" in plan else None, dtype="float64")


TWO = [
    case("llama", cp=2),
    case("gpt2", cp=2, context="heads"),
    case("bert", search=True, cp=2, tp=1, pp=1, dp=1),
    case("mixtral", search=True, ep=2, tp=1, pp=1, dp=1),
]
FOUR = [
    case("llama", cp=4),
    case("bert", cp=2, tp=2),
    case("gpt2", dp=2, cp=2, zero=3),
    case("llama", cp=2, pp=2, num_micro_batches=2, recompute="full"),
    case("mixtral", dp=2, ep=2),
]
MANY = [
    case("gpt2", cp=4, context="heads"),
    case("bert", cp=4),
    case("llama-4-kv", cp=2, tp=2, context="heads"),
    case("llama", search=True, cp=2, tp=2, dp=1, pp=1),
    case("gpt2", cp=2, tp=2),
    case("gpt2", cp=2, pp=2, num_micro_batches=4),
    case("bert", dp=2, cp=2, num_micro_batches=2),
    case("llama", dp=2, cp=2, zero=1),
    case("llama", cp=4, context="self"),
    case("bert", cp=4, context="gather"),
    case("t5", cp=4),
    case("mixtral", ep=4, recompute="full"),
    case("mixtral", search=True, ep=2, tp=2, dp=1, pp=1),
    case("mixtral", ep=2, cp=2),
    case("mixtral", dp=2, ep=2, zero=2),
    case("mixtral-aux", ep=4),
]


def check(outcome: Outcome) -> None:
    asked = outcome.case
    in_fp32 = asked.model == "mixtral-aux"  # its balance loss is made in fp32
    assert not outcome.refused, f"{asked}: {outcome.refused}"
    assert outcome.missing == (), f"{asked}: one side alone has {outcome.missing}"
    assert outcome.loss_error <= FP32_LOSS, f"{asked}: {outcome}"
    assert max(outcome.grad_error, outcome.weight_error) <= (1e-6 if in_fp32 else FP64), f"{asked}: {outcome}"
    for rank, held in enumerate(outcome.held):
        assert held.sent == held.planned_sent, f"{asked}: rank {rank} sent {held.sent}, its program says {held.planned_sent}"


def ring_bytes(sent: tuple, phase: str) -> int:
    return sum(use.num_bytes for use in sent if (use.kind, use.axis, use.phase) == ("send", "cp", phase))


@pytest.mark.timeout(600)
def test_sequences_and_experts_on_two_ranks_equal_the_plain_model() -> None:
    outcomes = run_ranks(run_context_cases, 2, TWO, timeout_s=500)[0]
    for outcome in outcomes:
        check(outcome)
        if "cp" in (outcome.case.constraints or {}):
            check_share(outcome)  # what an expert's rank computes is the router's to say
    keys = ROWS * SEQ * HIDDEN // 2 * 8  # of one layer: two of four heads, fp64
    assert ring_bytes(outcomes[0].held[0].sent, "forward") == LAYERS * 2 * keys // 2  # 2 (P-1)/P
    assert ring_bytes(outcomes[0].held[0].sent, "backward") == LAYERS * 4 * keys // 2  # 4 (P-1)/P
    values = ROWS * SEQ * HIDDEN * 8
    moved = sum(use.num_bytes for use in outcomes[1].held[0].sent if (use.kind, use.axis) == ("all_to_all", "cp"))
    assert moved == LAYERS * 8 * values  # of all ranks; a rank sends (P-1)/P^2 of it


@pytest.mark.timeout(600)
def test_sequences_and_experts_beside_other_axes_equal_the_plain_model() -> None:
    for outcome in run_ranks(run_context_cases, 4, FOUR, timeout_s=500)[0]:
        check(outcome)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_way_of_attention_and_every_pair_of_axes_equal_the_plain_model() -> None:
    found = [outcome for part in range(0, len(MANY), 4) for outcome in run_ranks(run_context_cases, 4, MANY[part : part + 4], timeout_s=800)[0]]
    for outcome in found:
        check(outcome)
    assert len(found) == len(MANY) and not any(math.isnan(error) for outcome in found for error in outcome.errors())
