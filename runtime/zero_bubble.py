"""Zero-bubble schedules (Qi et al. 2023, Zero Bubble Pipeline Parallelism): a backward pass is split into the gradient of its
inputs (BI), which the stage before waits for, and of its weights (BW), which nobody waits for and which fills what would be idle.

Both are made by playing the pipeline with unit times for F, BI and BW. A free rank takes, in this order,

    BI of the earliest micro-batch, deepest stage first
    F  of the deepest stage that may run; of its first stage only while fewer than `limit` micro-batches are held there
    BW of the earliest micro-batch

`limit` = number of ranks p bounds the activations to those of 1F1B's first rank (ZB-H1's bound). What has been played once
ends always: the play is a witness that there is no deadlock.
"""

from __future__ import annotations

from runtime.action import Action, Kind, Schedule
from runtime.errors import ScheduleError


def zb(stage_ranks: tuple[int, ...], num_micro_batches: int) -> Schedule:
    """One stage on every rank (ZB-H1)."""
    if stage_ranks != tuple(range(len(stage_ranks))):
        raise ScheduleError(f"zb puts stage s on rank s, asked for stages on ranks {stage_ranks}")
    return play(stage_ranks, num_micro_batches, limit=len(stage_ranks))


def zbv(stage_ranks: tuple[int, ...], num_micro_batches: int) -> Schedule:
    """Two stages on every rank: down the ranks and up again, so that the first rank also has the loss (ZB-V)."""
    num_ranks = len(stage_ranks) // 2
    if stage_ranks != (*range(num_ranks), *reversed(range(num_ranks))):
        raise ScheduleError(f"zbv puts stages on ranks 0, 1, .., 1, 0, asked for {stage_ranks}")
    return play(stage_ranks, num_micro_batches, limit=num_ranks)


def play(stage_ranks: tuple[int, ...], num_micro_batches: int, limit: int) -> Schedule:
    """The order in which each rank takes its actions. Stages are a chain; `limit` micro-batches are held by a rank's first stage.

    A stage takes each kind of action in the order of the micro-batches, so what may come next is one action of each kind.
    """
    num_stages, num_ranks = len(stage_ranks), max(stage_ranks) + 1
    own = [[s for s in range(num_stages) if stage_ranks[s] == rank] for rank in range(num_ranks)]
    never = 3 * (num_stages + 1) * (num_micro_batches + num_stages + 1)
    ended = {kind: [[never] * num_micro_batches for _ in range(num_stages)] for kind in ("F", "BI", "BW")}  # when the result of an action is there
    following = {(kind, s): 0 for kind in ("F", "BI", "BW") for s in range(num_stages)}  # the micro-batch that is next
    taken: list[list[Action]] = [[] for _ in range(num_ranks)]

    def is_there(kind: Kind, stage: int, micro_batch: int, now: int) -> bool:
        return ended[kind][stage][micro_batch] <= now

    def may_run(kind: Kind, s: int, now: int) -> bool:
        k = following[kind, s]
        if k == num_micro_batches:
            return False
        if kind == "F":
            is_first = s == own[stage_ranks[s]][0]
            return (s == 0 or is_there("F", s - 1, k, now)) and not (is_first and k - following["BW", s] >= limit)
        if kind == "BI":
            return is_there("F", s, k, now) and (s == num_stages - 1 or is_there("BI", s + 1, k, now))
        return is_there("BI", s, k, now)

    def choice(rank: int, now: int) -> Action | None:
        deepest_first = own[rank][::-1]
        for kind in ("BI", "F", "BW"):
            ready = [s for s in deepest_first if may_run(kind, s, now)]
            if ready:
                chosen = ready[0] if kind == "F" else min(ready, key=lambda s: (following[kind, s], -s))
                return Action(kind, chosen, following[kind, chosen])
        return None

    now = 0
    while any(following["BW", s] < num_micro_batches for s in range(num_stages)):
        assert now <= 3 * num_stages * (num_micro_batches + num_stages), "the play does not end"
        for rank in range(num_ranks):
            action = choice(rank, now)
            if action is not None:
                ended[action.kind][action.stage][action.micro_batch] = now + 1
                taken[rank].append(action)
                following[action.kind, action.stage] += 1
        now += 1
    return tuple(map(tuple, taken))
