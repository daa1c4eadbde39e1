"""x[arange(n), place], one element (or several) of every row -> gather, in which the rows map.

    x (n, m, ...), places (n, k...)        x[arange(n)[:, None...], places]  ->  gather(x, 1, places)

An index reads any row for any other; a gather along dim 1 reads each row for itself, so the rows may be divided. Negative
places count from the end; a gather does not know them, so they are written out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from autoplan.canonical.trace import Rewriter, Trace
from runtime.call import spec_of
from runtime.instr import Arg, Dtype, Ref, TensorSpec

_INTEGERS = ("int64", "int32")


def gather_rows(trace: Trace, known: Mapping[str, torch.Tensor]) -> Trace:
    """`trace` with the indices of every row by itself as gathers; `known` are its constants."""
    rewriter = Rewriter(trace)
    for name, data in known.items():
        rewriter.specs.setdefault(name, spec_of(data))  # no new value may be called as a constant is
    for step in trace.steps:
        found = _rows_and_places(rewriter, rewriter.args(step), known) if step.instr.target == "aten.index.Tensor" else None
        if found is None:
            rewriter.keep(step)
            continue
        x, places = found
        shape, which = rewriter.specs[x.name].shape, rewriter.specs[places.name]
        count, rest = math.prod(which.shape[1:]), shape[2:]
        below = Ref(rewriter.emit(step, "aten.lt.Scalar", (places, 0)))
        added = Ref(rewriter.emit(step, "aten.add.Scalar", (places, shape[1])))
        at = Ref(rewriter.emit(step, "aten.where.self", (below, added, places), spec=which))
        if which.dtype != "int64":
            at = Ref(rewriter.emit(step, "aten.to.dtype", (at, Dtype("int64")), spec=TensorSpec(which.shape, "int64")))
        thin, wide = (shape[0], count, *(1 for _ in rest)), (shape[0], count, *rest)
        at = Ref(rewriter.emit(step, "aten.reshape.default", (at, thin), spec=TensorSpec(thin, "int64")))
        if rest:
            at = Ref(rewriter.emit(step, "aten.expand.default", (at, wide), spec=TensorSpec(wide, "int64")))
        taken = Ref(rewriter.emit(step, "aten.gather.default", (x, 1, at), spec=TensorSpec(wide, rewriter.specs[x.name].dtype)))
        spec = step.instr.outputs[0].spec
        assert spec is not None
        rewriter.keep(step, "aten.reshape.default", (taken, spec.shape), ())
    return rewriter.finish()


def _rows_and_places(rewriter: Rewriter, args: tuple[Arg, ...], known: Mapping[str, torch.Tensor]) -> tuple[Ref, Ref] | None:
    """(x, places) of x[rows, places] where rows are 0, 1, ..., n - 1 for the n rows of x and of places."""
    x, given = args[0], args[1]
    if not isinstance(x, Ref) or not isinstance(given, tuple) or len(given) != 2:
        return None
    rows, places = given
    if not isinstance(rows, Ref) or not isinstance(places, Ref) or rows.name not in known or rewriter.specs[places.name].dtype not in _INTEGERS:
        return None
    size, shape = rewriter.specs[x.name].shape[0], rewriter.specs[places.name].shape
    counted, data = torch.arange(size), known[rows.name]
    fits = data.dtype in (torch.int64, torch.int32) and data.numel() == size and data.shape == (size, *(1 for _ in shape[1:]))
    return (x, places) if fits and shape[:1] == (size,) and torch.equal(data.reshape(-1).to(torch.int64), counted) else None
