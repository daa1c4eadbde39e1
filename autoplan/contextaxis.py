"""Context and expert axes: how every operator runs when one factor is divided over ranks through the whole model.

    cp   divides the sequence: the factor that attention's queries share with the tokens
    ep   divides the rows of the batch, beside the data axis, and rests experts divided

As on the data axis (autoplan/batchaxis.py) nothing is chosen: for each operator in order, with the layouts of its operands known,

    1. attention (cp), a layer of experts (ep)       -> a function that exchanges what is missing: `Ways`
    2. made from the batch and constants alone       -> whole: every rank has them, so a reader takes its part without a word
    3. an operand is split on the factor, or is one of those, and a loop of the operator lies over it     -> divide that loop
    4. exactly a linear group of its operands is partial                   -> pass the partial sum on
    5. its operands are parameters, or made from parameters alone          -> "vary": gradients stay partial sums
    6. otherwise                                                           -> whole: operands are completed first

Parameters lie VARY, experts Split. The loss is a partial sum, as over the data axis. What rule 6 leaves whole is repeated on every rank, so an
operator that weighs and cannot be divided makes the axis impossible: `ContextAxis.blocker` names it.

Ways of attention over a divided sequence of P parts, with the elements that a rank sends in both passes (b s h: all keys):

    ring     blocks of keys and values travel (runtime/sharded/ring_attention.py)         6 (P-1)/P b s h
    heads    sequence to heads and back by all_to_all, P divides the key heads            8 (P-1)/P^2 b s h
    gather   keys and values whole by all_gather; not causal                              4 (P-1)/P b s h
    self     ring self-attention, weights kept (runtime/sharded/self_attention_ring.py)   8 (P-1)/P b s h

Sources: Liu et al. 2023 (Ring Attention), Jacobs et al. 2023 (DeepSpeed-Ulysses), Li et al. 2021 (Sequence Parallelism), Lepikhin et al. 2020 (GShard).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoplan.constraints import nearest_divisor
from autoplan.errors import InfeasibleError
from autoplan.graph import Graph, Loop, Op, Option, can_be_divided
from autoplan.layout import PARTIAL, VARY, WHOLE, Layout, Split

ATTENTION = ("aten.scaled_dot_product_attention.default", "runtime.attention")
EXPERTS = "runtime.experts"
DEFAULT_WAY = "ring"
_HEAVY_SHARE = 0.01  # of the model's FLOPs


@dataclass(frozen=True)
class ContextAxis:
    """`options[i]` is how op i runs on the axis, `layouts` how each value lies there, `factors` what is divided.

    `blocker` says why the axis cannot be had, naming operator and line, or is None.
    """

    name: str
    factors: frozenset[int]
    options: tuple[Option, ...]
    layouts: Mapping[str, Layout]
    blocker: str | None


def where(op: Op) -> str:
    """An operator as messages name it."""
    return f"{op.instr.target} in {op.module or 'the model'} ({op.source or 'no source line'})"


def sequence_factors(graph: Graph) -> frozenset[int]:
    """The factors of the positions of attention's queries; those of the sequence that cp divides."""
    found: dict[int, None] = {}
    for op in graph.ops:
        if op.instr.target in ATTENTION:
            out = graph.values[op.outputs[0]]
            positions = out.dims[-2] if len(out.dims) > 1 else ()
            if len(positions) == 1 and positions[0] != graph.batch_factor:
                found[positions[0]] = None
    return frozenset(found)


def sequence_length(graph: Graph) -> int:
    """The longest sequence that attention sees; 0 without attention."""
    return max((graph.factor_sizes[f] for f in sequence_factors(graph)), default=0)


def num_experts(graph: Graph) -> tuple[int, ...]:
    """The numbers of experts of the model's layers of experts, each once."""
    return tuple(dict.fromkeys(int(graph.values[op.operands[3]].spec.shape[0]) for op in graph.ops if op.instr.target == EXPERTS))


def context_axis(graph: Graph, name: str, given: tuple[str, ...] = (), way: str = DEFAULT_WAY) -> ContextAxis:
    """Assign every operator on the axis `name` ("cp" or "ep"). The answer does not depend on the number of ranks.

    `given` are values that are made beforehand, whole. `way` is how attention exchanges; one that cannot do it that way takes the ring.
    """
    rows = frozenset() if graph.batch_factor is None else frozenset({graph.batch_factor})
    factors = sequence_factors(graph) if name == "cp" else rows
    free = _free(graph, given)
    layouts: dict[str, Layout] = dict.fromkeys(free, WHOLE)
    for value in graph.values.values():
        if value.kind != "activation":
            layouts[value.name] = VARY if value.kind == "parameter" and value.requires_grad else WHOLE
    chosen: list[Option] = []
    blocker = None
    total = sum(op.flops for op in graph.ops)
    for op in graph.ops:
        option = _choose(graph, op, layouts, free, factors, way if name == "cp" else "")
        chosen.append(option)
        layouts.update((out, layout) for out, layout in zip(op.outputs, option.writes, strict=True) if out not in given)
        divides = any(isinstance(layout, Split) for layout in (*option.reads, *option.writes))
        if blocker is None and not divides and op.flops > _HEAVY_SHARE * total:
            what = "positions of the sequence" if name == "cp" else "rows of the batch"
            blocker = f"{where(op)} cannot be divided by {what}, so every rank would repeat it"
    return ContextAxis(name, factors, tuple(chosen), layouts, blocker)


