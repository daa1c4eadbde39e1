"""Products of matrices: free rows and columns, a contraction whose division leaves partial sums."""

from __future__ import annotations

from autoplan.rules.signature import OPAQUE, Call, Signature, aligned, sign


def linear(call: Call) -> Signature | None:
    """linear(x[..., i], w[o, i], bias[o]). With a bias the contraction stays whole: every rank would add it."""
    if call.rank("weight") != 2:
        return None
    if call.has("bias"):
        return sign(call, "b* i, o i, o -> b* o", linear=((0, 2), (1, 2)))
    return sign(call, "b* i, o i -> b* o", sums="i", linear=((0,), (1,)))


def matmul(call: Call) -> Signature:
    """matmul of all ranks: broadcast leading dimensions, vectors on either side."""
    (a, b), out = (spec.shape for spec in call.inputs), call.out()
    row, column = (("m",),) if len(a) > 1 else (), (("n",),) if len(b) > 1 else ()
    lead = out[: len(out) - len(row) - len(column)]
    batch = tuple((f"b{k}",) for k in range(len(lead)))
    left = aligned(a[:-2], lead, "b") + row + (("k",),)
    right = (*aligned(b[:-2], lead, "b"), ("k",), *column)
    return Signature((left, right), (batch + row + column,), sums=frozenset("k"), linear=((0,), (1,)))


def added(call: Call) -> Signature:
    """addmm, baddbmm and addmv: beta * self + alpha * (a @ b), self broadcast; the contraction stays whole."""
    out = call.out()
    batch = ("b",) if len(out) == 3 else ()
    names = [*batch, "m"] if len(call.inputs[2].shape) == 1 else [*batch, "m", "n"]
    own = tuple((names[int(d[0][1:])],) if d else () for d in aligned(call.inputs[0].shape, out))
    left = tuple((x,) for x in (*batch, "m", "k"))
    right = tuple((x,) for x in (*batch, "k", *names[len(batch) + 1 :]))
    return Signature((own, left, right), (tuple((x,) for x in names),), linear=((0, 1), (0, 2)))


def einsum(call: Call) -> Signature | None:
    """einsum without an ellipsis. A letter that occurs twice in one operand is a diagonal and stays whole."""
    equation = str(call.args["equation"]).replace(" ", "")
    if "." in equation:
        return None
    left, arrow, right = equation.partition("->")
    if not arrow:
        letters = left.replace(",", "")
        right = "".join(sorted(x for x in set(letters) if letters.count(x) == 1))
    if any(n == 1 for spec in call.inputs for n in spec.shape):
        return None  # a length of 1 may be broadcast
    reads = tuple(tuple((x,) for x in term) for term in left.split(","))
    summed = frozenset(left.replace(",", "")) - frozenset(right)
    return Signature(reads, (tuple((x,) for x in right),), summed, linear=tuple((i,) for i in range(len(reads))))


def grouped(call: Call) -> Signature | None:
    """Rows x[t, i] sorted by expert times the expert's own w[e, i, o]: features split as in a plain product, rows do not."""
    if [len(spec.shape) for spec in call.inputs] != [2, 3, 1]:
        return None
    reads = ((("t",), ("i",)), (("e",), ("i",), ("o",)), (OPAQUE,))
    return Signature(reads, ((("t",), ("o",)),), frozenset("i"), frozenset({"t", "e"}), ((0,), (1,)))


def distances(call: Call) -> Signature:
    """cdist(a[..., m, k], b[..., n, k]) -> [..., m, n]."""
    (a, b), lead = (spec.shape[:-2] for spec in call.inputs), call.out()[:-2]
    batch = tuple((f"b{k}",) for k in range(len(lead)))
    left, right = (*aligned(a, lead, "b"), ("m",), ("k",)), (*aligned(b, lead, "b"), ("n",), ("k",))
    return Signature((left, right), ((*batch, ("m",), ("n",)),), whole=frozenset("k"))


def bilinear(call: Call) -> Signature:
    return sign(call, "b* i, b* j, o i j, o -> b* o" if call.has("bias") else "b* i, b* j, o i j -> b* o", whole="i j")


def outer(call: Call) -> Signature:
    return sign(call, "m, n -> m n", linear=((0,), (1,)))


RULES = {
    "aten.linear": linear,
    **{f"aten.{name}": matmul for name in ("matmul", "mm", "bmm", "mv", "dot")},
    **{f"aten.{name}": added for name in ("addmm", "baddbmm", "addmv")},
    "aten.einsum": einsum,
    "aten.cdist": distances,
    "aten.bilinear": bilinear,
    "aten.outer": outer,
    "aten._grouped_mm": grouped,
    "transformers.grouped_mm_fallback": grouped,
}
