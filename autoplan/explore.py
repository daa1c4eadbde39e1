"""The search: the best plan of the whole space, with a bound on what was not looked at.

A *shape* (autoplan/space.py) fixes mesh, micro-batch and schedule. Its lower bound is tightened step by step (autoplan/shapebounds.py), and shapes are
taken in the order of their bounds; a shape whose bound is no better than the best plan found is never worked out (autoplan/workout.py).

    gap = 1 - (least bound of all shapes, those that were worked out included) / (time of the chosen plan)

both at the search's own prices. Where there are many shapes and the bound of one that was worked out leaves a gap already, shapes that could gain less than
half of it are left at their bounds: proving them worse takes most of the time, and the gap stays. Equal times are decided by less memory, then by the shape.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Container, Iterator, Mapping
from functools import cached_property

from autoplan.choose import Boundary
from autoplan.constraints import check_degrees, check_filled, check_modes, check_supported
from autoplan.errors import InfeasibleError
from autoplan.forecast import MEMORY_KINDS
from autoplan.graph import options
from autoplan.gridcheck import check_scheme, undivided
from autoplan.holding import is_split
from autoplan.ilp import OutOfTime
from autoplan.outcome import Outcome, Result
from autoplan.schemes import LINES, Axes
from autoplan.shapebounds import ShapeBounds, is_in_parts
from autoplan.space import Shape, Space, space
from autoplan.sync import check_sync
from autoplan.task import Task
from autoplan.workout import ENOUGH, WorkOut

_NUM_MESHES = 5  # worked out at least, where there are as many
_MANY_SHAPES = 1000
_FAR_BETTER = 0.9  # times of the best plan, below which a usual shape may be before it is its turn
_RUNNER_UP = 2.0  # times of the best, beyond which a plan of another mesh is not looked for


class Searcher:
    """Works out shapes in the order of their bounds."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.shapes = ShapeBounds(task)
        self.works = WorkOut(self.shapes)
        self._taken: dict[Axes, bool] = {}

    def run(self) -> Outcome:
        """Search until every shape is worked out or proved worse, or time is up. Raises InfeasibleError where nothing fits."""
        outcome = Outcome(self.space)
        limit_s, start_s = self.task.time_limit_s, time.monotonic()  # the limit counts once there is a plan
        try:
            self._search(outcome, lambda: self.shapes.countdown.end_at(None if limit_s is None else start_s + limit_s))
            if not outcome.fitting:
                self._smallest(outcome)
            self._runners_up(outcome)
        except OutOfTime:
            assert outcome.fitting, "the limit counts from the first plan on"
        finally:
            self.shapes.countdown.end_at(None)
        return outcome

    def _search(self, outcome: Outcome, on_plan: Callable[[], None]) -> None:
        """Schedules that split the backward pass come last: their bounds are the loosest, and memory forbids most of them."""
        heap: list[tuple[bool, float, int, Shape]] = []
        for shape in outcome.space.shapes:
            outcome.bounds[shape] = max(self.shapes.peak_bound(shape), self.shapes.heavy_bound(shape))
            heapq.heappush(heap, (is_split(shape.schedule), outcome.bounds[shape], 0, shape))
        best_s = float("inf")
        for shape in self._usual(outcome.space.shapes):
            if outcome.fitting and self.shapes.operator_bound(shape) >= _FAR_BETTER * best_s:
                continue  # a first plan is there, and this one waits for its turn
            outcome.worked_out.add(shape)
            best_s = self._add(outcome, shape, best_s)
            if outcome.fitting:
                on_plan()
        while heap:
            is_late, bound_s, level, shape = heapq.heappop(heap)
            if bound_s >= self._enough_s(outcome, best_s) or bound_s == float("inf") or shape in outcome.worked_out:
                continue
            self.shapes.countdown.left_s()
            if level <= len(self.shapes.tighter):
                if level < len(self.shapes.tighter):
                    tighter_s, is_done = self.shapes.tighter[level](shape), True
                else:
                    tighter_s, is_done = self.shapes.next_program_bound(shape)
                outcome.bounds[shape] = max(bound_s, tighter_s)
                heapq.heappush(heap, (is_late, outcome.bounds[shape], level + is_done, shape))
                continue
            outcome.worked_out.add(shape)
            best_s = self._add(outcome, shape, best_s)
            if outcome.fitting:
                on_plan()

    @staticmethod
    def _enough_s(outcome: Outcome, best_s: float) -> float:
        """The bound from which on a shape is not looked at."""
        known = min((outcome.bounds[shape] for shape in outcome.worked_out), default=best_s) if len(outcome.bounds) >= _MANY_SHAPES else best_s
        return min(best_s * (1 - ENOUGH), (best_s + known) / 2)

    def _usual(self, shapes: tuple[Shape, ...]) -> Iterator[Shape]:
        """What people try first, where there is so much to bound that a first plan would be late: data ranks alone, tensor ranks inside a node, these in
        the shortest 1F1B pipeline that may fit and in the best interleaved one; each with the micro-batch of the least bound."""
        if len(shapes) < _MANY_SHAPES:
            return
        plain = [shape for shape in shapes if not shape.grid and shape.cp == shape.ep == 1]
        inside = max((s.tp for s in plain if s.tp <= self.task.cluster.groups[0].devices_per_node), default=1)

        def best(schedule: str, tp: int, depths: Container[int]) -> Iterator[Shape]:
            among = [s for s in plain if s.schedule == schedule and s.tp == tp and s.pp in depths]
            bound_s, shape = min(((self.shapes.operator_bound(s), s) for s in among), default=(float("inf"), None))
            if shape is not None and bound_s < float("inf"):
                yield shape

        yield from best("1f1b", 1, (1,))
        yield from best("1f1b", inside, (1,))
        pipelines = sorted({s.pp for s in plain if s.tp == inside and s.pp > 1})
        yield from next((found for depth in pipelines if (found := tuple(best("1f1b", inside, (depth,))))), ())
        yield from best("interleaved", inside, pipelines)

    def _smallest(self, outcome: Outcome) -> None:
        """Work out the shapes that need least memory, where nothing fits, to say what is missing."""

        def need_bytes(shape: Shape) -> int:
            blocks = self.shapes.least(shape)
            return min(self.shapes.bounds.room.memory_bytes(blocks, self.shapes.step(shape, s), s.recompute) for s in self.shapes.storings(shape))

        rest = sorted((s for s in outcome.bounds if s not in outcome.worked_out), key=lambda s: (need_bytes(s), s))
        for number, shape in enumerate(rest):
            if number >= _NUM_MESHES and outcome.too_large:  # others may have no operators that divide so
                return
            outcome.worked_out.add(shape)
            self._add(outcome, shape)

    def _add(self, outcome: Outcome, shape: Shape, best_s: float = float("inf"), *, is_squeezed: bool = True) -> float:
        """Work a shape out; returns the seconds of the best plan that is known then."""
        results, bound_s = self.works.plans(shape, best_s, is_squeezed=is_squeezed)
        outcome.bounds[shape] = max(outcome.bounds[shape], bound_s)
        for result in results:
            (outcome.fitting if result.fits else outcome.too_large).append(result)
        best_s = min([best_s, *(result.step_s for result in results if result.fits)])
        self.shapes.bounds.enough_s = min(self.shapes.bounds.enough_s, self._enough_s(outcome, best_s))
        return best_s

    def _runners_up(self, outcome: Outcome) -> None:
        """Work out the most promising shape of the next best meshes too, so that the ranking has what it is compared with: a chain of stages, whose plans
        are soon found, where there is one."""
        seen = {r.shape.axes for r in outcome.fitting}
        chains = {s.axes for s in outcome.bounds if not is_in_parts(s)}
        rest = (s for s in outcome.bounds if s not in outcome.worked_out and not (is_in_parts(s) and s.axes in chains))
        for shape in sorted(rest, key=lambda s: (outcome.bounds[s], s)):
            self.shapes.countdown.left_s()
            if not outcome.fitting or len(seen) >= _NUM_MESHES:
                return
            if shape.axes not in seen:
                seen.add(shape.axes)
                outcome.worked_out.add(shape)
                self._add(outcome, shape, _RUNNER_UP * outcome.best().step_s, is_squeezed=False)

    @cached_property
    def space(self) -> Space:
        """What is searched. Raises InfeasibleError where the constraints leave nothing."""
        task, outline, batch = self.task, self.shapes.outline, self.shapes.batch
        check_supported(task.constraints)
        check_sync(task.constraints)
        check_modes(task.constraints, task.optimizer)
        world = task.cluster.num_devices
        check_degrees(task.constraints, world, batch)
        check_scheme(task.constraints, world, batch, task.graph, outline.batch.body)
        if task.constraints.tp is not None and task.constraints.tensor in (None, *LINES):
            self._check_tensor(task.constraints.tp)
        contexts = self.shapes.contexts.of(task.constraints, world)
        check_filled(task.constraints, world, contexts.cp)
        can_micro_batch = outline.batch.blocker is None
        found = space(world, batch, len(outline.blocks), task.constraints, can_micro_batch=can_micro_batch, contexts=contexts)
        shapes = tuple(shape for shape in found.shapes if shape.tp == 1 or self._takes(shape))
        if task.stages is not None:  # the other schedules say themselves which stage is where
            shapes = tuple(shape for shape in shapes if shape.schedule in ("1f1b", "gpipe"))
        if not shapes:
            raise InfeasibleError(self._no_shape())
        degrees = tuple(sorted({shape.tp for shape in shapes}))
        tried = {(shape.tensor, shape.cp): shape for shape in shapes}.values()
        boundaries = tuple(sorted({self._named(b) for shape in tried for b in self.shapes.boundaries(shape)}))
        return Space(shapes, found.storings, {**found.axes, "tp": degrees, "boundary": boundaries, "operators": ("every loop that divides",)})

    def _named(self, boundary: Boundary) -> str:
        if boundary.features > 1:
            return "rows and features"
        return "whole" if boundary.factor is None else f"split({self.task.graph.factor_sizes[boundary.factor]})"

    def _takes(self, shape: Shape) -> bool:
        """Whether the model's operators divide by the tensor axes of a shape."""
        if not shape.grid:
            if shape.tensor not in self._taken:
                self._taken[shape.tensor] = self._splits(shape.tp)
            return self._taken[shape.tensor]
        if shape.grid not in self._taken:
            among = [i for indices in self.shapes.examples.values() for i in indices]
            self._taken[shape.grid] = undivided(self.task.graph, self.shapes.outline.batch.body, shape.grid, among) is None
        return self.task.stages is None and self._taken[shape.grid]

    def _no_shape(self) -> str:
        task = self.task
        asked, world, outline = task.constraints.described(), task.cluster.num_devices, self.shapes.outline
        text = f"no mesh of {world} devices for a global batch of {self.shapes.batch} rows and {len(outline.blocks)} blocks satisfies the constraints {asked}"
        if outline.batch.blocker is not None and task.constraints.micro_batch_size is not None:
            return f"{text}: the batch cannot be cut into micro-batches, because {outline.batch.blocker}"
        return f"{text}: pp must be at most the number of blocks, dp x ep must divide the batch and pp x dp x cp x ep x tp must be {world}"

    def _splits(self, degree: int) -> bool:
        graph = self.task.graph
        return any(
            option.label != "whole" and not option.label.startswith("partial:")
            for indices in self.shapes.examples.values()
            for i in indices
            for option in options(graph, graph.ops[i], degree)
            if not any(loop.label == option.label and loop.factor == graph.batch_factor for loop in graph.ops[i].loops)
        )

    def _check_tensor(self, degree: int) -> None:
        if degree == 1 or self._splits(degree):
            return
        graph = self.task.graph
        sizes = sorted(
            {graph.factor_sizes[loop.factor] for i in self.shapes.outline.batch.body for loop in graph.ops[i].loops if loop.factor != graph.batch_factor}
        )
        raise InfeasibleError(
            f"tp={degree} can split nothing of this model: no operator has a dimension that {degree} divides (sizes that can be split: "
            f"{', '.join(map(str, sizes)) or 'none'}). Use a tp that divides one of them, or tp=1"
        )


def too_large(outcome: Outcome, task: Task) -> InfeasibleError:
    """Why nothing fits: the plan that needs least, the kind of memory that fills it, and what would help."""
    if not outcome.too_large:
        return InfeasibleError(
            f"no plan of {task.graph.name} can be had on {task.cluster.name} with the constraints {task.constraints.described()}: on none of the "
            f"{len(outcome.bounds)} meshes and schedules that they leave can the operators of every block be divided so that values lie between blocks as is "
            "asked. Use tp=1, or leave out tensor and sequence_parallel"
        )
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
