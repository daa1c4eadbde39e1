"""Pipeline schedules: the order of actions on each pipeline rank, as pure functions, and a check that they end.

    gpipe   Huang et al. 2019: all forwards, then all backwards in order
    1f1b    Narayanan et al. 2019/2021 (PipeDream-Flush): warm-up of p-1-i forwards on rank i, then one forward and one
            backward in turn, then the remaining backwards. At most min(m, p-i) micro-batches are held.

A schedule is a tuple of actions for each rank. Transfers are not listed: a stage's forward needs the forwards of the stages
that send to it, its backward its own forward and the backwards of the stages that it sends to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from runtime.errors import ScheduleError

Kind = Literal["F", "B", "BI", "BW"]
Edges = frozenset[tuple[int, int]]  # (src stage, dst stage)


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """Forward (F), backward (B), or its halves, of one micro-batch on one stage: gradients of inputs (BI) and of weights (BW)."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"


def parse_action(text: str) -> Action:
    """ "F0.3" -> forward of stage 0, micro-batch 3. Raises ScheduleError."""
    found = re.fullmatch(r"(BI|BW|F|B)(\d+)\.(\d+)", text)
    if not found:
        raise ScheduleError(f"{text!r} is no action: write kind ({', '.join(get_args(Kind))}), stage, a dot and the micro-batch, like F0.3")
    return Action(found[1], int(found[2]), int(found[3]))  # type: ignore[arg-type]


Schedule = tuple[tuple[Action, ...], ...]


def gpipe(stage_ranks: tuple[int, ...], num_micro_batches: int) -> Schedule:
    """One stage a rank: every forward, then every backward."""
    order = _one_stage_each(stage_ranks, "gpipe")
    return tuple(tuple(Action("F", s, k) for k in range(num_micro_batches)) + tuple(Action("B", s, k) for k in range(num_micro_batches)) for s in order)


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


def _one_stage_each(stage_ranks: tuple[int, ...], name: str) -> tuple[int, ...]:
    """The stage of each rank."""
    if sorted(stage_ranks) != list(range(len(stage_ranks))):
        raise ScheduleError(f"{name} puts one stage on every rank, asked for stages on ranks {stage_ranks}: take an interleaved schedule")
    return tuple(stage_ranks.index(rank) for rank in range(len(stage_ranks)))


SCHEDULES: Mapping[str, Callable[[tuple[int, ...], int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def schedule(name: str, stage_ranks: tuple[int, ...], num_micro_batches: int) -> Schedule:
    """The actions of each rank under the schedule called `name`. `stage_ranks[s]` is the rank of stage s.

    Raises ScheduleError for an unknown name or stages that the schedule cannot place.
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"no schedule is called {name!r}: take one of {', '.join(SCHEDULES)}")
    if num_micro_batches < 1:
        raise ScheduleError(f"a step needs at least one micro-batch, got {num_micro_batches}")
    return SCHEDULES[name](stage_ranks, num_micro_batches)


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
    passes = set(listed)
    for s in range(num_stages):
        for k in range(num_micro_batches):
            halves = {kind for kind in ("B", "BI", "BW") if Action(kind, s, k) in passes}
            if Action("F", s, k) not in passes or halves not in ({"B"}, {"BI", "BW"}):
                raise ScheduleError(f"stage {s}, micro-batch {k} needs F and either B or BI and BW, the schedule has {sorted(halves) or 'no backward'}")
    if len(listed) != num_stages * num_micro_batches * 2 + sum(1 for action in listed if action.kind == "BW"):
        raise ScheduleError(f"the schedule has actions beyond stage {num_stages - 1} or micro-batch {num_micro_batches - 1}")
    done: set[Action] = set()
    at = [0] * len(actions)
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(actions):
            while at[rank] < len(own) and all(need in done for need in needs(own[at[rank]], edges, passes)):
                done.add(own[at[rank]])
                at[rank] += 1
                moved = True
    stuck = [f"rank {rank} at {own[at[rank]]}" for rank, own in enumerate(actions) if at[rank] < len(own)]
    if stuck:
        raise ScheduleError(f"the schedule never ends: {', '.join(stuck)} wait for each other")


def needs(action: Action, edges: Edges, passes: set[Action]) -> tuple[Action, ...]:
    """The actions that have to be over before this one can start."""
    s, k = action.stage, action.micro_batch
    if action.kind == "F":
        return tuple(Action("F", src, k) for src, dst in sorted(edges) if dst == s)
    if action.kind == "BW":
        return (Action("BI", s, k),)
    later = tuple(Action("B" if Action("B", dst, k) in passes else "BI", dst, k) for src, dst in sorted(edges) if src == s)
    return (Action("F", s, k), *later)
