"""Optimizers on parameters that lie divided over ranks.

    elementwise    every element is updated from its own gradient and state: exact on any part of a tensor
    per tensor     a tensor is updated from itself alone (Muon, Adafactor): exact on whole tensors, wherever they are
    others         may look at all parameters at once (LBFGS, and what is not known here): exact where one place has them all

`optimizer_class` gives the class itself where that is exact (under ZeRO it works on plain tensors: autoplan/localparts.py), and else one that
works on dense copies: gathered before every step on all ranks that hold parts, which all do the same work, and cut again after it. Its state
is dense.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoplan.errors import UnsupportedOpError
from autoplan.localparts import on_local_parts
from runtime.storage import Resident

ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Rprop", "ASGD")
PER_TENSOR = ("Muon", "Adafactor")


def is_torch(cls: type[Optimizer], names: Sequence[str]) -> bool:
    """Whether it is torch's own class of one of these names."""
    return cls.__name__ in names and cls.__module__.startswith("torch.optim")


def optimizer_class(cls: type[Optimizer], residents: Sequence[Resident], num_stages: int) -> type[Optimizer]:
    """The class that does on this rank's parameters what `cls` does on the whole model's.

    Raises UnsupportedOpError, naming it, for an optimizer that may need all parameters in one place while several stages have them.
    """
    if is_torch(cls, ELEMENTWISE):
        sharded = [resident for resident in residents if resident.is_sharded]
        return on_local_parts(cls, sharded) if sharded else cls
    if num_stages > 1 and not is_torch(cls, PER_TENSOR):
        raise UnsupportedOpError(
            f"{cls.__name__} may look at all parameters at once, and this plan keeps them on {num_stages} stages: "
            f"use one of {', '.join((*ELEMENTWISE, *PER_TENSOR))}, or constraints pp=1."
        )
    divided = [resident for resident in residents if resident.is_divided]
    return _gathered(cls, divided) if divided else cls


def protect(residents: Iterable[Resident], *, only_one_bit_adam: bool = False) -> None:
    """Let no optimizer step that would take a part of a tensor for the whole, that lives here where servers update, or that takes the
    gradients of 1-bit Adam for others: it raises
    UnsupportedOpError instead."""
    for resident in residents:
        if only_one_bit_adam:
            resident.tensor.is_for_one_bit_adam = True  # type: ignore[attr-defined]
        if resident.is_divided:
            resident.tensor.is_part = True  # type: ignore[attr-defined]
        if resident.is_served:
            resident.tensor.is_served = True  # type: ignore[attr-defined]
    _watch()


@functools.cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_refuse_parts)


def _refuse_parts(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    cls = type(optimizer)
    if hasattr(optimizer, "served"):
        return  # one of autoplan/served.py
    if not hasattr(optimizer, "warmup_steps") and any(hasattr(p, "is_for_one_bit_adam") for group in optimizer.param_groups for p in group["params"]):
        raise UnsupportedOpError(f"this plan compresses the momentum of 1-bit Adam: make the optimizer with pm.optimizer({cls.__name__}, ...).")
    if any(hasattr(p, "is_served") for group in optimizer.param_groups for p in group["params"]):
        raise UnsupportedOpError(
            f"{cls.__name__}(pm.parameters(), ...) would update on every worker, and this plan keeps the optimizer on parameter servers: "
            f"make it with pm.optimizer(torch.optim.{cls.__name__}, ...)."
        )
    if not is_torch(cls, ELEMENTWISE) and any(hasattr(p, "is_part") for group in optimizer.param_groups for p in group["params"]):
        raise UnsupportedOpError(f"{cls.__name__} updates from whole tensors, and this plan splits them: make it with pm.optimizer({cls.__name__}, ...).")


def _gathered(cls: Any, divided: Sequence[Resident]) -> Any:
    """`cls` on dense copies of those of its parameters that are among `divided`."""
    residents = {resident.tensor: resident for resident in divided}

    class Gathered(cls):
        dense: dict[torch.Tensor, nn.Parameter]  # by the parameter at rest

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            self.__dict__.setdefault("dense", {})
            super().add_param_group({**param_group, "params": self._whole(param_group["params"])})

        def _whole(self, given: Any) -> Any:
            """Parameters, or (name, parameter) pairs, with dense copies in the place of divided ones."""
            if isinstance(given, torch.Tensor):
                if given in residents and given not in self.dense:
                    self.dense[given] = nn.Parameter(residents[given].gather())
                return self.dense.get(given, given)
            if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str):
                return given[0], self._whole(given[1])
            return [self._whole(item) for item in given]

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            def evaluated() -> Any:
                assert closure is not None
                self._scatter()
                loss = closure()
                self._gather_grads()
                return loss

            with torch.no_grad():
                for part, whole in self.dense.items():
                    whole.copy_(residents[part].gather())
            self._gather_grads()
            loss = super().step() if closure is None else super().step(evaluated)
            self._scatter()
            return loss

        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)
            for part in self.dense:
                part.grad = None

        def _gather_grads(self) -> None:
            for part, whole in self.dense.items():
                whole.grad = None if part.grad is None else residents[part].gather(part.grad)

        def _scatter(self) -> None:
            for part, whole in self.dense.items():
                residents[part].write(whole.detach())

    Gathered.__name__ = Gathered.__qualname__ = cls.__name__
    return Gathered
