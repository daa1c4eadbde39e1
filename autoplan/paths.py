"""What every placing of blocks on the stages of a schedule takes at least, from paths through the schedule's own order.

A step takes as long as the longest path of actions of which each waits for the one before. Paths that are counted here enter a
rank, follow its actions one after the other, and leave it:

    enter    at the first forward of one of its stages, behind that micro-batch's forwards of the stages before; or at the first
             backward of one, behind all forwards and the backwards of the stages after
    leave    from the last backward of one of its stages, before the backwards (of inputs) of the stages before; or from the last forward
             of one, before the forwards of the stages after and all backwards; or from the rank's last action

Path k has c[k, s, kind] actions of stage s: forwards, backwards (of a split one: inputs), weights' halves. With d[s, kind] seconds each,
T >= sum of c[k] d, whatever the cuts. For weights l_k >= 0 with sum 1, and blocks b of (f, i, g) seconds, each on some stage,

    T >= sum over b of min over s of sum over kinds of C[s, kind] b[kind]        C = sum over k of l_k c[k]

since a block adds its seconds to those of its stage. Seconds of a block of which no kind is known count as the kind that is cheapest at the
stage. The best l for blocks of one proportion f : i : g is a small linear program; it is solved for the model's own proportion, in steps of
1/PARTS, and any l gives a bound. Paths that another one exceeds at every stage are left out of it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from autoplan.holding import is_split, long_enough, order
from autoplan.solver import Program, minimise
from runtime.action import Action

_KINDS = {"F": 0, "B": 1, "BI": 1, "BW": 2}
PARTS = 50  # of a whole, in which proportions are told
_MOST = 20000  # entries of a linear program; beyond, paths enter and leave at the same stage alone


@lru_cache(maxsize=4096)
def weights(name: str, stage_ranks: tuple[int, ...], num_micro_batches: int, proportion: tuple[int, int, int]) -> np.ndarray:
    """C[s, kind] of the module's text, for blocks whose seconds are as `proportion`."""
    found = paths(name, stage_ranks, num_micro_batches)
    each, first = np.unique(found @ np.array(proportion, dtype=float), axis=0, return_index=True)
    is_best = np.array([not ((each >= one).all(axis=1) & (each > one).any(axis=1)).any() for one in each])
    each, found = each[is_best], found[first[is_best]]

    def build(program: Program) -> None:
        """least = min over s of sum of l_k each[k, s], pushed up."""
        shares = [program.number() for _ in range(len(found))]
        least = program.number(cost=-1.0)
        program.equal([(k, 1.0) for k in shares], 1.0)
        for costs in each.T.tolist():
            program.at_most([(least, 1.0), *((k, -cost) for k, cost in zip(shares, costs, strict=True))], 0.0)

    solved = minimise(build, "schedule_paths")
    assert solved is not None, "some share of the paths is a solution"
    shares = np.maximum(0.0, np.array(solved[0][: len(found)]))
    return np.tensordot(shares / shares.sum(), found, axes=1)


@lru_cache(maxsize=512)
def paths(name: str, stage_ranks: tuple[int, ...], num_micro_batches: int) -> np.ndarray:
    """c[k, s, kind]: the actions of every path. Those of long steps follow from the same path of a short one, whose rank runs one of each
    action more for every further micro-batch."""
    played = long_enough(name, stage_ranks, num_micro_batches)
    actions, num_stages = order(name, stage_ranks, played), len(stage_ranks)
    backward = "BI" if is_split(name) else "B"
    held = max(stage_ranks.count(rank) for rank in set(stage_ranks))
    is_many = len(actions) * (2 * held) ** 2 * num_stages > _MOST
    found = []
    for rank, own in enumerate(actions):
        stages = [s for s in range(num_stages) if stage_ranks[s] == rank]
        at = {action: i for i, action in enumerate(own)}
        more = np.zeros((num_stages, 3))
        more[stages] = (num_micro_batches - played) * np.array([1, 1, 1 if is_split(name) else 0])
        counts = np.zeros((len(own) + 1, num_stages, 3))
        for i, action in enumerate(own):
            counts[i + 1] = counts[i]
            counts[i + 1, action.stage, _KINDS[action.kind]] += 1
        enters, leaves = [], []
        for s in stages:
            enters += [(s, at[Action("F", s, 0)], _chain(num_stages, forward=slice(0, s)))]
            enters += [(s, at[Action(backward, s, 0)], _chain(num_stages, forward=slice(None), backward=slice(s + 1, None)))]
            leaves += [(s, at[Action(backward, s, played - 1)], _chain(num_stages, backward=slice(0, s)))]
            leaves += [(s, at[Action("F", s, played - 1)], _chain(num_stages, forward=slice(s + 1, None), backward=slice(None)))]
        if is_split(name):
            leaves.append((-1, len(own) - 1, _chain(num_stages)))
        for s, first, before in enters:
            for t, last, after in leaves:
                if first <= last and (not is_many or s == t or t == -1):
                    found.append(before + counts[last + 1] - counts[first] + after + more)
    return np.array(found)


def _chain(num_stages: int, forward: slice | None = None, backward: slice | None = None) -> np.ndarray:
    one = np.zeros((num_stages, 3))
    if forward is not None:
        one[forward, 0] = 1
    if backward is not None:
        one[backward, 1] = 1
    return one
