"""The plan: what was decided, why, and what it is predicted to cost. Frozen, readable, versioned JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from autoplan.forecast import CollectiveUse, Forecast
from autoplan.schemes import degree_of

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True)
class OpNote:
    """An op as readers know it: the kind of operator, its module relative to its block ("self_attn.q_proj"), and what is
    divided on the tensor axis: "whole", "heads", "features", "features (sum)" for a contraction, "sequence", "partial", ..."""

    name: str
    target: str
    module: str
    flops: int  # of the forward pass at the global batch, whole
    split: str = "whole"
    rows: bool = False  # the batch is one of its loops: the data axis and micro-batches divide it


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """How the blocks of one pattern run on the tensor axis.

    `splits` maps op name, as in the pattern's first block, to its option label (autoplan.graph.options); ops that
    are not listed run whole; several feature axes (autoplan/schemes.py) have their labels joined, "o~b1 | i".
    `boundary` maps each value that enters or leaves the block to its layout on the
    tensor axis ("whole", "split(1.0)"), equal on both sides of a boundary. `blocks` are the indices of the graph's
    blocks of this pattern, and `ops` the pattern's ops in order, for the plan map (autoplan/notes.py).
    """

    pattern: str
    example: str  # name of the pattern's first block
    splits: Mapping[str, str]
    boundary: Mapping[str, str]
    recompute: str = "none"
    blocks: tuple[int, ...] = ()
    ops: tuple[OpNote, ...] = ()


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Blocks [start, stop) of the graph, by name of the first and last. `gathers`: what tensor ranks hold alike comes from other pipeline
    ranks in pieces (autoplan/transit.py). `recompute`: how each of them is recomputed, () where all are as their patterns say."""

    start: int
    stop: int
    first: str
    last: str
    rank: int  # "pp" coordinate
    gathers: bool = False
    recompute: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Alternative:
    """A runner-up: its degrees, its forecast, and why it lost."""

    summary: str
    step_time_s: float
    peak_memory_bytes: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """A complete decision for one model on one cluster at one global batch.

    `axes` is the mesh, outermost first: (("pp", 2), ("dp", 2), ("cp", 2), ("tp", 2)); on unequal devices "dp" may be outermost; "cp" and
    "ep" are there where they are more than 1. `context` is how attention exchanges over a sequence that "cp" divides
    (autoplan/contextaxis.py), "" without. `shares` are the rows of
    the global batch that each data rank takes; () where they are equal. `micro_batch_size` is that of the largest share. `space` lists every axis that was
    searched with its values. `placement`, where modules were pinned, says which stage every operator is on: (first operator of a run
    in the captured order, stage); blocks and stages are those of the graph in stage order then (autoplan/arrange.py).
    `sync`, `servers`, `workers` (data ranks; (): all of them) and `staleness` say who sums gradients over the data axis, as in runtime/program.py;
    `compression` and `delay` how (docs/training-modes.md).
    `stage_meshes`, where stages differ: the axes inside of each "pp" coordinate, (("dp", 2), ("tp", 4)); `axes` is "pp" alone then, every rank
    takes the global batch, and `micro_batch_size` counts rows of a whole micro-batch (autoplan/stagemeshes.py).
    JSON form: autoplan/planfile.py.
    """

    model: str
    model_fingerprint: str
    cluster: str
    cluster_fingerprint: str
    global_batch: int
    micro_batch_size: int
    num_micro_batches: int
    axes: tuple[tuple[str, int], ...]
    zero: int
    zero_group: int | None
    schedule: str
    num_chunks: int
    precision: str | None
    optimizer: str
    stages: tuple[StagePlan, ...]
    blocks: tuple[BlockPlan, ...]
    forecast: Forecast
    gap: float
    space: Mapping[str, tuple]
    alternatives: tuple[Alternative, ...] = ()
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    placement: tuple[tuple[int, int], ...] = ()
    sync: str = "allreduce"
    servers: tuple[int, ...] = ()
    staleness: int | None = None
    shares: tuple[int, ...] = ()
    compression: str | None = None
    delay: int = 0
    version: int = PLAN_VERSION
    context: str = ""
    stage_meshes: tuple[tuple[tuple[str, int], ...], ...] = ()
    workers: tuple[int, ...] = ()

    def degree(self, axis: str) -> int:
        """Ranks along an axis; "tp": along all tensor axes together. Of axes that all stages share alone."""
        return degree_of(self.axes, axis)

    def most(self, axis: str) -> int:
        """The largest degree of an axis over all stages."""
        return max(degree_of(mesh, axis) for mesh in self.stage_meshes or (self.axes,))

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages together."""
        return sum(prod(size for _, size in mesh) for mesh in self.stage_meshes or (self.axes,))

    def axes_of(self, coordinate: int) -> tuple[tuple[str, int], ...]:
        """The axes as the ranks of one "pp" coordinate see them."""
        return (*self.axes, *self.stage_meshes[coordinate]) if self.stage_meshes else self.axes

    @property
    def is_exact(self) -> bool:
        """Whether a step gives the result of the unpartitioned model on the global batch."""
        return self.sync != "async" and self.compression is None and self.delay == 0

    @property
    def collectives(self) -> tuple[CollectiveUse, ...]:
        return self.forecast.collectives

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON (autoplan/planfile.py); the previous file stays until the new one is complete."""
        from autoplan.planfile import save

        save(self, path)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file. Raises StalePlanError where it is damaged or of another version."""
        from autoplan.planfile import load

        return load(path)

    def diff(self, other: Plan) -> str:
        """What differs, a line each; empty where the plans are equal."""
        from autoplan.planfile import diff

        return diff(self, other)

    def explain(self) -> str:
        """Why this plan: its reasons, its runners-up, its memory and traffic, as text."""
        from autoplan.explain import explain

        return explain(self)


def recomputed(plan: Plan) -> tuple[str, ...]:
    """How each block of the graph is recomputed: "none", "selective" or "full"."""
    by_pattern = {number: block.recompute for block in plan.blocks for number in block.blocks}
    found: list[str] = []
    for stage in plan.stages:
        found += stage.recompute or (by_pattern.get(number, "none") for number in range(stage.start, stage.stop))
    return tuple(found)


def ways_by_pattern(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Pattern -> the ways in which its blocks are recomputed."""
    ways = recomputed(plan)
    return {block.pattern: tuple(sorted({ways[number] for number in block.blocks} or {block.recompute})) for block in plan.blocks}


def with_ways(plan: Plan, ways: Sequence[str]) -> Plan:
    """The plan with a way of recomputing for every block of the graph."""
    return replace(plan, stages=tuple(replace(stage, recompute=tuple(ways[stage.start : stage.stop])) for stage in plan.stages))


def workers_of(plan: Plan) -> tuple[int, ...]:
    """The data ranks that compute."""
    return plan.workers or tuple(range(plan.degree("dp")))


def served_by(plan: Plan) -> tuple[int, ...]:
    """The data ranks that serve parameters; () where gradients are all-reduced."""
    return (plan.servers or tuple(range(plan.degree("dp")))) if plan.sync != "allreduce" else ()
