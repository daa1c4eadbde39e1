"""Factors: every tensor dimension as a product of index sets that name themselves, and the loops that follow.

Two passes over the ops. The first lets every signature (autoplan/rules) unite the dimensions that carry one
label: a dimension is a list of atoms, outermost first; to unite two lists, unequal neighbours are split until
both are the same partition, then equal pieces are joined (union-find). The second reads off the leaves: each
leaf below a label that divides becomes a loop of the op, placed where the leaf lies in each operand and output.

Equal factors of two dimensions only mean that one layout fits both: whether an op may divide them is said by
its own loops. Two lists without a common refinement (6 = 2·3 against 3·2) are united as far as they agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from autoplan.graph import Loop, Op, Value
from autoplan.layout import Split
from autoplan.rules import DEFAULT, Registry, Signature, signature
from autoplan.rules.registry import opaque
from autoplan.rules.signature import OPAQUE, Pair, Slide, lengths
from runtime.call import dtype_of

Place = tuple[int, int]  # leaf and the product of the lengths to its right within the dimension or label


class Atoms:
    """Index sets under union and refinement. An atom is an integer; a refined one has two children."""

    def __init__(self) -> None:
        self.length: list[int] = []
        self._parent: list[int] = []
        self._children: dict[int, tuple[int, int]] = {}

    def new(self, length: int) -> tuple[int, ...]:
        """A fresh dimension of this length; one of length 1 has no atom."""
        if length == 1:
            return ()
        self.length.append(length)
        self._parent.append(len(self._parent))
        return (len(self._parent) - 1,)

    def root(self, atom: int) -> int:
        while self._parent[atom] != atom:
            self._parent[atom] = self._parent[self._parent[atom]]
            atom = self._parent[atom]
        return atom

    def leaves(self, atoms: Sequence[int]) -> list[int]:
        """The finest known factors of a dimension, outermost first."""
        found: list[int] = []
        for atom in atoms:
            top = self.root(atom)
            if top in self._children:
                found += self.leaves(self._children[top])
            else:
                found.append(top)
        return found

    def unite(self, first: Sequence[int], second: Sequence[int]) -> None:
        """Make two dimensions of equal length the same index set, innermost factors first, as far as they agree."""
        x, y = self.leaves(first), self.leaves(second)
        while x and y:
            a, b = x[-1], y[-1]
            m, n = self.length[a], self.length[b]
            if a != b and m != n:
                if m == 0 or n == 0 or (m % n and n % m):
                    return
                x = [*x[:-1], *self._refine(a, n)] if m > n else x
                y = [*y[:-1], *self._refine(b, m)] if n > m else y
                continue
            if a != b:
                self._parent[max(a, b)] = min(a, b)
            x, y = self.leaves(x[:-1]), self.leaves(y[:-1])

    def _refine(self, atom: int, inner: int) -> tuple[int, int]:
        outer_atom, inner_atom = self.new(self.length[atom] // inner)[0], self.new(inner)[0]
        self._children[atom] = (outer_atom, inner_atom)
        return outer_atom, inner_atom


@dataclass(frozen=True, slots=True)
class _Signed:
    """An op with its signature and the atoms of each label."""

    op: Op
    signature: Signature
    atoms: Mapping[str, tuple[int, ...]]


def annotate(
    values: Mapping[str, Value], ops: tuple[Op, ...], batch_inputs: tuple[str, ...], registry: Registry = DEFAULT
) -> tuple[Mapping[str, Value], tuple[Op, ...], tuple[int, ...], int | None]:
    """Factors and loops of a captured graph: new values, new ops, `Graph.factor_sizes`, `Graph.batch_factor`.

    `batch_inputs` are input values whose dimension 0 is the batch, or has length 1. The batch factor is None where the batch has
    one row, or where the model itself views it as a product. Ids count up in the order of `values`. Raises UsageError
    where a registered rule does not fit.
    """
    atoms = Atoms()
    dims: dict[str, tuple[tuple[int, ...], ...]] = {}
    made = {name for op in ops for name in op.outputs}
    for name, value in values.items():
        if name not in made:
            dims[name] = tuple(atoms.new(n) for n in value.spec.shape)
    signed = [_sign(op, values, dims, atoms, registry) for op in ops]
    rows = [dims[name][0] for name in batch_inputs if dims[name] and values[name].spec.shape[0] > 1]
    for other in rows[1:]:
        atoms.unite(rows[0], other)

    ids: dict[int, int] = {}
    flat: dict[str, tuple[tuple[int, ...], ...]] = {}
    for name in values:
        flat[name] = tuple(tuple(ids.setdefault(leaf, len(ids)) for leaf in atoms.leaves(dim)) for dim in dims[name])
    for item in signed:  # labels of a contraction may have leaves that no value shows
        for label in item.atoms.values():
            for leaf in atoms.leaves(label):
                ids.setdefault(leaf, len(ids))
    sizes = [0] * len(ids)
    for leaf, number in ids.items():
        sizes[number] = atoms.length[leaf]

    new_values = {name: replace(value, dims=flat[name]) for name, value in values.items()}
    new_ops = tuple(
        _loops(item, values, flat, {label: tuple(ids[leaf] for leaf in atoms.leaves(a)) for label, a in item.atoms.items()}, sizes) for item in signed
    )
    batch = atoms.leaves(rows[0]) if rows else []
    return new_values, new_ops, tuple(sizes), ids[batch[0]] if len(batch) == 1 else None


def _sign(op: Op, values: Mapping[str, Value], dims: dict[str, tuple[tuple[int, ...], ...]], atoms: Atoms, registry: Registry) -> _Signed:
    """The signature of `op`; unites its operands' dimensions and gives its outputs theirs."""
    inputs = tuple(values[name].spec for name in op.operands)
    outputs = tuple(values[name].spec for name in op.outputs)
    sign = signature(op.instr, inputs, registry) or opaque(inputs, outputs)
    try:
        of_label = {label: atoms.new(length) for label, length in lengths(sign, inputs, outputs).items()}
    except ValueError as error:
        raise AssertionError(f"the rule of {op.instr.target} {error}") from error

    def joined(dim: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(atom for label in dim for atom in of_label[label])

    for name, labels in zip(op.operands, sign.reads, strict=True):
        for have, dim in zip(dims[name], labels, strict=True):
            if dim != OPAQUE:
                atoms.unite(have, joined(dim))
    for name, spec, labels in zip(op.outputs, outputs, sign.writes, strict=True):
        dims[name] = tuple(atoms.new(n) if dim == OPAQUE else joined(dim) for dim, n in zip(labels, spec.shape, strict=True))
    return _Signed(op, sign, of_label)


def _places(leaves: Sequence[int], sizes: Sequence[int]) -> list[Place]:
    found, stride = [], 1
    for leaf in reversed(leaves):
        found.append((leaf, stride))
        stride *= sizes[leaf]
    return found[::-1]


_Places = Mapping[tuple[str, int], list[Split]]  # (label, number of its factor) -> where it lies


def _loops(
    item: _Signed, values: Mapping[str, Value], flat: Mapping[str, tuple[tuple[int, ...], ...]], leaves: Mapping[str, tuple[int, ...]], sizes: Sequence[int]
) -> Op:
    sign, op = item.signature, item.op
    seen = [_lie(op.operands[i], labels, flat, leaves, sizes) for i, labels in enumerate(sign.reads)]
    made = [_lie(op.outputs[j], labels, flat, leaves, sizes) for j, labels in enumerate(sign.writes)]
    loops: list[Loop] = []
    for label, below in leaves.items():
        if label in sign.whole:
            continue
        kind = sign.inner[label].kind if label in sign.inner else "sum" if label in sign.sums else "map"
        for k in range(len(below)):
            key = (label, k)
            reads, writes = tuple(at.get(key) for at in seen), tuple(at.get(key) for at in made)
            if any(where == [] or (where is not None and len(where) > 1) for where in (*reads, *writes)):
                continue  # a diagonal, or a place where the factors do not agree
            if kind == "map" and not (writes and all(writes)):
                continue
            special = sign.inner.get(label)
            if special is not None and special.contiguous and k > 0:
                continue
            loops.append(
                Loop(
                    label if len(below) == 1 else f"{label}.{k}",
                    below[k],
                    kind,  # type: ignore[arg-type]
                    tuple(where[0] if where else None for where in reads),
                    tuple(where[0] if where else None for where in writes),
                    special.lowering if special else "",
                    special.collectives if special else (),
                    -(-special.minimum // prod(sizes[leaf] for leaf in below[k + 1 :])) if special else 1,
                    special.even if special else False,
                )
            )
    loops += [loop for slide in sign.slides if (loop := _sliding(slide, seen, made, leaves, sizes)) is not None]
    # Sums of integers or truth values are completed where they are made: they count, and counts are read at once.
    linear = tuple(group for group in sign.linear if all(dtype_of(values[op.operands[i]].spec.dtype).is_floating_point for i in group))
    paired = tuple(loop for pair in sign.pairs for loop in _paired(pair, seen, made, leaves))
    return replace(op, loops=tuple(loops), linear_in=linear, proved=sign.proved, paired=paired)


def _sliding(slide: Slide, seen: Sequence[_Places], made: Sequence[_Places], leaves: Mapping[str, tuple[int, ...]], sizes: Sequence[int]) -> Loop | None:
    """The loop over the outermost factors of both labels; None where they have no place of their own."""
    read, write = seen[0].get((slide.read, 0)), made[0].get((slide.write, 0))
    if not read or not write or len(read) != 1 or len(write) != 1:
        return None
    first, *rest = leaves[slide.read]
    nothing = (None,) * (len(seen) - 1)
    minimum = -(-slide.inner.minimum // prod(sizes[leaf] for leaf in rest))
    inner = slide.inner
    return Loop(slide.write, first, "map", (read[0], *nothing), (write[0],), inner.lowering, inner.collectives, minimum, True, (), slide.window)


def _paired(pair: Pair, seen: Sequence[_Places], made: Sequence[_Places], leaves: Mapping[str, tuple[int, ...]]) -> list[Loop]:
    """The pair for each factor of its first label; none where a second one is a product, or a place is not unique."""
    if len(leaves[pair.second]) != 1 or (pair.is_same and leaves[pair.first] != leaves[pair.second]):
        return []
    found = []
    for k, factor in enumerate(leaves[pair.first]):
        reads = tuple(at.get((pair.second, 0) if i in pair.second_in else (pair.first, k)) for i, at in enumerate(seen))
        writes = tuple(at.get((pair.first, k)) for at in made)
        if any(where is not None and len(where) != 1 for where in (*reads, *writes)) or not all(writes) or not all(reads[i] for i in pair.second_in):
            continue
        read, written = (tuple(where[0] if where else None for where in side) for side in (reads, writes))
        found.append(Loop(pair.name, factor, "inner", read, written, pair.lowering))
    return found


def _lie(
    name: str, labels: tuple[tuple[str, ...], ...], flat: Mapping[str, tuple[tuple[int, ...], ...]], leaves: Mapping[str, tuple[int, ...]], sizes: Sequence[int]
) -> _Places:
    """Where leaf k of each label lies in the tensor `name`: (label, k) -> its places, empty where it is missing."""
    found: dict[tuple[str, int], list[Split]] = {}
    for d, dim in enumerate(labels):
        if dim == OPAQUE:
            continue
        have = {place: k for k, place in enumerate(_places(flat[name][d], sizes))}
        want = [(label, k) for label in dim for k in range(len(leaves[label]))]
        for key, place in zip(want, _places([leaves[label][k] for label, k in want], sizes), strict=True):
            spots = found.setdefault(key, [])
            if place in have:
                spots.append(Split(d, have[place]))
    return found


def unknown_ops(ops: tuple[Op, ...], values: Mapping[str, Value], registry: Registry = DEFAULT) -> tuple[str, ...]:
    """A warning for every operator without a rule that makes a tensor from tensors, each once, in order of appearance."""
    found: dict[str, list[int]] = {}
    for op in ops:
        makes = op.operands and any(prod(values[name].spec.shape) > 1 for name in op.outputs)
        if makes and signature(op.instr, tuple(values[name].spec for name in op.operands), registry) is None:
            count = found.setdefault(op.instr.target, [0, 0])
            count[0] += 1
            count[1] += op.flops
    hint = "it runs whole on every rank; autoplan.register_rule gives it one"
    return tuple(f"{target} ({count} calls, {flops:,} FLOPs forward) has no rule: {hint}" for target, (count, flops) in found.items())
