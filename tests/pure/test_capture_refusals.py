"""What capture refuses, and that it says why and where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

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
    return torch.utils.checkpoint.checkpoint(self.a, x.requires_grad_(), use_reentrant=True).sum()


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
