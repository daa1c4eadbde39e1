"""Compressed and late sums of gradients: nothing is lost, nothing is early, and a checkpoint forgets nothing."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autoplan
from runtime.carry import written
from runtime.executor import Executor
from runtime.traffic import traffic
from tests.dist.launch import run_ranks
from tests.dist.programs import Setup, make_batch
from tests.dist.test_executor import make_executor, relative_errors
from tests.zoo import ZOO

EXACT = {
    2: [
        Setup(dp=2, delay=1, num_micro_batches=3, num_rows=10),
        Setup(dp=2, zero=1, delay=1),
        Setup(dp=2, zero=3, compression="32bit", recompute="full", num_frozen=2),
        Setup(dp=2, compression="32bit", dtype="float32"),
        Setup(dp=2, zero=2, compression="32bit", recompute="selective"),
    ],
    4: [
        Setup(dp=4, zero=2, compression="32bit", delay=1),
        Setup(dp=2, tp=2, compression="32bit", num_micro_batches=3, num_rows=10),
        Setup(dp=2, tp=2, zero=3, compression="32bit", delay=1),
        Setup(pp=2, dp=2, compression="32bit", num_micro_batches=3, num_rows=10),
        Setup(pp=2, dp=2, zero=3, delay=1),
        Setup(pp=2, dp=2, zero=1, schedule="zb", num_micro_batches=3, compression="32bit"),
        Setup(pp=2, dp=2, schedule="zbv", stage_ranks=(0, 1, 1, 0), num_micro_batches=4, compression="32bit"),
    ],
}
LOSSY = {
    2: [
        Setup(dp=2, zero=3, compression="1bit", num_micro_batches=1, num_layers=2),
        Setup(dp=2, compression="1bit", recompute="selective", num_micro_batches=1, num_layers=2),
    ],
    4: [
        Setup(dp=4, compression="1bit", num_micro_batches=1, num_layers=2),
        Setup(dp=2, tp=2, zero=1, compression="8bit", num_micro_batches=1, num_layers=2),
        Setup(pp=2, dp=2, compression="1bit", delay=1, num_micro_batches=2, num_layers=2),
    ],
}


def batch_of(step: int, num_rows: int) -> dict[str, torch.Tensor]:
    """Batches that differ from step to step."""
    batch = make_batch(num_rows)
    return {"ids": (batch["ids"] + step) % 11, "labels": torch.where(batch["labels"] < 0, batch["labels"], (batch["labels"] + 2 * step) % 11)}


def check_traffic(executor: Executor) -> None:
    coordinates = {name: axis.index for name, axis in executor.mesh.axes.items()}
    assert executor.mesh.recorder.traffic() == traffic(executor.program, coordinates)


def _exact(setups: list[Setup]) -> list[float]:
    """The worst gradient of each, against the plain model's."""
    worst = []
    for setup in setups:
        executor, model = make_executor(setup)
        batch = make_batch(setup.num_rows)
        model(**batch).backward()
        executor.step(batch)
        if setup.delay:
            assert all(r.tensor.grad is None for r in executor.trainable)
            executor.step(batch)
        check_traffic(executor)
        worst.append(max(relative_errors(executor, model).values()))
    return worst


def unsent(executor: Executor) -> dict[str, torch.Tensor]:
    """By parameter: residuals and pending sums of all ranks, added up, on every rank."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, list(written(executor.reducer, (), executor.mesh)))
    total: dict[str, torch.Tensor] = {}
    for name, dense in (item for own in told for item in own):
        fqn = name.rpartition("@")[0]
        total[fqn] = total[fqn] + dense if fqn in total else dense
    return total


def _conserved(setup: Setup, num_steps: int) -> float:
    """How far results and residuals together are from the plain model's gradients, all summed over the steps, relatively."""
    executor, model = make_executor(setup)
    sent: dict[str, torch.Tensor] = {}
    for step in range(num_steps):
        batch = batch_of(step, setup.num_rows)
        executor.step(batch)
        if step:
            check_traffic(executor)
        model(**batch).backward()  # adds up
        for fqn, grad in executor.full_grads().items():
            sent[fqn] = sent[fqn] + grad if fqn in sent else grad
        executor.zero_grad()
    left = unsent(executor)
    assert any(float(rest.norm()) > 1e-3 for rest in left.values())
    true = {fqn: p.grad for fqn, p in model.named_parameters() if p.grad is not None}
    scale = max(float(grad.norm()) for grad in true.values())
    return max((float((sent[fqn] + left[fqn] - grad).norm()) / scale for fqn, grad in true.items() if fqn in sent), default=0.0)


