"""A stable name of a graph's structure: its operators, shapes, dtypes and names; not its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from autoplan.graph import Op, Value

_LENGTH = 16  # hex digits


def digest(parts: Iterable[str]) -> str:
    """The first 16 hex digits of the SHA-256 of `parts`, one a line."""
    made = hashlib.sha256()
    for part in parts:
        made.update(part.encode())
        made.update(b"\n")
    return made.hexdigest()[:_LENGTH]


def fingerprint(values: Mapping[str, Value], ops: Iterable[Op], rest: Iterable[str]) -> str:
    """Of values, operators in order, and `rest`. Equal graphs have equal fingerprints in every process; loops, places in the
    source and constant data do not count."""
    lines = [f"{v.name} {v.kind} {v.spec.shape} {v.spec.dtype} {v.requires_grad} {v.aliases or v.fqn}" for v in values.values() if v.kind != "activation"]
    lines += [f"{op.instr!r} {op.module}" for op in ops]
    return digest([*lines, *rest])
