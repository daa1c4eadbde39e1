"""Paced devices: devices that a file describes, on which everything takes exactly the time that the file says.

A job on paced devices runs for real on the ranks of one machine and sleeps instead of computing (runtime/paced.py), so that schedules and
plans of many ranks can be measured on few cores. The planner sees them as it sees any device: through measurements in the profile.

Seconds of an operator on rank r, with the first cost whose pattern names it, `flops` of its forward pass and `bytes` of its operands and outputs:

    odd        = odd_factor where a dimension longer than 1 of an operand or output is no multiple of `multiple`, else 1
    forward    = slowdown[r] * odd * (base_s + flops / flops_per_s + bytes / bytes_per_s)
    backward   = forward * backward_input where its first operand needs a gradient, and forward * backward_weight where another one does

Views and operators that only make tensors take no time. A group of ranks talks over the link of the smallest domain that holds all of it; n bytes
of the whole tensor (of the local one for all_to_all), p ranks:

    all_reduce                                 2 (p-1) latency + 2 (p-1)/p n / bytes_per_s
    all_gather, reduce_scatter, all_to_all       (p-1) latency +   (p-1)/p n / bytes_per_s
    broadcast                          ceil(log2 p) latency +            n / bytes_per_s
    send                                           latency +             n / bytes_per_s
    push, pull, visit                              latency + the busiest rank's share of n / bytes_per_s (costmodel/served.py)

On a shared link the bytes of groups alike that talk at the same time go one after the other: their part takes as many times as long.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import math
from dataclasses import dataclass

from costmodel.opclass import op_class
from costmodel.opkey import Collective, OpKey, OpTime, RankGroup
from costmodel.roofline import tensor_bytes
from costmodel.served import busiest_share


@dataclass(frozen=True, slots=True)
class OpCost:
    """What the operators take whose target ("aten.linear.default") `pattern` matches. Rates are infinite where they do not count."""

    pattern: str
    base_s: float
    flops_per_s: float = math.inf
    bytes_per_s: float = math.inf
    backward_input: float = 1.0
    backward_weight: float = 1.0
    multiple: int = 1
    odd_factor: float = 1.0

    def seconds(self, key: OpKey) -> float:
        """Of the forward pass."""
        moved = sum(tensor_bytes(*tensor) for tensor in (*key.operands, *key.outputs))
        is_odd = any(size > 1 and size % self.multiple for shape, _ in (*key.operands, *key.outputs) for size in shape)
        return (self.odd_factor if is_odd else 1.0) * (self.base_s + key.flops / self.flops_per_s + moved / self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class LinkCost:
    """What joins `domain` consecutive ranks. `is_shared`: all of them have one rate together, not each its own."""

    name: str
    domain: int
    latency_s: float
    bytes_per_s: float
    is_shared: bool = False


@dataclass(frozen=True)
class PacedDevices:
    """All devices and links of a job. `links` from the innermost out; `slowdowns` (rank, factor) of ranks that are slower than others."""

    name: str
    num_nodes: int
    devices_per_node: int
    memory_bytes: int
    ops: tuple[OpCost, ...]
    links: tuple[LinkCost, ...]
    slowdowns: tuple[tuple[int, float], ...] = ()
    optimizer_base_s: float = 0.0
    optimizer_s_per_element: float = 0.0

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    def slowdown(self, rank: int) -> float:
        """Time of a rank's compute over that of the fastest device."""
        return dict(self.slowdowns).get(rank, 1.0)

    def op(self, key: OpKey, rank: int = 0) -> OpTime:
        """Seconds of an operator on a rank."""
        if op_class(key.target) in ("view", "create"):
            return OpTime(0.0, 0.0, 0.0)
        cost = next(cost for cost in self.ops if fnmatch.fnmatchcase(key.target, cost.pattern))
        forward_s = self.slowdown(rank) * cost.seconds(key)
        input_s = forward_s * cost.backward_input if any(key.grads[:1]) else 0.0
        return OpTime(forward_s, input_s, forward_s * cost.backward_weight if any(key.grads[1:]) else 0.0)

    def optimizer_s(self, num_elements: int, rank: int = 0) -> float:
        """Seconds of an optimizer's step over local elements."""
        return self.slowdown(rank) * (self.optimizer_base_s + num_elements * self.optimizer_s_per_element)

    def link(self, group: RankGroup) -> LinkCost:
        """The link of a group: of the smallest domain that holds its first and last rank."""
        last = group.start + (group.size - 1) * group.stride
        return next(link for link in self.links if group.start // link.domain == last // link.domain)

    def collective_s(self, collective: Collective) -> float:
        """Seconds of a collective from the moment at which its last rank is there."""
        group, n = collective.group, collective.num_bytes
        p = group.size
        if p == 1:
            return 0.0
        link = self.link(group)
        rate = link.bytes_per_s / (group.concurrent if link.is_shared else 1)
        if collective.kind in ("push", "pull", "visit"):
            return link.latency_s + busiest_share(collective) * n / rate
        steps = {"all_reduce": 2 * (p - 1), "send": 1, "broadcast": math.ceil(math.log2(p))}.get(collective.kind, p - 1)
        volume = {"all_reduce": 2 * (p - 1) / p, "send": 1.0, "broadcast": 1.0}.get(collective.kind, (p - 1) / p)
        return steps * link.latency_s + volume * n / rate

    def slower(self, factor: float) -> PacedDevices:
        """The same devices and links, of which each takes `factor` times as long: plans compare as before, and a host that is late counts less."""
        cost = lambda c: dataclasses.replace(c, base_s=c.base_s * factor, flops_per_s=c.flops_per_s / factor, bytes_per_s=c.bytes_per_s / factor)  # noqa: E731
        link = lambda k: dataclasses.replace(k, latency_s=k.latency_s * factor, bytes_per_s=k.bytes_per_s / factor)  # noqa: E731
        return dataclasses.replace(
            self,
            ops=tuple(map(cost, self.ops)),
            links=tuple(map(link, self.links)),
            optimizer_base_s=self.optimizer_base_s * factor,
            optimizer_s_per_element=self.optimizer_s_per_element * factor,
        )

    def fingerprint(self) -> str:
        """SHA-256 over everything but the name."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(dataclasses.replace(self, name="")), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class PacedPrices:
    """costmodel.prices.Prices that are what the file says: what paced devices take, not what a planner knows of them."""

    devices: PacedDevices
    source: str = "paced"

    def op(self, key: OpKey, device: int = 0) -> OpTime:
        return self.devices.op(key, device)

    def collective(self, collective: Collective) -> float:
        return self.devices.collective_s(collective)

    def optimizer_s(self, num_elements: int, optimizer: str, num_bytes_per_element: float, device: int = 0) -> float:
        return self.devices.optimizer_s(num_elements, device)

    def memory_limit_bytes(self, device: int = 0) -> int:
        return self.devices.memory_bytes

    def peak_flops_per_s(self, dtype: str, device: int = 0) -> float:
        return 0.0

    def assumptions(self) -> tuple[str, ...]:
        return (f"paced devices {self.devices.name}",)
