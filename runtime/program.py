"""The program: everything that one class of ranks does in a training step, as frozen data.

A program is made for one stage coordinate of the mesh (all ranks that differ only on the data and
tensor axes run the same text; rank-dependent slices are computed from the rank's coordinates). It is
printable and parses back (runtime/text.py).

Layout of a step:

    preamble     values that depend on the batch alone (counts of valid labels), for the whole local batch
    actions      the pipeline schedule: forward, backward, transfers (runtime/schedule.py)
    reductions   deferred sums of gradients: data axis, tensor axis, tied stages
    updates      buffers written once (BatchNorm statistics)

Mesh axes are named "pp", "dp", "tp" (more may follow); rank = row-major index in `axes` order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from runtime.instr import Instr, TensorSpec
from runtime.pieces import room


def row_range(num_rows: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Rows [start, stop) of one rank as torch.chunk and FSDP2 divide: all parts of equal length but the last ones."""
    each = math.ceil(num_rows / num_ranks)
    return min(rank * each, num_rows), min((rank + 1) * each, num_rows)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A rank's part of one dimension on one axis.

    The dimension is seen as [outer, size, inner] (product = the dimension's length before this chunking)
    and rank r of p keeps `size/p` consecutive entries of the middle one (runtime/pieces.py where p does not divide it).
    """

    axis: str
    dim: int
    outer: int
    size: int
    inner: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor at rest: parameter, buffer or constant.

    `shape` is the dense shape under the model's own name; the local tensor is the dense one cut by `chunks`
    in order. `partial` names the axes over which local gradients are a partial sum until the deferred reduction.
    `stages` holds every stage that keeps a copy (a tied parameter has several; its gradients are summed over them).
    `master` is the dtype at rest where blocks read a copy in another one, that of `spec`; gradients have the dtype at rest.
    """

    name: str  # value name in the blocks
    fqn: str
    aliases: tuple[str, ...]
    kind: Literal["parameter", "buffer", "constant"]
    spec: TensorSpec  # dense
    chunks: tuple[Chunk, ...]
    requires_grad: bool
    partial: tuple[str, ...]
    stages: tuple[int, ...]
    master: str = ""

    @property
    def at_rest(self) -> str:
        """The dtype in which the tensor is kept."""
        return self.master or self.spec.dtype

    def local_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape that is left after `chunks` on axes of these sizes, before ZeRO."""
        shape = list(self.spec.shape)
        for chunk in self.chunks:
            shape[chunk.dim] = room(shape[chunk.dim], chunk.size, sizes.get(chunk.axis, 1))
        return tuple(shape)


@dataclass(frozen=True, slots=True)
class Feed:
    """A batch input of a stage. `batch_dim` None: the same for every row (not cut by micro-batch or data rank)."""

    name: str
    path: str  # where it is in the batch: "input_ids", "0", "pair.1"
    spec: TensorSpec  # of the global example batch
    batch_dim: int | None


@dataclass(frozen=True, slots=True)
class BlockCode:
    """The local instructions of one block for one number of rows.

    `inputs` are values from earlier blocks, feeds or the preamble; `stored` values at rest that it reads;
    `outputs` values that later blocks or stages read. Collectives are instructions of runtime/collective.py.
    """

    name: str
    inputs: tuple[str, ...]
    stored: tuple[str, ...]
    instrs: tuple[Instr, ...]
    outputs: tuple[str, ...]
    recompute: Literal["none", "selective", "full"] = "none"


@dataclass(frozen=True, slots=True)
class Spread:
    """How a value lies where it crosses between stages of different meshes: alike on both, but for the degrees of their axes.

    `sizes` are the lengths of its factors over all ranks, outermost first, dimension by dimension; 0 for the rows of the micro-batch.
    `divided`: (axis, number of the factor) that the axis divides. Over `partial` axes the value is a sum of what the ranks hold, over
    `vary` axes its gradient is; elsewhere both are copies.
    """

    sizes: tuple[int, ...]
    divided: tuple[tuple[str, int], ...]
    partial: tuple[str, ...] = ()
    vary: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Transfer:
    """One value that travels from stage `src` to stage `dst` for each micro-batch; its gradient travels back.

    `spec` is that of the local tensor on the side that lists the transfer. Without `spread` both stages have equal data and tensor
    coordinates for the ranks that pair up; with it ranks send each other the parts that they share (runtime/crossing.py).
    `pieces`, of a value that all ranks of an axis hold alike: each sends its piece, and who receives them gathers.
    Source: Narayanan et al. 2021 (SC21), section 4.1.
    """

    value: str
    src: int
    dst: int
    spec: TensorSpec
    grad: bool
    pieces: Chunk | None = None
    spread: Spread | None = None

    def sent(self, sizes: Mapping[str, int]) -> TensorSpec:
        """What one rank sends, on axes of these sizes; not where it is spread."""
        if self.pieces is None:
            return self.spec
        shape = list(self.spec.shape)
        shape[self.pieces.dim] //= sizes.get(self.pieces.axis, 1)
        return TensorSpec(tuple(shape), self.spec.dtype)


@dataclass(frozen=True, slots=True)
class Body:
    """What a stage runs for a micro-batch of `rows` rows a data rank."""

    rows: int
    blocks: tuple[BlockCode, ...]
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows [start, stop) of the global batch that this data rank takes as one micro-batch."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StageMesh:
    """The ranks of one "pp" coordinate where coordinates have meshes of their own: `first` and those that follow, row-major in `axes`.
    `micro_batches` are those of its own data ranks; the micro-batches of one number have the same rows on every coordinate."""

    first: int
    axes: tuple[tuple[str, int], ...]
    micro_batches: tuple[tuple[MicroBatch, ...], ...]


@dataclass(frozen=True, slots=True)
class StageCode:
    """One stage: its tensors at rest and one body for each number of rows that occurs."""

    index: int
    stored: tuple[Stored, ...]
    feeds: tuple[Feed, ...]
    bodies: tuple[Body, ...]
    loss: str | None  # value name; a partial sum over micro-batches and, if `loss_partial`, over the data axis
    loss_partial: tuple[str, ...]  # axes over which the local loss is a partial sum
    updates: tuple[tuple[str, str], ...]  # (buffer, value) written after the step
    predictions: tuple[str, ...] = ()  # the model's outputs that this stage holds (evaluation programs)


@dataclass(frozen=True, slots=True)
class Program:
    """What the ranks at one "pp" coordinate run in a step.

    `sync` says who sums gradients over the data axis: "allreduce", or parameter servers ("ps", "async": runtime/servers.py)
    on the data ranks `servers` ((): all of them). `workers` are the data ranks that compute ((): all of them); others have no
    micro-batches and serve. `staleness` bounds how many steps a worker may be ahead; None: no bound.
    `compression`: how gradients are sent over the data axis, a name in runtime/quantiser.py ("": as they are); `delay`: a step
    leaves the gradients of the step so many before it (0 or 1).
    `meshes`, one for each "pp" coordinate, where they are not all alike; `axes` are "pp" and those of this coordinate then, and
    every rank takes the global batch.
    """

    axes: tuple[tuple[str, int], ...]  # (("pp", 2), ("dp", 2), ("tp", 2))
    num_stages: int
    stage_ranks: tuple[int, ...]  # "pp" coordinate of each stage: (0, 1) or (0, 1, 1, 0)
    stages: tuple[StageCode, ...]  # those of this coordinate
    schedule: str  # "gpipe", "1f1b", ...
    micro_batches: tuple[tuple[MicroBatch, ...], ...]  # per data rank
    preamble: BlockCode | None  # over all the rank's own rows; its outputs feed every micro-batch, never split
    preamble_feeds: tuple[Feed, ...]
    preamble_rows: tuple[int, ...]  # rows per data rank that the preamble was lowered for
    zero: int
    zero_group: int | None
    global_rows: int
    sync: str = "allreduce"
    servers: tuple[int, ...] = ()
    staleness: int | None = None
    compression: str = ""
    delay: int = 0
    meshes: tuple[StageMesh, ...] = ()
    workers: tuple[int, ...] = ()

    @property
    def num_micro_batches(self) -> int:
        return max(len(own) for own in self.micro_batches)

    @property
    def first_worker(self) -> int:
        """The place of the first rank that computes on the program's data axis, where an asynchronous worker is alone."""
        return self.workers[0] if self.workers and self.sync != "async" else 0
