"""The counter of FLOPs that plans are compared with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.dist.parity import count_flops


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_both_gradients_of_a_grouped_convolution_take_as_many_flops_as_its_forward_pass(groups: int) -> None:
    layer, rows = nn.Conv1d(8, 8, 3, groups=groups, bias=False), torch.randn(2, 8, 10, requires_grad=True)
    with count_flops() as counter:
        layer(rows).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * (2 * 8 * 8) * (8 // groups) * 3
