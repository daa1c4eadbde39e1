"""The cluster: groups of like devices in nodes, joined by links in tiers.

Ranks fill groups, and nodes within a group, in order. A tier joins `domain` consecutive ranks; every
`shared_by` of them leave through one port of `bandwidth_bytes_per_s` (per direction). An NVLink switch of
eight GPUs is a tier of domain 8 with a port a device; a fabric with one NIC a node has a port shared by the
node. Devices wired to each other without a switch have `peers` wires a port: a group of p uses (p - 1) / peers of it.
The last tier of a group spans the group; `fabric` joins groups.

Bandwidth is stated nominal, and measured where known: prices use the measured value when there is one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.opkey import RankGroup

if TYPE_CHECKING:
    from costmodel.paced import PacedDevices


@dataclass(frozen=True, slots=True)
class Tier:
    """One kind of link. See the module's text."""

    name: str
    domain: int
    shared_by: int
    latency_s: float
    bandwidth_bytes_per_s: float
    measured_bytes_per_s: float | None = None
    peers: int = 0  # 0: a switch

    @property
    def port_bytes_per_s(self) -> float:
        """What a port is taken to carry: as measured, else as stated."""
        return self.measured_bytes_per_s or self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class Device:
    """One device type. `peak_flops_per_s` are dense peaks by dtype ("float32", "tf32", "bfloat16", ...)."""

    name: str
    kind: str  # "cuda" or "cpu"
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flops_per_s: tuple[tuple[str, float], ...]
    num_sms: int = 1

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s of `dtype`; of the next wider type that the device has where it lacks it."""
        peaks = dict(self.peak_flops_per_s)
        for name in {"float8": ("float8", "bfloat16"), "bfloat16": ("bfloat16", "float16"), "float16": ("float16",)}.get(dtype, (dtype,)):
            if name in peaks:
                return peaks[name]
        return peaks["float32"]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Factors by which the ranks of a node slow each other, as measured (costmodel/links.py): their products, their passes over memory that no cache
    holds, their optimizers."""

    compute: float
    memory: float
    optimizer: float


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Like nodes. `cores_per_node` (CPU only): cores that the ranks of a node share; None: one or more each. `sharing`: what that costs, where
    it was measured."""

    device: Device
    num_nodes: int
    devices_per_node: int
    tiers: tuple[Tier, ...]
    cores_per_node: float | None = None
    sharing: Sharing | None = None

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def contention(self) -> float:
        """Factor by which compute slows because the ranks of a node share its cores: as measured, else max(1, ranks / cores)."""
        if self.sharing is not None:
            return self.sharing.compute
        return max(1.0, self.devices_per_node / self.cores_per_node) if self.cores_per_node else 1.0


@dataclass(frozen=True)
class Cluster:
    """Devices and links of one job. `Cluster.parse` makes one from text, a file or itself."""

    name: str
    groups: tuple[NodeGroup, ...]
    fabric: Tier | None = None  # between groups
    paced: PacedDevices | None = None  # devices that sleep instead of computing

    @staticmethod
    def parse(source: str | Path | Cluster) -> Cluster:
        """A preset "h100-sxm-80gb:16x8" (nodes x devices a node), a YAML file (of a cluster, or of paced devices), or a Cluster.

        ClusterFileError for anything else, with what was found and the nearest valid form.
        """
        if isinstance(source, Cluster):
            return source
        from costmodel import clusterfile  # the file form knows this module's types

        return clusterfile.parse(source)

    @cached_property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.groups)

    @property
    def overlaps(self) -> bool:
        """Whether transfers run beside compute: not on CPUs, whose cores do both."""
        return all(group.device.kind == "cuda" for group in self.groups)

    @property
    def mixed(self) -> bool:
        """Whether its devices differ."""
        return len({group.device for group in self.groups}) > 1

    def group_of(self, rank: int) -> tuple[NodeGroup, int]:
        """The group of a global rank, and the first rank of that group."""
        start = 0
        for group in self.groups:
            if rank < start + group.num_devices:
                return group, start
            start += group.num_devices
        raise ValueError(f"rank {rank} of a cluster of {self.num_devices} devices")

    def device(self, rank: int = 0) -> Device:
        """Of a global rank."""
        return self.group_of(rank)[0].device

    def memory_bytes(self, rank: int = 0) -> int:
        """Of a global rank's device, all of it."""
        return self.device(rank).memory_bytes

    def node_of(self, rank: int) -> int:
        """Number of the node of a rank, counted over the whole cluster."""
        nodes = start = 0
        for group in self.groups:
            if rank < start + group.num_devices:
                return nodes + (rank - start) // group.devices_per_node
            nodes, start = nodes + group.num_nodes, start + group.num_devices
        raise ValueError(f"rank {rank} of a cluster of {self.num_devices} devices")

    def parts(self, ranks: RankGroup) -> tuple[RankGroup, ...]:
        """The ranks of a group that each node group holds, as groups of their own; node groups that hold none are left out."""
        found, start, end = [], 0, ranks.start + ranks.size * ranks.stride
        for group in self.groups:
            first = ranks.start + max(0, -(-(start - ranks.start) // ranks.stride)) * ranks.stride
            start += group.num_devices
            if size := len(range(first, min(start, end), ranks.stride)):
                found.append(replace(ranks, size=size, start=first))
        return tuple(found)

    def tiers_within(self, ranks: RankGroup) -> tuple[Tier, ...]:
        """Tiers that a group of ranks needs, innermost first: up to the first that joins all of them."""
        last = ranks.start + (ranks.size - 1) * ranks.stride
        group, start = self.group_of(ranks.start)
        found: list[Tier] = []
        for tier in group.tiers:
            found.append(tier)
            if last < start + group.num_devices and (ranks.start - start) // tier.domain == (last - start) // tier.domain:
                return tuple(found)
        return (*found, self.fabric) if self.fabric else tuple(found)

    def fingerprint(self) -> str:
        """SHA-256 over everything that prices depend on; the name is not part of it."""
        parts = [dataclasses.asdict(g) for g in self.groups] + [dataclasses.asdict(self.fabric) if self.fabric else None]
        text = json.dumps(parts + ([self.paced.fingerprint()] if self.paced else []), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def differences(self) -> tuple[str, ...]:
        """Links whose measured bandwidth is stated, against the nominal one, a line each."""
        lines = []
        for tier in (*(t for g in self.groups for t in g.tiers), *((self.fabric,) if self.fabric else ())):
            if tier.measured_bytes_per_s is not None:
                share = tier.measured_bytes_per_s / tier.bandwidth_bytes_per_s
                lines.append(
                    f"{tier.name}: measured {tier.measured_bytes_per_s / 1e9:.1f} of nominal {tier.bandwidth_bytes_per_s / 1e9:.1f} GB/s ({share:.0%})"
                )
        return tuple(dict.fromkeys(lines))


def peaks_of(peaks: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Peaks by dtype as the hashable form that Device keeps."""
    return tuple(sorted(peaks.items()))
