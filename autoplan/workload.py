"""Loads of the stages, read off the lowered program: what is priced is what runs.

A load adds up its blocks' tallies (autoplan/reading.py). A recomputed block keeps what enters it, and saves the rest for a moment; selective
recomputation keeps the products, or their sums, and attention as well (runtime/selective.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from autoplan.batchaxis import step_ops, training_results
from autoplan.graph import Graph
from autoplan.load import Model, Pass, Send, StageLoad, Traffic
from autoplan.price import Pricer, axis_group, bytes_of, compute_dtype, precision_left
from autoplan.reading import Reader, fed, local_shape
from runtime.call import dtype_of
from runtime.call import num_bytes as spec_bytes
from runtime.instr import TensorSpec
from runtime.program import Body, Program, StageCode, Stored, Transfer
from runtime.stripes import program_layout


def load_of(program: Program, stage: StageCode, graph: Graph, pricer: Pricer, rows: int | None = None) -> StageLoad:
    """The load of one stage, for micro-batches of `rows` rows (default: its largest)."""
    body = max((body for body in stage.bodies if rows in (None, body.rows)), key=lambda b: b.rows)
    reader = Reader(program, stage, body, graph, pricer)
    forward, backward, recompute = Pass(), Pass(), Pass()
    traffic: list[Traffic] = []
    saved: dict[str, int] = {}
    put_off: dict[str, int] = {}
    weights_s = 0.0
    extra = transient = number = 0
    for code in body.blocks:
        tally = reader.block(code)
        once = Pass(tally.forward_s, tally.forward_moved_s)
        forward, backward = forward.plus(once), backward.plus(Pass(tally.backward_s, tally.backward_moved_s))
        traffic += tally.traffic
        number += tally.forward_flops + tally.backward_flops
        weights_s += tally.weights_s
        put_off.update(tally.put_off)
        if code.recompute == "none":
            saved.update(tally.saved)
            extra += tally.extra_bytes
            continue
        is_selective = code.recompute == "selective"
        kept = tally.kept if is_selective else {}
        recompute = recompute.plus(Pass(tally.forward_s - tally.kept_s, tally.forward_moved_s - tally.kept_moved_s) if is_selective else once)
        number += tally.forward_flops - (tally.kept_flops if is_selective else 0)
        repeated = Counter(t for t in tally.traffic if t.phase == "forward") - Counter(tally.kept_traffic if is_selective else ())
        traffic += [replace(t, phase="backward") for t in repeated.elements()]
        saved.update((name, reader.size(name)) for name in code.inputs if name not in reader.resting)
        saved.update(kept)
        transient = max(transient, sum(size for name, size in tally.saved.items() if name not in kept) + tally.extra_bytes)
    for phase, t in (*(("forward", t) for t in body.receives), *(("backward", t) for t in body.sends if t.grad)):
        if t.pieces is not None:
            size = _send(t, reader.degrees, pricer.precision).gathered_bytes
            moved = Pass(0.0, pricer.collective("all_gather", size, axis_group(program.axes, t.pieces.axis, pricer.device)))
            forward, backward = (forward.plus(moved), backward) if phase == "forward" else (forward, backward.plus(moved))
            traffic.append(Traffic("all_gather", t.pieces.axis, phase, size))
    parameters = {s.name: s for s in stage.stored if s.kind == "parameter"}
    elements = {name: math.prod(local_shape(s, reader.degrees)) for name, s in parameters.items()}
    trained = [s for s in parameters.values() if s.requires_grad]
    widths = [spec_bytes(TensorSpec((1,), s.spec.dtype)) for s in trained or parameters.values()]
    return StageLoad(
        index=stage.index,
        first_block=body.blocks[0].name if body.blocks else "",
        last_block=body.blocks[-1].name if body.blocks else "",
        forward=forward,
        backward=backward,
        recompute=recompute,
        sends=tuple(_send(t, reader.degrees, pricer.precision) for t in body.sends),
        parameter_elements=sum(elements.values()),
        trained_elements=sum(elements[s.name] for s in trained),
        parameter_width=max(widths, default=4),
        units=_units(body, elements),
        buffer_bytes=sum(reader.size(s.name) + _master_bytes(s, reader.degrees) for s in stage.stored if s.kind != "parameter"),
        saved_bytes=sum(saved.values()) + extra,
        transient_bytes=transient,
        flops=number,
        traffic=tuple(traffic),
        deferred=tuple((a, elements[s.name] * dtype_of(s.at_rest).itemsize) for s in trained for a in s.partial if a != "dp"),
        tied_bytes=sum(elements[s.name] * dtype_of(s.at_rest).itemsize for s in trained if len({program.stage_ranks[i] for i in s.stages}) > 1),
        preamble_s=_preamble_s(program, graph, pricer, stage, body),
        num_trained=len(trained),
        compressed_bytes=program_layout(replace(program, stages=(stage,))).total_bytes if program.compression and reader.degrees.get("dp", 1) > 1 else 0,
        weights_s=weights_s,
        put_off_bytes=sum(put_off.values()),
    )


def _send(transfer: Transfer, degrees: Mapping[str, int], precision: str | None) -> Send:
    num_bytes, whole = (bytes_of(s.shape, compute_dtype(s.dtype, precision)) for s in (transfer.sent(degrees), transfer.spec))
    return Send(transfer.dst, num_bytes, transfer.grad, whole if transfer.pieces is not None else 0)


def _master_bytes(stored: Stored, degrees: Mapping[str, int]) -> int:
    """Bytes at rest of a tensor that is read as a copy in another dtype."""
    return math.prod(local_shape(stored, degrees)) * dtype_of(stored.master).itemsize if stored.master not in ("", stored.spec.dtype) else 0


def _units(body: Body, elements: Mapping[str, int]) -> tuple[int, ...]:
    """Elements of what ZeRO gathers at once: each block's own parameters, and those that several blocks use."""
    users: dict[str, int] = {}
    for code in body.blocks:
        for name in code.stored:
            users[name] = users.get(name, 0) + 1
    own = [sum(elements.get(name, 0) for name in code.stored if users[name] == 1) for code in body.blocks]
    return tuple(size for size in (*own, sum(size for name, size in elements.items() if users.get(name, 0) != 1)) if size)


