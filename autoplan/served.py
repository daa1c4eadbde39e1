"""Optimizers that live on parameter servers: each server updates what it serves, then every worker pulls the weights.

`served_class` gives an optimizer class that takes this rank's parameters and works on the pieces that it serves, flat views of
its own replica. It has the elementwise classes of torch only, for which any piece of a tensor is updated as in the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autoplan.errors import UnsupportedOpError, UsageError
from autoplan.faults import told
from autoplan.optimizers import ELEMENTWISE, is_torch
from runtime.collective import everyone, raw_all_reduce
from runtime.executor import Executor
from runtime.partition import Piece
from runtime.state import NUMBERS
from runtime.storage import Resident


def check_servable(cls: type[Optimizer]) -> None:
    """Raises UnsupportedOpError for an optimizer that needs more than the elements it updates."""
    if not is_torch(cls, ELEMENTWISE):
        raise UnsupportedOpError(
            f"{cls.__name__} may look at whole tensors, and parameter servers keep pieces of them: use one of {', '.join(ELEMENTWISE)}, or sync='allreduce'."
        )


def served_class(cls: Any, executor: Executor) -> Any:
    """`cls` on the pieces that this rank serves. Raises UnsupportedOpError for one that is not elementwise."""
    check_servable(cls)
    servers = executor.servers
    assert servers is not None

    class Served(cls):
        """`served`: the parameters given, in order; `pieces`: what this rank updates of each."""

        served: dict[torch.Tensor, tuple[tuple[Piece, nn.Parameter], ...]]

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            self.__dict__.setdefault("served", {})
            given = param_group["params"]
            params = [given] if isinstance(given, torch.Tensor) else [item[1] if isinstance(item, tuple) else item for item in given]
            own: list[nn.Parameter] = []
            for parameter in params:
                pieces = tuple((piece, nn.Parameter(servers.view(piece))) for piece in servers.own_pieces(parameter)) if parameter.numel() else ()
                self.served[parameter] = pieces
                own += [part for _, part in pieces]
            super().add_param_group({**param_group, "params": own or [nn.Parameter(torch.empty(0))]})

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for pieces in self.served.values():
                for piece, part in pieces:
                    part.grad = servers.grad(piece)
            super().step()
            with told():
                executor.pull([parameter for parameter in self.served if parameter.grad is not None])
            return loss

        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(True)
            for parameter in self.served:
                if set_to_none or parameter.grad is None:
                    parameter.grad = None
                else:
                    parameter.grad.zero_()

        def state_of(self, resident: Resident) -> dict[str, Any]:
            """The state of a parameter from all its servers: tensors of its own local shape, and numbers. All data ranks call it."""
            return _joined(resident, [(piece, self.state.get(part, {})) for piece, part in self.served.get(resident.tensor, ())])

        def take_state(self, resident: Resident, state: dict[str, Any]) -> None:
            """Take the state of a parameter over, in the form of `state_of`; each server its own part."""
            for piece, part in self.served.get(resident.tensor, ()):
                self.state[part] = _cut(state, piece, part.device)

    Served.__name__ = Served.__qualname__ = cls.__name__
    return Served


def worker_class(cls: Any, executor: Executor) -> Any:
    """`cls` as an asynchronous worker has it: a step pushes gradients, with this object's learning rates, and pulls weights; the
    servers' own optimizers are of `cls` with the other options as they are now. Raises UnsupportedOpError as `served_class`."""
    check_servable(cls)
    run = executor.asynchronous
    assert run is not None
    worker = run.worker
    if worker.has_started:
        raise UsageError("an asynchronous run has one optimizer, and it is made already: put all parameters into it, as groups")

    class Remote(cls):
        served = True

        def __init__(self, params: Iterable[Any], **options: Any) -> None:
            super().__init__(params, **options)
            trained = executor.with_gradients()
            run.start([[p for p in group["params"] if p in trained] for group in self.param_groups], self._make)

        def _make(self, pieces: list[list[nn.Parameter]]) -> Optimizer:
            options = [{key: value for key, value in group.items() if key not in ("params", "param_names")} for group in self.param_groups]
            return cls([{**group, "params": own or [nn.Parameter(torch.empty(0))]} for group, own in zip(options, pieces, strict=True)])

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            if worker.has_started:
                raise UsageError("the servers work already: give all groups of parameters when the optimizer is made")
            super().add_param_group(param_group)

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if not worker.works:
                raise UsageError("this rank serves and computes nothing: it makes no steps, call pm.finish(), which returns once all workers have ended")
            if worker.has_finished:
                raise UsageError("pm.finish() has ended this run: no step can follow")
            with told():
                run.exchange([float(group["lr"]) for group in self.param_groups])
            return loss

        def state_of(self, resident: Resident) -> dict[str, Any]:
            """The state of a parameter from all its servers, as `Served` gives it."""
            return _joined(resident, [(piece, self._server_state.get(part, {})) for piece, part in self._own(resident)])

        def take_state(self, resident: Resident, state: dict[str, Any]) -> None:
            for piece, part in self._own(resident):
                self._server_state[part] = _cut(state, piece, part.device)

        def _own(self, resident: Resident) -> list[tuple[Piece, nn.Parameter]]:
            return [(piece, part) for piece, part in worker.own if worker.residents[piece.tensor] is resident]

        @property
        def _server_state(self) -> Any:
            return worker.server.optimizer.state if worker.server is not None else {}

    Remote.__name__ = Remote.__qualname__ = cls.__name__
    return Remote


def _joined(resident: Resident, own: list[tuple[Piece, Any]]) -> dict[str, Any]:
    """The state of a parameter in its own local shape, from what each data rank has of it."""
    axis = resident.mesh.axis("dp")
    kinds: dict[str, Any] = {}
    for keys in everyone(axis, [{k: _kind(v) for k, v in state.items()} for _, state in own]):
        for found in keys:
            kinds |= found
    joined: dict[str, Any] = {}
    for key, kind in sorted(kinds.items()):
        if not isinstance(kind, torch.dtype):
            joined[key] = kind
            continue
        whole = torch.zeros(resident.local().numel(), dtype=kind, device=resident.local().device)
        for piece, state in own:
            whole[piece.start : piece.stop] = state[key]
        joined[key] = raw_all_reduce(whole, axis).view(resident.local().shape)
    return joined


def _cut(state: dict[str, Any], piece: Piece, device: torch.device) -> dict[str, Any]:
    """The state of one piece."""
    return {
        key: value.reshape(-1)[piece.start : piece.stop].clone().to(device) if isinstance(value, torch.Tensor) and key not in NUMBERS else _copy(value)
        for key, value in state.items()
    }


def _kind(value: Any) -> Any:
    """The dtype of state that has a piece's shape; a number itself."""
    return value.dtype if isinstance(value, torch.Tensor) and value.dim() else value


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
