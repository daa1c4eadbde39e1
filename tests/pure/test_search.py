"""The search: obeys constraints, fits memory, proves its gap, says why."""

from __future__ import annotations

import dataclasses

import pytest
from handmade import Builder, FlatPrices, transformer

from autoplan.constraints import Constraints
from autoplan.errors import AutoplanError, InfeasibleError, UsageError
from autoplan.explore import Searcher
from autoplan.graph import Graph
from autoplan.lower import lower
from autoplan.plan import Plan, recomputed
from autoplan.planfile import dumps, loads
from autoplan.search import search
from autoplan.task import Task
from costmodel.cluster import Cluster

GIB = 2**30


@pytest.fixture(scope="module")
def graph() -> Graph:
    return transformer(layers=4, batch=8, seq=64, hidden=512, heads=8, inner=2048, vocab=1000)


def found(graph: Graph, devices: int = 4, limit_bytes: int = 80 * GIB, **constraints) -> Plan:
    return search(graph, Cluster.parse(f"a100-sxm-80gb:1x{devices}"), FlatPrices(limit_bytes), Constraints(**constraints))


@pytest.mark.parametrize(
    "fixed",
    [{"dp": 4}, {"tp": 4}, {"pp": 4}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2, "zero": 3}, {"schedule": "gpipe", "pp": 2}, {"micro_batch_size": 1, "pp": 2}],
    ids=str,
)
def test_fixed_fields_are_obeyed(graph: Graph, fixed: dict) -> None:
    plan = found(graph, **fixed)
    got = {"pp": plan.degree("pp"), "dp": plan.degree("dp"), "tp": plan.degree("tp")}
    got |= {"zero": plan.zero, "schedule": plan.schedule, "micro_batch_size": plan.micro_batch_size}
    assert {name: got[name] for name in fixed} == fixed
    assert got["pp"] * got["dp"] * got["tp"] == 4
    assert plan.micro_batch_size * plan.num_micro_batches * plan.degree("dp") == plan.global_batch


def test_the_free_plan_is_no_slower_than_any_fixed_one(graph: Graph) -> None:
    free = found(graph)
    for fixed in ({"dp": 4}, {"tp": 4}, {"pp": 4}, {"pp": 2, "tp": 2}, {"zero": 3}, {"recompute": "full"}):
        assert found(graph, **fixed).forecast.step_time_s >= free.forecast.step_time_s * (1 - free.gap) * (1 - 1e-9)


def test_equal_input_gives_an_equal_plan_byte_for_byte(graph: Graph) -> None:
    assert dumps(found(graph)) == dumps(found(graph))


def test_a_tight_memory_limit_changes_the_plan_and_is_kept(graph: Graph) -> None:
    roomy = found(graph, dp=4)
    limit = int(roomy.forecast.peak_memory_bytes * 0.7)
    tight = found(graph, dp=4, limit_bytes=limit)
    assert tight.forecast.peak_memory_bytes <= limit
    assert (tight.zero, tight.micro_batch_size, recomputed(tight)) != (roomy.zero, roomy.micro_batch_size, recomputed(roomy))


@pytest.mark.parametrize("fixed", [{"pp": 1, "dp": 4}, {"pp": 4, "schedule": "1f1b"}, {"pp": 2, "dp": 2, "schedule": "interleaved"}], ids=str)
def test_layers_are_recomputed_each_in_its_own_way_as_far_as_memory_asks(graph: Graph, fixed: dict) -> None:
    """Between the memory of no recomputation and that of all layers', some layers are recomputed: faster than all, and within the limit."""
    fixed = {**fixed, "zero": 0, "micro_batch_size": 1}
    none, full = found(graph, **fixed, recompute="none"), found(graph, **fixed, recompute="full")
    limit = (none.forecast.peak_memory_bytes + full.forecast.peak_memory_bytes) // 2
    mixed = found(graph, **fixed, limit_bytes=limit)
    assert mixed.forecast.peak_memory_bytes <= limit < none.forecast.peak_memory_bytes
    assert none.forecast.step_time_s < mixed.forecast.step_time_s < full.forecast.step_time_s
    assert len({way for way, block in zip(recomputed(mixed), graph.blocks, strict=True) if block.layer}) > 1
    assert loads(dumps(mixed)) == mixed
    told = [code.recompute for program in lower(mixed, graph) for stage in program.stages for code in stage.bodies[0].blocks]
    assert sorted(told) == sorted(recomputed(mixed))


