"""Dense tensors out of shards and into them, under the model's own names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from runtime.call import dtype_of
from runtime.collective import everyone
from runtime.errors import failing
from runtime.instr import TensorSpec
from runtime.mesh import Mesh
from runtime.storage import Resident

Pick = Callable[[Resident], torch.Tensor | None]  # the parameter, its gradient, a piece of optimizer state


NUMBERS = ("step", "mu_product", "eta", "mu")  # state of torch's optimizers that is one number whatever the parameter's shape


def fitted(resident: Resident, key: str, value: Any) -> Any:
    """One number of a parameter's optimizer state, as it is kept here: under ZeRO a scalar parameter is a divided vector of one element, and
    so is its state."""
    is_elementwise = isinstance(value, torch.Tensor) and key not in NUMBERS and resident.stored.spec.shape == ()
    return resident.like(resident.cut(value.to(resident.tensor.device))) if is_elementwise and resident.is_sharded else value


def is_first_of_stage(mesh: Mesh) -> bool:
    """Whether this rank has index 0 on every axis but "pp"."""
    return all(axis.index == 0 for name, axis in mesh.axes.items() if name != "pp")


def owned(residents: tuple[Resident, ...], mesh: Mesh, stage_ranks: tuple[int, ...]) -> tuple[Resident, ...]:
    """Those that this "pp" coordinate answers for: a tied tensor belongs to its first stage alone."""
    me = mesh.axis("pp").index
    return tuple(r for r in residents if r.stage == min(r.stored.stages) and stage_ranks[r.stage] == me)


def gather_all(residents: tuple[Resident, ...], pick: Pick) -> Iterator[tuple[Resident, torch.Tensor]]:
    """Each picked tensor dense, one after the other, on every rank of this "pp" coordinate (all have to iterate)."""
    for resident in residents:
        tensor = pick(resident)
        if tensor is not None:
            yield resident, resident.gather(tensor)


def collect(residents: tuple[Resident, ...], mesh: Mesh, stage_ranks: tuple[int, ...], pick: Pick) -> dict[str, torch.Tensor]:
    """Every picked tensor of the whole model on the CPU of rank 0, aliases included; empty on the other ranks.

    All ranks have to call it.
    """
    mine = owned(residents, mesh, stage_ranks)
    pp, out = mesh.axis("pp"), {}
    own_names: list[tuple[str, tuple[str, ...], TensorSpec]] = [
        (r.stored.fqn, r.stored.aliases, replace(r.stored.spec, dtype=r.stored.at_rest)) for r in mine if pick(r) is not None
    ]
    beside = pp.size > 1 and pp.group is None  # of a stage with a mesh of its own, not its first rank: others' names are not needed
    told = [own_names if place == pp.index else [] for place in range(pp.size)] if beside else everyone(pp, own_names)
    for coordinate, listed in enumerate(told):
        tensors = gather_all(mine, pick) if pp.index == coordinate else None
        for fqn, aliases, spec in listed:
            dense = next(tensors)[1] if tensors is not None else None
            if not is_first_of_stage(mesh):
                continue
            if coordinate != 0:
                dense = _bring(dense, spec, coordinate, mesh)
            if mesh.rank == 0:
                assert dense is not None
                dense = dense.to("cpu", copy=True)
                out.update(dict.fromkeys((fqn, *aliases), dense))
    return out


def _bring(dense: torch.Tensor | None, spec: TensorSpec, coordinate: int, mesh: Mesh) -> torch.Tensor | None:
    """Send a tensor from a "pp" coordinate to the first one."""
    pp, group = mesh.axis("pp"), mesh.channels["forward down"]
    if dense is None and pp.index != 0:
        return None
    with mesh.guard.waiting(), failing(lambda: f"rank {mesh.rank}: bringing a tensor from rank {pp.ranks[coordinate]} to {pp.ranks[0]}", mesh.timeout_s):
        if dense is not None:
            dist.send(dense.contiguous(), pp.ranks[0], group=group)
            return None
        buffer = torch.empty(spec.shape, dtype=dtype_of(spec.dtype), device=mesh.device)
        dist.recv(buffer, pp.ranks[coordinate], group=group)
        return buffer


def load(residents: tuple[Resident, ...], dense: Callable[[str], torch.Tensor | None]) -> None:
    """Fill every tensor at rest from `dense(name)`, asked under its name, then its aliases.

    Raises ValueError, before anything is written, where a tensor is missing or has another shape. Constants keep their value.
    """
    wanted = [r for r in residents if r.stored.kind != "constant"]
    found: list[tuple[Resident, Any]] = []
    for resident in wanted:
        value = next((v for name in (resident.stored.fqn, *resident.stored.aliases) if (v := dense(name)) is not None), None)
        if value is None:
            raise ValueError(f"the state has no {resident.stored.fqn!r}")
        found.append((resident, resident.cut(value)))
    with torch.no_grad():
        for resident, local in found:
            resident.local().copy_(local)
