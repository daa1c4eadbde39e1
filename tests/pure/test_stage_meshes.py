"""Stages with meshes of their own: who sends what, what a plan may say, and what it is predicted to take."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autoplan
from autoplan.api import load_cluster
from autoplan.errors import StalePlanError, UsageError
from autoplan.explain import explain
from autoplan.frontend import capture
from autoplan.graph import Graph
from autoplan.lower import lower
from autoplan.plan import Plan
from autoplan.planfile import diff, dumps, loads
from autoplan.retarget import check_plan
from autoplan.simulate import forecast
from autoplan.stagemeshes import meshes_of, with_stage_meshes
from costmodel.analytic import AnalyticPrices
from runtime.crossing import Piece, box_of, num_ranks, pieces, within
from runtime.parse import parse
from runtime.program import MicroBatch, Spread, StageMesh
from runtime.text import text
from runtime.traffic import traffic
from tests.plans import manual_plan, random_splits
from tests.zoo import ZOO, gpt2

WIDE, SQUARE = (("dp", 1), ("tp", 4)), (("dp", 2), ("tp", 2))


@st.composite
def crossings(draw: st.DrawFn) -> tuple[Spread, StageMesh, StageMesh]:
    """A value of 7 rows and two more factors, on two meshes, divided, whole or summed on each axis."""
    axes = ("dp", "tp")
    place = {"dp": draw(st.sampled_from(["rows", "whole", "partial", "vary"])), "tp": draw(st.sampled_from([1, 2, "whole", "partial", "vary"]))}
    divided = tuple((axis, 0 if at == "rows" else at) for axis, at in place.items() if at == "rows" or isinstance(at, int))
    modes = [tuple(axis for axis in axes if place[axis] == mode) for mode in ("partial", "vary")]
    batch, meshes, first = (MicroBatch(3, 10),), [], 0
    for _ in range(2):
        sizes = draw(st.permutations([("dp", draw(st.integers(1, 3))), ("tp", draw(st.sampled_from([1, 2, 3, 4])))]))
        (mesh,) = meshes_of_axes(tuple(sizes), batch, first)
        meshes.append(mesh)
        first += num_ranks(mesh)
    return Spread((0, 12, 24), divided, *modes), meshes[0], meshes[1]


def meshes_of_axes(axes: tuple[tuple[str, int], ...], batches: tuple[MicroBatch, ...], first: int) -> tuple[StageMesh, ...]:
    plan = manual_plan(_graph(), pp=2, stage_meshes=(axes, axes))
    return (replace(meshes_of(plan, batches)[0], first=first),)


_GRAPHS: dict[str, Graph] = {}


def _graph(name: str = "mlp") -> Graph:
    if name not in _GRAPHS:
        _GRAPHS[name] = capture(*ZOO[name]())
    return _GRAPHS[name]


@settings(deadline=None, max_examples=60)
@given(crossings(), st.booleans())
def test_what_arrives_is_what_was_there(crossing: tuple[Spread, StageMesh, StageMesh], is_grad: bool) -> None:
    spread, sender, receiver = crossing
    dense = torch.randn(7, 12, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    summed = spread.vary if is_grad else spread.partial
    held = _held(dense, spread, sender, summed)
    arrived = {}
    for rank in range(receiver.first, receiver.first + num_ranks(receiver)):
        box = box_of(spread, receiver, rank, 0)
        arrived[rank] = torch.zeros([stop - start for start, stop in box], dtype=torch.float64)
        mine = [piece for piece in pieces(spread, sender, receiver, 0, is_grad=is_grad) if piece.receiver == rank]
        assert len({piece.sender for piece in mine}) == len(mine)
        for piece in mine:
            arrived[rank][within(piece.box, box)] += held[piece.sender][within(piece.box, box_of(spread, sender, piece.sender, 0))]
        if not summed:
            torch.testing.assert_close(arrived[rank], dense[tuple(slice(*edge) for edge in box)])
            assert sum(map(_size, mine)) == arrived[rank].numel(), "every element once"
    if summed:
        torch.testing.assert_close(_joined(arrived, spread, receiver, summed), dense)


def _size(piece: Piece) -> int:
    return math.prod(stop - start for start, stop in piece.box)


def _held(dense: torch.Tensor, spread: Spread, mesh: StageMesh, summed: tuple[str, ...]) -> dict[int, torch.Tensor]:
    """The local tensors: over `summed` axes random addends, else parts of the value."""
    ways = math.prod(dict(mesh.axes)[axis] for axis in summed)
    addends = [torch.randn(dense.shape, dtype=dense.dtype, generator=torch.Generator().manual_seed(i)) for i in range(1, ways)]
    addends.append(dense - sum(addends, torch.zeros_like(dense)))
    return {rank: addends[_number(mesh, rank, summed)][tuple(slice(*edge) for edge in box_of(spread, mesh, rank, 0))] for rank in _ranks(mesh)}


def _joined(arrived: dict[int, torch.Tensor], spread: Spread, mesh: StageMesh, summed: tuple[str, ...]) -> torch.Tensor:
    """The dense value, from one rank of those that hold the same."""
    total, seen = torch.zeros(7, 12, 24, dtype=torch.float64), set()
    for rank in _ranks(mesh):
        box = box_of(spread, mesh, rank, 0)
        if (key := (box, _number(mesh, rank, summed))) not in seen:
            seen.add(key)
            total[tuple(slice(*edge) for edge in box)] += arrived[rank]
    return total


def _ranks(mesh: StageMesh) -> range:
    return range(mesh.first, mesh.first + num_ranks(mesh))


def _number(mesh: StageMesh, rank: int, axes: tuple[str, ...]) -> int:
    """A rank's place on some axes together."""
    left, found, scale = rank - mesh.first, 0, 1
    for name, size in reversed(mesh.axes):
        left, at = divmod(left, size)
        if name in axes:
            found, scale = found + at * scale, scale * size
    return found


