"""Measured prices: this device's own times, the formulas where nothing was measured.

An operator's price is, in this order,

    measured       the time of exactly this key, from the profile or taken now within the budget
    interpolated   formula(key) * ratio, where ratio = measured / formula at the nearest sizes of the same operator (log-log)
    formula        the fallback's price

and in each case times what ranks that share a node cost each other: keys are timed by one process alone. Products and small tensors are slowed as measured
products are, passes over more bytes than a core's cache holds as measured passes, the optimizer as the measured optimizer (costmodel/links.py).
The optimizer is torch's own, timed at two sizes. Collectives inside a node come from `measure_links` of a job of the same number of ranks; others from the
fallback. Of devices whose stopwatch times single collectives (costmodel/stopwatch.py) every group of ranks has a fit of its own.
"""

from __future__ import annotations

import bisect
import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from costmodel.analytic import AnalyticPrices
from costmodel.cluster import Cluster, NodeGroup
from costmodel.links import fit
from costmodel.measure import NotMeasurableError
from costmodel.opclass import base_name, op_class
from costmodel.opkey import Collective, OpKey, OpTime
from costmodel.profile import LinkFit, Profile
from costmodel.roofline import tensor_bytes
from costmodel.served import busiest_share
from costmodel.stopwatch import PresentDevice, Stopwatch

_KEY_BUDGET_S = 0.04
_OPTIMIZER_ELEMENTS = (1 << 12, 1 << 20)
_LINK_BYTES = (1 << 10, 1 << 20)
_CACHE_BYTES = 1 << 21  # of one core
_BY_FLOPS = ("einsum",)  # whose formula needs flops, which a profile does not hold
_MAX_FAILURES = 3  # of one operator, before it is no longer tried


