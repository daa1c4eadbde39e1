"""Block problems from a graph: operators, conversions and parameters of one block, priced for one tensor degree.

What does not depend on the boundary (the options of every operator, the price of every conversion) is priced once and
shared by all problems of the block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from autoplan.batchaxis import needs_exchange
from autoplan.gathered import gathered_loops, loop_of
from autoplan.graph import Graph, Op, Option, insides, options
from autoplan.gridprices import scheme_options, sent_inside, sent_s, weight_parts
from autoplan.layout import PARTIAL, VARY, WHOLE, Kind, Layout, Split, conversion
from autoplan.load import BUCKET_BYTES
from autoplan.price import LocalGraph, bytes_of, itemsize
from autoplan.problem import BlockProblem, Choice, Item, Kept, Move, Use, Weight
from autoplan.schemes import LINES
from costmodel.opkey import CollectiveKind, RankGroup
from runtime.instr import Instr
from runtime.selective import is_kept
from runtime.split import puts_off

# Operators whose output shares the storage of their first operand.
VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        "view.default",
        "reshape.default",
        "_unsafe_view.default",
        "transpose.int",
        "t.default",
        "permute.default",
        "unsqueeze.default",
        "squeeze.dim",
        "squeeze.default",
        "expand.default",
        "slice.Tensor",
        "select.int",
        "detach.default",
        "alias.default",
        "split.Tensor",
        "split_with_sizes.default",
        "chunk.default",
        "unbind.int",
        "flatten.using_ints",
        "unflatten.int",
        "view_as.default",
        "movedim.int",
    )
) | {"runtime.real_rows"}

_HEAVY_SHARE = 0.01  # of a block's FLOPs


def storage_roots(graph: Graph, start: int, stop: int) -> Mapping[str, str]:
    """Value -> the value whose storage it shares, through the views among ops [start, stop)."""
    roots: dict[str, str] = {}
    for op in graph.ops[start:stop]:
        if op.instr.target in VIEWS and op.operands:
            first = op.operands[0]
            roots.update((out, roots.get(first, first)) for out in op.outputs)
    return roots


class BlockPricer:
    """Prices the blocks of one local graph. `group` are the ranks of the tensor axis.

    No option divides the batch factor (the data axis has it) nor a factor in `forbidden`.
    """

    def __init__(self, local: LocalGraph, group: RankGroup, forbidden: frozenset[int] = frozenset(), scheme: str = "1d") -> None:
        self.local = local
        self.group = group
        self.forbidden = forbidden
        self.scheme = scheme
        self._items: dict[tuple[int, ...], tuple[tuple[Item, ...], Mapping[str, int]]] = {}
        self._moves: dict[tuple[str, Layout, Layout], Move | None] = {}
        self._options: dict[int, tuple[Option, ...]] = {}

    def items(self, indices: tuple[int, ...]) -> tuple[tuple[Item, ...], Mapping[str, int]]:
        """The operators `indices` with their priced options, and the bytes of every storage that they may keep."""
        if indices not in self._items:
            graph = self.local.graph
            roots = storage_roots(graph, indices[0], indices[-1] + 1) if indices else {}
            saved_bytes: dict[str, int] = {}
            found: list[Item] = []
            for index in indices:
                op = graph.ops[index]
                operands, outputs = self.local.operands(index), op.outputs
                choices = tuple(_choice(self.local, index, option, roots, self.group, saved_bytes) for option in self.options(index))
                found.append(Item(op.name, operands, outputs, choices))
            self._items[indices] = (tuple(_without_repeated_work(found)), saved_bytes)
        return self._items[indices]

    def options(self, index: int) -> tuple[Option, ...]:
        """The options of one operator."""
        if index not in self._options:
            op, operands = self.local.graph.ops[index], self.local.operands(index)
            self._options[index] = _options(self.local.divisible, op, operands, self.local.degree, self.forbidden, self.scheme)
        return self._options[index]

    def least_s(self, index: int) -> float:
        """Seconds of one operator, both passes, in its fastest option, but for what it sends."""
        times = [self.local.op_time(index, option) for option in self.options(index)]
        flows_back = any(self.local.graph.values[name].requires_grad for name in self.local.graph.ops[index].outputs)
        return min(time.forward_s + (time.backward_s if flows_back else 0.0) for time in times)

    def least_sent_s(self, index: int) -> float:
        """Seconds of what one operator sends inside itself, both passes, at least."""
        graph = self.local.graph
        flows_back = any(graph.values[name].requires_grad for name in graph.ops[index].outputs)
        sent = (sent_inside(self.local, index, option) for option in self.options(index))
        return min(sum(sent_s(self.local, one, self.group) for one in found if flows_back or one.phase == "forward") for found in sent)

    def move(self, name: str, src: Layout, dst: Layout) -> Move | None:
        """One conversion, priced; None where it cannot be had."""
        key = (name, src, dst)
        if key not in self._moves:
            self._moves[key] = price_move(self.local, name, src, dst, self.group)
        return self._moves[key]

    def problem(
        self, name: str, indices: tuple[int, ...], sources: Mapping[str, Layout], wanted: tuple[tuple[str, Layout], ...], rests: Mapping[str, Layout]
    ) -> BlockProblem:
        """The problem of the operators `indices`.

        `sources` and `wanted` fix the boundary; `rests` the layouts of parameters that other blocks use too.
        """
        items, saved_bytes = self.items(indices)
        weights: dict[str, Weight] = {}
        given: dict[str, Layout] = {}
        for item in items:
            for operand in item.operands:
                kind = self.local.graph.values[operand].kind
                if kind == "parameter":
                    if operand not in weights:
                        weights[operand] = _weight(self.local, operand, rests.get(operand), self.group)
                elif kind != "activation":
                    given[operand] = WHOLE
                elif operand in sources:
                    given[operand] = sources[operand]
        moves, sums = self._all_moves(items, given, weights, wanted), {name: self.local.num_bytes(name) for name in _kept_sums(items)}
        return BlockProblem(name, self.local.degree, items, given, wanted, weights, moves, saved_bytes, sums)

    def _all_moves(
        self, items: tuple[Item, ...], sources: Mapping[str, Layout], weights: Mapping[str, Weight], wanted: tuple[tuple[str, Layout], ...]
    ) -> Mapping[tuple[str, Layout, Layout], Move]:
        lies: dict[str, dict[Layout, None]] = {name: {layout: None} for name, layout in sources.items()}
        lies.update((name, {WHOLE: None}) for name in weights)
        read: dict[str, dict[Layout, None]] = {}
        for item in items:
            for position, name in enumerate(item.outputs):
                lies[name] = {choice.option.writes[position]: None for choice in item.choices}
            for position, name in enumerate(item.operands):
                read.setdefault(name, {}).update((choice.option.reads[position], None) for choice in item.choices)
        for name, layout in wanted:
            read.setdefault(name, {})[layout] = None
        moves: dict[tuple[str, Layout, Layout], Move] = {}
        for name, layouts in read.items():
            for src in lies[name]:
                for dst in layouts:
                    move = self.move(name, src, dst)
                    if move is not None:
                        moves[name, src, dst] = move
        return moves


def _options(graph: Graph, op: Op, operands: tuple[str, ...], degree: int, forbidden: frozenset[int], scheme: str) -> tuple[Option, ...]:
    more = gathered_loops(graph, op) if scheme not in LINES else ()
    taken = forbidden | {graph.batch_factor}
    banned = {loop.label for loop in (*op.loops, *more) if loop.factor in taken or any(factor in taken for _, factor in loop.gathers)}
    given = [graph.values[name].kind != "activation" for name in operands]

    def can_be_read(option: Option) -> bool:  # what no operator makes is never a partial sum
        return not any(fixed and read == PARTIAL for fixed, read in zip(given, option.reads, strict=True))

    found = tuple(option for option in options(graph, op, degree, more) if option.label not in banned and can_be_read(option))
    return found if scheme == "1d" or degree == 1 else scheme_options(graph, op, found, scheme)


def _without_repeated_work(items: list[Item]) -> list[Item]:
    """Items whose operators, if they weigh and can be divided, are divided: an axis of ranks that repeat each other is no plan."""
    total = sum(max(choice.flops for choice in item.choices) for item in items)
    found = []
    for item in items:
        whole = max(choice.flops for choice in item.choices)
        divided = tuple(choice for choice in item.choices if choice.flops < whole)
        found.append(replace(item, choices=divided) if divided and whole >= _HEAVY_SHARE * total else item)
    return found


def _kept_sums(items: tuple[Item, ...]) -> Iterator[str]:
    """Results of products that are kept and may lie PARTIAL, of which selective recomputation keeps the sums."""
    for item in items:
        for position, name in enumerate(item.outputs):
            partial = [any(name == kept for kept, _ in choice.kept.results) for choice in item.choices if choice.option.writes[position] == PARTIAL]
            if any(partial):
                assert all(partial), f"{item.name}: whether {name} is kept depends on how it is divided"
                yield name


def _lowered(local: LocalGraph, index: int, option: Option) -> Instr:
    """The operator as the function that runs it: one that exchanges inside is another one."""
    instr, loop = local.graph.ops[index].instr, local.loop(index, option)
    names = (loop.lowering if loop is not None else "", *(context.lowering(index) for context in local.contexts))
    target = next((name for name in names if name), instr.target)
    return instr if target == instr.target else replace(instr, target=target)


def _choice(local: LocalGraph, index: int, option: Option, roots: Mapping[str, str], group: RankGroup, saved_bytes: dict[str, int]) -> Choice:
    op, operands, outputs = local.graph.ops[index], local.operands(index), local.graph.ops[index].outputs
    time = local.op_time(index, option)
    forward_s, backward_s = time.forward_s, time.backward_s
    uses: list[Use] = []
    for sent in sent_inside(local, index, option):
        uses.append(Use(sent.kind, sent.phase, sent.num_bytes, sent.axis))
        seconds = sent_s(local, sent, group)
        forward_s, backward_s = (forward_s + seconds, backward_s) if sent.phase == "forward" else (forward_s, backward_s + seconds)
    if not any(local.graph.values[name].requires_grad for name in outputs):
        backward_s = 0.0
    saved: dict[tuple[str, bool], None] = {}
    for name in op.saved:
        root = roots.get(name, name)
        if local.graph.values[root].kind != "activation":
            continue
        layout = option.reads[operands.index(name)] if name in operands else option.writes[outputs.index(name)]
        saved_bytes.setdefault(root, local.num_bytes(root))
        saved[root, isinstance(layout, Split)] = None
    share = local.share(index, option)
    stored = [name for name in operands if local.graph.values[name].kind in ("parameter", "buffer", "constant")]
    kept = Kept()
    runs = _lowered(local, index, option)
    if is_kept(runs, stored):
        kept = Kept(tuple((name, _own_bytes(local, name, layout)) for name, layout in zip(outputs, option.writes, strict=True)), forward_s, op.flops // share)
    weights_s, put_off = 0.0, ()
    if puts_off(runs, stored) and all(local.graph.values[name].requires_grad for name in operands[:2]):
        root = roots.get(operands[0], operands[0])
        weights_s = time.backward_weight_s
        put_off = ((root, _own_bytes(local, root, option.reads[0])), (f"gradient of {outputs[0]}", _own_bytes(local, outputs[0], option.writes[0])))
    return Choice(option, forward_s, backward_s, tuple(saved), op.saved_extra_bytes // share, op.flops // share, tuple(uses), weights_s, put_off, kept)


def _own_bytes(local: LocalGraph, name: str, layout: Layout) -> int:
    """Bytes of a value on one rank of the tensor axis."""
    return local.num_bytes(name) // (local.degree if isinstance(layout, Split) else 1)


def _collective_kind(kind: str) -> CollectiveKind:
    assert kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"), kind
    return kind  # type: ignore[return-value]


def _weight(local: LocalGraph, name: str, rest: Layout | None, group: RankGroup) -> Weight:
    value, parts = local.graph.values[name], weight_parts(local, name) * local.parameter_parts(name)
    shape = value.spec.shape
    num_bytes = bytes_of(shape, value.spec.dtype) // parts
    deferred_s = _deferred_s(local, bytes_of(shape, local.graph.at_rest(name)) // parts, group) if value.requires_grad else 0.0
    return Weight(name, num_bytes, num_bytes // itemsize(value.spec.dtype), rest, value.requires_grad, deferred_s)


def _deferred_s(local: LocalGraph, num_bytes: int, group: RankGroup) -> float:
    """A gradient's share of the sums in buckets at the end of a step."""
    return num_bytes * local.pricer.collective("all_reduce", BUCKET_BYTES, group) / BUCKET_BYTES


