"""Asynchronous workers: the recorded order replays bit for bit, no worker is further ahead than allowed, and nobody hangs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autoplan
from autoplan.frontend import capture
from autoplan.plan import Plan
from runtime.order import Record
from tests.dist.launch import run_ranks
from tests.plans import manual_plan
from tests.zoo import ZOO

OPTIONS = dict(lr=0.01, weight_decay=0.1)


def batches(worker: int, step: int) -> dict[str, torch.Tensor]:
    """A worker's own four rows."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return {"x": torch.randn(4, 24, generator=generator), "labels": torch.randint(0, 12, (4,), generator=generator)}


def planned(workers: int, **values: Any) -> tuple[Any, Plan]:
    model, _ = ZOO["mlp"]()
    example = {key: torch.cat([batches(w, 0)[key] for w in range(workers)]) for key in ("x", "labels")}
    return model, manual_plan(capture(model, example), dp=workers, sync="async", **values)


def trained(workers: int, steps: int, pauses: tuple[float, ...], values: dict[str, Any], folder: str) -> dict[str, Any]:
    """A run whose worker w rests `pauses[w]` seconds before every step; the last worker makes half the steps."""
    torch.set_num_threads(1)
    model, plan = planned(workers, **values)
    example = {key: torch.cat([batches(w, 0)[key] for w in range(workers)]) for key in ("x", "labels")}
    pm = autoplan.parallelize(model, example, plan=plan)
    with pytest.raises(autoplan.UnsupportedOpError, match=r"pm\.optimizer"):
        torch.optim.SGD(pm.parameters(), lr=0.1).step()
    opt = pm.optimizer(torch.optim.AdamW, **OPTIONS)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5)
    rank = dist.get_rank()
    before = pm.evaluate(example).item()
    losses = []
    moved: list[Any] = []
    for step in range(steps if rank < workers - 1 else steps // 2):
        time.sleep(pauses[rank])
        losses.append(pm.forward_backward(batches(rank, step)).item())
        opt.step()
        opt.zero_grad()
        scheduler.step()
        moved = [(use.kind, use.num_bytes) for use in pm.executor.mesh.recorder.traffic() if use.kind in ("push", "pull")]
        if step == 1:
            pm.save(f"{folder}/middle", opt)  # all workers come here, and go on
    record = pm.finish()
    with pytest.raises(autoplan.UsageError, match="ended"):
        opt.step()
    weights, after = pm.full_state_dict(), pm.evaluate(example).item()
    replicas: list[Any] = [None] * workers
    dist.all_gather_object(replicas, [p.detach() for p in pm.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(replicas[0], replicas[rank], strict=True))
    assert sorted(moved) == sorted((use.kind, use.num_bytes) for use in pm_traffic(pm))
    return dict(record=record, weights=weights, plan=pm.plan, losses=losses, before=before, after=after)


def pm_traffic(pm: Any) -> list[Any]:
    from runtime.traffic import traffic

    return [use for use in traffic(pm.executor.program, {}) if use.kind in ("push", "pull")] or [
        use for use in traffic(pm._program(batches(0, 0), 8, "train", pm.executor.mesh), {}) if use.kind in ("push", "pull")
    ]


def checked(found: list[dict[str, Any]], workers: int, steps: int) -> Record:
    """The record, once the run was replayed and its counts were looked at."""
    record, first = found[0]["record"], found[0]
    model, _ = planned(workers)
    total = (workers - 1) * steps + steps // 2
    assert record.pushes == record.updates == (total,) * len(record.servers)
    ratios = {(e.worker, e.step): e.rates for own in record.exchanges for e in own if e.kind == "push"}
    assert all(rates == (pytest.approx(0.01 * 0.5 ** (step // 3)),) for (_, step), rates in ratios.items())
    again = autoplan.retrace(model, first["plan"], record, batches, torch.optim.AdamW, **OPTIONS)
    assert again.keys() == first["weights"].keys()
    assert all(torch.equal(again[name], first["weights"][name]) for name in again)
    return record


def loaded(folder: str) -> None:
    """Save, load and save again: weights on the servers and their optimizers' state are the same."""
    from runtime.checkpoint import Reader

    model, plan = planned(2)
    example = {key: torch.cat([batches(w, 0)[key] for w in range(2)]) for key in ("x", "labels")}
    pm = autoplan.parallelize(model, example, plan=plan)
    opt = pm.optimizer(torch.optim.AdamW, **OPTIONS)
    pm.load(f"{folder}/middle", opt)
    pm.save(f"{folder}/again", opt)
    before, after = Reader(f"{folder}/middle"), Reader(f"{folder}/again")
    assert before.tensors.keys() == after.tensors.keys() and any("exp_avg_sq" in name for name in before.tensors)
    assert before.scalars == after.scalars and before.scalars
    for name in before.tensors:
        one, other = before.get(name), after.get(name)
        assert one is not None and other is not None and torch.equal(one, other)
    pm.finish()


def both(folder: str) -> list[dict[str, Any]]:
    free = trained(2, 8, (0.0, 0.02), dict(servers=(1,)), f"{folder}/free")
    bounded = trained(2, 8, (0.0, 0.05), dict(staleness=1), f"{folder}/bounded")
    loaded(f"{folder}/bounded")
    lockstep = trained(2, 6, (0.0, 0.02), dict(staleness=0, num_micro_batches=2), f"{folder}/lockstep")
    return [free, bounded, lockstep]


def test_two_workers_replay_bit_for_bit_and_keep_the_bound(tmp_path):
    for name in ("free", "bounded", "lockstep"):
        (tmp_path / name).mkdir()
    found = run_ranks(both_ends, 2, str(tmp_path), timeout_s=250)
    assert all("worker 0 has made 4 steps, worker 1 2, which is more than staleness=1 behind" in text for _, text in found), found
    ranks = [ran for ran, _ in found]
    free, bounded, lockstep = ([rank[i] for rank in ranks] for i in range(3))
    assert checked(free, 2, 8).servers == (1,)
    record = checked(bounded, 2, 8)
    assert record.max_ahead == 1 and record.max_staleness <= 3
    record = checked(lockstep, 2, 6)
    assert record.max_ahead == 0 and record.max_staleness <= 1
    record.save(tmp_path / "record.json")
    assert Record.load(tmp_path / "record.json") == record
    assert free[0]["after"] == free[1]["after"] < free[0]["before"]


def apart() -> str:
    """The error where a worker evaluates while another is waiting for it under the bound."""
    torch.set_num_threads(1)
    model, plan = planned(2, staleness=1)
    example = {key: torch.cat([batches(w, 0)[key] for w in range(2)]) for key in ("x", "labels")}
    pm = autoplan.parallelize(model, example, plan=plan)
    opt = pm.optimizer(torch.optim.SGD, lr=0.05)
    pm.evaluate(example)
    try:
        for step in range(2 if dist.get_rank() else 6):
            pm.forward_backward(batches(dist.get_rank(), step))
            opt.step()
        pm.evaluate(example)
    except autoplan.RunError as error:
        return str(error)
    return "none"


def both_ends(folder: str) -> tuple[list[dict[str, Any]], str]:
    return both(folder), apart()


def served_apart(folder: str) -> dict[str, Any]:
    """Data rank 0 serves, two workers compute, one of them half the steps; all save in the middle."""
    torch.set_num_threads(1)
    model, _ = ZOO["mlp"]()
    example = {key: torch.cat([batches(w, 0)[key] for w in (1, 2)]) for key in ("x", "labels")}
    plan = manual_plan(capture(model, example), dp=3, sync="async", servers=(0,), workers=(1, 2), staleness=2)
    pm = autoplan.parallelize(model, example, plan=plan)
    opt = pm.optimizer(torch.optim.AdamW, **OPTIONS)
    rank = dist.get_rank()
    for step in range({0: 0, 1: 8, 2: 4}[rank]):
        time.sleep(0.02 * rank)
        pm.forward_backward(batches(rank, step))
        opt.step()
        opt.zero_grad()
        if step == 1:
            pm.save(f"{folder}/middle", opt)
    if rank == 0:
        for call in (lambda: pm.forward_backward(batches(1, 0)), opt.step):
            with pytest.raises(autoplan.UsageError, match=r"serves and computes nothing.*pm.finish\(\)"):
                call()
        pm.save(f"{folder}/middle", opt)
    record = pm.finish()
    after = pm.evaluate(example).item()
    return dict(record=record, plan=pm.plan, weights=pm.full_state_dict(), after=after, served=sorted(opt.state_of(pm.executor.trainable[0])))


def in_turn(folder: str) -> dict[str, Any]:
    """Three workers that take turns, and one that is gone before its last step."""
    torch.set_num_threads(1)
    model, plan = planned(3)
    example = {key: torch.cat([batches(w, 0)[key] for w in range(3)]) for key in ("x", "labels")}
    pm = autoplan.parallelize(model, example, plan=plan)
    opt = pm.optimizer(torch.optim.SGD, lr=0.05)
    rank = dist.get_rank()
    for step in range(4):
        for turn in range(3):
            if turn == rank:
                pm.forward_backward(batches(rank, step))
                opt.step()
            dist.barrier()
    record = tuple(e for e in pm.executor.asynchronous.worker.server.exchanges if e.kind == "push")
    if rank == 2:
        return dict(pushes=record)
    try:
        pm.finish()
    except autoplan.RunError as error:
        return dict(pushes=record, error=str(error))
    return dict(pushes=record)


def test_a_rank_that_only_serves_makes_no_steps_and_the_run_replays(tmp_path):
    ranks = run_ranks(served_apart, 3, str(tmp_path), timeout_s=250)
    record, first = ranks[0]["record"], ranks[0]
    assert record.pushes == record.updates == (12,) and record.max_ahead <= 2 and {e.worker for e in record.exchanges[0] if e.kind == "push"} == {1, 2}
    again = autoplan.retrace(ZOO["mlp"]()[0], first["plan"], record, batches, torch.optim.AdamW, **OPTIONS)
    assert all(torch.equal(again[name], first["weights"][name]) for name in again) and again.keys() == first["weights"].keys()
    assert ranks[0]["after"] == ranks[1]["after"] == ranks[2]["after"] and "exp_avg" in ranks[1]["served"]
    assert (tmp_path / "middle").exists()


def test_taking_turns_bounds_staleness_by_the_other_workers_and_a_lost_worker_ends_all():
    ranks = run_ranks(in_turn, 3, "", timeout_s=250)
    for found in ranks:
        assert max(e.staleness for e in found["pushes"]) == 2
        assert [(e.worker, e.step) for e in found["pushes"]] == [(w, s) for s in range(4) for w in range(3)]
    for found in ranks[:2]:
        assert "rank 2" in found["error"]
