"""Models as users bring them: what works gives the plain model's gradients, what cannot is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoplan

BATCH = {"x": torch.linspace(-1, 1, 64).reshape(8, 8), "labels": torch.arange(8) % 3}


class Brought(nn.Module):
    def __init__(self, body: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda second, h: second(h)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.body = nn.Linear(8, 8), nn.Linear(8, 8), body

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body(self.second, torch.tanh(self.first(x)))[:, :3], labels)


class Int8(nn.Module):
    """A frozen linear map with int8 weights and a scale for each row, in buffers, and a bias that trains."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.scale = nn.Buffer(weight.abs().amax(1, keepdim=True) / 127)
        self.codes = nn.Buffer((weight / self.scale).round().to(torch.int8))
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.codes.to(x.dtype) * self.scale, self.bias)


class Triples(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 3


class Packed(torch.Tensor):
    """A tensor of a class of its own, as libraries of quantisation make them."""


def hooked(hook: Callable[..., Any], *, before: bool = False) -> Brought:
    model = Brought()
    (model.first.register_forward_pre_hook if before else model.first.register_forward_hook)(hook)
    return model


def changed(change: Callable[[Brought], Any]) -> Brought:
    model = Brought()
    change(model)
    return model


def in_place(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.mul_(2.0)


WORKS: dict[str, Callable[[], nn.Module]] = {
    "a hook that changes the output": lambda: hooked(lambda module, args, output: output * 2),
    "a hook that writes into the output": lambda: hooked(in_place),
    "a hook that changes the input": lambda: hooked(lambda module, args: (args[0] + 1,), before=True),
    "weight norm": lambda: changed(lambda model: nn.utils.parametrizations.weight_norm(model.first)),
    "checkpointing": lambda: Brought(lambda second, h: checkpoint(second, h, use_reentrant=False)),  # type: ignore[arg-type]
    "int8 weights in buffers": lambda: changed(lambda model: setattr(model, "first", Int8(model.first))),
    "a part that is compiled": lambda: changed(lambda model: model.first.compile()),
    "DataParallel": lambda: nn.DataParallel(Brought()),
}


@pytest.mark.parametrize("name", WORKS)
def test_what_works_has_the_plain_models_gradients(name: str) -> None:
    model = WORKS[name]()
    plain = copy.deepcopy(model)
    pm = autoplan.parallelize(model, BATCH, cluster="cpu:1x1")
    found, true = pm.forward_backward(BATCH), plain(**BATCH)
    true.backward()
    assert found.item() == pytest.approx(true.item(), rel=1e-6)
    grads, wanted = pm.full_grads(), {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert grads.keys() == wanted.keys()
    for key, grad in wanted.items():
        torch.testing.assert_close(grads[key], grad, rtol=1e-4, atol=1e-6)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a hook that records": (lambda: hooked(lambda module, args, output: None), "forward hook of first: .*changes no value"),
    "a hook before that records": (lambda: hooked(lambda module, args: None, before=True), "forward hook of first"),
    "a backward hook": (lambda: changed(lambda m: m.first.register_full_backward_hook(lambda *_: None)), "module 'first' has backward hooks"),
    "a parameter's hook": (lambda: changed(lambda m: m.first.weight.register_hook(lambda g: g * 2)), "parameter 'first.weight' has gradient hooks"),
    "an activation's hook": (lambda: Brought(lambda second, h: (h.register_hook(lambda g: g * 2), second(h))[1]), "a hook on a tensor would not run"),
    "a custom Function": (lambda: Brought(lambda second, h: second(Triples.apply(h))), "the custom autograd.Function Triples would lose its backward"),
    "re-entrant checkpointing": (lambda: Brought(lambda second, h: checkpoint(second, h, use_reentrant=True)), "use_reentrant=False"),  # type: ignore[arg-type]
    "dynamic quantisation": (lambda: torch.ao.quantization.quantize_dynamic(Brought(), {nn.Linear}), "module 'first' is quantised"),
    "a tensor of another class": (
        lambda: changed(lambda m: setattr(m.first, "weight", nn.Parameter(m.first.weight.detach().as_subclass(Packed)))),
        "parameter 'first.weight' is a Packed",
    ),
    "TorchScript": (lambda: torch.jit.trace(nn.Linear(8, 8), torch.zeros(2, 8)), "TorchScript"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_is_refused_by_name(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(autoplan.CaptureError, match=said):
        autoplan.capture(make(), BATCH)


def test_a_model_without_a_loss_is_planned_with_a_clear_warning() -> None:
    with pytest.warns(UserWarning, match="Linear gives no loss, so the plan is one of its forward pass"):
        plan = autoplan.find_plan(nn.Linear(8, 8), (torch.zeros(8, 8),), "cpu:1x2")
    assert any("gives no loss" in warning for warning in plan.warnings)


def test_hooks_are_as_they_were_after_a_capture() -> None:
    model = hooked(in_place)
    autoplan.capture(model, BATCH)
    assert list(model.first._forward_hooks.values()) == [in_place]
