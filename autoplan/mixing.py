"""What memory asks of plans that recompute every layer in a way of its own.

A main block of a rank takes g_i seconds of its step when recomputed in way i, and keeps A_i bytes of every micro-batch that it holds. Rank r has M_r bytes
for its n main blocks with P bytes of states each. At a moment t it holds h micro-batches of every one of them, and for its stages s, of which each has a
block, h_s - h more of that block: D together, at most E of one stage. For any price v >= 0, seconds of a byte, no plan that fits takes less than

    T_r >= sum over blocks of min over i of (g_i + v (P + h_b A_i)) - v M_r  >=  n F(h) + D / E (F(h + E) - F(h)) - v M_r
    F(h) = min over i of (g_i + v (P + h A_i)),   concave in h

which is a line in n for every moment and price. The best price is one at which two ways weigh the same, where the weak duality above is tight for blocks
that are alike. `whole` turns the lines around: blocks that a rank can have in a time. With g_i = a_i, what way i runs again, they say what is run again on
a rank of n blocks; `again_s` is the least of the sum over all ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_LINES = 4  # of a rank, that count in what is run again


@dataclass(frozen=True)
class Mixture:
    """Ways i of recomputing a main block: `again_s[i]` seconds of one micro-batch, none first, and `held_bytes[i]` of it. `state_bytes` of a block,
    `room_bytes[r]` of a rank; `held`, `more` and `most` [r, t] are h, D and E of the module's text. `count` main blocks are placed in all."""

    again_s: np.ndarray
    held_bytes: np.ndarray
    state_bytes: float
    room_bytes: np.ndarray
    held: np.ndarray
    more: np.ndarray
    most: np.ndarray
    count: int

    def whole(self, room_s: np.ndarray, costs: np.ndarray, times: float, caps: np.ndarray) -> np.ndarray:
        """Whole blocks that each rank has time and memory for, at most `caps`; a block takes `costs[r]`, and `times` what it runs again."""
        found = np.minimum(caps, np.floor(np.maximum(0.0, room_s) / np.maximum(costs, 1e-30) * (1 + 1e-9)))
        if times <= 0.0:
            return found
        slopes, offsets = self._lines(costs, times)
        most = ((np.maximum(0.0, room_s)[:, None] - offsets) / np.maximum(slopes, 1e-30)).min(axis=1, initial=np.inf)
        return np.minimum(found, np.floor(np.maximum(0.0, most) * (1 + 1e-9)))

    @cached_property
    def least_again_s(self) -> float:
        """Seconds of one micro-batch that all ranks together run again at least."""
        slopes, offsets = self._lines(np.zeros(len(self.room_bytes)), 1.0)
        blocks = np.arange(self.count + 1)
        mean = self.count / len(self.room_bytes)
        best = np.argsort(-(slopes * mean + offsets), axis=1, kind="stable")[:, :_LINES]  # those that tell most of a mean rank
        slopes, offsets = np.take_along_axis(slopes, best, axis=1), np.take_along_axis(offsets, best, axis=1)
        each = np.maximum(0.0, (slopes[:, :, None] * blocks + offsets[:, :, None]).max(axis=1, initial=0.0))
        added = np.diff(each, axis=1).ravel()  # ascending along each rank: a maximum of lines is convex
        return float(np.partition(added, self.count - 1)[: self.count].sum()) if self.count else 0.0

    def _lines(self, costs: np.ndarray, times: float) -> tuple[np.ndarray, np.ndarray]:
        """Slopes and offsets [r, moments x prices]."""
        again, kept = times * self.again_s, self.held_bytes
        slopes, offsets = [], []
        for i, k in itertools.combinations(range(len(again)), 2):
            if again[k] <= again[i] or kept[k] >= kept[i]:
                continue
            saves = self.held * (kept[i] - kept[k])
            price = np.where(saves > 0.0, (again[k] - again[i]) / np.maximum(saves, 1e-30), 0.0)  # v[r, t]; at 0 nothing is told

            def each(held: np.ndarray, price: np.ndarray = price) -> np.ndarray:
                return (again[:, None, None] + price * held * kept[:, None, None]).min(axis=0)

            once = each(self.held)
            further = self.more / np.maximum(self.most, 1e-30) * (each(self.held + self.most) - once)
            slopes.append(once + price * self.state_bytes + costs[:, None])
            offsets.append(further - price * self.room_bytes[:, None])
        if not slopes:
            return np.zeros((len(costs), 0)), np.zeros((len(costs), 0))
        return np.concatenate(slopes, axis=1), np.concatenate(offsets, axis=1)
