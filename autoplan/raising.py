"""Raising: the layers of a plan that are recomputed one way further until every rank fits.

A layer's *steps* go from one way of recomputing to the next that takes more time and keeps less. Ways that lie above the line between their neighbours
(bytes kept, seconds run again) are left out, or, since they may make less again at once, not. A rank that is too full at its fullest moment takes the
step that saves most bytes there for a second of a micro-batch, for as many layers of that stage and way as it lacks, and looks again. So it ends with
all at their last way or with room.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoplan.forecast import Memory
from autoplan.holding import Moments, Sizes, fullest, moments
from autoplan.mixing import hull
from autoplan.outcome import Result
from autoplan.problem import Price
from autoplan.rankmemory import by_rank, memories
from autoplan.replay import Step
from autoplan.space import RECOMPUTES
from autoplan.stagework import BlockLoad, Work


@dataclass
class _Stage:
    """The blocks of a stage while they are raised: `numbers` of the graph, and where each is on its pattern's ladder."""

    numbers: list[int]
    ladders: list[tuple[BlockLoad, ...]]
    rungs: list[int]
    is_split: bool

    def sizes(self) -> Sizes:
        loads = [ladder[rung] for ladder, rung in zip(self.ladders, self.rungs, strict=True)]
        put_off = sum(load.point.put_off_bytes for load in loads) if self.is_split else 0
        return Sizes(sum(load.saved_bytes for load in loads), put_off, max((load.transient_bytes for load in loads), default=0))

    def steps(self) -> dict[tuple[int, int], list[int]]:
        """(saved bytes, rung and ladder) -> the blocks, by position, that could take the same step."""
        found: dict[tuple[int, int], list[int]] = {}
        for i, (ladder, rung) in enumerate(zip(self.ladders, self.rungs, strict=True)):
            if rung + 1 < len(ladder):
                found.setdefault((id(ladder), rung), []).append(i)
        return found


def ladder(work: Work, pattern: str, *, is_hull: bool = True) -> tuple[BlockLoad, ...]:
    """A block of a pattern in every way worth taking, from none on: `is_hull`, on the lower hull of seconds run again over bytes kept."""
    ways = [work.load(pattern, way) for way in RECOMPUTES] if work.outline.is_recomputed(pattern) else [work.load(pattern, "none")]
    if is_hull:
        corners = hull(tuple((load.again.seconds, float(load.saved_bytes)) for load in ways))
        by_corner = {(load.again.seconds, float(load.saved_bytes)): load for load in reversed(ways)}
        return tuple(by_corner[corner] for corner in corners)
    found: list[BlockLoad] = []
    for load in ways:
        if not found or load.saved_bytes < found[-1].saved_bytes:  # else more time for nothing
            found.append(load)
    return tuple(found)


def _rate(one: BlockLoad, other: BlockLoad) -> float:
    """Bytes saved for a second of a micro-batch."""
    return (one.saved_bytes - other.saved_bytes) / max(1e-30, other.again.seconds - one.again.seconds)


def raised(work: Work, step: Step, starts: tuple[int, ...], limit_bytes: int) -> tuple[Work, ...]:
    """`work`, whose layers are recomputed in no way, with as much recomputation as ranks of `limit_bytes` need; none where none is enough or needed."""
    loads = work.stage_loads(starts, step.stage_ranks)
    held = memories(loads, step)
    totals: Sequence[Memory] = by_rank(held, step.stage_ranks)
    if all(memory.total <= limit_bytes for memory in totals):
        return ()
    hulls, alls = ({pattern: ladder(work, pattern, is_hull=is_hull) for pattern in work.outline.examples} for is_hull in (True, False))
    differ = any(len(hulls[pattern]) != len(alls[pattern]) for pattern in hulls)
    found = (_raised(work, step, starts, limit_bytes, totals, ladders) for ladders in ((hulls, alls) if differ else (hulls,)))
    return tuple(each for each in found if each is not None)


def _raised(
    work: Work, step: Step, starts: tuple[int, ...], limit_bytes: int, totals: Sequence[Memory], ladders: dict[str, tuple[BlockLoad, ...]]
) -> Work | None:
    modes = list(work.modes)
    for rank, candidates in enumerate(moments(step.schedule, step.stage_ranks, step.num_micro_batches)):
        own = [s for s, at in enumerate(step.stage_ranks) if at == rank]
        total = totals[own[0]]
        room = limit_bytes - (total.total - total.activations)
        stages = {s: _stage(work, ladders, starts[s], starts[s + 1], step) for s in own}
        if not _fit(stages, candidates, room):
            return None
        for stage in stages.values():
            for number, rungs, rung in zip(stage.numbers, stage.ladders, stage.rungs, strict=True):
                modes[number] = rungs[rung].recompute
    return work.with_modes(tuple(modes))


def leaner(work: Work, result: Result, price: Price, state_share: float) -> tuple[tuple[str, Price], ...]:
    """Ways in which the fullest rank of a plan recomputes its layers, each with a price at which a choice's bytes weigh what the last step that the rank took
    spends on them. `state_share`: bytes of states for a byte of parameters."""
    graph, step = work.outline.graph, work.step
    rank = result.stage_ranks[result.fullest]
    own = [n for s, at in enumerate(result.stage_ranks) if at == rank for n in range(result.starts[s], result.starts[s + 1])]
    found: dict[str, tuple[str, Price]] = {}
    most = int(moments(step.schedule, step.stage_ranks, step.num_micro_batches)[rank].saved.max())
    for pattern in dict.fromkeys(graph.blocks[n].pattern for n in own):
        rungs, modes = ladder(work, pattern), [result.modes[n] for n in own if graph.blocks[n].pattern == pattern]
        top = max((i for i, load in enumerate(rungs) if load.recompute in modes), default=0)
        if not top:
            continue
        byte_s = price.num_micro_batches / _rate(rungs[top - 1], rungs[top])
        lean = replace(price, per_parameter_byte_s=price.per_parameter_byte_s + byte_s * state_share / most, per_saved_byte_s=byte_s)
        found.update((way, (way, lean)) for way in modes)
    return tuple(found.values())


def _stage(work: Work, ladders: dict[str, tuple[BlockLoad, ...]], start: int, stop: int, step: Step) -> _Stage:
    numbers = [n for n in work.outline.blocks if start <= n < stop]
    return _Stage(numbers, [ladders[work.outline.graph.blocks[n].pattern] for n in numbers], [0] * len(numbers), step.is_split)


def _fit(stages: dict[int, _Stage], candidates: Moments, room: int) -> bool:
    """Raise the blocks of one rank until its fullest moment has room; whether it has."""
    while True:
        sizes = {s: stage.sizes() for s, stage in stages.items()}
        moment, num_bytes = fullest(candidates, sizes)
        over = num_bytes - room
        if over <= 0:
            return True
        counts = {s: saved for s, saved, _ in moment.counts}
        best: tuple[float, int, list[int], float] | None = None
        for s, stage in stages.items():
            for positions in stage.steps().values():
                now, after = (stage.ladders[positions[0]][stage.rungs[positions[0]] + k] for k in (0, 1))
                saves = counts[s] * (now.saved_bytes - after.saved_bytes)
                rate = counts[s] * _rate(now, after)
                if saves > 0 and (best is None or rate > best[0]):
                    best = rate, s, positions, saves
        if best is None:
            return False
        _, s, positions, saves = best
        for position in positions[: math.ceil(over / saves)]:
            stages[s].rungs[position] += 1
