"""Analytic prices: a cluster and a calibration, no measurement."""

from __future__ import annotations

from dataclasses import dataclass, field

from costmodel.calibration import Calibration, load
from costmodel.cluster import Cluster
from costmodel.collective import collective_s
from costmodel.opkey import Collective, OpKey, OpTime
from costmodel.roofline import op_time

# Tensors of one element each that a step reads and writes, in units of the bytes that an element keeps
# (parameter, gradient, states): all are read, all but the gradient written.
_OPTIMIZER_TRAFFIC = 1.8
_OPTIMIZER_KERNELS = 10


@dataclass
class AnalyticPrices:
    """costmodel.prices.Prices from formulas: costmodel/roofline.py, gemm.py, collective.py.

    `stack` names the software stack whose constants apply (costmodel/calibration.py).
    """

    cluster: Cluster
    calibration: Calibration | None = None
    stack: str = "default"
    source: str = field(default="analytic", init=False)
    _ops: dict[tuple[OpKey, int], OpTime] = field(default_factory=dict, init=False, repr=False)
    _collectives: dict[Collective, float] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.calibration = self.calibration or load()

    @property
    def constants(self) -> Calibration:
        assert self.calibration is not None
        return self.calibration

    def _group(self, device: int) -> int:
        return self.cluster.groups.index(self.cluster.group_of(device)[0])

    def op(self, key: OpKey, device: int = 0) -> OpTime:
        place = (key, self._group(device))
        found = self._ops.get(place)
        if found is None:
            group = self.cluster.groups[place[1]]
            found = op_time(key, group.device, self.constants.device(group.device.name), self.constants.stack(self.stack), group.contention)
            self._ops[place] = found
        return found

    def collective(self, collective: Collective) -> float:
        found = self._collectives.get(collective)
        if found is None:
            found = self._collectives[collective] = collective_s(collective, self.cluster, self.constants)
        return found

    def optimizer_s(self, num_elements: int, optimizer: str, num_bytes_per_element: float, device: int = 0) -> float:
        """Seconds of a fused elementwise step; `num_bytes_per_element`: parameter, gradient, states and master copy."""
        group = self.cluster.group_of(device)[0]
        constants = self.constants.device(group.device.name)
        seconds = _OPTIMIZER_TRAFFIC * num_bytes_per_element * num_elements / (group.device.memory_bytes_per_s * constants.memory_efficiency)
        return (seconds + _OPTIMIZER_KERNELS * constants.launch_s) * group.contention

    def memory_limit_bytes(self, device: int = 0) -> int:
        group = self.cluster.group_of(device)[0]
        return max(0, group.device.memory_bytes - self.constants.device(group.device.name).reserve_bytes)

    def peak_flops_per_s(self, dtype: str, device: int = 0) -> float:
        return self.cluster.device(device).peak(dtype)

    def slowdown(self, device: int = 0) -> float:
        return self.constants.stack(self.stack).slowdown

    def assumptions(self) -> tuple[str, ...]:
        lines = []
        for group in self.cluster.groups:
            c = self.constants.device(group.device.name)
            lines.append(
                f"{group.device.name}: matrix products reach {c.gemm_ceiling:.0%} of the peak, copies {c.memory_efficiency:.0%} of the memory bandwidth; "
                f"{c.launch_s * 1e6:.0f} us a launch; {c.reserve_bytes / 2**30:.1f} GiB reserved"
            )
            if group.contention > 1:
                lines.append(f"{group.devices_per_node} ranks share {group.cores_per_node:g} cores: compute takes {group.contention:.2f} times as long")
        s = self.constants.stack(self.stack)
        lines.append(f"stack {self.stack}: {s.fused_share:.0%} of memory-bound time after fusion, {'fused' if s.flash else 'unfused'} attention")
        if self.cluster.overlaps:
            lines.append(f"compute takes {s.slowdown:.2f} times as long while a collective runs beside it")
        lines += self.cluster.differences()
        return tuple(dict.fromkeys(lines))
