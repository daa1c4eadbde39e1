"""What was moved: every raw collective and transfer of a rank, with its time, as it happens.

The kinds and the byte convention are those of plans: `num_bytes` is the size of the value on the axis' ranks together
(the gathered tensor for an all_gather, the whole one for a reduce_scatter), not the bytes on the wire.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class Traffic:
    """Communication of one rank in one step: `count` operations of one kind that move `num_bytes` together."""

    kind: str  # "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"
    axis: str
    phase: str  # "forward", "backward", "reduce"
    num_bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective or transfer. Times are of `time.perf_counter`."""

    kind: str
    axis: str
    phase: str
    num_bytes: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Ran:
    """One interval of the compute stream: an action ("F", "B", ...), or "preamble", "reduce", "update"."""

    kind: str
    stage: int
    micro_batch: int
    start_s: float
    end_s: float


@dataclass(eq=False)
class Recorder:
    """Collects the events of a step. `phase`, `stage` and `micro_batch` say what the rank is at now."""

    phase: str = "forward"
    stage: int = -1
    micro_batch: int = -1
    sent: list[Sent] = field(default_factory=list)
    ran: list[Ran] = field(default_factory=list)

    def clear(self) -> None:
        self.sent.clear()
        self.ran.clear()

    def add(self, kind: str, axis: str, num_bytes: int, start_s: float) -> None:
        self.sent.append(Sent(kind, axis, self.phase, num_bytes, start_s, time.perf_counter()))

    @contextmanager
    def action(self, kind: str, phase: str, stage: int = -1, micro_batch: int = -1) -> Iterator[None]:
        """Everything inside belongs to this action."""
        before = (self.phase, self.stage, self.micro_batch)
        self.phase, self.stage, self.micro_batch = phase, stage, micro_batch
        start_s = time.perf_counter()
        yield  # an error leaves phase, stage and micro-batch as they are: they name where it happened
        self.ran.append(Ran(kind, stage, micro_batch, start_s, time.perf_counter()))
        self.phase, self.stage, self.micro_batch = before

    def traffic(self) -> tuple[Traffic, ...]:
        """The step's communication, sorted, equal (kind, axis, phase) together."""
        return total((s.kind, s.axis, s.phase, s.num_bytes) for s in self.sent)


def total(moves: Iterator[tuple[str, str, str, int]]) -> tuple[Traffic, ...]:
    """(kind, axis, phase, num_bytes) of single operations, added up and sorted."""
    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    for kind, axis, phase, num_bytes in moves:
        counts[kind, axis, phase] += 1
        sizes[kind, axis, phase] += num_bytes
    return tuple(Traffic(*key, sizes[key], counts[key]) for key in sorted(counts))
