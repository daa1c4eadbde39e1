"""The search: the best plan of the whole space, with a bound on what was not looked at.

A *shape* (autoplan/space.py) fixes mesh, micro-batch and schedule. Its lower bound is tightened step by step, and shapes are
taken in the order of their bounds; a shape whose bound is no better than the best plan found is never worked out. With W
seconds of one micro-batch through all blocks, m micro-batches and n stages,

    step 0: T >= W / (1 - (1 - 1/m)^n), where a rank has several stages or the backward pass is split T >= m W / n; W from the forward
            FLOPs at the device's peak (analytic prices only, which never beat it) and what a grid of tensor axes gathers
    step 1: the same, W from the fastest option of the heaviest operators (autoplan/heavy.py)
    step 2: autoplan/bounds.py from the fastest option of every operator, no tensor communication
    step 3: the same, with what the schedule's own order says
    step 4: that from the integer programs of all patterns, for every boundary

Step 4 solves each pattern once for a boundary, tensor degree and number of rows, at the price with the most micro-batches, and
its answer serves all shapes where it is within a small part of its bound there.

Working a shape out: integer programs for every boundary (autoplan/choose.py), best cuts under the memory limit by stage
(autoplan/cuts.py), replay (autoplan/simulate.py), for each ZeRO stage and recomputation that is not dominated by one that fits:
recomputation only adds time, and so does ZeRO-3 to -2 to -1, as long as memory does not bend the cuts.
Where memory bends or forbids these, autoplan/squeeze.py bounds the shape under what memory leaves and looks for plans that fit.

    gap = 1 - (least bound of all shapes, those that were worked out included) / (time of the chosen plan)

both at the search's own prices. Equal times are decided by less memory, then by the shape.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from autoplan import squeeze
from autoplan.bounds import Bounds, Counts, Least, least_blocks, ramp
from autoplan.chains import chain_s
from autoplan.choose import Boundary, Chooser, Chosen, Outline
from autoplan.constraints import Constraints, check_degrees, check_modes, check_supported
from autoplan.cuts import best_cuts, layer_cuts
from autoplan.datasums import Mode
from autoplan.errors import InfeasibleError
from autoplan.exhaust import every_choice
from autoplan.forecast import MEMORY_KINDS
from autoplan.graph import Graph, options
from autoplan.gridcheck import check_scheme, undivided
from autoplan.gridprices import gathers_s
from autoplan.heavy import heavy_s
from autoplan.holding import is_split, least_held, surely_held
from autoplan.ilp import OutOfTime
from autoplan.load import BUCKET_BYTES
from autoplan.outcome import Outcome, Result
from autoplan.price import LocalGraph, Pricer, axis_group, itemsize, precision_left
from autoplan.problem import Price
from autoplan.rankmemory import by_rank, memories
from autoplan.replay import Step, durations, least_step, step_seconds
from autoplan.schemes import Axes, feature_axes, row_unit, scheme_of
from autoplan.searchcontexts import SearchedContexts
from autoplan.space import RECOMPUTES, Inside, Shape, Space, Storing, space, storings
from autoplan.squeeze import Place
from autoplan.stagework import Work
from autoplan.sync import check_sync, is_served, num_servers
from costmodel.cluster import Cluster
from costmodel.memory import widths
from costmodel.prices import Prices

_ENOUGH = 0.005  # the search ends once nothing left can be faster by more
_NEAR = 1.1  # times of the best plan, within which a plan is looked at twice
_NUM_MESHES = 5  # worked out at least, where there are as many


@dataclass(frozen=True)
class Stages:
    """Stages that are given: their first blocks, with the number of blocks at the end, and the rank of each."""

    starts: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """One search: its inputs."""

    graph: Graph
    cluster: Cluster
    prices: Prices
    constraints: Constraints
    optimizer: str
    precision: str | None
    time_limit_s: float | None
    stages: Stages | None = None  # None: cut as is best


class Searcher:
    """Works out shapes in the order of their bounds."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.outline = Outline(task.graph)
        self.pricer = Pricer(task.prices, precision_left(task.graph, task.precision), overlap=self.overlap)
        self.batch = task.graph.batch_size or 1
        self.width = widths(task.precision, task.optimizer, _parameter_width(task.graph))
        self.limit_bytes = min(task.prices.memory_limit_bytes(rank) for rank in _distinct_ranks(task.cluster))
        if task.constraints.max_memory_bytes is not None:
            self.limit_bytes = min(self.limit_bytes, task.constraints.max_memory_bytes)
        self._deadline_s: float | None = None
        self._taken: dict[Axes, bool] = {}
        self._examples = {p: self.outline.indices(task.graph.blocks[number]) for p, number in self.outline.examples.items()}
        self._gathers: dict[tuple[int, Axes], float] = {}
        self._choosers: dict[Inside, Chooser] = {}
        self._boundaries: dict[tuple[Axes, int], tuple[Boundary, ...]] = {}
        self.contexts = SearchedContexts(task.graph, self.outline.batch.preamble_outputs)
        low, high = (task.prices.optimizer_s(n, task.optimizer, float(self.width.total)) for n in (2**23, 2**24))
        self._optimizer_s = max(0.0, high - low) / 2**23  # per element
        smallest = min((itemsize(v.spec.dtype) for v in task.graph.parameters()), default=4)
        self._bounds = Bounds(self.outline, self.pricer, widths(task.precision, task.optimizer, smallest), self._optimizer_s, self.limit_bytes)
        self._solutions: dict[tuple[Inside, Boundary], Mapping[str, Least] | None] = {}
        self._leasts: dict[Inside, Mapping[str, Least]] = {}
        self._heavy: dict[Inside, float] = {}
        self._flops = sum(task.graph.ops[i].flops for i in self.outline.batch.body)

    def run(self) -> Outcome:
        """Search until every shape is worked out or proved worse, or time is up. Raises InfeasibleError where nothing fits."""
        outcome = Outcome(self._space())
        limit_s, start_s = self.task.time_limit_s, time.monotonic()
        try:
            self._search(outcome, lambda: self._start(start_s, limit_s))
            if not outcome.fitting:
                self._smallest(outcome)
            self._runners_up(outcome)
        except OutOfTime:
            assert outcome.fitting, "the limit counts from the first plan on"
        finally:
            self._deadline_s = None
        return outcome

    def _start(self, start_s: float, limit_s: float | None) -> None:
        """The time limit counts once there is a plan."""
        self._deadline_s = None if limit_s is None else start_s + limit_s

    def _left_s(self) -> float | None:
        """Seconds that are left; None for any number. Raises OutOfTime at the end."""
        if self._deadline_s is None:
            return None
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0.0:
            raise OutOfTime("the time limit has passed")
        return left_s

    def _search(self, outcome: Outcome, on_plan: Callable[[], None]) -> None:
        heap: list[tuple[float, int, Shape]] = []
        for shape in outcome.space.shapes:
            outcome.bounds[shape] = self._peak_bound(shape)
            heapq.heappush(heap, (outcome.bounds[shape], 0, shape))
        best_s = float("inf")
        while heap:
            bound_s, level, shape = heapq.heappop(heap)
            if bound_s >= best_s * (1 - _ENOUGH) or bound_s == float("inf"):
                return
            self._left_s()
            if level < len(self.tighter):
                outcome.bounds[shape] = max(bound_s, self.tighter[level](shape))
                heapq.heappush(heap, (outcome.bounds[shape], level + 1, shape))
                continue
            outcome.worked_out.add(shape)
            best_s = self._add(outcome, shape, best_s)
            if outcome.fitting:
                on_plan()

    def _smallest(self, outcome: Outcome) -> None:
        """Work out the shapes that need least memory, where nothing fits, to say what is missing."""

        def need_bytes(shape: Shape) -> int:
            blocks = self._least(shape)
            return min(self._bounds.memory_bytes(blocks, self.step(shape, s), s.recompute) for s in self._storings(shape))

        for shape in sorted((s for s in outcome.bounds if s not in outcome.worked_out), key=lambda s: (need_bytes(s), s))[:_NUM_MESHES]:
            outcome.worked_out.add(shape)
            self._add(outcome, shape)

    def _add(self, outcome: Outcome, shape: Shape, best_s: float = float("inf"), *, is_squeezed: bool = True) -> float:
        """Work a shape out; returns the seconds of the best plan that is known then."""
        results, bound_s = self._work_out(shape, best_s, is_squeezed=is_squeezed)
        outcome.bounds[shape] = max(outcome.bounds[shape], bound_s)
        for result in results:
            (outcome.fitting if result.fits else outcome.too_large).append(result)
        return min([best_s, *(result.step_s for result in results if result.fits)])

    def _runners_up(self, outcome: Outcome) -> None:
        """Work out the most promising shape of the next best meshes too, so that the ranking has what it is compared with."""
        seen = {r.shape.axes for r in outcome.fitting}
        for shape in sorted((s for s in outcome.bounds if s not in outcome.worked_out), key=lambda s: (outcome.bounds[s], s)):
            self._left_s()
            if not outcome.fitting or len(seen) >= _NUM_MESHES:
                return
            if shape.axes not in seen:
                seen.add(shape.axes)
                outcome.worked_out.add(shape)
                self._add(outcome, shape, is_squeezed=False)

    def _space(self) -> Space:
        task = self.task
        check_supported(task.constraints)
        check_sync(task.constraints)
        check_modes(task.constraints, task.optimizer)
        world = task.cluster.num_devices
        check_degrees(task.constraints, world, self.batch)
        check_scheme(task.constraints, world, self.batch, task.graph, self.outline.batch.body)
        if task.constraints.tp is not None and task.constraints.tensor in (None, "1d", "1.5d"):
            self._check_tensor(task.constraints.tp)
        contexts = self.contexts.of(task.constraints, world)
        found = space(world, self.batch, len(self.outline.blocks), task.constraints, can_micro_batch=self.outline.batch.blocker is None, contexts=contexts)
        shapes = tuple(shape for shape in found.shapes if shape.tp == 1 or self._takes(shape))
        if task.stages is not None:  # the other schedules say themselves which stage is where
            shapes = tuple(shape for shape in shapes if shape.schedule in ("1f1b", "gpipe"))
        if not shapes:
            raise InfeasibleError(self._no_shape())
        degrees = tuple(sorted({shape.tp for shape in shapes}))
        tried = {(shape.tensor, shape.cp): shape for shape in shapes}.values()
        boundaries = tuple(sorted({self._named(b) for shape in tried for b in self._bounds_of(shape)}))
        return Space(shapes, found.storings, {**found.axes, "tp": degrees, "boundary": boundaries, "operators": ("every loop that divides",)})

    def _named(self, boundary: Boundary) -> str:
        if boundary.features > 1:
            return "rows and features"
        return "whole" if boundary.factor is None else f"split({self.task.graph.factor_sizes[boundary.factor]})"

    def _takes(self, shape: Shape) -> bool:
        """Whether the model's operators divide by the tensor axes of a shape."""
        if not shape.grid:
            return self._splits(shape.tp)
        if shape.grid not in self._taken:
            among = [i for indices in self._examples.values() for i in indices]
            self._taken[shape.grid] = undivided(self.task.graph, self.outline.batch.body, shape.grid, among) is None
        return self.task.stages is None and self._taken[shape.grid]

    def _no_shape(self) -> str:
        task = self.task
        asked, world = task.constraints.described(), task.cluster.num_devices
        text = f"no mesh of {world} devices for a global batch of {self.batch} rows and {len(self.outline.blocks)} blocks satisfies the constraints {asked}"
        if self.outline.batch.blocker is not None and task.constraints.micro_batch_size is not None:
            return f"{text}: the batch cannot be cut into micro-batches, because {self.outline.batch.blocker}"
        return f"{text}: pp must be at most the number of blocks, dp x ep must divide the batch and pp x dp x cp x ep x tp must be {world}"

    def _splits(self, degree: int) -> bool:
        graph = self.task.graph
        return any(
            option.label != "whole" and not option.label.startswith("partial:")
            for indices in self._examples.values()
            for i in indices
            for option in options(graph, graph.ops[i], degree)
            if not any(loop.label == option.label and loop.factor == graph.batch_factor for loop in graph.ops[i].loops)
        )

    def _check_tensor(self, degree: int) -> None:
        if degree == 1 or self._splits(degree):
            return
        graph = self.task.graph
        sizes = sorted({graph.factor_sizes[loop.factor] for i in self.outline.batch.body for loop in graph.ops[i].loops if loop.factor != graph.batch_factor})
        raise InfeasibleError(
            f"tp={degree} can split nothing of this model: no operator has a dimension that {degree} divides (sizes that can be split: "
            f"{', '.join(map(str, sizes)) or 'none'}). Use a tp that divides one of them, or tp=1"
        )

    # -- bounds -----------------------------------------------------------------------------------------------------------

    def _peak_bound(self, shape: Shape) -> float:
        through_s = self._gathers_s(shape.rows, shape.grid)
        if self.task.prices.source == "analytic":
            peak = max(self.task.prices.peak_flops_per_s(self.dtype, rank) for rank in _distinct_ranks(self.task.cluster))
            through_s += self._flops * shape.rows / self.batch / (shape.tp * shape.cp * shape.ep) / peak if peak else 0.0
        return self._even(shape, through_s)

    def _even(self, shape: Shape, through_s: float) -> float:
        """Least seconds of a step whose micro-batches take so long through all blocks. Only a chain of stages fills as `ramp` says."""
        is_chain = self.task.stages is None and not _is_in_parts(shape)
        return ramp(through_s, shape.pp, shape.num_micro_batches) if is_chain else through_s * shape.num_micro_batches / shape.pp

    def _heavy_bound(self, shape: Shape) -> float:
        if shape.inside not in self._heavy:
            self._heavy[shape.inside] = heavy_s(self._chooser(shape)) + self._gathers_s(shape.rows, shape.grid)
        return self._even(shape, self._heavy[shape.inside])

    def _gathers_s(self, rows: int, grid: Axes) -> float:
        """Seconds of a micro-batch that a grid gathers at least, whatever the options; nothing where one axis divides the tensors."""
        if not grid:
            return 0.0
        if (rows, grid) not in self._gathers:
            batch = self.outline.batch
            ((_, degree),) = feature_axes(grid)
            local = LocalGraph(self.task.graph, batch.options, batch.layouts, rows // row_unit(grid), degree, self.pricer, grid)
            each = {p: gathers_s(self.task.graph, grid, indices, local) for p, indices in self._examples.items()}
            self._gathers[rows, grid] = sum(self.outline.counts[p] * seconds for p, seconds in each.items())
        return self._gathers[rows, grid]

    @property
    def tighter(self) -> tuple[Callable[[Shape], float], ...]:
        """The bounds that follow the first, each tighter and dearer than the one before."""
        return self._heavy_bound, self._operator_bound, self._order_bound, self._program_bound

    def _operator_bound(self, shape: Shape) -> float:
        return self._bound(shape, self._least(shape), surely_held)

    def _order_bound(self, shape: Shape) -> float:
        return self._bound(shape, self._least(shape), least_held)

    def _program_bound(self, shape: Shape) -> float:
        found = (self._solved(shape, boundary) for boundary in self._bounds_of(shape))
        return min((self._bound(shape, blocks, least_held) for blocks in found if blocks is not None), default=float("inf"))

    def _solved(self, shape: Shape, boundary: Boundary) -> Mapping[str, Least] | None:
        """The least of every pattern, with communication; None where the boundary cannot be had."""
        key = (shape.inside, boundary)
        if key not in self._solutions:
            seconds, blocks = self._chooser(shape).least_s(boundary), self._least(shape)
            self._solutions[key] = None if seconds is None else {p: replace(b, seconds=max(b.seconds, seconds[p])) for p, b in blocks.items()}
        return self._solutions[key]

    def _bound(self, shape: Shape, blocks: Mapping[str, Least], counts: Counts) -> float:
        """The least of all ways of storing. Where the bound does not count on what memory allows, one that may fit bounds those that it dominates."""
        found: dict[Storing, float] = {}
        for storing in sorted(self._storings(shape), key=lambda s: s.order):
            if not (_is_in_parts(shape) and any(_dominates(known, storing) for known in found)):
                bound_s = self._least_step_s(blocks, shape, storing, counts)
                if bound_s < float("inf"):
                    found[storing] = bound_s
        return min(found.values(), default=float("inf"))

    def _least_step_s(self, blocks: Mapping[str, Least], shape: Shape, storing: Storing, counts: Counts = least_held) -> float:
        """Given stages need not be a chain: then only the work itself, divided evenly, bounds the step."""
        if self.task.stages is not None:
            return shape.num_micro_batches * sum(b.count * b.seconds for b in blocks.values()) / shape.pp
        return self._bounds.step_s(blocks, self.step(shape, storing), storing.recompute, counts)

    def _least(self, shape: Shape) -> Mapping[str, Least]:
        if shape.inside not in self._leasts:
            self._leasts[shape.inside] = least_blocks(self._chooser(shape), self._bounds_of(shape))
        return self._leasts[shape.inside]

    @property
    def overlap(self) -> bool:
        """Whether transfers run beside compute: not on CPUs, whose cores do both."""
        return self.task.cluster.device().kind == "cuda"

    @property
    def sums(self) -> Mode:
        """How gradients are summed over the data axis."""
        return Mode(self.task.constraints.compression or "", self.task.constraints.delay or 0)

    @property
    def dtype(self) -> str:
        return {"bf16": "bfloat16", "fp16": "float16"}.get(self.task.precision or "", "float32")

    def _price(self, shape: Shape) -> Price:
        """What parameters cost after the passes at least, whatever the ZeRO stage: the optimizer, and sums that nothing hides."""
        zero = self.task.constraints.zero
        width = _parameter_width(self.task.graph)
        seconds = self._optimizer_s / width / (shape.dp if zero != 0 else 1)
        if is_served(self.task.constraints):  # no more than the parts that every way of serving takes
            return Price(shape.num_micro_batches, self._optimizer_s / width / max(1, num_servers(self.task.constraints, shape.dp)))
        if shape.dp > 1 and not self.sums.is_own and (zero == 0 or not self.overlap):
            group = axis_group(shape.axes, "dp")
            bucket, large = BUCKET_BYTES, 2**30
            reduce_s = self.pricer.collective("all_reduce", bucket, group) / bucket * self.width.gradient / width
            gather_s = self.pricer.collective("all_gather", large, group) / large * self.width.parameter / width
            scatter_s = self.pricer.collective("reduce_scatter", large, group) / large * self.width.gradient / width
            seconds += reduce_s if zero == 0 else gather_s + scatter_s if zero else min(reduce_s, gather_s + scatter_s)
        return Price(shape.num_micro_batches, seconds)

    def _chooser(self, shape: Shape) -> Chooser:
        if shape.inside not in self._choosers:
            forbidden: frozenset[int] = frozenset()
            scheme = scheme_of(shape.tensor)
            if self.task.constraints.sequence_parallel is False and scheme == "1d":
                forbidden = frozenset(b.factor for b in self.outline.boundaries(shape.tp, None) if b.factor is not None)
            if shape.ep > 1:
                forbidden |= self.contexts.expert_factors
            scheme = "1.5d" if self.task.constraints.tensor == "1.5d" else scheme
            steady = Price(max(1, self.batch // shape.rows), self._optimizer_s / _parameter_width(self.task.graph))
            self._choosers[shape.inside] = Chooser(
                self.outline, shape.rows, shape.tensor, self.pricer, forbidden, steady, self._left_s, scheme, self.contexts.local(shape)
            )
        return self._choosers[shape.inside]

    def _bounds_of(self, shape: Shape) -> tuple[Boundary, ...]:
        """The boundaries that are tried on the shape's tensor axes, inside of what "cp" leaves of a sequence."""
        key = (shape.tensor, shape.cp)
        if key not in self._boundaries:
            asked = self.task.constraints
            ((_, degree),) = feature_axes(shape.tensor)
            whole = False if asked.tensor == "1.5d" else asked.sequence_parallel
            found = self.outline.boundaries(degree, whole) if scheme_of(shape.tensor) == "1d" else self.outline.feature_boundaries(degree)
            self._boundaries[key] = tuple(b for b in found if b.factor is None or self.contexts.leaves(b.factor, shape))
        return self._boundaries[key]

    # -- working out ------------------------------------------------------------------------------------------------------

    def step(self, shape: Shape, storing: Storing) -> Step:
        return Step(
            shape.axes, shape.schedule, shape.num_micro_batches, storing.zero, self.task.constraints.zero_group if storing.zero else None,
            self.task.optimizer, self.task.precision, shape.stage_ranks if self.task.stages is None else self.task.stages.ranks,
            self.overlap, self.task.constraints.sync or "allreduce", num_servers(self.task.constraints, shape.dp), self.sums,
        )  # fmt: skip

    def _storings(self, shape: Shape) -> tuple[Storing, ...]:
        """Ways of storing that differ on a shape."""
        found, fixed = storings(self.task.constraints), self.task.constraints
        if is_split(shape.schedule) and fixed.zero is None:  # a split backward pass keeps parameters gathered and reduces once: all are ZeRO-1
            found = tuple(s for s in found if s.zero <= 1)
        return tuple(s for s in found if s.zero == 0) if shape.dp == 1 and fixed.zero is None and fixed.zero_group is None else found

    def _work_out(self, shape: Shape, best_s: float = float("inf"), *, is_squeezed: bool = True) -> tuple[list[Result], float]:
        """Plans of a shape, and a lower bound of all its plans that take less than `best_s` (else `best_s`).
        `is_squeezed`: what does not fit is made to."""
        chooser, price = self._chooser(shape), self._price(shape)
        places: list[tuple[float, tuple, Storing, Boundary, Mapping[str, Least]]] = []
        for number, boundary in enumerate(self._bounds_of(shape)):
            blocks = self._solved(shape, boundary)
            if blocks is not None:
                for s in self._storings(shape):
                    places.append((self._least_step_s(blocks, shape, s), (*s.order, number), s, boundary, blocks))
        some = best_s == float("inf") and all(place[0] == float("inf") for place in places)  # of what cannot fit, to say what is missing
        results: list[Result] = []
        every: dict[Boundary, tuple[Chosen, ...]] = {}
        least_s = float("inf")
        for bound_s, _, storing, boundary, blocks in sorted(places, key=lambda place: place[:2]):
            fastest_s = min([best_s, *(r.step_s for r in results if r.fits)])
            if bound_s >= fastest_s and not some:
                least_s = min(least_s, bound_s)
                continue
            if any(r.fits and not r.is_bent and r.chosen.boundary == boundary and _dominates(r.storing, storing) for r in results):
                continue
            chosen = chooser.choose(boundary, price)
            if chosen is None:
                continue

            def cut(chosen: Chosen, storing: Storing = storing, below_s: float = fastest_s) -> Result | None:
                return self._cut(shape, storing, Work(self.outline, chooser.local, chosen, storing.recompute, self.step(shape, storing)), below_s)

            result = cut(chosen)
            if result is None:
                continue
            first = len(results)
            results.append(result)
            if (not result.fits or result.is_bent) and not some:
                place = Place(chooser, boundary, price, self.step(shape, storing), storing.recompute, blocks)
                fastest_s = min(fastest_s, result.step_s) if result.fits else fastest_s
                enough_s = fastest_s * (1 - _ENOUGH)
                if self.task.stages is None:
                    known = squeeze.squeezed(place, self._bounds, fastest_s, enough_s)
                    bound_s = max(bound_s, known.bound_s)
                    lean = squeeze.leaner(place, chosen, known.budgets) if bound_s < enough_s and is_squeezed else None
                    result = (cut(lean) if lean is not None else None) or result
                    results += [result] if result is not results[-1] else []
                if not result.fits and bound_s < enough_s and is_squeezed:
                    results += squeeze.plans(place, self._bounds, result, cut)
            for fitting in [r for r in results[first:] if r.fits and r.step_s < fastest_s * _NEAR]:
                for weighing in squeeze.exposing(fitting, price, self.outline.counts):
                    again = cut(chooser.choose_near(fitting.chosen, weighing))
                    results += [again] if again is not None else []
            if boundary not in every:
                every[boundary] = every_choice(chooser, boundary, price)
            results += [more for one in every[boundary] if (more := cut(one)) is not None]
            least_s = min(least_s, bound_s)
        return results, min([least_s, best_s, *(r.step_s for r in results if r.fits)])

    def _cut(self, shape: Shape, storing: Storing, work: Work, best_s: float) -> Result | None:
        step, is_bent = self.step(shape, storing), False
        numbers, layers = self.outline.blocks, self.task.constraints.stage_layers
        if self.task.stages is not None:
            cuts: tuple[int, ...] | None = None
        elif layers is not None:
            cuts = layer_cuts([self.task.graph.blocks[n].layer for n in numbers], layers)
        elif len(step.stage_ranks) == 1:
            cuts = (0, len(numbers))
        else:
            shares = step.shards if step.zero else 1
            tail = work.tail_per_byte_s(self._optimizer_s / _parameter_width(self.task.graph) / shares) / shape.num_micro_batches
            weights = np.array([b.slot_s for b in work.blocks]) + tail
            cuts = best_cuts(weights.tolist(), len(step.stage_ranks))
            fits = work.fits(step, self.width, self.limit_bytes)
            if cuts is not None and not all(fits[j][a, b] for j, (a, b) in enumerate(itertools.pairwise(cuts))):
                fitting = best_cuts(weights.tolist(), len(step.stage_ranks), fits)
                cuts, is_bent = fitting or cuts, fitting is not None
        if self.task.stages is not None:
            starts = self.task.stages.starts
        else:
            assert cuts is not None
            starts = (0, *(numbers[c] for c in cuts[1:-1]), len(self.task.graph.blocks))
        return self.result(shape, storing, work, starts, best_s, is_bent=is_bent)

    def result(self, shape: Shape, storing: Storing, work: Work, starts: tuple[int, ...], best_s: float = float("inf"), *, is_bent: bool = False) -> Result:
        """Stages that begin at blocks `starts`, priced and weighed."""
        step = self.step(shape, storing)
        loads = work.stage_loads(starts, step.stage_ranks)
        times = tuple(durations(load, step, self.pricer) for load in loads)
        held = by_rank(memories(loads, step), step.stage_ranks)
        fullest = max(range(len(held)), key=lambda j: held[j].total)
        step_s, idle_s = least_step(times, step)
        step_s = max(step_s, chain_s(times, step))
        if held[fullest].total <= self.limit_bytes and (step_s < best_s or self.task.stages is not None):  # else the bound tells enough
            step_s, idle_s = step_seconds(loads, times, step, self.pricer)
        return Result(shape, storing, work.chosen, starts, step_s, held[fullest], fullest, self.limit_bytes, loads, times, idle_s, is_bent, step.stage_ranks)


def _is_in_parts(shape: Shape) -> bool:
    """Whether a rank has several stages, or the backward pass is split."""
    return is_split(shape.schedule) or shape.num_chunks > 1


def _dominates(one: Storing, other: Storing) -> bool:
    """Whether `one` takes no longer than `other`, whatever the plan."""
    is_less_again = RECOMPUTES.index(one.recompute) <= RECOMPUTES.index(other.recompute)
    return is_less_again and (one.zero == other.zero or 1 <= one.zero <= other.zero)


def _parameter_width(graph: Graph) -> int:
    sizes = [v for v in graph.parameters() if v.requires_grad] or list(graph.parameters())
    from runtime.call import dtype_of

    return dtype_of(sizes[0].spec.dtype).itemsize if sizes else 4


def _distinct_ranks(cluster: Cluster) -> tuple[int, ...]:
    """One rank of every group of like devices."""
    ranks, start = [], 0
    for group in cluster.groups:
        ranks.append(start)
        start += group.num_devices
    return tuple(ranks)


def too_large(outcome: Outcome, task: Task) -> InfeasibleError:
    """Why nothing fits: the plan that needs least, the kind of memory that fills it, and what would help."""
    least: Result = min(outcome.too_large, key=lambda r: (r.memory.total, r.order))
    kinds: Mapping[str, int] = {name: getattr(least.memory, name) for name in MEMORY_KINDS}
    kind = max(kinds, key=lambda name: kinds[name])
    gib = 1024**3
    over = least.memory.total - least.limit_bytes
    need = least.memory.total / max(1, least.limit_bytes)
    shape = least.shape
    asked = task.constraints.described()
    hint = f"devices with {least.memory.total / gib:.3g} GiB of usable memory, or about {need:.2g} times as many devices"
    if asked != "none":
        hint += f", or fewer constraints (now: {asked})"
    return InfeasibleError(
        f"no plan of {task.graph.name} fits on {task.cluster.name}: the smallest (pp={shape.pp} dp={shape.dp} tp={shape.tp} zero={least.storing.zero} "
        f"recompute={least.storing.recompute}, micro-batch {shape.rows}) needs {least.memory.total / gib:.4g} GiB on stage {least.fullest}, "
        f"{over / gib:.3g} GiB more than the limit of {least.limit_bytes / gib:.4g} GiB. Most of it is {kind} ({kinds[kind] / gib:.3g} GiB). "
        f"It would fit with {hint}."
    )
