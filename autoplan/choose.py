"""Choices for all blocks of a model: one integer program for each distinct pattern, whatever the number of layers.

A *boundary* says how values that cross between blocks lie on the tensor axis: all whole, or those that carry one chosen factor
(a sequence, channels, ...) split on it. Values without gradient, and those that do not carry the factor, are whole. Parameters
that several patterns use (tied embeddings) rest in one layout everywhere: each combination of layouts is tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from autoplan.batchaxis import BatchAxis, batch_axis
from autoplan.blockprices import BlockPricer
from autoplan.cubeprices import CubePricer
from autoplan.graph import Block, Graph
from autoplan.ilp import Relaxed, Solution, relax, solve, solve_near
from autoplan.layout import WHOLE, Layout, Split
from autoplan.price import Context, LocalGraph, Pricer, axis_group
from autoplan.problem import BlockPoint, BlockProblem, Budget, Price, evaluate, repeating
from autoplan.schemes import Axes, feature_axes, row_unit

Clock = Callable[[], float | None]

_MAX_FACTORS = 2  # boundaries tried beside "whole"
_GAP = 1e-3  # of one integer program; its proved bound counts, so that the plan's gap stays true
_LEAN_GAP = 1e-2  # of one with budgets
_REUSE = 5e-3  # a known answer may be so much above its bound at another price
_MAX_SHARED = 9  # combinations of layouts of shared parameters


@dataclass(frozen=True, slots=True)
class Boundary:
    """How values between blocks lie: split on `factor` (None: whole), or over so many `features` ranks along their last dimension;
    `shared`: layouts of parameters of several patterns."""

    factor: int | None
    shared: tuple[tuple[str, Layout], ...]
    features: int = 1


@dataclass(frozen=True)
class Chosen:
    """One choice for every pattern. `points` by pattern; `bound_s` is a lower bound of the objective summed over all blocks."""

    boundary: Boundary
    solutions: Mapping[str, Solution]

    def point(self, pattern: str) -> BlockPoint:
        return self.solutions[pattern].point


class Outline:
    """What the search needs of a graph, computed once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.batch: BatchAxis = batch_axis(graph)
        self._step = frozenset(self.batch.body)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Blocks that do something in a step."""
        return tuple(i for i, block in enumerate(self.graph.blocks) if self.indices(block))

    @cached_property
    def examples(self) -> Mapping[str, int]:
        """Pattern -> number of its first block, which plans name ops by."""
        found: dict[str, int] = {}
        for i, block in enumerate(self.graph.blocks):
            found.setdefault(block.pattern, i)
        return found

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """Pattern -> number of its blocks."""
        found: dict[str, int] = {}
        for block in self.graph.blocks:
            found[block.pattern] = found.get(block.pattern, 0) + 1
        return found

    def is_recomputed(self, pattern: str) -> bool:
        """Whether recomputation is for blocks of a pattern: layers, where the model has any."""
        return self.graph.blocks[self.examples[pattern]].layer or not any(block.layer for block in self.graph.blocks)

    def indices(self, block: Block) -> tuple[int, ...]:
        """The block's ops that run in every micro-batch."""
        return tuple(i for i in range(block.start, block.stop) if i in self._step)

    @cached_property
    def block_of(self) -> Mapping[int, int]:
        """Op -> its block."""
        return {i: number for number, block in enumerate(self.graph.blocks) for i in range(block.start, block.stop)}

    @cached_property
    def crossing(self) -> Mapping[str, tuple[int, ...]]:
        """Activation that leaves its block -> the other blocks that read it, ascending."""
        found: dict[str, tuple[int, ...]] = {}
        for name, index in self.graph.producer.items():
            if index not in self._step or name in self.batch.preamble_outputs:
                continue
            home = self.block_of[index]
            readers = dict.fromkeys(self.block_of[i] for i in self.graph.consumers.get(name, ()) if i in self._step and self.block_of[i] != home)
            if readers:
                found[name] = tuple(readers)
        return found

    @cached_property
    def _users(self) -> Mapping[str, tuple[int, ...]]:
        """Parameter, buffer or constant -> the blocks that read it, ascending."""
        users: dict[str, dict[int, None]] = {}
        for i in self.batch.body:
            for name in self.graph.ops[i].operands:
                if self.graph.values[name].kind in ("parameter", "buffer", "constant"):
                    users.setdefault(name, {})[self.block_of[i]] = None
        return {name: tuple(blocks) for name, blocks in users.items()}

    @cached_property
    def shared(self) -> tuple[str, ...]:
        """Parameters that blocks of more than one pattern use."""
        return tuple(name for name, blocks in self.tied.items() if len({self.graph.blocks[n].pattern for n in blocks}) > 1)

    @cached_property
    def shared_in(self) -> Mapping[str, tuple[str, ...]]:
        """Pattern -> the shared parameters that its blocks use."""
        used = {name: [self.graph.blocks[n].pattern for n in self.tied[name]] for name in self.shared}
        return {pattern: tuple(name for name, patterns in used.items() if pattern in patterns) for pattern in self.examples}

    @cached_property
    def tied(self) -> Mapping[str, tuple[int, ...]]:
        """Parameter used by more than one block -> those blocks."""
        return {name: blocks for name, blocks in self._users.items() if len(blocks) > 1 and self.graph.values[name].kind == "parameter"}

    @cached_property
    def buffers(self) -> Mapping[str, tuple[int, ...]]:
        """Buffer or constant -> the blocks that read it."""
        return {name: blocks for name, blocks in self._users.items() if self.graph.values[name].kind != "parameter"}

    def boundaries(self, degree: int, sequence_parallel: bool | None) -> tuple[Boundary, ...]:
        """The boundaries that are tried on an axis of `degree` ranks. `sequence_parallel`: only split ones, or only whole."""
        graph = self.graph
        counts: dict[int, int] = {}
        streams = [name for name in self.crossing if graph.values[name].requires_grad]
        for inner in (False, True):  # features only where there is nothing else to split
            for name in streams if not counts else ():
                dims = graph.values[name].dims
                for factor in itertools.chain(*(dims if inner else dims[:-1])):
                    if factor != graph.batch_factor and graph.divides(factor, degree) and graph.factor_sizes[factor] > 1:
                        counts[factor] = counts.get(factor, 0) + 1
        often = sorted((f for f, n in counts.items() if 2 * n >= len(streams)), key=lambda f: (-counts[f], f))[:_MAX_FACTORS]
        factors: list[int | None] = [None, *often] if degree > 1 else [None]
        if sequence_parallel is not None and degree > 1:
            factors = [f for f in factors if (f is not None) == sequence_parallel]
        rests = self._shared_layouts(degree)
        return tuple(Boundary(factor, rest) for factor in factors for rest in rests)

    def feature_boundaries(self, degree: int) -> tuple[Boundary, ...]:
        """The boundaries of a grid, whose activations lie divided over rows and features."""
        return tuple(Boundary(None, rest, degree) for rest in self._shared_layouts(degree))

    def _shared_layouts(self, degree: int) -> tuple[tuple[tuple[str, Layout], ...], ...]:
        options: list[list[Layout]] = []
        for name in self.shared:
            value = self.graph.values[name]
            splits: list[Layout] = []
            if degree > 1:
                for d, dims in enumerate(value.dims):
                    splits += [Split(d, k) for k, factor in enumerate(dims) if self.graph.factor_sizes[factor] % degree == 0]
            options.append([WHOLE, *splits])
        count = 1
        for found in options:
            count *= len(found)
        if count > _MAX_SHARED:
            options = [[WHOLE] for _ in self.shared]
        return tuple(tuple(zip(self.shared, combination, strict=True)) for combination in itertools.product(*options))

    def layout(self, name: str, boundary: Boundary) -> Layout:
        """How a value between blocks lies on the tensor axis."""
        value = self.graph.values[name]
        if boundary.features > 1 and value.requires_grad and value.dims:
            last = (Split(len(value.dims) - 1, k) for k, f in enumerate(value.dims[-1]) if f != self.graph.batch_factor)
            return next((s for s in last if self.graph.factor_sizes[value.dims[s.dim][s.factor]] % boundary.features == 0), WHOLE)
        if boundary.factor is None or not value.requires_grad:
            return WHOLE
        for d, dims in enumerate(value.dims):
            if boundary.factor in dims:
                return Split(d, dims.index(boundary.factor))
        return WHOLE

    def boundary_of(self, number: int, boundary: Boundary) -> tuple[dict[str, Layout], tuple[tuple[str, Layout], ...]]:
        """Layouts of what enters block `number`, and of what leaves it."""
        block = self.graph.blocks[number]
        enters: dict[str, Layout] = {}
        for i in self.indices(block):
            for name in self.graph.ops[i].operands:
                if name in self.batch.preamble_outputs:
                    enters[name] = WHOLE
                elif name in self.graph.producer and not block.start <= self.graph.producer[name] < block.stop:
                    enters[name] = self.layout(name, boundary)
        leaves = [(name, self.layout(name, boundary)) for name in self.crossing if block.start <= self.graph.producer[name] < block.stop]
        finals = (self.graph.loss, *(value for _, value in self.graph.buffer_updates))
        if self.graph.loss is None:
            finals = (*self.graph.outputs, *finals)
        for name in finals:
            if name is not None and block.start <= self.graph.producer.get(name, -1) < block.stop:
                leaves.append((name, WHOLE))
        return enters, tuple(dict.fromkeys(leaves))


