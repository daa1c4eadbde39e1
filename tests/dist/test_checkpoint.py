from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from runtime.errors import CheckpointError
from tests.dist.launch import run_ranks
from tests.dist.programs import Setup, make_batch
from tests.dist.test_executor import make_executor


def _steps(setup: Setup, folder: str, load: str | None, num_steps: int, save: str | None) -> list[float]:
    executor, _ = make_executor(setup)
    optimizer = torch.optim.AdamW(executor.parameters(), lr=1e-2)
    if load:
        optimizer.param_groups[0]["lr"] = 123.0
        executor.load(f"{folder}/{load}", optimizer)
        assert optimizer.param_groups[0]["lr"] == 1e-2
    losses = []
    for _ in range(num_steps):
        losses.append(executor.step(make_batch(setup.num_rows)).item())
        optimizer.step()
        optimizer.zero_grad()
    if save:
        executor.save(f"{folder}/{save}", optimizer)
    return losses


def test_training_goes_on_equally_under_another_plan_and_world_size(tmp_path: Path):
    folder = str(tmp_path)
    alone = _steps(Setup(), folder, None, 6, None)
    first = run_ranks(_steps, 4, Setup(pp=2, dp=2, zero=3), folder, None, 2, "a")[0]
    second = run_ranks(_steps, 2, Setup(tp=2, schedule="gpipe"), folder, "a", 2, "b")[0]
    third = _steps(Setup(), folder, "b", 2, None)
    assert first + second + third == pytest.approx(alone, rel=1e-10)


def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path: Path):
    executor, _ = make_executor(Setup())
    before = executor.full_state_dict()
    executor.save(tmp_path / "good")
    with pytest.raises(CheckpointError, match="no checkpoint or a damaged one"):
        executor.load(tmp_path / "absent")
    file = tmp_path / "good" / "model-0-0.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="cannot be read"):
        executor.load(tmp_path / "good")
    with pytest.raises(CheckpointError, match="without an optimizer"):
        executor.load(tmp_path / "good", torch.optim.SGD(executor.parameters()))
    assert all(torch.equal(before[name], tensor) for name, tensor in executor.full_state_dict().items())


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path):
    make_executor(Setup(num_layers=2))[0].save(tmp_path / "small")
    with pytest.raises(CheckpointError, match="does not fit this model"):
        make_executor(Setup(num_layers=4))[0].load(tmp_path / "small")


def test_a_save_replaces_the_old_checkpoint_as_a_whole(tmp_path: Path):
    make_executor(Setup(num_layers=4))[0].save(tmp_path / "c")
    make_executor(Setup(num_layers=2))[0].save(tmp_path / "c")
    names = json.loads((tmp_path / "c" / "index.json").read_text())["tensors"]
    assert not any(name.startswith("layers.3") for name in names)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
