"""Steps of a program on paced devices, measured: what a rank needs to have of a plan, and what it finds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from runtime.call import dtype_of
from runtime.executor import Executor
from runtime.mesh import Mesh, build_mesh
from runtime.paced import Pace, clock_of
from runtime.program import Program
from runtime.record import Interval, Traffic


@dataclass(frozen=True)
class Job:
    """One rank's part of a plan. `batch`: the global one; its values do not matter."""

    program: Program
    pace: Pace
    batch: Any


@dataclass(frozen=True)
class Step:
    """A step as one rank saw it, optimizer included; on the clock that the ranks share (runtime/paceclock.py). `late_s`: the most that the host was late."""

    start_s: float
    end_s: float
    late_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Found:
    """What a rank measured. `traffic` and `events` are those of the last step."""

    steps: tuple[Step, ...]
    traffic: tuple[Traffic, ...]
    events: tuple[Interval, ...]


def run(job: Job, num_steps: int, *, most_steps: int = 0, timeout_s: float = 300.0) -> Found:
    """Measure steps after one that warms up and sleeps nowhere: `num_steps` that nothing disturbed, or `most_steps` in all. Every rank calls it, with its
    own part."""
    mesh = build_mesh(job.program.axes, zero_group=job.program.zero_group, device=torch.device("cpu"), timeout_s=timeout_s)
    specs = {stored.fqn: stored for stage in job.program.stages for stored in stage.stored}

    def zeros(fqn: str) -> torch.Tensor:
        return torch.zeros(specs[fqn].spec.shape, dtype=dtype_of(specs[fqn].spec.dtype))

    executor = Executor(job.program, mesh, zeros, pacer=lambda _: job.pace)
    clock, steps, num_good = clock_of(mesh), [], 0
    clock.slack_s = math.inf
    _step(executor, job)
    clock.slack_s = job.pace.slack_s
    while num_good < num_steps and len(steps) < max(num_steps, most_steps):
        steps.append(_step(executor, job))
        late_s = torch.tensor([steps[-1].late_s], dtype=torch.float64)
        dist.all_reduce(late_s, dist.ReduceOp.MAX)
        num_good += late_s.item() <= clock.slack_s
    found = Found(tuple(steps), mesh.recorder.traffic(), (*mesh.recorder.ran, *mesh.recorder.sent))
    dist.barrier()
    _close(mesh)
    return found


def _step(executor: Executor, job: Job) -> Step:
    clock = clock_of(executor.mesh)
    executor.zero_grad()
    dist.barrier()
    clock.reset()
    start_s = clock.now()
    executor.step(job.batch)
    clock.rest(job.pace.optimizer_s)
    return Step(start_s, clock.now(), clock.late_s)


def _close(mesh: Mesh) -> None:
    groups = [axis.group for axis in (*mesh.axes.values(), mesh.shard_axis, mesh.replica_axis)] + list(mesh.channels.values())
    plane = clock_of(mesh).plane
    groups.append(plane.group if plane is not None else None)
    for group in dict.fromkeys(group for group in groups if group is not None):
        dist.destroy_process_group(group)


def least_disturbed(ranks: Sequence[Found]) -> Step:
    """The shortest step from the first rank that begins to the last that ends: nothing makes a paced step shorter than it is."""
    steps = [Step(min(s.start_s for s in own), max(s.end_s for s in own), max(s.late_s for s in own)) for own in zip(*(f.steps for f in ranks), strict=True)]
    return min(steps, key=lambda step: step.seconds)
