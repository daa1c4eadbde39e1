"""The evaluation form of a training graph against the model itself in evaluation mode.

A model may compute otherwise in evaluation than by leaving out dropout and taking running statistics (`if self.training: ...`). Where it holds
data the loss, or the outputs where there is none, are compared on a batch; on the meta device the operators are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autoplan.batchaxis import step_ops
from autoplan.capture_check import TOLERANCE, leaves_of, run_graph, untouched
from autoplan.errors import UnsupportedOpError
from autoplan.graph import Graph
from runtime.instr import Instr

_PASSED = ("aten.alias.default", "aten.detach.default", "aten.dropout.default")
_ALIKE = {
    "runtime.batch_norm": "aten.batch_norm.default",
    "runtime.batch_norm_eval": "aten.batch_norm.default",
    "runtime.attention": "aten.scaled_dot_product_attention.default",
}


def check_outputs(graph: Graph, model: nn.Module, call: Callable[..., Any], example: Sequence[torch.Tensor]) -> None:
    """Raise UnsupportedOpError where `graph` gives another loss on `example` than `call(*example)`: (loss if the graph has one, other outputs).
    `model` is in evaluation mode."""
    with torch.no_grad(), untouched(model):
        wanted = list(call(*(x.clone() for x in example)))
    with torch.no_grad(), untouched(model):
        leaves = leaves_of(graph, model, example)
        values = run_graph(graph, leaves, next(iter(leaves.values())).device)
    names = _results(graph)
    tolerance = max(TOLERANCE.get(value.spec.dtype, 0.0) for value in graph.values.values())
    for name, want in zip(names, wanted, strict=False):
        found = values[name]
        if found.shape != want.shape or not torch.allclose(found.double(), want.double(), rtol=tolerance, atol=tolerance, equal_nan=True):
            off = "another shape" if found.shape != want.shape else f"{float((found.double() - want.double()).norm() / want.double().norm()):.1e} off"
            what = "loss" if name == graph.loss else f"output {name}"
            raise UnsupportedOpError(_refusal(graph, f"its {what} is {off}"))


def check_operators(graph: Graph, captured: Graph) -> None:
    """Raise UnsupportedOpError where `graph` runs other operators than `captured`, the model captured in evaluation mode."""
    counts = [Counter(filter(None, (_form(g.ops[i].instr) for i in step_ops(g, _results(g), frozenset())))) for g in (graph, captured)]
    differ = [*(counts[0] - counts[1]), *(counts[1] - counts[0])]
    if differ:
        raise UnsupportedOpError(_refusal(graph, f"they differ in {differ[0].partition(' ')[0]}"))


def _results(graph: Graph) -> tuple[str, ...]:
    return graph.outputs if graph.loss is None else (graph.loss,)


def _form(instr: Instr) -> str:
    if instr.target in _PASSED:
        return ""
    return f"{_ALIKE.get(instr.target, instr.target)} {instr.outputs[0].spec}"


def _refusal(graph: Graph, what: str) -> str:
    return (
        f"{graph.name} computes otherwise in evaluation mode than without dropout and by running statistics ({what}), as where it asks for self.training: "
        "evaluate the plain model with pm.full_state_dict() instead"
    )
