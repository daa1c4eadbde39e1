"""The command line: exit codes, one clear message, results on stdout alone, files whole or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sampleplan import sample_plan

from autoplan.cli import main
from autoplan.commands.console import write_whole
from autoplan.commands.planning import read_bytes, read_constraints
from autoplan.commands.verifying import _constraints as reduced_degrees
from autoplan.errors import UsageError
from autoplan.planfile import dumps


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return ended.value.code if isinstance(ended.value.code, int) else 0


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(dumps(sample_plan()))
    return path


def test_help_is_quick_and_names_every_command() -> None:
    start_s = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "autoplan", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for command in ("demo", "plan", "explain", "compare", "verify", "profile", "detect", "clusters", "models", "env"):
        assert f" {command} " in done.stdout
    assert time.monotonic() - start_s < 15
    loaded = subprocess.run([sys.executable, "-X", "importtime", "-c", "import autoplan.cli"], capture_output=True, text=True, timeout=60)
    assert " torch\n" not in loaded.stderr


@pytest.mark.parametrize(
    "words, code, said",
    [
        (("plan", "lama3-8b", "--cluster", "h100-sxm-80gb:1x8"), 2, "nearest: llama3-8b"),
        (("plan", "mlp", "--cluster", "h100-sxm:1x8"), 2, "h100-sxm-80gb"),
        (("plan", "mlp", "--cluster", "h100-sxm-80gb:1x8", "--stage-layers", "a,b"), 2, "--stage-layers"),
        (("plan", "mlp", "--cluster", "h100-sxm-80gb:1x8", "--max-memory", "lots"), 2, "40GiB"),
        (("plan", "mlp", "--cluster", "h100-sxm-80gb:1x8", "--global-batch", "0"), 2, "at least 1"),
        (("plan", "mlp", "--cluster", "h100-sxm-80gb:1x8", "--schedule", "2f2b"), 2, "1f1b"),
        (("plan", "resnet50", "--cluster", "h100-sxm-80gb:1x8", "--seq", "9"), 2, "no sequence"),
        (("compare", "mlp", "--cluster", "h100-sxm-80gb:1x8", "--baselines", "ddp,zero9"), 2, "zero9"),
        (("plan", "mlp", "--cluster", "cpu:1x2", "--time-limit", "-1"), 2, "time_limit_s=-1"),
        (("plan", "mlp", "--cluster", "cpu:1x2", "--time-limit", "nan"), 2, "time_limit_s=nan"),
        (("plan", "mlp", "--cluster", "cpu:1x2", "-o", "/nonesuch/plan.json"), 2, "no folder /nonesuch"),
        (("plan", "mlp", "--cluster", "cpu:1x2", "-o", "/"), 2, "it is a folder"),
        (("plan", "mlp", "--cluster", "CPU:1x2"), 2, "nearest: cpu"),
        (("plan", "mlp", "--cluster", "h100-sxm-80gb:1x8", "--dp", "3", "--tp", "2", "--pp", "1"), 3, "8 devices"),
        (("explain", "nothing.json"), 2, "nothing.json"),
        (("explain", "nothing.json", "--format", "pdf"), 2, "pdf"),
        (("demo", "--ranks", "0"), 2, "at least 1"),
        (("detect", "--ranks", "0"), 2, "at least 1"),
    ],
)
def test_a_mistake_is_one_message_and_an_exit_code(words: tuple[str, ...], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert "Traceback" not in captured.err
    assert captured.err.count("autoplan: ") == 1


@pytest.mark.parametrize(
    "words", [("fly",), ("plan",), ("plan", "mlp"), ("explain", "a", "b"), ("plan", "mlp", "--cluster", "x", "--top", "0"), ("models", "--xml")]
)
def test_wrong_words_are_usage_errors(words: tuple[str, ...]) -> None:
    assert run(*words) == 2


def test_debug_shows_the_trace_back_from_anywhere_on_the_line() -> None:
    for words in (("--debug", "plan", "nonesuch", "--cluster", "cpu:1x2"), ("plan", "nonesuch", "--cluster", "cpu:1x2", "--debug")):
        with pytest.raises(UsageError):
            main(list(words))


def test_a_damaged_plan_file_is_stale(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = plan_file.read_text()
    for text in (whole[: len(whole) // 2], "[]", "", whole.replace('"version": 1', '"version": 99')):
        plan_file.write_text(text)
        assert run("explain", str(plan_file)) == 4
        assert "plan.json" in capsys.readouterr().err


def test_a_plan_is_shown_in_every_form(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", str(plan_file)) == 0
    shown = capsys.readouterr().out
    assert "pp 4 × dp 2 × tp 2" in shown
    assert "7 % slower" in shown
    assert run("explain", str(plan_file), "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["model"] == "llama3-8b"
    assert run("explain", str(plan_file), "--format", "trace") == 0
    assert json.loads(capsys.readouterr().out)["traceEvents"]
    page = tmp_path / "report.html"
    assert run("explain", str(plan_file), "--format", "html", "-o", str(page)) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert page.read_text().startswith("<!doctype html>")


def test_what_there_is_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for command, inside in (("models", "llama3-405b"), ("clusters", "h100-sxm-80gb"), ("env", "torch"), ("detect", "groups")):
        assert run(command, "--json") == 0
        assert inside in json.loads(capsys.readouterr().out)
        assert run(command) == 0
        assert capsys.readouterr().out


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    write_whole(path, "new")
    assert path.read_text() == "new"
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "cut short \ud800")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(UsageError, match="cannot be written"):
        write_whole(tmp_path / "no" / "folder", "text")


def test_sizes_and_constraints_are_read() -> None:
    assert [read_bytes(text, "--max-memory") for text in ("40GiB", "1.5 gib", "512MB", "7")] == [40 * 2**30, 3 * 2**29, 512 * 10**6, 7]
    read = read_constraints({"tp": 2, "stage_layers": "3, 5", "max_memory_bytes": "1GiB", "zero": None})
    assert (read.tp, read.stage_layers, read.max_memory_bytes, read.zero) == (2, (3, 5), 2**30, None)


def test_verification_keeps_every_axis_of_a_plan_that_is_too_large() -> None:
    constraints, ranks = reduced_degrees(sample_plan(), 8)
    assert (constraints.pp, constraints.dp, constraints.tp, ranks) == (2, 2, 2, 8)
    constraints, ranks = reduced_degrees(sample_plan(), 16)
    assert (constraints.pp, constraints.dp, constraints.tp, ranks) == (4, 2, 2, 16)
    assert reduced_degrees(sample_plan(), 3)[1] <= 3
    for ranks, expected in ((1, (1, 1, 1)), (4, (1, 2, 2)), (8, (2, 2, 2)), (6, (1, 3, 2))):
        constraints, used = reduced_degrees(None, ranks)
        assert ((constraints.dp, constraints.pp, constraints.tp), used) == (expected, ranks)
