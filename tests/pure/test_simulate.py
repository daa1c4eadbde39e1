"""The replay against closed forms, and the search's loads against those of the lowered program."""

from __future__ import annotations

import pytest
from handmade import FlatPrices, transformer

from autoplan.constraints import Constraints
from autoplan.explore import Searcher
from autoplan.forecast import CollectiveUse
from autoplan.load import Pass, Send, StageLoad
from autoplan.lower import lower
from autoplan.price import Pricer
from autoplan.rankmemory import memories, stage_memory
from autoplan.replay import Step, durations, least_step, replay, step_seconds
from autoplan.search import forecast_of, plan_of
from autoplan.simulate import forecast, stage_uses
from autoplan.task import Task
from autoplan.workload import load_of
from costmodel.cluster import Cluster


def load(index: int, forward_s: float, backward_s: float, last: bool, num_bytes: int = 0, elements: int = 1000) -> StageLoad:
    sends = () if last else (Send(index + 1, num_bytes, True),)
    return StageLoad(
        index, "a", "b", Pass(forward_s), Pass(backward_s), Pass(), sends, elements, elements, 4, (elements,), 0, 100, 0, 0, (), (),
    )  # fmt: skip


def step(pp: int, m: int, schedule: str, dp: int = 1, zero: int = 0, overlap: bool = True) -> Step:
    return Step((("pp", pp), ("dp", dp), ("tp", 1)), schedule, m, zero, None, "adamw", None, tuple(range(pp)), overlap)


def played(loads: tuple[StageLoad, ...], how: Step):
    pricer = Pricer(FlatPrices(), None)
    return replay(loads, tuple(durations(one, how, pricer) for one in loads), how, pricer)


def in_flight(loads: tuple[StageLoad, ...], how: Step) -> tuple[int, ...]:
    return tuple(memory.activations // load.saved_bytes for load, memory in zip(loads, memories(loads, how), strict=True))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("m", [1, 3, 8])
def test_even_stages_take_the_closed_form(schedule: str, m: int) -> None:
    line = played(tuple(load(j, 1.0, 2.0, j == 3) for j in range(4)), step(4, m, schedule))
    assert max(line.end_s) == pytest.approx((m + 3) * 3.0)


def test_uneven_gpipe_takes_the_closed_form_of_each_pass() -> None:
    times = [1.0, 1.0, 3.0, 1.0]
    line = played(tuple(load(j, t, t, j == 3) for j, t in enumerate(times)), step(4, 8, "gpipe"))
    assert max(line.end_s) == pytest.approx(2 * (sum(times) + 7 * max(times)))


def test_1f1b_holds_what_its_order_says_and_gpipe_everything() -> None:
    loads = tuple(load(j, 1.0, 2.0, j == 3) for j in range(4))
    assert in_flight(loads, step(4, 8, "1f1b")) == (4, 3, 2, 1)
    assert in_flight(loads, step(4, 8, "gpipe")) == (8, 8, 8, 8)
    assert in_flight(loads, step(4, 2, "1f1b")) == (2, 2, 2, 1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_long_step_follows_from_its_beginning(schedule: str) -> None:
    loads = tuple(load(j, 1.0 + 0.3 * (j == 2), 2.0, j == 3, num_bytes=10**9) for j in range(4))
    how, pricer = step(4, 100, schedule), Pricer(FlatPrices(), None)
    times = tuple(durations(one, how, pricer) for one in loads)
    line = replay(loads, times, how, pricer)
    assert step_seconds(loads, times, how, pricer)[0] == pytest.approx(max(line.end_s) + times[0].tail_s, rel=1e-6)
    assert least_step(times, how)[0] <= max(line.end_s) + times[0].tail_s


def test_transfers_delay_the_next_stage() -> None:
    line = played((load(0, 1.0, 1.0, False, num_bytes=10**11), load(1, 1.0, 1.0, True)), step(2, 1, "1f1b"))
    assert max(line.end_s) == pytest.approx(4.0 + 2 * (1.0 + 5e-6), rel=1e-4)


def test_zero_trades_memory_for_time() -> None:
    one = load(0, 1.0, 2.0, True, elements=10**8)
    pricer = Pricer(FlatPrices(), None)
    memory = [stage_memory(one, step(1, 4, "1f1b", dp=8, zero=z), 1, 0) for z in range(4)]
    assert memory[0].optimizer == 8 * memory[1].optimizer
    assert memory[1].gradients == 8 * memory[2].gradients
    assert memory[3].parameters * 8 == 4 * 10**8
    cpu = [durations(one, step(1, 4, "1f1b", dp=8, zero=z, overlap=False), pricer) for z in range(4)]
    assert cpu[1].backward_s < cpu[2].backward_s < cpu[3].backward_s


@pytest.mark.parametrize("fixed", [{"dp": 4}, {"tp": 4}, {"pp": 2, "dp": 2}, {"dp": 2, "tp": 2, "zero": 3}, {"pp": 4}], ids=str)
def test_the_program_takes_what_the_search_thought(fixed: dict) -> None:
    graph = transformer(layers=4, batch=8, seq=64, hidden=256, heads=8, inner=1024, vocab=1000)
    prices = FlatPrices()
    searcher = Searcher(Task(graph, Cluster.parse("a100-sxm-80gb:1x4"), prices, Constraints(**fixed), "adamw", None, None))
    outcome = searcher.run()
    thought = forecast_of(outcome.best(), searcher)
    plan = plan_of(outcome.best(), searcher, outcome)
    told = forecast(lower(plan, graph), plan, graph, prices)
    assert told.step_time_s == pytest.approx(thought.step_time_s, rel=0.02)
    assert told.peak_memory_bytes == pytest.approx(thought.peak_memory_bytes, rel=0.05)
    how = searcher.shapes.step(outcome.best().shape, outcome.best().storing)
    for program in lower(plan, graph):
        for stage in program.stages:
            read = stage_uses(load_of(program, stage, graph, searcher.shapes.pricer), how)
            assert _by_kind(read) == pytest.approx(_by_kind(stage_uses(outcome.best().loads[stage.index], how)))


def _by_kind(uses: tuple[CollectiveUse, ...]) -> dict[tuple[str, str, str], int]:
    return {(use.kind, use.axis, use.phase): use.num_bytes for use in uses}
