"""Loss scaling: gradients of fp16 are computed of a multiple of the loss, so that small ones do not vanish.

    scale   starts at 2^16; halved by a step whose gradients are not finite, doubled after 2000 steps in a row that are

Source: Micikevicius et al. 2018, section 3.2; the numbers of torch.amp.GradScaler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000


@dataclass(frozen=True, slots=True)
class LossScale:
    """The factor of the loss, and how many steps in a row were finite with it."""

    factor: float = 2.0**16
    num_finite: int = 0

    def after(self, is_finite: bool) -> LossScale:
        """The scale of the next step."""
        if not is_finite:
            return LossScale(self.factor * BACKOFF)
        if self.num_finite + 1 == INTERVAL:
            return LossScale(self.factor * GROWTH)
        return replace(self, num_finite=self.num_finite + 1)
