"""Pipeline schedules: the order of actions on each pipeline rank, as pure functions, and a check that they end.

    gpipe   Huang et al. 2019: all forwards, then all backwards in order
    1f1b    Narayanan et al. 2019/2021 (PipeDream-Flush): warm-up of p-1-i forwards on rank i, then one forward and one
            backward in turn, then the remaining backwards. At most min(m, p-i) micro-batches are held.

    interleaved  Narayanan et al. 2021 (Megatron-LM), section 2.2: v stages on every rank, taken in turns of p micro-batches;
            warm-up of 2 (p-1-i) + (v-1) p forwards
    zb      zero bubble (runtime/zero_bubble.py): backward passes split in two, the weights' halves fill the bubbles
    zbv     the same with two stages on every rank, placed in a V

A schedule is a tuple of actions for each rank. Transfers are not listed: a stage's forward needs the forwards of the stages
that send to it, its backward its own forward and the backwards of the stages that it sends to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from runtime.action import Action, Edges, Schedule
from runtime.errors import ScheduleError
from runtime.zero_bubble import zb, zbv


def gpipe(stage_ranks: tuple[int, ...], num_micro_batches: int) -> Schedule:
    """Every forward, then every backward. A rank with several stages takes them in turn, forward in order and back in reverse."""
    own = [[s for s, at in enumerate(stage_ranks) if at == rank] for rank in range(max(stage_ranks) + 1)]
    if not all(own):
        raise ScheduleError(f"gpipe needs a stage on every rank, asked for stages on ranks {stage_ranks}")
    passes = lambda kind, order: tuple(Action(kind, s, k) for s in order for k in range(num_micro_batches))  # noqa: E731
    return tuple(passes("F", stages) + passes("B", reversed(stages)) for stages in own)


def one_f_one_b(stage_ranks: tuple[int, ...], num_micro_batches: int) -> Schedule:
    """One stage a rank: warm-up, one forward and one backward in turn, cool-down."""
    order = _one_stage_each(stage_ranks, "1f1b")
    num_stages, actions = len(order), []
    for s in order:
        warm_up = min(num_stages - 1 - s, num_micro_batches)
        own = [Action("F", s, k) for k in range(warm_up)]
        for k in range(warm_up, num_micro_batches):
            own += [Action("F", s, k), Action("B", s, k - warm_up)]
        own += [Action("B", s, k) for k in range(num_micro_batches - warm_up, num_micro_batches)]
        actions.append(tuple(own))
    return tuple(actions)


def interleaved(stage_ranks: tuple[int, ...], num_micro_batches: int) -> Schedule:
    """v stages on every rank, stage s on rank s mod p; any number of micro-batches.

    Where the last turn is short, Megatron's warm-up may not be enough to end: it is then lengthened until it is, by the fewest
    forwards.
    """
    num_ranks = max(stage_ranks) + 1
    if stage_ranks != tuple(s % num_ranks for s in range(len(stage_ranks))) or len(stage_ranks) % num_ranks:
        raise ScheduleError(f"interleaved deals stages to ranks in turn (0, 1, .., 0, 1, ..), asked for {stage_ranks}")
    num_chunks, total = len(stage_ranks) // num_ranks, len(stage_ranks) // num_ranks * num_micro_batches
    turns = [range(k, min(k + num_ranks, num_micro_batches)) for k in range(0, num_micro_batches, num_ranks)]

    def order(rank: int, extra: int) -> tuple[Action, ...]:
        forwards = [Action("F", c * num_ranks + rank, k) for turn in turns for c in range(num_chunks) for k in turn]
        backwards = [Action("B", c * num_ranks + rank, k) for turn in turns for c in reversed(range(num_chunks)) for k in turn]
        warm_up = min(total, 2 * (num_ranks - 1 - rank) + (num_chunks - 1) * num_ranks + extra)
        steady = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
        return (*forwards[:warm_up], *steady, *backwards[total - warm_up :])

    for extra in range(total + 1):
        found = tuple(order(rank, extra) for rank in range(num_ranks))
        try:
            check(found, len(stage_ranks), num_micro_batches)
        except ScheduleError:
            continue
        return found
    raise AssertionError("all forwards before all backwards always end")


def _one_stage_each(stage_ranks: tuple[int, ...], name: str) -> tuple[int, ...]:
    """The stage of each rank."""
    if sorted(stage_ranks) != list(range(len(stage_ranks))):
        raise ScheduleError(f"{name} puts one stage on every rank, asked for stages on ranks {stage_ranks}: take an interleaved schedule")
    return tuple(stage_ranks.index(rank) for rank in range(len(stage_ranks)))


SCHEDULES: Mapping[str, Callable[[tuple[int, ...], int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb": zb,
    "zbv": zbv,
}


def schedule(name: str, stage_ranks: tuple[int, ...], num_micro_batches: int) -> Schedule:
    """The actions of each rank under the schedule called `name`. `stage_ranks[s]` is the rank of stage s.

    Raises ScheduleError for an unknown name or stages that the schedule cannot place.
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"no schedule is called {name!r}: take one of {', '.join(SCHEDULES)}")
    if num_micro_batches < 1:
        raise ScheduleError(f"a step needs at least one micro-batch, got {num_micro_batches}")
    return SCHEDULES[name](stage_ranks, num_micro_batches)