def _plan(name: str = "mlp", **changes: object) -> Plan:
    graph = _graph(name)
    asked = dict(pp=2, stage_meshes=(WIDE, SQUARE), num_micro_batches=2) | changes
    return manual_plan(graph, splits=random_splits(graph, 4, 3), **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_plan_and_programs_are_text_and_back(name: str) -> None:
    plan = _plan(name)
    assert loads(dumps(plan)) == plan and plan.num_ranks == 8
    assert "stage_meshes" in diff(plan, replace(plan, stage_meshes=(SQUARE, SQUARE)))
    assert "pp 2 (tp 4 | dp 2 × tp 2)" in explain(plan)
    programs = lower(plan, _graph(name))
    assert [program.axes for program in programs] == [(("pp", 2), *WIDE), (("pp", 2), *SQUARE)]
    for program in programs:
        assert parse(text(program)) == program
    with pytest.raises(StalePlanError, match=r"8 ranks \(dp=1 x tp=4 | dp=2 x tp=2\), this job has 4"):
        check_plan(plan, _graph(name), 4)


def test_equal_meshes_are_forecast_as_one() -> None:
    """Stages of one mesh, written either way: the same time, memory and traffic. (A loss without labels: ranks that take the global batch
    count their labels without an all_reduce.)"""
    graph, prices = _graph("unet"), AnalyticPrices(load_cluster("h100-sxm-80gb:1x8"))
    for more in (dict(num_micro_batches=2), dict(num_micro_batches=4, zero=2, recompute="full")):
        one = manual_plan(graph, pp=2, dp=2, tp=2, splits=random_splits(graph, 2, 3), **more)  # type: ignore[arg-type]
        two = with_stage_meshes(one, (SQUARE, SQUARE))
        told = [forecast(lower(plan, graph), plan, graph, prices) for plan in (one, two)]
        assert told[1].step_time_s == pytest.approx(told[0].step_time_s, rel=1e-9)
        assert [s.memory for s in told[1].stages] == [s.memory for s in told[0].stages]
        assert told[1].collectives == told[0].collectives
        for at in ({"pp": 0, "dp": 1, "tp": 0}, {"pp": 1, "dp": 0, "tp": 1}):
            sent = [traffic(lower(plan, graph)[at["pp"]], at) for plan in (one, two)]
            assert sent[0] == sent[1]


def test_a_stage_with_more_ranks_is_forecast_to_take_less_time() -> None:
    graph, prices = _graph("gpt2"), AnalyticPrices(load_cluster("h100-sxm-80gb:1x8"))
    narrow, wide = (_plan("gpt2", stage_meshes=(mesh, (("dp", 1), ("tp", 1)))) for mesh in ((("dp", 1), ("tp", 1)), (("dp", 4), ("tp", 1))))
    told = [forecast(lower(plan, graph), plan, graph, prices) for plan in (narrow, wide)]
    assert told[1].stages[0].flops * 4 == told[0].stages[0].flops
    assert told[1].stages[0].memory.activations < told[0].stages[0].memory.activations
    assert {event.rank for event in told[1].events} == {0, 4}


def test_a_found_plan_is_given_meshes_and_cut_again() -> None:
    """A first stage of five ranks takes more blocks than an equal one, and the plan says what it takes."""
    graph = capture(*gpt2(n_layer=6))
    found = autoplan.find_plan(graph, cluster="h100-sxm-80gb:1x2", constraints=autoplan.Constraints(pp=2, dp=1, tp=1, micro_batch_size=4))
    given = autoplan.give_meshes(found, graph, ((("dp", 4),), (("dp", 1),)), "h100-sxm-80gb:1x5")
    assert given.num_ranks == 5 and given.forecast.step_time_s > 0 and 0 <= given.gap <= 1
    assert given.stages[0].stop >= found.stages[0].stop
    assert loads(dumps(given)) == given and "dp 4 | one device" in given.explain()
    with pytest.raises(autoplan.InfeasibleError, match="has 8 devices"):
        autoplan.give_meshes(found, graph, ((("dp", 4),), (("dp", 1),)), "h100-sxm-80gb:1x8")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(stage_meshes=(WIDE,)), "1 meshes"),
        (dict(stage_meshes=(WIDE, (("cp", 2),))), "cp 2"),
        (dict(stage_meshes=(WIDE, (("dp", 8),))), "4 rows does not reach the 8 data ranks"),
        (dict(sync="ps"), "sync='ps'"),
        (dict(shares=(4, 4)), "shares"),
    ],
)
def test_what_cannot_be_had_is_named(changes: dict, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        lower(_plan(**changes), _graph())


@pytest.mark.parametrize("changes", [dict(compression="8bit"), dict(delay=1), dict(zero_group=2)])
def test_modes_of_one_data_axis_are_refused(changes: dict) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        lower(replace(_plan(), **changes), _graph())
