"""The integer program of one block (autoplan/problem.py has the terms), built with PuLP, solved by HiGHS in this process.

    minimise   m * ( sum op[o,k] x[o,k] + sum move[v,s,d] y[v,s,d] ) + sum deferred[w] a[w] + (m move[w,WHOLE,VARY] - deferred[w]) z[w]
               + u * P + q * A

    binary     x[o,k]     operator o takes option k; the only integer variables
    continuous y[v,s,d]   value v, lying as s, is converted to d
               r[w,s]     parameter w rests split as s
               a[w]       some read of w is VARY;  z[w]: some is and some is not
               k[v,b]     v is kept for the backward pass whole (b=0) or divided (b=1); its sum, if recomputation keeps that

    sum_k x[o,k] = 1
    S[v,s] = sum of x[o,k] over the options of v's producer that write s (1 for the fixed layout of a value from outside)
    R_c[v,d] = sum of x[c,k] over the options in which reader c reads v as d
    R_c[v,d] <= sum over s of y[v,s,d],  y[v,s,d] <= S[v,s]           for every reader c; s only where a conversion exists
    r[w,s] <= R_c[w,s];  sum_s r[w,s] <= 1;  rest fixed as s: R_c[w,s] = 1
    R_c[w,PARTIAL] = 0;  R_c[w,s] <= y[w,WHOLE,s] + r[w,s];   R_c[w,VARY] <= a[w];   R_c[w,VARY] - R_c'[w,VARY] <= z[w]
    x[o,k] <= k[v,b]  summed over the options k of o that keep v as b;  y[v,PARTIAL,d] <= k[v,b] of a sum that is kept, d as b;
                      R_c[v,PARTIAL] <= k[v,PARTIAL]
    parameter_factor * P + saved_factor * A <= limit                  for every budget

Given x, every continuous variable takes its smallest feasible value, so the optimum is that of problem.evaluate.
Conversions that cost nothing need no y: S[v,s] stands in their place. Solver traps: HiGHS refuses another thread count
later in one process, so it is always 1; a run that ends at its time limit reports "optimal", so `sol_status` decides. Where HiGHS
fails the program goes to CBC, if PuLP brings it along, through a file.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from autoplan.errors import AutoplanError
from autoplan.layout import PARTIAL, VARY, WHOLE, Layout, Split
from autoplan.problem import BlockPoint, BlockProblem, Budget, Price, evaluate

_USED = 1e-6  # of a relaxed variable


class _Expr:
    """A linear expression: column -> coefficient, and a constant."""

    __slots__ = ("constant", "terms")

    def __init__(self, terms: dict[int, float] | None = None, constant: float = 0.0) -> None:
        self.terms = {} if terms is None else terms
        self.constant = constant

    def plus(self, other: _Expr, factor: float = 1.0) -> _Expr:
        terms = dict(self.terms)
        for column, coefficient in other.terms.items():
            terms[column] = terms.get(column, 0.0) + factor * coefficient
        return _Expr(terms, self.constant + factor * other.constant)


@dataclass(frozen=True, slots=True)
class _Reader:
    """One operand of one operator, or the boundary: layout -> expression that it is read so."""

    reads: Mapping[Layout, _Expr]


class _Model:
    """Columns and rows, independent of the solver's library."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.integer: list[bool] = []
        self.rows: list[tuple[_Expr, str]] = []  # expression (sense) 0
        self.offset = 0.0

    def column(self, cost: float = 0.0, integer: bool = False) -> _Expr:
        self.costs.append(cost)
        self.integer.append(integer)
        return _Expr({len(self.costs) - 1: 1.0})

    def at_most_zero(self, expr: _Expr) -> None:
        if expr.terms or expr.constant > 1e-12:
            self.rows.append((expr, "<="))

    def zero(self, expr: _Expr) -> None:
        if expr.terms or expr.constant:
            self.rows.append((expr, "=="))

    def charge(self, expr: _Expr, cost: float) -> None:
        for column, coefficient in expr.terms.items():
            self.costs[column] += cost * coefficient
        self.offset += cost * expr.constant


