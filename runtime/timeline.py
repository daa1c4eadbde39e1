"""The measured timeline of a step: what every rank did when, on one clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from runtime.collective import everyone
from runtime.mesh import Mesh
from runtime.record import Interval

_KINDS = {"F": "forward", "B": "backward", "BI": "backward", "BW": "backward", "preamble": "forward", "reduce": "reduce", "clip": "reduce", "wait": "idle"}


@dataclass(frozen=True, slots=True)
class MeasuredEvent:
    """One interval on a track. A track is (rank, stream); `kind` is forward, backward, collective, transfer, reduce or idle.

    Times in seconds since the step's first event on any rank. Ranks on several hosts are aligned by their wall clocks.
    """

    rank: int
    stream: str  # "compute", or the axis of a collective
    name: str  # "F 0.3" = forward of stage 0, micro-batch 3
    kind: str
    start_s: float
    end_s: float
    stage: int = -1
    micro_batch: int = -1


def own_events(mesh: Mesh) -> tuple[MeasuredEvent, ...]:
    """This rank's events of the last step, on the wall clock, in order of time."""
    offset_s = time.time() - time.perf_counter()
    events = [_event(mesh.rank, interval, offset_s) for interval in (*mesh.recorder.ran, *mesh.recorder.sent)]
    return tuple(sorted(events, key=lambda e: (e.start_s, e.end_s, e.stream, e.name)))


def _event(rank: int, interval: Interval, offset_s: float) -> MeasuredEvent:
    place = f" {interval.stage}.{interval.micro_batch}" if interval.stage >= 0 else ""
    if interval.axis:
        kind = "transfer" if interval.kind == "send" else "collective"
        name = f"{interval.kind} {interval.axis} {interval.phase}{place}"
    else:
        kind, name = _KINDS[interval.kind], f"{interval.kind}{place}"
    return MeasuredEvent(
        rank, interval.axis or "compute", name, kind, interval.start_s + offset_s, interval.end_s + offset_s, interval.stage, interval.micro_batch
    )


def timeline(mesh: Mesh) -> tuple[MeasuredEvent, ...]:
    """The events of all ranks in the last step, on every rank, zero at the first of them. All ranks call it."""
    told: list[tuple[MeasuredEvent, ...]] = everyone(mesh.world, own_events(mesh))
    start_s = min((event.start_s for own in told for event in own), default=0.0)
    return tuple(replace(event, start_s=event.start_s - start_s, end_s=event.end_s - start_s) for own in told for event in own)
