"""What surrounds a step, in one process: programs that stay ready, ranges for the profiler, equal blocks compiled once, compiled blocks."""

from __future__ import annotations

import pytest
import torch

import autoplan
from autoplan.models import MLP
from runtime import bodies, compile

BATCH = {"x": torch.linspace(-1, 1, 64).reshape(8, 8), "labels": torch.arange(8) % 4}


def built() -> autoplan.ParallelModel:
    torch.manual_seed(0)
    return autoplan.parallelize(MLP((8, 16, 16, 16, 16, 4)), BATCH, cluster="cpu:1x1")


def test_a_change_between_training_and_evaluation_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pm = built()
    losses = [pm.forward_backward(BATCH), pm.evaluate(BATCH)]

    def never(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr("runtime.code.compile_bodies", never)
    assert [pm.forward_backward(BATCH), pm.evaluate(BATCH)] == losses


def test_blocks_that_differ_in_names_alone_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    original = compile.compile_block
    monkeypatch.setattr(bodies, "compile_block", lambda *args: compiled.append(args[0].name) or original(*args))
    pm = built()
    blocks = pm.executor.program.stages[0].bodies[0].blocks
    kinds = {compile.nameless(block) for block in blocks}
    assert len(compiled) == len(kinds) < len(blocks)


def test_the_profiler_sees_blocks_stages_and_micro_batches() -> None:
    pm = built()
    pm.forward_backward(BATCH)
    with torch.profiler.profile() as profile:
        pm.forward_backward(BATCH)
    seen = {event.key for event in profile.key_averages()}
    block = pm.executor.program.stages[0].bodies[0].blocks[0].name
    assert {"F, stage 0, micro-batch 0", "B, stage 0, micro-batch 0", f"{block}, stage 0, micro-batch 0"} <= seen


def test_compiled_blocks_give_the_same_loss_and_gradients() -> None:
    plain = built()
    torch.manual_seed(0)
    pm = autoplan.parallelize(MLP((8, 16, 16, 16, 16, 4)), BATCH, cluster="cpu:1x1", compile_backend="aot_eager")
    assert pm.forward_backward(BATCH).item() == pytest.approx(plain.forward_backward(BATCH).item(), rel=1e-6)
    for name, grad in plain.full_grads().items():
        torch.testing.assert_close(pm.full_grads()[name], grad)
