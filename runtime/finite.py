"""Whether a step's loss and gradients are finite, as all ranks agree.

Every rank adds up its own gradients and tells by a number, together with the loss, whether the sum is finite. Only where one
is not, each looks at its tensors one by one (a sum can overflow though its terms are finite) and tells all which are at fault.
Where every rank holds the complete sum of every gradient, bit for bit the same, each finds out alone what all find out.
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


def not_finite(grads: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, ...]:
    """Names of the parameters whose gradient here is not finite; `grads` by name."""
    return tuple(sorted({name for name, grad in grads if not bool(torch.isfinite(grad).all())}))


def not_finite_anywhere(grads: Iterable[tuple[str, torch.Tensor]], mesh: Mesh) -> tuple[str, ...]:
    """Likewise, of all ranks of the job. All of them call it."""
    return tuple(sorted({name for names in everyone(mesh.world, not_finite(grads)) for name in names}))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
