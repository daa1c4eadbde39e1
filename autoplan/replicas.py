"""The forecast of a step on unequal devices or with uneven data shares: every class of replicas on its own devices.

A replica is the pipeline of one data rank. Replicas with the same devices and rows are one class, priced and replayed on their own
(autoplan/replay.py). With E_i(r) the end of the last action of class i on pipeline rank r and X_i(r) what follows,

    start of the sums over "dp" on rank r = max over i of E_i(r)        (nobody ends before the slowest)
    step                                  = max over r of (max over i of E_i(r) + max over i of X_i(r))

Under ZeRO-2 and -3, gradients or parameters move with every micro-batch, so that replicas run in step: each action takes as long as on the
class that is slowest with its rows of that micro-batch. Under ZeRO-1 they meet in the first forward pass of a stage and in its last backward pass, which
end for all when they end for the slowest. A tensor-parallel group runs at the pace of its slowest device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoplan.forecast import Event, Forecast, StageForecast
from autoplan.graph import Graph
from autoplan.load import Model, StageLoad
from autoplan.price import Pricer, axis_group
from autoplan.replay import Durations, Step, Timeline, Unlike, durations, late_s, replay
from autoplan.simulate import LATE, MAX_EVENTS, assemble
from autoplan.workload import load_of
from costmodel.prices import Prices
from runtime.action import Action
from runtime.program import Program

Kind = tuple[float, ...]  # devices that prices do not tell apart have equal kinds


@dataclass(frozen=True, slots=True)
class Replica:
    """A class of data ranks. `members` are their "dp" coordinates, `rows` those of its micro-batches, `devices` the global rank of the
    slowest device of its first member at each "pp" coordinate."""

    members: tuple[int, ...]
    rows: tuple[int, ...]
    devices: tuple[int, ...]


def kind_of(prices: Prices, rank: int) -> Kind:
    """What tells the device of a rank from others."""
    peaks = (prices.peak_flops_per_s(dtype, rank) for dtype in ("float32", "bfloat16"))
    return (*peaks, prices.optimizer_s(1 << 24, "sgd", 8.0, rank), float(prices.memory_limit_bytes(rank)))


def kinds(prices: Prices, world_size: int) -> tuple[Kind, ...]:
    """The kind of every rank."""
    return tuple(kind_of(prices, rank) for rank in range(world_size))


def replicas(program: Program, found: Sequence[Kind]) -> tuple[Replica, ...]:
    """The classes of a program's data ranks, in the order of their first ranks; `found` is the kind of every global rank."""
    cells = slowest(program.axes, found)
    sizes = dict(program.axes)
    classes: dict[tuple, list[int]] = {}
    devices: dict[int, tuple[int, ...]] = {}
    for data_rank in range(sizes.get("dp", 1)):
        devices[data_rank] = tuple(cells[pp, data_rank] for pp in range(sizes.get("pp", 1)))
        rows = tuple(mb.stop - mb.start for mb in program.micro_batches[data_rank])
        classes.setdefault((rows, tuple(found[rank] for rank in devices[data_rank])), []).append(data_rank)
    return tuple(Replica(tuple(own), rows, devices[own[0]]) for (rows, _), own in classes.items())


def slowest(axes: tuple[tuple[str, int], ...], found: Sequence[Kind]) -> dict[tuple[int, int], int]:
    """("pp", "dp") coordinates -> the global rank of the slowest device there."""
    cells: dict[tuple[int, int], int] = {}
    for rank, kind in enumerate(found):
        place = (place_of(axes, "pp", rank), place_of(axes, "dp", rank))
        best = cells.setdefault(place, rank)
        if (kind[0], -kind[2]) < (found[best][0], -found[best][2]):
            cells[place] = rank
    return cells


def place_of(axes: tuple[tuple[str, int], ...], axis: str, rank: int) -> int:
    """The coordinate of a global rank on one axis."""
    group = axis_group(axes, axis, rank)
    return (rank - group.start) // group.stride


@dataclass(frozen=True)
class _Lane:
    """A class ready to replay."""

    replica: Replica
    loads: tuple[StageLoad, ...]
    times: tuple[Durations, ...]
    pricer: Pricer  # of the device of its first pipeline rank


def forecast_replicas(
    programs: Sequence[Program], classes: Sequence[Replica], graph: Graph, prices: Prices, step: Step, model: Model, precision: str | None
) -> Forecast:
    """The forecast of the step; every stage's figures are those of its slowest class, its memory that of the fullest for its device."""
    lanes = _lanes(programs, classes, graph, prices, step, precision)
    lines = _lines(lanes, step)
    told = [assemble(lane.loads, step, model, lane.pricer, times=lane.times, line=line) for lane, line in zip(lanes, lines, strict=True)]
    ranks = range(step.degree("pp"))
    ends = [max(line.end_s[r] for line in lines) for r in ranks]
    tails = [max(sum(t.tail_s for s, t in enumerate(lane.times) if step.stage_ranks[s] == r) for lane in lanes) for r in ranks]
    step_s = max(*(late_s(lane.times, step) for lane in lanes), *(end + tail for end, tail in zip(ends, tails, strict=True)))
    events = [
        _later(event, ends[rank] - line.end_s[rank])
        for one, line, lane in zip(told, lines, lanes, strict=True)
        for event in one.events
        for rank in [place_of(step.axes, "pp", event.rank)]
    ]
    peak = sum(prices.peak_flops_per_s(model.dtype, rank) for rank in range(math.prod(size for _, size in step.axes)))
    busy = sum(len(lane.replica.members) * s for lane, line in zip(lanes, lines, strict=True) for s in line.busy_s) + step.degree("dp") * sum(tails)
    return replace(
        told[0],
        step_time_s=step_s,
        peak_memory_bytes=max(one.peak_memory_bytes for one in told),
        tokens_per_s=model.tokens / step_s if step_s else 0.0,
        mfu=3 * model.flops / (step_s * peak) if step_s and peak else 0.0,
        bubble=max(0.0, 1 - busy / (step_s * step.degree("dp") * len(ranks))) if step_s else 0.0,
        stages=tuple(_worst([one.stages[s] for one in told], step_s) for s in range(len(step.stage_ranks))),
        events=tuple(sorted(sorted(events, key=lambda e: (e.start_s, e.rank, e.name))[:MAX_EVENTS], key=lambda e: (e.rank, e.start_s, e.stream, e.name))),
    )