@dataclass(frozen=True, slots=True)
class Solution:
    """The best choice and a proved lower bound of its objective (equal to it, up to rounding, unless time ran out)."""

    point: BlockPoint
    picks: tuple[int, ...]
    objective_s: float
    bound_s: float


class OutOfTime(AutoplanError):
    """The time limit passed before the solver had any answer."""


def solve(problem: BlockProblem, price: Price, budgets: tuple[Budget, ...] = (), *, gap: float = 1e-7, time_limit_s: float | None = None) -> Solution | None:
    """The cheapest choice of every operator's option, within a relative `gap`; None where nothing satisfies boundary and budgets.

    Budgets hold up to 1e-6 of their limits. Raises OutOfTime where the time limit passed without an answer, AutoplanError where no
    solver is installed, or every solver fails.
    """
    picks = _only_choice(problem)
    bound_s = None
    if picks is None:
        model, chosen = _formulate(problem, price, budgets)
        values, bound_s = _run(model, problem.name, gap, time_limit_s)
        if values is None:
            return None
        picks = tuple(_pick(columns, values) for columns in chosen)
    point = evaluate(problem, picks)
    assert bound_s is None or point is not None, f"the solver's choice for {problem.name} cannot be had"
    if point is None or (bound_s is None and not all(budget.holds(point) for budget in budgets)):
        return None
    objective_s = price.of(point)
    return Solution(point, picks, objective_s, objective_s if bound_s is None else min(bound_s, objective_s))


@dataclass(frozen=True, slots=True)
class Relaxed:
    """The program without integrality: a lower bound of the objective, and of every item the choices that it uses."""

    bound_s: float
    support: tuple[tuple[int, ...], ...]


def relax(problem: BlockProblem, price: Price, budgets: tuple[Budget, ...] = ()) -> Relaxed | None:
    """None where even the relaxation has no solution."""
    if _only_choice(problem) is not None:
        found = solve(problem, price, budgets)
        return None if found is None else Relaxed(found.bound_s, tuple((pick,) for pick in found.picks))
    model, chosen = _formulate(problem, price, budgets)
    values, bound_s = _run(model, problem.name, 0.0, None, is_relaxed=True)
    if values is None or bound_s is None:
        return None
    return Relaxed(bound_s, tuple(tuple(k for k, column in enumerate(columns) if values[column] > _USED) if columns else (0,) for columns in chosen))


def solve_near(
    problem: BlockProblem, price: Price, budgets: tuple[Budget, ...], relaxed: Relaxed, known: Solution, *, gap: float, time_limit_s: float | None = None
) -> Solution | None:
    """The cheapest choice among those of the relaxation and of a `known` solution, with the relaxation's bound.

    A budget makes the whole program slow, and the relaxation is a mixture of few choices, one of which mostly keeps the budgets. None where none
    of these do, which does not say that no other choice does. Raises as `solve` does.
    """
    kept = [tuple(sorted({*used, pick})) for used, pick in zip(relaxed.support, known.picks, strict=True)]
    items = tuple(replace(item, choices=tuple(item.choices[k] for k in ks)) for item, ks in zip(problem.items, kept, strict=True))
    found = solve(replace(problem, items=items), price, budgets, gap=gap, time_limit_s=time_limit_s)
    if found is None:
        return None
    return replace(found, picks=tuple(ks[k] for ks, k in zip(kept, found.picks, strict=True)), bound_s=min(found.objective_s, relaxed.bound_s))


def _only_choice(problem: BlockProblem) -> tuple[int, ...] | None:
    return (0,) * len(problem.items) if all(len(item.choices) == 1 for item in problem.items) else None


def _pick(columns: tuple[int, ...], values: list[float]) -> int:
    return max(range(len(columns)), key=lambda k: values[columns[k]]) if columns else 0


