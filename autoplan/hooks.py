"""The hooks of a model as they were when it was captured: what is registered later runs in no step, and is refused."""

from __future__ import annotations

import weakref

import torch

from autoplan.errors import UsageError


class Hooks:
    """Those of the modules and parameters of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        modules = [
            (f"module {name!r}" if name else "the model", table)
            for name, m in model.named_modules()
            for table in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        ]
        self._names, self._tables = [name for name, _ in modules], [table for _, table in modules]
        self._counts = [len(table) for table in self._tables]
        self._parameters = [(name, weakref.ref(parameter)) for name, parameter in model.named_parameters()]  # the caller may let go of the model

    def refuse_new(self) -> None:
        """Raise UsageError, naming the module or parameter, for a hook that was registered since."""
        counts = [len(table) for table in self._tables]
        found = None
        if counts != self._counts:
            found = next((name for name, now, then in zip(self._names, counts, self._counts, strict=True) if now > then), None)
        alive = ((name, parameter()) for name, parameter in self._parameters)
        found = found or next(
            (f"parameter {name!r}" for name, p in alive if p is not None and (p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None))), None
        )
        if found is not None:
            raise UsageError(
                f"{found} was given a hook after the model was captured, and it would run in no step: remove it, or register it before parallelize. "
                "Gradients can be read by pm.full_grads()"
            )
