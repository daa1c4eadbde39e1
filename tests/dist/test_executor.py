from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from runtime.executor import Executor
from runtime.mesh import build_mesh
from runtime.traffic import traffic
from tests.dist.launch import run_ranks
from tests.dist.programs import Model, Setup, build, make_batch


def make_executor(setup: Setup) -> tuple[Executor, Model]:
    model = Model(setup.num_layers, dtype=getattr(torch, setup.dtype), num_frozen=setup.num_frozen)
    pp_index = dist.get_rank() // (setup.dp * setup.tp) if dist.is_initialized() else 0
    program = build(setup, pp_index)
    mesh = build_mesh(program.axes, zero_group=program.zero_group, timeout_s=20)
    state = model.state_dict()
    return Executor(program, mesh, lambda fqn: state[fqn]), model


def relative_errors(executor: Executor, model: Model) -> dict[str, float]:
    """Of every gradient that this rank's stages hold, against the plain model's."""
    true = dict(model.named_parameters())
    scale = max(float(p.grad.norm()) for p in true.values() if p.grad is not None)
    errors = {}
    for resident in executor.trainable:
        fqn, grad = resident.stored.fqn, true[resident.stored.fqn].grad
        if resident.tensor.grad is None:
            errors[fqn] = 0.0 if grad is None else 1.0
            continue
        found = resident.gather(resident.tensor.grad)
        errors[fqn] = float((found - (0 if grad is None else grad)).norm()) / max(1e-4 * scale, float(grad.norm()) if grad is not None else 0.0)
    return errors


def _step(setup: Setup) -> tuple[float, float, dict[str, float]]:
    executor, model = make_executor(setup)
    batch = make_batch(setup.num_rows)
    expected = model(**batch)
    expected.backward()
    loss = executor.step(batch)
    coordinates = {name: axis.index for name, axis in executor.mesh.axes.items()}
    assert executor.mesh.recorder.traffic() == traffic(executor.program, coordinates)
    return loss.item(), expected.item(), relative_errors(executor, model)


def _steps(setups: list[Setup]) -> list[tuple[float, float, dict[str, float]]]:
    return [_step(setup) for setup in setups]


SETUPS = [
    Setup(dp=2, zero=1, num_micro_batches=3, num_rows=10),
    Setup(dp=2, zero=2, num_micro_batches=3, num_rows=10),
    Setup(dp=2, zero=3, recompute="full", num_frozen=2),
    Setup(tp=2, recompute="selective"),
    Setup(pp=2, schedule="gpipe"),
    Setup(tp=2),
    Setup(pp=2, dp=2),
    Setup(pp=2, dp=2, zero=3),
    Setup(pp=4, schedule="gpipe", num_micro_batches=5),
    Setup(pp=2, tp=2, recompute="full"),
    Setup(pp=2, schedule="interleaved", stage_ranks=(0, 1, 0, 1), num_micro_batches=3),
    Setup(pp=2, dp=2, zero=3, schedule="interleaved", stage_ranks=(0, 1, 0, 1), num_micro_batches=3, num_rows=6),
    Setup(pp=2, schedule="zb", num_micro_batches=4),
    Setup(pp=2, schedule="zbv", stage_ranks=(0, 1, 1, 0), num_micro_batches=4),
    Setup(pp=2, dp=2, zero=1, schedule="zbv", stage_ranks=(0, 1, 1, 0), num_micro_batches=3),
    Setup(pp=2, dp=2, zero=3, schedule="zb", num_micro_batches=3),
    Setup(pp=2, tp=2, schedule="zb", recompute="full", num_micro_batches=3),
    Setup(pp=2, tp=2, num_micro_batches=3, num_rows=10, pieces=True),
    Setup(pp=2, tp=2, schedule="interleaved", stage_ranks=(0, 1, 0, 1), recompute="full", num_micro_batches=4, pieces=True),
    Setup(pp=2, tp=2, schedule="zb", num_micro_batches=4, num_frozen=2, pieces=True),
    Setup(pp=2, dp=2, num_frozen=2, zero=3),
    Setup(dp=4, zero=3, zero_group=2),
    Setup(pp=2, dp=2, tp=2, zero=3, num_micro_batches=3, num_rows=14),
]


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_loss_and_every_gradient_equal_the_plain_model(world_size: int):
    setups = [setup for setup in SETUPS if setup.world_size == world_size]
    for results in run_ranks(_steps, world_size, setups, timeout_s=200):
        for setup, (loss, expected, errors) in zip(setups, results, strict=True):
            assert loss == pytest.approx(expected, rel=1e-10), setup
            assert max(errors.values()) < 1e-10, (setup, errors)


