"""The one question the planner asks: how long does this take here?"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from costmodel.opkey import Collective, OpKey, OpTime


class Prices(Protocol):
    """Prices of operators and collectives on one cluster. Pure: equal questions get equal answers."""

    @property
    def source(self) -> str:
        """Where they come from: "analytic" or "measured"."""
        ...

    def op(self, key: OpKey, device: int = 0) -> OpTime:
        """Seconds of an operator call on the device of global rank `device`."""
        ...

    def collective(self, collective: Collective) -> float:
        """Seconds of one collective, alone on its links except for its concurrent twins."""
        ...

    def optimizer_s(self, num_elements: int, optimizer: str, num_bytes_per_element: float, device: int = 0) -> float:
        """Seconds of an optimizer step over `num_elements` local elements."""
        ...

    def memory_limit_bytes(self, device: int = 0) -> int:
        """Usable memory of a device."""
        ...

    def peak_flops_per_s(self, dtype: str, device: int = 0) -> float:
        """Dense peak of a device for a dtype."""
        ...

    def assumptions(self) -> tuple[str, ...]:
        """What these prices rest on, one line each, for the report."""
        ...


@runtime_checkable
class Slowing(Protocol):
    """Prices that say how much a collective slows the compute beside it."""

    def slowdown(self, device: int = 0) -> float:
        """Factor on compute while a collective runs beside it on the device of global rank `device` (costmodel/overlap.py)."""
        ...


def slowdown(prices: Prices, device: int = 0) -> float:
    """Factor on compute beside a collective; 1 where `prices` do not say."""
    return prices.slowdown(device) if isinstance(prices, Slowing) else 1.0
