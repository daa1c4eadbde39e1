"""Room: what memory leaves for the blocks of a model on every rank, before anything is placed.

A stage keeps the states of its blocks, divided over all that can divide them, and of every micro-batch it holds (autoplan/holding.py) what every
option saves, or what enters the blocks if they are recomputed. With P bytes of states and A saved bytes of one block of the commonest pattern, and
c_j micro-batches that rank j holds at once:

    cap_j = floor((limit - states of the first and the last block where they must be - what one recomputed block makes again - messages) / (P + c_j A))

All blocks together need n limits at most, else nothing fits. Plans faster than `below_s` have less room still: `Room.budgets`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np

from autoplan.choose import Outline
from autoplan.holding import least_held, long_enough, moments
from autoplan.least import Least, main_of
from autoplan.mixing import Mixture, hull
from autoplan.price import itemsize
from autoplan.problem import Budget
from autoplan.replay import Step
from autoplan.space import MIXED, RECOMPUTES
from autoplan.spine import Spine
from costmodel.memory import Widths

_MIXTURES = (0.25, 0.5, 0.75)  # of two moments

Counts = Callable[[str, tuple[int, ...], int], tuple[int, ...]]  # (schedule, stage ranks, micro-batches) -> held on each rank


class Room:
    """Memory of one model on ranks of `limit_bytes`."""

    def __init__(self, outline: Outline, width: Widths, limit_bytes: int, spine: Spine) -> None:
        self.outline = outline
        self.width = width
        self.limit_bytes = limit_bytes
        self.spine = spine
        graph = outline.graph
        users = {name: len(blocks) - 1 for name, blocks in outline.tied.items()}
        tied = {graph.blocks[n].pattern for blocks in outline.tied.values() for n in blocks}
        self.unshared = frozenset(p for p in outline.examples if p not in tied)
        self.width_at_rest = max((itemsize(v.spec.dtype) for v in graph.parameters()), default=4)
        self.again = sum(again * math.prod(graph.values[name].spec.shape) for name, again in users.items())

    def ends(self, step: Step, main: str) -> dict[int, int]:
        """The first and the last block, where they are not of the pattern `main`, and the pipeline rank on which they must be."""
        ends = ((self.outline.blocks[0], step.stage_ranks[0]), (self.outline.blocks[-1], step.stage_ranks[-1]))
        return {number: rank for number, rank in ends if self.outline.graph.blocks[number].pattern != main}

    def _each(self, main: Least, again_s: float, step: Step) -> np.ndarray:
        """Seconds g_j that a block adds to a step on each stage, beyond its one micro-batch in W (autoplan/bounds.py)."""
        n, m = len(step.stage_ranks), step.num_micro_batches
        seconds, back = main.seconds + again_s, main.backward_s + again_s
        free = np.full(n, m - 1.0) if step.schedule == "gpipe" else np.maximum(0.0, m - n + np.arange(n))
        return free * seconds + (m - 1 - free) * back

    def budgets(self, blocks: Mapping[str, Least], step: Step, recompute: str, below_s: float) -> tuple[Budget, ...]:
        """What memory leaves for a block of the commonest pattern in any plan that fits and takes less than `below_s`.

        Stage j has n_j <= c_j blocks, c_j = (below_s - W) / g_j, or below_s / (m w) where the graph is no chain (autoplan/spine.py). So the k stages
        that hold most micro-batches have at least N_k = N - sum of the other c_j blocks, and with P bytes of parameters and A saved bytes a block

            N_k * states(P) + H_k * A <= k * limit,   H_k = least sum of n_j held_j over these stages

        (recomputed: H_k times what enters it, and A once on every stage that has any; selectively: A is what is kept, beside what enters). All stages
        together hold the other blocks too. Where a rank has several stages, or the backward pass is split, the n_j are those of rank j, which has
        m w of each, and holds what `crowds` says; some of that is `surely` there, as one block of each of its stages is.
        """
        n = step.num_ranks
        name, main = main_of(blocks)
        is_plain = not step.is_split and n == len(step.stage_ranks)
        if n < len(step.stage_ranks) and not self._is_inside(name):
            return ()  # which stages have blocks of the pattern is not known
        full = recompute == "full"
        again_s = main.again_s(recompute)
        total = sum(b.count * (b.seconds + b.again_s(recompute)) for b in blocks.values())
        held, surely = (self.held(step), np.zeros(n)) if is_plain else _crowded(step, main.count / n)
        order = np.argsort(-held, kind="stable")
        caps = np.full(n, float(main.count))
        if n > 1 and below_s < float("inf"):
            is_chain = is_plain and not self.spine.num_off
            each = self._each(main, again_s, step)[order] if is_chain else np.full(n, step.num_micro_batches * (main.seconds + again_s))
            room_s = max(0.0, below_s - total) if is_chain else below_s
            caps = np.minimum(caps, np.floor(room_s / np.maximum(each, 1e-30) * (1 + 1e-9)))
        held, surely = held[order], surely[order]
        states = self.state_bytes(step) / self.width_at_rest if name in self.unshared and main.num_trained == main.num_elements else 0.0
        others = [(p, b) for p, b in blocks.items() if p != name]
        other_bytes = sum(b.count * (b.num_trained if p in self.unshared else 0) * self.state_bytes(step) for p, b in others)
        other_bytes += held.min() * sum(b.count * b.held_bytes(recompute) for _, b in others)
        found: list[Budget] = []
        for k in range(1, n + 1):
            count = main.count - float(caps[k:].sum())
            if count <= 0.0:
                continue
            if caps[:k].sum() < count:
                return (Budget(-1.0),)  # not all blocks have time
            kept, blocks_held = count, float(surely[:k].sum())
            for cap, times in zip(caps[:k][::-1], held[:k][::-1], strict=True):
                blocks_held += min(cap, kept) * times
                kept -= min(cap, kept)
            num_stages = int(np.searchsorted(np.cumsum(np.sort(caps[:k])[::-1]), count)) + 1  # that have any
            limit = k * self.limit_bytes - (other_bytes if k == n else 0.0)
            if full and main.is_recomputed:
                found.append(Budget(limit - blocks_held * main.enter_bytes, count * states, num_stages))
            else:
                entered = blocks_held * main.enter_bytes if recompute == "selective" and main.is_recomputed else 0.0
                found.append(Budget(limit - entered, count * states, blocks_held))
        return tuple(found)

    @staticmethod
    def held(step: Step) -> np.ndarray:
        """Micro-batches that each stage holds at once."""
        n, m = len(step.stage_ranks), step.num_micro_batches
        return np.full(n, m) if step.schedule == "gpipe" else np.minimum(n - np.arange(n), m)

    def memory_bytes(self, blocks: Mapping[str, Least], step: Step, recompute: str) -> int:
        """Least bytes of the fullest rank, were all alike."""
        n = step.num_ranks
        return int(self.all_bytes(blocks, step, recompute) / n)

    def state_bytes(self, step: Step) -> float:
        """Bytes at rest of one element that is trained, on one rank."""
        width, shards = self.width, step.shards
        zero = 0 if shards == 1 else min(step.zero, 1) if step.is_split else step.zero
        return (
            width.parameter / (shards if zero == 3 else 1)
            + width.gradient / (shards if zero >= 2 else 1)
            + (width.master + (0 if step.workers else width.optimizer / max(1, len(step.servers)))) / (shards if zero >= 1 else 1)
        )

    def all_bytes(self, blocks: Mapping[str, Least], step: Step, recompute: str) -> float:
        """States of all stages, what each keeps of one micro-batch, and what one recomputed block saves."""
        trained = max(0, sum(b.count * b.num_trained for b in blocks.values()) - self.again)
        kept = sum(b.count * b.held_bytes(recompute) for b in blocks.values())
        transient = max(b.transient_bytes(recompute) for b in blocks.values())
        return trained * self.state_bytes(step) + kept + transient

    def caps(self, blocks: Mapping[str, Least], step: Step, recompute: str, counts: Counts) -> np.ndarray | None:
        """Most blocks of the commonest pattern on each rank; None where not all blocks have room."""
        ranks = step.stage_ranks
        n, (name, main) = step.num_ranks, main_of(blocks)
        if self.all_bytes(blocks, step, recompute) > n * self.limit_bytes:
            return None
        states, room = self._left(blocks, step, recompute)
        held = float(main.held_bytes(recompute))
        if self._plays(step, name, counts):
            caps = self._caps_in_parts(step, room, states, main, held)
        else:
            caps = room / np.maximum(states + np.array(counts(step.schedule, ranks, step.num_micro_batches)) * held, 1e-9)
        caps = np.clip(np.floor(caps), 0, main.count)
        return caps if caps.sum() >= main.count else None

    def mixture(self, blocks: Mapping[str, Least], step: Step, counts: Counts) -> Mixture:
        """What memory asks of plans that mix ways of recomputing."""
        name, main = main_of(blocks)
        states, room = self._left(blocks, step, MIXED)
        n, ranks, m = step.num_ranks, step.stage_ranks, step.num_micro_batches
        if self._plays(step, name, counts):
            held, more, most, put_off = crowds(step.schedule, ranks, m)
        else:
            held = np.array(counts(step.schedule, ranks, m), dtype=float)[:, None]
            more, most, put_off = (np.zeros_like(held) for _ in range(3))
        ways = hull(main.ways or tuple((main.again_s(way), float(main.held_bytes(way))) for way in RECOMPUTES))
        is_plain = n == len(ranks)  # else the block that is made again need not be on the stage that runs at the fullest moment
        made = min(main.transient_bytes(way) for way in RECOMPUTES[1:]) if is_plain else 0
        return Mixture(ways, float(main.saved_bytes), states + main.put_off_bytes * put_off, room, held, more, most, float(made), main.count)

    def _left(self, blocks: Mapping[str, Least], step: Step, recompute: str) -> tuple[float, np.ndarray]:
        """Bytes of states of a block of the commonest pattern, and what each rank has left for these blocks."""
        name, main = main_of(blocks)
        states = 0.0 if name not in self.unshared else main.num_trained * self.state_bytes(step)
        room = np.full(step.num_ranks, max(0.0, self.limit_bytes - main.transient_bytes(recompute)))
        graph = self.outline.graph
        there: dict[int, float] = {}  # elements of the ends on a rank, of which those of tied patterns may be the same
        for number, rank in self.ends(step, name).items():
            pattern = graph.blocks[number].pattern
            elements = blocks[pattern].num_trained
            there[rank] = there.get(rank, 0.0) + elements if pattern in self.unshared else max(there.get(rank, 0.0), elements)
        for rank, elements in there.items():
            room[rank] -= elements * self.state_bytes(step)
        if (
            step.zero == 3 and step.shards > 1 and not step.is_split and name in self.unshared
        ):  # a unit of the stage's, gathered; these have a main block or need no room for one
            room -= self.width.parameter * main.num_elements
        if not self.spine.num_off:  # two messages of each stage that other ranks send to
            message = min((blocks[graph.blocks[n].pattern].leave_bytes for n in self.spine.blocks[:-1]), default=0)
            for before, rank in itertools.pairwise(step.stage_ranks):
                room[rank] -= 2 * message if rank != before else 0
        return states, np.maximum(room, 0.0)

    def _plays(self, step: Step, main: str, counts: Counts) -> bool:
        """Whether memory is counted by the moments of the schedule's order."""
        return counts is least_held and (self._is_inside(main) if step.num_ranks < len(step.stage_ranks) else step.is_split)

    def _is_inside(self, pattern: str) -> bool:
        """Whether all blocks but the first and the last are of the pattern."""
        return all(self.outline.graph.blocks[number].pattern == pattern for number in self.outline.blocks[1:-1])

    @staticmethod
    def _caps_in_parts(step: Step, room: np.ndarray, states: float, main: Least, held: float) -> np.ndarray:
        """Most blocks on ranks of several stages, each of which has one, but for the first and the last, which may have others: a rank with c_s
        micro-batches saved on stage s at some moment, and q put off, has k blocks only if
        k (states + q put off) + held (sum of c_s + (k - stages) * min of c_s) <= room."""
        least, more, _, put_off = crowds(step.schedule, step.stage_ranks, step.num_micro_batches)
        caps = (room[:, None] - held * more) / np.maximum(states + held * least + main.put_off_bytes * put_off, 1e-9)
        return np.minimum(caps.min(axis=1), main.count)


