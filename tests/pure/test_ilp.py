"""The integer program against enumeration, and the layouts it finds."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path

import pytest
from handmade import Builder, FlatPrices, transformer
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.batchaxis import batch_axis
from autoplan.blockprices import BlockPricer
from autoplan.errors import AutoplanError
from autoplan.graph import Graph
from autoplan.ilp import solve
from autoplan.layout import WHOLE, Layout, Split
from autoplan.price import LocalGraph, Pricer
from autoplan.problem import BlockProblem, Budget, Price, evaluate
from costmodel.opkey import RankGroup


def problem_of(graph: Graph, block: int, degree: int, boundary: dict[str, Layout], wanted: dict[str, Layout], rows: int = 4) -> BlockProblem:
    axis = batch_axis(graph)
    local = LocalGraph(graph, axis.options, axis.layouts, rows, degree, Pricer(FlatPrices(), None))
    found = graph.blocks[block]
    return BlockPricer(local, RankGroup(degree)).problem(found.name, tuple(range(found.start, found.stop)), boundary, tuple(wanted.items()), {})


def start(b: Builder, factors: tuple[int, ...]) -> None:
    """An earlier block that makes the activation "x"."""
    b.value("e", "parameter", factors[1:])
    b.value("given", "input", (0,), grad=False)
    b.op("x", "aten.mul.Tensor", ["e", "given"], factors, [(f, "map") for f in factors])
    b.block("before", 0, "before")


def random_graph(seed: int) -> tuple[Graph, list[str]]:
    rng = random.Random(seed)
    b = Builder(batch=4)
    s, h, f = b.factor(rng.choice([8, 16, 6])), b.factor(rng.choice([16, 64, 256])), b.factor(rng.choice([32, 512]))
    start(b, (0, s, h))
    pool = ["x"]
    weights: list[str] = []
    for i in range(rng.randint(2, 5)):
        x = rng.choice(pool)
        last = b.values[x].dims[-1][0]
        kind = rng.choice(["linear", "linear", "add", "act", "norm", "shared", "bias"])
        if kind == "linear":
            w = b.value(f"w{i}", "parameter", (rng.choice([h, f]), last), grad=rng.random() < 0.9)
            weights.append(w)
            pool.append(b.linear(f"v{i}", x, w))
        elif kind == "shared" and any(b.values[w].dims[1][0] == last for w in weights):
            w = next(w for w in weights if b.values[w].dims[1][0] == last)
            pool.append(b.linear(f"v{i}", x, w))
        elif kind == "add":
            other = rng.choice([n for n in pool if b.values[n].dims[-1][0] == last])
            pool.append(b.elementwise(f"v{i}", [x, other], linear=True))
        elif kind == "bias":
            w = b.value(f"b{i}", "parameter", (last,))
            pool.append(b.elementwise(f"v{i}", [x, w], linear=True))
        elif kind == "norm":
            w = b.value(f"n{i}", "parameter", (last,))
            pool.append(b.norm(f"v{i}", x, w))
        else:
            pool.append(b.elementwise(f"v{i}", [x], (x,)))
    b.block("b", 1, "p")
    return b.graph(), pool


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), micro_batches=st.sampled_from([1, 3]), limit=st.sampled_from([None, 0.6, 0.9]), split=st.booleans())
def test_the_integer_program_equals_enumeration(seed: int, micro_batches: int, limit: float | None, split: bool) -> None:
    graph, pool = random_graph(seed)
    divides = graph.values["x"].spec.shape[1] % 2 == 0
    at_rest: Layout = Split(1) if split and divides else WHOLE
    problem = problem_of(graph, 1, 2, {"x": at_rest}, {pool[-1]: at_rest} if pool[-1] != "x" else {})
    price = Price(micro_batches, per_parameter_byte_s=1e-12, per_saved_byte_s=1e-13)
    points = [evaluate(problem, picks) for picks in itertools.product(*(range(len(item.choices)) for item in problem.items))]
    feasible = [p for p in points if p is not None]
    budgets: tuple[Budget, ...] = ()
    if limit is not None:
        both = Budget(limit * max(p.parameter_bytes + 2 * p.saved_bytes for p in feasible), 1.0, 2.0)
        budgets = (both, Budget(limit * max(p.saved_bytes for p in feasible), 0.0, 1.0))
        feasible = [p for p in feasible if all(budget.holds(p) for budget in budgets)]
    found = solve(problem, price, budgets)
    if not feasible:
        assert found is None
        return
    best = min(price.of(p) for p in feasible)
    assert found is not None
    assert found.objective_s == pytest.approx(best, rel=1e-6)
    assert found.bound_s <= best * (1 + 1e-6)


def layer_solution(boundary: Layout, **sizes):
    graph = transformer(layers=1, **sizes)
    problem = problem_of(graph, 1, 2, {"x0": boundary}, {"s0": boundary})
    found = solve(problem, Price(4, per_parameter_byte_s=1e-13))
    assert found is not None
    return problem, found


def test_the_megatron_layout_comes_out_without_layer_names() -> None:
    _, found = layer_solution(WHOLE, hidden=1024, inner=4096, seq=64)
    rests = {name: str(layout) for name, layout in found.point.rests.items()}
    assert rests == {
        "n1.0": "whole", "n2.0": "whole",
        "wq.0": "split(0.0)", "wk.0": "split(0.0)", "wv.0": "split(0.0)", "wo.0": "split(1.0)",
        "up.0": "split(0.0)", "down.0": "split(1.0)",
    }  # fmt: skip
    kinds = sorted((u.kind, u.phase) for u in found.point.uses)
    assert kinds == [("all_reduce", "backward")] * 2 + [("all_reduce", "forward")] * 2


def test_a_sequence_split_boundary_gives_megatron_sequence_parallelism() -> None:
    _, found = layer_solution(Split(1), hidden=1024, inner=4096, seq=64)
    kinds = sorted((u.kind, u.phase) for u in found.point.uses if u.phase != "reduce")
    expected = [(kind, phase) for phase in ("forward", "backward") for kind in ("all_gather", "reduce_scatter") for _ in range(2)]
    assert kinds == sorted(expected)
    assert sorted(u.phase for u in found.point.uses if u.kind == "all_reduce") == ["reduce", "reduce"]  # the norms' gradients, once a step


def test_an_operator_without_rule_stays_whole() -> None:
    b = Builder()
    h = b.factor(64)
    start(b, (0, h))
    b.op("y", "aten.mystery.default", ["x"], (0, h), [])
    b.block("b", 1, "p")
    found = solve(problem_of(b.graph(), 1, 2, {"x": Split(1)}, {"y": WHOLE}), Price())
    assert found is not None
    assert found.point.labels == ("whole",)
    assert [(u.kind, u.phase) for u in found.point.uses] == [("all_gather", "forward")]


def test_a_missing_solver_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    graph = transformer(layers=1)
    problem = problem_of(graph, 1, 2, {"x0": WHOLE}, {"s0": WHOLE})
    with pytest.raises(AutoplanError, match="pip install 'pulp<4' highspy"):
        solve(problem, Price())


def test_a_process_that_ran_the_solver_with_other_threads_gets_the_same_answer() -> None:
    code = (
        "import sys; sys.path[:0] = ['tests/pure', '.']\n"
        "import highspy; h = highspy.Highs(); h.setOptionValue('output_flag', False); h.setOptionValue('threads', 2)\n"
        "h.addCol(1.0, 0, 1, 0, [], []); h.changeColIntegrality(0, highspy.HighsVarType.kInteger); h.run()\n"
        "from test_ilp import layer_solution; from autoplan.layout import WHOLE\n"
        "print(layer_solution(WHOLE, hidden=1024, inner=4096, seq=64)[1].picks)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, cwd=Path(__file__).parents[2])
    assert ran.stdout.strip().splitlines()[-1] == str(layer_solution(WHOLE, hidden=1024, inner=4096, seq=64)[1].picks)
