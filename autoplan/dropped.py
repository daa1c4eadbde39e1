"""What an export would drop without a word, stopped at the line of the model that does it.

An export keeps what a forward pass computes. It loses the backward of a torch.autograd.Function, hooks on tensors, and what Python's or numpy's
random numbers decide: the branch that was taken once would be taken in every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class Refused(Exception):
    """Raised in the midst of an export, at the user's line."""


class Drawn(Refused):
    """Numbers were drawn that are not torch's."""


@contextmanager
def nothing_dropped() -> Iterator[None]:
    """Inside, a model that does what an export would drop raises Refused; so does leaving it, where nothing names a line."""
    function, tensor, hooks = torch.autograd.Function, torch.Tensor, torch.autograd.graph.saved_tensors_hooks
    patched: list[tuple[Any, str, Any]] = [
        (function, "apply", classmethod(_apply(function.__dict__["apply"]))),
        (tensor, "register_hook", _refusing("a hook on a tensor would not run: scale or stop gradients by tensor operators, such as x.detach()")),
        (torch.autograd, "grad", _refusing("torch.autograd.grad inside the forward pass would lose the gradient of what it gives: " + _PENALTY)),
        (torch.autograd, "backward", _refusing("a backward pass inside the forward pass cannot be part of a plan: " + _PENALTY)),
        (hooks, "__init__", _init(hooks.__init__)),
        (torch._VF, "_pack_padded_sequence", _refusing("a packed sequence has sizes that depend on data: run the padded batch, and mask what it gives")),
        (torch.inference_mode, "__enter__", _enter_without_gradients),
        (torch.inference_mode, "__exit__", _exit_without_gradients),
    ]
    before = [(owner, name, owner.__dict__.get(name, _ABSENT)) for owner, name, _ in patched]
    drawn = _python_draws()
    for owner, name, made in patched:
        setattr(owner, name, made)
    try:
        yield
    finally:
        for owner, name, original in before:
            delattr(owner, name) if original is _ABSENT else setattr(owner, name, original)
    if _python_draws() != drawn:
        raise Drawn(
            "the model draws Python's or numpy's random numbers, which would be the same in every step: draw them with torch, and choose by torch.where"
        )


_ABSENT = object()
_PENALTY = "write the derivative in tensor operators, or train this model without a plan"


def _enter_without_gradients(self: Any) -> None:
    """An export keeps `no_grad`, and the values are the same."""
    self.before = torch.is_grad_enabled()
    torch.set_grad_enabled(self.before and not self.mode)


def _exit_without_gradients(self: Any, *_: Any) -> None:
    torch.set_grad_enabled(self.before)


def _python_draws() -> tuple[Any, ...]:
    """The states of the generators that are not torch's."""
    kind, key, place, *_ = np.random.get_state()
    return random.getstate(), kind, bytes(np.asarray(key).data), place


def _refusing(reason: str) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        raise Refused(reason)

    return called


def _apply(original: Any) -> Callable[..., Any]:
    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__name__.startswith("GeneratedBackwardFor_"):  # of a torch.library operator, which the graph calls whole
            return original.__get__(None, cls)(*args, **kwargs)
        if cls.__name__ == "CheckpointFunction":
            raise Refused(
                "re-entrant checkpointing is a custom autograd.Function, whose backward an export loses: pass use_reentrant=False, or leave it to the plan"
            )
        raise Refused(f"the custom autograd.Function {cls.__name__} would lose its backward: register it as a torch.library operator with register_autograd")

    return apply


def _init(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is torch.autograd.graph.saved_tensors_hooks:  # checkpointing and offloading have classes of their own: they change no value
            raise Refused("hooks on what autograd saves would not run: compute with the tensors themselves, or leave recomputation to the plan")
        original(self, *args, **kwargs)

    return init
