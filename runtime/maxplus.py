"""When what ranks do together begins and ends: a max-plus map of the moments at which they come.

Computing adds seconds to the moment of one rank, a collective over the ranks S lets all of them go on at the greatest of their moments plus its seconds.
With r[s] the moment at which rank s comes, every later moment on a rank is therefore max over s of (r[s] + w[s]) with fixed weights w, which follow from the
same two rules (Baccelli, Cohen, Olsder, Quadrat, Synchronization and Linearity, 1992, section 1.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from runtime.instr_traffic import Use

Span = float | Use  # seconds of computing, or a collective
Groups = Callable[[str], Sequence[Sequence[int]]]  # the groups of ranks that an axis joins, as positions
Seconds = Callable[[Use, Sequence[int]], float]  # of a collective over such a group


@dataclass(frozen=True, eq=False)
class Together:
    """What ranks do together, as one of them sees it. `weights`: [moments, ranks], of the begin and the end of each of `uses`, then of the end of all."""

    uses: tuple[Use, ...]
    weights: torch.Tensor

    def moments(self, come_s: torch.Tensor) -> list[float]:
        """`come_s`: [ranks]."""
        return (self.weights + come_s).amax(1).tolist()


def together(spans: Sequence[Sequence[Span]], me: int, groups: Groups, seconds: Seconds) -> Together:
    """`spans` of every rank; all of them list the same collectives in the same places."""
    count = len(spans)
    now = torch.full((count, count), -math.inf, dtype=torch.float64).fill_diagonal_(0.0)  # [rank, rank that comes]
    rows, uses = [], []
    for step in zip(*spans, strict=True):
        own = step[me]
        if isinstance(own, Use):
            assert all(isinstance(one, Use) and (one.kind, one.axis) == (own.kind, own.axis) for one in step), "ranks meet in different collectives"
            uses.append(own)
            rows.append(now[me].clone())
            for group in groups(own.axis):
                use = step[group[0]]
                assert isinstance(use, Use)
                now[list(group)] = now[list(group)].amax(0) + seconds(use, group)
            rows.append(now[me].clone())
        else:
            assert not any(isinstance(one, Use) for one in step), "a rank computes where others meet"
            now += torch.tensor(step, dtype=torch.float64)[:, None]
    return Together(tuple(uses), torch.stack([*rows, now[me]]))
