"""This job's own ranks and devices as a Cluster."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

from costmodel.cluster import Cluster, Device, NodeGroup, Sharing
from costmodel.clusterfile import preset_names

_RESERVED = 0.2  # share of a host's memory that is left to the system


def detect(num_ranks: int | None = None, ranks_per_node: int | None = None, sharing: Sharing | None = None) -> Cluster:
    """The present job: `num_ranks` ranks, `ranks_per_node` a host (torchrun's figures, else all on this host).

    CPU: ranks share the host's cores and memory. `sharing`: what that costs (costmodel.links.measure_sharing()), where
    it was measured. GPU: the preset whose name fits the device, its memory as the driver states it.
    """
    world = num_ranks or int(os.environ.get("WORLD_SIZE", "1"))
    per_node = ranks_per_node or min(world, int(os.environ.get("LOCAL_WORLD_SIZE", str(world))))
    if world % per_node:
        raise ValueError(f"{world} ranks do not fill nodes of {per_node}")
    if torch.cuda.is_available():
        return _gpus(world, per_node)
    preset = Cluster.parse(f"cpu:{world // per_node}x{per_node}")
    group = preset.groups[0]
    memory = int(_host_memory_bytes() * (1 - _RESERVED) / per_node)
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    own = replace(group, device=replace(group.device, memory_bytes=memory), cores_per_node=cores, sharing=sharing)
    return Cluster(f"this machine: {world} CPU ranks", (own,))


def _gpus(world: int, per_node: int) -> Cluster:
    properties = torch.cuda.get_device_properties(0)
    name = preset_of(properties.name, properties.total_memory)
    preset = Cluster.parse(f"{name}:{world // per_node}x{per_node}") if name else None
    group = preset.groups[0] if preset else _unknown_gpu(world, per_node)
    device = replace(group.device, memory_bytes=properties.total_memory, num_sms=properties.multi_processor_count)
    return Cluster(f"this machine: {world} x {properties.name}", (replace(group, device=device),))


def _unknown_gpu(world: int, per_node: int) -> NodeGroup:
    """A device without a preset: the A100's links and a peak from its own clock and width are better than a guess by name."""
    properties = torch.cuda.get_device_properties(0)
    group = Cluster.parse(f"a100-sxm-40gb:{world // per_node}x{per_node}").groups[0]
    scale = properties.multi_processor_count / group.device.num_sms
    peaks = tuple((dtype, peak * scale) for dtype, peak in group.device.peak_flops_per_s)
    return replace(
        group, device=Device(properties.name, "cuda", properties.total_memory, group.device.memory_bytes_per_s * scale, peaks, properties.multi_processor_count)
    )


def preset_of(device_name: str, memory_bytes: int) -> str | None:
    """The preset of a CUDA device name: the same model, the nearest memory. None for models without a preset."""
    words = device_name.lower().replace("geforce ", "").replace("rtx ", "rtx").replace("-", " ").split()
    models = [name for name in preset_names() if name.partition("-")[0] in words]
    return min(models, key=lambda name: (abs(float(name.split("-")[-1].removesuffix("gb")) - memory_bytes / 2**30), name)) if models else None


def _host_memory_bytes() -> int:
    """Memory of this host or of the container that it is seen through."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if file.exists() and (text := file.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits)
