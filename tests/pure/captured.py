"""Shared by the tests of capture: the graph's loss, gradients and buffers beside the model's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoplan.capture_check import leaves_of, run_graph
from autoplan.frontend import capture
from autoplan.graph import Graph

CPU = torch.device("cpu")


def in_double(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    return model.double(), pytree.tree_map(lambda t: t.double() if isinstance(t, torch.Tensor) and t.dtype == torch.float32 else t, batch)


def differences(graph: Graph, model: nn.Module, batch: Any, loss_fn: Callable[[Any, Any], torch.Tensor] | None = None) -> dict[str, float]:
    """Relative L2 error of the loss, of every gradient and of every buffer after the step, by name.

    A gradient that only one side has counts as infinitely wrong; one that is zero is measured against 1e-4 of all gradients.
    """
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    inputs = [t.clone() for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor)]
    env = run_graph(graph, leaves_of(graph, ours, inputs), CPU)
    assert graph.loss is not None
    env[graph.loss].backward()
    plain = pytree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, batch)
    output = theirs(**plain) if isinstance(plain, Mapping) else theirs(*plain)
    loss = loss_fn(output, plain) if loss_fn else output if isinstance(output, torch.Tensor) else output["loss"]
    loss.backward()
    pairs = {"loss": (env[graph.loss].detach(), loss.detach())}
    for (name, p), q in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), f"{name}: eager has {(p.grad is not None and 'a') or 'no'} gradient"
        if p.grad is not None and q.grad is not None:
            pairs[name] = (q.grad, p.grad)
    after = {graph.values[b].fqn: env[v] for b, v in graph.buffer_updates}
    for name, buffer in theirs.named_buffers():
        pairs[name] = (after.get(name, dict(ours.named_buffers())[name]), buffer)
    total = sum(float(g.double().norm()) ** 2 for n, (_, g) in pairs.items() if n in dict(theirs.named_parameters())) ** 0.5
    return {n: _relative(a, b, 1e-4 * total if n != "loss" else 1e-300) for n, (a, b) in pairs.items()}


def _relative(found: torch.Tensor, want: torch.Tensor, floor: float) -> float:
    assert found.shape == want.shape and found.dtype == want.dtype, (found.shape, want.shape, found.dtype, want.dtype)
    if torch.equal(found, want) or (bool(found.isnan().all()) and bool(want.isnan().all())):
        return 0.0
    return float((found.double() - want.double()).norm()) / max(float(want.double().norm()), floor)


def assert_captures(model: nn.Module, batch: Any, loss_fn: Any = None, *, others: Sequence[Any] = (), tolerance: float = 1e-10, **options: Any) -> Graph:
    """Capture, then compare on the batch and on `others`. Returns the graph."""
    graph = capture(model, batch, loss_fn, **options)
    for each in (batch, *others):
        errors = differences(graph, model, each, loss_fn)
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] <= tolerance, f"{worst} is {errors[worst]:.1e} off"
    return graph


def targets(graph: Graph) -> list[str]:
    return [op.instr.target for op in graph.ops]


def net(forward: Any, **modules: Any) -> nn.Module:
    """A module of parts `modules` (parameters, buffers as tensors, or modules) whose forward is `forward(self, x)`."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in modules.items():
                if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                    self.register_buffer(name, part)
                else:
                    setattr(self, name, part)

    forward.__code__ = forward.__code__.replace(co_name="forward")  # stacks in a graph keep frames of this name only
    Net.forward = forward
    torch.manual_seed(0)
    return Net().double()


def linear(a: int = 4, b: int = 4) -> nn.Linear:
    torch.manual_seed(a * 31 + b)
    return nn.Linear(a, b)


X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