@dataclass
class MeasuredPrices:
    """costmodel.prices.Prices from measurements. `budget_s`: seconds that this object may spend measuring in all."""

    cluster: Cluster
    profile: Profile
    fallback: AnalyticPrices
    stopwatch: Stopwatch = field(default_factory=PresentDevice)
    budget_s: float = 20.0
    source: str = field(default="measured", init=False)
    spent_s: float = field(default=0.0, init=False)
    origins: Counter[str] = field(default_factory=Counter, init=False)
    reasons: dict[str, str] = field(default_factory=dict, init=False)  # target -> why it was not measured
    _failures: Counter[str] = field(default_factory=Counter, init=False, repr=False)
    _ops: dict[tuple[OpKey, float], OpTime] = field(default_factory=dict, init=False, repr=False)
    _fits: dict[Collective, LinkFit | None] = field(default_factory=dict, init=False, repr=False)  # of no bytes
    _ratios: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for key, seconds in self.profile.ops():
            if base_name(key.target) not in _BY_FLOPS and not key.target.startswith("optimizer."):
                self._remember(key, seconds, self._formula(key, 0))

    def op(self, key: OpKey, device: int = 0) -> OpTime:
        group = self.cluster.group_of(device)[0]
        if op_class(key.target) in ("view", "create") or group.device.kind != self.profile.env.kind:
            return self.fallback.op(key, device)
        contention = _contention(key, group)
        place = (key, contention)
        found = self._ops.get(place)
        if found is None:
            alone, origin = self._alone(key, device)
            self.origins[origin] += 1
            found = OpTime(*(s * contention for s in (alone.forward_s, alone.backward_input_s, alone.backward_weight_s)))
            self._ops[place] = found
        return found

    def prepare(self, keys: Iterable[OpKey]) -> int:
        """Measure keys ahead, the most expensive first, within the budget. Returns how many have measured times now."""
        waiting = sorted(dict.fromkeys(keys), key=lambda k: -(self.fallback.op(k).forward_s + self.fallback.op(k).backward_s))
        for key in waiting:
            self.op(key)
        return sum(self.profile.op(key) is not None for key in waiting)

    def _alone(self, key: OpKey, device: int) -> tuple[OpTime, str]:
        """Seconds without contention, and where they come from."""
        known = self.profile.op(key)
        if known is None and self._failures[key.target] < _MAX_FAILURES and self.spent_s < self.budget_s:
            known = self._measure(key, device)
        formula = self._formula(key, device)
        if known is not None:
            self._remember(key, known, formula)
            return known, "measured"
        ratio = self._ratio(key, formula)
        if ratio is None:
            return formula, "formula"
        forward, backward = ratio
        return OpTime(formula.forward_s * forward, formula.backward_input_s * backward, formula.backward_weight_s * backward), "interpolated"

    def _measure(self, key: OpKey, device: int) -> OpTime | None:
        start = time.perf_counter()
        try:
            timing = self.stopwatch.op(key, _KEY_BUDGET_S)
        except NotMeasurableError as error:
            self.reasons[key.target] = str(error)
            self._failures[key.target] += 1
            return None
        finally:
            self.spent_s += time.perf_counter() - start
        formula = self._formula(key, device)
        share = formula.backward_input_s / formula.backward_s if formula.backward_s > 0 else 1.0
        weight_s = timing.backward_s * (1 - share) if timing.weight_s is None else timing.weight_s
        seconds = OpTime(timing.forward_s, timing.backward_s - weight_s, weight_s)
        self.profile.put_op(key, seconds, timing.num_runs)
        return seconds

    def _formula(self, key: OpKey, device: int) -> OpTime:
        contention = self.cluster.group_of(device)[0].contention
        priced = self.fallback.op(key, device)
        return OpTime(*(s / contention for s in (priced.forward_s, priced.backward_input_s, priced.backward_weight_s)))

    def _remember(self, key: OpKey, known: OpTime, formula: OpTime) -> None:
        if formula.forward_s <= 0:
            return
        backward = known.backward_s / formula.backward_s if formula.backward_s > 0 else 1.0
        entry = (_size(formula), known.forward_s / formula.forward_s, backward)
        ratios = self._ratios.setdefault(key.target, [])
        if entry not in ratios:
            bisect.insort(ratios, entry)

    def _ratio(self, key: OpKey, formula: OpTime) -> tuple[float, float] | None:
        """Measured over formula at this size, between the nearest measured sizes of the operator (log-log)."""
        known = self._ratios.get(key.target)
        if not known or formula.forward_s <= 0:
            return None
        size = _size(formula)
        i = bisect.bisect_left(known, (size, 0.0, 0.0))
        if i == 0 or i == len(known):
            _, forward, backward = known[min(i, len(known) - 1)]
            return forward, backward
        (a, fa, ba), (b, fb, bb) = known[i - 1], known[i]
        share = (size - a) / (b - a) if b > a else 0.0
        mix = lambda x, y: x ** (1 - share) * y**share if x > 0 and y > 0 else y  # noqa: E731
        return mix(fa, fb), mix(ba, bb)

    def collective(self, collective: Collective) -> float:
        group = collective.group
        if group.size <= 1:
            return 0.0
        timed = self._timed(collective)
        if timed is not None:
            return timed.seconds(collective.num_bytes)
        node = self.cluster.groups[0]
        inside = self.cluster.node_of(group.start) == self.cluster.node_of(group.start + (group.size - 1) * group.stride)
        world = node.devices_per_node
        served = collective.kind in ("push", "pull", "visit")  # messages to and from servers
        kind = "send" if served else collective.kind
        size = group.size if kind != "send" else 2
        found = self.profile.link(kind, size, world) if inside and node.device.kind == self.profile.env.kind else None
        if found is None:
            return self.fallback.collective(collective)
        return found.seconds(collective.num_bytes * (busiest_share(collective) if served else 1.0))

    def _timed(self, collective: Collective) -> LinkFit | None:
        """What the stopwatch tells of collectives like this one; None where it times none."""
        like = replace(collective, num_bytes=0)
        if like not in self._fits:
            points = [(n, self.stopwatch.collective(replace(collective, num_bytes=n))) for n in _LINK_BYTES]
            told = [(n, seconds) for n, seconds in points if seconds is not None]
            self._fits[like] = fit(collective.kind, collective.group.size, self.cluster.num_devices, told) if told else None
        return self._fits[like]

    def optimizer_s(self, num_elements: int, optimizer: str, num_bytes_per_element: float, device: int = 0) -> float:
        """On the line through torch's own step on few and on many elements; the formula for optimizers that are not known."""
        group = self.cluster.group_of(device)[0]
        known = [self._optimizer(optimizer, size) for size in _OPTIMIZER_ELEMENTS] if group.device.kind == self.profile.env.kind else [None]
        few, many = known[0], known[-1]
        if few is None or many is None:
            return self.fallback.optimizer_s(num_elements, optimizer, num_bytes_per_element, device)
        slope = max(0.0, many - few) / (_OPTIMIZER_ELEMENTS[1] - _OPTIMIZER_ELEMENTS[0])
        return max(0.0, few + slope * (num_elements - _OPTIMIZER_ELEMENTS[0])) * (group.sharing.optimizer if group.sharing else group.contention)

    def _optimizer(self, name: str, num_elements: int) -> float | None:
        key = OpKey(f"optimizer.{name}", (((num_elements,), "float32"),), (), "", (False,), 0)
        known = self.profile.op(key)
        if known is None:
            timing = self.stopwatch.optimizer(name, num_elements)
            if timing is None:
                return None
            known = OpTime(timing.forward_s, 0.0, 0.0)
            self.profile.put_op(key, known, timing.num_runs)
        return known.forward_s

    def memory_limit_bytes(self, device: int = 0) -> int:
        return self.fallback.memory_limit_bytes(device)

    def peak_flops_per_s(self, dtype: str, device: int = 0) -> float:
        return self.fallback.peak_flops_per_s(dtype, device)

    def slowdown(self, device: int = 0) -> float:
        return self.fallback.slowdown(device)

    def assumptions(self) -> tuple[str, ...]:
        env, count = self.profile.env, self.origins
        lines = [
            f"operators timed on {env.device} (torch {env.torch}, {env.threads} threads): {count['measured']} keys measured, "
            f"{count['interpolated']} interpolated between measured sizes, {count['formula']} from formulas"
        ]
        lines += [f"not measured: {reason}" for _, reason in sorted(self.reasons.items())]
        world = self.cluster.groups[0].devices_per_node
        fits = [found for found in self.profile.links() if found.world == world]
        timed = sum(found is not None for found in self._fits.values())
        if timed:
            lines.append(f"collectives: {timed} kinds and groups of ranks measured")
        else:
            lines.append(f"collectives: {len(fits)} fits measured among {world} ranks" if fits else "collectives: from formulas")
        for group in self.cluster.groups:
            if group.contention > 1:
                lines.append(f"{group.devices_per_node} ranks share {group.cores_per_node:g} cores: compute takes {group.contention:.2f} times as long")
        return tuple(lines)


def _contention(key: OpKey, group: NodeGroup) -> float:
    """Factor by which the other ranks of a node slow an operator."""
    num_bytes = sum(tensor_bytes(*t) for t in (*key.operands, *key.outputs))
    if group.sharing is None or op_class(key.target) not in ("memory", "lookup") or num_bytes < _CACHE_BYTES:
        return group.contention
    return group.sharing.memory


def _size(formula: OpTime) -> float:
    """Logarithm of the work of a key, as the formula sees it."""
    return math.log(formula.forward_s)