def check_context(graph: Graph, name: str, degree: int, axis: ContextAxis, way: str | None = None) -> None:
    """Raises InfeasibleError, with the reason and the nearest fix, where `degree` ranks cannot run the axis."""
    asked = f"{name}={degree}"
    if not axis.factors:
        why = "no attention operator, whose sequence it would divide" if name == "cp" else "a batch of one row or without a common first dimension"
        raise InfeasibleError(f"{asked} cannot be had: the model has {why}. Use {name}=1")
    if axis.blocker is not None:
        raise InfeasibleError(f"{asked} cannot be had: {axis.blocker}. Use {name}=1, or tp")
    for factor in sorted(axis.factors):
        size = graph.factor_sizes[factor]
        if size % degree:
            longer, shorter = -(-size // degree) * degree, size // degree * degree
            what = "a sequence" if name == "cp" else "a global batch"
            ignored = " with padding whose labels are ignored" if name == "cp" else ""
            why = _blocks_uneven(graph, factor, degree, axis)
            if why:
                raise InfeasibleError(
                    f"{asked} does not divide {what} of {size}, and {why}: make it {longer}{ignored}{f' or {shorter}' if shorter else ''}, "
                    f"or use a degree that divides {size}"
                )
    if name == "ep":
        _check_experts(graph, degree)
    for op, option in zip(graph.ops, axis.options, strict=True):
        if name == "cp" and op.instr.target in ATTENTION:
            _check_way(graph, op, option, degree, way)


def _blocks_uneven(graph: Graph, factor: int, degree: int, axis: ContextAxis) -> str:
    """Why ranks cannot hold unequal parts of a factor; "" where they can."""
    if factor == graph.batch_factor:
        return "its rows are dealt evenly"
    if graph.factor_sizes[factor] < degree:
        return "some ranks would have no position"
    resting = next((v for v in graph.values.values() if v.kind in ("parameter", "buffer") and any(factor in dim for dim in v.dims)), None)
    if resting is not None:
        return f"{resting.fqn}, which has an entry for each position, is cut evenly"
    for op, option in zip(graph.ops, axis.options, strict=True):
        loop = loop_of(op, option.label)
        if loop is not None and loop.factor == factor and not can_be_divided(graph, op, loop, degree):
            return f"{where(op)} cannot tell the positions of a rank from the room that is left on it"
    return ""


def _check_experts(graph: Graph, degree: int) -> None:
    found = num_experts(graph)
    if not found:
        raise InfeasibleError(f"ep={degree} cannot be had: the model has no layer of experts that the capture knows. Use ep=1, or dp for its rows")
    for number in found:
        if number % degree:
            nearest = nearest_divisor(number, degree)
            raise InfeasibleError(f"ep={degree} does not divide {number} experts: nearest that does is ep={nearest}")


def _check_way(graph: Graph, op: Op, option: Option, degree: int, way: str | None) -> None:
    loop = loop_of(op, option.label)
    if way is not None and _way_of(graph, op, option) != way and _way_of(graph, op, option) != "":
        raise InfeasibleError(f"{where(op)} cannot exchange by {way!r} over a divided sequence: leave the way out, or use 'ring'")
    if loop is not None and loop.factor not in sequence_factors(graph) and graph.factor_sizes[loop.factor] % degree:
        size = graph.factor_sizes[loop.factor]
        raise InfeasibleError(f"cp={degree} with attention by heads does not divide the {size} key heads of {where(op)}: use 'ring', or a divisor of {size}")


def _way_of(graph: Graph, op: Op, option: Option) -> str:
    """How an attention operator exchanges under an option; "" where it has no way of its own."""
    if option.label in ("ring", "self"):
        return option.label
    heads = _heads(graph, op)
    if heads is not None and option.label == heads.label:
        return "heads"
    return "gather" if option.label.startswith("s") else ""


def loop_of(op: Op, label: str) -> Loop | None:
    """The loop that an option divides, paired ones included; None for the other options."""
    return next((loop for loop in (*op.loops, *op.paired) if loop.label == label), None)


def _free(graph: Graph, given: tuple[str, ...]) -> frozenset[str]:
    """Values that every rank has or makes whole without exchange: of the batch, constants and buffers alone, without gradient."""
    updated = {buffer for buffer, _ in graph.buffer_updates}
    found = {v.name for v in graph.values.values() if v.kind in ("input", "constant", "buffer") and v.name not in updated} | set(given)
    for op in graph.ops:
        if not op.random and all(name in found for name in op.operands) and not any(graph.values[out].requires_grad for out in op.outputs):
            found.update(op.outputs)
    return frozenset(found)


def _heads(graph: Graph, op: Op) -> Loop | None:
    """The loop over key heads of an attention operator."""
    q, k = (graph.values[name] for name in op.operands[:2])
    if len(k.dims) < 3 or len(k.dims[-3]) != 1:
        return None
    at = Split(len(k.dims) - 3, 0)
    return next((loop for loop in op.loops if loop.reads[1] == at and loop.reads[0] is not None and loop.reads[0].dim == len(q.dims) - 3), None)


def _attention(graph: Graph, op: Op, factors: frozenset[int], way: str) -> Loop | None:
    """The loop by which an attention operator runs where its queries are divided; None: as any other operator."""
    rings = {loop.label: loop for loop in op.paired if loop.factor in factors}
    learned = any(graph.values[name].requires_grad for name in op.operands[3:])
    found = None
    if way == "heads":
        found = _heads(graph, op)
    elif way in rings and not learned:
        found = rings[way]
    if found is None:
        positions = next((loop for loop in op.loops if loop.label == "s" and loop.factor in factors), None)
        found = positions if way == "gather" or learned or not rings else rings[DEFAULT_WAY]
        found = found or (rings.get(DEFAULT_WAY) if not learned else None)
    return found


def _choose(graph: Graph, op: Op, layouts: Mapping[str, Layout], free: frozenset[str], factors: frozenset[int], way: str) -> Option:
    """One operator; `way` "" on the expert axis."""
    have = [layouts[name] for name in op.operands]
    grads = [graph.values[name].requires_grad for name in op.operands]
    unused = [VARY if grad else WHOLE for grad in grads]
    whole = Option("whole", (WHOLE,) * len(have), (WHOLE,) * len(op.outputs))
    if op.outputs and all(name in free for name in op.outputs):
        return whole
    loop = None
    if way and op.instr.target in ATTENTION and isinstance(have[0], Split):
        loop = _attention(graph, op, factors, way)
    elif not way and op.instr.target == EXPERTS and isinstance(have[0], Split):
        loop = next((pair for pair in op.paired if pair.factor in factors and pair.reads[0] == have[0]), None)
    # what attention by heads leaves divided by heads is divided by the sequence for every other reader
    guests = [isinstance(at, Split) and graph.values[name].dims[at.dim][at.factor] not in factors for name, at in zip(op.operands, have, strict=True)]
    loop = loop or _best_loop(op, have, guests, [name in free for name in op.operands], factors)
    if loop is not None:
        reads = tuple(place if place is not None else unused[i] for i, place in enumerate(loop.reads))
        rest = PARTIAL if loop.kind == "sum" else WHOLE
        return Option(loop.label, reads, tuple(place if place is not None else rest for place in loop.writes))
    if any(isinstance(layout, Split) for layout in have):
        return whole
    if PARTIAL in have:
        partial = {i for i, layout in enumerate(have) if layout == PARTIAL}
        for group in sorted(op.linear_in, key=len):
            if partial <= set(group) and all(have[i] in (PARTIAL, VARY) or not grads[i] for i in group):
                reads = tuple(PARTIAL if i in group else unused[i] for i in range(len(have)))
                return Option("partial:" + ",".join(map(str, group)), reads, (PARTIAL,) * len(op.outputs))
    elif VARY in have and all(layout == VARY or not grad for layout, grad in zip(have, grads, strict=True)):
        return Option("vary", tuple(unused), (VARY,) * len(op.outputs))
    return whole


def _best_loop(op: Op, have: list[Layout], guests: list[bool], free: list[bool], factors: frozenset[int]) -> Loop | None:
    """The loop over the factor that fits most operands as they lie; then most of those that are free to be cut; ties go to one that sends
    nothing inside. A loop that no operand carries fits too, unless partial sums would have to be completed for it."""
    best: tuple[int, int, bool] | None = None
    found = None
    for loop in op.loops:
        if loop.factor not in factors:
            continue
        fit = sum(place is not None and (layout == place or guest) for layout, place, guest in zip(have, loop.reads, guests, strict=True))
        cut = sum(place is not None for place, is_free in zip(loop.reads, free, strict=True) if is_free)
        split = any(isinstance(layout, Split) for layout in have)
        makes = not any(loop.reads) and PARTIAL not in have
        if not fit and not makes and (split or not cut or PARTIAL in have):
            continue
        rank = (fit, cut, loop.kind != "inner")
        if best is None or rank > best:
            best, found = rank, loop
    return found