def _all_of(world_size: int) -> tuple[list[float], list[float]]:
    return _exact(EXACT[world_size]), [_conserved(setup, 50) for setup in LOSSY[world_size]]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_thirty_two_bits_equal_the_plain_model_and_fewer_lose_nothing(world_size: int):
    for exact, lossy in run_ranks(_all_of, world_size, world_size, timeout_s=250):
        for setup, error in zip(EXACT[world_size], exact, strict=True):
            assert error < (1e-5 if setup.dtype == "float32" else 1e-10), (setup, error)
        for setup, error in zip(LOSSY[world_size], lossy, strict=True):
            assert error < 1e-12, (setup, error)


# -- a step late --------------------------------------------------------------------------------------------------------


def _late(setup: Setup, num_steps: int) -> None:
    """A late plan against applying by hand, a step later, what the same plan without delay gives at the same weights."""
    late, _ = make_executor(replace(setup, delay=1))
    now, _ = make_executor(setup)
    optimizers = [torch.optim.Adam(e.parameters(), lr=1e-2) for e in (late, now)]
    before: list[torch.Tensor | None] = [None] * len(now.trainable)
    start = [r.local().clone() for r in late.residents]
    for step in range(num_steps):
        batch = batch_of(step, setup.num_rows)
        late.step(batch)
        now.step(batch)
        grads = [r.tensor.grad for r in now.trainable]
        for resident, grad in zip(now.trainable, before, strict=True):
            resident.tensor.grad = grad
        before = grads
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            assert all(torch.equal(r.local(), old) for r, old in zip(late.residents, start, strict=True))
            assert not optimizers[0].state
        for mine, other in zip(late.residents, now.residents, strict=True):
            assert torch.equal(mine.local(), other.local()), (setup, step, mine.stored.fqn)
    assert late.drain()
    for resident, grad in zip(late.trainable, before, strict=True):
        assert (grad is None) == (resident.tensor.grad is None)
        assert grad is None or torch.equal(resident.local(resident.tensor.grad), resident.local(grad))
    assert not late.drain()


def _beside() -> None:
    """The measured timeline shows the sum of a step under the passes of the next, and without delay after its own."""
    for delay in (0, 1):
        executor, _ = make_executor(Setup(dp=2, delay=delay, num_micro_batches=1))
        bodies = executor.code.bodies
        bodies.update({key: _after_a_rest(0.2, body) for key, body in bodies.items()})
        if executor.reducer is not None:
            executor.reducer._sums = _after_a_rest(0.05, executor.reducer._sums)
        for step in range(2):
            executor.step(batch_of(step, 8))
        recorder = executor.mesh.recorder
        passes = [r for r in recorder.ran if r.kind in ("F", "B")]
        sums = [s for s in recorder.sent if s.axis == "dp" and s.phase == "reduce" and s.num_bytes > 1000]
        assert sums and passes
        start_s, end_s = min(p.start_s for p in passes), max(p.end_s for p in passes)
        assert all((start_s < s.end_s < end_s) == bool(delay) and (s.start_s >= end_s) == (not delay) for s in sums), (delay, start_s, end_s, sums)


def _after_a_rest(seconds: float, work: Any) -> Any:
    def rested(*args: Any) -> Any:
        time.sleep(seconds)
        return work(*args)

    return rested


