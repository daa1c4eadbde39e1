"""The batch axis: how every operator runs when the rows of the batch are divided, over ranks or over time.

The data axis divides the batch factor b. For each operator in order, with the layouts of its operands known:

    1. an operand is split on b and a loop of the operator lies over it   -> divide that loop
    2. it repeats a value for every row, or creates rows                   -> every rank makes its own rows
    3. exactly a linear group of its operands is partial                   -> pass the partial sum on
    4. its operands are parameters, or made from parameters and numbers    -> "vary": every rank computes the same,
       of the batch alone                                                      gradients stay partial sums
    5. otherwise                                                           -> whole: operands are completed first

Parameters lie VARY on this axis: their gradients are partial sums that the step's reduction completes.

Preamble: values made from the batch alone that need a collective (a count of valid labels, or the sum of their classes' weights,
which lie in a buffer) are computed once, before the first micro-batch, over all rows.

Micro-batches are the same division in time, where no collective exists. So a graph may be cut into micro-batches exactly if,
outside the preamble, no activation changes its layout on this axis. `micro_batch_blocker` names the operator that forbids it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from autoplan.graph import Graph, Loop, Op, Option
from autoplan.layout import PARTIAL, VARY, WHOLE, Layout, Split


@dataclass(frozen=True)
class BatchAxis:
    """`options[i]` is how op i runs on the data axis; `layouts` how each value lies there.

    `preamble` lists ops of the preamble in order; `preamble_outputs` the values that it hands to the step;
    `body` lists the ops of the step in order. `blocker` says why there can be only one micro-batch, or is None.
    """

    options: tuple[Option, ...]
    layouts: Mapping[str, Layout]
    preamble: tuple[int, ...]
    preamble_outputs: tuple[str, ...]
    body: tuple[int, ...]
    blocker: str | None


def batch_split(graph: Graph, name: str) -> Split | None:
    """Where dimension 0 of a batch input carries the batch factor; None for an input that has no rows."""
    dims = graph.values[name].dims
    if graph.batch_factor is None or not dims or graph.batch_factor not in dims[0]:
        return None
    return Split(0, dims[0].index(graph.batch_factor))


def training_results(graph: Graph) -> tuple[str, ...]:
    """Values that a training step must produce: the loss (the outputs where there is none) and new buffers."""
    results = graph.outputs if graph.loss is None else (graph.loss,)
    return (*results, *(value for _, value in graph.buffer_updates))


def needs_exchange(src: Layout, dst: Layout) -> bool:
    """Whether reading `src` as `dst` moves data between the ranks of the axis, or cuts by rank."""
    return src != dst and not (src in (WHOLE, VARY) and dst in (WHOLE, VARY, PARTIAL))


def batch_axis(graph: Graph) -> BatchAxis:
    """Assign every operator of `graph` on the data axis. The answer does not depend on the number of ranks."""
    return graph.known("batch axis", lambda: _batch_axis(graph))


def _batch_axis(graph: Graph) -> BatchAxis:
    layouts: dict[str, Layout] = {}
    for value in graph.values.values():
        if value.kind == "parameter":
            layouts[value.name] = VARY if value.requires_grad else WHOLE
        elif value.kind == "input":
            layouts[value.name] = batch_split(graph, value.name) or WHOLE
        elif value.kind != "activation":
            layouts[value.name] = WHOLE
    chosen: list[Option] = []
    batch_only = _batch_only(graph)
    of_rows = {value.name for value in graph.inputs() if batch_split(graph, value.name) is not None}  # and what is made of them, numbers excepted
    for op in graph.ops:
        # a sum over rows that depends on the batch alone is complete before the step begins
        early = op.outputs and op.outputs[0] not in batch_only
        have = [WHOLE if early and name in batch_only and layouts[name] == PARTIAL else layouts[name] for name in op.operands]
        option = _choose(graph, op, have, of_rows)
        chosen.append(option)
        if any(name in of_rows for name in op.operands):
            of_rows.update(name for name in op.outputs if name in graph.values and graph.values[name].spec.shape)
        layouts.update(zip(op.outputs, option.writes, strict=True))
    preamble, outputs = _preamble(graph, chosen, layouts, batch_only)
    shared = frozenset(outputs)
    body = step_ops(graph, training_results(graph), shared)
    rowwise = next((name for name in outputs if isinstance(layouts[name], Split)), None)
    blocker = f"{rowwise}, a value of each row, is made from all rows at once" if rowwise else _blocker(graph, chosen, layouts, body)
    return BatchAxis(tuple(chosen), layouts, preamble, outputs, body, blocker)


def micro_batch_blocker(graph: Graph, degree: int = 2) -> str | None:
    """Why the batch cannot be cut into micro-batches, naming the operator and its source line; None if it can."""
    if graph.batch_factor is None:
        return viewed_rows(graph) or "the batch has one row or no common first dimension, so it cannot be divided"
    return batch_axis(graph).blocker


def viewed_rows(graph: Graph) -> str | None:
    """Says which operator views the rows of the batch as a product, or cuts them; None where none does."""
    rows = next((v.dims[0] for v in graph.inputs() if v.dims and len(v.dims[0]) > 1), None)
    if rows is None:
        return None
    sizes = " x ".join(str(graph.factor_sizes[factor]) for factor in rows)
    for op in graph.ops:
        before, after = ([graph.values[name].dims for name in names if name in graph.values] for names in (op.operands, op.outputs))
        if (
            any(rows in dims for dims in before)
            and not any(rows in dims for dims in after)
            and any(rows[0] in d or rows[-1] in d for dims in after for d in dims)
        ):
            return f"{op.instr.target} in {op.module or 'the model'} ({op.source or 'no source line'}) takes the rows of the batch apart, as {sizes}"
    return f"the model takes the rows of the batch apart, as {sizes}"


def _batch_only(graph: Graph) -> frozenset[str]:
    """Values that depend on the batch, constants and buffers that the step does not write, alone."""
    written = {buffer for buffer, _ in graph.buffer_updates}
    found = {v.name for v in graph.values.values() if v.kind in ("input", "constant") or (v.kind == "buffer" and v.name not in written)}
    for op in graph.ops:
        if not op.random and op.operands and all(name in found for name in op.operands):
            found.update(op.outputs)
    return frozenset(found)


def _choose(graph: Graph, op: Op, have: list[Layout], of_rows: Container[str]) -> Option:
    grads = [graph.values[name].requires_grad for name in op.operands]
    unused = [VARY if grad else WHOLE for grad in grads]
    num_outputs = len(op.outputs)
    loop = _best_loop(graph, op, have)
    if loop is not None:
        reads = tuple(where if where is not None else unused[i] for i, where in enumerate(loop.reads))
        rest = PARTIAL if loop.kind == "sum" else WHOLE
        return Option(loop.label, reads, tuple(where if where is not None else rest for where in loop.writes))
    if any(isinstance(layout, Split) for layout in have):
        pass
    elif PARTIAL in have:
        partial = {i for i, layout in enumerate(have) if layout == PARTIAL}
        for group in sorted(op.linear_in, key=len):
            # an operand of the group that is no partial sum yet becomes one by an equal portion for each rank
            if partial <= set(group) and all(have[i] in (PARTIAL, VARY) or not grads[i] for i in group):
                reads = tuple(PARTIAL if i in group else unused[i] for i in range(len(have)))
                return Option("partial:" + ",".join(map(str, group)), reads, (PARTIAL,) * num_outputs)
    elif VARY in have and all(layout == VARY or not (grad or name in of_rows) for name, layout, grad in zip(op.operands, have, grads, strict=True)):
        return Option("vary", tuple(unused), (VARY,) * num_outputs)
    return Option("whole", (WHOLE,) * len(have), (WHOLE,) * num_outputs)


def _best_loop(graph: Graph, op: Op, have: list[Layout]) -> Loop | None:
    """The loop over the batch factor that fits most operands as they lie; ties go to one that sends nothing inside. A loop that
    no operand carries (rows are repeated or created) fits too, unless partial sums would have to be completed for it."""
    best: tuple[int, bool] | None = None
    found = None
    for loop in op.loops:
        fit = sum(isinstance(layout, Split) and layout == where for layout, where in zip(have, loop.reads, strict=True))
        makes_rows = not any(loop.reads) and PARTIAL not in have
        if loop.factor != graph.batch_factor or loop.even or (fit == 0 and not makes_rows):
            continue
        rank = (fit, loop.kind != "inner")
        if best is None or rank > best:
            best, found = rank, loop
    return found


def _preamble(graph: Graph, chosen: list[Option], layouts: dict[str, Layout], batch_only: frozenset[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Ops and outputs of the preamble. Its outputs are WHOLE from here on (`layouts` is updated)."""
    completed: set[str] = set()  # values of the whole batch, made from the batch alone
    for op, option in zip(graph.ops, chosen, strict=True):
        if op.outputs and op.outputs[0] in batch_only:
            exchanged = any(needs_exchange(layouts[name], read) for name, read in zip(op.operands, option.reads, strict=True))
            if exchanged or any(name in completed for name in op.operands):
                completed.update(op.outputs)
    outputs: dict[str, None] = {}
    for op, option in zip(graph.ops, chosen, strict=True):
        if all(name in batch_only for name in op.outputs):
            continue
        for name, read in zip(op.operands, option.reads, strict=True):
            made = name in batch_only and name in graph.producer
            if made and (name in completed or (layouts[name] == PARTIAL and read != PARTIAL)):
                outputs[name] = None
    if graph.loss in batch_only and graph.loss in graph.producer:
        outputs.pop(graph.loss, None)
    for name in outputs:
        if layouts[name] == PARTIAL:
            layouts[name] = WHOLE
    return _ancestors(graph, tuple(outputs)), tuple(outputs)