def splits_backward(name: str) -> bool:
    """Whether a schedule runs the backward pass in two halves."""
    return name in ("zb", "zbv")


def forward_only(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """The forwards of a schedule in their order: what evaluation runs."""
    return tuple(action for action in actions if action.kind == "F")


def chain(num_stages: int) -> Edges:
    """Each stage sends to the next."""
    return frozenset((s, s + 1) for s in range(num_stages - 1))


def check(actions: Schedule, num_stages: int, num_micro_batches: int, edges: Edges | None = None) -> None:
    """Raise ScheduleError unless every stage runs each micro-batch's passes exactly once and all ranks come to an end.

    The second part plays the actions as if every receive waited for its send: with sends that never block, that is
    exactly what the executor does, so what passes cannot deadlock. `edges` defaults to a chain of stages.
    """
    edges = chain(num_stages) if edges is None else edges
    listed = [action for own in actions for action in own]
    if len(set(listed)) != len(listed):
        twice = min(action for action in listed if listed.count(action) > 1)
        raise ScheduleError(f"{twice} is scheduled twice")
    kinds: dict[tuple[int, int], set[str]] = {}
    for action in listed:
        kinds.setdefault((action.stage, action.micro_batch), set()).add(action.kind)
    for s in range(num_stages):
        for k in range(num_micro_batches):
            found = kinds.get((s, k), set())
            if found not in ({"F", "B"}, {"F", "BI", "BW"}):
                halves = sorted(found - {"F"}) or "no backward"
                raise ScheduleError(f"stage {s}, micro-batch {k} needs F and either B or BI and BW, the schedule has {halves}")
    if len(listed) != num_stages * num_micro_batches * 2 + sum(1 for action in listed if action.kind == "BW"):
        raise ScheduleError(f"the schedule has actions beyond stage {num_stages - 1} or micro-batch {num_micro_batches - 1}")
    before, behind = ([[] for _ in range(num_stages)] for _ in range(2))
    for src, dst in edges:
        before[dst].append(src)
        behind[src].append(dst)
    done = {kind: [[False] * num_micro_batches for _ in range(num_stages)] for kind in ("F", "B", "BW")}  # "B": or the inputs' half

    def may_run(action: Action) -> bool:
        s, k = action.stage, action.micro_batch
        if action.kind == "F":
            return all(done["F"][src][k] for src in before[s])
        return done["B"][s][k] if action.kind == "BW" else done["F"][s][k] and all(done["B"][dst][k] for dst in behind[s])

    at = [0] * len(actions)
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(actions):
            while at[rank] < len(own) and may_run(own[at[rank]]):
                action = own[at[rank]]
                done["B" if action.kind == "BI" else action.kind][action.stage][action.micro_batch] = True
                at[rank] += 1
                moved = True
    stuck = [f"rank {rank} at {own[at[rank]]}" for rank, own in enumerate(actions) if at[rank] < len(own)]
    if stuck:
        raise ScheduleError(f"the schedule never ends: {', '.join(stuck)} wait for each other")
