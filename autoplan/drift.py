"""Speeds of devices from measured times, and when they have changed.

A rank's speed is the time that the prices foresee for its own operators over the time that it took, the median of the last `window` steps: one
outlier changes nothing. Speeds have drifted where one differs from what the running plan was made for by more than `tolerance`, relative to the
others (all ranks slower alike is no reason for another plan), in `patience` steps one after the other. For a while after a change nothing is judged, until the
window holds steps of the new plan alone. Noise of 10 % moves a median of seven by a few percent, far below the tolerance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Drift:
    """What is known so far. `planned` are the speeds that the running plan was made for, `seen` the last steps' speeds of all ranks."""

    planned: tuple[float, ...]
    window: int = 7
    tolerance: float = 0.2
    patience: int = 2
    seen: tuple[tuple[float, ...], ...] = ()
    num_far: int = 0  # steps in a row in which speeds were far from the planned ones

    def after(self, speeds: Sequence[float]) -> Drift:
        """With one more step's speeds."""
        seen = (*self.seen, tuple(speeds))[-self.window :]
        known = replace(self, seen=seen)
        far = len(seen) == self.window and known.distance > math.log1p(self.tolerance)
        return replace(known, num_far=self.num_far + 1 if far else 0)

    @property
    def speeds(self) -> tuple[float, ...]:
        """The median speed of every rank."""
        return tuple(statistics.median(step[rank] for step in self.seen) for rank in range(len(self.planned)))

    @property
    def distance(self) -> float:
        """The largest change of a rank's speed against the typical one (the median of the changes), as a logarithm."""
        changes = [math.log(now / then) for now, then in zip(self.speeds, self.planned, strict=True)]
        typical = statistics.median_low(changes) if len(changes) > 2 else max(changes)
        return max(abs(change - typical) for change in changes)

    @property
    def has_drifted(self) -> bool:
        return self.num_far >= self.patience

    def settled(self, planned: Sequence[float]) -> Drift:
        """After a decision: judged afresh against `planned`."""
        return replace(self, planned=tuple(planned), seen=(), num_far=0)


def grouped(speeds: Sequence[float], tolerance: float = 0.1) -> tuple[float, ...]:
    """Speeds in which those within `tolerance` of their neighbour are one: their geometric mean. Devices that differ by noise alone are alike."""
    order = sorted(range(len(speeds)), key=lambda rank: (speeds[rank], rank))
    groups: list[list[int]] = []
    for rank in order:
        if groups and speeds[rank] <= speeds[groups[-1][0]] * (1 + tolerance) ** 2 and speeds[rank] <= speeds[groups[-1][-1]] * (1 + tolerance):
            groups[-1].append(rank)
        else:
            groups.append([rank])
    found = [0.0] * len(speeds)
    for group in groups:
        mean = math.exp(sum(math.log(speeds[rank]) for rank in group) / len(group))
        for rank in group:
            found[rank] = mean
    return tuple(found)
