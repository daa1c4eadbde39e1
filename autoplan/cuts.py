"""Stage boundaries: the best way to cut a chain of blocks into contiguous stages.

Given w_i, the seconds of block i for one micro-batch, and fits[j](a, b), whether stage j can hold blocks [a, b):

    best[1](b)     = W(0, b)                                      if fits[0](0, b)
    best[j + 1](b) = min over a of max(best[j](a), W(a, b))       if fits[j](a, b),  W(a, b) = w_a + ... + w_(b-1)

is the smallest possible slowest stage, in O(k n^2) vectorised steps. Among cuts with the same slowest stage the one with the
smallest sum of squares is taken (a second pass bounded by the optimum), then the one with the earliest boundaries, so
that equal inputs give equal cuts. A stage is never empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from autoplan.errors import InfeasibleError

# Relative slack within which two bottlenecks count as equal: sums of the same terms in another order.
_ROUNDING = 1e-12


def best_cuts(
    seconds: Sequence[float] | np.ndarray,
    num_stages: int,
    fits: Sequence[np.ndarray] | None = None,
    entry_s: np.ndarray | None = None,
    more_s: Sequence[np.ndarray] | None = None,
) -> tuple[int, ...] | None:
    """Starts of the stages and the end: num_stages + 1 indices from 0 to the number of blocks. None where no cut fits.

    `seconds` of every block, or a row of them for each stage where stages run on unequal devices. `entry_s[j, a]`: what stage j
    takes besides where it begins at block a (transfers on its link); `more_s[j][a, b]`: what it takes besides with blocks [a, b), infinity where it cannot.
    `fits[j][a, b]` is whether stage j can hold blocks [a, b), an (n + 1, n + 1) boolean array. Raises InfeasibleError where
    there are fewer blocks than stages.
    """
    per_stage = np.broadcast_to(np.asarray(seconds, dtype=float), (max(1, num_stages), np.shape(seconds)[-1]))
    n = per_stage.shape[1]
    if num_stages < 1 or n < num_stages:
        raise InfeasibleError(f"{num_stages} pipeline stages were asked for, but the model has {n} blocks that can be cut apart: use pp <= {n}")
    ends = np.concatenate([np.zeros((num_stages, 1)), np.cumsum(per_stage, axis=1)], axis=1)
    entry = np.zeros((num_stages, n + 1)) if entry_s is None else entry_s
    work = [own[None, :] - own[:, None] + first[:, None] for own, first in zip(ends, entry, strict=True)]  # work[j][a, b]
    if more_s is not None:
        work = [own + more for own, more in zip(work, more_s, strict=True)]
    forward = np.arange(n + 1)[None, :] > np.arange(n + 1)[:, None]
    allowed = [forward if fits is None else forward & fits[j] for j in range(num_stages)]
    bottleneck = _fill(work, allowed, np.maximum)[0][-1][n]
    if not np.isfinite(bottleneck):
        return None
    limit = bottleneck * (1 + _ROUNDING) + 1e-300
    square = [own * own for own in work]
    _, choice = _fill(square, [ok & (own <= limit) for ok, own in zip(allowed, work, strict=True)], np.add)
    cuts = [n]
    for j in range(num_stages - 1, 0, -1):
        cuts.append(int(choice[j][cuts[-1]]))
    return (0, *reversed(cuts)) if num_stages > 1 else (0, n)


def _fill(cost: Sequence[np.ndarray], allowed: Sequence[np.ndarray], combine: np.ufunc) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """best[j][b] and the a that gives it, for stages 0..j over blocks [0, b)."""
    best = [np.where(allowed[0][0], cost[0][0], np.inf)]
    choice = [np.zeros(cost[0].shape[0], dtype=int)]
    for ok, own in zip(allowed[1:], cost[1:], strict=True):
        table = np.where(ok, combine(best[-1][:, None], own), np.inf)
        choice.append(np.argmin(table, axis=0))
        best.append(table.min(axis=0))
    return best, choice


def dealt_cuts(num_before: int, num_units: int, num_after: int, num_ranks: int, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """Cuts that give every rank as many of `num_units` like blocks, where a rank has a stage of each of `num_chunks` runs of `num_ranks` stages: the stages
    of a run are alike, so that none waits for a longer one of its run; some runs have one block more a stage. `num_before` blocks go to the first
    stage besides, `num_after` to the last.

    A rank holds most micro-batches of the first runs, so that cuts with long last runs come first. What does not come out even is taken from the ends of
    the chain, which have the other blocks, or given to its middle. None where a stage would be empty.
    """
    small, more = divmod(num_units, num_ranks * num_chunks)
    if not small:
        return ()
    num_large = round(more / num_ranks)
    left = more - num_large * num_ranks
    found = []
    for large in itertools.combinations(reversed(range(num_chunks)), num_large):
        sizes = [small + (chunk in large) for chunk in range(num_chunks) for _ in range(num_ranks)]
        ends = (i // 2 if i % 2 else -1 - i // 2 for i in range(len(sizes)))  # the last, the first, the last but one, ...
        middle = len(sizes) // 2 - num_ranks // 2
        for _, stage in zip(range(-left), ends, strict=False):
            sizes[stage] -= 1
        for stage in range(middle, middle + left):
            sizes[stage] += 1
        if min(sizes) > 0:
            sizes[0] += num_before
            sizes[-1] += num_after
            found.append((0, *itertools.accumulate(sizes)))
    return tuple(found)


def shifted_cuts(cuts: Sequence[int], seconds: Sequence[float], stage_ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Cuts with one block less on a stage of the busiest rank and one more on a stage of the idlest, where a rank has several stages: those under which the
    busiest rank of all has less to do, the stages most alike first, then those with the block on a late stage, which holds few micro-batches."""
    ends = np.concatenate([[0.0], np.cumsum(seconds)])
    ranks, num_ranks = np.asarray(stage_ranks), max(stage_ranks) + 1

    def loads(at: Sequence[int]) -> np.ndarray:
        return np.diff(ends[np.asarray(at)])

    def busy_s(at: Sequence[int]) -> np.ndarray:
        return np.bincount(ranks, weights=loads(at), minlength=num_ranks)

    before = busy_s(cuts)
    limit_s = float(before.max()) * (1 - _ROUNDING)
    giving, taking = (np.flatnonzero(ranks == rank).tolist() for rank in (int(before.argmax()), int(before.argmin())))
    found: dict[tuple[int, ...], tuple[float, int]] = {}
    for giver, taker in itertools.product(giving, taking):
        step = 1 if giver < taker else -1  # a later taker begins earlier: the boundaries between move towards the giver
        moved = tuple(c - step if min(giver, taker) < i <= max(giver, taker) else c for i, c in enumerate(cuts))
        if all(a < b for a, b in itertools.pairwise(moved)) and busy_s(moved).max() < limit_s:
            own = loads(moved)
            found[moved] = (round(float(own @ own) / float(own.sum()) ** 2, 9), -taker)
    return tuple(sorted(found, key=lambda moved: (found[moved], moved)))


def layer_cuts(is_layer: Sequence[bool], layers: Sequence[int]) -> tuple[int, ...]:
    """Cuts that give each stage the stated number of layers. Blocks that are no layer stay with the layer before them,
    those before the first layer with the first stage.

    Raises InfeasibleError where the numbers do not add up, or a stage would be empty.
    """
    total = sum(is_layer)
    if sum(layers) != total:
        raise InfeasibleError(f"stage_layers={tuple(layers)} places {sum(layers)} layers, but the model has {total}")
    where = [i for i, layer in enumerate(is_layer) if layer]
    cuts = [0]
    placed = 0
    for count in layers[:-1]:
        placed += count
        # a last stage without layers takes the blocks behind the last layer; a first one those before the first
        cuts.append(where[placed] if placed < total else where[-1] + 1 if where else 0)
    cuts.append(len(is_layer))
    if any(a >= b for a, b in itertools.pairwise(cuts)):
        raise InfeasibleError(f"stage_layers={tuple(layers)} leaves a stage without any block: give each stage at least one layer")
    return tuple(cuts)
