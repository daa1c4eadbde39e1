"""Chains of actions that no replay can beat: a cheap lower bound of a step whose stages are known.

1F1B, one stage a rank, n stages, m micro-batches. The first backward of stage j waits for a forward through all stages and for the
backward passes behind it; by then the stage has done all but k = max(0, m - n + j) of its forwards. It has m backward passes and k
forwards left, and its last backward passes on through the stages before it:

    T >= sum of first forwards + sum of b_i, i > j + (m - 1) b_j + last b_j + k f_j + sum of last b_i, i < j + tail_0

Sends only add to it. Other schedules: 0.
"""

from __future__ import annotations

from autoplan.replay import Durations, Step


def chain_s(times: tuple[Durations, ...], step: Step) -> float:
    """The largest of the module's sums."""
    n, m = len(times), step.num_micro_batches
    if step.schedule != "1f1b" or n == 1 or step.stage_ranks != tuple(range(n)):
        return 0.0
    through_s = sum(time.first_forward_s for time in times) + times[0].tail_s
    behind_s = sum(min(time.backward_s, time.last_backward_s) for time in times)
    before_s = best = 0.0
    for j, time in enumerate(times):
        behind_s -= min(time.backward_s, time.last_backward_s)
        own_s = (m - 1) * time.backward_s + time.last_backward_s + max(0, m - n + j) * time.forward_s
        best = max(best, through_s + behind_s + own_s + before_s)
        before_s += time.last_backward_s
    return best
