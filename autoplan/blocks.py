"""Blocks: the order of a graph's operators, cut where its layers begin and end.

A layer is an item of a numbered container in the module paths ("model.layers.3", "layer2.0"), the outermost one that holds at least two items with
products in them; where one item holds most of the model, or no two items are alike (stages), and some inside them are, the containers inside count
instead. Operators between two items of one container go to the later item; what lies between containers is a part of its own if it has
parameters. A model without containers is cut where few values are alive.

Terms that depend on weights alone go to the block of their weights (autoplan/penalties.py).

Operators are ordered so that every block is one run: an operator belongs to the latest block among its own and its operands'
(a topological order by block, then by time). Blocks of equal `pattern` have the same operators on the same shapes, wired alike.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import networkx as nx

from autoplan.fingerprint import digest
from autoplan.graph import Block, Graph, Op, Value
from autoplan.penalties import beside_readers
from runtime.call import num_bytes
from runtime.instr import Arg, Ref

MAX_PARTS = 16  # of a model without containers
_OWN_NAME = ("runtime.dropout", "runtime.attention")  # their last argument is the operator's own name


@dataclass(frozen=True, slots=True)
class CutPoint:
    """The boundary before block `block`: the activations that cross it, and their bytes."""

    block: int
    values: tuple[str, ...]
    num_bytes: int


def cut_points(graph: Graph) -> tuple[CutPoint, ...]:
    """Every inner boundary with what crosses it. Parameters, buffers, inputs and constants do not count: each stage holds its own."""
    found = []
    for i, block in enumerate(graph.blocks[1:], 1):
        values = _crossing(graph.ops, block.start, graph.outputs)
        found.append(CutPoint(i, values, sum(num_bytes(graph.values[v].spec) for v in values)))
    return tuple(found)


def _crossing(ops: Sequence[Op], position: int, outputs: Sequence[str]) -> tuple[str, ...]:
    made = {out for op in ops[:position] for out in op.outputs}
    later = [name for op in ops[position:] for name in op.operands]
    return tuple(dict.fromkeys(name for name in later if name in made))


def partition(
    values: Mapping[str, Value], ops: tuple[Op, ...], exported: Sequence[str] = (), updates: Sequence[tuple[str, str]] = ()
) -> tuple[tuple[Op, ...], tuple[Block, ...]]:
    """(the operators in block order, the blocks). `exported` values are used after the graph: its loss, outputs and buffer updates. `updates`: (buffer,
    the value that it gets); all that reads such a buffer and makes its value is in one block, because a stage keeps what it updates to itself."""
    items = _items(ops)
    if items:
        names, levels = _levels(values, ops, items)
        ops, levels = _sorted(ops, beside_readers(values, ops, levels))
    else:
        levels = beside_readers(values, ops, _narrow_levels(values, ops))
        names = [f"part.{i}" for i in range(max(levels, default=0) + 1)]
        ops, levels = _sorted(ops, levels)
    containers = Counter(_container(name) for name in names if name in set(items.values()))
    blocks: list[Block] = []
    users = _users(ops)
    for level, name in enumerate(names):
        where = [i for i, at in enumerate(levels) if at == level]
        if where:
            start, stop = where[0], where[-1] + 1
            layer = name in items.values() and containers[_container(name)] > 1
            blocks.append(Block(name, start, stop, pattern(values, ops[start:stop], stop, users, exported), layer))
    whole = _joined(ops, blocks, updates)
    if whole == blocks:
        return ops, tuple(blocks)
    return ops, tuple(replace(b, pattern=pattern(values, ops[b.start : b.stop], b.stop, users, exported)) for b in whole)


def _joined(ops: Sequence[Op], blocks: list[Block], updates: Sequence[tuple[str, str]]) -> list[Block]:
    """The blocks, those from the first to the last use of an updated buffer as one."""
    found = list(blocks)
    for buffer, value in updates:
        uses = [i for i, op in enumerate(ops) if buffer in op.operands or value in op.outputs]
        own = [n for n, block in enumerate(found) if any(block.start <= i < block.stop for i in uses)]
        if len(own) > 1:
            first, last = found[own[0]], found[own[-1]]
            found[own[0] : own[-1] + 1] = [Block(first.name, first.start, last.stop, "", False)]
    return found


def _container(item: str) -> str:
    return item.rpartition(".")[0]


def _items(ops: Sequence[Op]) -> dict[str, str]:
    """Module path -> the layer that it belongs to."""
    cost: Counter[str] = Counter()
    form: dict[str, list[str]] = {}
    for op in ops:
        cost[op.module] += op.flops
        form.setdefault(op.module, []).extend([f"{op.instr.target} {op.flops} {op.instr.outputs[0].spec}"] if op.flops else [])
    return _items_below("", form, cost, sum(cost.values()))[0]


def _items_below(prefix: str, form: Mapping[str, Sequence[str]], cost: Mapping[str, int], total: int) -> tuple[dict[str, str], bool]:
    """(Module path -> layer, whether some layers are alike). `form` maps module paths to their products, `cost` to FLOPs; `total` are the model's."""
    item_of: dict[str, str] = {}
    for path in form:
        found = re.match(r"((?:.*?\.)??\d+)(?=\.|$)", path.removeprefix(prefix))
        if found:
            item_of[path] = prefix + found.group(1)
    weight: Counter[str] = Counter()
    shape: dict[str, list[str]] = {}
    for path, item in item_of.items():
        weight[item] += cost[path]
        shape.setdefault(item, []).extend(form[path])
    heavy = Counter(_container(item) for item, flops in weight.items() if flops)
    alike = Counter((_container(item), tuple(lines)) for item, lines in shape.items() if weight[item])
    repeated = {container for (container, _), count in alike.items() if count > 1}
    chosen: dict[str, str] = {}
    latest: dict[str, str] = {}  # container -> its latest item with products; items without (a norm, an activation) go with it
    for path, item in item_of.items():
        container = _container(item)
        if weight[item]:
            latest[container] = item
        if heavy[container] > 1 and container in latest:
            chosen[path] = latest[container]
    for item in dict.fromkeys(item_of.values()):
        alone = heavy[_container(item)] < 2
        if alone or 2 * weight[item] > total or _container(item) not in repeated:
            below, same = _items_below(item + ".", {p: lines for p, lines in form.items() if p.startswith(item + ".")}, cost, total)
            if below and (alone or same):
                chosen = {path: at for path, at in chosen.items() if at != item} | below
    return chosen, bool(repeated)


