"""Spine: a longest path of blocks of which each waits, in both passes, for the one before it.

The spine of a chain is all of its blocks. Two towers that meet in one loss are none: a stage of the second runs while the first runs, and only the
blocks along one tower and after it wait for each other. Block b waits for block a where it reads a value with a gradient of a, whose gradient a's backward
pass then waits for; a value without one is waited for in one pass alone and does not count. Cut anywhere, the stages with blocks of the spine wait
for each other in its order, so that what holds of a chain's blocks holds of the spine's; what else is on a stage only adds to it.

Of all paths, the one with most FLOPs, then most blocks: P(b) = w(b) + max of P(a) over the blocks a that b waits for. Any path would be sound.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoplan.choose import Outline
from autoplan.least import Least


@dataclass(frozen=True)
class Spine:
    """`blocks` of the path in order; `counts` of each pattern's on it; `num_off` blocks that do something and are not on it;
    `flops` of one forward pass; `sent`: values with a
    gradient that each block but the last gives to the next."""

    blocks: tuple[int, ...]
    counts: Mapping[str, int]
    num_off: int
    flops: int
    sent: Mapping[int, tuple[str, ...]]

    def of(self, blocks: Mapping[str, Least]) -> Mapping[str, Least]:
        """Pattern -> the least of one block, as often as it is on the spine."""
        return {p: replace(b, count=self.counts[p]) for p, b in blocks.items() if self.counts[p]} if self.num_off else blocks


def spine_of(outline: Outline) -> Spine:
    """The spine of a graph."""
    graph = outline.graph
    given: dict[tuple[int, int], list[str]] = {}
    for name, readers in outline.crossing.items():
        if graph.values[name].requires_grad:
            for reader in readers:
                given.setdefault((outline.block_of[graph.producer[name]], reader), []).append(name)
    before: dict[int, list[int]] = {}
    for source, reader in given:
        before.setdefault(reader, []).append(source)
    paths: dict[int, tuple[int, int]] = {}  # block -> FLOPs and blocks of the longest path that ends with it
    came_from: dict[int, int] = {}
    for number in outline.blocks:
        flops, length = sum(graph.ops[i].flops for i in outline.indices(graph.blocks[number])), 1
        sources = [source for source in before.get(number, ()) if source < number]
        if sources:
            came_from[number] = max(sources, key=lambda source: (paths[source], source))
            flops, length = flops + paths[came_from[number]][0], length + paths[came_from[number]][1]
        paths[number] = flops, length
    path = [max(paths, key=lambda number: (paths[number], number))] if paths else []
    while path and path[-1] in came_from:
        path.append(came_from[path[-1]])
    blocks = tuple(reversed(path))
    counts = dict(outline.counts)
    off = [number for number in outline.blocks if number not in frozenset(blocks)]
    for number in off:
        counts[graph.blocks[number].pattern] -= 1
    sent = {a: tuple(given[a, b]) for a, b in itertools.pairwise(blocks)}
    return Spine(blocks, counts, len(off), paths[blocks[-1]][0] if blocks else 0, sent)
