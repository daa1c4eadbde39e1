"""The communication of one step, listed from the program alone: every collective of both passes, FSDP2's, the transfers,
the deferred sums and the loss. What a run records (runtime/record.py) has to be equal to it.

What a single instruction sends: runtime/instr_traffic.py.

FSDP2 over p ranks, for each group of w (padded) weight bytes and g bytes of those with gradients, m micro-batches:

    ZeRO-3   forward m all_gather w, backward m all_gather w, m reduce_scatter g
    ZeRO-2   forward 1 all_gather w,                          m reduce_scatter g
    ZeRO-1   forward 1 all_gather w,                          1 reduce_scatter g
    any, where the schedule splits the backward pass: as ZeRO-1
    any, where the runtime reduces itself (runtime/reducer.py): no reduce_scatter here

Sums over the data axis that the runtime makes itself, once a step: with B the bytes of all columns (runtime/stripes.py)

    compressed     1 all_to_all p B; ZeRO-0 also 1 all_gather B
    late, exact    all_reduces in buckets; under ZeRO reduce_scatters of padded rows in buckets

Parameter servers (runtime/partition.py), W bytes of gradients, w workers, s servers: push W and pull W; a server push_in and
pull_out w W / s each (asynchronous servers are no part of a worker's step). Pulls belong to the optimizer's step, in the phase "update".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from runtime.call import dtype_of, num_bytes
from runtime.crossing import num_elements, pieces
from runtime.flow import Flow, flow, groups, has_backward, trained
from runtime.instr import Instr, TensorSpec, uses
from runtime.instr_traffic import Use, backward_uses, forward_uses, gradient_passes, real_spec
from runtime.partition import Tensor, moves_of, servers_of
from runtime.program import BlockCode, Body, Program, StageCode, StageMesh, Stored, row_range
from runtime.record import Traffic, total
from runtime.reduction import bucket_sizes, sum_buckets
from runtime.schedule import splits_backward
from runtime.selective import keeps
from runtime.stripes import program_layout, reduced, reduces_itself
from runtime.tied import partners

Move = tuple[str, str, str, int]  # kind, axis, phase, bytes
Coordinates = Mapping[str, int]


def traffic(program: Program, coordinates: Coordinates) -> tuple[Traffic, ...]:
    """What the rank at these coordinates moves in one training step, sorted, equal (kind, axis, phase) together."""
    return total(moves(program, coordinates))


def moves(program: Program, coordinates: Coordinates) -> Iterator[Move]:
    """Single operations, not in the order of execution."""
    sizes = dict(program.axes)
    rows = [mb.stop - mb.start for mb in program.micro_batches[coordinates.get("dp", 0)]]
    if program.preamble is not None:
        own_rows = program.global_rows if program.meshes else sum(rows)
        specs = {feed.name: _own_rows(feed.spec, feed.batch_dim, own_rows) for feed in program.preamble_feeds}
        for instr in program.preamble.instrs:
            specs.update(_specs(instr))
            yield from ((use.kind, use.axis, "forward", use.num_bytes) for use in forward_uses(instr, specs, sizes))
    yield from passes(program, coordinates)
    for stage in program.stages:
        for number, count in enumerate(rows if program.meshes else ()):
            yield from _crossing_moves(program, next(body for body in stage.bodies if body.rows == count), coordinates, number)
        if sharding(program) > 1:
            yield from _fsdp_moves(program, stage, len(rows))
    yield from _reduction_moves(program, coordinates) if rows else _server_moves(program, coordinates)
    if math.prod(sizes.values()) > 1 or program.meshes:
        yield "all_reduce", "world", "reduce", 24  # the loss, its dtype and what is not finite, each a float64


def passes(program: Program, coordinates: Coordinates) -> Iterator[Move]:
    """What moves inside of the forward and backward passes of a rank, ZeRO's gathers and spread crossings left out."""
    rows = [mb.stop - mb.start for mb in program.micro_batches[coordinates.get("dp", 0)]]
    for stage in program.stages:
        for count in dict.fromkeys(rows):
            body = next(body for body in stage.bodies if body.rows == count)
            yield from tuple(_body_moves(program, stage, body, coordinates)) * rows.count(count)


def sharding(program: Program) -> int:
    """Number of ranks that ZeRO divides states over; 1 without."""
    dp = dict(program.axes).get("dp", 1)
    return (program.zero_group or dp) if program.zero else 1


