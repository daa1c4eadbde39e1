"""Which plans are tried on which models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.dist.parity import Case

# name -> (ranks, constraints)
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, dict(dp=2, tp=1, pp=1, zero=0)),
    "zero3": (2, dict(dp=2, tp=1, pp=1, zero=3)),
    "tp2": (2, dict(dp=1, tp=2, pp=1)),
    "pp2": (2, dict(dp=1, tp=1, pp=2)),
    "dp2 x tp2 x pp2": (8, dict(dp=2, tp=2, pp=2)),
    "tp4": (4, dict(dp=1, tp=4, pp=1)),
}


def cases_for(num_ranks: int, models: Iterable[str], names: Iterable[str] | None = None) -> list[Case]:
    """Two SGD steps in fp32 for every model under every plan of `num_ranks` ranks."""
    chosen = [name for name, (ranks, _) in PLANS.items() if ranks == num_ranks and (names is None or name in names)]
    return [Case(model, constraints=PLANS[name][1]) for name in chosen for model in models]