class Chooser:
    """Solves patterns on one tensor grid and number of rows, each question once.

    Two boundaries that look the same from a block are one question. `steady`: the price with the most micro-batches; `clock`: seconds that
    a solver may still take, None for any.
    """

    def __init__(
        self,
        outline: Outline,
        rows: int,
        grid: Axes,
        pricer: Pricer,
        forbidden: frozenset[int],
        steady: Price,
        clock: Clock = lambda: None,
        scheme: str = "1d",
        contexts: tuple[Context, ...] = (),
    ) -> None:
        self.outline = outline
        (feature_axis, degree), graph, batch = feature_axes(grid)[0], outline.graph, outline.batch
        cube = CubePricer(graph, batch, rows, grid, pricer) if scheme == "3d" else None
        self.local = cube.local if cube else LocalGraph(graph, batch.options, batch.layouts, rows // row_unit(grid), degree, pricer, grid, contexts)
        self.prices = cube or BlockPricer(self.local, axis_group(grid, feature_axis), forbidden, scheme)
        self._problems: dict[tuple, BlockProblem] = {}
        self._solved: dict[tuple[tuple, Price], Solution | None] = {}
        self._within: dict[tuple[tuple, Price, tuple[Budget, ...]], Solution | None] = {}
        self._relaxed: dict[tuple[tuple, Price, tuple[Budget, ...]], Relaxed | None] = {}
        self._totals: dict[tuple[Boundary, str], float] = {}
        self._clock = clock
        self.steady = steady
        self._seen: dict[tuple[str, Boundary, str], tuple] = {}

    def _view(self, pattern: str, boundary: Boundary, recompute: str) -> tuple:
        """What a boundary is for one block: layouts of what enters, of what leaves, and of shared parameters that it uses; and what is run again."""
        key = (pattern, boundary, recompute)
        if key not in self._seen:
            enters, leaves = self.outline.boundary_of(self.outline.examples[pattern], boundary)
            used = self.outline.shared_in[pattern]
            shared = tuple((name, rest) for name, rest in boundary.shared if name in used)
            self._seen[key] = (pattern, tuple(enters.items()), leaves, shared, recompute if self.outline.is_recomputed(pattern) else "none")
        return self._seen[key]

    def problem(self, pattern: str, boundary: Boundary, recompute: str = "none") -> BlockProblem:
        """The problem of one pattern; what is run again counts in the backward pass."""
        view = self._view(pattern, boundary, recompute)
        if view not in self._problems:
            block = self.outline.graph.blocks[self.outline.examples[pattern]]
            _, enters, leaves, rests, again = view
            if again != "none":
                self._problems[view] = repeating(self.problem(pattern, boundary), again)
            else:
                self._problems[view] = self.prices.problem(block.name, self.outline.indices(block), dict(enters), leaves, dict(rests))
        return self._problems[view]

    def choose(self, boundary: Boundary, price: Price, recompute: str = "none") -> Chosen | None:
        """The best choice of every pattern; None where the boundary cannot be had."""
        found: dict[str, Solution] = {}
        for pattern in self.outline.examples:
            if (solution := self._answer(pattern, boundary, price, recompute)) is None:
                return None
            found[pattern] = self._plain(pattern, boundary, recompute, solution)
        return Chosen(boundary, found)

    def _plain(self, pattern: str, boundary: Boundary, recompute: str, solution: Solution) -> Solution:
        """A solution whose point does not count what is run again."""
        if self._view(pattern, boundary, recompute)[-1] == "none":
            return solution
        point = evaluate(self.problem(pattern, boundary), solution.picks)
        assert point is not None, "what is run again changes seconds alone"
        return replace(solution, point=point)

    def _answer(self, pattern: str, boundary: Boundary, price: Price, recompute: str) -> Solution | None:
        key = (self._view(pattern, boundary, recompute), price)
        if key not in self._solved:
            asked = (pattern, boundary, price, recompute)
            self._solved[key] = self._known(*asked) or self._near(*asked) or self._solve(*asked)
        return self._solved[key]

    def _solve(self, pattern: str, boundary: Boundary, price: Price, recompute: str) -> Solution | None:
        return solve(self.problem(pattern, boundary, recompute), price, gap=_GAP, time_limit_s=self._clock())

    def _near(self, pattern: str, boundary: Boundary, price: Price, recompute: str) -> Solution | None:
        """The best choice among those of the relaxation and the steady answer. Bounds of shapes come from steady answers, so that nothing is
        proved by it; the whole program can take seconds where parameters weigh much."""
        known = None if price == self.steady else self._answer(pattern, boundary, self.steady, recompute)
        if known is None:
            return None
        relaxed = self._relax(pattern, boundary, price, (), recompute)
        assert relaxed is not None, "a solution is one of the relaxation too"
        return solve_near(self.problem(pattern, boundary, recompute), price, (), relaxed, known, gap=_GAP, time_limit_s=self._clock())

    def _slack_s(self, pattern: str, boundary: Boundary, price: Price, recompute: str, objective_s: float) -> float:
        """By how much an answer may miss its bound: by a small part of it, or of what all blocks of the model take, if that is more."""
        if (boundary, recompute) not in self._totals:
            answers = {p: self._answer(p, boundary, self.steady, recompute) for p in self.outline.examples}
            self._totals[boundary, recompute] = sum(self.outline.counts[p] * a.objective_s for p, a in answers.items() if a is not None)
        scale = price.num_micro_batches / self.steady.num_micro_batches / self.outline.counts[pattern] / len(self.outline.examples)
        return _REUSE * max(objective_s, scale * self._totals[boundary, recompute])

    def _known(self, pattern: str, boundary: Boundary, price: Price, recompute: str) -> Solution | None:
        """The answer at the steady price, where it is good enough at `price` too: m/M of its bound bounds the objective at m micro-batches,
        because what is paid once a step weighs no less where it is spread over fewer of them."""
        steady = self.steady
        m = price.num_micro_batches / steady.num_micro_batches
        if price == steady or m > 1 or price.per_parameter_byte_s < m * steady.per_parameter_byte_s or price.per_saved_byte_s:
            return None
        answer = self._answer(pattern, boundary, steady, recompute)
        if answer is None:
            return None
        resting = sum(w.num_bytes // self.local.degree for w in self.problem(pattern, boundary).weights.values())
        bound_s = m * answer.bound_s + (price.per_parameter_byte_s - m * steady.per_parameter_byte_s) * resting
        objective_s = price.of(answer.point)
        slack_s = self._slack_s(pattern, boundary, price, recompute, objective_s)
        return replace(answer, objective_s=objective_s, bound_s=bound_s) if bound_s >= objective_s - slack_s else None

    def free(self, pattern: str, boundary: Boundary, recompute: str) -> Solution:
        """The answer at the steady price, whatever memory it needs."""
        found = self._answer(pattern, boundary, self.steady, recompute)
        assert found is not None, "asked for boundaries that can be had"
        return found

    def choose_near(self, chosen: Chosen, price: Price, recompute: str) -> Chosen:
        """Good choices of all patterns at `price`, among those of `chosen` and of the programs without integrality."""
        found = dict(chosen.solutions)
        for pattern, known in chosen.solutions.items():
            key = (self._view(pattern, chosen.boundary, recompute), price, ())
            if key not in self._within:
                problem, relaxed = self.problem(pattern, chosen.boundary, recompute), self._relax(pattern, chosen.boundary, price, (), recompute)
                assert relaxed is not None, "a solution is one of the relaxation too"
                self._within[key] = solve_near(problem, price, (), relaxed, known, gap=_LEAN_GAP, time_limit_s=self._clock())
            near = self._within[key]
            found[pattern] = known if near is None else self._plain(pattern, chosen.boundary, recompute, near)
        return Chosen(chosen.boundary, found)

    def within(self, pattern: str, boundary: Boundary, price: Price, budgets: tuple[Budget, ...], recompute: str) -> Solution | None:
        """A good choice of one pattern that keeps `budgets`; None where none was found."""
        view, free = self._view(pattern, boundary, recompute), self._answer(pattern, boundary, price, recompute)
        if free is None:
            return None
        if all(budget.holds(free.point) for budget in budgets):
            return self._plain(pattern, boundary, recompute, free)
        if (view, price, budgets) not in self._within:
            relaxed = self._relax(pattern, boundary, price, budgets, recompute)
            problem = self.problem(pattern, boundary, recompute)
            found = None if relaxed is None else solve_near(problem, price, budgets, relaxed, free, gap=_LEAN_GAP, time_limit_s=self._clock())
            self._within[view, price, budgets] = found
        known = self._within[view, price, budgets]
        return None if known is None else self._plain(pattern, boundary, recompute, known)

    def within_s(self, pattern: str, boundary: Boundary, budgets: tuple[Budget, ...], recompute: str) -> float | None:
        """Seconds of one micro-batch through one block that keeps `budgets`, what is run again included, at least; None where it cannot."""
        free = self.free(pattern, boundary, recompute)
        if all(budget.holds(free.point) for budget in budgets):
            return self._seconds(pattern, boundary, free.bound_s)
        relaxed = self._relax(pattern, boundary, self.steady, budgets, recompute)
        return None if relaxed is None else self._seconds(pattern, boundary, max(relaxed.bound_s, free.bound_s))

    def own_s(self, pattern: str, boundary: Boundary, recompute: str, num_micro_batches: int | None = None, per_saved_byte_s: float = 0.0) -> float:
        """Seconds of one micro-batch through one block, at least, its saved bytes weighed by `per_saved_byte_s`; with `num_micro_batches` a step, what is
        paid once a step shared among them."""
        m = num_micro_batches or self.steady.num_micro_batches
        price = replace(self.steady, num_micro_batches=m, per_saved_byte_s=m * per_saved_byte_s)
        price = price if num_micro_batches is None else replace(price, per_parameter_byte_s=0.0)
        relaxed = self._relax(pattern, boundary, price, (), recompute)
        assert relaxed is not None, "asked for boundaries that can be had"
        return self._seconds(pattern, boundary, relaxed.bound_s) if num_micro_batches is None else relaxed.bound_s / m

    def _relax(self, pattern: str, boundary: Boundary, price: Price, budgets: tuple[Budget, ...], recompute: str) -> Relaxed | None:
        key = (self._view(pattern, boundary, recompute), price, budgets)
        if key not in self._relaxed:
            self._relaxed[key] = relax(self.problem(pattern, boundary, recompute), price, budgets)
        return self._relaxed[key]

    def least_s(self, boundary: Boundary, recompute: str) -> Mapping[str, float] | None:
        """Pattern -> seconds of one micro-batch through one block, at least, both passes and what is run again; None where the boundary cannot be had."""
        found: dict[str, float] = {}
        for pattern in self.outline.examples:
            answer = self._answer(pattern, boundary, self.steady, recompute)
            if answer is None:
                return None
            found[pattern] = self._seconds(pattern, boundary, answer.bound_s)
        return found

    def _seconds(self, pattern: str, boundary: Boundary, bound_s: float) -> float:
        """What a bound at the steady price says of the seconds of one micro-batch, at least."""
        weights = self.problem(pattern, boundary).weights.values()
        once_s = sum(w.deferred_s + self.steady.per_parameter_byte_s * w.num_bytes for w in weights)
        return max(0.0, bound_s - once_s) / self.steady.num_micro_batches
