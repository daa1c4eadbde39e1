"""Shapes of batches: their rows, and what of them a capture depends on."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoplan.api import Batch
from autoplan.errors import UsageError


def num_rows(batch: Batch) -> int:
    """Rows of a global batch: the common first dimension of its tensors. Raises UsageError where they differ."""
    sizes = {str(path): leaf.shape[0] for path, leaf in pytree.tree_flatten_with_path(batch)[0] if isinstance(leaf, torch.Tensor) and leaf.dim() > 0}
    rows = max(sizes.values(), default=0)
    wrong = {path: size for path, size in sizes.items() if size not in (rows, 1)}
    if rows == 0 or wrong:
        raise UsageError(f"the tensors of a batch must have equally many rows (dimension 0), found {sizes}: cut them to the same number.")
    return rows


def shape_key(batch: Batch, rows: int) -> str:
    """Everything about a global batch of `rows` rows that its capture depends on; `batch` may be a share of it."""
    leaves, spec = pytree.tree_flatten(batch)
    parts = [f"{tuple(x.shape[1:])}{x.dtype}{x.shape[0] == 1 if x.dim() else ''}" if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
    return f"{rows}|{spec}|{'|'.join(parts)}"


def with_rows(batch: Batch, rows: int) -> Batch:
    """An example of a batch of `rows` rows, from one that may have fewer: its rows repeated."""
    own = num_rows(batch)
    if own == rows:
        return batch

    def grown(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == own:
            return torch.cat([leaf] * -(-rows // own))[:rows]
        return leaf

    return pytree.tree_map(grown, batch)