def _levels(values: Mapping[str, Value], ops: Sequence[Op], items: Mapping[str, str]) -> tuple[list[str], list[int]]:
    """Names of the blocks in order, and the block of each operator by its module and time alone."""
    names: list[str] = ["prologue"]
    index: dict[str, int] = {}
    own: list[int] = []
    for op in ops:
        item = items.get(op.module)
        if item is not None and item not in index:
            if names[-1] != "":
                names.append("")  # a gap before every item
            index[item] = len(names)
            names.extend((item, ""))
        own.append(index[item] if item is not None else (len(names) - 1 if len(names) > 1 else 0))
    last = len(names) - 1
    names[last] = "epilogue"
    holds = [False] * len(names)
    for op, level in zip(ops, own, strict=True):
        holds[level] |= any(values[n].kind == "parameter" for n in op.operands)
    target = list(range(len(names)))
    order = range(len(names))
    part = 0
    for i in order:
        if names[i] in index or i == last:
            continue
        after = next(k for k in order[i + 1 :] if names[k] in index or k == last)
        before = next((k for k in reversed(order[:i]) if names[k] in index), None)
        same = before is not None and after != last and _container(names[before]) == _container(names[after])
        if same or not holds[i]:
            target[i] = after
        elif names[i] == "":
            part += 1
            names[i] = f"part.{part}"
    return names, [target[level] for level in own]


def _sorted(ops: Sequence[Op], levels: Sequence[int]) -> tuple[tuple[Op, ...], list[int]]:
    """Operators by level, each at least at its operands' levels; a stable topological order."""
    made = {out: i for i, op in enumerate(ops) for out in op.outputs}
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(ops)))
    final = list(levels)
    for i, op in enumerate(ops):
        for name in op.operands:
            if name in made:
                graph.add_edge(made[name], i)
                final[i] = max(final[i], final[made[name]])
    order = list(nx.lexicographical_topological_sort(graph, key=lambda i: (final[i], i)))
    return tuple(ops[i] for i in order), [final[i] for i in order]


def _narrow_levels(values: Mapping[str, Value], ops: Sequence[Op]) -> list[int]:
    """Cuts where the fewest values cross, at about equal shares of the work."""
    total = sum(op.flops for op in ops)
    if not total:
        return [0] * len(ops)
    last_use = {name: i for i, op in enumerate(ops) for name in op.operands}
    crossing = []
    alive: set[str] = set()
    for i, op in enumerate(ops):
        alive.update(out for out in op.outputs if last_use.get(out, -1) > i and values[out].requires_grad)
        alive.difference_update([name for name in op.operands if last_use[name] == i])
        crossing.append(len(alive))
    levels, level, done = [], 0, 0
    spent = 0
    for i, op in enumerate(ops):
        levels.append(level)
        spent += op.flops
        narrow = crossing[i] == 1 and i + 1 < len(ops)
        if narrow and spent - done >= total / MAX_PARTS and spent < total:
            level, done = level + 1, spent
    return levels


def _users(ops: Sequence[Op]) -> dict[str, int]:
    """Value -> last operator that reads it."""
    return {name: i for i, op in enumerate(ops) for name in op.operands}


def pattern(values: Mapping[str, Value], ops: Sequence[Op], stop: int, users: Mapping[str, int], exported: Sequence[str]) -> str:
    """A hash of what these operators do and how they are wired, free of names. `stop`: index of the first operator after them."""
    numbers: dict[str, int] = {}
    lines: list[str] = []

    def number(name: str) -> str:
        if name not in numbers:
            numbers[name] = len(numbers)
            value = values[name]
            if value.kind != "activation" or value.name not in made:
                lines.append(f"in {value.kind} {value.spec.shape} {value.spec.dtype} {value.requires_grad}")
        return f"%{numbers[name]}"

    def text(arg: Arg) -> str:
        if isinstance(arg, Ref):
            return number(arg.name)
        return "(" + " ".join(map(text, arg)) + ")" if isinstance(arg, tuple) else repr(arg)

    made = {out for op in ops for out in op.outputs}
    keep = set(exported)
    for op in ops:
        args = op.instr.args[:-1] if op.instr.target in _OWN_NAME else op.instr.args
        call = " ".join([op.instr.target, *map(text, args), *(f"{k}={text(a)}" for k, a in op.instr.kwargs)])
        outs = []
        for out in op.outputs:
            leaves = "out" if users.get(out, -1) >= stop or out in keep else ""
            spec = values[out].spec
            outs.append(f"{number(out)}:{spec.shape}:{spec.dtype}:{values[out].requires_grad}{leaves}")
        lines.append(f"{' '.join(outs)} = {call}")
    return digest(lines)
