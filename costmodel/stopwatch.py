"""What times operators, collectives and optimizers: the device of this process, or devices that a file describes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from costmodel.measure import OPTIMIZERS, Resolve, Timing, measure, measure_optimizer, resolve_aten
from costmodel.opkey import Collective, OpKey
from costmodel.paced import PacedDevices
from costmodel.profile import Environment


class Stopwatch(Protocol):
    """Times one thing at a time."""

    def op(self, key: OpKey, budget_s: float) -> Timing:
        """One operator call, in about `budget_s` seconds. NotMeasurableError where it does not run on its own."""
        ...

    def optimizer(self, name: str, num_elements: int) -> Timing | None:
        """One step over float32 elements; None for an optimizer that it does not know."""
        ...

    def collective(self, collective: Collective) -> float | None:
        """One collective; None where it takes a job of several ranks to time it (costmodel/links.py)."""
        ...


@dataclass(frozen=True)
class PresentDevice:
    """The device of this process."""

    resolve: Resolve = resolve_aten

    def op(self, key: OpKey, budget_s: float) -> Timing:
        return measure(key, self.resolve, budget_s=budget_s)

    def optimizer(self, name: str, num_elements: int) -> Timing | None:
        return measure_optimizer(name, num_elements) if name in OPTIMIZERS else None

    def collective(self, collective: Collective) -> float | None:
        return None


@dataclass(frozen=True)
class PacedStopwatch:
    """Paced devices, of which one of the fastest times what one device does. Nothing has to be run, or waited for."""

    devices: PacedDevices

    @property
    def rank(self) -> int:
        """One of the fastest ranks."""
        return min(range(self.devices.num_devices), key=lambda rank: (self.devices.slowdown(rank), rank))

    def op(self, key: OpKey, budget_s: float = 0.0) -> Timing:
        time = self.devices.op(key, self.rank)
        return Timing(time.forward_s, time.backward_s, 1, time.backward_weight_s)

    def optimizer(self, name: str, num_elements: int) -> Timing | None:
        return Timing(self.devices.optimizer_s(num_elements, self.rank), 0.0, 1)

    def collective(self, collective: Collective) -> float | None:
        return self.devices.collective_s(collective)

    def speed(self, rank: int) -> float:
        """Of a rank, as a share of the fastest's, by a matrix product on each."""
        shape = ((64, 64), "float32")
        product = OpKey("aten.mm.default", (shape, shape), (shape,), "", (False, False), 2 * 64**3)
        return self.devices.op(product, self.rank).forward_s / self.devices.op(product, rank).forward_s


def paced_environment(devices: PacedDevices) -> Environment:
    """What names the measurements of paced devices in the profile."""
    return Environment(f"paced {devices.name} {devices.fingerprint()[:16]}", "cpu", "", 0)