def _formulate(problem: BlockProblem, price: Price, budgets: tuple[Budget, ...]) -> tuple[_Model, list[tuple[int, ...]]]:
    model = _Model()
    m = price.num_micro_batches
    picks: list[tuple[int, ...]] = []
    lies: dict[str, dict[Layout, _Expr]] = {name: {layout: _Expr(constant=1.0)} for name, layout in problem.sources.items()}
    readers: dict[str, list[_Reader]] = {}
    kept: dict[tuple[str, bool], list[_Expr]] = {}
    saved = _Expr()
    for item in problem.items:
        if len(item.choices) == 1:
            xs = [_Expr(constant=1.0)]
            picks.append(())
        else:
            xs = [model.column(integer=True) for _ in item.choices]
            picks.append(tuple(next(iter(x.terms)) for x in xs))
            model.zero(_sum(xs).plus(_Expr(constant=-1.0)))
        for x, choice in zip(xs, item.choices, strict=True):
            model.charge(x, m * choice.seconds)
            saved = saved.plus(x, choice.extra_bytes)
        for position, name in enumerate(item.outputs):
            lies[name] = _by_layout(xs, [choice.option.writes[position] for choice in item.choices])
        for position, name in enumerate(item.operands):
            readers.setdefault(name, []).append(_Reader(_by_layout(xs, [choice.option.reads[position] for choice in item.choices])))
        for key in dict.fromkeys(key for choice in item.choices for key in choice.saved):
            kept.setdefault(key, []).append(_sum([x for x, choice in zip(xs, item.choices, strict=True) if key in choice.saved]))
    for name, layout in problem.wanted:
        readers.setdefault(name, []).append(_Reader({layout: _Expr(constant=1.0)}))
    parameters = _Expr()
    for name, found in readers.items():
        if name in problem.weights:
            parameters = parameters.plus(_weight_rows(model, problem, name, found, m))
        else:
            sums = _value_rows(model, problem, name, lies[name], found, m)
            for layout, shares in sums.items():
                saved = saved.plus(_largest(model, shares), problem.sum_bytes(name, layout))
    for (root, divided), expressions in kept.items():
        num_bytes = problem.saved_bytes[root] // (problem.degree if divided else 1)
        saved = saved.plus(_largest(model, expressions), num_bytes)
    model.charge(parameters, price.per_parameter_byte_s)
    model.charge(saved, price.per_saved_byte_s)
    for budget in budgets:
        scale = 1.0 / max(1.0, abs(budget.limit_bytes))
        used = _Expr().plus(parameters, budget.parameter_factor * scale).plus(saved, budget.saved_factor * scale)
        model.at_most_zero(used.plus(_Expr(constant=-budget.limit_bytes * scale)))
    return model, picks


def _sum(expressions: list[_Expr]) -> _Expr:
    total = _Expr()
    for expression in expressions:
        total = total.plus(expression)
    return total


def _by_layout(xs: list[_Expr], layouts: list[Layout]) -> dict[Layout, _Expr]:
    found: dict[Layout, _Expr] = {}
    for x, layout in zip(xs, layouts, strict=True):
        found[layout] = found[layout].plus(x) if layout in found else x
    return found


def _largest(model: _Model, expressions: list[_Expr]) -> _Expr:
    """An expression that is at least each of `expressions`, and no larger than it must be."""
    if len(expressions) == 1 or any(not e.terms and e.constant >= 1.0 for e in expressions):
        return expressions[0] if len(expressions) == 1 else _Expr(constant=1.0)
    top = model.column()
    for expression in expressions:
        model.at_most_zero(expression.plus(top, -1.0))
    return top


