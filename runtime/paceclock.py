"""The clock of a paced device: what it does takes the time that it is told, by sleeping.

Times are those of `time.perf_counter`, which all processes of a Linux machine share. With `free` the moment at which the device has ended what it was
given, and a host that may be `slack_s` late without the device running dry (a queue of kernels hides as much):

    ready       = max(free, now - slack_s)
    compute     free = ready + seconds
    collective  free = max of ready over its ranks + seconds                          the ranks tell each other by an all-reduce
    send        there = max(ready, channel free) + seconds; channel free = there      one channel for each receiver
    receive     free = max(free, there)                                               the sender's `there` comes with the message

A step begins when its host does: what the host did since the last one is not made up for. Each waits until `free`, so that a host that is late by more
than the slack, or a message that is, shows in the time of the step. With an infinite slack
nothing waits: the ranks still do everything and meet, and `free` alone tells what it would take.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Protocol

import torch

from runtime.call import dtype_of, num_bytes
from runtime.instr import TensorSpec
from runtime.mesh import Axis
from runtime.record import CpuClock

_STAMP_BYTES = 8


class Links(Protocol):
    """How long paced links take."""

    def seconds(self, kind: str, axis: str, num_bytes: int, ranks: tuple[int, ...]) -> float:
        """A collective of one kind over these global ranks of a mesh axis, or a send from the first to the second of them. `num_bytes` of the
        value on all ranks together, as a recorder counts them."""
        ...


@dataclass(eq=False)
class PacedClock(CpuClock):
    """See the module's text."""

    links: Links
    slack_s: float = 0.0
    free_s: float = 0.0
    plane: Axis | None = None  # ranks that pass through blocks together, where there are several (runtime/paced.py)
    late_s: float = 0.0  # the most that the host was late, slack included
    _channels: dict[int, float] = field(default_factory=dict)

    def ready_s(self) -> float:
        """When the device can begin what comes next."""
        late_s = self.now() - self.free_s
        self.late_s = max(self.late_s, late_s)
        return self.free_s + max(0.0, late_s - self.slack_s)

    def rest(self, seconds: float) -> None:
        """Compute for so long."""
        if seconds > 0:
            self.reach(self.ready_s() + seconds)

    def reach(self, moment_s: float) -> None:
        """Be busy, or wait for others, until a moment."""
        self.free_s = max(self.free_s, moment_s)
        if self.slack_s < math.inf:
            time.sleep(max(0.0, self.free_s - time.perf_counter()))

    def now(self) -> float:
        """Seconds: where nothing waits, of the device."""
        return time.perf_counter() if self.slack_s < math.inf else self.free_s

    def begin(self) -> None:
        """A step begins: the device has nothing to do."""
        self.free_s = max(self.free_s, self.now())

    def mark(self) -> float:
        return self.now()

    def reset(self) -> None:
        """Begin anew: nothing is under way, on this rank and on the others."""
        self.free_s, self.late_s = (time.perf_counter() if self.slack_s < math.inf else 0.0), 0.0
        self._channels.clear()

    # -- messages: the payload and the moment at which it is there ------------------------------------------------------------------

    def seal(self, value: torch.Tensor, source: int, to: int) -> torch.Tensor:
        """What to send for `value`, from one global rank to another."""
        seconds = self.links.seconds("send", "pp", value.nbytes, (source, to))
        there_s = max(self.ready_s(), self._channels.get(to, -math.inf)) + seconds
        self._channels[to] = there_s
        stamp = torch.tensor([there_s], dtype=torch.float64)
        return torch.cat([value.detach().contiguous().flatten().view(torch.uint8), stamp.view(torch.uint8)])

    def envelope(self, spec: TensorSpec) -> torch.Tensor:
        """Where to receive a sealed value."""
        return torch.empty(num_bytes(spec) + _STAMP_BYTES, dtype=torch.uint8)

    def opened(self, sealed: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        """The value, once it is there."""
        self.reach(float(sealed[-_STAMP_BYTES:].clone().view(torch.float64)))
        return sealed[:-_STAMP_BYTES].clone().view(dtype_of(spec.dtype)).reshape(spec.shape)
