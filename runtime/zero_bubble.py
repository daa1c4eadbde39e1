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

from runtime.action import Action, Schedule
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
    """The order in which each rank takes its actions. Stages are a chain; `limit` micro-batches are held by a rank's first stage."""
    num_stages, num_ranks = len(stage_ranks), max(stage_ranks) + 1
    own = [[s for s in range(num_stages) if stage_ranks[s] == rank] for rank in range(num_ranks)]
    ended: dict[Action, int] = {}  # action -> the time at which its result is there
    taken: list[list[Action]] = [[] for _ in range(num_ranks)]

    def is_there(action: Action, now: int) -> bool:
        return ended.get(action, now + 1) <= now

    def may_run(action: Action, now: int) -> bool:
        if action in ended:
            return False
        s, k = action.stage, action.micro_batch
        if action.kind == "F":
            if k > 0 and Action("F", s, k - 1) not in ended:
                return False
            held = sum(1 for i in range(k) if Action("BW", s, i) not in ended)
            return (s == 0 or is_there(Action("F", s - 1, k), now)) and (s != own[stage_ranks[s]][0] or held < limit)
        if action.kind == "BI":
            return is_there(Action("F", s, k), now) and (s == num_stages - 1 or is_there(Action("BI", s + 1, k), now))
        return is_there(Action("BI", s, k), now)

    def choices(rank: int) -> list[Action]:
        deepest_first = own[rank][::-1]
        return (
            [Action("BI", s, k) for k in range(num_micro_batches) for s in deepest_first]
            + [Action("F", s, k) for s in deepest_first for k in range(num_micro_batches)]
            + [Action("BW", s, k) for k in range(num_micro_batches) for s in deepest_first]
        )

    waiting = [choices(rank) for rank in range(num_ranks)]
    now = 0
    while any(waiting):
        assert now <= 3 * num_stages * (num_micro_batches + num_stages), "the play does not end"
        for rank in range(num_ranks):
            action = next((a for a in waiting[rank] if may_run(a, now)), None)
            if action is not None:
                ended[action] = now + 1
                taken[rank].append(action)
                waiting[rank].remove(action)
        now += 1
    return tuple(map(tuple, taken))
