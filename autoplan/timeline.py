"""Measured events in the forecast's form: what a rank's recorder saw, and the ranks of a step together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autoplan.forecast import Event, Measured
from autoplan.plan import Plan
from runtime.record import Recorder

_KINDS: Mapping[str, str] = {
    "F": "forward",
    "B": "backward",
    "BI": "backward",
    "BW": "backward",
    "reduce": "reduce",
    "update": "optimizer",
    "preamble": "preamble",
    "wait": "idle",
    "clip": "reduce",
}


def rank_events(recorder: Recorder, rank: int) -> tuple[Event, ...]:
    """The events of a rank's last step, in seconds of `time.perf_counter`."""
    ran = [
        Event(rank, "compute", _name(r.kind, r.stage, r.micro_batch), _KINDS.get(r.kind, "reduce"), r.start_s, r.end_s, r.stage, r.micro_batch)
        for r in recorder.ran
    ]
    sent = [Event(rank, s.axis, s.kind, _sent_kind(s.kind, s.phase), s.start_s, s.end_s) for s in recorder.sent]
    return tuple(sorted([*ran, *sent], key=lambda e: (e.start_s, e.end_s, e.stream)))


def joined(ranks: Iterable[Sequence[Event]]) -> tuple[Event, ...]:
    """The events of all ranks, counted from the first. Ranks of one machine share the clock."""
    events = [event for own in ranks for event in own]
    zero_s = min((event.start_s for event in events), default=0.0)
    return tuple(replace(event, start_s=event.start_s - zero_s, end_s=event.end_s - zero_s) for event in events)


def measured(plan: Plan, events: Sequence[Event], step_time_s: float = 0.0, peak_memory_bytes: int = 0) -> Measured:
    """A step in figures. Without `step_time_s`: from the first event to the end of the last."""
    took_s = step_time_s or max((e.end_s for e in events), default=0.0) - min((e.start_s for e in events), default=0.0)
    scale = plan.forecast.step_time_s / took_s if took_s else 0.0  # tokens and FLOPs of a step are the forecast's
    return Measured(took_s, plan.forecast.tokens_per_s * scale, plan.forecast.mfu * scale, tuple(events), peak_memory_bytes)


def _sent_kind(kind: str, phase: str) -> str:
    if kind == "send":
        return "transfer"
    return "reduce" if phase == "reduce" else "collective"


def _name(kind: str, stage: int, micro_batch: int) -> str:
    return f"{kind} {stage}.{micro_batch}" if micro_batch >= 0 else kind
