"""Calibration: the few physical constants that prices rest on, by device type, link and software stack.

costmodel/data/priors.json holds what is known of them from public kernel and link measurements, calibration.json the same after a fit on
published training runs (benchmarks/accuracy); both state where their numbers come from.
A device, link or stack that is not listed gets the constants called "default"; a device may be listed by its chip ("A100").
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class DeviceConstants:
    """Of one device type.

    gemm_ceiling: share of the dense peak that a large matrix product reaches; float8_share: what 8-bit products reach of it.
    gemm_half_k: contraction length at
    which a tile's main loop is half as fast (prologue and epilogue). attention_forward, attention_backward: share of
    the peak that a fused attention kernel reaches. memory_efficiency: share of the memory bandwidth that a large copy
    reaches. kernel_s: shortest kernel. launch_s: host time a kernel. reserve_bytes: context and library workspaces.
    """

    gemm_ceiling: float = 0.8
    float8_share: float = 0.9
    gemm_half_k: float = 64.0
    attention_forward: float = 0.5
    attention_backward: float = 0.4
    memory_efficiency: float = 0.85
    kernel_s: float = 3e-6
    launch_s: float = 6e-6
    reserve_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class LinkConstants:
    """Of one kind of link, by tier name. efficiency: share of the port's stated bandwidth that a large message
    reaches (1 where the tier states a measured one). ring_share: what a collective of many messages reaches of that.
    base_s: fixed time of a collective."""

    efficiency: float = 0.8
    ring_share: float = 1.0
    base_s: float = 15e-6


@dataclass(frozen=True, slots=True)
class StackConstants:
    """Of one software stack: how it runs the same mathematics.

    fused_share: share of memory-bound time left after fusion (1: one kernel an operator). flash: fused attention.
    launch_factor: host time a kernel relative to a bare launch. launch_exposed: share of the shorter of host and device time that
    is not hidden behind the longer (1: every launch waits for the device). step_s: host time a step (clip, optimizer, logging).
    slowdown: factor on compute while a collective runs beside it. gradient_overlap, gather_overlap, tensor_overlap: shares
    of the gradient reduction, the ZeRO-3 gathers and the tensor-axis collectives that may run behind compute.
    gemm_share: what this stack's libraries reach of the device's best products. port_share: where ZeRO-3 gathers of a group leave
    a node through one of its ports, whatever the number of ranks in it, what they reach of that port; 0 where they use all.
    ring_factor: attention time under context parallelism relative to one device. score_passes: memory passes over the scores of
    unfused attention, relative to scale, mask and softmax in one kernel.
    owner_s: time a member of a ZeRO group whose members broadcast the parameters they own, one after the other.
    slack: memory that the allocator holds beyond what is live, as a share of the activations. reserve_bytes: buffers of
    the stack and its communicators besides the device's context.
    """

    fused_share: float = 1.0
    flash: bool = True
    launch_factor: float = 1.0
    launch_exposed: float = 0.0
    step_s: float = 0.01
    slowdown: float = 1.19
    gradient_overlap: float = 1.0
    gather_overlap: float = 1.0
    tensor_overlap: float = 0.0
    gemm_share: float = 1.0
    port_share: float = 0.0
    ring_factor: float = 1.3
    score_passes: float = 1.0
    owner_s: float = 0.0
    slack: float = 0.1
    reserve_bytes: int = 1 << 30


@dataclass(frozen=True)
class Calibration:
    """All constants. Mappings by device name, tier name, stack name."""

    devices: Mapping[str, DeviceConstants]
    links: Mapping[str, LinkConstants]
    stacks: Mapping[str, StackConstants]
    provenance: Mapping[str, str]

    def device(self, name: str) -> DeviceConstants:
        """Of a device by its name, else by its chip (the name's first word), else the default."""
        return self.devices.get(name) or self.devices.get(name.partition("-")[0], self.devices["default"])

    def link(self, name: str) -> LinkConstants:
        """Of a kind of link by its tier's name, else the default."""
        return self.links.get(name, self.links["default"])

    def stack(self, name: str) -> StackConstants:
        """Of a software stack by its name, else the default."""
        return self.stacks.get(name, self.stacks["default"])

    def save(self, path: Path) -> None:
        """Write as JSON, keys sorted."""
        groups = {name: {k: asdict(v) for k, v in getattr(self, name).items()} for name in ("devices", "links", "stacks")}
        path.write_text(json.dumps(groups | {"provenance": dict(self.provenance)}, indent=1, sort_keys=True) + "\n")


def load(path: Path | None = None) -> Calibration:
    """The calibration of a file, or the one that ships with the package. ValueError for unknown keys."""
    return _shipped("calibration.json") if path is None else _parse(json.loads(path.read_text()), str(path))


def priors() -> Calibration:
    """The constants before any fit on training runs."""
    return _shipped("priors.json")


@cache
def _shipped(name: str) -> Calibration:
    return _parse(json.loads(resources.files("costmodel").joinpath("data", name).read_text()), f"data/{name}")


def _parse(content: Mapping[str, Any], file: str) -> Calibration:
    def table(name: str, form: type) -> dict[str, Any]:
        known = {f.name for f in fields(form)}
        for key, values in content[name].items():
            if unknown := sorted(set(values) - known):
                raise ValueError(f"{file}: {name}.{key}: unknown constant {unknown[0]}; known: {', '.join(sorted(known))}")
        return {key: form(**values) for key, values in content[name].items()}

    return Calibration(table("devices", DeviceConstants), table("links", LinkConstants), table("stacks", StackConstants), content["provenance"])
