"""What every placing of blocks on the stages of a schedule takes at least, from paths through the schedule's own order.

A step takes as long as the longest path of actions of which each waits for the one before. Paths that are counted here enter a
rank, follow its actions one after the other, and leave it:

    enter    at the first forward of one of its stages, behind that micro-batch's forwards of the stages before; or at the first
             backward of one, behind all forwards and the backwards of the stages after
    leave    from the last backward of one of its stages, before the backwards (of inputs) of the stages before; or from the last forward
             of one, before the forwards of the stages after and all backwards; or from the rank's last action

Path k has c[k, s, kind] actions of stage s: forwards, backwards (of a split one: inputs) and weights' halves of the micro-batches in the middle, first
forwards, last backwards and last weights' halves, which ZeRO makes longer, and what follows the last action of a rank: for paths that end at one's last
action its own, else the first stage's. It crosses from rank to rank e[k] times. With d[s, kind] seconds each and x of a transfer, T >= sum of c[k] d + e[k] x,
whatever the cuts. For weights l_k >= 0 with sum 1, and blocks b of known seconds of each kind, each on some stage,

    T >= sum over b of min over s of sum over kinds of C[s, kind] b[kind] + x * sum over k of l_k e[k]        C = sum over k of l_k c[k]

since a block adds its seconds to those of its stage. Seconds of a block of which no kind is known count as the kind that is cheapest at the
stage. The best l for blocks of one proportion of kinds is a small linear program; it is solved for the model's own proportion, rounded, and any
l gives a bound. Its paths are those that matter to some weighing of the stages.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np

from autoplan.holding import is_split, long_enough, num_stages_held, order
from autoplan.solver import Program, minimise
from runtime.action import Action

_FORWARD, _BACKWARD, _WEIGHTS, _FIRST, _LAST, _LAST_WEIGHTS, _TAIL = range(7)
_KINDS = {"F": (_FORWARD, _FIRST), "B": (_BACKWARD, _LAST), "BI": (_BACKWARD, _LAST), "BW": (_WEIGHTS, _LAST_WEIGHTS)}
PARTS = (8, 250)  # of a whole, in which proportions are told: first roughly, then finely
_TURNS, _RATE = 300, 6.0  # of the search for paths that matter
_MOST = 20000  # entries of a linear program; beyond, paths enter and leave at the same stage alone


@lru_cache(maxsize=4096)
def weights(name: str, stage_ranks: tuple[int, ...], num_micro_batches: int, proportion: tuple[int, ...]) -> tuple[np.ndarray, float]:
    """C[s, kind] of the module's text and the weighted number of transfers, for blocks whose seconds are as `proportion`: of each kind, and of what may
    be of any of the first three."""
    found, sends = paths(name, stage_ranks, num_micro_batches)
    *known, rest = proportion
    inside = (found[:, :, _FORWARD] + found[:, :, _FIRST], found[:, :, _BACKWARD] + found[:, :, _LAST], found[:, :, _WEIGHTS] + found[:, :, _LAST_WEIGHTS])
    any_kind = np.min(inside[: 3 if is_split(name) else 2], axis=0)
    each, first = np.unique(found @ np.array(known, dtype=float) + rest * any_kind, axis=0, return_index=True)
    tried = _responses(each)
    each, found, sends = each[tried], found[first[tried]], sends[first[tried]]

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
    shares /= shares.sum()
    return np.tensordot(shares, found, axes=1), float(shares @ sends)


def _responses(each: np.ndarray) -> np.ndarray:
    """Rows of which a mixture has a minimum that is about as large as any's: those that answer weights of the columns best while the weights move to where
    the answers were small (multiplicative weights, Freund and Schapire 1999, Adaptive game playing using multiplicative weights)."""
    kept = np.zeros(len(each), dtype=bool)
    kept[each.min(axis=1).argmax()] = True
    log_weights = np.zeros(each.shape[1])
    spread = max(float(each.max() - each.min()), 1e-30)
    for turn in range(_TURNS):
        weights = np.exp(log_weights - log_weights.max())
        best = int((each @ weights).argmax())
        kept[best] = True
        log_weights -= _RATE / np.sqrt(1 + turn) * each[best] / spread
    return np.flatnonzero(kept)


@lru_cache(maxsize=512)
def paths(name: str, stage_ranks: tuple[int, ...], num_micro_batches: int) -> tuple[np.ndarray, np.ndarray]:
    """c[k, s, kind], the actions of every path, and e[k], its transfers. Those of long steps follow from the same path of a short one, whose rank runs
    one of each action more for every further micro-batch."""
    played = long_enough(name, stage_ranks, num_micro_batches)
    actions, num_stages = order(name, stage_ranks, played), len(stage_ranks)
    backward = "BI" if is_split(name) else "B"
    is_many = len(actions) * (2 * num_stages_held(stage_ranks)) ** 2 * num_stages > _MOST
    crosses = np.cumsum([0, *(a != b for a, b in itertools.pairwise(stage_ranks))])  # transfers from the first stage to each
    chain = _Chains(num_stages, is_alone=num_micro_batches == 1)
    found, sends = [], []
    for rank, own in enumerate(actions):
        stages = [s for s in range(num_stages) if stage_ranks[s] == rank]
        at = {action: i for i, action in enumerate(own)}
        more = np.zeros((num_stages, 7))
        more[stages, :3] = (num_micro_batches - played) * np.array([1, 1, 1 if is_split(name) else 0])
        counts = np.zeros((len(own) + 1, num_stages, 7))
        for i, action in enumerate(own):
            middle, end = _KINDS[action.kind]
            is_end = action.micro_batch == (0 if action.kind == "F" else played - 1)
            counts[i + 1] = counts[i]
            counts[i + 1, action.stage, end if is_end else middle] += 1
        enters, leaves = [], []
        for s in stages:
            before, behind = int(crosses[s]), int(crosses[-1] - crosses[s])
            enters.append((s, at[Action("F", s, 0)], chain.first(slice(0, s)), before))
            enters.append((s, at[Action(backward, s, 0)], chain.first(slice(None)) + chain.early(slice(s + 1, None)), before + 2 * behind))
            tail = chain.tail([t for t in range(num_stages) if stage_ranks[t] == stage_ranks[0]])
            leaves.append((s, at[Action(backward, s, played - 1)], chain.last(slice(0, s)) + tail, before))
            leaves.append((s, at[Action("F", s, played - 1)], chain.late(slice(s + 1, None)) + chain.last(slice(None)) + tail, before + 2 * behind))
        leaves.append((-1, len(own) - 1, chain.tail(stages), 0))
        for s, first, before, sent in enters:
            for t, last, after, sent_after in leaves:
                if first <= last and (not is_many or s == t or t == -1):
                    found.append(before + counts[last + 1] - counts[first] + after + more)
                    sends.append(sent + sent_after)
    return np.array(found), np.array(sends)


class _Chains:
    """Actions of a run of stages, one each. `is_alone`: a step has one micro-batch, the first and the last."""

    def __init__(self, num_stages: int, *, is_alone: bool) -> None:
        self.num_stages = num_stages
        self.is_alone = is_alone

    def _of(self, stages: slice | list[int], kind: int) -> np.ndarray:
        one = np.zeros((self.num_stages, 7))
        one[stages, kind] = 1
        return one

    def first(self, stages: slice) -> np.ndarray:
        """Forwards of the first micro-batch."""
        return self._of(stages, _FIRST)

    def early(self, stages: slice) -> np.ndarray:
        """Backwards of the first micro-batch."""
        return self._of(stages, _LAST if self.is_alone else _BACKWARD)

    def late(self, stages: slice) -> np.ndarray:
        """Forwards of the last micro-batch."""
        return self._of(stages, _FIRST if self.is_alone else _FORWARD)

    def last(self, stages: slice) -> np.ndarray:
        """Backwards of the last micro-batch."""
        return self._of(stages, _LAST)

    def tail(self, stages: list[int]) -> np.ndarray:
        return self._of(stages, _TAIL)
