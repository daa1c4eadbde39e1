"""Values that travel between stages in pieces: when, and at what price."""

from __future__ import annotations

from dataclasses import replace

import pytest
from handmade import FlatPrices, transformer

from autoplan.constraints import Constraints
from autoplan.explore import Searcher
from autoplan.lower import lower
from autoplan.outcome import Result
from autoplan.plan import Plan
from autoplan.search import forecast_of, plan_of
from autoplan.simulate import forecast, stage_uses
from autoplan.task import Task
from autoplan.transit import pieces_dim
from autoplan.workload import load_of
from costmodel.cluster import Cluster
from costmodel.opkey import Collective
from runtime.traffic import traffic

GRAPH = transformer(layers=4, batch=8, seq=64, hidden=256, heads=8, inner=1024, vocab=1000)


class SlowSends(FlatPrices):
    """Sends over links a hundred times as slow as those of the tensor ranks."""

    def collective(self, collective: Collective) -> float:
        return super().collective(collective) * (100 if collective.kind == "send" else 1)


def planned(prices: FlatPrices, **fixed) -> tuple[Plan, Searcher, Result]:
    searcher = Searcher(Task(GRAPH, Cluster.parse("a100-sxm-80gb:1x4"), prices, Constraints(**fixed), "adamw", None, None))
    outcome = searcher.run()
    assert outcome.bounds[outcome.best().shape] <= outcome.best().step_s * (1 + 1e-9)
    return plan_of(outcome.best(), searcher, outcome), searcher, outcome.best()


def boundary(plan: Plan):
    """What the second stage receives."""
    return [t for stage in lower(plan, GRAPH)[1].stages for t in stage.bodies[0].receives]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb"])
def test_the_search_pays_for_pieces_what_the_program_takes(schedule: str) -> None:
    plan, searcher, best = planned(SlowSends(), pp=2, tp=2, sequence_parallel=False, micro_batch_size=2, schedule=schedule)
    assert [stage.gathers for stage in plan.stages] == [False] + [True] * (len(plan.stages) - 1)
    told = forecast(lower(plan, GRAPH), plan, GRAPH, SlowSends())
    assert told.step_time_s == pytest.approx(forecast_of(best, searcher).step_time_s, rel=1e-3)
    how = searcher.shapes.step(best.shape, best.storing)
    for program in lower(plan, GRAPH):
        for stage in program.stages:
            read = stage_uses(load_of(program, stage, GRAPH, searcher.shapes.pricer), how)
            assert read == stage_uses(best.loads[stage.index], how)


def test_a_piece_is_sent_by_each_rank_and_gathered_at_both_ends() -> None:
    plan, _, _ = planned(SlowSends(), pp=2, tp=2, sequence_parallel=False, micro_batch_size=2, schedule="1f1b")
    (t,) = boundary(plan)
    whole = 2 * 64 * 256 * 4
    assert (t.spec.shape, t.sent({"tp": 2}).shape, t.grad) == ((2, 64, 256), (1, 64, 256), True)
    pieces, plain = (
        [{(u.kind, u.axis, u.phase): u.num_bytes for u in traffic(p, {"pp": rank})} for rank, p in enumerate(lower(one, GRAPH))]
        for one in (plan, replace(plan, stages=tuple(replace(s, gathers=False) for s in plan.stages)))
    )
    for rank, phase in ((0, "forward"), (1, "backward")):  # sent
        assert (pieces[rank]["send", "pp", phase], plain[rank]["send", "pp", phase]) == (4 * whole // 2, 4 * whole)
    for rank, phase in ((1, "forward"), (0, "backward")):  # gathered
        assert pieces[rank]["all_gather", "tp", phase] - plain[rank].get(("all_gather", "tp", phase), 0) == 4 * whole


def test_pieces_are_taken_only_where_they_make_a_step_faster() -> None:
    apart = dict(pp=2, tp=2, sequence_parallel=False, micro_batch_size=2)
    assert not any(stage.gathers for stage in planned(FlatPrices(), schedule="1f1b", **apart)[0].stages)  # a gather costs as much as half a send
    split = planned(SlowSends(), pp=2, tp=2, sequence_parallel=True, micro_batch_size=2, schedule="1f1b")[0]
    assert all(t.pieces is None and t.spec.shape == (2, 32, 256) for t in boundary(split))


def test_what_does_not_divide_travels_whole() -> None:
    assert pieces_dim((1, 64, 256), 8) == 1
    assert pieces_dim((8, 63), 8) == 0
    assert pieces_dim((3, 5, 7), 2) is None
    assert pieces_dim((4, 4), 1) is None
