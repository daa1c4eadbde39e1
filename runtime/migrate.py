"""Moving to another program in place: tensors at rest and optimizer state go from the old shards to the new ones.

One dense tensor travels at a time: the ranks of a stage gather it, one of them sends it to all, every rank cuts what it keeps. So beside the old and the
new shards a rank holds one dense tensor. Values are copied, never computed with: they are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from runtime.collective import everyone
from runtime.errors import CheckpointError, failing
from runtime.mesh import Mesh
from runtime.state import fitted, is_first_of_stage, owned
from runtime.storage import Resident


@dataclass(frozen=True)
class Side:
    """The tensors of one program on this rank."""

    residents: tuple[Resident, ...]
    mesh: Mesh
    stage_ranks: tuple[int, ...]


@dataclass(frozen=True)
class _Item:
    """What is on its way: a tensor ("" ), or a piece of its optimizer state (`key`). `value`: of a piece that is no tensor of its shape."""

    fqn: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    value: Any = None


@dataclass(frozen=True)
class _Listing:
    """What one "pp" coordinate sends, in order, and the group of the optimizer that each of its parameters is in."""

    coordinate: int
    sender: int
    items: tuple[_Item, ...]
    groups: dict[str, int]


def move(old: Side, new: Side, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Fill the new tensors from the old ones, and make `optimizer`, which worked on the old parameters, one of the new ones.

    Every rank calls it. Returns the bytes of all tensors that travelled. Raises CheckpointError, before anything is moved, for
    optimizer state that is neither of its parameter's shape nor one number.
    """
    mine = tuple(r for r in owned(old.residents, old.mesh, old.stage_ranks) if r.stored.kind != "constant")
    listing = _Listing(old.mesh.axis("pp").index, old.mesh.rank, tuple(_items(mine, optimizer)), _groups(old, optimizer))
    listings = [each for each in everyone(old.mesh.world, listing if is_first_of_stage(old.mesh) else None) if each is not None]
    targets: dict[str, list[Resident]] = {}
    for resident in new.residents:
        targets.setdefault(resident.stored.fqn, []).append(resident)
    states: dict[torch.Tensor, dict[str, Any]] = {}
    moved = 0
    for each in sorted(listings, key=lambda found: found.coordinate):
        dense_of = _gathered(mine, optimizer) if each.coordinate == old.mesh.axis("pp").index else None
        for item in each.items:
            value = item.value
            if item.dtype is not None:
                value = _sent(next(dense_of) if dense_of is not None else None, item, each.sender, old.mesh)
                moved += value.nbytes
            for resident in targets.get(item.fqn, ()):
                if not item.key:
                    resident.write(value)
                elif isinstance(resident.tensor, torch.nn.Parameter):
                    states.setdefault(resident.tensor, {})[item.key] = (
                        resident.like(resident.cut(value)) if item.dtype is not None else fitted(resident, item.key, _copy(value))
                    )
    if optimizer is not None:
        _take_over(optimizer, new, states, {fqn: group for each in listings for fqn, group in each.groups.items()})
    return moved


def _items(mine: tuple[Resident, ...], optimizer: torch.optim.Optimizer | None) -> Iterator[_Item]:
    for resident, key, value in _pieces(mine, optimizer):
        if isinstance(value, torch.Tensor) and value.shape == resident.tensor.shape and (value.dim() > 0 or not key):
            yield _Item(resident.stored.fqn, key, resident.stored.spec.shape, value.dtype)
        elif isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0):
            yield _Item(resident.stored.fqn, key, (), None, _copy(value))
        elif value is not None:
            raise CheckpointError(f"optimizer state {key!r} of {resident.stored.fqn} has no shape that can be cut again: only elementwise optimizers move")


def _pieces(mine: tuple[Resident, ...], optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[Resident, str, Any]]:
    for resident in mine:
        yield resident, "", resident.tensor
        if optimizer is not None and resident.tensor in optimizer.state:
            yield from ((resident, key, value) for key, value in optimizer.state[resident.tensor].items())


def _gathered(mine: tuple[Resident, ...], optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    """The dense tensors of `_items`, in its order."""
    for resident, key, value in _pieces(mine, optimizer):
        if isinstance(value, torch.Tensor) and value.shape == resident.tensor.shape and (value.dim() > 0 or not key):
            yield resident.gather(value)


def _sent(dense: torch.Tensor | None, item: _Item, sender: int, mesh: Mesh) -> torch.Tensor:
    """A dense tensor from the rank `sender` on every rank."""
    assert item.dtype is not None
    if dense is None:
        dense = torch.empty(item.shape, dtype=item.dtype, device=mesh.device)
    dense = dense.contiguous()
    if mesh.world_size > 1 and dense.numel():
        with mesh.guard.waiting(), failing(lambda: f"rank {mesh.rank}: broadcast of {item.fqn} from rank {sender}", mesh.timeout_s):
            dist.broadcast(dense.reshape(-1).view(torch.uint8), src=sender)
    return dense


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _groups(side: Side, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    if optimizer is None:
        return {}
    where = {id(parameter): number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    return {r.stored.fqn: where[id(r.tensor)] for r in side.residents if id(r.tensor) in where}


def _take_over(optimizer: torch.optim.Optimizer, new: Side, states: dict[torch.Tensor, dict[str, Any]], groups: dict[str, int]) -> None:
    parameters = [r for r in new.residents if isinstance(r.tensor, torch.nn.Parameter) and r.stored.fqn in groups]
    for number, group in enumerate(optimizer.param_groups):
        group["params"] = [r.tensor for r in parameters if groups[r.stored.fqn] == number]
    optimizer.state.clear()
    for resident in parameters:
        if resident.tensor in states:
            optimizer.state[resident.tensor] = states[resident.tensor]