def _preamble_s(program: Program, graph: Graph, pricer: Pricer, stage: StageCode, body: Body) -> float:
    if program.preamble is None:
        return 0.0
    reader = Reader(program, stage, body, graph, pricer)
    for feed in program.preamble_feeds:
        reader.give(feed.name, fed(feed, program.preamble_rows[0]), False, resting=True)
    tally = reader.block(program.preamble)
    return tally.forward_s + tally.forward_moved_s


def model_of(graph: Graph, splits: Mapping[str, Mapping[str, str]], degree: int, precision: str | None) -> Model:
    """What a forecast says about the model. `splits`: pattern -> op of the pattern's first block -> option label."""
    first: dict[str, int] = {}
    total = divided = 0
    needed = frozenset(step_ops(graph, training_results(graph), frozenset()))
    for block in graph.blocks:
        start = first.setdefault(block.pattern, block.start)
        labels = splits.get(block.pattern, {})
        for i in range(block.start, block.stop):
            if i in needed:
                total += graph.ops[i].flops
                label = labels.get(graph.ops[start + i - block.start].name, "whole")
                divided += graph.ops[i].flops if label != "whole" else 0
    return Model(total, tokens_of(graph), _busiest_dtype(graph, needed, precision), divided / total if total and degree > 1 else 1.0)


def _busiest_dtype(graph: Graph, needed: Iterable[int], precision: str | None) -> str:
    """The dtype in which most FLOPs of the operators `needed` are computed, by that of their first floating-point operand."""
    left, flops = precision_left(graph, precision), {"float32": 0}
    for i in sorted(needed):
        dtypes = (graph.values[name].spec.dtype for name in graph.ops[i].operands)
        dtype = compute_dtype(next((dtype for dtype in dtypes if dtype_of(dtype).is_floating_point), "float32"), left)
        flops[dtype] = flops.get(dtype, 0) + graph.ops[i].flops
    return max(flops, key=lambda dtype: flops[dtype])


def tokens_of(graph: Graph) -> int:
    """Elements of the first integer input of more than one dimension; rows of the batch where there is none."""
    for value in graph.inputs():
        if value.spec.dtype.startswith("int") and len(value.spec.shape) > 1:
            return math.prod(value.spec.shape)
    return graph.batch_size or 1
