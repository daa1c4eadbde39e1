"""Fits the physical constants on measured rows: a pattern search in bounds, one constant at a time.

What is minimised is the mean over sources of the mean of |ln(predicted / measured)|, plus a pull times the sum of ln(constant / start)^2,
so that a constant about which the rows say little stays where it was: a source may have a single row to fit on.
No constant belongs to a row or to a model: each is of a device type, a kind of link, or a software stack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks.accuracy.record import Run
from costmodel.calibration import Calibration
from costmodel.cluster import Tier

PULL = 0.02
SCATTER = 0.05
STEPS = (0.3, 0.12, 0.05, 0.02)

# constant -> bounds; only these move
MEMORY_BOUNDS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "devices": {},
    "links": {},
    "stacks": {"reserve_bytes": (0.1 * 2**30, 12 * 2**30), "slack": (0.01, 1.0)},
}
BOUNDS: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "devices": {"gemm_ceiling": (0.25, 0.95), "attention_forward": (0.1, 0.8), "attention_backward": (0.08, 0.7), "memory_efficiency": (0.4, 0.95)},
    "links": {"efficiency": (0.03, 0.95), "ring_share": (0.1, 1.0)},
    "stacks": {
        "fused_share": (0.3, 4.0),
        "launch_factor": (0.05, 16.0),
        "launch_exposed": (0.02, 1.0),
        "gather_overlap": (0.1, 1.0),
        "gemm_share": (0.4, 1.0),
    },
}


@dataclass(frozen=True, slots=True)
class Sample:
    """A run with what was measured of it (seconds, or bytes), and the source that it counts for. `sense`: "is", or what
    is known is only that it "below" or "above" `measured` lies."""

    source: str
    run: Run
    measured: float
    sense: Literal["is", "below", "above"] = "is"


@dataclass(frozen=True, slots=True)
class Knob:
    """One constant that may move."""

    table: str
    key: str
    field: str
    bounds: tuple[float, float]

    def value(self, calibration: Calibration) -> float:
        return getattr(getattr(calibration, self.table)[self.key], self.field)

    def put(self, calibration: Calibration, value: float) -> Calibration:
        table = dict(getattr(calibration, self.table))
        table[self.key] = replace(table[self.key], **{self.field: value})
        return replace(calibration, **{self.table: table})


def knobs(samples: Sequence[Sample], bounds: Mapping[str, Mapping[str, tuple[float, float]]]) -> tuple[Knob, ...]:
    """Constants of the devices, links and stacks that occur."""
    devices = sorted({chip(g.device.name) for s in samples for g in s.run.cluster.groups})
    links = sorted({t.name for s in samples for t in tiers(s.run) if not t.name.startswith("nvlink")})  # those: measured curves
    stacks = sorted({s.run.stack for s in samples})
    tables = (("devices", devices), ("links", links), ("stacks", stacks))
    return tuple(Knob(table, key, field, limits) for table, keys in tables for key in keys for field, limits in bounds[table].items())


def fit(
    samples: Sequence[Sample],
    start: Calibration,
    predict: Callable[[Sample, Calibration], float],
    bounds: Mapping[str, Mapping[str, tuple[float, float]]] = BOUNDS,
    pull: float = PULL,
) -> Calibration:
    """The calibration under which `predict` fits `samples` best, from `start`. Deterministic."""
    if not samples:
        return start
    moving = knobs(samples, bounds)
    best = _with_keys(start, moving)
    origin = {knob: knob.value(best) for knob in moving}
    by_source: dict[str, list[Sample]] = {}
    for sample in samples:
        by_source.setdefault(sample.source, []).append(sample)

    def error(sample: Sample, calibration: Calibration) -> float:
        off = math.log(predict(sample, calibration) / sample.measured)
        return rounded(off if sample.sense == "is" else max(0.0, off if sample.sense == "below" else -off))

    weights = {id(s): 1 / len(group) / len(by_source) for group in by_source.values() for s in group}
    errors = {id(s): error(s, best) for s in samples}
    touched = {knob: [s for s in samples if touches(knob, s.run)] for knob in moving}

    def penalty(knob: Knob, value: float) -> float:
        return pull * math.log(value / origin[knob]) ** 2

    for step in STEPS:
        for _ in range(4):
            moved = False
            for knob in moving:
                here = knob.value(best)
                low, high = knob.bounds
                for factor in (1 + step, 1 / (1 + step)):
                    value = min(high, max(low, here * factor))
                    if value == here:
                        continue
                    tried = knob.put(best, value)
                    found = {id(s): error(s, tried) for s in touched[knob]}
                    gain = sum(weights[i] * (errors[i] - e) for i, e in found.items()) + penalty(knob, here) - penalty(knob, value)
                    if gain > 1e-9:
                        best, moved = tried, True
                        errors.update(found)
                        break
            if not moved:
                break
    return best


def rounded(error: float) -> float:
    """|error|, but flat within what measurements scatter by: constants then share a small miss instead of one of them taking all of it."""
    return math.hypot(error, SCATTER) - SCATTER


def touches(knob: Knob, run: Run) -> bool:
    """Whether a run depends on a constant."""
    if knob.table == "stacks":
        return run.stack == knob.key
    if knob.table == "links":
        return any(t.name == knob.key for t in tiers(run))
    return any(chip(g.device.name) == knob.key for g in run.cluster.groups)


def tiers(run: Run) -> tuple[Tier, ...]:
    """All links of a run's cluster."""
    found = tuple(t for g in run.cluster.groups for t in g.tiers)
    return (*found, run.cluster.fabric) if run.cluster.fabric else found


def chip(device_name: str) -> str:
    """What device constants belong to: variants of a chip with other memory share them, the 500 W part of H100 does not."""
    return device_name if device_name == "H100-SXM-96GB" else device_name.partition("-")[0]


def _with_keys(calibration: Calibration, moving: Sequence[Knob]) -> Calibration:
    """Entries of their own for all keys that move, within bounds."""
    tables: dict[str, dict[str, Any]] = {name: dict(getattr(calibration, name)) for name in ("devices", "links", "stacks")}
    for knob in moving:
        entry = tables[knob.table].get(knob.key, tables[knob.table]["default"])
        low, high = knob.bounds
        tables[knob.table][knob.key] = replace(entry, **{knob.field: min(high, max(low, getattr(entry, knob.field)))})
    return replace(calibration, **tables)
