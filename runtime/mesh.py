"""The mesh: this process' place on every axis, its device, and the process groups that it communicates in."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from runtime.guard import PATIENCE_S, Guard, default_store
from runtime.meeting import joined, own_part
from runtime.record import CpuClock, CudaClock, Recorder


@dataclass(frozen=True, eq=False)
class Axis:
    """One mesh axis as this rank sees it. `ranks` are the global ranks along it, this one at `index`."""

    name: str
    size: int
    index: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None  # None where the axis has one rank
    recorder: Recorder
    timeout_s: float
    guard: Guard = field(default_factory=lambda: Guard(None, 1))
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def rank(self) -> int:
        return self.ranks[self.index]


@dataclass(frozen=True, eq=False)
class Mesh:
    """All axes of a job, row-major in the order of `axes`.

    `channels` are groups along "pp" for transfers, one per kind and direction, so that no two kinds of
    traffic between two ranks ever wait for each other (NCCL orders everything within one group).
    `shards` is the mesh that ZeRO splits states over: [dp], or [replicas, zero_group].
    """

    axes: Mapping[str, Axis]
    device: torch.device
    recorder: Recorder
    guard: Guard
    rank: int
    world_size: int
    timeout_s: float
    channels: Mapping[str, dist.ProcessGroup | None]
    shards: DeviceMesh | None
    shard_axis: Axis  # the ranks that share states: "dp", or part of it
    replica_axis: Axis  # the ranks that hold equal shards; size 1 without a zero_group

    def axis(self, name: str) -> Axis:
        """The axis called `name`; one of size 1 where the mesh has none of that name."""
        found = self.axes.get(name)
        return found or Axis(name, 1, 0, (self.rank,), None, self.recorder, self.timeout_s, self.guard, self.device)

    @property
    def world(self) -> Axis:
        """All ranks of the job in one line."""
        return Axis("world", self.world_size, self.rank, tuple(range(self.world_size)), None, self.recorder, self.timeout_s, self.guard, self.device)


def alone(mesh: Mesh) -> Mesh:
    """The same device and recorder with nobody to talk to: a worker that steps by itself. Errors are still told to the whole job."""
    axes = {name: Axis(name, 1, 0, (mesh.rank,), None, mesh.recorder, mesh.timeout_s, mesh.guard, mesh.device) for name in mesh.axes}
    shards = replace(mesh.shard_axis, size=1, index=0, ranks=(mesh.rank,), group=None)
    channels = dict.fromkeys(mesh.channels)
    return replace(mesh, axes=axes, world_size=1, channels=channels, shards=None, shard_axis=shards, replica_axis=shards)


CHANNELS = ("forward up", "forward down", "backward up", "backward down")


def default_device() -> torch.device:
    """This process' own GPU where there is one for it and NCCL, else the CPU."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available() and dist.is_nccl_available() and local < torch.cuda.device_count():
        return torch.device("cuda", local)
    return torch.device("cpu")


