"""Paced devices that nobody has looked at: drawn by chance, with odd shapes penalised and one straggler."""

from __future__ import annotations

import random
from typing import Any

from costmodel.paced import PacedDevices
from costmodel.pacedfile import read


def drawn(num_ranks: int, seed: int) -> PacedDevices:
    """Devices on two boards. The same for the same seed."""
    draw = random.Random(seed)
    near = {"latency_ms": _between(draw, 0.3, 1), "mb_per_s": _between(draw, 3, 12)}
    far = {"latency_ms": _between(draw, 1, 4), "mb_per_s": near["mb_per_s"] / _between(draw, 2, 6)}
    product = {"op": "aten.linear*", "base_ms": _between(draw, 0.5, 3), "gflops_per_s": _between(draw, 0.03, 0.15), "backward_weight": _between(draw, 0.8, 1.5)}
    attention = {"op": "aten.scaled_dot_product_attention*", "base_ms": _between(draw, 1, 4), "mb_per_s": _between(draw, 5, 15)}
    content: dict[str, Any] = {
        "name": f"drawn {num_ranks} {seed}",
        "paced": True,
        "nodes": 2,
        "devices_per_node": num_ranks // 2,
        "memory_gib": 0.05,
        "ops": [
            product | {"multiple": draw.choice((8, 12, 16)), "odd_factor": _between(draw, 1.2, 2.5)},
            attention | {"multiple": draw.choice((4, 8)), "odd_factor": _between(draw, 1.2, 2), "backward_input": _between(draw, 1, 2)},
            {"op": "*", "base_ms": _between(draw, 0.05, 0.3), "mb_per_s": _between(draw, 50, 200)},
        ],
        "links": [{"name": "board", "domain": num_ranks // 2, **near}, {"name": "wire", **far}],
        "slowdowns": {draw.randrange(num_ranks): _between(draw, 1.2, 2)},
        "optimizer": {"base_ms": _between(draw, 2, 8), "ns_per_element": _between(draw, 100, 400)},
    }
    return read(content, content["name"])


def _between(draw: random.Random, low: float, high: float) -> float:
    """Evenly on a logarithmic scale, three digits."""
    return float(f"{low * (high / low) ** draw.random():.3g}")
