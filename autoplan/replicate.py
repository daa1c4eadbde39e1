"""A graph with three layers of a run becomes the graph with all of them.

The second of the three is a layer between equals: it is copied. An operator of layer i is named after the one of the second layer at
the same place; its operands are

    made in its own layer, or a parameter, buffer or constant of it    -> the copy's
    made in the layer before                                           -> the one at the same place in the copy before
    made elsewhere                                                     -> the same

and factors likewise. That the third layer follows from the second by these rules, operator by operator, and that what the second
makes is read by the third alone, is checked first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from autoplan.factors import unknown_ops
from autoplan.fingerprint import fingerprint
from autoplan.graph import Block, Graph, Loop, Op, Value
from runtime.instr import Arg, Instr, Ref


@dataclass(frozen=True, slots=True)
class Run:
    """Layers `keys` of the list at `path` are equal; the graph has the first `num_kept` of them."""

    path: str
    keys: tuple[str, ...]
    num_kept: int

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key


@dataclass(frozen=True)
class _Naming:
    """How names of the second layer, and of the first where it is read, are called in another layer."""

    values: Mapping[str, str]
    factors: Mapping[int, int]
    module: tuple[str, str]  # path of the second layer, and of the other

    def value(self, name: str) -> str:
        return self.values.get(name, name)

    def path(self, path: str) -> str:
        old, new = self.module
        return new + path[len(old) :] if path == old or path.startswith(old + ".") else path

    def dims(self, dims: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self.factors.get(f, f) for f in dim) for dim in dims)

    def held(self, value: Value) -> Value:
        name = self.value(value.name)
        return replace(value, name=name, dims=self.dims(value.dims), fqn=self.path(value.fqn), aliases=tuple(self.path(a) for a in value.aliases))

    def op(self, op: Op) -> Op:
        loops = tuple(_loop(loop, self.factors) for loop in op.loops)
        module, saved = self.path(op.module), tuple(self.value(name) for name in op.saved)
        return replace(op, instr=self.instr(op.instr), loops=loops, module=module, saved=saved)

    def instr(self, instr: Instr) -> Instr:
        old = instr.name
        outputs = tuple(replace(out, name=self.value(out.name)) for out in instr.outputs)

        def arg(a: Arg) -> Arg:
            if isinstance(a, Ref):
                return Ref(self.value(a.name)) if a.name in self.values else a
            if isinstance(a, tuple):
                return tuple(map(arg, a))
            if isinstance(a, str) and instr.target.startswith("runtime.") and a.startswith(old):  # under which a random operator draws
                return self.value(old) + a[len(old) :]
            return a

        return replace(instr, outputs=outputs, args=tuple(map(arg, instr.args)), kwargs=tuple((k, arg(a)) for k, a in instr.kwargs))


def _loop(loop: Loop, factors: Mapping[int, int]) -> Loop:
    return replace(loop, factor=factors[loop.factor]) if loop.factor in factors else loop


def lengthened(graph: Graph, run: Run) -> Graph | None:
    """`graph` with all layers of `run`; None where the layers are no chain of equals."""
    numbers = [next((i for i, b in enumerate(graph.blocks) if b.name == run.name(key)), None) for key in run.keys[: run.num_kept]]
    first, second, third = numbers
    if first is None or second is None or third is None or (second, third) != (first + 1, first + 2):
        return None
    layers = [graph.blocks[n] for n in (first, second, third)]
    if len({b.pattern for b in layers[1:]}) != 1 or len({b.stop - b.start for b in layers}) != 1:
        return None
    own = [_own(graph, run, block, run.keys[i]) for i, block in enumerate(layers)]
    if len({len(names) for names in own}) != 1:
        return None
    factors = _Factors.of(graph, own)
    if factors is None or not _is_chain(graph, layers, own, run, factors.next):
        return None
    return _Copying(graph, run, layers, own, factors).run()


def _own(graph: Graph, run: Run, block: Block, key: str) -> tuple[str, ...]:
    """Values of one layer: its parameters and buffers, constants that it alone reads, what its operators make."""
    prefix = run.name(key) + "."
    held = [v.name for v in graph.values.values() if v.fqn.startswith(prefix) and v.kind in ("parameter", "buffer")]
    made = [out for op in graph.ops[block.start : block.stop] for out in op.outputs]
    inside = range(block.start, block.stop)
    constants = [
        name for op in graph.ops[block.start : block.stop] for name in op.operands
        if graph.values[name].kind == "constant" and all(i in inside for i in graph.consumers[name])
    ]  # fmt: skip
    return (*held, *dict.fromkeys(constants), *made)


@dataclass(frozen=True)
class _Factors:
    """`next`: factor of the second layer -> of the third. One that is not its own next is either `new` in the second layer, or
    comes from the first, where it stands at the place at which its next stands in the second."""

    next: Mapping[int, int]
    new: frozenset[int]

    @staticmethod
    def of(graph: Graph, own: list[tuple[str, ...]]) -> _Factors | None:
        """None where places do not match, or a factor that changes from layer to layer occurs elsewhere."""
        before, after = _pairs(graph, own[0], own[1]), _pairs(graph, own[1], own[2])
        if before is None or after is None or any(after.get(f, g) != g for f, g in before.items()):
            return None
        seen = [_factors(graph, names) for names in own]
        three = {name for names in own for name in names}
        outside = _factors(graph, [name for name in graph.values if name not in three])
        changing = {f for f, g in after.items() if f != g}
        entering = changing & seen[0]
        if changing & outside or entering & seen[2] or any(after[f] not in seen[1] for f in entering):
            return None
        return _Factors(after, frozenset(changing - entering))


def _factors(graph: Graph, names: Iterable[str]) -> set[int]:
    found = {factor for name in names for dim in graph.values[name].dims for factor in dim}
    return found | {loop.factor for name in names if name in graph.producer for loop in graph.ops[graph.producer[name]].loops}


def _pairs(graph: Graph, one: tuple[str, ...], other: tuple[str, ...]) -> dict[int, int] | None:
    """Factors of the values `one` -> those at the same places of `other`; None where they do not match."""
    found: dict[int, int] = {}
    for a, b in zip(one, other, strict=True):
        dims = [graph.values[name].dims for name in (a, b)]
        places = [[f for dim in d for f in dim] for d in dims]
        if [list(map(len, d)) for d in dims[:1]] != [list(map(len, d)) for d in dims[1:]]:
            return None
        if a in graph.producer:
            loops = [[loop.factor for loop in graph.ops[graph.producer[name]].loops] for name in (a, b)]
            if len(loops[0]) != len(loops[1]):
                return None
            places = [[*p, *more] for p, more in zip(places, loops, strict=True)]
        for f, g in zip(*places, strict=True):
            if found.setdefault(f, g) != g:
                return None
    return found


def _is_chain(graph: Graph, layers: list[Block], own: list[tuple[str, ...]], run: Run, factors: Mapping[int, int]) -> bool:
    first, second, third = own
    shift = dict(zip(second, third, strict=True)) | dict(zip(first, second, strict=True))
    naming = _Naming(shift, factors, (run.name(run.keys[1]), run.name(run.keys[2])))
    for a, b in zip(second, third, strict=True):
        if naming.held(graph.values[a]) != graph.values[b]:
            return False
        if graph.values[a].kind == "constant" and not torch.equal(graph.constants[a], graph.constants[b]):
            return False
    for i in range(layers[1].stop - layers[1].start):
        if naming.op(graph.ops[layers[1].start + i]) != graph.ops[layers[2].start + i]:
            return False
    inside = set(first) | set(second)
    exported = {graph.loss, *graph.outputs, *(name for pair in graph.buffer_updates for name in pair)}
    ends = {name: layers[i + 1].stop for i in (0, 1) for name in own[i]}
    return all(name not in exported and all(i < ends[name] for i in graph.consumers.get(name, ())) for name in inside)


class _Copying:
    """One run of `lengthened`."""

    def __init__(self, graph: Graph, run: Run, layers: list[Block], own: list[tuple[str, ...]], factors: _Factors) -> None:
        self.graph, self.layers, self.own = graph, layers, own
        self.listed = run
        self.factors = factors
        self.sizes = list(graph.factor_sizes)
        self.taken = set(graph.values)

    def run(self) -> Graph:
        graph, (_, second, third) = self.graph, self.layers
        copies = self._copies()
        values = self._values(copies)
        layer = graph.ops[second.start : second.stop]
        ops = (*graph.ops[: second.stop], *(copy.op(op) for copy in copies for op in layer), *graph.ops[third.stop :])
        constants = dict(graph.constants)
        constants |= {c.value(name): graph.constants[name] for c in copies for name in self.own[1] if graph.values[name].kind == "constant"}
        rest = (f"loss {graph.loss}", f"outputs {graph.outputs}", f"updates {graph.buffer_updates}", f"training {graph.training}")
        known = set(unknown_ops(graph.ops, graph.values))
        warnings = (*(w for w in graph.warnings if w not in known), *unknown_ops(ops, values))
        return replace(
            graph, values=values, ops=ops, blocks=self._blocks(), factor_sizes=tuple(self.sizes),
            fingerprint=fingerprint(values, ops, rest), constants=constants, warnings=warnings,
        )  # fmt: skip

    def _copies(self) -> list[_Naming]:
        """Namings of all layers but the first two; the last one keeps the third's names, but for those that hold its path."""
        run, (first, second, third) = self.listed, self.own
        copies = []
        before: Mapping[str, str] = {name: name for name in second}
        made: Mapping[int, int] = {f: f for f in self.factors.next}
        for key in run.keys[2:]:
            is_last = key == run.keys[-1]
            own = {a: b if is_last and not self.graph.values[a].fqn else self._named(a, b, key) for a, b in zip(second, third, strict=True)}
            factors = {f: made[g] for f, g in self.factors.next.items() if f != g and f not in self.factors.new}
            factors |= {f: self.factors.next[f] if is_last else self._factor(f) for f in sorted(self.factors.new)}
            read = {a: before[b] for a, b in zip(first, second, strict=True)}
            copies.append(_Naming(read | own, factors, (run.name(run.keys[1]), run.name(key))))
            before, made = own, {f: factors.get(f, f) for f in made}
        return copies

    def _named(self, name: str, third: str, key: str) -> str:
        """A free name for the copy of a value of the second layer; `third`'s own will be free."""
        stem = f"{name}_of_{key}"
        if self.graph.values[name].fqn:
            old, new = (self.listed.name(k).replace(".", "_") for k in (self.listed.keys[1], key))
            stem = name.replace(f"_{old}_", f"_{new}_", 1) if f"_{old}_" in name else stem
        while stem in self.taken and stem != third:
            stem += "_"
        self.taken.add(stem)
        return stem

    def _factor(self, factor: int) -> int:
        self.sizes.append(self.sizes[factor])
        return len(self.sizes) - 1

    def _values(self, copies: list[_Naming]) -> dict[str, Value]:
        """All values; those of the copies stand where those of the third layer stood, by kind."""
        values, third = self.graph.values, set(self.own[2])
        found: dict[str, Value] = {}
        done: set[str] = set()
        for name, value in values.items():
            if name not in third:
                found[name] = value
            elif value.kind not in done:
                done.add(value.kind)
                alike = [n for n in self.own[1] if values[n].kind == value.kind]
                found.update((copy.value(n), copy.held(values[n])) for copy in copies for n in alike)
        return found

    def _blocks(self) -> tuple[Block, ...]:
        run, (_, second, third), blocks = self.listed, self.layers, self.graph.blocks
        size = second.stop - second.start
        extra = (len(run.keys) - run.num_kept) * size
        copies = [replace(second, name=run.name(key), start=second.stop + i * size, stop=second.stop + (i + 1) * size) for i, key in enumerate(run.keys[2:])]
        after = [replace(b, start=b.start + extra, stop=b.stop + extra) for b in blocks if b.start >= third.stop]
        return (*(b for b in blocks if b.stop <= second.stop), *copies, *after)
