"""Moments of ranks that pass through a block together are those of a walk from collective to collective."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.instr_traffic import Use
from runtime.maxplus import Span, together

LINES = {"x": [[0, 1], [2, 3]], "y": [[0, 2], [1, 3]], "plane": [[0, 1, 2, 3]]}
ranks_s = st.lists(st.floats(0, 10), min_size=4, max_size=4)
steps = st.lists(st.one_of(ranks_s, st.builds(lambda axis, n: Use("all_reduce", axis, n), st.sampled_from(sorted(LINES)), st.integers(1, 9))), max_size=12)


def seconds(use: Use, group: object) -> float:
    return use.num_bytes / 4


@settings(deadline=None)
@given(ranks_s, steps)
def test_moments_are_those_of_a_walk(come_s: list[float], does: list[list[float] | Use]) -> None:
    now, begins, ends = list(come_s), [], []
    for step in does:
        if isinstance(step, Use):
            begins.append(list(now))
            for group in LINES[step.axis]:
                end_s = max(now[rank] for rank in group) + seconds(step, group)
                for rank in group:
                    now[rank] = end_s
            ends.append(list(now))
        else:
            now = [moment + own for moment, own in zip(now, step, strict=True)]
    spans: list[list[Span]] = [[step if isinstance(step, Use) else step[rank] for step in does] for rank in range(4)]
    for rank in range(4):
        leg = together(spans, rank, LINES.__getitem__, seconds)
        moments = leg.moments(torch.tensor(come_s, dtype=torch.float64))
        assert leg.uses == tuple(step for step in does if isinstance(step, Use))
        assert moments[0:-1:2] == pytest.approx([begin[rank] for begin in begins])
        assert moments[1:-1:2] == pytest.approx([end[rank] for end in ends])
        assert moments[-1] == pytest.approx(now[rank])
