"""A small linear integer program, written column by column and handed to HiGHS in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autoplan.errors import AutoplanError
from autoplan.ilp import empty_program, quiet_start

Terms = Sequence[tuple[int, float]]  # (column, factor)
_GAP = 1e-4


class Program:
    """Columns with costs, and rows over them. The objective is minimised."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.is_binary: list[bool] = []
        self.rows: list[tuple[Terms, str, float]] = []

    def binary(self, cost: float = 0.0) -> int:
        """A column that is 0 or 1."""
        return self._column(cost, is_binary=True)

    def number(self, cost: float = 0.0) -> int:
        """A column that is at least 0."""
        return self._column(cost, is_binary=False)

    def _column(self, cost: float, *, is_binary: bool) -> int:
        self.costs.append(cost)
        self.is_binary.append(is_binary)
        return len(self.costs) - 1

    def at_most(self, terms: Terms, limit: float) -> None:
        self.rows.append((terms, "<=", limit))

    def equal(self, terms: Terms, value: float) -> None:
        self.rows.append((terms, "==", value))


def minimise(build: Callable[[Program], None], name: str) -> tuple[tuple[float, ...], float] | None:
    """(column values, objective) of the program that `build` writes; None where it has no solution. Raises AutoplanError where the solver fails."""
    import pulp

    program = Program()
    build(program)
    scale = 1e4 / max(sum(abs(c) for c in program.costs), 1e-30)
    model, columns = empty_program(name, [(1, pulp.LpInteger) if binary else (None, pulp.LpContinuous) for binary in program.is_binary])
    model += pulp.LpAffineExpression([(v, c * scale) for v, c in zip(columns, program.costs, strict=True)])
    for terms, sense, limit in program.rows:
        added: dict[int, float] = {}
        for column, factor in terms:
            added[column] = added.get(column, 0.0) + factor
        expression = pulp.LpAffineExpression([(columns[i], f) for i, f in added.items() if f])
        model += pulp.LpConstraint(expression, pulp.LpConstraintLE if sense == "<=" else pulp.LpConstraintEQ, rhs=limit)
    quiet_start()
    for threads in (1, None):  # a process that ran HiGHS with other threads before says "not solved" to ours
        try:
            model.solve(pulp.HiGHS(msg=False, threads=threads, gapRel=_GAP))
        except pulp.PulpSolverError as error:
            raise AutoplanError(f"the solver failed on the {name}: {error}") from error
        if model.status == pulp.LpStatusInfeasible:
            return None
        if model.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            values = tuple(float(v.varValue or 0.0) for v in columns)
            return values, sum(v * c for v, c in zip(values, program.costs, strict=True))
    raise AutoplanError(f"the solver found no answer for the {name}: status {pulp.LpStatus[model.status]!r}")