def _skipped_and_clipped() -> None:
    """A step that is not finite changes no residual and nothing that is pending; clipping acts on the sum."""
    executor, _ = make_executor(Setup(dp=2, compression="1bit", delay=1, num_micro_batches=1))
    reducer, batch = executor.reducer, batch_of(0, 8)
    assert reducer is not None and reducer.residuals is not None
    executor.step(batch)
    kept = [e.clone() for e in (*reducer.residuals.own, *reducer.residuals.owned, *(t for _, t in reducer.pending))]
    weight = next(r for r in executor.trainable if r.stored.fqn == "layers.0.bias").local()
    value = weight.clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    if dist.get_rank() == 0:
        with pytest.warns(RuntimeWarning, match="skipped"):
            executor.step(batch)
    else:
        executor.step(batch)
    assert executor.step_was_skipped
    assert all(r.tensor.grad is None for r in executor.trainable)
    after = (*reducer.residuals.own, *reducer.residuals.owned, *(t for _, t in reducer.pending))
    assert all(torch.equal(a, b) for a, b in zip(kept, after, strict=True))
    with torch.no_grad():
        weight.copy_(value)
    executor.step(batch)
    grads = [r.local(r.tensor.grad).clone() for r in executor.trainable if r.tensor.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    found = executor.clip_grad_norm_(0.1)
    assert float(found) == pytest.approx(float(norm), rel=1e-9)
    for resident, grad in zip([r for r in executor.trainable if r.tensor.grad is not None], grads, strict=True):
        torch.testing.assert_close(resident.local(resident.tensor.grad), grad * (0.1 / (norm + 1e-6)))


# -- checkpoints --------------------------------------------------------------------------------------------------------


def _train(executor: Executor, optimizer: torch.optim.Optimizer, steps: range, num_rows: int) -> list[float]:
    losses = []
    for step in steps:
        losses.append(executor.step(batch_of(step, num_rows)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _saved_and_resumed(folder: str, setup: Setup) -> dict[str, torch.Tensor]:
    executor, _ = make_executor(setup)
    optimizer = torch.optim.SGD(executor.parameters(), lr=0.05, momentum=0.9)
    _train(executor, optimizer, range(4), setup.num_rows)
    executor.save(f"{folder}/{setup.compression}{setup.zero}{setup.delay}", optimizer)
    left = unsent(executor)
    _train(executor, optimizer, range(4, 7), setup.num_rows)
    other, _ = make_executor(setup)
    resumed = torch.optim.SGD(other.parameters(), lr=0.9, momentum=0.9)
    other.load(f"{folder}/{setup.compression}{setup.zero}{setup.delay}", resumed)
    _train(other, resumed, range(4, 7), setup.num_rows)
    for mine, its in zip(other.residents, executor.residents, strict=True):
        assert torch.equal(mine.local(), its.local()), f"{setup}: {mine.stored.fqn} after resuming"
    return left


RESUMED = [
    Setup(dp=2, compression="1bit", delay=1, num_micro_batches=1),
    Setup(dp=2, zero=3, compression="1bit", num_micro_batches=1),
    Setup(dp=2, zero=1, delay=1, num_micro_batches=1),
]


def _conserved_in_bf16() -> None:
    """Compute in bf16 over fp32 masters: what is sent and what is left are the gradients of the same plan without compression, through the public API,
    over two steps, the batch accumulated in micro-batches."""
    for compression, zero in (("1bit", 0), ("8bit", 1), ("1bit", 2), ("8bit", 3)):
        grads, left = [], {}
        for values in ({}, {"compression": compression}):
            model, batch = ZOO["mlp"]()
            fixed = autoplan.Constraints(dp=2, tp=1, pp=1, zero=zero, micro_batch_size=2, **values)
            pm = autoplan.parallelize(model, batch, cluster="cpu:1x2", constraints=fixed, precision="bf16")
            for _ in range(2):
                pm.forward_backward(batch)  # adds up
            grads.append(pm.full_grads())
            left = unsent(pm.executor) if values else left
        if dist.get_rank() == 0:
            exact, sent = grads
            assert exact.keys() == sent.keys() and any(float((sent[fqn] - grad).norm()) > 1e-3 * float(grad.norm()) for fqn, grad in exact.items())
            for fqn, grad in exact.items():
                torch.testing.assert_close(sent[fqn] + left[fqn], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()))


def _two_ranks(folder: str) -> list[dict[str, torch.Tensor]]:
    _late(Setup(dp=2), 4)
    _late(Setup(dp=2, zero=2, compression="1bit", num_micro_batches=1), 4)
    _beside()
    _skipped_and_clipped()
    _conserved_in_bf16()
    return [_saved_and_resumed(folder, setup) for setup in RESUMED]


def _loaded(folder: str, left: list[dict[str, torch.Tensor]]) -> None:
    """Under other plans the sum of residuals and pending sums of each parameter is what it was."""
    for setup, expected in zip(RESUMED, left, strict=True):
        others = [Setup(pp=2, dp=2, compression="1bit", num_micro_batches=1), Setup(dp=4, zero=2, compression="8bit", delay=1, num_micro_batches=1)]
        for other in others:
            executor, _ = make_executor(other)
            executor.load(f"{folder}/{setup.compression}{setup.zero}{setup.delay}")
            found = unsent(executor) if other.delay else _with_carried(executor)
            for fqn, total in expected.items():
                torch.testing.assert_close(found[fqn], total, rtol=1e-12, atol=1e-14)
        for other in (Setup(pp=2, dp=2, zero=3, num_micro_batches=1), Setup(pp=2, dp=2, zero=1, delay=1, num_micro_batches=1)):
            _carries_to_every_copy(other, f"{folder}/{setup.compression}{setup.zero}{setup.delay}", expected["embed"])


def _carries_to_every_copy(setup: Setup, path: str, expected: torch.Tensor) -> None:
    """Both copies of the tied parameter leave the next step with all of what was not sent, and a checkpoint has it once."""
    executor, _ = make_executor(setup)
    executor.load(path)
    torch.testing.assert_close(_with_carried(executor)["embed"], expected, rtol=1e-12, atol=1e-14)
    tied = next(r for r in executor.trainable if r.stored.fqn == "embed")
    grads = []
    for _ in range(2):
        executor.step(batch_of(9, setup.num_rows))
        grads.append(tied.gather(tied.tensor.grad))
        executor.zero_grad()
    copies: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(copies, grads[0])
    assert all(torch.equal(copy, copies[0]) for copy in copies), setup
    torch.testing.assert_close(grads[0] if setup.delay else grads[0] - grads[1], expected, rtol=1e-9, atol=1e-12)


def _with_carried(executor: Executor) -> dict[str, torch.Tensor]:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, list(written(executor.reducer, executor.carried, executor.mesh)))
    total: dict[str, torch.Tensor] = {}
    for name, dense in (item for own in told for item in own):
        fqn = name.rpartition("@")[0]
        total[fqn] = total[fqn] + dense if fqn in total else dense
    return total


@pytest.mark.timeout(300)
def test_updates_are_one_step_late_and_checkpoints_keep_what_was_not_sent(tmp_path: Path):
    left = run_ranks(_two_ranks, 2, str(tmp_path), timeout_s=200)[0]
    run_ranks(_loaded, 4, str(tmp_path), left, timeout_s=200)
    setup = RESUMED[0]
    executor, model = make_executor(Setup(num_micro_batches=1))
    executor.load(tmp_path / f"{setup.compression}{setup.zero}{setup.delay}")
    model.load_state_dict(executor.full_state_dict())
    batch = batch_of(9, 8)
    model(**batch).backward()
    executor.step(batch)
    for fqn, grad in executor.full_grads().items():
        plain = dict(model.named_parameters())[fqn].grad
        expected = (0 if plain is None else plain) + left[0].get(fqn, 0)
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)
