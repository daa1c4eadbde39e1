"""Seconds that the blocks of a pattern add to the actions of a schedule at least, by how a plan stores.

ZeRO moves parameters and gradients beside passes (autoplan/replay.py has the formulas). With f, b seconds of one micro-batch through a block
(recomputation in b), c what is left of its seconds (in either pass), g and r seconds to gather its parameters and to reduce its gradients, and F, B, G, R
their sums over any blocks of one stage, a pass that moves beside compute takes max(F + k G, G) (k: how much traffic slows, costmodel/overlap.py), which
for any choice of one of the two for all blocks is at least the sum of the chosen; where compute and transfers take turns it is F + G. The larger sum
over the model is chosen. A split backward pass gathers before its first forward and reduces after its last half: F + G, W + R.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoplan.replay import Step
from costmodel.overlap import slowed_s


@dataclass(frozen=True, slots=True)
class Slot:
    """One block of a pattern: seconds of its actions in the middle of a step and at its ends. `rest_s` more are in some of the passes of a micro-batch;
    `tail_s` follow the last."""

    count: int
    first_forward_s: float
    forward_s: float
    backward_s: float
    last_backward_s: float
    last_weights_s: float
    rest_s: float
    tail_s: float
    gather_s: float
    reduce_s: float


@dataclass(frozen=True, slots=True)
class Slots:
    """All patterns; and which passes are told by what moves beside them, so that no rest of a block counts in them."""

    each: Mapping[str, Slot]
    first_is_moved: bool
    forward_is_moved: bool
    backward_is_moved: bool
    last_is_moved: bool

    @property
    def first_s(self) -> float:
        """All blocks' first forwards."""
        return sum(slot.count * slot.first_forward_s for slot in self.each.values())

    @property
    def backward_s(self) -> float:
        return sum(slot.count * slot.backward_s for slot in self.each.values())

    @property
    def last_s(self) -> float:
        """All blocks' last backwards (of inputs)."""
        return sum(slot.count * slot.last_backward_s for slot in self.each.values())


@dataclass(frozen=True, slots=True)
class Block:
    """What is known of one block: its `slots` in the module's letters."""

    count: int
    forward_s: float
    backward_s: float  # of a split pass: of the inputs
    rest_s: float
    tail_s: float
    gather_s: float
    reduce_s: float


def slots_of(blocks: Mapping[str, Block], step: Step) -> Slots:
    """The slots of all patterns under a way of storing."""

    def total(name: str) -> float:
        return sum(block.count * getattr(block, name) for block in blocks.values())

    def beside(compute: str, *moved: str) -> tuple[Mapping[str, float], bool]:
        """Pattern -> seconds of a pass, and whether transfers stand for its compute."""
        if not step.overlap:
            return {p: getattr(b, compute) + sum(getattr(b, name) for name in moved) for p, b in blocks.items()}, False
        slowed = {p: getattr(b, compute) + slowed_s(sum(getattr(b, name) for name in moved), step.slowdown) for p, b in blocks.items()}
        if sum(total(name) for name in moved) <= sum(b.count * slowed[p] for p, b in blocks.items()):
            return slowed, False
        return {p: sum(getattr(b, name) for name in moved) for p, b in blocks.items()}, True

    plain_f, plain_b = ({p: getattr(b, name) for p, b in blocks.items()} for name in ("forward_s", "backward_s"))
    first, forward, backward, last = (plain_f, False), (plain_f, False), (plain_b, False), (plain_b, False)
    weights: Mapping[str, float] = dict.fromkeys(blocks, 0.0)
    if step.zero and step.shards > 1:
        if step.is_split:
            first = ({p: b.forward_s + b.gather_s for p, b in blocks.items()}, False)
            weights = {p: b.reduce_s for p, b in blocks.items()}
        elif step.zero == 3:
            first = forward = beside("forward_s", "gather_s")
            backward = last = beside("backward_s", "gather_s", "reduce_s")
        else:
            first, last = beside("forward_s", "gather_s"), beside("backward_s", "reduce_s")
            backward = last if step.zero == 2 else backward
    each = {
        p: Slot(b.count, first[0][p], forward[0][p], backward[0][p], last[0][p], weights[p], b.rest_s, b.tail_s, b.gather_s, b.reduce_s)
        for p, b in blocks.items()
    }
    return Slots(each, first[1], forward[1], backward[1], last[1])
