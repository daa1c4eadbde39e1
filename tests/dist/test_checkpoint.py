from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import autoplan
from runtime.errors import CheckpointError
from runtime.saving import Writer
from tests.dist import resumes
from tests.dist.launch import run_ranks
from tests.dist.mortal import ends, note_fault
from tests.dist.programs import Model, Setup, make_batch
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_training_that_lost_a_rank_goes_on_after_a_restart_as_if_nothing_had_been(tmp_path: Path):
    (tmp_path / "calm").mkdir()
    calm = run_ranks(resumes.main, 2, tmp_path / "calm", "none", timeout_s=200)[0]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = subprocess.run([*run, "-m", "tests.dist.resumes", str(tmp_path), "kill"], capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "died").exists()
    lines = [line.split() for line in (tmp_path / "losses").read_text().splitlines()]
    assert [int(step) for step, _ in lines] in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 2, 3, 4, 5])
    assert all(float(loss) == calm[int(step)] for step, loss in lines)


def _dies_while_saving(folder: str) -> None:
    setup = Setup(pp=2, dtype="float32")
    executor, _ = make_executor(setup)
    optimizer = torch.optim.AdamW(executor.parameters(), lr=1e-2)
    for _ in range(2):
        executor.step(make_batch(setup.num_rows))
        optimizer.step()
        optimizer.zero_grad()
        if executor.num_steps == 2 and dist.get_rank() == 1:
            Writer.end = _killed  # type: ignore[method-assign]
        executor.save(f"{folder}/c", optimizer)


def _killed(*_: Any) -> None:
    note_fault()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(300)
def test_a_rank_that_is_killed_while_it_saves_leaves_the_checkpoint_before(tmp_path: Path):
    found = ends(_dies_while_saving, 2, str(tmp_path), timeout_s=250)
    assert found[0].exit_code == 1 and "rank 1 " in found[0].text, found
    assert found[0].after_s < 60
    executor, _ = make_executor(Setup(dtype="float32"))
    executor.load(tmp_path / "c", torch.optim.AdamW(executor.parameters(), lr=1e-2))
    assert executor.num_steps == 1


def test_a_process_that_dies_between_the_two_renames_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    executor, _ = make_executor(Setup())
    executor.save(tmp_path / "c")
    executor.num_steps = 7
    rename = Path.rename

    def dies(self: Path, target: Path) -> Path:
        if self.name == ".c.partial":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", dies)
    with pytest.raises(KeyboardInterrupt):
        executor.save(tmp_path / "c")
    monkeypatch.undo()
    assert not (tmp_path / "c").exists()
    executor.load(tmp_path / "c")
    assert executor.num_steps == 0
    executor.num_steps = 8
    executor.save(tmp_path / "c")
    executor.load(tmp_path / "c")
    assert executor.num_steps == 8 and [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_a_checkpoint_in_the_background_has_the_values_of_its_moment(tmp_path: Path):
    executor, _ = make_executor(Setup())
    before = executor.full_state_dict()
    saving = executor.save(tmp_path / "c", wait=False)
    with torch.no_grad():
        for parameter in executor.parameters():
            parameter.zero_()
    executor.finish_saving()
    assert saving.is_done
    executor.load(tmp_path / "c")
    assert all(torch.equal(before[name], tensor) for name, tensor in executor.full_state_dict().items())


def test_what_a_background_write_fails_with_is_raised_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    executor, _ = make_executor(Setup())

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("runtime.saving.save_file", full)
    executor.save(tmp_path / "c", wait=False)
    with pytest.raises(CheckpointError, match="no space left"):
        executor.finish_saving()
    with pytest.raises(CheckpointError, match="no space left"):
        executor.save(tmp_path / "c")


def _cannot_write(folder: str) -> list[tuple[str, float]]:
    """What a save ends with where the second stage's disk is full, at once and in the background, and after how many seconds."""
    executor, _ = make_executor(Setup(pp=2))
    executor.save(f"{folder}/c")
    found = []

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr("runtime.saving.save_file", full)
        for wait in (True, False):
            start_s = time.monotonic()
            with pytest.raises(CheckpointError) as error:
                executor.save(f"{folder}/c", wait=wait)
                executor.finish_saving()
            found.append((str(error.value), time.monotonic() - start_s))
    executor.load(f"{folder}/c")
    return found


def test_a_stage_that_cannot_write_ends_the_save_on_all_ranks_at_once(tmp_path: Path):
    for found in run_ranks(_cannot_write, 2, str(tmp_path), timeout_s=100):
        assert all("no space left" in text and seconds < 20 for text, seconds in found), found


class Scaled(nn.Module):
    """A scalar parameter beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(4, 3, dtype=torch.float64)), nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.weight.t()) * self.scale - 1).square().sum()


def _scalars(folder: str) -> dict[str, list[float]]:
    """Losses of four steps with Adam, by how they went on after two: in place, from a checkpoint, or moved."""
    batch = {"x": torch.arange(24, dtype=torch.float64).view(8, 3) / 24}
    torch.set_num_threads(1)

    def make(zero: int) -> tuple[autoplan.ParallelModel, torch.optim.Optimizer]:
        how = autoplan.Constraints(dp=2, zero=zero, micro_batch_size=4)
        pm = autoplan.parallelize(Scaled(), batch, cluster="cpu:1x2", constraints=how, optimizer="adam")
        return pm, torch.optim.Adam(pm.parameters(), lr=0.1)

    def train(pm: autoplan.ParallelModel, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(2):
            losses.append(pm.forward_backward(batch).item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    found = {}
    for zero, other in ((0, 1), (0, 3), (2, 0)):
        pm, optimizer = make(zero)
        first = train(pm, optimizer)
        pm.save(f"{folder}/{zero}{other}", optimizer=optimizer)
        later = make(other)
        later[0].load(f"{folder}/{zero}{other}", optimizer=later[1])
        found[f"loaded {zero} {other}"] = first + train(*later)
        pm.move_to(make(other)[0].plan, optimizer)
        found[f"moved {zero} {other}"] = first + train(pm, optimizer)
    return found


@pytest.mark.slow
def test_the_optimizer_state_of_a_scalar_parameter_is_kept_between_zero_stages(tmp_path: Path):
    model = Scaled()
    optimizer, expected = torch.optim.Adam(model.parameters(), lr=0.1), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.arange(24, dtype=torch.float64).view(8, 3) / 24)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for found in run_ranks(_scalars, 2, str(tmp_path), timeout_s=150):
        for how, losses in found.items():
            assert losses == pytest.approx(expected, rel=1e-10), how


def _exports(folder: str) -> None:
    executor, _ = make_executor(Setup(pp=2))
    executor.export(f"{folder}/model", lambda name: True)


def test_an_exported_model_is_a_folder_of_safetensors_that_loads_into_the_plain_model(tmp_path: Path):
    run_ranks(_exports, 2, str(tmp_path), timeout_s=200)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    state: dict[str, torch.Tensor] = {}
    for file in sorted(set(index.values())):
        state |= load_file(tmp_path / "model" / file)
    model = Model(Setup().num_layers)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    model.load_state_dict(state, strict=True)
    assert state.keys() == index.keys() and all(torch.equal(tensor, state[name]) for name, tensor in Model(Setup().num_layers).state_dict().items())
