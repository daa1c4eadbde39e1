"""What `parallelize` keeps of the model that it was given: its modules without the weights. The ranks hold their parts, and the weights of the model
itself are its caller's: gone as soon as that lets go of it (`model = autoplan.parallelize(model)`).

What is asked later of the model (its graph for another shape, how it evaluates) is asked of the model while it lives, else of the modules with
other weights for the moment. A model whose modules cannot be copied is kept whole.
"""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from autoplan.api import Batch
from autoplan.frontend import capture, check_evaluation
from autoplan.graph import Graph
from autoplan.settings import Settings
from runtime.executor import Executor


class HasExecutor(Protocol):
    @property
    def executor(self) -> Executor: ...


class Skeleton:
    """A model's modules, their parameters on the meta device; buffers and other tensors are those of the model."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._settings, self._given, self._outdated = settings, weakref.ref(model), Outdated()
        self._devices = {name: parameter.device for name, parameter in model.named_parameters()}
        memo: dict[int, Any] = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad) for p in model.parameters()}
        memo.update((id(buffer), buffer) for buffer in model.buffers())
        try:
            self.module = copy.deepcopy(model, memo)
        except Exception:  # of the model's own code: whatever it holds that has no copy
            self.module = model

    def watch(self, of: HasExecutor) -> None:
        """Warn where the model that was given is called when `of` has trained."""
        given = self._given()
        assert given is not None
        self._outdated = Outdated(of)
        given.register_forward_pre_hook(self._outdated)

    def capture(self, batch: Batch) -> Graph:
        """The graph for a batch of another shape."""
        with self._model(torch.zeros_like) as model:  # on CPUs memory that nobody touches
            return capture(model, batch, self._settings.loss_fn, check=False, precision=self._settings.precision)

    def check(self, batch: Batch, graph: Graph) -> None:
        """Raise UnsupportedOpError where the model in evaluation mode is not `graph`."""
        with self._model(_drawn) as model:
            check_evaluation(model, batch, graph, self._settings.loss_fn, precision=self._settings.precision)

    @contextmanager
    def _model(self, fill: Callable[..., torch.Tensor]) -> Iterator[nn.Module]:
        """The model that was given, or its modules with parameters that `fill(parameter, device=...)` makes, on the devices of the model's."""
        given = self._given()
        if given is not None:
            self._outdated.is_quiet = True
            try:
                yield given
            finally:
                self._outdated.is_quiet = False
            return
        held = dict(self.module.named_parameters())
        stand_ins = {id(p): nn.Parameter(fill(p, device=self._devices[name]), requires_grad=p.requires_grad) for name, p in held.items()}
        places = [(m._parameters, name, p) for m in self.module.modules() for name, p in m._parameters.items() if p is not None]
        try:
            for table, name, parameter in places:
                table[name] = stand_ins[id(parameter)]
            yield self.module
        finally:
            for table, name, parameter in places:
                table[name] = parameter


def _drawn(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Values as initialisations draw them: vectors around one, of matrices so that a product keeps the size of its input."""
    if device.type == "meta" or not like.is_floating_point():
        return torch.zeros_like(like, device=device)
    values = torch.randn(like.shape, generator=torch.Generator().manual_seed(like.numel()))
    return (1 + 0.1 * values if like.dim() < 2 else values / math.sqrt(like[0].numel() or 1)).to(device, like.dtype)


class Outdated:
    """A hook of the model that was given: warns, once, where it is called with weights that training has left behind."""

    def __init__(self, of: HasExecutor | None = None) -> None:
        self._of = None if of is None else weakref.ref(of)
        self._first = None if of is None else _versions(of)
        self.is_quiet = False

    def __call__(self, model: nn.Module, *_: Any) -> None:
        of = None if self._of is None else self._of()
        if of is not None and not self.is_quiet and _versions(of) != self._first:
            self._of = None
            warnings.warn(
                f"this {type(model).__name__} was given to autoplan.parallelize and has the weights of that moment, which have changed since: "
                "call evaluate or predict of what parallelize gave, or load its full_state_dict()",
                RuntimeWarning,
                stacklevel=3,
            )

    def __reduce__(self) -> tuple[type[Outdated], tuple[()]]:
        return Outdated, ()  # a copy of the model belongs to no job


def _versions(of: HasExecutor) -> tuple[int, ...]:
    return (id(of.executor), *of.executor.versions())
