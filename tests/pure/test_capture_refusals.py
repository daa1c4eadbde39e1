"""What capture refuses, and that it says why and where."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoplan.errors import CaptureError
from autoplan.frontend import capture
from tests.pure.captured import X, linear, net

torch.set_num_threads(1)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * 7


def branch_on_data(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    if y.sum() > 0:
        y = y * 2
    return y.sum()


def loop_on_data(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.a(x)[: int(x.abs().sum())].sum()


def custom(self: Any, x: torch.Tensor) -> torch.Tensor:
    return Doubled.apply(self.a(x)).sum()  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


def checkpointed(self: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(self.a, x.requires_grad_(), use_reentrant=True).sum()


def hooked(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.dropout(self.a(x), 0.5)
    y.register_hook(lambda grad: 2 * grad)
    return y.sum()


def differentiated(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x.requires_grad_())
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0].square().sum()


def saved_otherwise(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: 2 * t):
        return self.a(x).tanh().sum()


def packed(self: Any, x: torch.Tensor) -> torch.Tensor:
    lengths = torch.full((len(x),), 2)
    return nn.utils.rnn.pack_padded_sequence(self.a(x)[:, :, None], lengths, batch_first=True).data.sum()


def drawn(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.a(x).sum() * random.random()


def mapped(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(self.a)(x).sum()


def data_read(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    return (y * y.data).sum()


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return torch.nn.functional.dropout(self.a(x), 0.5).sum() * self.calls


def remembers(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen = self.seen + 1
    return self.a(x).sum() * self.seen


def grows(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.bank = torch.cat([self.bank, x])
    return self.a(self.bank).sum()


def looks_up(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(x.long().abs().clamp(max=3), self.a.weight, sparse=True).sum()


def writes_parameter(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.a.weight.mul_(0.5)
    return self.a(x).sum()


def raises(self: Any, x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (branch_on_data, "depends on data"),
        (loop_on_data, "depends on data"),
        (custom, "autograd.Function Doubled would lose its backward"),
        (checkpointed, "use_reentrant=False"),
        (writes_parameter, "parameter 'a.weight'"),
        (raises, "no such thing"),
    ],
)
def test_what_cannot_be_captured_is_refused_at_the_users_line(forward: Any, reason: str) -> None:
    with pytest.raises(CaptureError) as found:
        capture(net(forward, a=linear()), (X,))
    assert reason in str(found.value)
    assert f"test_capture_refusals.py:{forward.__code__.co_firstlineno + 1}" in str(found.value) or any(
        f"test_capture_refusals.py:{forward.__code__.co_firstlineno + i}" in str(found.value) for i in range(2, 6)
    )


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (hooked, "a hook on a tensor would not run"),
        (differentiated, "torch.autograd.grad inside the forward pass"),
        (saved_otherwise, "hooks on what autograd saves would not run"),
        (packed, "a packed sequence has sizes that depend on data"),
        (drawn, "draws Python's or numpy's random numbers"),
        (mapped, "torch.func.vmap"),
        (data_read, "`.data` of a tensor"),
        (counts, "the captured graph is not the model: its loss"),
        (remembers, "assigns its attribute 'seen'"),
        (grows, "assigns (8, 4) torch.float64 to its buffer 'bank' of (2, 4)"),
        (looks_up, "sparse=False"),
    ],
)
def test_what_a_graph_would_lose_is_refused(forward: Any, reason: str) -> None:
    model = net(forward, a=linear())
    model.seen = torch.zeros(())
    model.register_buffer("bank", torch.zeros(2, 4, dtype=torch.float64))
    with pytest.raises(CaptureError) as found:
        capture(model, (X,))
    assert reason in str(found.value)


def test_hooks_wrappers_and_a_surrounding_autocast_are_refused() -> None:
    model = nn.Linear(4, 4)
    handle = model.register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="backward hooks"):
        capture(model, (X.float(),))
    handle.remove()
    model.weight.register_hook(lambda g: g * 2)
    with pytest.raises(CaptureError, match="'weight' has gradient hooks"):
        capture(model, (X.float(),))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CaptureError, match="inside torch"):
        capture(nn.Linear(4, 4), (X.float(),))
    with pytest.raises(CaptureError, match="TorchScript"):
        capture(nn.Sequential(torch.jit.script(nn.Linear(4, 4))), (X.float(),))


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ({"x": X, "y": X[:4]}, "x: 6, y: 4"),
        ({"x": 3}, "no tensor"),
        ([X], "not list"),
    ],
)
def test_batches_that_make_no_sense_are_refused(batch: Any, reason: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        capture(nn.Linear(4, 4).double(), batch)


def test_a_wrong_graph_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import autoplan.frontend as module

    honest = module.canonical

    def wrong(*args: Any) -> Any:
        from dataclasses import replace

        trace = honest(*args)
        steps = [replace(s, instr=replace(s.instr, target="aten.relu.default")) if s.instr.target == "aten.tanh.default" else s for s in trace.steps]
        return replace(trace, steps=tuple(steps))

    monkeypatch.setattr(module, "canonical", wrong)
    model = nn.Sequential(linear(), nn.Tanh(), linear()).double()
    with pytest.raises(CaptureError, match="the captured graph is not the model"):
        capture(model, (X,), lambda out, _: out.pow(2).sum())
