"""Lower bounds of a shape's step, for every way of storing that may fit.

Of all blocks with w seconds of one micro-batch (f forward, b backward; recomputed: b + f), from the fastest option of every
operator or, tighter, from the integer programs; n stages, m micro-batches; sums over blocks W, F, B; G and R seconds to gather
all parameters and to reduce all gradients over the ranks that share states, every parameter divided over the tensor axis:

    T >= W / (1 - (1 - 1/m)^n)     stage j ends no sooner than m w_j + sum of w_i, i < j; the best w_j make these equal
    T >= m * (heaviest block)
    T >= X / n                     some stage has its share of   X = m W + sums of gradients (ZeRO-0), and for ZeRO-1, -2, -3
                                   X = max(m W, (m-1) W + max(F, G) + max(B, R)),  max(m W, (m-1) F + max(F, G) + m max(B, R)),
                                   max(m W, m (max(F, G) + max(B, G + R)));  sums instead of inner maxima where nothing overlaps;
                                   the optimizer added, and gathers and reductions of one block that nothing hides
    T >= max(F, G) + max(B, R)     the first forward passes all stages, and gathers there; then the last backward, and reduces (ZeRO-3:
                                   max(B, G + R)); every stage gathers and reduces one block that nothing hides, and sends
    T >= V + (m-1) b_j + k f_j     1F1B, k = max(0, m - n + j): the first backward of stage j waits for a forward through all
                                   stages and the backwards behind it; by then stage j has done m - k forwards; the last
                                   backward passes the stages before it, or the stage's gradients are summed and its optimizer runs.
                                   V: W and sends, or the first forwards with what they gather and B (autoplan/slots.py)
    T >= V + (m-1) w_j             GPipe: all forwards, then all backwards

The last two bind the commonest pattern: N blocks, of which stage j has a whole number n_j <= cap_j (autoplan/room.py), so that the least t with
sum of min(floor(t / g_j), cap_j) >= N is added to V; g_j = k w + (m - 1 - k) b of one block, beside the first and the last block where they must
be. A way of storing without room for all blocks is no plan; infinity says that none is.

All but m * (heaviest block) and X / n hold because each block waits for the one before it. Where the graph is no chain, they are those of its spine's
blocks alone (autoplan/spine.py): a stage is at least what it has of them. With h blocks off the spine, at least n - h stages are on it.

Where a rank has several stages (interleaved, ZB-V) or the backward pass is split, p ranks: rank r is never busy before the forwards,
nor (backward passes in one) after the backwards, of the r stages before its first, which hold the first r blocks at least. Their
seconds a_r, in order, give  T >= (X + sum of a_r) / p,  some rank has N / p of the commonest blocks, rounded up, and the schedule's order gives more
(autoplan/paths.py); where the graph is no chain, only what names no order: X / p and whole blocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import numpy as np

from autoplan import paths
from autoplan.choose import Outline
from autoplan.holding import least_held
from autoplan.least import Least, main_of
from autoplan.load import BUCKET_BYTES
from autoplan.mixing import Mixture
from autoplan.price import Pricer, axis_group
from autoplan.replay import Step
from autoplan.room import Counts, Room
from autoplan.slots import Block, Slots, slots_of
from autoplan.space import MIXED
from autoplan.spine import spine_of
from autoplan.transit import AXIS
from costmodel.memory import Widths
from costmodel.opkey import RankGroup
from costmodel.overlap import beside_s

_HALVINGS = 13  # of a search for the least seconds
_NEAR = 0.97  # of enough, from where on a bound is made as tight as it can be


class Bounds:
    """Bounds of steps over one model: what does not depend on the shape."""

    def __init__(self, outline: Outline, pricer: Pricer, width: Widths, optimizer_s: float, limit_bytes: int) -> None:
        self.outline = outline
        self.pricer = pricer
        self.width = width
        self.optimizer_s = optimizer_s  # per element
        self.enough_s = float("inf")  # a bound that is no less says enough, and is not tightened
        self._shares: dict[tuple[str, tuple[int, ...], int], dict[tuple[int, tuple[int, ...]], tuple[np.ndarray, float]]] = {}
        self.spine = spine_of(outline)
        self.room = Room(outline, width, limit_bytes, self.spine)

    def step_s(self, blocks: Mapping[str, Least], step: Step, recompute: str, counts: Counts = least_held) -> float:
        """Least seconds of a step that stores so; infinity where it cannot fit. The module's formulas.

        `counts`: micro-batches that each rank holds at least; `surely_held` is quicker and looser.
        """
        caps = self.room.caps(blocks, step, recompute, counts)
        if caps is None:
            return float("inf")
        n, m = step.num_ranks, step.num_micro_batches
        is_chain = not step.is_split and n == len(step.stage_ranks)
        mixture = self.room.mixture(blocks, step, counts) if recompute == MIXED and (is_chain or counts is least_held) else None
        more_s = mixture.least_again_s if mixture is not None else 0.0
        again = {p: b.again_s(recompute) for p, b in blocks.items()}
        total = sum(b.count * (b.seconds + again[p]) for p, b in blocks.items()) + more_s
        bound = m * max(b.seconds + again[p] for p, b in blocks.items())
        line = self.spine.of(blocks)
        line_s = sum(b.count * (b.seconds + again[p]) for p, b in line.items()) + (0.0 if self.spine.num_off else more_s)
        forward = sum(b.count * b.forward_s for b in blocks.values())
        backward = sum(b.count * (b.backward_s + again[p]) for p, b in blocks.items()) + more_s
        share_s = self._share(blocks, step, total, forward, backward)
        bound = max(bound, share_s / n, ramp(line_s, n, m) if is_chain else 0.0)
        if bound >= self.enough_s:
            return bound
        slots = self._slots(line, step, again)
        every = self._slots(blocks, step, again) if self.spine.num_off else slots
        gather_s, reduce_s = self._exposed(every, step, is_trained=all(b.num_trained == b.num_elements for b in blocks.values()))
        fewer = self.spine.num_off * (1 if is_chain else 2)  # crossings at most, where each block off the spine is a stage
        crossings = max(0, sum(a != b for a, b in itertools.pairwise(step.stage_ranks)) - fewer)
        num_stages = max(1, len(step.stage_ranks) - self.spine.num_off)
        sent_s = self._sent_s(blocks, step)
        first_s, last_s = slots.first_s + num_stages * gather_s, slots.last_s + num_stages * reduce_s
        bound = max(bound, first_s + last_s + 2 * crossings * sent_s)
        if bound >= self.enough_s:
            return bound
        if not is_chain:
            each = len(step.stage_ranks) // n * (_often(step)[0] * gather_s + _often(step)[1] * reduce_s)  # of all stages of a rank
            return max(bound, self._in_parts_s(blocks, slots, step, again, share_s + n * each, caps if counts is least_held else None, sent_s, mixture, each))
        often = _often(step)
        bound = max(bound, share_s / n + often[0] * gather_s + often[1] * reduce_s)
        if n > 1 and bound < self.enough_s:
            plain = line_s + 2 * crossings * sent_s
            moved = first_s + slots.backward_s + 2 * crossings * sent_s + (0.0 if self.spine.num_off or slots.backward_is_moved else more_s)
            if main_of(line)[0] != main_of(blocks)[0]:
                caps, mixture = np.full(n, float(main_of(line)[1].count)), None  # those are of other blocks
            for base_s, counted in ((plain, 0.0), (moved, 1.0)):
                bound = max(bound, self._chains(line, slots, step, caps, base_s, counted, mixture))
        return bound

    def busy_s(self, blocks: Mapping[str, Least], step: Step, recompute: str) -> float:
        """Least seconds that some rank is busy: X / n of the module's text, of seconds that may count what is paid once a step; infinity where nothing fits."""
        if self.room.caps(blocks, step, recompute, least_held) is None:
            return float("inf")
        mixture = self.room.mixture(blocks, step, least_held) if recompute == MIXED else None
        again = {p: b.again_s(recompute) for p, b in blocks.items()}
        total = sum(b.count * (b.seconds + again[p]) for p, b in blocks.items()) + (mixture.least_again_s if mixture is not None else 0.0)
        share_s = self._share(blocks, step, total, 0.0, 0.0)
        if step.is_split or step.num_ranks < len(step.stage_ranks):
            return share_s / step.num_ranks
        often = _often(step)
        gather_s, reduce_s = self._exposed(self._slots(blocks, step, again), step, is_trained=all(b.num_trained == b.num_elements for b in blocks.values()))
        return share_s / step.num_ranks + often[0] * gather_s + often[1] * reduce_s

    def _slots(self, blocks: Mapping[str, Least], step: Step, again: Mapping[str, float]) -> Slots:
        width, shards = self.width, step.shards
        group = axis_group(step.axes, "dp")
        ranks = RankGroup(shards, group.stride, 0, group.concurrent)
        is_moving = step.zero > 0 and shards > 1
        tail_s = self.optimizer_s / max(shards, len(step.servers))
        if step.zero == 0 and group.size > 1 and step.sync == "allreduce" and not step.sums.is_own:
            tail_s += self.pricer.collective("all_reduce", BUCKET_BYTES, group) / BUCKET_BYTES * width.gradient
        gathered, reduced = (dict.fromkeys(blocks, 0.0) for _ in range(2))
        if is_moving and step.is_split:  # all of a stage's at once
            elements, trained = (sum(b.count * getattr(b, name) for b in blocks.values()) for name in ("num_elements", "num_trained"))
            gather_s = self.pricer.collective("all_gather", elements * width.parameter, ranks)
            reduce_s = 0.0 if step.sums.is_own else self.pricer.collective("reduce_scatter", trained * width.gradient, ranks)
            gathered = {p: gather_s * b.num_elements / max(1, elements) for p, b in blocks.items()}
            reduced = {p: reduce_s * b.num_trained / max(1, trained) for p, b in blocks.items()}
        elif is_moving:
            gathered = {p: self.pricer.collective("all_gather", b.num_elements * width.parameter, ranks) for p, b in blocks.items()}
            if not step.sums.is_own:
                reduced = {p: self.pricer.collective("reduce_scatter", b.num_trained * width.gradient, ranks) for p, b in blocks.items()}
        known = {}
        for p, b in blocks.items():
            backward_s = max(0.0, b.backward_s + again[p] - (b.weights_s if step.is_split else 0.0))
            rest_s = max(0.0, b.seconds + again[p] - b.forward_s - backward_s)
            own_tail_s = tail_s * b.num_trained if p in self.room.unshared else 0.0
            known[p] = Block(b.count, b.forward_s, backward_s, rest_s, own_tail_s, gathered[p], reduced[p])
        return slots_of(known, step)

    @staticmethod
    def _exposed(slots: Slots, step: Step, *, is_trained: bool) -> tuple[float, float]:
        """Seconds of a stage's first gather and last reduction, of its largest unit, which nothing hides."""
        if not step.zero or step.shards == 1 or step.is_split or not step.overlap:
            return 0.0, 0.0
        most = max if len(step.stage_ranks) == 1 else min
        gather_s, reduce_s = most(slot.gather_s for slot in slots.each.values()), most(slot.reduce_s for slot in slots.each.values())
        return gather_s, reduce_s if is_trained else 0.0  # the replay spreads what is trained over all units

    def _sent_s(self, blocks: Mapping[str, Least], step: Step) -> float:
        """Seconds of the least transfer between stages on different ranks, whole or in pieces (autoplan/transit.py)."""
        p = step.num_ranks
        graph = self.outline.graph
        num_bytes = min((blocks[graph.blocks[number].pattern].leave_bytes for number in self.spine.blocks[:-1]), default=0)
        if p == 1 or not num_bytes:
            return 0.0
        apart = dict.fromkeys(abs(a - b) for a, b in itertools.pairwise(step.stage_ranks) if a != b) if not self.spine.num_off else range(1, p)
        line = axis_group(step.axes, "pp")
        links = [RankGroup(2, line.stride * distance, 0, line.stride) for distance in apart]
        whole_s = min(self.pricer.collective("send", num_bytes, link) for link in links)
        tensor = axis_group(step.axes, AXIS)
        if tensor.size == 1:
            return whole_s
        piece_s = min(self.pricer.collective("send", num_bytes // tensor.size, link) for link in links)
        return min(whole_s, piece_s + self.pricer.collective("all_gather", num_bytes, tensor))

    def _chains(self, blocks: Mapping[str, Least], slots: Slots, step: Step, caps: np.ndarray, base_s: float, moved: float, mixture: Mixture | None) -> float:
        """Chains of one stage a rank: `base_s` and what the stages' own blocks add; `moved`: whether what moves beside a last backward counts."""
        times = 0.0 if mixture is None or slots.backward_is_moved else step.num_micro_batches - 1.0
        n, m = len(step.stage_ranks), step.num_micro_batches
        name, main = main_of(blocks)
        free = np.full(n, m - 1.0) if step.schedule == "gpipe" else np.maximum(0.0, m - n + np.arange(n))

        def each(pattern: str) -> np.ndarray:
            slot = slots.each[pattern]
            rest_s = 0.0 if slots.forward_is_moved or slots.backward_is_moved else slot.rest_s
            return free * (slot.forward_s + rest_s) + (m - 1) * slot.backward_s + moved * (slot.last_backward_s - slot.backward_s)

        costs, spent = each(name), np.zeros(n)
        for number, stage in self.room.ends(step, name).items():
            if number in self.spine.blocks:
                spent[stage] += each(self.outline.graph.blocks[number].pattern)[stage]
        least = _fill(costs, caps, main.count)
        slot = slots.each[name]
        tails = (costs + slot.last_backward_s + slot.tail_s, slot.backward_s, base_s - slots.backward_s) if moved and slot.tail_s else None

        def is_enough(t: float) -> bool:
            counts = _whole(t - spent, costs, caps) if mixture is None else mixture.whole(t - spent, costs, times, caps)
            if tails is None or counts.sum() < main.count:
                return bool(counts.sum() >= main.count)
            own, back_s, before_s = tails
            placed = 0.0
            for most, cost in zip(counts.tolist(), own.tolist(), strict=True):  # the stages behind j hold what those up to it do not
                room = base_s + t - before_s - back_s * (main.count - placed)
                placed += min(most, max(0.0, math.floor(room / max(cost - back_s, 1e-30) * (1 + 1e-9))))
            return placed >= main.count

        slowest_s = times * mixture.ways[-1][0] * main.count / n if mixture is not None else 0.0
        return base_s + _least_whole(is_enough, least, 2 * (least + slowest_s) + float(costs.max() + spent.max()) + slot.tail_s * main.count)

    def _in_parts_s(
        self,
        blocks: Mapping[str, Least],
        slots: Slots,
        step: Step,
        again: Mapping[str, float],
        share_s: float,
        caps: np.ndarray | None,
        sent_s: float,
        mixture: Mixture | None,
        exposed_s: float,
    ) -> float:
        """The bound of schedules with several stages on a rank, or with a split backward pass; with `caps` as the schedule's order says. `exposed_s` of
        every rank: what its stages gather and reduce with nothing beside."""
        p, m = step.num_ranks, step.num_micro_batches
        graph = self.outline.graph
        alone = np.zeros(p)
        if not self.spine.num_off:
            first = [slots.each[graph.blocks[number].pattern] for number in self.outline.blocks[: p - 1]]
            alone[1:] = np.cumsum([slot.first_forward_s + (0.0 if step.is_split else slot.last_backward_s) for slot in first])
        name, main = main_of(blocks)
        bound = (share_s + float(alone.sum())) / p
        if caps is not None and bound < self.enough_s:
            spent = alone + exposed_s
            for number, rank in self.room.ends(step, name).items():
                pattern = graph.blocks[number].pattern
                spent[rank] += m * (blocks[pattern].seconds + again[pattern])
            costs = np.full(p, m * (main.seconds + again[name]))
            whole = (lambda t: _whole(t - spent, costs, caps)) if mixture is None else (lambda t: mixture.whole(t - spent, costs, m, caps))
            bound = max(bound, _least_whole(lambda t: whole(t).sum() >= main.count, bound, 2 * bound))
        if caps is not None and bound < self.enough_s and not self.spine.num_off:
            bound = max(bound, self._paths_s(slots, step, sent_s, 0.0 if mixture is None else mixture.least_again_s))
        return bound

    def _paths_s(self, slots: Slots, step: Step, sent_s: float, again_s: float) -> float:
        """What the paths through the schedule's order say; `again_s`: of a micro-batch, what is run again somewhere besides. Their best shares are a linear
        program; those of blocks of other proportions, which are a bound too, are tried before."""
        known = np.array([[s.forward_s, s.backward_s, 0.0, s.first_forward_s, s.last_backward_s, s.last_weights_s, s.tail_s] for s in slots.each.values()])
        rest = np.array([s.rest_s for s in slots.each.values()])
        counts = np.array([s.count for s in slots.each.values()])

        def bound_s(times: np.ndarray, sends: float) -> float:  # times[stage, kind]
            held = [times[:, 0] + (0.0 if slots.first_is_moved else times[:, 3]), times[:, 1] + (0.0 if slots.last_is_moved else times[:, 4])]
            held = [0.0 * own if is_moved else own for own, is_moved in zip(held, (slots.forward_is_moved, slots.backward_is_moved), strict=True)]
            held += [times[:, 2] + times[:, 5]] if step.is_split else []
            costs = times @ known.T + np.min(held, axis=0)[:, None] * rest  # [stage, pattern]
            repeated = times[:, 1] * (not slots.backward_is_moved) + times[:, 4] * (not slots.last_is_moved)
            return float(counts @ costs.min(axis=0)) + sends * sent_s + float(repeated.min()) * again_s

        whole = np.array([*(counts @ known), counts @ rest])
        whole[1] += again_s
        whole[4] += again_s
        unit = max(whole[0] + whole[1] + whole[-1], 1e-30)
        asked = (step.schedule, step.stage_ranks, step.num_micro_batches)
        shares = self._shares.setdefault(asked, {})
        best_s = max((bound_s(*each) for each in shares.values()), default=0.0)
        for parts in paths.PARTS:
            if best_s >= self.enough_s:
                break
            proportion = tuple(int(share) for share in np.round(parts * np.minimum(whole / unit, parts)))
            if (parts, proportion) not in shares:
                shares[parts, proportion] = paths.weights(*asked, proportion)
                best_s = max(best_s, bound_s(*shares[parts, proportion]))
            if best_s < _NEAR * self.enough_s:
                break  # a finer proportion would not be enough
        return best_s

    def _share(self, blocks: Mapping[str, Least], step: Step, total: float, forward: float, backward: float) -> float:
        m, shards = step.num_micro_batches, step.shards
        trained = max(0, sum(b.count * b.num_trained for b in blocks.values()) - self.room.again)
        group = axis_group(step.axes, "dp")
        tail = self.optimizer_s * trained / max(shards, len(step.servers))
        if step.sync != "allreduce" or (step.is_split and step.zero and shards > 1):
            return m * total + tail
        if step.zero == 0 or shards == 1:
            reduce_s = (
                self.pricer.collective("all_reduce", BUCKET_BYTES, group) / BUCKET_BYTES if group.size > 1 and step.zero == 0 and not step.sums.is_own else 0.0
            )
            return m * total + reduce_s * trained * self.width.gradient + tail
        gather, scatter = self._moved(blocks, step)
        if step.zero == 1:
            passes = (m - 1) * total + _beside(step, forward, gather) + _beside(step, backward, scatter)
        elif step.zero == 2:
            passes = (m - 1) * forward + _beside(step, forward, gather) + m * _beside(step, backward, scatter)
        else:
            passes = m * (_beside(step, forward, gather) + _beside(step, backward, gather + scatter))
        return max(m * total, passes) + tail

    def _moved(self, blocks: Mapping[str, Least], step: Step) -> tuple[float, float]:
        """Seconds to gather all parameters once, and to reduce and scatter all gradients, under ZeRO."""
        if step.zero == 0 or step.shards == 1:
            return 0.0, 0.0
        group = axis_group(step.axes, "dp")
        ranks = RankGroup(step.shards, group.stride, 0, group.concurrent)
        gather = sum(b.count * self.pricer.collective("all_gather", b.num_elements * self.width.parameter, ranks) for b in blocks.values())
        scatter = sum(b.count * self.pricer.collective("reduce_scatter", b.num_trained * self.width.gradient, ranks) for b in blocks.values())
        return gather, 0.0 if step.sums.is_own else scatter  # compressed or late sums follow the passes: no bound counts them


def _often(step: Step) -> tuple[int, int]:
    """Gathers and reductions of a stage that nothing hides."""
    m = step.num_micro_batches
    return {1: (1, 1), 2: (1, m), 3: (2 * m, m)}.get(step.zero, (0, 0))


def _beside(step: Step, compute_s: float, moved_s: float) -> float:
    return beside_s(compute_s, moved_s, step.slowdown) if step.overlap else compute_s + moved_s


def _whole(room_s: np.ndarray, costs: np.ndarray, caps: np.ndarray) -> np.ndarray:
    """Whole blocks that each rank has time and memory for."""
    return np.minimum(caps, np.floor(np.maximum(0.0, room_s) / np.maximum(costs, 1e-30) * (1 + 1e-9)))


def _least_whole(is_enough: Callable[[float], bool], low: float, high: float) -> float:
    """The least time that is enough, from below, to 1/8192 of the distance between `low` and `high`."""
    if low >= high or is_enough(low):
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return low


def _fill(weights: np.ndarray, caps: np.ndarray, count: int) -> float:
    """The least t with sum of min(t / weights, caps) >= count; caps suffice."""
    weights = np.maximum(weights, 0.0)
    if (weights <= 0.0).any() and caps[weights <= 0.0].sum() >= count:
        return 0.0
    left = count - caps[weights <= 0.0].sum()
    caps, weights = caps[weights > 0.0], weights[weights > 0.0]
    order = np.argsort(caps * weights, kind="stable")  # the t at which a stage is full
    caps, weights = caps[order], weights[order]
    full = np.concatenate([[0.0], np.cumsum(caps)[:-1]])
    rates = np.cumsum((1.0 / weights)[::-1])[::-1]  # of the stages that are not yet full
    levels = (left - full) / rates
    enough = levels <= caps * weights * (1 + 1e-12)
    return float(max(0.0, levels[np.argmax(enough)])) if enough.any() else 0.0


def ramp(through_s: float, num_stages: int, num_micro_batches: int) -> float:
    """Lower bound of a pipeline's time from the seconds of one micro-batch through all stages."""
    return through_s / (1.0 - (1.0 - 1.0 / num_micro_batches) ** num_stages)
