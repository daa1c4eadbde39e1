"""What memory asks of plans that recompute every layer in a way of its own.

A main block of a rank takes g_i seconds of its step when recomputed in way i, and keeps A_i bytes of every micro-batch that it holds. Rank r has M_r bytes
for its n main blocks with P bytes of states each. At a moment t it holds h micro-batches of every one of them, and for its stages s, of which each has a
block, h_s - h more of that block: D together, at most E of one stage. For any price v >= 0, seconds of a byte, no plan that fits takes less than

    T_r >= sum over blocks of min over i of (g_i + v (P + h_b A_i)) - v M_r  >=  n F(h) + D / E (F(h + E) - F(h)) - v M_r
    F(h) = min over i of (g_i + v (P + h A_i)),   concave in h

which is a line in n for every moment and price. The best prices are those at which two neighbouring ways weigh the same, where the weak duality above is
tight for blocks that are alike. Unless no block is recomputed, what one of them makes again takes room as well. `whole` turns the lines around: blocks
that a rank can have in a time. With g_i = a_i, what way i runs again, they say what is run again on a rank of n blocks; `least_again_s` is the least
of the sum over all ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_LINES = 4  # of a rank, that count in what is run again


@dataclass(frozen=True)
class Mixture:
    """Ways of recomputing a main block: (seconds a_i of one micro-batch, bytes A_i of it), none first, each slower than the one before and keeping less, on
    their lower hull; `none_bytes` of a block that surely is recomputed in no way. `state_bytes[r, t]` of a block, with what a split backward pass puts off;
    `room_bytes[r]` of a rank; `held`, `more` and `most` [r, t] are h, D and E of the module's text; `made_bytes` is what a recomputed block makes again.
    `count` main blocks are placed in all."""

    ways: tuple[tuple[float, float], ...]
    none_bytes: float
    state_bytes: np.ndarray
    room_bytes: np.ndarray
    held: np.ndarray
    more: np.ndarray
    most: np.ndarray
    made_bytes: float
    count: int

    def whole(self, room_s: np.ndarray, costs: np.ndarray, times: float, caps: np.ndarray) -> np.ndarray:
        """Whole blocks that each rank has time and memory for, at most `caps`; a block takes `costs[r]`, and `times` what it runs again."""
        room_s = np.maximum(0.0, room_s)
        found = np.minimum(caps, np.floor(room_s / np.maximum(costs, 1e-30) * (1 + 1e-9)))
        if times <= 0.0 or len(self.ways) == 1:
            return found
        slopes, offsets = self._lines(costs, times)
        most = ((room_s[:, None] - offsets) / np.maximum(slopes, 1e-30)).min(axis=1, initial=np.inf)
        return np.minimum(found, np.maximum(self._plain, np.floor(np.maximum(0.0, most) * (1 + 1e-9))))

    @cached_property
    def least_again_s(self) -> float:
        """Seconds of one micro-batch that all ranks together run again at least."""
        if len(self.ways) == 1 or not self.count:
            return 0.0
        slopes, offsets = self._lines(np.zeros(len(self.room_bytes)), 1.0)
        blocks = np.arange(self.count + 1)
        mean = self.count / len(self.room_bytes)
        best = np.argsort(-(slopes * mean + offsets), axis=1, kind="stable")[:, :_LINES]  # those that tell most of a mean rank
        slopes, offsets = np.take_along_axis(slopes, best, axis=1), np.take_along_axis(offsets, best, axis=1)
        each = np.maximum(0.0, (slopes[:, :, None] * blocks + offsets[:, :, None]).max(axis=1, initial=0.0))
        beyond = blocks - self._plain[:, None]
        each = np.where(beyond > 0, each, 0.0)
        # the largest convex function below: a chord to where it touches, and the lines from there
        rates = np.where(beyond > 0, each / np.maximum(beyond, 1), np.inf)
        touch = np.argmin(rates, axis=1)[:, None]
        rate = np.take_along_axis(rates, touch, axis=1)
        each = np.where(blocks <= touch, np.where(np.isfinite(rate), rate, 0.0) * np.maximum(beyond, 0), each)
        added = np.diff(each, axis=1).ravel()  # ascending along each rank
        return float(np.partition(added, self.count - 1)[: self.count].sum())

    @cached_property
    def _plain(self) -> np.ndarray:
        """Blocks that each rank has room for where none is recomputed."""
        kept = self.held * self.none_bytes
        most = (self.room_bytes[:, None] - self.more * self.none_bytes) / np.maximum(self.state_bytes + kept, 1e-9)
        return np.clip(np.floor(most.min(axis=1)), 0, self.count)

    def _lines(self, costs: np.ndarray, times: float) -> tuple[np.ndarray, np.ndarray]:
        """Slopes and offsets [r, moments x prices]."""
        again, kept = (np.array(each)[:, None, None] for each in zip(*self.ways, strict=True))
        again = times * again
        slopes, offsets = [], []
        for (a, more_kept), (b, less_kept) in itertools.pairwise(self.ways):
            saves = self.held * (more_kept - less_kept)
            price = np.where(saves > 0.0, times * (b - a) / np.maximum(saves, 1e-30), 0.0)  # v[r, t]; at 0 nothing is told
            once = (again + price * self.held * kept).min(axis=0)
            further = (again + price * (self.held + self.most) * kept).min(axis=0) - once
            slopes.append(once + price * self.state_bytes + costs[:, None])
            offsets.append(self.more / np.maximum(self.most, 1e-30) * further - price * (self.room_bytes[:, None] - self.made_bytes))
        return np.concatenate(slopes, axis=1), np.concatenate(offsets, axis=1)


def hull(ways: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    """The lower hull of (seconds, bytes): each slower than the one before and keeping less."""
    found: list[tuple[float, float]] = []
    for seconds, num_bytes in sorted(ways):
        if found and num_bytes >= found[-1][1]:
            continue
        while len(found) > 1 and _rate(found[-2], found[-1]) <= _rate(found[-2], (seconds, num_bytes)):
            found.pop()
        found.append((seconds, num_bytes))
    return tuple(found)


def _rate(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Bytes saved for a second."""
    return (one[1] - other[1]) / max(1e-30, other[0] - one[0])
