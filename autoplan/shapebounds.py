"""Bounds of shapes, tightened step by step, and what else is fixed by a shape before operators are placed.

With W seconds of one micro-batch through all blocks, m micro-batches and n stages,

    step 0: T >= W / (1 - (1 - 1/m)^n), W of the spine (autoplan/spine.py), and T >= m W / n, W of all; each W from the forward
            FLOPs at the device's peak (analytic prices only, which never beat it) and what a grid of tensor axes gathers
    step 1: the same, W from the fastest option of the heaviest operators (autoplan/heavy.py)
    step 2: autoplan/bounds.py from the fastest option of every operator, no tensor communication
    step 3: the same, with what the schedule's own order says
    step 4: that from the integer programs of all patterns, for every boundary

Step 4 solves each pattern once for a boundary, tensor degree and number of rows, at the price with the most micro-batches, and
its answer serves all shapes where it is within a small part of its bound there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property

from autoplan.bounds import Bounds, ramp
from autoplan.choose import Boundary, Chooser, Outline
from autoplan.countdown import Countdown
from autoplan.datasums import Mode
from autoplan.exchanges import exchanges
from autoplan.graph import Graph
from autoplan.heavy import heavy_s
from autoplan.holding import is_split, least_held, surely_held
from autoplan.least import Least, least_blocks, main_of
from autoplan.load import BUCKET_BYTES
from autoplan.localcontext import Exchanges
from autoplan.mixing import hull
from autoplan.price import Pricer, axis_group, compute_dtype, itemsize, precision_left
from autoplan.problem import Price
from autoplan.replay import Step
from autoplan.room import Counts
from autoplan.schemes import LINES, Axes, feature_axes, scheme_of
from autoplan.searchcontexts import SearchedContexts
from autoplan.space import MIXED, RECOMPUTES, WAYS, Inside, Shape, Storing, storings
from autoplan.sync import is_served, servers_among
from autoplan.task import Task
from costmodel.cluster import Cluster
from costmodel.memory import widths

_OWN = "own price"
_FEW = 8  # times the micro-batches of a shape, beyond which others than its own price bound it


class ShapeBounds:
    """Bounds of one search's shapes. What several shapes share is worked out once."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.outline = Outline(task.graph)
        self.pricer = Pricer(task.prices, precision_left(task.graph, task.precision), overlap=self.overlap)
        self.batch = task.graph.batch_size or 1
        self.width = widths(task.precision, task.optimizer, parameter_width(task.graph))
        self.limit_bytes = min(task.prices.memory_limit_bytes(rank) for rank in _distinct_ranks(task.cluster))
        if task.constraints.max_memory_bytes is not None:
            self.limit_bytes = min(self.limit_bytes, task.constraints.max_memory_bytes)
        self.countdown = Countdown()
        self.examples = {p: self.outline.indices(task.graph.blocks[number]) for p, number in self.outline.examples.items()}
        self._sent: dict[Inside, Mapping[str, float]] = {}  # pattern -> seconds of one block, and likewise
        self._choosers: dict[Inside, Chooser] = {}
        self._tried: dict[tuple[Axes, int], tuple[Boundary, ...]] = {}
        self.contexts = SearchedContexts(task.graph, self.outline.batch.preamble_outputs)
        low, high = (task.prices.optimizer_s(n, task.optimizer, float(self.width.total)) for n in (2**23, 2**24))
        self.optimizer_s = max(0.0, high - low) / 2**23  # per element
        smallest = min((itemsize(v.spec.dtype) for v in task.graph.parameters()), default=4)
        self.bounds = Bounds(self.outline, self.pricer, widths(task.precision, task.optimizer, smallest), self.optimizer_s, self.limit_bytes)
        self._solutions: dict[tuple[Inside, Boundary, str], Mapping[str, Least] | None] = {}
        self._by_recompute: dict[Shape, dict[str, float]] = {}
        self._programmed: dict[Shape, int] = {}  # levels of next_program_bound
        self._leasts: dict[Inside, Mapping[str, Least]] = {}
        self._heavy: dict[Inside, Mapping[str, float]] = {}
        self._exchanged: dict[tuple[Inside, Axes], Mapping[str, Exchanges]] = {}
        self._flops = sum(task.graph.ops[i].flops for i in self.outline.batch.body)

    def step(self, shape: Shape, storing: Storing) -> Step:
        return Step(
            shape.axes, shape.schedule, shape.num_micro_batches, storing.zero, self.task.constraints.zero_group if storing.zero else None,
            self.task.optimizer, self.task.precision, shape.stage_ranks if self.task.stages is None else self.task.stages.ranks,
            self.overlap, self.task.constraints.sync or "allreduce", servers_among(self.task.constraints, shape.dp),
            self.task.constraints.workers or (), self.sums, self.pricer.slowdown,
        )  # fmt: skip

    def storings(self, shape: Shape) -> tuple[Storing, ...]:
        """Ways of storing that differ on a shape."""
        found, fixed = storings(self.task.constraints), self.task.constraints
        if is_split(shape.schedule) and fixed.zero is None:  # a split backward pass keeps parameters gathered and reduces once: all are ZeRO-1
            found = tuple(s for s in found if s.zero <= 1)
        return tuple(s for s in found if s.zero == 0) if shape.dp == 1 and fixed.zero is None and fixed.zero_group is None else found

    @property
    def overlap(self) -> bool:
        """Whether transfers run beside compute: not on CPUs, whose cores do both."""
        return self.task.cluster.overlaps

    @property
    def sums(self) -> Mode:
        """How gradients are summed over the data axis."""
        return Mode(self.task.constraints.compression or "", self.task.constraints.delay or 0)

    @cached_property
    def peak_flops_per_s(self) -> float:
        """The fastest device's peak, in the dtype of an operand of the model's operators that computes fastest."""
        graph = self.task.graph
        found = {graph.values[name].spec.dtype: None for i in self.outline.batch.body if graph.ops[i].flops for name in graph.ops[i].operands}
        dtypes = [compute_dtype(dtype, self.pricer.precision) for dtype in found or ("float32",)]
        return max(self.task.prices.peak_flops_per_s(dtype, rank) for dtype in dtypes for rank in _distinct_ranks(self.task.cluster))

    def price(self, shape: Shape) -> Price:
        """What parameters cost after the passes at least, whatever the ZeRO stage: the optimizer, and sums that nothing hides."""
        zero = self.task.constraints.zero
        width = parameter_width(self.task.graph)
        seconds = self.optimizer_s / width / (shape.dp if zero != 0 else 1)
        if is_served(self.task.constraints):  # no more than the parts that every way of serving takes
            return Price(shape.num_micro_batches, self.optimizer_s / width / len(servers_among(self.task.constraints, shape.dp)))
        if shape.dp > 1 and not self.sums.is_own and (zero == 0 or not self.overlap):
            group = axis_group(shape.axes, "dp")
            bucket, large = BUCKET_BYTES, 2**30
            reduce_s = self.pricer.collective("all_reduce", bucket, group) / bucket * self.width.gradient / width
            gather_s = self.pricer.collective("all_gather", large, group) / large * self.width.parameter / width
            scatter_s = self.pricer.collective("reduce_scatter", large, group) / large * self.width.gradient / width
            seconds += reduce_s if zero == 0 else gather_s + scatter_s if zero else min(reduce_s, gather_s + scatter_s)
        return Price(shape.num_micro_batches, seconds)

    def chooser(self, shape: Shape) -> Chooser:
        if shape.inside not in self._choosers:
            forbidden: frozenset[int] = frozenset()
            scheme = scheme_of(shape.tensor)
            if self.task.constraints.sequence_parallel is False and scheme == "1d":
                forbidden = frozenset(b.factor for b in self.outline.boundaries(shape.tp, None) if b.factor is not None)
            if shape.ep > 1:
                forbidden |= self.contexts.expert_factors
            scheme = asked if (asked := self.task.constraints.tensor) in LINES else scheme
            steady = Price(max(1, self.batch // shape.rows), self.optimizer_s / parameter_width(self.task.graph))
            self._choosers[shape.inside] = Chooser(
                self.outline, shape.rows, shape.tensor, self.pricer, forbidden, steady, self.countdown.left_s, scheme, self.contexts.local(shape)
            )
        return self._choosers[shape.inside]

    def boundaries(self, shape: Shape) -> tuple[Boundary, ...]:
        """The boundaries that are tried on the shape's tensor axes, inside of what "cp" leaves of a sequence."""
        key = (shape.tensor, shape.cp)
        if key not in self._tried:
            asked = self.task.constraints
            degree = feature_axes(shape.tensor)[0][1]
            whole = False if asked.tensor == "1.5d" else asked.sequence_parallel
            scheme = scheme_of(shape.tensor)
            found = self.outline.boundaries(degree, whole) if scheme == "1d" else self.outline.feature_boundaries(degree)
            found = (Boundary(None, (), degree),) if scheme == "3d" else found  # nothing is chosen
            self._tried[key] = tuple(b for b in found if b.factor is None or self.contexts.leaves(b.factor, shape))
        return self._tried[key]

    @property
    def tighter(self) -> tuple[Callable[[Shape], float], ...]:
        """The bounds between the first and that of integer programs, each tighter and dearer than the one before."""
        return self.operator_bound, self.order_bound

    def peak_bound(self, shape: Shape) -> float:
        peak = self.peak_flops_per_s if self.task.prices.source == "analytic" else 0.0

        def through_s(counts: Mapping[str, int], flops: int) -> float:
            return self._sent_s(shape, counts) + (flops * shape.rows / self.batch / (shape.tp * shape.cp * shape.ep) / peak if peak else 0.0)

        spine = self.bounds.spine
        return self._even(shape, through_s(self.outline.counts, self._flops), through_s(spine.counts, spine.flops))

    def _even(self, shape: Shape, through_s: float, spine_s: float) -> float:
        """Least seconds of a step whose micro-batches take so long through all blocks and through the spine's, whose stages alone fill as `ramp` says."""
        m = shape.num_micro_batches
        is_chain = self.task.stages is None and not is_in_parts(shape)
        return max(through_s * m / shape.pp, ramp(spine_s, shape.pp, m) if is_chain else 0.0)

    def heavy_bound(self, shape: Shape) -> float:
        if shape.inside not in self._heavy:
            self._heavy[shape.inside] = heavy_s(self.chooser(shape))
        heavy = self._heavy[shape.inside]
        through_s, spine_s = (_sum(heavy, counts) + self._sent_s(shape, counts) for counts in (self.outline.counts, self.bounds.spine.counts))
        return self._even(shape, through_s, spine_s)

    def _sent_s(self, shape: Shape, counts: Mapping[str, int]) -> float:
        """Seconds of a micro-batch that products on a grid send inside so many blocks at least; nothing where one axis divides the tensors."""
        if not shape.grid:
            return 0.0
        if shape.inside not in self._sent:
            prices, ops = self.chooser(shape).prices, self.task.graph.ops
            self._sent[shape.inside] = {p: sum(prices.least_sent_s(i) for i in indices if ops[i].flops) for p, indices in self.examples.items()}
        return _sum(self._sent[shape.inside], counts)

    def operator_bound(self, shape: Shape) -> float:
        return self._bound(shape, self.least(shape), surely_held, self._widest(shape))

    def order_bound(self, shape: Shape) -> float:
        return self.by_recompute(shape)[self._widest(shape)]

    def program_bound(self, shape: Shape) -> float:
        """The bound from all programs."""
        is_done = False
        while not is_done:
            bound_s, is_done = self.next_program_bound(shape)
        return bound_s

    def next_program_bound(self, shape: Shape) -> tuple[float, bool]:
        """The bound once more integer programs are solved, and whether all were already: those of blocks that are not recomputed, then of all ways, then at
        the shape's own price."""
        known, way = self.by_recompute(shape), self._widest(shape)
        levels = ("none", MIXED, _OWN) if way == MIXED else (way, _OWN)
        done = self._programmed.get(shape, 0)
        if done == len(levels) or known[way] == float("inf"):
            return known[way], True
        self._programmed[shape] = done + 1
        if levels[done] == _OWN:
            bound_s = self._own_bound(shape, way)
        else:
            solved = (self.solved(shape, boundary, levels[done]) for boundary in self.boundaries(shape))
            bound_s = min((self._bound(shape, blocks, least_held, way) for blocks in solved if blocks is not None), default=float("inf"))
        for each in known:
            known[each] = max(known[each], bound_s)
        return known[way], False

    def _widest(self, shape: Shape) -> str:
        """The way of recomputing of which the others of a shape are cases."""
        ways = [storing.recompute for storing in self.storings(shape)]
        return MIXED if MIXED in ways else ways[0]

    def _own_bound(self, shape: Shape, recompute: str) -> float:
        """What all ranks do together, at the price of the shape's own number of micro-batches where they are few: what is paid once a step weighs more then."""
        m = shape.num_micro_batches
        if self.task.stages is not None or _FEW * m > self.chooser(shape).steady.num_micro_batches:
            return 0.0
        found = []
        for boundary in self.boundaries(shape):
            blocks = self.solved(shape, boundary, recompute)
            if blocks is None:
                continue
            name, main = main_of(blocks)
            ways = RECOMPUTES if recompute == MIXED else (recompute,)
            told = {way: self.chooser(shape).own_s(name, boundary, way, m) for way in ways}
            again = {way: max(main.again_s(way), told[way] - told[ways[0]]) for way in ways}
            if recompute == MIXED:
                main = replace(main, seconds=max(main.seconds, told["none"]), repeated_s=again["selective"], whole_s=again["full"])
                main = replace(main, ways=self._ways(shape, boundary, name, main, m)) if main.is_recomputed else main
            else:
                main = replace(main, seconds=max(main.seconds, told[recompute] - main.again_s(recompute)))
            found.append(
                min(self.bounds.busy_s({**blocks, name: main}, self.step(shape, s), recompute) for s in self.storings(shape) if s.recompute == recompute)
            )
        return min(found, default=0.0)

    def by_recompute(self, shape: Shape) -> dict[str, float]:
        """Way of recomputing -> the tightest bound that is known of its plans."""
        if shape not in self._by_recompute:
            bound_s = self._bound(shape, self.least(shape), least_held, self._widest(shape))
            self._by_recompute[shape] = {storing.recompute: bound_s for storing in self.storings(shape)}
        return self._by_recompute[shape]

    def solved(self, shape: Shape, boundary: Boundary, recompute: str) -> Mapping[str, Least] | None:
        """The least of every pattern, with communication; None where the boundary cannot be had."""
        key = (shape.inside, boundary, recompute)
        if key not in self._solutions and recompute == MIXED:
            self._solutions[key] = self._mixed(shape, boundary, {way: self.solved(shape, boundary, way) or {} for way in RECOMPUTES})
        elif key not in self._solutions:
            seconds, blocks = self.chooser(shape).least_s(boundary, recompute), self.least(shape)
            self._solutions[key] = (
                None if seconds is None else {p: replace(b, seconds=max(b.seconds, seconds[p] - b.again_s(recompute))) for p, b in blocks.items()}
            )
        return self._solutions[key]

    def _mixed(self, shape: Shape, boundary: Boundary, known: Mapping[str, Mapping[str, Least]]) -> Mapping[str, Least] | None:
        """The least of blocks that are recomputed in any way, from those of each (`known`): what a way runs again is what it takes beyond none."""
        if not known["none"]:
            return None
        found: dict[str, Least] = {}
        for p, none in known["none"].items():
            again = {way: max(none.again_s(way), known[way][p].seconds + known[way][p].again_s(way) - none.seconds) for way in RECOMPUTES}
            found[p] = replace(none, repeated_s=again["selective"], whole_s=again["full"])
        name, main = main_of(found)
        if main.is_recomputed:
            found[name] = replace(main, ways=self._ways(shape, boundary, name, main))
        return found

    def _ways(self, shape: Shape, boundary: Boundary, name: str, main: Least, num_micro_batches: int | None = None) -> tuple[tuple[float, float], ...]:
        """Corners of what choices of operators make of each way: at the price s of a byte at which a way weighs as much as the next one, a choice of
        a seconds more than `main` and A bytes has a + s A >= L, the relaxed program's answer, beside a >= a_i and A >= A_i."""
        way_of = {(main.again_s(way), float(main.held_bytes(way))): way for way in reversed(RECOMPUTES)}
        found: list[tuple[float, float]] = []
        corners = hull(tuple(way_of))
        for (again_s, kept), (next_s, less) in itertools.pairwise(corners):
            way, price_s = way_of[again_s, kept], (next_s - again_s) / (kept - less)
            entered = 0 if way == "none" else main.enter_bytes
            least_s = self.chooser(shape).own_s(name, boundary, way, num_micro_batches, price_s) + price_s * entered - main.seconds
            found.append((again_s, max(kept, (least_s - again_s) / price_s)))
            found.append((max(again_s, least_s - price_s * kept), kept))
        return hull((*found, corners[-1]))

    def _bound(self, shape: Shape, blocks: Mapping[str, Least], counts: Counts, recompute: str) -> float:
        """The least of the ways of storing that recompute so. Where the bound does not count on what memory allows, one that may fit bounds those that it
        dominates."""
        found: dict[Storing, float] = {}
        least_s = float("inf")
        for storing in sorted((s for s in self.storings(shape) if s.recompute == recompute), key=lambda s: s.order):
            if is_in_parts(shape) and any(dominates(other, storing) for other in found):
                continue
            bound_s = self.least_step_s(blocks, shape, storing, counts)
            least_s = min(least_s, bound_s)
            if bound_s < float("inf"):
                found[storing] = bound_s
        return least_s

    def least_step_s(self, blocks: Mapping[str, Least], shape: Shape, storing: Storing, counts: Counts = least_held) -> float:
        """Given stages need not be a chain: then only the work itself, divided evenly, bounds the step."""
        if self.task.stages is not None:
            return shape.num_micro_batches * sum(b.count * b.seconds for b in blocks.values()) / shape.pp
        return self.bounds.step_s(self._exchanging(blocks, shape), self.step(shape, storing), storing.recompute, counts)

    def _exchanging(self, blocks: Mapping[str, Least], shape: Shape) -> Mapping[str, Least]:
        """`blocks` with what data ranks and contexts exchange inside their passes (autoplan/exchanges.py)."""
        key = (shape.inside, shape.axes)
        if key not in self._exchanged:
            local, given = self.chooser(shape).local, self.outline.batch.preamble_outputs
            self._exchanged[key] = {p: exchanges(local, indices, given, shape.axes) for p, indices in self.examples.items()}
        found = {p: (b, self._exchanged[key][p]) for p, b in blocks.items()}
        return {
            p: replace(b, seconds=b.seconds + e.seconds, forward_s=b.forward_s + e.forward_s, backward_s=b.backward_s + e.backward_s)
            for p, (b, e) in found.items()
        }

    def least(self, shape: Shape) -> Mapping[str, Least]:
        if shape.inside not in self._leasts:
            self._leasts[shape.inside] = least_blocks(self.chooser(shape), self.boundaries(shape), self.bounds.spine.sent)
        return self._leasts[shape.inside]


def _sum(seconds: Mapping[str, float], counts: Mapping[str, int]) -> float:
    """Seconds of so many blocks of each pattern."""
    return sum(counts[p] * each for p, each in seconds.items())


def is_in_parts(shape: Shape) -> bool:
    """Whether a rank has several stages, or the backward pass is split."""
    return is_split(shape.schedule) or shape.num_chunks > 1


def dominates(one: Storing, other: Storing) -> bool:
    """Whether `one` takes no longer than `other`, whatever the plan."""
    is_less_again = WAYS.index(one.recompute) <= WAYS.index(other.recompute)
    return is_less_again and (one.zero == other.zero or 1 <= one.zero <= other.zero)


def parameter_width(graph: Graph) -> int:
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