def _value_rows(model: _Model, problem: BlockProblem, name: str, lies: Mapping[Layout, _Expr], readers: list[_Reader], m: int) -> Mapping[Layout, list[_Expr]]:
    """Rows of one value; returns what says whether its sum is kept, by a layout that stands for all of its size."""
    sums: dict[Layout, list[_Expr]] = {}
    layouts = list(dict.fromkeys(layout for reader in readers for layout in reader.reads))
    divided = next((layout for layout in layouts if isinstance(layout, Split)), WHOLE)
    for dst in layouts:
        supply = _Expr()
        for src, share in lies.items():
            move = problem.moves.get((name, src, dst))
            if src != dst and move is not None and (move.seconds > 0.0 or move.kept_bytes):
                y = model.column(m * move.seconds)
                model.at_most_zero(y.plus(share, -1.0))
                supply = supply.plus(y)
                if move.kept_bytes:
                    sums.setdefault(divided if isinstance(dst, Split) else WHOLE, []).append(y)
            elif src == dst or move is not None:
                supply = supply.plus(share)
        for reader in readers:
            if dst in reader.reads:
                model.at_most_zero(reader.reads[dst].plus(supply, -1.0))
    if problem.keeps_sums and name in problem.sums and PARTIAL in layouts:
        sums[PARTIAL] = [reader.reads[PARTIAL] for reader in readers if PARTIAL in reader.reads]
    return sums


