"""Terms of a loss that depend on weights alone, beside the layers whose weights they are.

A penalty such as `loss + 0.01 * sum(p.square().sum() for p in model.parameters())` is written after the last layer. Left there, the last stage
would keep a copy of every parameter. So an operator whose operands are parameters, constants and values made from them belongs to the block that
reads its parameters otherwise, as long as no more than single numbers leave what is moved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autoplan.graph import Op, Value


def beside_readers(values: Mapping[str, Value], ops: Sequence[Op], levels: Sequence[int]) -> list[int]:
    """The block of every operator, given those by its module and time. Operators come after those that they read from."""
    weights = _from_weights(values, ops)
    readers: dict[str, list[int]] = {}
    for i, op in enumerate(ops):
        for name in op.operands:
            readers.setdefault(name, []).append(i)
    moves = set(weights)
    for i in sorted(weights, reverse=True):
        if any(not _is_number(values[out]) and any(r not in moves for r in readers.get(out, ())) for out in ops[i].outputs):
            moves.discard(i)
    made = {out: i for i, op in enumerate(ops) for out in op.outputs}
    found = list(levels)
    for i in sorted(moves):
        least = 0
        for name in ops[i].operands:
            if name in made:
                least = max(least, found[made[name]])
            elif values[name].kind == "parameter":
                least = max(least, min((levels[r] for r in readers[name] if r not in moves), default=levels[i]))
        found[i] = min(levels[i], least)
    return found


def _from_weights(values: Mapping[str, Value], ops: Sequence[Op]) -> set[int]:
    """Operators that read parameters, constants and what was made from them, at least one parameter among it."""
    known = {value.name for value in values.values() if value.kind in ("parameter", "constant")}
    trained = {value.name for value in values.values() if value.kind == "parameter"}
    found: set[int] = set()
    for i, op in enumerate(ops):
        if not op.random and all(name in known for name in op.operands) and any(name in trained for name in op.operands):
            found.add(i)
            known.update(op.outputs)
            trained.update(op.outputs)
    return found


def _is_number(value: Value) -> bool:
    return math.prod(value.spec.shape) == 1
