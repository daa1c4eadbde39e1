"""The least that one block of each pattern takes, whatever its options: seconds, elements, and bytes that it keeps and sends.

seconds = sum over operators of min over options of (forward_s + backward_s), and each pass by itself likewise
saved   = sum over storages of the least form that every option keeps;  leaves = values that the next block of the spine waits for
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autoplan.choose import Boundary, Chooser
from autoplan.gridprices import weight_parts
from autoplan.layout import Split
from autoplan.problem import Choice, Item
from autoplan.space import MIXED, RECOMPUTES


@dataclass(frozen=True, slots=True)
class Least:
    """What one block of a pattern takes at least, whatever its options. `seconds` of one micro-batch, without what is run again."""

    count: int
    is_recomputed: bool  # where recomputation is full
    seconds: float
    forward_s: float
    backward_s: float
    num_elements: int
    num_trained: int
    saved_bytes: int
    enter_bytes: int
    weights_s: float = 0.0  # of `backward_s`, what a split backward pass may put off, at most
    repeated_s: float = 0.0  # what selective recomputation repeats
    kept_bytes: int = 0  # and keeps beside what enters
    repeated_bytes: int = 0  # and makes again, of `saved_bytes`
    leave_bytes: int = 0  # of values with a gradient that the next block of the spine reads, one rank's part
    whole_s: float = 0.0  # what full recomputation repeats
    put_off_bytes: int = 0  # what a split backward pass holds between its halves
    ways: tuple[tuple[float, float], ...] = ()  # (what is run again, bytes kept) of recomputation, of which every choice is beyond a mixture

    def again_s(self, recompute: str) -> float:
        """What a way of recomputing repeats at least; one that mixes ways may repeat nothing."""
        return {"selective": self.repeated_s, "full": self.whole_s}.get(recompute, 0.0) if self.is_recomputed else 0.0

    def held_bytes(self, recompute: str) -> int:
        if recompute == MIXED:
            return min(self.held_bytes(way) for way in RECOMPUTES)
        if recompute == "none" or not self.is_recomputed:
            return self.saved_bytes
        return self.enter_bytes + (self.kept_bytes if recompute == "selective" else 0)

    def transient_bytes(self, recompute: str) -> int:
        """What a recomputed block makes again at once."""
        if recompute in ("none", MIXED) or not self.is_recomputed:
            return 0
        return self.repeated_bytes if recompute == "selective" else self.saved_bytes


def least_blocks(chooser: Chooser, boundaries: tuple[Boundary, ...], sent: Mapping[int, tuple[str, ...]]) -> Mapping[str, Least]:
    """Pattern -> the least of one block, operators alone. `sent`: block -> values that the next block of the spine waits for."""
    outline, local = chooser.outline, chooser.local
    leaving = _leaving(chooser, sent)
    found = {}
    for pattern, number in outline.examples.items():
        block = outline.graph.blocks[number]
        items, saved_bytes = chooser.prices.items(outline.indices(block))
        names = dict.fromkeys(name for item in items for name in item.operands if outline.graph.values[name].kind == "parameter")
        sizes = {
            name: math.prod(outline.graph.values[name].spec.shape) // local.degree // weight_parts(local, name) // local.parameter_parts(name) for name in names
        }
        entering = []
        for boundary in boundaries:
            enters, _ = outline.boundary_of(number, boundary)
            kept = ((name, layout) for name, layout in enters.items() if outline.graph.values[name].requires_grad)
            entering.append(sum(local.num_bytes(name) // (local.degree if isinstance(layout, Split) else 1) for name, layout in kept))
        found[pattern] = Least(
            outline.counts[pattern],
            outline.is_recomputed(pattern),
            sum(min(choice.seconds for choice in item.choices) for item in items),
            sum(min(choice.forward_s for choice in item.choices) for item in items),
            sum(min(choice.backward_s for choice in item.choices) for item in items),
            sum(sizes.values()),
            sum(size for name, size in sizes.items() if outline.graph.values[name].requires_grad),
            _saved(items, saved_bytes, local.degree),
            min(entering, default=0),
            sum(max(choice.weights_s for choice in item.choices) for item in items),
            sum(min(choice.forward_s - choice.kept.seconds for choice in item.choices) for item in items),
            sum(min(_kept_bytes(item, choice, local.degree) for choice in item.choices) for item in items),
            _saved(items, saved_bytes, local.degree, leave=frozenset(name for item in items for choice in item.choices for name, _ in choice.kept.results)),
            leaving.get(pattern, 0),
            sum(min(choice.forward_s for choice in item.choices) for item in items),
            _put_off(items),
        )
    return found


def _put_off(items: tuple[Item, ...]) -> int:
    """Bytes that wait for the weights' half of a backward pass, whatever the options."""
    found: dict[str, int] = {}
    for item in items:
        every = [dict(choice.put_off) for choice in item.choices]
        for name in every[0]:
            found[name] = max(found.get(name, 0), min(one.get(name, 0) for one in every))
    return sum(found.values())


def _kept_bytes(item: Item, choice: Choice, degree: int) -> int:
    """Bytes that selective recomputation keeps of an operator, at least: of a sum, those of one that is divided."""
    return sum(size // (degree if choice.writes_sum(name, item.outputs) else 1) for name, size in choice.kept.results)


def _leaving(chooser: Chooser, sent: Mapping[int, tuple[str, ...]]) -> Mapping[str, int]:
    """Pattern -> least bytes of what one of its blocks gives to the next one, on one rank: whole values may cross in pieces."""
    values, local = chooser.outline.graph.values, chooser.local
    alike: dict[tuple[str, tuple[object, ...]], tuple[str, ...]] = {}  # of the blocks of a pattern that give values of the same shapes, one
    for number, names in sent.items():
        alike.setdefault((chooser.outline.graph.blocks[number].pattern, tuple((values[name].spec, values[name].dims) for name in names)), names)
    found: dict[str, int] = {}
    for (pattern, _), names in alike.items():
        num_bytes = sum(local.num_bytes(name) // local.degree for name in names)
        found[pattern] = min(found.get(pattern, num_bytes), num_bytes)
    return found


def _saved(items: tuple[Item, ...], num_bytes: Mapping[str, int], degree: int, leave: frozenset[str] = frozenset()) -> int:
    """Bytes that a block keeps for its backward pass, whatever its options, besides the tensors `leave`."""
    kept: dict[str, int] = {}
    extra = 0
    for item in items:
        extra += min(choice.extra_bytes for choice in item.choices)
        for root in dict.fromkeys(root for choice in item.choices for root, _ in choice.saved if root not in leave):
            forms = [max((num_bytes[r] // (degree if divided else 1) for r, divided in choice.saved if r == root), default=0) for choice in item.choices]
            kept[root] = max(kept.get(root, 0), min(forms))
    return extra + sum(kept.values())


def main_pattern(blocks: Mapping[str, Least]) -> str:
    """The pattern whose blocks weigh most together."""
    return main_of(blocks)[0]


def main_of(blocks: Mapping[str, Least]) -> tuple[str, Least]:
    """That pattern and its block."""
    return max(blocks.items(), key=lambda item: item[1].count * item[1].seconds)
