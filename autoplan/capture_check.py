"""The captured graph against the model itself: loss and every gradient, on two batches of different content."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.errors import CaptureError
from autoplan.graph import Graph
from runtime.call import run
from runtime.instr import Instr

# By the coarsest type that the graph computes in: a bias that is added apart rounds once more.
TOLERANCE = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 5e-2, "float16": 2e-2}


class _SameDraws(TorchDispatchMode):
    """Inside, an operator that draws random numbers draws the same ones in every call of the same shape, whatever was drawn before."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.manual_seed(0)
        return func(*args, **(kwargs or {}))


def _as_in_torch(instr: Instr) -> Instr:
    """The call by torch's own operator, where ours draws other random numbers."""
    if instr.target == "runtime.dropout":
        return replace(instr, target="aten.dropout.default", args=(*instr.args[:2], True))
    if instr.target == "runtime.attention":
        *common, scale, grouped = instr.args[:8]
        return replace(instr, target="aten.scaled_dot_product_attention.default", args=tuple(common), kwargs=(("scale", scale), ("enable_gqa", grouped)))
    return instr


def run_graph(graph: Graph, leaves: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, Any]:
    """Every value of the graph, from `leaves` (parameters, buffers, inputs by value name; constants are added)."""
    env: dict[str, Any] = dict(leaves)
    env.update((name, data.to(device)) for name, data in graph.constants.items())
    for op in graph.ops:
        run(_as_in_torch(op.instr), env, device)
    return env


def leaves_of(graph: Graph, model: nn.Module, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The graph's leaves as the model and `inputs` (in the batch's order) hold them."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    found = {v.name: tensors[v.fqn] for v in graph.values.values() if v.kind in ("parameter", "buffer")}
    found.update(zip((v.name for v in graph.inputs()), inputs, strict=True))
    return found


def check_against_model(graph: Graph, model: nn.Module, call: Callable[..., Any], example: Sequence[torch.Tensor]) -> None:
    """Raise CaptureError where the graph's loss or a gradient differs from the model's, on `example` or with its rows in another order.

    Both draw the same random numbers. The model's gradients, buffers and the random state stay as they were.
    """
    if graph.loss is None:
        return
    for inputs in (tuple(example), _other(example)):
        with untouched(model):
            expected = _gradients(call(*(x.clone() for x in inputs))[0], graph, model)
        with untouched(model):
            leaves = leaves_of(graph, model, inputs)
            device = next(iter(leaves.values())).device
            found = _gradients(run_graph(graph, leaves, device)[graph.loss], graph, model)
        _compare(expected, found, max(TOLERANCE.get(v.spec.dtype, 0.0) for v in graph.values.values()))


def _gradients(loss: torch.Tensor, graph: Graph, model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = dict(model.named_parameters(remove_duplicate=False))
    names = [v.fqn for v in graph.parameters() if v.requires_grad]
    grads = torch.autograd.grad(loss.sum(), [tensors[n] for n in names], allow_unused=True) if names and loss.requires_grad else ()
    return {"loss": loss.detach()} | {n: g.detach() for n, g in zip(names, grads, strict=True) if g is not None}


def _compare(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], tolerance: float) -> None:
    if expected.keys() != found.keys():
        differ = sorted(expected.keys() ^ found.keys())
        raise CaptureError(f"the captured graph gives gradients to other parameters than the model does: {', '.join(differ[:5])}")
    # a gradient that cancels to nothing is all rounding, which is as large as that of what it is the sum of
    noise = min(torch.finfo(expected["loss"].dtype).eps, 1e-6)
    total = sum(float(g.double().norm()) ** 2 for n, g in expected.items() if n != "loss") ** 0.5
    for name, want in expected.items():
        if torch.isnan(want).any() and torch.isnan(found[name]).any():
            continue
        error = float((want.double() - found[name].double()).norm())
        scale = max(float(want.double().norm()), 0.0 if name == "loss" else 1e-4 * total)
        if not error <= max(tolerance * scale, 0.0 if name == "loss" else noise * total):
            what = "loss" if name == "loss" else f"gradient of {name!r}"
            raise CaptureError(f"the captured graph is not the model: its {what} is {error / max(scale, 1e-300):.1e} off (relative; allowed {tolerance:.0e})")


def _other(example: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The same batch with other content: rows rolled, and within a row the last dim reversed where it holds integers."""
    rolled = [t.roll(1, 0) if t.dim() else t for t in example]
    return tuple(t.flip(-1) if t.dim() > 1 and not t.is_floating_point() and t.dtype != torch.bool else t for t in rolled)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Buffers and random state are restored; gradients are never written."""
    buffers = [(part, name, held, held.clone()) for part in model.modules() for name, held in part._buffers.items() if held is not None]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices), _SameDraws():
        try:
            yield
        finally:
            with torch.no_grad():
                for part, name, held, content in buffers:
                    held.copy_(content)
                    part._buffers[name] = held
