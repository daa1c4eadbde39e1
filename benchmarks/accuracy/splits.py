"""How many transformer layers each pipeline stage holds.

stated as layers                       plan.layer_partitions
stated as cuts of a list of modules    notes: "pipeline layer split (30 entries ...) [0, 9, 15, 21, 30]"; DeepSpeed's list has a cast, the
                                       embedding and a transposition in front of the layers, a transposition, the norm and the head behind them
tables count as layers                 notes: "embedding counted as a layer": even over layers + 2, one fewer at either end
DeepSpeed                              ceil(layers / stages) each, the last stage short (its balanced partition), where that leaves it one
others                                 even, the remainder in front
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

_FRONT = 3
_CUTS = re.compile(r"pipeline layer split \(\d+ entries[^)]*\) \[([\d, ]+)\]")


def layers_of_stages(layers: int, stages: int, plan: Mapping[str, Any], notes: str, deepspeed: bool) -> tuple[int, ...]:
    """Layers by stage, `stages` of them. Rules: the module's text."""
    if stated := plan.get("layer_partitions"):
        return tuple(int(count) for count in stated)
    if stages == 1:
        return (layers,)
    if found := _CUTS.search(notes):
        cuts = [min(max(int(cut) - _FRONT, 0), layers) for cut in found.group(1).split(",")]
        if len(cuts) == stages + 1:
            return tuple(end - start for start, end in itertools.pairwise(cuts))
    if "embedding counted as a layer" in notes:
        counts = list(even(layers + 2, stages))
        counts[0], counts[-1] = counts[0] - 1, counts[-1] - 1
        return tuple(counts)
    most = -(-layers // stages)
    if deepspeed and layers > most * (stages - 1):
        return (most,) * (stages - 1) + (layers - most * (stages - 1),)
    return even(layers, stages)


def even(items: int, parts: int) -> tuple[int, ...]:
    """As even as can be, the remainder in front."""
    return tuple(items // parts + (i < items % parts) for i in range(parts))