# -- instructions -------------------------------------------------------------------------------------------------------


def _own_rows(spec: TensorSpec, batch_dim: int | None, rows: int) -> TensorSpec:
    return spec if batch_dim is None else replace(spec, shape=(*spec.shape[:batch_dim], rows, *spec.shape[batch_dim + 1 :]))


def _specs(instr: Instr) -> dict[str, TensorSpec]:
    return {o.name: o.spec for o in instr.outputs if o.spec is not None}


# -- one micro-batch ----------------------------------------------------------------------------------------------------


def body_specs(stage: StageCode, body: Body, sizes: Mapping[str, int], coordinates: Coordinates | None = None) -> dict[str, TensorSpec]:
    """Local specs of everything that a body reads or makes: with room for as much as any rank has, of the real rows those of the rank
    at `coordinates`, where they are given."""
    specs = {stored.name: replace(stored.spec, shape=stored.local_shape(sizes)) for stored in stage.stored}
    specs.update({feed.name: _own_rows(feed.spec, feed.batch_dim, body.rows) for feed in stage.feeds})
    specs.update({t.value: t.spec for t in body.receives})
    for block in body.blocks:
        for instr in block.instrs:
            specs.update(_specs(instr))
            if instr.target == "runtime.real_rows" and coordinates is not None:
                specs[instr.name] = real_spec(instr, specs[uses(instr)[0]], sizes, coordinates)
    return specs


def _reaches(use: Use, sizes: Mapping[str, int], coordinates: Coordinates) -> bool:
    """Whether a message has a receiver: ranks at the ends of an axis have one neighbour."""
    return use.towards == 0 or 0 <= coordinates.get(use.axis, 0) + use.towards < sizes[use.axis]


def _body_moves(program: Program, stage: StageCode, body: Body, coordinates: Coordinates) -> Iterator[Move]:
    sizes = dict(program.axes)
    specs, found = body_specs(stage, body, sizes, coordinates), flow(stage, body)
    for block in body.blocks:
        once = keeps(block).sums if block.recompute == "selective" else frozenset()
        for instr in block.instrs:
            for use in (use for use in forward_uses(instr, specs, sizes) if _reaches(use, sizes, coordinates)):
                yield use.kind, use.axis, "forward", use.num_bytes
                if block.recompute != "none" and instr.name not in once and is_recomputed(block, found):
                    yield use.kind, use.axis, "backward", use.num_bytes
            if gradient_passes(instr, found):
                back = (use for use in backward_uses(instr, specs, sizes, found.needs) if _reaches(use, sizes, coordinates))
                yield from ((use.kind, use.axis, "backward", use.num_bytes) for use in back)
    ranks = program.stage_ranks
    for transfer in body.sends:
        if ranks[transfer.dst] != ranks[transfer.src] and transfer.spread is None:
            yield "send", "pp", "forward", num_bytes(transfer.sent(sizes))
            if transfer.pieces is not None and transfer.grad:
                yield "all_gather", transfer.pieces.axis, "backward", num_bytes(transfer.spec)
    for transfer in body.receives:
        if transfer.pieces is not None:
            yield "all_gather", transfer.pieces.axis, "forward", num_bytes(transfer.spec)
        if transfer.grad and ranks[transfer.dst] != ranks[transfer.src] and transfer.spread is None:
            yield "send", "pp", "backward", num_bytes(transfer.sent(sizes))


def rank_at(mesh: StageMesh, coordinates: Coordinates) -> int:
    """The global rank at some coordinates of a mesh."""
    place = 0
    for name, size in mesh.axes:
        place = place * size + coordinates.get(name, 0)
    return mesh.first + place


def _crossing_moves(program: Program, body: Body, coordinates: Coordinates, micro_batch: int) -> Iterator[Move]:
    """What a rank sends of one micro-batch to stages of other meshes."""
    ranks, rank = program.stage_ranks, rank_at(program.meshes[coordinates.get("pp", 0)], coordinates)
    leaving = [(t, "forward") for t in body.sends] + [(t, "backward") for t in body.receives if t.grad]
    for t, phase in leaving:
        if t.spread is not None:
            ends, is_grad = (program.meshes[ranks[stage]] for stage in (t.src, t.dst)), phase == "backward"
            sender, receiver = reversed(tuple(ends)) if is_grad else ends
            for piece in pieces(t.spread, sender, receiver, micro_batch, is_grad=is_grad):
                if piece.sender == rank:
                    yield "send", "pp", phase, num_elements(piece.box) * dtype_of(t.spec.dtype).itemsize


