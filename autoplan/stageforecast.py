"""The forecast of a step whose stages have meshes of their own: every stage on its own ranks, at the pace of their slowest device.

The recurrences are those of autoplan/replay.py. What crosses between two stages goes in pieces (runtime/crossing.py): of all ranks on both sides
the one with most to send or to receive decides,

    transfer = max over ranks of the sum over its pieces of send(piece)

and a tied parameter costs what its stage gathers and sends of it (runtime/tied.py), once a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autoplan.forecast import Forecast
from autoplan.graph import Graph
from autoplan.load import Model, Send, StageLoad
from autoplan.price import Pricer, axis_group, bytes_of, compute_dtype
from autoplan.rankmemory import by_rank, memories
from autoplan.replay import Durations, Step, durations, late_s, replay, tails_s
from autoplan.replicas import kind_of
from autoplan.simulate import events_of, idle_s, stage_forecast, stage_uses
from autoplan.workload import load_of
from costmodel.opkey import Collective, OpKey, OpTime, RankGroup
from costmodel.prices import Prices, slowdown
from runtime.crossing import num_elements, num_ranks, pieces
from runtime.program import Program, StageMesh, Transfer
from runtime.traffic import tied_moves


@dataclass(frozen=True)
class OnRanks:
    """Prices as a job of `count` ranks from global rank `first` on sees them, all as slow as the slowest of its devices."""

    prices: Prices
    first: int
    count: int

    @property
    def source(self) -> str:
        return self.prices.source

    @property
    def slowest(self) -> int:
        return min(range(self.first, self.first + self.count), key=lambda rank: kind_of(self.prices, rank)[0])

    def op(self, key: OpKey, device: int = 0) -> OpTime:
        return self.prices.op(key, self.slowest)

    def collective(self, collective: Collective) -> float:
        group = collective.group
        return self.prices.collective(replace(collective, group=replace(group, start=group.start + self.first)))

    def optimizer_s(self, num_elements: int, optimizer: str, num_bytes_per_element: float, device: int = 0) -> float:
        return self.prices.optimizer_s(num_elements, optimizer, num_bytes_per_element, self.slowest)

    def memory_limit_bytes(self, device: int = 0) -> int:
        return min(self.prices.memory_limit_bytes(rank) for rank in range(self.first, self.first + self.count))

    def peak_flops_per_s(self, dtype: str, device: int = 0) -> float:
        return self.prices.peak_flops_per_s(dtype, self.slowest)

    def slowdown(self, device: int = 0) -> float:
        return slowdown(self.prices, self.slowest)

    def assumptions(self) -> tuple[str, ...]:
        return self.prices.assumptions()


@dataclass(frozen=True)
class _Place:
    """One "pp" coordinate: its program, its mesh, the step and the prices as its ranks see them."""

    program: Program
    mesh: StageMesh
    step: Step
    pricer: Pricer

    @property
    def count(self) -> int:
        return num_ranks(self.mesh)


def forecast_stages(programs: Sequence[Program], graph: Graph, prices: Prices, step: Step, model: Model, precision: str | None) -> Forecast:
    """The forecast of the step; a stage's figures are those of its slowest device, its memory that of its first rank for its smallest one."""
    links = Pricer(prices, precision, overlap=step.overlap)
    places = [_place(program, mesh, prices, step, precision) for program, mesh in zip(programs, programs[0].meshes, strict=True)]
    loads = _loads(places, graph, links)
    at = [places[rank] for rank in step.stage_ranks]
    times = tuple(_durations(load, place, links) for load, place in zip(loads, at, strict=True))
    line, tails = replay(loads, times, step, links), tails_s(times, step)
    kept = [memories(loads, place.step)[load.index] for load, place in zip(loads, at, strict=True)]
    step_s = max(late_s(times, step), *(end + tail for end, tail in zip(line.end_s, tails, strict=True)))
    idle = [idle_s(step_s, busy + tail) for busy, tail in zip(line.busy_s, tails, strict=True)]
    world = sum(place.count for place in places)
    peak = sum(prices.peak_flops_per_s(model.dtype, rank) for rank in range(world))
    stages = tuple(
        stage_forecast(load, time, step, line.busy_s[rank] + tails[rank], step_s, memory, places[rank].pricer.prices.memory_limit_bytes())
        for load, time, memory, rank in zip(loads, times, kept, step.stage_ranks, strict=True)
    )
    uses = [stage_uses(load, place.step) for load, place in zip(loads, at, strict=True)]
    return Forecast(
        step_time_s=step_s,
        peak_memory_bytes=max(memory.total for memory in by_rank(kept, step.stage_ranks)),
        tokens_per_s=model.tokens / step_s if step_s else 0.0,
        mfu=3 * model.flops / (step_s * peak) if step_s and peak else 0.0,
        bubble=sum(place.count * seconds for place, seconds in zip(places, idle, strict=True)) / (step_s * world) if step_s else 0.0,
        split_share=model.split_share,
        stages=stages,
        collectives=max(uses, key=lambda own: sum(use.num_bytes for use in own)),
        events=tuple(replace(event, rank=places[event.rank].mesh.first) for event in events_of(line, times, step, RankGroup(len(places)))),
        source=prices.source,
        assumptions=prices.assumptions(),
    )