def price_move(local: LocalGraph, name: str, src: Layout, dst: Layout, group: RankGroup) -> Move | None:
    """The conversion of a value, priced; None where it cannot be had. Nothing flows back to a value without gradient."""
    found = conversion(src, dst)
    if found is None:
        return None
    value = local.graph.values[name]
    num_bytes = local.num_bytes(name)
    if value.kind == "parameter" and dst == VARY:
        num_bytes = bytes_of(value.spec.shape, local.graph.at_rest(name))  # gradients are summed in the parameter's own precision
    backward = found.backward if value.requires_grad else None
    backward_s = _move_s(local, backward, num_bytes, group)
    if value.kind == "parameter" and dst == VARY and backward is not None:
        backward_s = max(backward_s, _deferred_s(local, num_bytes, group))  # at once is never cheaper than in a bucket
    return Move(found.forward, backward, _move_s(local, found.forward, num_bytes, group), backward_s, num_bytes)


def _move_s(local: LocalGraph, kind: Kind | None, num_bytes: int, group: RankGroup) -> float:
    if kind is None or kind == "slice":
        return 0.0
    return local.pricer.collective(_collective_kind(kind), num_bytes // group.size if kind == "all_to_all" else num_bytes, group)


def data_uses(local: LocalGraph, indices: tuple[int, ...], given: tuple[str, ...]) -> tuple[Use, ...]:
    """Collectives of the data axis inside the passes of the operators `indices`, where an operator needs all rows (batch statistics,
    a loss that is no sum): what autoplan/batchaxis.py asks for, values whole on the tensor axis. `given`: values of the preamble."""
    graph = local.graph
    found: dict[tuple[str, str, str], Use] = {}  # a conversion is made once for all readers
    inner: list[Use] = []
    for index in indices:
        op, option = graph.ops[index], local.batch_options[index]
        for kind, (side, position), phase, part in insides(graph, op, loop_of(graph, op, option.label)):
            name = (op.operands if side == "in" else op.outputs)[position]
            inner.append(Use(_collective_kind(kind), phase, int(local.whole_bytes(name) * part)))
        for name, dst in zip(local.operands(index), option.reads, strict=True):
            src = local.batch_layouts[name]
            move = conversion(src, dst) if needs_exchange(src, dst) and name not in given else None
            backward = move.backward if move and graph.values[name].requires_grad else None
            for kind, phase in ((move.forward, "forward"), (backward, "backward")) if move else ():
                if kind is not None and kind != "slice":
                    found[name, str(dst), phase] = Use(_collective_kind(kind), phase, local.whole_bytes(name))
    return (*inner, *found.values())