def is_recomputed(block: BlockCode, found: Flow) -> bool:
    return has_backward(block, found)


# -- once a step --------------------------------------------------------------------------------------------------------


def _fsdp_moves(program: Program, stage: StageCode, num_micro_batches: int) -> Iterator[Move]:
    once = is_split_backward(program)
    for group in fsdp_groups(program, stage):
        gathers = num_micro_batches if program.zero == 3 and not once else 1
        reductions = 1 if program.zero == 1 or once else num_micro_batches
        yield from [("all_gather", "dp", "forward", group.weight_bytes)] * gathers
        if group.has_backward and program.zero == 3 and not once:
            yield from [("all_gather", "dp", "backward", group.weight_bytes)] * gathers
        if group.grad_bytes and not reduces_itself(program):
            yield from [("reduce_scatter", "dp", "backward", group.grad_bytes)] * reductions
            if program.zero_group not in (None, dict(program.axes).get("dp", 1)):
                yield from [("all_reduce", "dp", "backward", group.grad_bytes // sharding(program))] * reductions


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that FSDP2 gathers together: of a block, or of the stage (None). Padded bytes."""

    block: str | None
    names: tuple[str, ...]
    weight_bytes: int
    grad_bytes: int
    has_backward: bool


def fsdp_groups(program: Program, stage: StageCode) -> tuple[Group, ...]:
    """The groups of a stage, blocks in order, the stage's own last."""
    sizes, num_ranks = dict(program.axes), sharding(program)
    body = stage.bodies[0]
    found, stored = flow(stage, body), {s.name: s for s in stage.stored}
    blocks = {block.name: block for block in body.blocks}

    def padded(name: str, dtype: str) -> int:
        rows, *rest = stored[name].local_shape(sizes) or (1,)
        return row_range(rows, 0, num_ranks)[1] * num_ranks * math.prod(rest) * dtype_of(dtype).itemsize

    out = []
    for owner, names in groups(stage, is_split_backward=is_split_backward(program)):
        passes = has_backward(blocks[owner], found) if owner is not None else bool(found.arrives)
        grads = sum(padded(name, stored[name].at_rest) for name in names if name in found.arrives and stored[name].requires_grad)
        out.append(Group(owner, names, sum(padded(name, stored[name].spec.dtype) for name in names), grads, passes))
    return tuple(out)


def is_split_backward(program: Program) -> bool:
    return splits_backward(program.schedule)


def with_gradients(program: Program) -> frozenset[tuple[int, str]]:
    """(stage, value name) of the parameters that a step leaves a gradient of."""
    return frozenset((index, stored.name) for index, stored in trained(program))


def sums_are_everywhere(program: Program) -> bool:
    """Whether a step leaves the complete sum of every gradient on every rank: data ranks alone, that hold whole states and sum everything."""
    only_data = not program.meshes and all(size == 1 for axis, size in program.axes if axis != "dp")
    is_plain = sharding(program) == 1 and program.sync == "allreduce" and not reduces_itself(program)
    return only_data and is_plain and (dict(program.axes).get("dp", 1) == 1 or all("dp" in stored.partial for stored in _grads(program)))


def _grads(program: Program) -> list[Stored]:
    return [stored for _, stored in trained(program)]


def shard_bytes(stored: Stored, program: Program, coordinates: Coordinates) -> int:
    """Bytes of a parameter at rest on one rank."""
    shape = stored.local_shape(dict(program.axes))
    parts = sharding(program)
    if parts > 1 and stored.kind == "parameter":
        rows, *rest = shape or (1,)
        start, stop = row_range(rows, coordinates.get("dp", 0) % parts, parts)
        shape = (stop - start, *rest)
    return math.prod(shape) * dtype_of(stored.at_rest).itemsize


def _data_moves(program: Program) -> Iterator[Move]:
    """The sums over the data axis that the runtime makes itself."""
    num_ranks = dict(program.axes)["dp"]
    if program.compression:
        found = program_layout(program)
        yield "all_to_all", "dp", "reduce", found.total_bytes * num_ranks
        if found.is_gathered:
            yield "all_gather", "dp", "reduce", found.total_bytes
        return
    by_dtype: dict[str, list[int]] = {}
    for _, stored in reduced(program):
        rows, *rest = stored.local_shape(dict(program.axes)) or (1,)
        rows = row_range(rows, 0, num_ranks)[1] * num_ranks if program.zero else rows
        by_dtype.setdefault(stored.at_rest, []).append(rows * math.prod(rest) * dtype_of(stored.at_rest).itemsize)
    kind, cut = ("reduce_scatter", bucket_sizes) if program.zero else ("all_reduce", sum_buckets)
    yield from ((kind, "dp", "reduce", sum(bucket)) for own in by_dtype.values() for bucket in cut(own))


def _reduction_moves(program: Program, coordinates: Coordinates) -> Iterator[Move]:
    sizes, is_own = dict(program.axes), reduces_itself(program)
    is_sharded = sharding(program) > 1 or bool(servers_of(program))
    grads = [(s, tuple(a for a in s.partial if not ((is_sharded or is_own) and a == "dp"))) for s in _grads(program)]
    for place, axis in sorted({(place, axis) for _, axes in grads for place, axis in enumerate(axes)}):
        if sizes.get(axis, 1) == 1:
            continue
        by_dtype: dict[str, list[int]] = {}
        for stored, axes in grads:
            if axes[place : place + 1] == (axis,):
                size = shard_bytes(stored, program if not is_own else replace(program, zero=0), coordinates)
                by_dtype.setdefault(stored.at_rest, []).append(size)
        for own in by_dtype.values():
            yield from (("all_reduce", axis, "reduce", sum(bucket)) for bucket in sum_buckets(own))
    if is_own:
        yield from _data_moves(program)
    yield from tied_moves(program, coordinates)
    yield from _server_moves(program, coordinates)


def tied_moves(program: Program, coordinates: Coordinates) -> Iterator[Move]:
    """The sums of gradients over the stages that keep a parameter (runtime/tied.py)."""
    ranks, me = program.stage_ranks, coordinates.get("pp", 0)
    tied = {s.fqn: s for stage in program.stages for s in stage.stored if len(s.stages) > 1 and s.requires_grad and s.kind == "parameter"}
    for stored in tied.values():
        holders = list(dict.fromkeys(ranks[s] for s in sorted(stored.stages)))
        if len(holders) == 1:
            continue
        if program.meshes:
            yield from _dense_tied_moves(program, stored, holders, coordinates)
        else:
            yield from [("send", "tied", "reduce", shard_bytes(stored, program, coordinates))] * (len(holders) - 1 if holders[0] == me else 1)


def _dense_tied_moves(program: Program, stored: Stored, holders: list[int], coordinates: Coordinates) -> Iterator[Move]:
    me, width, sizes = coordinates.get("pp", 0), dtype_of(stored.at_rest).itemsize, dict(program.axes)
    shape, parts = list(stored.local_shape(sizes) or (1,)), sharding(program)
    if parts > 1:
        yield "all_gather", "dp", "reduce", row_range(shape[0], 0, parts)[1] * parts * math.prod(shape[1:]) * width
    for chunk in reversed(stored.chunks):
        shape[chunk.dim] *= sizes.get(chunk.axis, 1)
        if sizes.get(chunk.axis, 1) > 1:
            yield "all_gather", chunk.axis, "reduce", math.prod(shape) * width
    for _, takers in partners(holders, me, rank_at(program.meshes[me], coordinates), program.meshes).values():
        yield from [("send", "tied", "reduce", math.prod(shape) * width)] * len(takers)


def _server_moves(program: Program, coordinates: Coordinates) -> Iterator[Move]:
    if not servers_of(program):
        return
    sizes, with_grads = dict(program.axes), {id(s) for s in _grads(program)}
    trained = [s for stage in program.stages for s in stage.stored if s.kind == "parameter" and s.requires_grad]
    tensors = tuple(Tensor(math.prod(s.local_shape(sizes)), s.at_rest, dtype_of(s.at_rest).itemsize, "dp" in s.partial) for s in trained)
    yield from moves_of(program, tensors, frozenset(i for i, s in enumerate(trained) if id(s) in with_grads), coordinates.get("dp", 0))