def test_one_process_needs_no_group():
    assert not dist.is_initialized()
    loss, expected, errors = _step(Setup(num_micro_batches=3))
    assert loss == pytest.approx(expected, rel=1e-12)
    assert max(errors.values()) < 1e-12


def _train(setups: list[Setup]) -> list[dict[str, float]]:
    """Relative errors of what is compared with a plain model that is trained alongside."""
    return [_trained(setup) for setup in setups]


def _trained(setup: Setup) -> dict[str, float]:
    executor, model = make_executor(setup)
    batch, other = make_batch(setup.num_rows), make_batch(setup.num_rows)
    other["ids"] = other["ids"].flip(0)
    own, plain = torch.optim.AdamW(executor.parameters(), lr=1e-2), torch.optim.AdamW(model.parameters(), lr=1e-2)
    errors: dict[str, float] = {}
    for norm_type in (2.0, float("inf")):
        own.zero_grad()
        plain.zero_grad()
        for each in (batch, other):  # gradients accumulate over calls
            executor.step(each)
            model(**each).backward()
        found = executor.full_grads()
        if dist.get_rank() == 0:
            assert found.keys() == {name for name, p in model.named_parameters() if p.grad is not None}
            errors["grads"] = max(float((found[name] - p.grad).norm() / p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None)
        norm = executor.clip_grad_norm_(0.05, norm_type)
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)
        errors[f"norm {norm_type}"] = float(abs(norm - expected) / expected)
        own.step()
        plain.step()
    state, true = executor.full_state_dict(), dict(model.state_dict())
    if dist.get_rank() == 0:
        assert state.keys() == true.keys()
        errors["weights"] = max(float((state[name] - true[name]).norm() / true[name].norm()) for name in true)
    else:
        assert not state
    errors["evaluate"] = abs(executor.evaluate(batch).item() / model(**batch).item() - 1)
    for name, found in executor.predict(batch).items():
        h = h0 = model.embed[batch["ids"]]
        for layer in model.layers:
            h = layer(h)
        errors[name] = float((found - torch.nn.functional.linear(h + h0, model.embed)).norm()) / 10
    fewer = Setup(**{**setup.__dict__, "num_rows": setup.num_rows - 2})
    executor.rebind(build(fewer, executor.mesh.axis("pp").index))
    small = make_batch(fewer.num_rows)
    errors["rebound"] = abs(executor.step(small).item() / model(**small).item() - 1)
    executor.rebind(build(setup, executor.mesh.axis("pp").index))
    executor.load_full_state_dict(Model(setup.num_layers, dtype=torch.float64).state_dict().get)
    errors["loaded"] = abs(executor.evaluate(batch).item() / Model(setup.num_layers)(**batch).item() - 1)
    return errors


TRAINED = [
    Setup(pp=2, dp=2, zero=3, num_rows=10),
    Setup(pp=2, dp=2, zero=1, num_rows=10),
    Setup(pp=2, tp=2),
    Setup(dp=2, tp=2, zero=2),
    Setup(dp=4, zero=3, zero_group=2),
    Setup(pp=4),
]


def test_training_equals_the_plain_model():
    for rank, results in enumerate(run_ranks(_train, 4, TRAINED, timeout_s=200)):
        for setup, errors in zip(TRAINED, results, strict=True):
            assert max(errors.values()) < 1e-9, (rank, setup, errors)
