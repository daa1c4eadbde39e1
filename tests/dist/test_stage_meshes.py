"""Stages with meshes of their own: the plain model's loss, gradients and weights, and exactly the planned traffic."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autoplan
from autoplan.agreement import from_first_rank
from autoplan.frontend import capture
from autoplan.graph import Graph
from autoplan.plan import Plan
from tests.dist.launch import run_ranks
from tests.dist.parity import Case, Held, count_flops, held_by, loss_of, relative_errors, run_cases
from tests.plans import manual_plan, random_splits
from tests.zoo import ZOO

FP32, FP64 = 1e-5, 1e-10
DOUBLE = ("mlp", "gpt2", "resnet50")  # whose gradients are fp64 throughout: norms of Llama and T5, and losses of transformers, are fp32 in any precision


def mesh(dp: int, tp: int) -> tuple[tuple[str, int], ...]:
    return (("dp", dp), ("tp", tp))


def stages(*meshes: tuple[int, int], **more: Any) -> dict[str, Any]:
    """Keyword arguments of `manual_plan` for stages of these (dp, tp)."""
    return dict(pp=len(meshes), stage_meshes=tuple(mesh(*each) for each in meshes), **more)


QUICK = [  # 6 ranks
    Case("mlp", stages((1, 4), (2, 1), num_micro_batches=2, schedule="gpipe"), splits_seed=3, dtype="float64", optimizer="AdamW"),
    Case("mlp", stages((3, 1), (1, 3), zero=2, num_micro_batches=2), splits_seed=1, dtype="float64"),  # rows 2, 1, 1 of a micro-batch of 4
    Case("gpt2", stages((1, 4), (2, 1), zero=3, num_micro_batches=2, recompute="full"), splits_seed=0, dtype="float64"),  # tied embedding
    Case("gpt2", stages((2, 1), (1, 2), (2, 1), num_micro_batches=4), splits_seed=1, dtype="float64"),
]
MORE = [  # 8 ranks
    Case("mlp", stages((1, 4), (2, 2), num_micro_batches=4, schedule="zb", zero=1), splits_seed=5, dtype="float64", optimizer="AdamW"),
    Case("llama", stages((2, 2), (1, 4), zero=1, num_micro_batches=2, recompute="selective"), splits_seed=2, dtype="float64", optimizer="AdamW"),
    Case("t5", stages((4, 1), (1, 2), (2, 1), num_micro_batches=2), splits_seed=0, dtype="float64"),  # skips
    Case("llama", stages((2, 1), (1, 2), (4, 1), num_micro_batches=2), splits_seed=1, dtype="float64"),
    Case("gpt2", stages((1, 2), (2, 2), (2, 1), num_micro_batches=2, schedule="gpipe"), splits_seed=4, dtype="float64", optimizer="AdamW"),
    Case("mixtral-aux", stages((2, 2), (4, 1), zero=3), splits_seed=0),  # a router's loss of all rows at once
    Case("resnet50", stages((2, 1), (4, 1), (2, 1)), dtype="float64"),  # batch statistics
    Case("bert", stages((4, 1), (2, 2), num_micro_batches=2), splits_seed=1),
    Case("vit", stages((1, 2), (6, 1), num_micro_batches=1), splits_seed=1),
]


@pytest.mark.timeout(600)
def test_stages_of_other_meshes_equal_the_plain_model() -> None:
    for outcome in run_ranks(run_cases, 6, QUICK, timeout_s=500)[0]:
        check_case(outcome)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_more_stages_of_other_meshes_equal_the_plain_model() -> None:
    for outcome in run_ranks(run_cases, 8, MORE, timeout_s=800)[0]:
        check_case(outcome)


def lives(folder: str) -> None:
    """A run on stages of tp 2 and dp 2: evaluation, one norm, checkpoints to and from a plan of one mesh, and a move to it."""
    torch.set_num_threads(1)
    model, batch = ZOO["gpt2"]()
    model, plain = model.double(), copy.deepcopy(model).double()
    graph = capture(model, batch, check=False)
    splits = random_splits(graph, 2, 0)
    own = manual_plan(graph, splits=splits, **stages((1, 2), (2, 1), num_micro_batches=2))
    one = manual_plan(graph, dp=2, pp=2, num_micro_batches=4)
    pm = autoplan.parallelize(model, batch, plan=own)
    opt, true = pm.optimizer(torch.optim.AdamW, lr=0.01), torch.optim.AdamW(plain.parameters(), lr=0.01)

    def step(on: autoplan.ParallelModel, optimizer: torch.optim.Optimizer, given: dict[str, torch.Tensor]) -> None:
        wanted = loss_of(plain, given)
        wanted.backward()
        assert on.forward_backward(given).item() == pytest.approx(wanted.item(), rel=1e-6)  # transformers give it in fp32
        norm = on.clip_grad_norm_(0.1)
        assert norm.item() == pytest.approx(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item(), rel=1e-9)
        for each in (optimizer, true):
            each.step()
            each.zero_grad()

    assert (pm.data_rank, pm.data_size) == (0, 1)
    step(pm, opt, batch)
    step(pm, opt, {name: value[:5] for name, value in batch.items()})  # micro-batches of 3 and 2 rows
    with torch.no_grad():
        assert pm.evaluate(batch).item() == pytest.approx(loss_of(plain, batch).item(), rel=1e-6)
        logits, found = plain(**batch)["logits"], pm.predict(batch)
    if found is not None:
        torch.testing.assert_close(found, logits, rtol=1e-9, atol=1e-12)
    assert dist.get_rank() < 2 or (found is not None) == (dist.get_rank() == 2)
    pm.save(f"{folder}/own", optimizer=opt)
    other = autoplan.parallelize(copy.deepcopy(plain), batch, plan=one)
    elsewhere = other.optimizer(torch.optim.AdamW, lr=0.01)
    other.load(f"{folder}/own", optimizer=elsewhere)
    saved, loaded = pm.full_state_dict(), other.full_state_dict()
    assert saved.keys() == loaded.keys() and all(torch.equal(value, loaded[name]) for name, value in saved.items())
    pm.move_to(one, opt)
    step(pm, opt, batch)
    pm.save(f"{folder}/one", optimizer=opt)
    again = autoplan.parallelize(copy.deepcopy(plain), batch, plan=own)
    back = again.optimizer(torch.optim.AdamW, lr=0.01)
    again.load(f"{folder}/one", optimizer=back)
    step(again, back, batch)
    weights = again.full_state_dict()
    for name, value in plain.state_dict().items() if weights else ():
        torch.testing.assert_close(weights[name], value, rtol=1e-8, atol=1e-10)


@pytest.mark.timeout(300)
def test_a_run_on_such_stages_evaluates_saves_loads_and_moves(tmp_path: Path) -> None:
    run_ranks(lives, 4, str(tmp_path), timeout_s=200)


GIVEN = [
    ("llama", dict(pp=2, dp=1, tp=2, schedule="interleaved", num_chunks=2, micro_batch_size=2), ((1, 2), (2, 1))),
    ("llama", dict(pp=2, dp=1, tp=2, schedule="zbv", micro_batch_size=2), ((2, 1), (1, 2))),
    ("gpt2", dict(pp=2, dp=1, tp=2, schedule="1f1b", sequence_parallel=True), ((1, 2), (2, 1))),
]


def given(cases: list[tuple[str, dict[str, Any], tuple[tuple[int, int], ...]]]) -> list[tuple[float, str, Held]]:
    """Of every case the worst error of a gradient and its name, and what this rank holds, computes and sends."""
    torch.set_num_threads(1)
    rows = []
    for name, constraints, meshes in cases:
        model, batch = ZOO[name]()
        model, plain = model.double(), copy.deepcopy(model).double()
        graph = capture(model, batch, check=False)
        plan = from_first_rank(partial(_given, graph, constraints, meshes))
        pm = autoplan.parallelize(model, batch, plan=plan)
        with count_flops() as counter:
            pm.forward_backward(batch)
        held = held_by(pm, counter.get_total_flops())
        loss_of(plain, batch).backward()
        grads = {name: p.grad for name, p in plain.named_parameters(remove_duplicate=False) if p.grad is not None}
        rows.append((*relative_errors(pm.full_grads(), grads), held))
    return rows


def _given(graph: Graph, constraints: dict[str, Any], meshes: tuple[tuple[int, int], ...]) -> Plan:
    found = autoplan.find_plan(graph, cluster="cpu:1x4", constraints=autoplan.Constraints(**constraints))
    return autoplan.give_meshes(found, graph, tuple(mesh(*each) for each in meshes), "cpu:1x4")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_found_plans_that_are_given_meshes_run_as_they_say() -> None:
    for rank, rows in enumerate(run_ranks(given, 4, GIVEN, timeout_s=500)):
        for (error, name, held), case in zip(rows, GIVEN, strict=True):
            assert error <= (FP64 if case[0] in DOUBLE else FP32), f"{case}: {name} {error}"
            assert held.sent == held.planned_sent, f"{case}: rank {rank}"
            assert held.flops == pytest.approx(held.planned_flops, rel=0.02), f"{case}: rank {rank}"
            assert held.parameter_bytes == pytest.approx(held.planned_parameter_bytes, rel=0.02), f"{case}: rank {rank}"


def check_case(outcome: Any) -> None:
    assert outcome.missing == (), f"{outcome.case}: one side alone has {outcome.missing}"
    is_double = outcome.case.dtype == "float64"
    assert max(outcome.grad_error, outcome.weight_error) <= (FP64 if is_double and outcome.case.model in DOUBLE else FP32), f"{outcome.case}: {outcome}"
    assert outcome.loss_error <= (FP64 if is_double and outcome.case.model == "mlp" else 1e-6), f"{outcome.case}: {outcome}"
    for rank, held in enumerate(outcome.held):
        assert held.sent == held.planned_sent, f"{outcome.case}: rank {rank} sent {held.sent}, its program says {held.planned_sent}"
