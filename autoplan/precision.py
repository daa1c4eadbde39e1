"""Precisions: what a step computes in, while parameters and buffers rest in fp32.

    fp32    computes in fp32
    bf16    computes in bf16
    fp16    computes in fp16, the loss scaled (runtime/scaling.py)

A model computes under a precision what `model.to(dtype)` computes: its own casts (norms, softmax, losses in fp32) stay. Parameters
and buffers are kept in fp32 (master weights, Micikevicius et al. 2018) and read as copies; gradients are reduced and kept in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoplan.errors import UsageError

COMPUTE: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MASTER = "float32"


def check_precision(precision: str | None) -> None:
    """Raise UsageError for a precision that is not known."""
    if precision is not None and precision not in COMPUTE:
        raise UsageError(f"precision {precision!r} is not known: take one of {', '.join(COMPUTE)}, or None to compute as the model is.")


@contextmanager
def computing_in(model: nn.Module, precision: str | None) -> Iterator[None]:
    """`model` with floating parameters and buffers in the dtype of `precision`; as it was afterwards."""
    if precision is None:
        yield
        return
    dtype = COMPUTE[precision]
    held = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point() and t.dtype != dtype]
    before = [t.data for t in held]
    try:
        for tensor, data in zip(held, before, strict=True):
            tensor.data = data.to(dtype)
        yield
    finally:
        for tensor, data in zip(held, before, strict=True):
            tensor.data = data


def cast_batch(batch: Any, precision: str | None) -> Any:
    """The batch with its floating tensors in the dtype of `precision`."""
    if precision is None:
        return batch
    dtype = COMPUTE[precision]
    return pytree.tree_map(lambda leaf: leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf, batch)
