"""What was moved: every raw collective and transfer of a rank, with its time, as it happens.

The kinds and the byte convention are those of plans: `num_bytes` is the size of the value on the axis' ranks together
(the gathered tensor for an all_gather, the whole one for a reduce_scatter), not the bytes on the wire.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True, order=True)
class Traffic:
    """Communication of one rank in one step: `count` operations of one kind that move `num_bytes` together."""

    kind: str  # "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"
    axis: str
    phase: str  # "forward", "backward", "reduce"
    num_bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Interval:
    """Something that took time. `kind` is a collective's or "send" with its axis, or an action's ("F", "B", "wait", "reduce", ...)
    with axis "". Times in seconds on the clock of `time.perf_counter`."""

    kind: str
    axis: str
    phase: str
    stage: int
    micro_batch: int
    num_bytes: int
    start_s: float
    end_s: float


class CpuClock:
    """Marks are times already."""

    def mark(self) -> Any:
        return time.perf_counter()

    def seconds(self, mark: Any) -> float:
        return mark


class CudaClock:
    """Marks are events on the current stream: the host runs ahead of the device, so its own time would tell nothing."""

    def __init__(self) -> None:
        self._base: torch.cuda.Event | None = None
        self._base_s = 0.0

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        if self._base is None:
            event.synchronize()
            self._base, self._base_s = event, time.perf_counter()
        return event

    def seconds(self, mark: Any) -> float:
        assert self._base is not None
        mark.synchronize()
        return self._base_s + self._base.elapsed_time(mark) / 1e3


def is_profiled() -> bool:
    """Whether torch's profiler runs."""
    return torch._C._autograd._profiler_enabled()  # type: ignore[attr-defined]


def profiled(name: str) -> AbstractContextManager[Any]:
    """A range of this name in torch's profiler, where that runs."""
    return torch.profiler.record_function(name) if is_profiled() else nullcontext()


@dataclass(eq=False)
class Recorder:
    """Collects what happens in a step. `phase`, `stage` and `micro_batch` say what the rank is at now."""

    clock: CpuClock | CudaClock = field(default_factory=CpuClock)
    phase: str = "forward"
    stage: int = -1
    micro_batch: int = -1
    last: tuple[int, int] = (-1, -1)  # stage and micro-batch of the last action that had them
    moves: int = 0  # grows with all that begins or ends
    _began: Any = None
    _sent: list[tuple[Any, ...]] = field(default_factory=list)  # intervals whose times are marks
    _ran: list[tuple[Any, ...]] = field(default_factory=list)

    def clear(self) -> None:
        """Forget everything: a new step begins."""
        self._sent.clear()
        self._ran.clear()
        self._began = self.clock.mark()
        self.phase, self.stage, self.micro_batch = "forward", -1, -1
        self.last = (-1, -1)
        self.moves += 1

    def mark(self) -> Any:
        """Now, to be given to `add`."""
        return self.clock.mark()

    def add(self, kind: str, axis: str, num_bytes: int, start: Any, end: Any = None) -> None:
        """A collective or send that began at the mark `start` and ends at `end`, or now."""
        self.moves += 1
        self._sent.append((kind, axis, self.phase, self.stage, self.micro_batch, num_bytes, start, self.clock.mark() if end is None else end))

    def later(self, kind: str, axis: str, num_bytes: int) -> Callable[[], None]:
        """A collective that begins now; what is given is called at its end."""
        began = (kind, axis, self.phase, self.stage, self.micro_batch, num_bytes, self.clock.mark())

        def ended() -> None:
            self.moves += 1
            self._sent.append((*began, self.clock.mark()))

        return ended

    def absorb(self, other: Recorder) -> None:
        """Take over what another recorder saw: work beside this step. What began before the step counts from its beginning (CPU clock)."""
        for *entry, start, end in other._sent:
            if self._began is not None and isinstance(self.clock, CpuClock):
                start, end = max(start, self._began), max(end, self._began)
            self._sent.append((*entry, start, end))
        other._sent.clear()

    @contextmanager
    def action(self, kind: str, phase: str, stage: int = -1, micro_batch: int = -1) -> Iterator[None]:
        """Everything inside belongs to this action."""
        before = (self.phase, self.stage, self.micro_batch)
        self.phase, self.stage, self.micro_batch = phase, stage, micro_batch
        self.moves += 1
        start = self.clock.mark()
        with profiled(f"{kind}, stage {stage}, micro-batch {micro_batch}" if stage >= 0 else kind):
            yield  # an error leaves phase, stage and micro-batch as they are: they name where it happened
        self._ran.append((kind, "", phase, stage, micro_batch, 0, start, self.clock.mark()))
        self.last = (stage, micro_batch) if stage >= 0 else self.last
        self.phase, self.stage, self.micro_batch = before

    @property
    def place(self) -> str:
        """What the rank is at, in words."""
        if self.stage >= 0:
            return f"stage {self.stage}, micro-batch {self.micro_batch} ({self.phase})"
        stage, micro_batch = self.last
        return f"after stage {stage}, micro-batch {micro_batch} ({self.phase})" if stage >= 0 else self.phase

    @property
    def sent(self) -> tuple[Interval, ...]:
        """Collectives and sends, in order of their ends."""
        return self._resolve(self._sent)

    @property
    def ran(self) -> tuple[Interval, ...]:
        """Actions, in order of their ends."""
        return self._resolve(self._ran)

    def _resolve(self, marked: list[tuple[Any, ...]]) -> tuple[Interval, ...]:
        return tuple(Interval(*entry[:6], *map(self.clock.seconds, entry[6:])) for entry in marked)

    def traffic(self) -> tuple[Traffic, ...]:
        """The step's communication, sorted, equal (kind, axis, phase) together."""
        return total((kind, axis, phase, num_bytes) for kind, axis, phase, _, _, num_bytes, _, _ in self._sent)


def total(moves: Iterable[tuple[str, str, str, int]]) -> tuple[Traffic, ...]:
    """(kind, axis, phase, num_bytes) of single operations, added up and sorted."""
    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    for kind, axis, phase, num_bytes in moves:
        counts[kind, axis, phase] += 1
        sizes[kind, axis, phase] += num_bytes
    return tuple(Traffic(*key, sizes[key], counts[key]) for key in sorted(counts))
