"""1-bit Adam: Adam until its variance is settled, then with the variance frozen and the momentum sent in one bit an element.

With m the momentum, v the variance, G the gradient that a step leaves, T the number of warm-up updates, b1 and b2 the betas:

    update t <= T    Adam's own
    update t > T     m <- b1 m + (1 - b1) G      w <- w - lr / (1 - b1^t) * m / (sqrt(u / (1 - b2^T)) + eps)
                     u = max(v_T, f mean(v_T)), f = variance_floor, the mean over the parameter as it lies on this rank

G is such that the new m is the sum of what all ranks sent (runtime/reducer.py). Its elements are all about as large as their root mean
square s, whatever they stand for, so an update has elements s / sqrt(v_T): without the floor one that was rarely updated in the warm-up
would be thrown far away, before the residuals call it back. With it no element moves more than s / rms(v_T^(1/2)) / sqrt(f) learning
rates. The theorem of the paper holds for any variance that is fixed and positive. Elements whose v_T is zero had no gradient in the
warm-up; they stay as they are, since one bit cannot say zero. Weight decay is that of the class: added to G (Adam), or of the weight (AdamW).

Source: Tang et al. 2021, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Adam, AdamW

from autoplan.errors import UnsupportedOpError, UsageError

WARMUP_STEPS = 100
VARIANCE_FLOOR = 0.01  # of a parameter's mean: its updates stay within ten times what they would be were all variances alike


def one_bit_adam(cls: Any) -> Any:
    """`cls` (torch's Adam or AdamW) with `warmup_steps` and `variance_floor` among its options. Raises UnsupportedOpError for another class."""
    if cls not in (Adam, AdamW):
        raise UnsupportedOpError(
            f"compression='1bit-adam' compresses Adam's momentum, and {cls.__name__} is another optimizer: use torch.optim.Adam or AdamW, or compression='1bit'"
        )

    base: Any = cls

    class OneBitAdam(base):
        def __init__(self, params: Any, *, warmup_steps: int = WARMUP_STEPS, variance_floor: float = VARIANCE_FLOOR, **options: Any) -> None:
            if warmup_steps < 1:
                raise UsageError(f"warmup_steps={warmup_steps}: the variance needs at least one update before it is frozen")
            if not 0 <= variance_floor <= 1:
                raise UsageError(f"variance_floor={variance_floor}: a share of the mean variance, from 0 (none) to 1 (no variance below the mean)")
            refused = [name for name in ("amsgrad", "maximize", "capturable", "differentiable") if options.get(name)]
            if refused:
                raise UnsupportedOpError(f"1-bit Adam has no {', '.join(refused)}: leave it out, or use compression='1bit'")
            super().__init__(params, **options)
            self.warmup_steps, self.variance_floor = warmup_steps, variance_floor

        @property
        def is_frozen(self) -> bool:
            """Whether the warm-up is over."""
            return any(_count(state) >= self.warmup_steps for state in self.state.values())

        def momentum(self, parameter: torch.Tensor) -> tuple[torch.Tensor, float] | None:
            """(momentum, beta1) of a parameter; None where it has none yet."""
            group = next((g for g in self.param_groups if any(p is parameter for p in g["params"])), None)
            state = self.state.get(parameter)
            return (state["exp_avg"], float(group["betas"][0])) if group is not None and state else None

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            if not self.is_frozen:
                return super().step(closure)
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            self._update(parameter, self.state[parameter], group)
            return loss

        def _update(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            """One update with the variance frozen: the module's formula."""
            grad, (beta1, beta2), rate, decay = parameter.grad, group["betas"], group["lr"], group["weight_decay"]
            assert grad is not None
            if not state:  # a gradient for the first time: no variance, so no update
                state.update(step=torch.zeros((), dtype=torch.float32), exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
            if decay and issubclass(cls, AdamW):
                parameter.mul_(1 - rate * decay)
            elif decay:
                grad = grad.add(parameter, alpha=decay)
            state["step"] += 1
            mean, variance = state["exp_avg"], state["exp_avg_sq"]
            mean.lerp_(grad, 1 - beta1)
            floored = torch.maximum(variance, self.variance_floor * variance.mean()) if variance.numel() else variance
            scale = (floored / (1 - beta2**self.warmup_steps)).sqrt_().add_(group["eps"])
            change = torch.where(variance > 0, mean / scale, torch.zeros_like(mean))
            parameter.add_(change, alpha=-float(rate) / (1 - beta1 ** int(state["step"])))

    OneBitAdam.__name__ = OneBitAdam.__qualname__ = cls.__name__
    return OneBitAdam


def _count(state: dict[str, Any]) -> int:
    return int(state["step"]) if "step" in state else 0
