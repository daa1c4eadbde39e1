"""The norm of all gradients, as one process has it: every element counted once.

A tensor that lies divided adds its parts, a copy (replicated over an axis, or a tied parameter on a later stage) adds nothing.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from runtime.collective import wait
from runtime.mesh import Mesh
from runtime.storage import Resident


def counts_here(resident: Resident, mesh: Mesh) -> bool:
    """Whether this rank's part of a gradient is counted here, and not on another rank that holds the same."""
    if resident.stage != min(resident.stored.stages):
        return False
    divided = {chunk.axis for chunk in resident.stored.chunks}
    for name, axis in mesh.axes.items():
        if name == "pp" or name in divided or (name == "dp" and resident.is_served):  # served: zero but for this rank's own part
            continue
        if name == "dp" and resident.is_sharded:
            if mesh.replica_axis.index != 0:
                return False
        elif axis.index != 0:
            return False
    return True


def grad_norm(residents: tuple[Resident, ...], mesh: Mesh, norm_type: float) -> torch.Tensor:
    """The norm of all gradients over the whole mesh, a float64 scalar, the same on every rank. All ranks call it."""
    own = [r.local(r.tensor.grad) for r in residents if r.tensor.grad is not None and counts_here(r, mesh)]
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float64 if g.dtype == torch.float64 else torch.float32) for g in own if g.numel()]
    total = torch.stack([n.double() for n in norms]) if norms else torch.zeros(1, dtype=torch.float64, device=mesh.device)
    if math.isinf(norm_type):
        total = total.max()
        _over_world(total, mesh, dist.ReduceOp.MAX)
        return total
    total = total.pow(norm_type).sum()
    _over_world(total, mesh, dist.ReduceOp.SUM)
    return total.pow(1.0 / norm_type)


def clip_grad_norm(residents: tuple[Resident, ...], mesh: Mesh, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; returns the norm before. As torch.nn.utils.clip_grad_norm_."""
    norm = grad_norm(residents, mesh, norm_type)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for resident in residents:
        if resident.tensor.grad is not None:
            grad = resident.local(resident.tensor.grad)
            grad.mul_(factor.to(grad.dtype))
    return norm


def _over_world(value: torch.Tensor, mesh: Mesh, op: dist.ReduceOp.RedOpType) -> None:
    if mesh.world_size > 1:
        wait(mesh.world, "all_reduce", value.nbytes, lambda: dist.all_reduce(value, op, async_op=True))
