"""Replay: the time of a step, event by event. Its memory: autoplan/rankmemory.py.

Input are the loads of the stages (autoplan/load.py) and the schedule that the executor reads too (runtime/schedule.py). Every
pipeline rank runs the preamble of its program at once, then its actions in order; an action starts when the rank is free and what it needs has arrived:

    start(F s,k)  = max(free(rank), arrival of every value sent to s for k)
    start(B s,k)  = max(free(rank), arrival of every gradient from the stages that s sent to)      BI, of a split backward, likewise
    start(BW s,k) = free(rank)
    arrival       = max(end of the action, channel free) + send(bytes); one channel for each pair of ranks and direction

Seconds of an action: operators and tensor collectives in turn; recomputation before the backward pass. Under ZeRO, FSDP2 moves
parameters on a stream of its own, one unit ahead: with G the seconds to gather all units, R to reduce-scatter all gradients (and, in groups, to sum each
over the groups at once), g and r those of the largest unit,

    gathered forward   = g + F | G                                  ZeRO-1, -2: micro-batch 0;  ZeRO-3: every one
    reduced backward   = B | R + r                                  ZeRO-1: the last;  ZeRO-2: every one
    ZeRO-3 backward    = g + B | (G + R) + r                        on CPUs, which do both: the sums instead

where C | Q is compute beside traffic that slows it, max(Q, C + (1 - 1/slowdown) Q) (costmodel/overlap.py). Late sums slow the passes that they run
beside likewise; transfers between stages, which occupy one or two of a device's processors, are not taken to.

A schedule that splits the backward pass gathers a stage at once before its first forward and reduces after its last BW, whatever
the ZeRO stage (runtime/flow.py says why): F + G, BW + R.

Parameter servers (ZeRO-0, W bytes of gradients, w workers and s servers among the data ranks): instead of the sum over "dp" a push of W, the
optimizer of a server over its part, a pull of W (costmodel/served.py: the busiest port decides). "async": a worker waits for its own push,
update and pull alone, visits of the servers, but no step is shorter than what the busiest server does for all workers:

    tail = max(visit(W) + u + visit(W), push(W) + w u + pull(W) - compute), u seconds to update one server's part

After a rank's last action: gradients summed over "dp" (ZeRO-0, in the buckets of runtime/reduction.py; compressed or late:
autoplan/datasums.py), "tp" (deferred) and tied stages, the optimizer: each once a rank, so that of several stages on a rank the later ones add
no latency of their own. The step ends with the slowest rank, and not before the late sums of the step before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoplan.datasums import EXACT, Mode
from autoplan.datasums import parts as data_sums
from autoplan.holding import is_split, order
from autoplan.load import BUCKET_BYTES, StageLoad
from autoplan.price import Pricer, axis_group
from autoplan.schemes import degree_of
from costmodel.memory import Widths, widths
from costmodel.opkey import CollectiveKind, RankGroup
from costmodel.overlap import beside_s, slowed_s
from runtime.action import Action
from runtime.reduction import sum_limit_bytes


@dataclass(frozen=True)
class Step:
    """What is the same for all stages of a step."""

    axes: tuple[tuple[str, int], ...]
    schedule: str
    num_micro_batches: int
    zero: int
    zero_group: int | None
    optimizer: str
    precision: str | None
    stage_ranks: tuple[int, ...]
    overlap: bool = True  # transfers run beside compute (GPU copy engines); False on CPUs, whose cores do both
    sync: str = "allreduce"
    servers: tuple[int, ...] = ()  # data ranks that serve parameters, where some do
    workers: tuple[int, ...] = ()  # data ranks that compute; (): all
    sums: Mode = EXACT  # of gradients over the data axis
    slowdown: float = 1.0  # factor on compute while transfers run beside it

    def degree(self, axis: str) -> int:
        return degree_of(self.axes, axis)

    @property
    def num_workers(self) -> int:
        """Data ranks that compute."""
        return len(self.workers) or self.degree("dp")

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return max(self.stage_ranks) + 1

    @property
    def is_split(self) -> bool:
        return is_split(self.schedule)

    @property
    def shards(self) -> int:
        """Ranks that share states."""
        return (self.zero_group or self.degree("dp")) if self.zero else 1


@dataclass(frozen=True)
class Durations:
    """Seconds of a stage's actions, of what follows them, and of the late sums of gradients, which run beside the next step. Split:
    `backward_s` of the inputs' half, `weights_s` of the other."""

    forward_s: float
    first_forward_s: float
    backward_s: float
    last_backward_s: float
    tail: tuple[tuple[str, str, float], ...]  # (name, stream, seconds)
    late: tuple[tuple[str, str, float], ...] = ()
    weights_s: float = 0.0
    last_weights_s: float = 0.0

    def of(self, action: Action, num_micro_batches: int) -> float:
        is_last = action.micro_batch == num_micro_batches - 1
        if action.kind == "F":
            return self.first_forward_s if action.micro_batch == 0 else self.forward_s
        if action.kind == "BW":
            return self.last_weights_s if is_last else self.weights_s
        return self.last_backward_s if is_last else self.backward_s

    def passes_s(self, num_micro_batches: int) -> float:
        """All actions of a step."""
        more = num_micro_batches - 1
        once = self.first_forward_s + self.last_backward_s + self.last_weights_s
        return once + more * (self.forward_s + self.backward_s + self.weights_s)

    @property
    def tail_s(self) -> float:
        return sum(seconds for _, _, seconds in self.tail)

    @property
    def late_s(self) -> float:
        return sum(seconds for _, _, seconds in self.late)


