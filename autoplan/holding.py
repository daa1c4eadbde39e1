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
from typing import Any

import numpy as np

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


@dataclass(frozen=True, eq=False)
class Moments(Sequence[Moment]):
    """Moments of one rank t: which of its `stages` s runs its backward, running[t], micro-batches that are saved[t, s] and put_off[t, s]."""

    stages: tuple[int, ...]
    running: np.ndarray
    saved: np.ndarray
    put_off: np.ndarray

    def __len__(self) -> int:
        return len(self.running)

    def __getitem__(self, t: Any) -> Any:
        assert isinstance(t, int), "moments are asked for one by one"
        counts = zip(self.stages, self.saved[t].tolist(), self.put_off[t].tolist(), strict=True)
        return Moment(self.stages[self.running[t]], tuple(counts))


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
def moments(name: str, stage_ranks: tuple[int, ...], num_micro_batches: int) -> tuple[Moments, ...]:
    """For each rank, the moments of which one is the fullest, whatever the bytes."""
    if name == "gpipe":
        return tuple(_all_at_once(tuple(s for s, at in enumerate(stage_ranks) if at == rank), num_micro_batches) for rank in range(max(stage_ranks) + 1))
    played = long_enough(name, stage_ranks, num_micro_batches)
    return _moments(order(name, stage_ranks, played), stage_ranks) if played == num_micro_batches else moments(name, stage_ranks, played)


def _all_at_once(own: tuple[int, ...], num_micro_batches: int) -> Moments:
    """GPipe's: all forwards are done, then stage after stage goes back."""
    return Moments(own, np.arange(len(own)), num_micro_batches * np.tri(len(own), dtype=int), np.zeros((len(own), len(own)), dtype=int))


def _moments(actions: Schedule, stage_ranks: tuple[int, ...]) -> tuple[Moments, ...]:
    found = []
    for rank, own in enumerate(actions):
        stages = [s for s, r in enumerate(stage_ranks) if r == rank]
        place = {s: i for i, s in enumerate(stages)}
        saved, put_off = [0] * len(stages), [0] * len(stages)
        seen: dict[int, dict[tuple[int, ...], None]] = {s: {} for s in stages}  # running stage -> what is saved and put off of each
        for action in own:
            i = place[action.stage]
            if action.kind == "F":
                saved[i] += 1
            elif action.kind == "BW":
                put_off[i] -= 1
            else:
                seen[action.stage][*saved, *put_off] = None
                saved[i] -= 1
                if action.kind == "BI":
                    put_off[i] += 1
                    seen[action.stage][*saved, *put_off] = None
        kept = [_unbeaten(np.array(list(counts), dtype=int).reshape(len(counts), 2 * len(stages))) for counts in seen.values()]
        counts = np.concatenate(kept)
        found.append(Moments(tuple(stages), np.repeat(np.arange(len(stages)), list(map(len, kept))), counts[:, : len(stages)], counts[:, len(stages) :]))
    return tuple(found)


def _unbeaten(rows: np.ndarray) -> np.ndarray:
    """The rows, all different, of which no other one is at least as large everywhere, in their order."""
    is_beaten = (rows[:, None, :] <= rows[None, :, :]).all(axis=2).sum(axis=1) > 1  # each is as large as itself
    return rows[~is_beaten]


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


@lru_cache(maxsize=1024)
def held_pairs(name: str, stage_ranks: tuple[int, ...], num_micro_batches: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Of every stage, the micro-batches that it has saved and put off at some moment of its rank's that may be the fullest: pairs that no other exceeds."""
    found: dict[int, tuple[tuple[int, int], ...]] = {}
    for own in moments(name, stage_ranks, num_micro_batches):
        for i, stage in enumerate(own.stages):
            pairs = np.unique(np.stack([own.saved[:, i], own.put_off[:, i]], axis=1), axis=0)
            found[stage] = tuple((int(saved), int(put_off)) for saved, put_off in _unbeaten(pairs))
    return tuple(found[stage] for stage in range(len(stage_ranks)))


def surely_held(name: str, stage_ranks: tuple[int, ...], num_micro_batches: int) -> tuple[int, ...]:
    """At most `least_held`, without playing the schedule: all stages hold the first micro-batch when the last one has run it forward."""
    num_ranks = max(stage_ranks) + 1
    if name in ("gpipe", "1f1b") and num_ranks == len(stage_ranks):
        return tuple(num_micro_batches if name == "gpipe" else min(num_ranks - rank, num_micro_batches) for rank in range(num_ranks))
    return (1,) * num_ranks


def fullest(candidates: Moments, sizes: Mapping[int, Sizes]) -> tuple[Moment, int]:
    """The fullest moment of a rank, and its bytes; the first of several."""
    own = [sizes[s] for s in candidates.stages]
    saved, put_off, transient = (np.array([getattr(size, name) for size in own], dtype=np.int64) for name in ("saved", "put_off", "transient"))
    num_bytes = candidates.saved @ saved + candidates.put_off @ put_off + transient[candidates.running]
    best = int(num_bytes.argmax())
    return candidates[best], int(num_bytes[best])