def _weight_rows(model: _Model, problem: BlockProblem, name: str, readers: list[_Reader], m: int) -> _Expr:
    """Rows of one parameter; returns its resting bytes."""
    weight = problem.weights[name]
    layouts = list(dict.fromkeys(layout for reader in readers for layout in reader.reads))
    splits = [layout for layout in layouts if isinstance(layout, Split)]
    nobody = _Expr()
    rests: dict[Layout, _Expr] = {}
    for split in splits:
        if weight.rest is None:
            rests[split] = _least(model, [reader.reads.get(split, nobody) for reader in readers])
        else:
            rests[split] = _Expr(constant=1.0 if weight.rest == split else 0.0)
            if weight.rest == split:
                for reader in readers:
                    model.zero(reader.reads.get(split, nobody).plus(_Expr(constant=-1.0)))
            elif len(readers) == 1:
                model.zero(readers[0].reads[split])  # a parameter read only so would rest so
    if isinstance(weight.rest, Split) and weight.rest not in rests:
        model.zero(_Expr(constant=1.0))  # nobody can read it as it rests
    for split in splits:
        move = problem.moves.get((name, WHOLE, split))
        if move is not None and move.seconds > 0.0 and len(readers) > 1:
            y = model.column(m * move.seconds)
            for reader in readers:
                if split in reader.reads:
                    model.at_most_zero(reader.reads[split].plus(rests[split], -1.0).plus(y, -1.0))
    for layout in layouts:
        if layout == PARTIAL:  # a complete value cannot become a partial sum
            for reader in readers:
                model.zero(reader.reads.get(PARTIAL, nobody))
    varying = [reader.reads.get(VARY, nobody) for reader in readers]
    if weight.requires_grad and VARY in layouts:
        model.charge(_largest(model, varying), weight.deferred_s)
        if len(readers) > 1:
            mixed = model.column(m * problem.moves[name, WHOLE, VARY].seconds - weight.deferred_s)
            for i, some in enumerate(varying):
                for j, other in enumerate(varying):
                    if i != j:
                        model.at_most_zero(some.plus(other, -1.0).plus(mixed, -1.0))
    bytes_at_rest = _Expr(constant=float(weight.num_bytes))
    for rest in rests.values():
        bytes_at_rest = bytes_at_rest.plus(rest, weight.num_bytes // problem.degree - weight.num_bytes)
    return bytes_at_rest


def _least(model: _Model, expressions: list[_Expr]) -> _Expr:
    """An expression that is at most each of `expressions`; the objective pushes it up."""
    if len(expressions) == 1:
        return expressions[0]
    low = model.column()
    for expression in expressions:
        model.at_most_zero(low.plus(expression, -1.0))
    return low


def _run(model: _Model, name: str, gap: float, time_limit_s: float | None, *, is_relaxed: bool = False) -> tuple[list[float] | None, float | None]:
    """Column values and a lower bound in seconds; (None, None) where the program has no solution. `is_relaxed`: no variable is integer."""
    if importlib.util.find_spec("pulp") is None or importlib.util.find_spec("highspy") is None:
        raise AutoplanError("the planner needs the packages pulp (below version 4) and highspy, and they are not installed: pip install 'pulp<4' highspy")
    import pulp

    if not hasattr(pulp, "HiGHS"):
        raise AutoplanError(f"pulp {pulp.__version__} has no in-process HiGHS solver: pip install 'pulp<4' highspy")
    scale = 1e4 / max(sum(abs(c) for c in model.costs), 1e-30)
    kinds = [pulp.LpInteger if integer and not is_relaxed else pulp.LpContinuous for integer in model.integer]
    program, variables = empty_program("block", [(1, kind) for kind in kinds])
    program += pulp.LpAffineExpression([(v, c * scale) for v, c in zip(variables, model.costs, strict=True)])
    for expr, sense in model.rows:
        code = pulp.LpConstraintLE if sense == "<=" else pulp.LpConstraintEQ
        terms = pulp.LpAffineExpression([(variables[i], c) for i, c in expr.terms.items() if c])
        program += pulp.LpConstraint(terms, code, rhs=-expr.constant)
    bound = _solved(program, name, gap, time_limit_s)
    if bound is None:
        return None, None
    return [float(v.varValue or 0.0) for v in variables], bound / scale + model.offset


def _solved(program: Any, name: str, gap: float, time_limit_s: float | None) -> float | None:
    """Solve `program` in place: a lower bound of its objective; None where it has no solution."""
    import pulp

    quiet_start()
    told: list[str] = []
    given: dict[str, Any] = {"gapRel": gap, "timeLimit": time_limit_s}
    # A process that ran HiGHS with other threads before gets "not solved" for ours: then with whatever it has.
    makers: list[Callable[[], Any]] = [lambda: pulp.HiGHS(msg=False, threads=1, **given), lambda: pulp.HiGHS(msg=False, **given)]
    if hasattr(pulp, "PULP_CBC_CMD"):
        makers.append(lambda: pulp.PULP_CBC_CMD(msg=False, threads=1, **given))
    for make in makers:
        solver = make()
        kind, start_s = type(solver).__name__, time.monotonic()
        try:
            if not solver.available():
                told.append(f"{kind} is not installed")
                continue
            program.solve(solver)
        except Exception as error:  # whatever a solver's library raises: the next one may have an answer
            told.append(f"{kind} failed: {type(error).__name__}: {error}")
            continue
        if program.status == pulp.LpStatusInfeasible:
            return None
        if program.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            if isinstance(solver, pulp.HiGHS):
                assert program.solverModel is not None
                told_of = program.solverModel.getInfo()
                return float(told_of.mip_dual_bound if program.isMIP() else told_of.objective_function_value)
            reached = float(pulp.value(program.objective) or 0.0)  # CBC tells no bound
            return reached - gap * abs(reached) if program.sol_status == pulp.LpSolutionOptimal else -math.inf
        if time_limit_s is not None and time.monotonic() - start_s >= 0.9 * time_limit_s:
            raise OutOfTime(f"the solver found no answer for block {name} in {time_limit_s:.2g} s: give it more time (time_limit_s)")
        told.append(f"{kind} ended with {pulp.LpStatus[program.status]!r}")
    raise AutoplanError(f"no solver has an answer for block {name}: {'; '.join(told)}")


@cache
def _program_class() -> type:
    import pulp

    class _Program(pulp.LpProblem):
        """A program that knows its variables; PuLP's looks for them in every row, each time that it is asked."""

        columns: list[Any]

        def variables(self) -> list[Any]:
            return self.columns

    return _Program


def empty_program(name: str, columns: Sequence[tuple[int | None, str]]) -> tuple[Any, list[Any]]:
    """A minimisation of PuLP's without rows, and its variables from 0 to the given limit (None: without) of the given kind."""
    import pulp

    program = _program_class()(name, pulp.LpMinimize)
    create = getattr(program, "add_variable", pulp.LpVariable)  # older releases have the class alone
    program.columns = [create(f"c{i:06d}", 0, limit, kind) for i, (limit, kind) in enumerate(columns)]
    return program, program.columns


@cache
def quiet_start() -> None:
    """Make the first HiGHS object of the process, which prints a banner on the C library's standard output, unheard."""
    import highspy

    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        highspy.Highs()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
