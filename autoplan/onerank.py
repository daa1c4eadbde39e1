"""What is timed for an operator: its own function, or, of those that the runtime has of its own, what one rank alone runs of them.

The sums over ranks that such a function makes inside are priced one by one as collectives; what is left of it is timed here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from costmodel.measure import resolve_aten
from runtime.mesh import Axis
from runtime.record import Recorder
from runtime.sharded_ops import batch_norm, sync_batch_norm


def on_one_rank(target: str) -> Callable[..., Any]:
    """The function of a target. NotMeasurableError for what does not run on one rank by itself."""
    if target == "runtime.batch_norm":
        return batch_norm
    return _sync_batch_norm if target == "runtime.sync_batch_norm" else resolve_aten(target)


def _sync_batch_norm(x: torch.Tensor, *rest: Any) -> Any:
    return sync_batch_norm(x, *rest, axis=_alone(), count=x.numel() // x.shape[1])


@functools.cache
def _alone() -> Axis:
    return Axis("", 1, 0, (0,), None, Recorder(), 0.0)