def _place(program: Program, mesh: StageMesh, prices: Prices, step: Step, precision: str | None) -> _Place:
    pricer = Pricer(OnRanks(prices, mesh.first, num_ranks(mesh)), precision, overlap=step.overlap)
    return _Place(program, mesh, replace(step, axes=program.axes), pricer)


def _loads(places: Sequence[_Place], graph: Graph, links: Pricer) -> tuple[StageLoad, ...]:
    found = [load_of(place.program, stage, graph, place.pricer) for place in places for stage in place.program.stages]
    received = {
        (t.src, t.dst, t.value): t for place in places for stage in place.program.stages for t in max(stage.bodies, key=lambda body: body.rows).receives
    }
    sends: dict[int, list[Send]] = {}
    for (src, dst, _), t in sorted(received.items(), key=lambda item: item[0]):
        send = Send(dst, bytes_of(t.spec.shape, compute_dtype(t.spec.dtype, links.precision)), t.grad)
        if t.spread is not None:
            forward_s, backward_s = (_crossing_s(t, places, links, is_grad=is_grad) for is_grad in (False, True))
            send = replace(send, forward_s=forward_s, backward_s=backward_s)
        sends.setdefault(src, []).append(send)
    return tuple(sorted((replace(load, sends=tuple(sends.get(load.index, ()))) for load in found), key=lambda load: load.index))


def _crossing_s(t: Transfer, places: Sequence[_Place], links: Pricer, *, is_grad: bool) -> float:
    """Seconds until all pieces of a value, or of its gradient, have arrived."""
    assert t.spread is not None
    ranks = places[0].program.stage_ranks
    ends = [places[ranks[stage]].mesh for stage in ((t.dst, t.src) if is_grad else (t.src, t.dst))]
    found = pieces(t.spread, ends[0], ends[1], 0, is_grad=is_grad)
    busy = max(len({p.sender for p in found}), len({p.receiver for p in found}), 1)
    spent: dict[tuple[str, int], float] = {}
    for piece in found:
        num_bytes = bytes_of((num_elements(piece.box),), compute_dtype(t.spec.dtype, links.precision))
        seconds = links.collective("send", num_bytes, _pair(piece.sender, piece.receiver, busy))
        for end in (("from", piece.sender), ("to", piece.receiver)):
            spent[end] = spent.get(end, 0.0) + seconds
    return max(spent.values(), default=0.0)


def _pair(one: int, other: int, concurrent: int) -> RankGroup:
    return RankGroup(2, abs(other - one), min(one, other), concurrent)


def _durations(load: StageLoad, place: _Place, links: Pricer) -> Durations:
    time = durations(replace(load, tied_bytes=0), place.step, place.pricer)
    tied_s = sum(_tied_s(load, place, links))
    if not tied_s:
        return time
    before, update = time.tail[:-1], time.tail[-1]
    return replace(time, tail=(*before, ("tied", "pp", tied_s), update))


def _tied_s(load: StageLoad, place: _Place, links: Pricer) -> Iterator[float]:
    program = replace(place.program, stages=tuple(stage for stage in place.program.stages if stage.index == load.index))
    here = program.stage_ranks[load.index]
    far = next((mesh.first for number, mesh in enumerate(program.meshes) if number != here))
    for kind, axis, _, num_bytes in tied_moves(program, {"pp": here}):
        if kind == "send":
            yield links.collective("send", num_bytes, _pair(place.mesh.first, far, place.count))
        else:
            yield place.pricer.collective("all_gather", num_bytes, axis_group(place.step.axes, axis))
