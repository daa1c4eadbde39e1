"""Master weights: a tensor rests in one dtype and is computed with as a copy in another.

The copy is made once a step and shared by its micro-batches; each of them adds its gradient to the master's in the dtype
of the master (Micikevicius et al. 2018, section 3.1). Under ZeRO the copy is what FSDP2 gathers, and this module has no part in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False)
class Copies:
    """The copies of one holder's tensors, by name."""

    _kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def read(self, name: str, master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`master` as `dtype`; differentiable where it is."""
        if master.dtype == dtype:
            return master
        if name not in self._kept:
            self._kept[name] = master.detach().to(dtype)
        copy = self._kept[name]
        if not (master.requires_grad and torch.is_grad_enabled()):
            return copy
        out = _Copied.apply(master, copy)
        assert isinstance(out, torch.Tensor)
        out.master = master  # type: ignore[attr-defined]
        return out

    def drop(self) -> None:
        """Forget them: the masters change."""
        self._kept.clear()

    @property
    def num_bytes(self) -> int:
        return sum(copy.nbytes for copy in self._kept.values())


def master_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor at rest of which this is a copy, or the tensor itself."""
    return getattr(tensor, "master", tensor)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, master: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.dtype = master.dtype
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].to(ctx.dtype), None
