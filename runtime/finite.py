"""Whether a step's loss and gradients are finite, as all ranks agree.

Every rank adds up its own gradients and tells by a number, together with the loss, whether the sum is finite. Only where one
is not, each looks at its tensors one by one (a sum can overflow though its terms are finite) and tells all which are at fault.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from runtime.collective import everyone
from runtime.mesh import Mesh


def suspicion(grads: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A float64 scalar: 0 where the gradients here are finite, 1 where they may not be."""
    sums: dict[torch.dtype, list[torch.Tensor]] = {}
    for grad in grads:
        sums.setdefault(grad.dtype, []).append(_real(grad).sum())
    totals = [torch.stack(own).double().sum() for own in sums.values()]  # of each dtype: an overflow only makes them suspect
    return (~torch.isfinite(torch.stack(totals).sum())).double() if totals else torch.zeros((), dtype=torch.float64, device=device)


def not_finite(grads: Iterable[tuple[str, torch.Tensor]], mesh: Mesh) -> tuple[str, ...]:
    """Names of parameters, anywhere in the job, whose gradient is not finite; `grads` by name. All ranks call it."""
    own = [name for name, grad in grads if not bool(torch.isfinite(grad).all())]
    return tuple(sorted({name for names in everyone(mesh.world, own) for name in names}))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
