"""Prices of devices that run at another speed than stated."""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.opkey import Collective, OpKey, OpTime
from costmodel.prices import Prices, slowdown


@dataclass(frozen=True)
class ScaledPrices:
    """`prices` with the operators of rank r taking 1 / speeds[r] of their time. Links are as they were."""

    prices: Prices
    speeds: tuple[float, ...]

    @property
    def source(self) -> str:
        return self.prices.source

    def op(self, key: OpKey, device: int = 0) -> OpTime:
        found, speed = self.prices.op(key, device), self.speeds[device]
        return OpTime(found.forward_s / speed, found.backward_input_s / speed, found.backward_weight_s / speed)

    def collective(self, collective: Collective) -> float:
        return self.prices.collective(collective)

    def optimizer_s(self, num_elements: int, optimizer: str, num_bytes_per_element: float, device: int = 0) -> float:
        return self.prices.optimizer_s(num_elements, optimizer, num_bytes_per_element, device) / self.speeds[device]

    def memory_limit_bytes(self, device: int = 0) -> int:
        return self.prices.memory_limit_bytes(device)

    def peak_flops_per_s(self, dtype: str, device: int = 0) -> float:
        return self.prices.peak_flops_per_s(dtype, device) * self.speeds[device]

    def slowdown(self, device: int = 0) -> float:
        return slowdown(self.prices, device)

    def assumptions(self) -> tuple[str, ...]:
        told = ", ".join(f"{speed:.2f}" for speed in self.speeds)
        return (*self.prices.assumptions(), f"devices at {told} of their stated speed, as measured")
