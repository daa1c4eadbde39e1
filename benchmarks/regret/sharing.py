"""What searches of one graph at one set of prices have in common, kept from one to the next.

A search's constraints leave out plans; the prices of operators and the integer programs of blocks are the same. What is kept: prices of operators, programs
and their answers, and the least that blocks take, for each kind of device, and apart for constraints that change what operators may do
(sequence parallelism, schemes along a line).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autoplan.constraints import Constraints
from autoplan.drafts import OnDevice
from autoplan.schemes import LINES
from autoplan.shapebounds import ShapeBounds
from autoplan.task import Task

_SHARED = ("_choosers", "_solutions", "_leasts", "_heavy", "_sent")


@contextmanager
def shared_searches() -> Iterator[None]:
    """Searches inside share what they have in common: of one graph, precision and optimizer, at prices that do not change."""
    known: dict[tuple, ShapeBounds] = {}
    plain = ShapeBounds.__init__

    def begin(self: ShapeBounds, task: Task) -> None:
        plain(self, task)
        first = known.setdefault(_alike(task), self)
        assert first.task.graph is task.graph, "searches of one graph"
        for name in _SHARED:
            setattr(self, name, getattr(first, name))

    ShapeBounds.__init__ = begin
    try:
        yield
    finally:
        ShapeBounds.__init__ = plain


def _alike(task: Task) -> tuple:
    """What the shared parts depend on."""
    asked: Constraints = task.constraints
    device = task.prices.rank if isinstance(task.prices, OnDevice) else None
    return (device, asked.sequence_parallel, asked.tensor if asked.tensor in LINES else None)