def _lines(lanes: Sequence[_Lane], step: Step) -> list[Timeline]:
    """What becomes of every class, where those that meet wait for each other."""
    met: dict[Action, float] = {}
    while True:
        lines = [replay(lane.loads, lane.times, step, lane.pricer, meetings_s=met) for lane in lanes]
        ends: dict[Action, float] = {}
        for action, _, end in (done for line in lines for done in line.actions if _meets(done[0], step)):
            ends[action] = max(ends.get(action, 0.0), end)
        if ends == met:
            return lines
        met = ends


def _meets(action: Action, step: Step) -> bool:
    """Whether ranks of all classes have to come to an action under ZeRO-1, or where the backward pass is split."""
    if not step.zero or step.shards == 1:
        return False
    if action.kind == "F":
        return action.micro_batch == 0 and step.shards == step.degree("dp")
    return action.kind == ("BW" if step.is_split else "B") and action.micro_batch == step.num_micro_batches - 1


def _lanes(programs: Sequence[Program], classes: Sequence[Replica], graph: Graph, prices: Prices, step: Step, precision: str | None) -> tuple[_Lane, ...]:
    pricers: dict[int, Pricer] = {}
    stages = sorted(((stage, program) for program in programs for stage in program.stages), key=lambda item: item[0].index)
    found, told = [], []
    for replica in classes:
        loads, times = [], []
        for stage, program in stages:
            rank = replica.devices[step.stage_ranks[stage.index]]
            pricer = pricers.setdefault(rank, Pricer(prices, precision, rank, overlap=step.overlap))
            by_rows = {rows: load_of(program, stage, graph, pricer, rows) for rows in dict.fromkeys(replica.rows)}
            loads.append(by_rows[max(by_rows)])
            times.append([durations(by_rows[rows], step, pricer) for rows in replica.rows])
        base = replica.devices[0]
        told.append(times)
        found.append(_Lane(replica, tuple(loads), tuple(map(_mean, times)), pricers.setdefault(base, Pricer(prices, precision, base, overlap=step.overlap))))
    if step.zero < 2 or step.shards == 1:
        return tuple(found)
    together = tuple(_mean([_slowest(alike) for alike in zip(*of_stage, strict=True)]) for of_stage in zip(*told, strict=True))
    return tuple(replace(lane, times=together) for lane in found)


PASSES = ("forward_s", "first_forward_s", "backward_s", "last_backward_s", "weights_s", "last_weights_s")


def _mean(times: Sequence[Durations]) -> Durations:
    means = {name: sum(getattr(t, name) for t in times) / len(times) for name in PASSES}
    return Unlike(**means, tail=times[0].tail, late=times[0].late, each=tuple(times))


def _slowest(times: Sequence[Durations]) -> Durations:
    return replace(max(times, key=lambda t: t.tail_s), **{name: max(getattr(t, name) for t in times) for name in PASSES})


def _later(event: Event, seconds: float) -> Event:
    if event.kind not in ("reduce", "optimizer") or not seconds or event.name.endswith(LATE):
        return event
    return replace(event, start_s=round(event.start_s + seconds, 9), end_s=round(event.end_s + seconds, 9))


def _worst(stages: Sequence[StageForecast], step_s: float) -> StageForecast:
    slow = max(stages, key=lambda s: s.busy_s)
    full = max(stages, key=lambda s: s.memory.total - s.memory_limit_bytes)
    return replace(slow, idle_s=max(0.0, step_s - slow.busy_s), memory=full.memory, memory_limit_bytes=full.memory_limit_bytes)


def operator_seconds(
    programs: Sequence[Program], classes: Sequence[Replica], graph: Graph, prices: Prices, precision: str | None
) -> dict[tuple[int, int], float]:
    """("pp", "dp") coordinates -> seconds that the own operators of a step take, without what is sent or waited for."""
    told: dict[tuple[int, int], float] = {}
    for replica in classes:
        for program in programs:
            for stage in program.stages:
                pp = program.stage_ranks[stage.index]
                pricer = Pricer(prices, precision, replica.devices[pp])
                loads = {rows: load_of(program, stage, graph, pricer, rows) for rows in dict.fromkeys(replica.rows)}
                spent = sum(loads[rows].forward.compute_s + loads[rows].backward.compute_s + loads[rows].recompute.compute_s for rows in replica.rows)
                for member in replica.members:
                    told[pp, member] = told.get((pp, member), 0.0) + spent
    return told