def _ancestors(graph: Graph, names: tuple[str, ...]) -> tuple[int, ...]:
    seen: set[int] = set()
    stack = [graph.producer[name] for name in names if name in graph.producer]
    while stack:
        index = stack.pop()
        if index not in seen:
            seen.add(index)
            stack.extend(graph.producer[n] for n in graph.ops[index].operands if n in graph.producer)
    return tuple(sorted(seen))


def step_ops(graph: Graph, wanted: tuple[str, ...], given: frozenset[str]) -> tuple[int, ...]:
    """Ops that `wanted` still needs once the values `given` are known, in order."""
    seen: set[int] = set()
    stack = list(wanted)
    while stack:
        name = stack.pop()
        index = graph.producer.get(name)
        if name in given or index is None or index in seen:
            continue
        seen.add(index)
        stack.extend(graph.ops[index].operands)
    return tuple(sorted(seen))


def _blocker(graph: Graph, chosen: list[Option], layouts: Mapping[str, Layout], body: tuple[int, ...]) -> str | None:
    needed = set(body) if graph.loss is None else set(_ancestors(graph, (graph.loss,)))
    for index in body:
        op, option = graph.ops[index], chosen[index]
        where = f"{op.instr.target} in {op.module or 'the model'} ({op.source or 'no source line'})"
        loop = next((loop for loop in op.loops if loop.label == option.label), None)
        if loop is not None and loop.kind == "inner":
            return f"{where} needs statistics of all rows at once"
        if index not in needed:
            continue
        for name, read in zip(op.operands, option.reads, strict=True):
            if needs_exchange(layouts[name], read):
                return f"{where} reads {name} of all rows at once"
    if graph.buffer_updates:
        updated = next((name for name, value in graph.buffer_updates if _depends_on_batch(graph, value)), None)
        if updated is not None:
            return f"buffer {graph.values[updated].fqn} is updated from all rows of the batch"
    if graph.loss is not None and layouts.get(graph.loss, WHOLE) == WHOLE and _depends_on_batch(graph, graph.loss):
        return f"the loss {graph.loss} is no sum over the rows of the batch"
    return None


def _depends_on_batch(graph: Graph, name: str) -> bool:
    reached = {n for i in _ancestors(graph, (name,)) for n in graph.ops[i].operands} if name in graph.producer else {name}
    return any(graph.values[n].kind == "input" and batch_split(graph, n) is not None for n in reached)