def _crowded(step: Step, count: float) -> tuple[np.ndarray, np.ndarray]:
    """Of each rank, micro-batches that every block of it holds, and those that it holds besides: at the moment that weighs most with `count` blocks."""
    least, more, *_ = crowds(step.schedule, step.stage_ranks, step.num_micro_batches)
    moment = np.argmax(least * count + more, axis=1)[:, None]
    return np.take_along_axis(least, moment, axis=1)[:, 0], np.take_along_axis(more, moment, axis=1)[:, 0]


@lru_cache(maxsize=1024)
def crowds(name: str, stage_ranks: tuple[int, ...], num_micro_batches: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """least[r, t], more[r, t], most[r, t] and put_off[r, t]: of the moments t of rank r, the fewest micro-batches that a stage of its has saved; how many more
    than that those of its stages have together which are sure to have a block (all but the first and the last one of the model), and how many more at most
    one of them; and the fewest that a stage has put off. Two moments of a rank bind together, so that their means do: mixtures are moments too."""
    if (played := long_enough(name, stage_ranks, num_micro_batches)) < num_micro_batches:
        return crowds(name, stage_ranks, played)
    last = len(stage_ranks) - 1
    found = []
    for own in moments(name, stage_ranks, num_micro_batches):
        saved, num_stages = np.unique(np.concatenate([own.saved, own.put_off], axis=1), axis=0).astype(float), len(own.stages)
        is_inner = np.array([s not in (0, last) for s in own.stages])
        if num_stages > 1 and len(saved) > 1 and not own.put_off.any():
            one, other = np.triu_indices(len(saved), 1)
            saved = np.concatenate([saved, *(share * saved[one] + (1 - share) * saved[other] for share in _MIXTURES), saved.mean(axis=0)[None]])
        saved, put_off = saved[:, :num_stages], saved[:, num_stages:].min(axis=1)
        least = saved.min(axis=1)
        beyond = (saved - least[:, None]) * is_inner
        more, most = beyond.sum(axis=1), beyond.max(axis=1)
        if own.put_off.any():
            kept = np.unique(np.stack([least, more, most, put_off]), axis=1)
        else:
            order = np.lexsort((-more, -least))
            is_more = np.concatenate([[True], more[order][1:] > np.maximum.accumulate(more[order])[:-1]])  # than all with as large a least
            kept = np.stack([least, more, most, put_off])[:, order][:, is_more]
        found.append(kept)
    width = max(kept.shape[1] for kept in found)
    least, more, most, put_off = np.stack([np.pad(kept, ((0, 0), (0, width - kept.shape[1])), mode="edge") for kept in found], axis=1)
    return least, more, most, put_off