def test_what_cannot_fit_says_which_memory_by_how_much_and_what_would_help(graph: Graph) -> None:
    with pytest.raises(InfeasibleError) as error:
        found(graph, limit_bytes=2**20)
    assert "GiB more than the limit" in str(error.value)
    assert "Most of it is" in str(error.value)
    assert "would fit with" in str(error.value)


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"tp": 3}, "which does not divide the cluster's 4 devices"),
        ({"tp": 2, "dp": 2, "pp": 2}, "multiply to 8, but the cluster has 4 devices"),
        ({"cp": 2}, "no attention operator, whose sequence it would divide"),
        ({"tensor": "3d"}, "no divisor of 4 is a grid of q x q x q"),
        ({"tensor": "2d", "tp": 2}, "the ranks form a grid of q x q, and 2 is no such product. Nearest: tp=4"),
        ({"tensor": "2.5d"}, "no divisor of 4 is a grid of d x q x q"),
        ({"schedule": "1f1b", "num_chunks": 2}, "which puts one stage on a rank"),
        ({"schedule": "zbv", "num_chunks": 3}, "which puts two stages on a rank"),
        ({"schedule": "interleaved", "pp": 4, "num_chunks": 2}, "no mesh of 4 devices"),
        ({"schedule": "zb", "compression": "1bit"}, "a split backward pass"),
        ({"placement": {"lost": 0}}, "nearest"),
        ({"micro_batch_size": 3}, "does not divide the 8 rows"),
        ({"zero_group": 3}, "zero_group=3 does not divide"),
        ({"zero_group": 2, "zero": 0}, "nothing is shared"),
        ({"stage_layers": (1, 2)}, "places 3 layers, but the model has 4"),
    ],
    ids=str,
)
def test_what_cannot_be_had_is_refused_with_the_reason(graph: Graph, fixed: dict, message: str) -> None:
    with pytest.raises(InfeasibleError, match=message):
        found(graph, **fixed)


def test_values_outside_a_fields_range_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="zero=4"):
        Constraints(zero=4)
    with pytest.raises(UsageError, match="whole number"):
        Constraints(tp=0)
    with pytest.raises(UsageError, match="disagree"):
        Constraints(pp=2, stage_layers=(1, 1, 1))


def test_a_tensor_degree_that_splits_nothing_is_refused() -> None:
    b = Builder(batch=8)
    h = b.factor(6)
    b.value("e", "parameter", (h,))
    b.value("given", "input", (0, h), grad=False)
    b.op("x", "aten.mul.Tensor", ["e", "given"], (0, h), [(0, "map"), (h, "map")])
    b.op("loss", "aten.sum.default", ["x"], (), [(0, "sum"), (h, "sum")], linear_in=((0,),))
    b.block("all", 0, "all")
    with pytest.raises(InfeasibleError, match=r"tp=4 can split nothing .*sizes that can be split: 6"):
        found(b.graph(loss="loss"), tp=4)


def test_stage_layers_place_the_layers(graph: Graph) -> None:
    plan = found(graph, stage_layers=(1, 3), dp=2)
    layers = [sum(graph.blocks[i].layer for i in range(stage.start, stage.stop)) for stage in plan.stages]
    assert layers == [1, 3]


def test_stages_cover_all_blocks_in_order(graph: Graph) -> None:
    plan = found(graph, pp=4)
    assert [s.start for s in plan.stages] == [0, *(s.stop for s in plan.stages[:-1])]
    assert plan.stages[-1].stop == len(graph.blocks)


def test_the_ranking_names_every_runner_up_with_its_reason(graph: Graph) -> None:
    plan = found(graph)
    assert len(plan.alternatives) >= 3
    assert all(a.reason for a in plan.alternatives)
    assert set(plan.space) >= {"pp", "dp", "tp", "micro_batch_size", "schedule", "zero", "recompute", "boundary"}


