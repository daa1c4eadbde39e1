"""Optimizers that live on parameter servers: each server updates what it serves, then every worker pulls the weights.

`served_class` gives an optimizer class that takes this rank's parameters and works on the pieces that it serves, flat views of
its own replica. It has the elementwise classes of torch only, for which any piece of a tensor is updated as in the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autoplan.errors import UnsupportedOpError
from autoplan.faults import told
from autoplan.optimizers import ELEMENTWISE, is_torch
from runtime.executor import Executor
from runtime.partition import Piece
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
            own = [(piece, self.state.get(part, {})) for piece, part in self.served.get(resident.tensor, ())]
            kinds: dict[str, Any] = {}
            for told_by_rank in servers.everyone([{k: _kind(v) for k, v in state.items()} for _, state in own]):
                for keys in told_by_rank:
                    kinds |= keys
            found: dict[str, Any] = {}
            for key, kind in sorted(kinds.items()):
                if not isinstance(kind, torch.dtype):
                    found[key] = kind
                    continue
                whole = torch.zeros(resident.local().numel(), dtype=kind, device=resident.local().device)
                for piece, state in own:
                    whole[piece.start : piece.stop] = state[key]
                found[key] = servers.whole(whole).view(resident.local().shape)
            return found

        def take_state(self, resident: Resident, state: dict[str, Any]) -> None:
            """Take the state of a parameter over, in the form of `state_of`; each server its own part."""
            for piece, part in self.served.get(resident.tensor, ()):
                self.state[part] = {
                    key: value.reshape(-1)[piece.start : piece.stop].clone() if isinstance(value, torch.Tensor) and value.dim() else _copy(value)
                    for key, value in state.items()
                }

    Served.__name__ = Served.__qualname__ = cls.__name__
    return Served


def _kind(value: Any) -> Any:
    """The dtype of state that has a piece's shape; a number itself."""
    return value.dtype if isinstance(value, torch.Tensor) and value.dim() else value


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
