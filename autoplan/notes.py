"""Notes on the ops of a block pattern, so that a plan can be read and drawn without its graph.

Factors have no names in the graph; readers get the role that a factor plays: "batch", "sequence" (another dimension
of an integer input), "heads" (dimension 1 of an attention), "vocabulary" (rows of an embedding, classes of a loss), else "features".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoplan.gathered import loop_of
from autoplan.graph import Block, Graph, Op
from autoplan.plan import OpNote
from autoplan.schemes import parted

_LANDMARKS = ("embedding", "norm", "entropy", "loss", "pool")


def op_notes(graph: Graph, block: Block, splits: Mapping[str, str]) -> tuple[OpNote, ...]:
    """One note an op of `block`, in order. `splits`: op name -> option label, as in BlockPlan."""
    roles, batch = factor_roles(graph), graph.batch_factor
    return tuple(
        OpNote(
            op.name,
            short_target(op.instr.target),
            _relative(op.module, block.name),
            op.flops,
            _split(graph, op, splits.get(op.name, "whole"), roles),
            batch is not None and any(loop.factor == batch for loop in op.loops),
        )
        for op in graph.ops[block.start : block.stop]
    )


def blocks_of_pattern(graph: Graph, pattern: str) -> tuple[int, ...]:
    """Indices of the graph's blocks whose pattern is `pattern`."""
    return tuple(i for i, block in enumerate(graph.blocks) if block.pattern == pattern)


def landmarks(ops: Sequence[OpNote]) -> tuple[OpNote, ...]:
    """The ops that readers look for: those that compute, and embeddings, norms and losses."""
    return tuple(op for op in ops if op.flops > 0 or any(word in op.target for word in _LANDMARKS))


def factor_roles(graph: Graph) -> Mapping[int, str]:
    """Factor id -> the role that readers know it by; factors that are not listed are "features"."""
    roles: dict[int, str] = {}
    for op in graph.ops:
        kind = short_target(op.instr.target)
        if "attention" in kind and len(dims := graph.values[op.outputs[0]].dims) == 4:
            roles |= dict.fromkeys(dims[1], "heads")
        if "cross_entropy" in kind and len(dims := graph.values[op.operands[0]].dims) > 1:
            roles |= dict.fromkeys(dims[1], "vocabulary")
        if kind == "embedding":
            roles |= dict.fromkeys(graph.values[op.operands[0]].dims[0], "vocabulary")
    for value in graph.inputs():
        if value.spec.dtype.startswith("int"):
            roles |= {factor: "sequence" for dim in value.dims for factor in dim}
    if graph.batch_factor is not None:
        roles[graph.batch_factor] = "batch"
    return roles


def short_target(target: str) -> str:
    """ "aten.linear.default" -> "linear"."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


def _split(graph: Graph, op: Op, text: str, roles: Mapping[int, str]) -> str:
    """What the feature axes divide, for readers: the roles of their loops."""
    found: list[str] = []
    for label in parted(text, 1):
        loop = loop_of(graph, op, label)
        role = label.partition(":")[0] if loop is None else roles.get(loop.factor, "features")
        found.append(f"{role} (sum)" if loop is not None and loop.kind == "sum" else role)
    return ", ".join(found)


def _relative(module: str, block: str) -> str:
    return "" if module == block else module.removeprefix(block + ".")
