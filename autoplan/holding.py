"""What the ranks of a pipeline hold at once: micro-batches in flight, as the schedule's own order shows.

From its forward (F) to its backward (B, or the inputs' half BI) a micro-batch holds what the stage saves; from BI to the weights'
half (BW) the inputs and output gradients of the products whose weight gradients were put off. A rank is fullest while it runs some
backward: what it holds just before that, or, of a half, just after it (one saved, one more put off), whichever is more.

    bytes = sum over the rank's stages (saved_s * #saved_s + put_off_s * #put_off_s) + what the running backward makes for a moment

The counts do not grow with the number of micro-batches once the pipeline is full (GPipe apart), so long steps are played short.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from runtime.action import Schedule
from runtime.schedule import schedule, splits_backward

order = lru_cache(maxsize=512)(schedule)  # equal questions get the same frozen answer


def is_split(name: str) -> bool:
    """Whether a schedule runs the backward pass in two halves."""
    return splits_backward(name)


def num_stages_held(stage_ranks: tuple[int, ...]) -> int:
    """Most stages of one rank."""
    return max(stage_ranks.count(rank) for rank in set(stage_ranks))


@dataclass(frozen=True, slots=True)
class Moment:
    """What a rank holds while `running` (a stage) runs its backward: (stage, micro-batches saved, micro-batches put off)."""

    running: int
    counts: tuple[tuple[int, int, int], ...]

    def dominates(self, other: Moment) -> bool:
        pairs = zip(self.counts, other.counts, strict=True)
        return self.running == other.running and all(a[1] >= b[1] and a[2] >= b[2] for a, b in pairs)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one micro-batch on one stage: saved, put off, and made for a moment by its backward."""

    saved: int
    put_off: int
    transient: int


def long_enough(name: str, stage_ranks: tuple[int, ...], num_micro_batches: int) -> int:
    """A number of micro-batches, at most the given one, whose schedule holds as many at once."""
    num_ranks = max(stage_ranks) + 1
    if name == "gpipe" or num_micro_batches < 5 * num_ranks:
        return num_micro_batches
    return 4 * num_ranks + num_micro_batches % num_ranks


@lru_cache(maxsize=4096)
def moments(name: str, stage_ranks: tuple[int, ...], num_micro_batches: int) -> tuple[tuple[Moment, ...], ...]:
    """For each rank, the moments of which one is the fullest, whatever the bytes."""
    if name == "gpipe":
        return tuple(_all_at_once(tuple(s for s, at in enumerate(stage_ranks) if at == rank), num_micro_batches) for rank in range(max(stage_ranks) + 1))
    played = long_enough(name, stage_ranks, num_micro_batches)
    return _moments(order(name, stage_ranks, played), stage_ranks) if played == num_micro_batches else moments(name, stage_ranks, played)


def _all_at_once(own: tuple[int, ...], num_micro_batches: int) -> tuple[Moment, ...]:
    """GPipe's: all forwards are done, then stage after stage goes back."""
    return tuple(Moment(running, tuple((s, num_micro_batches if s <= running else 0, 0) for s in own)) for running in own)


def _moments(actions: Schedule, stage_ranks: tuple[int, ...]) -> tuple[tuple[Moment, ...], ...]:
    found = []
    for rank, own in enumerate(actions):
        now = {s: [0, 0] for s, r in enumerate(stage_ranks) if r == rank}
        full: list[Moment] = []  # of which none dominates another
        seen: set[Moment] = set()

        def mark(stage: int, now: dict[int, list[int]] = now, full: list[Moment] = full, seen: set[Moment] = seen) -> None:
            moment = Moment(stage, tuple((s, saved, put_off) for s, (saved, put_off) in now.items()))
            if moment in seen:
                return
            seen.add(moment)
            if not any(other.dominates(moment) for other in full):
                full[:] = [*(other for other in full if not moment.dominates(other)), moment]

        for action in own:
            counts = now[action.stage]
            if action.kind == "F":
                counts[0] += 1
            elif action.kind == "BW":
                counts[1] -= 1
            else:
                mark(action.stage)
                counts[0] -= 1
                if action.kind == "BI":
                    counts[1] += 1
                    mark(action.stage)
        found.append(tuple(full))
    return tuple(found)


@lru_cache(maxsize=4096)
def least_held(name: str, stage_ranks: tuple[int, ...], num_micro_batches: int) -> tuple[int, ...]:
    """For each rank, micro-batches that are saved on all its stages at once, at some moment."""
    if name == "gpipe":
        return tuple(max(min(saved for _, saved, _ in moment.counts) for moment in own) for own in moments(name, stage_ranks, num_micro_batches))
    played = long_enough(name, stage_ranks, num_micro_batches)
    if played < num_micro_batches:
        return least_held(name, stage_ranks, played)
    found = []
    for rank, own in enumerate(order(name, stage_ranks, played)):
        saved, most = {s: 0 for s, at in enumerate(stage_ranks) if at == rank}, 0
        for action in own:
            if action.kind == "F":
                saved[action.stage] += 1
                most = max(most, min(saved.values()))
            elif action.kind != "BW":
                saved[action.stage] -= 1
        found.append(most)
    return tuple(found)


def surely_held(name: str, stage_ranks: tuple[int, ...], num_micro_batches: int) -> tuple[int, ...]:
    """At most `least_held`, without playing the schedule: all stages hold the first micro-batch when the last one has run it forward."""
    num_ranks = max(stage_ranks) + 1
    if name in ("gpipe", "1f1b") and num_ranks == len(stage_ranks):
        return tuple(num_micro_batches if name == "gpipe" else min(num_ranks - rank, num_micro_batches) for rank in range(num_ranks))
    return (1,) * num_ranks


def fullest(candidates: Sequence[Moment], sizes: Mapping[int, Sizes]) -> tuple[Moment, int]:
    """The fullest moment of a rank, and its bytes; the first of several."""

    def num_bytes(moment: Moment) -> int:
        return sizes[moment.running].transient + sum(sizes[s].saved * saved + sizes[s].put_off * put_off for s, saved, put_off in moment.counts)

    best = max(candidates, key=num_bytes)
    return best, num_bytes(best)
