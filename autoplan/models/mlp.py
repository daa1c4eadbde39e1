"""A plain multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F


class MLP(nn.Module):
    """Linear layers with GELU between them: (rows, widths[0]) -> (rows, widths[-1]).

    With `labels` (rows,) of int64 the result is the mean cross entropy, a scalar.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x if i == 0 else F.gelu(x))
        return x if labels is None else F.cross_entropy(x, labels)
