"""The captured graph against the model itself: loss and every gradient, on two batches of different content."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autoplan.errors import CaptureError
from autoplan.graph import Graph
from runtime.call import run

# By the coarsest type that the graph computes in: a bias that is added apart rounds once more.
_TOLERANCE = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 5e-2, "float16": 2e-2}


def run_graph(graph: Graph, leaves: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, Any]:
    """Every value of the graph, from `leaves` (parameters, buffers, inputs by value name; constants are added)."""
    env: dict[str, Any] = dict(leaves)
    env.update((name, data.to(device)) for name, data in graph.constants.items())
    for op in graph.ops:
        run(op.instr, env, device)
    return env


def leaves_of(graph: Graph, model: nn.Module, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The graph's leaves as the model and `inputs` (in the batch's order) hold them."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    found = {v.name: tensors[v.fqn] for v in graph.values.values() if v.kind in ("parameter", "buffer")}
    found.update(zip((v.name for v in graph.inputs()), inputs, strict=True))
    return found


def check_against_model(graph: Graph, model: nn.Module, call: Callable[..., Any], example: Sequence[torch.Tensor]) -> None:
    """Raise CaptureError where the graph's loss or a gradient differs from the model's, on `example` or with its rows in another order.

    Models that draw random numbers are not compared: theirs differ by design. The model's gradients, buffers and the random state stay as they were.
    """
    if any(op.random for op in graph.ops) or graph.loss is None:
        return
    for inputs in (tuple(example), _other(example)):
        with _untouched(model):
            expected = _gradients(call(*inputs)[0], graph, model)
        with _untouched(model):
            leaves = leaves_of(graph, model, inputs)
            device = next(iter(leaves.values())).device
            found = _gradients(run_graph(graph, leaves, device)[graph.loss], graph, model)
        _compare(expected, found, max(_TOLERANCE.get(v.spec.dtype, 0.0) for v in graph.values.values()))


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
def _untouched(model: nn.Module) -> Iterator[None]:
    """Buffers and random state are restored; gradients are never written."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])