@dataclass(frozen=True)
class Unlike(Durations):
    """Of micro-batches of unlike size: those of `each`, and their means."""

    each: tuple[Durations, ...] = ()

    def of(self, action: Action, num_micro_batches: int) -> float:
        return self.each[action.micro_batch].of(action, num_micro_batches)


def stage_widths(load: StageLoad, step: Step) -> Widths:
    return widths(step.precision, step.optimizer, load.parameter_width)


def durations(load: StageLoad, step: Step, pricer: Pricer) -> Durations:
    """Seconds of the actions of one stage: the module's formulas."""
    width = stage_widths(load, step)
    forward_s = load.forward.seconds
    weights_s = load.weights_s if step.is_split else 0.0
    backward_s = load.backward.seconds + load.recompute.seconds - weights_s
    first_s, last_s, last_weights_s = forward_s, backward_s, weights_s
    dp = step.degree("dp")
    group = axis_group(step.axes, "dp", pricer.device)
    shards = RankGroup(step.shards, group.stride, group.start, group.concurrent)

    def served(kind: CollectiveKind, num_bytes: int) -> float:
        return pricer.collective(kind, num_bytes, group, step.servers, step.workers)

    trained = load.trained_elements
    tail: list[tuple[str, str, float]] = []
    late: tuple[tuple[str, str, float], ...] = ()
    is_own = step.sums.is_own and dp > 1
    joins = step.stage_ranks.index(step.stage_ranks[load.index]) < load.index
    if step.zero and step.shards > 1:
        share = trained / max(1, load.parameter_elements)
        gathers = [pricer.collective("all_gather", unit * width.parameter, shards) for unit in load.units]
        replicas = RankGroup(dp // step.shards, group.stride * step.shards, group.start, group.concurrent * step.shards)

        def reduced_s(elements: int) -> float:
            """Gradients summed over the ranks that share states, then over those that hold equal parts."""
            size = int(elements * share) * width.gradient
            own = pricer.collective("reduce_scatter", size, shards)
            return own + (pricer.collective("all_reduce", size // step.shards, replicas) if replicas.size > 1 else 0.0)

        scatters = [0.0 if is_own else reduced_s(unit) for unit in load.units]
        g_all, r_all, g, r = sum(gathers), sum(scatters), max(gathers, default=0.0), max(scatters, default=0.0)
        if step.is_split:
            total = sum(load.units)
            first_s += pricer.collective("all_gather", total * width.parameter, shards)
            last_weights_s += reduced_s(total)
        else:
            first_s = _beside(step, first_s, g_all, g)
            last_s = _beside(step, backward_s, r_all, r)
        if step.zero >= 2 and not step.is_split:
            backward_s = last_s
        if step.zero == 3 and not step.is_split:
            forward_s = _beside(step, forward_s, g_all, g)
            backward_s = last_s = _beside(step, load.backward.seconds + load.recompute.seconds, g_all + r_all, g + r)
    elif dp > 1 and step.sync == "allreduce" and not is_own:
        tail.append(("all_reduce dp", "dp", _bucketed(pricer, trained * width.gradient, group, joins=joins)))
    if is_own:
        made = data_sums(step.sums, load, width, step.zero, group, pricer)
        late = tuple(part for part in made if step.sums.delay and (step.overlap or part[1] != "compute"))
        tail += [part for part in made if part not in late]
        if step.overlap and late:
            tail.append(("passes slowed by late sums", "compute", slowed_s(sum(part[2] for part in late), step.slowdown)))
    for axis in dict.fromkeys(axis for axis, _ in load.deferred):
        total = sum(size for name, size in load.deferred if name == axis) // step.shards  # local shards are summed
        tail.append((f"all_reduce {axis}", axis, _bucketed(pricer, total, axis_group(step.axes, axis, pricer.device), joins=joins)))
    if load.tied_bytes:
        tail.append(("tied", "pp", 2 * pricer.collective("send", load.tied_bytes, axis_group(step.axes, "pp", pricer.device))))
    update_s = pricer.prices.optimizer_s(-(-trained // max(step.shards, len(step.servers))), step.optimizer, float(width.total), pricer.device)
    if joins:
        update_s = max(0.0, update_s - pricer.prices.optimizer_s(0, step.optimizer, float(width.total), pricer.device))
    if step.sync == "allreduce" or dp == 1:
        tail.append(("optimizer", "compute", update_s))
    elif step.sync == "ps":
        tail.append(("push", "dp", served("push", trained * width.gradient)))
        tail.append(("optimizer", "compute", update_s))
        tail.append(("pull", "dp", served("pull", trained * rest_width(width))))
    else:
        busy_s = Durations(forward_s, first_s, backward_s, last_s, (), (), weights_s, last_weights_s).passes_s(step.num_micro_batches)
        tail += _asynchronous(served, trained * width.gradient, trained * rest_width(width), update_s, step.num_workers, busy_s)
    return Durations(forward_s, first_s, backward_s, last_s, tuple(tail), late, weights_s, last_weights_s)


def rest_width(width: Widths) -> int:
    """Bytes of an element of a weight at rest."""
    return width.master or width.parameter


def _asynchronous(
    served: Callable[[CollectiveKind, int], float], push_bytes: int, pull_bytes: int, update_s: float, num_workers: int, busy_s: float
) -> list[tuple[str, str, float]]:
    """What follows a worker's passes of `busy_s` seconds: the module's formula."""
    push_s, pull_s = served("visit", push_bytes), served("visit", pull_bytes)
    served_s = served("push", push_bytes) + served("pull", pull_bytes)
    wait_s = max(0.0, served_s + num_workers * update_s - busy_s - push_s - update_s - pull_s)
    own = [("push", "dp", push_s), ("optimizer", "compute", update_s), ("pull", "dp", pull_s)]
    return [*own, ("wait for the servers", "dp", wait_s)] if wait_s else own


def _beside(step: Step, compute_s: float, moved_s: float, exposed_s: float) -> float:
    """Compute with parameters or gradients moving beside it, `exposed_s` of it before or after."""
    return exposed_s + beside_s(compute_s, moved_s, step.slowdown) if step.overlap else compute_s + moved_s


def _bucketed(pricer: Pricer, num_bytes: int, group: RankGroup, *, joins: bool = False) -> float:
    """Sums in buckets as the executor cuts them. `joins`: the bytes share the last bucket of those before them."""
    size = BUCKET_BYTES if joins else sum_limit_bytes(num_bytes)
    full, rest = divmod(num_bytes, size)
    seconds = full * pricer.collective("all_reduce", size, group) + pricer.collective("all_reduce", rest, group)
    return max(0.0, seconds - pricer.collective("all_reduce", 1, group)) if joins else seconds


def send_s(pricer: Pricer, step: Step, src: int, dst: int, num_bytes: int) -> float:
    """Seconds of one transfer between two stages."""
    low, high = sorted((step.stage_ranks[src], step.stage_ranks[dst]))
    if low == high:
        return 0.0
    line = axis_group(step.axes, "pp", pricer.device)
    return pricer.collective("send", num_bytes, RankGroup(2, line.stride * (high - low), line.start + line.stride * low, line.stride))


@dataclass(frozen=True)
class Timeline:
    """The replayed step. `end_s` of each pipeline rank's last action, `busy_s` of its actions."""

    actions: tuple[tuple[Action, float, float], ...]
    transfers: tuple[tuple[int, int, int, str, float, float], ...]  # src stage, dst stage, micro-batch, kind, start, end
    end_s: tuple[float, ...]
    busy_s: tuple[float, ...]


def replay(
    loads: tuple[StageLoad, ...], times: tuple[Durations, ...], step: Step, pricer: Pricer, *, meetings_s: Mapping[Action, float] | None = None
) -> Timeline:
    """Run the schedule: the module's recurrences. Actions of `meetings_s` end no earlier than that: others take part in them."""
    m = step.num_micro_batches
    plan = order(step.schedule, step.stage_ranks, m)
    forward: dict[tuple[int, int], float] = {}
    for load in loads:
        for send in load.sends:
            seconds = send_s(pricer, step, load.index, send.dst, send.num_bytes) if send.forward_s is None else send.forward_s
            forward[load.index, send.dst] = forward.get((load.index, send.dst), 0.0) + seconds
    backward: dict[tuple[int, int], float] = {}
    for load in loads:
        for send in load.sends:
            if send.grad:
                seconds = send_s(pricer, step, load.index, send.dst, send.num_bytes) if send.backward_s is None else send.backward_s
                backward[send.dst, load.index] = backward.get((send.dst, load.index), 0.0) + seconds
    outgoing = {"F": _by_source(forward), "B": _by_source(backward), "BW": {}}
    waits = {"F": _by_target(forward), "B": _by_target(backward), "BW": {}}
    arrived: dict[tuple[str, int, int, int], float] = {}
    channel: dict[tuple[int, int], float] = {}
    free = [max(load.preamble_s for load in loads if step.stage_ranks[load.index] == rank) for rank in range(len(plan))]
    busy = list(free)
    at = [0] * len(plan)
    done: list[tuple[Action, float, float]] = []
    moves: list[tuple[int, int, int, str, float, float]] = []
    pending = list(range(len(plan)))
    while pending:
        progressed = False
        for rank in pending:
            own = plan[rank]
            while at[rank] < len(own):
                action = own[at[rank]]
                s, k = action.stage, action.micro_batch
                kind = "B" if action.kind == "BI" else action.kind
                needed = [arrived.get((kind, src, s, k)) for src in waits[kind].get(s, ())]
                if any(time is None for time in needed):
                    break
                start = max([free[rank], *(time for time in needed if time is not None)])
                seconds = times[s].of(action, m)
                end = max(start + seconds, (meetings_s or {}).get(action, 0.0))
                free[rank], busy[rank] = end, busy[rank] + seconds
                done.append((action, start, end))
                for dst, duration in outgoing[kind].get(s, ()):
                    key = (rank, step.stage_ranks[dst])
                    begin = max(end, channel.get(key, 0.0)) if duration else end
                    arrived[kind, s, dst, k] = begin + duration
                    if duration:
                        channel[key] = begin + duration
                        moves.append((s, dst, k, kind, begin, begin + duration))
                at[rank] += 1
                progressed = True
        pending = [rank for rank in pending if at[rank] < len(plan[rank])]
        assert progressed or not pending, "the schedule waits for itself"
    return Timeline(tuple(done), tuple(moves), tuple(free), tuple(busy))


def _by_source(edges: Mapping[tuple[int, int], float]) -> dict[int, tuple[tuple[int, float], ...]]:
    found: dict[int, tuple[tuple[int, float], ...]] = {}
    for (src, dst), seconds in edges.items():
        found[src] = (*found.get(src, ()), (dst, seconds))
    return found


def _by_target(edges: Mapping[tuple[int, int], float]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for src, dst in edges:
        found[dst] = (*found.get(dst, ()), src)
    return found


def tails_s(times: tuple[Durations, ...], step: Step) -> tuple[float, ...]:
    """Seconds that follow the last action of each pipeline rank."""
    return tuple(sum(time.tail_s for s, time in enumerate(times) if step.stage_ranks[s] == rank) for rank in range(step.num_ranks))


def least_step(times: tuple[Durations, ...], step: Step) -> tuple[float, float]:
    """(least seconds of a step, of them idle on its slowest rank): the wait for the first micro-batch and all own work."""
    m, wait_s = step.num_micro_batches, 0.0
    first, own_s = [0.0] * step.num_ranks, list(tails_s(times, step))
    seen: set[int] = set()
    for time, rank in zip(times, step.stage_ranks, strict=True):
        if rank not in seen:
            first[rank] = wait_s
            seen.add(rank)
        own_s[rank] += time.passes_s(m)
        wait_s += time.first_forward_s
    return max((late_s(times, step), 0.0), *((wait + own, wait) for wait, own in zip(first, own_s, strict=True)))


def step_seconds(loads: tuple[StageLoad, ...], times: tuple[Durations, ...], step: Step, pricer: Pricer) -> tuple[float, float]:
    """(seconds of a step, of them idle on the rank that idles most), by replay.

    Once a pipeline is full every further round of p micro-batches takes as long as the one before (p pipeline ranks), so of a long
    step only the first few rounds are played, with as many micro-batches left over as the step has, and the rest follows by proportion.
    """
    p, m = step.num_ranks, step.num_micro_batches
    rounds, over = -(-8 // p), m % p
    short, longer = ((3 + extra) * rounds * p + over for extra in (0, 1))
    if m <= longer:
        return _played(loads, times, step, pricer)
    (a_s, a_idle_s), (b_s, b_idle_s) = (_played(loads, times, replace(step, num_micro_batches=count), pricer) for count in (short, longer))
    rest = (m - longer) / (longer - short)
    return b_s + rest * (b_s - a_s), b_idle_s + rest * max(0.0, b_idle_s - a_idle_s)


def _played(loads: tuple[StageLoad, ...], times: tuple[Durations, ...], step: Step, pricer: Pricer) -> tuple[float, float]:
    line, tails = replay(loads, times, step, pricer), tails_s(times, step)
    step_s = max(late_s(times, step), *(end + tail for end, tail in zip(line.end_s, tails, strict=True)))
    return step_s, max(step_s - busy - tail for busy, tail in zip(line.busy_s, tails, strict=True))


def late_s(times: Sequence[Durations], step: Step) -> float:
    """Seconds of the late sums on the rank that has most."""
    return max(sum(time.late_s for time, own in zip(times, step.stage_ranks, strict=True) if own == rank) for rank in dict.fromkeys(step.stage_ranks))