def test_every_bound_is_below_what_the_shape_takes(graph: Graph) -> None:
    cluster = Cluster.parse("a100-sxm-80gb:1x4")
    searcher = Searcher(Task(graph, cluster, FlatPrices(), Constraints(), "adamw", None, None))
    space = searcher.space
    for shape in space.shapes[::3]:
        times = [r.step_s for r in searcher.works.plans(shape)[0]]
        bounds = [searcher.shapes.peak_bound(shape), *(bound(shape) for bound in searcher.shapes.tighter)]
        assert max(bounds) <= min(times) * (1 + 1e-9), (shape, bounds, min(times))


def test_what_a_search_begins_with_changes_no_plan(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster.parse("a100-sxm-80gb:1x4")
    later = Searcher(Task(graph, cluster, FlatPrices(), Constraints(), "adamw", None, None)).run()
    monkeypatch.setattr("autoplan.explore._MANY_SHAPES", 0)
    searcher = Searcher(Task(graph, cluster, FlatPrices(), Constraints(), "adamw", None, None))
    usual = [(shape.tp, shape.pp) for shape in searcher._usual(searcher.space.shapes)]
    first = searcher.run()
    assert usual[0] == (1, 1) and {tp for tp, _ in usual} == {1, 4}
    assert (first.best().order, first.best().step_s) == (later.best().order, later.best().step_s)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_no_shape_that_was_pruned_is_better(share: float) -> None:
    small = transformer(layers=3, batch=4, seq=32, hidden=256, heads=4, inner=1024, vocab=1000)
    cluster = Cluster.parse("a100-sxm-80gb:1x4")

    def searcher(limit_bytes: int) -> Searcher:
        return Searcher(Task(small, cluster, FlatPrices(limit_bytes), Constraints(), "adamw", None, None))

    limit = int(searcher(80 * GIB).run().best().memory.total * share)
    outcome = searcher(limit).run()
    every = searcher(limit)
    times = [r.step_s for shape in every.space.shapes for r in every.works.plans(shape)[0] if r.fits]
    assert bool(outcome.fitting) == bool(times)
    if times:
        assert outcome.best().step_s * (1 - outcome.gap(outcome.best())) <= min(times) * (1 + 1e-9)
        assert outcome.best().step_s <= min(times) * 1.01


def test_micro_batches_are_not_offered_where_the_loss_is_no_sum_over_rows(graph: Graph) -> None:
    last = graph.ops[-1]
    changed = dataclasses.replace(graph, ops=(*graph.ops[:-1], dataclasses.replace(last, loops=())))
    plan = found(changed, devices=2, dp=2)
    assert plan.num_micro_batches == 1
    assert any("one micro-batch only" in w for w in plan.warnings)
    with pytest.raises(AutoplanError, match="micro-batches"):
        found(changed, devices=2, dp=1, micro_batch_size=1)


def tied_graph() -> Graph:
    """The transformer with its head reading the embedding."""
    graph = transformer(layers=2, batch=8, seq=32, hidden=256, heads=8, inner=1024, vocab=1000)
    ops = tuple(dataclasses.replace(op, instr=_renamed(op.instr)) for op in graph.ops)
    values = {name: v for name, v in graph.values.items() if name != "head"}
    return dataclasses.replace(graph, ops=ops, values=values)


def _renamed(instr):
    return dataclasses.replace(instr, args=tuple(dataclasses.replace(a, name="emb") if getattr(a, "name", "") == "head" else a for a in instr.args))


def test_a_tied_parameter_rests_in_one_layout_and_is_counted_once() -> None:
    graph = tied_graph()
    searcher = Searcher(Task(graph, Cluster.parse("a100-sxm-80gb:1x2"), FlatPrices(), Constraints(tp=2), "adamw", None, None))
    best = searcher.run().best()
    rests = [best.chosen.point(pattern).rests["emb"] for pattern in ("prologue", "epilogue")]
    assert rests[0] == rests[1]
    dense = sum(v.spec.shape[0] * (v.spec.shape[1] if len(v.spec.shape) > 1 else 1) for v in graph.parameters())
    assert best.loads[0].parameter_elements <= dense
    piped = found(graph, devices=2, pp=2)
    assert any(c.axis == "tied" for c in piped.collectives)