def init_process_group(device: torch.device, timeout_s: float) -> None:
    """Join the job that torchrun describes in the environment. Nothing happens alone or when a group is there already."""
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    store, rank, world_size = joined(timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def build_mesh(
    axes: tuple[tuple[str, int], ...],
    *,
    stage_meshes: tuple[tuple[tuple[str, int], ...], ...] = (),
    zero_group: int | None = None,
    device: torch.device | None = None,
    timeout_s: float = 600.0,
    patience_s: float = PATIENCE_S,
    recorder: Recorder | None = None,
) -> Mesh:
    """The mesh of `axes` (outermost first) over all ranks of this job. A wait ends after `timeout_s`, or earlier where another rank
    is gone or has not moved for `patience_s` (runtime/heartbeat.py).

    `stage_meshes`: the axes of each "pp" coordinate, where they are not all alike; `axes` is "pp" alone then.
    Raises ValueError where the axes do not multiply to the world size or zero_group does not divide "dp".
    Every rank has to call it with the same arguments.
    """
    device = device or default_device()
    init_process_group(device, timeout_s)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    sizes = dict(axes)
    wanted = sum(math.prod(size for _, size in mesh) for mesh in stage_meshes) or math.prod(sizes.values())
    if wanted != world_size:
        text = " | ".join(" x ".join(f"{name} {size}" for name, size in mesh) for mesh in stage_meshes or (axes,))
        raise ValueError(f"the mesh {text} needs {wanted} ranks, this job has {world_size}: start as many with torchrun --nproc-per-node")
    recorder = recorder or Recorder(clock=CudaClock() if device.type == "cuda" else CpuClock())
    store = default_store()
    guard = Guard(own_part(store, device) if store is not None else None, world_size, rank, recorder, patience_s)
    alone = Axis("dp", 1, 0, (rank,), None, recorder, timeout_s, guard, device)
    if stage_meshes:
        assert zero_group is None, "a ZeRO group is part of one mesh"
        return _mesh_of_stage(stage_meshes, Mesh({}, device, recorder, guard, rank, world_size, timeout_s, {}, None, alone, alone))
    ids = torch.arange(world_size).reshape([size for _, size in axes])

    def lines(grid: torch.Tensor, dim: int) -> list[list[int]]:
        return grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist()

    def make(name: str, grid: torch.Tensor, dim: int) -> Axis:
        all_lines = lines(grid, dim)
        own = next(line for line in all_lines if rank in line)
        return Axis(name, len(own), own.index(rank), tuple(own), _new_group(all_lines, timeout_s), recorder, timeout_s, guard, device)

    made = {name: make(name, ids, i) for i, (name, _) in enumerate(axes)}
    pp_lines = lines(ids, list(sizes).index("pp")) if sizes.get("pp", 1) > 1 else []
    channels = {name: _new_group(pp_lines, timeout_s) if pp_lines else None for name in CHANNELS}
    dp = made.get("dp", alone)
    if zero_group is None or zero_group == dp.size:
        return Mesh(made, device, recorder, guard, rank, world_size, timeout_s, channels, _device_mesh((dp,), device), dp, alone)
    if dp.size % zero_group:
        raise ValueError(f"zero_group {zero_group} does not divide the {dp.size} data ranks: take a divisor")
    where = list(sizes).index("dp")
    split = ids.unflatten(where, (dp.size // zero_group, zero_group))
    replicas, shards = make("dp", split, where), make("dp", split, where + 1)
    return Mesh(made, device, recorder, guard, rank, world_size, timeout_s, channels, _device_mesh((replicas, shards), device), shards, replicas)


def first_ranks(stage_meshes: Sequence[Sequence[tuple[str, int]]]) -> tuple[int, ...]:
    """The first global rank of every "pp" coordinate; those of a coordinate are consecutive."""
    counts = [math.prod(size for _, size in axes) for axes in stage_meshes]
    return tuple(itertools.accumulate((0, *counts[:-1])))


def _mesh_of_stage(stage_meshes: tuple[tuple[tuple[str, int], ...], ...], job: Mesh) -> Mesh:
    """The mesh of this rank's "pp" coordinate. On "pp" stand the first ranks of the coordinates, this rank in the place of its own; only
    first ranks have a group there. Transfers go between any two ranks of the job."""
    starts, made = first_ranks(stage_meshes), {}
    here = max(i for i, first in enumerate(starts) if first <= job.rank)

    def axis(name: str, ranks: tuple[int, ...], index: int, group: Any) -> Axis:
        return replace(job.shard_axis, name=name, size=len(ranks), index=index, ranks=ranks, group=group)

    for coordinate, (first, axes) in enumerate(zip(starts, stage_meshes, strict=True)):
        shape = [size for _, size in axes]
        ids = torch.arange(first, first + math.prod(shape)).reshape(shape)
        for dim, (name, size) in enumerate(axes):
            lines = ids.movedim(dim, -1).reshape(-1, size).tolist()
            group = _new_group(lines, job.timeout_s)
            if coordinate == here:
                line = next(line for line in lines if job.rank in line)
                made[name] = axis(name, tuple(line), line.index(job.rank), group)
    pp = axis("pp", (*starts[:here], job.rank, *starts[here + 1 :]), here, _new_group([list(starts)], job.timeout_s))
    dp = made.get("dp", job.shard_axis)
    channels = {name: _new_group([list(range(job.world_size))], job.timeout_s) for name in CHANNELS}
    return replace(job, axes={"pp": pp, **made}, channels=channels, shards=_device_mesh((dp,), job.device), shard_axis=dp)


def twin_axis(mesh: Mesh, name: str) -> Axis:
    """The axis again, with a process group of its own: for communication beside that of the step. All ranks of the job call it."""
    axis = mesh.axis(name)
    if axis.size == 1:
        return axis
    ids = torch.arange(mesh.world_size).reshape([a.size for a in mesh.axes.values()])
    lines = ids.movedim(list(mesh.axes).index(name), -1).reshape(-1, axis.size).tolist()
    return replace(axis, group=_new_group(lines, mesh.timeout_s))


def plane_axis(mesh: Mesh, names: Sequence[str]) -> Axis:
    """One line over several axes, row-major, with a process group of its own where there are two or more of them. All ranks of the job call it."""
    wide = [name for name in mesh.axes if name in names and mesh.axes[name].size > 1]
    if len(wide) < 2:
        return replace(mesh.axis(wide[0] if wide else "plane"), name="plane")
    ids = torch.arange(mesh.world_size).reshape([a.size for a in mesh.axes.values()])
    places, size = [list(mesh.axes).index(name) for name in wide], math.prod(mesh.axes[name].size for name in wide)
    lines = ids.movedim(places, list(range(-len(wide), 0))).reshape(-1, size).tolist()
    own = next(line for line in lines if mesh.rank in line)
    return Axis("plane", size, own.index(mesh.rank), tuple(own), _new_group(lines, mesh.timeout_s), mesh.recorder, mesh.timeout_s, mesh.guard, mesh.device)


def _new_group(lines: list[list[int]], timeout_s: float) -> Any:
    if len(lines[0]) == 1:
        return None
    group, _ = dist.new_subgroups_by_enumeration(lines, timeout=timedelta(seconds=timeout_s))
    return group


def _device_mesh(axes: tuple[Axis, ...], device: torch.device) -> DeviceMesh | None:
    if axes[-1].size == 1:
        return None
    if len(axes) == 1:
        assert axes[0].group is not None
        return DeviceMesh.from_group(axes[0].group, device.type)
    outer, inner = axes
    if outer.group is None:
        assert inner.group is not None
        return DeviceMesh.from_group(inner.group, device.type)
    # This rank's replica line and shard line span a grid; the other entries follow from row-major order.
    stride = outer.ranks[1] - outer.ranks[0]
    first = inner.ranks[0] - outer.index * stride
    step = inner.ranks[1] - inner.ranks[0]
    grid = torch.tensor([[first + i * stride + j * step for j in range(inner.size)] for i in range(outer.size)])
    assert inner.group is not None
    return DeviceMesh.from_group([outer.group, inner.group], device.type, mesh=grid, mesh_dim_names=("replicas", "shards"))
