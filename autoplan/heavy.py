"""The least seconds of the heaviest operators: a bound that is cheap, because most operators of a block are light.

Of the operators with at least SHARE of their block's FLOPs, whatever the options,

    W >= sum over blocks of sum over heavy operators of min over options of (forward_s + backward_s)

without what any of them sends. It rules out tensor axes that leave a heavy operator whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoplan.choose import Chooser

SHARE = 0.02


def heavy_s(chooser: Chooser) -> Mapping[str, float]:
    """Pattern -> seconds of one micro-batch through the heavy operators of one block, both passes, at least."""
    outline, prices = chooser.outline, chooser.prices
    graph = outline.graph
    found = {}
    for pattern, number in outline.examples.items():
        indices = outline.indices(graph.blocks[number])
        enough = SHARE * sum(graph.ops[i].flops for i in indices)
        found[pattern] = sum(prices.least_s(i) for i in indices if graph.ops[i].flops >= max(1.0, enough))
    return found
