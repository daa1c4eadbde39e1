"""FLOPs of backward passes are those that torch's counter sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autoplan.flops import backward_flops, flops
from runtime.call import spec_of
from tests.dist.parity import count_flops


def leaf(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.ones(shape, requires_grad=grad)


aten = torch.ops.aten
CASES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], tuple[Any, ...]]]] = {
    "aten.linear.default": (aten.linear.default, lambda: (leaf(3, 4), leaf(5, 4), leaf(5))),
    "aten.linear.default frozen": (aten.linear.default, lambda: (leaf(3, 4), leaf(5, 4, grad=False))),
    "aten.linear.default first": (aten.linear.default, lambda: (leaf(3, 4, grad=False), leaf(5, 4))),
    "aten.addmm.default": (aten.addmm.default, lambda: (leaf(5), leaf(3, 4), leaf(4, 5))),
    "aten.conv2d.default": (aten.conv2d.default, lambda: (leaf(2, 4, 9, 9, grad=False), leaf(6, 4, 3, 3))),
    "aten.scaled_dot_product_attention.default": (aten.scaled_dot_product_attention.default, lambda: (leaf(2, 3, 5, 4), leaf(2, 3, 7, 4), leaf(2, 3, 7, 4))),
    "aten.einsum.default": (aten.einsum.default, lambda: ("bqhd,bkhd->bhqk", [leaf(2, 5, 3, 4), leaf(2, 7, 3, 4)])),
    "aten.einsum.default frozen": (aten.einsum.default, lambda: ("bi,oi->bo", [leaf(3, 4), leaf(5, 4, grad=False)])),
}


@pytest.mark.parametrize("name", list(CASES))
def test_both_passes_are_counted(name: str) -> None:
    torch.set_num_threads(1)
    call, make = CASES[name]
    target, args = name.split()[0], make()
    operands = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
    with count_flops() as counter:
        out = call(*args)
        forward = counter.get_total_flops()
        out.sum().backward()
    found = flops(target, [spec_of(t) for t in operands], [spec_of(out)], args)
    assert found == forward > 0
    assert backward_flops(target, found, [t.requires_grad for t in operands]) == counter.get_total_flops() - forward
