from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autoplan
from autoplan.models import MLP
from runtime.errors import BatchError, CommunicationError, StageError
from runtime.executor import Executor
from runtime.mesh import build_mesh
from runtime.timeline import timeline
from tests.dist.launch import run_ranks
from tests.dist.mortal import ends, note_fault
from tests.dist.programs import Model, Setup, build, make_batch
from tests.plans import manual_plan


def _fails_in_stage_one(setup: Setup) -> tuple[str, str, float]:
    """Rank by rank: the type and text of the error, and the seconds that it took."""
    rank = dist.get_rank()
    program = build(setup, rank // (setup.dp * setup.tp))
    mesh = build_mesh(program.axes, timeout_s=60)
    state = Model(setup.num_layers).state_dict()
    executor = Executor(program, mesh, lambda fqn: state[fqn])
    executor.step(make_batch(setup.num_rows))
    if rank == setup.world_size - 1:
        key = (setup.pp - 1, setup.num_rows // setup.dp // setup.num_micro_batches)
        good, calls = executor.code.bodies[key], []

        def faulty(inputs):
            calls.append(1)
            if len(calls) == 2:
                raise ArithmeticError("the culprit")
            return good(inputs)

        executor.code.bodies[key] = faulty  # type: ignore[assignment]
    start_s = time.monotonic()
    try:
        executor.step(make_batch(setup.num_rows))
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start_s
    return "nothing", "", time.monotonic() - start_s


@pytest.mark.parametrize("setup", [Setup(pp=2, dp=2, zero=3), Setup(pp=2, tp=2)], ids=str)
def test_all_ranks_stop_and_show_the_first_error(setup: Setup):
    for kind, text, seconds in run_ranks(_fails_in_stage_one, setup.world_size, setup, timeout_s=100):
        assert kind == StageError.__name__
        assert text == "rank 3, stage 1, micro-batch 1 (forward): ArithmeticError: the culprit"
        assert seconds < 30


def _one_rank_is_late(late_s: float, timeout_s: float) -> str:
    mesh = build_mesh((("dp", 2),), timeout_s=timeout_s)
    from runtime.collective import all_reduce

    if dist.get_rank() == 1:
        time.sleep(late_s)
    try:
        all_reduce(torch.ones(3), axis=mesh.axis("dp"))
    except CommunicationError as error:
        return str(error)
    return "done"


def test_a_wait_that_takes_too_long_names_rank_axis_and_kind():
    text = run_ranks(_one_rank_is_late, 2, 5.0, 2.0)[0]
    assert text.startswith("rank 0: all_reduce of 12 bytes on axis 'dp' (ranks [0, 1]) failed after 2")


def _wrong_batch_on_one() -> tuple[str, str]:
    setup = Setup(dp=2)
    program = build(setup, 0)
    state = Model(setup.num_layers).state_dict()
    executor = Executor(program, build_mesh(program.axes, timeout_s=30), lambda fqn: state[fqn])
    try:
        executor.step(make_batch(setup.num_rows - 3 * dist.get_rank()))
    except (BatchError, StageError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_a_wrong_batch_on_one_rank_ends_on_all():
    (other, told), (own, text) = run_ranks(_wrong_batch_on_one, 2)
    assert (other, own) == ("StageError", "BatchError")
    assert text in told
    assert "'labels' has 5 rows: give the global batch of 8, or this rank's share of 4 (rows 4 to 8)" in text or "'ids' has 5 rows" in text


def _measured(setup: Setup) -> tuple:
    program = build(setup, dist.get_rank())
    state = Model(setup.num_layers).state_dict()
    executor = Executor(program, build_mesh(program.axes, timeout_s=30), lambda fqn: state[fqn])
    executor.step(make_batch(setup.num_rows))
    return timeline(executor.mesh)


def test_the_timeline_tells_every_action_of_every_rank_on_one_clock():
    setup = Setup(pp=2, num_micro_batches=2)
    first, second = run_ranks(_measured, 2, setup)
    assert first == second
    names = [e.name for e in sorted(first, key=lambda e: e.start_s) if e.rank == 1 and e.kind in ("forward", "backward")]
    assert names == ["preamble", "F 1.0", "B 1.0", "F 1.1", "B 1.1"]
    forward = {(e.stage, e.micro_batch): e for e in first if e.kind == "forward" and e.stage >= 0}
    assert all(forward[0, k].end_s <= forward[1, k].end_s for k in range(2))
    assert min(e.start_s for e in first) == 0.0 and all(e.end_s >= e.start_s for e in first)


def _one_rank_fails(how: str, plan: dict[str, Any]) -> None:
    """Three steps; the last rank fails in the second one, in its first forward pass."""
    torch.manual_seed(0)
    model, batch = MLP((8, 16, 16, 4)), {"x": torch.randn(8, 8), "labels": torch.arange(8) % 4}
    pm = autoplan.parallelize(model, batch, plan=manual_plan(autoplan.capture(model, batch), **plan), timeout_s=4)
    pm.forward_backward(batch)
    if dist.get_rank() == dist.get_world_size() - 1:
        if how == "between steps":
            note_fault()
            time.sleep(1000)
        bodies = pm.executor.code.bodies
        for key in bodies:
            bodies[key] = _failing(how)  # type: ignore[assignment]
    pm.forward_backward(batch)


def _failing(how: str) -> Callable[..., Any]:
    def fails(*_: Any) -> Any:
        note_fault()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "stall":
            time.sleep(1000)
        while how == "spin":
            pass
        raise ArithmeticError("the culprit")

    return fails


PLANS = {"pp": dict(pp=2, num_micro_batches=2), "dp": dict(dp=2), "zero": dict(dp=2, zero=3), "pp dp": dict(pp=2, dp=2, num_micro_batches=2)}
SAID = {"kill": "rank {last} is gone", "stall": "rank {last} has not moved", "stop": "rank {last} is gone", "spin": "rank {last} has not moved"}
SAID |= {"raise": "rank {last}, stage {stage}, micro-batch 0 (forward): ArithmeticError: the culprit"}
SAID |= {"between steps": "s, after stage 0, micro-batch 0 (between steps)"}
BY_HAND = [("stall", "pp"), ("kill", "dp"), ("kill", "zero"), ("stop", "pp"), ("spin", "dp"), ("between steps", "dp"), ("raise", "dp"), ("kill", "pp dp")]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("how", "plan"), [("kill", "pp"), ("stall", "dp"), *(pytest.param(*case, marks=pytest.mark.slow) for case in BY_HAND)], ids=lambda x: x.replace(" ", "-")
)
def test_a_rank_that_fails_ends_all_with_one_message_that_names_it(how: str, plan: str):
    last = PLANS[plan].get("pp", 1) * PLANS[plan].get("dp", 1) - 1
    found = ends(_one_rank_fails, last + 1, how, PLANS[plan], timeout_s=280)
    for end in found[:-1]:
        assert end.kind == "RunError" and end.exit_code == 1, found
        assert SAID[how].format(last=last, stage=int(plan[:2] == "pp")) in end.text, found
        assert 0 < end.after_s < 30, found
        if how != "raise":
            assert "axis" in end.text and "stage 0" in end.text and "micro-batch" in end.text, found
    assert len({end.text for end in found[:-1]}) == 1, found
    if how != "stop":  # a stopped process can only be killed
        assert found[-1].exit_code not in (None, 0), found
