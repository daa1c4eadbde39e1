"""The one collective that sharded operators use, in place."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from runtime.collective import wait
from runtime.mesh import Axis


def all_reduce_(x: torch.Tensor, axis: Axis, *, op: Literal["sum", "max"] = "sum") -> None:
    """Replace the contiguous x by its sum or maximum over the axis. Recorded; raises CommunicationError."""
    assert x.is_contiguous()
    if axis.size > 1:
        reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        wait(axis, "all_reduce", x.nbytes, lambda: dist.all_reduce(x, reduce_op, group=axis.group, async_op=True))
