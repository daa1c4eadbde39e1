"""After the warm-up of 1-bit Adam no element runs away, whatever its variance was when it was frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autoplan
from autoplan.onebitadam import one_bit_adam

RATE = 0.01


def _trained(cls: type[torch.optim.Optimizer] = torch.optim.Adam, **options: Any) -> tuple[torch.nn.Parameter, list[torch.Tensor]]:
    """A parameter after 60 updates of warm-up, and what the 20 updates after it added. Its gradients are signs, but in the warm-up the
    first element has one only once and the second none."""
    parameter = torch.nn.Parameter(torch.zeros(8, dtype=torch.float64))
    optimizer = one_bit_adam(cls)([parameter], lr=RATE, betas=(0.9, 0.9), warmup_steps=60, **options)
    generator, changes = torch.Generator().manual_seed(0), []
    for step in range(80):
        grad = torch.where(torch.rand(8, generator=generator) < 0.5, -1.0, 1.0).double()
        if step < 60:
            grad[0], grad[1] = float(step == 0), 0.0
        parameter.grad, before = grad, parameter.detach().clone()
        optimizer.step()
        if step >= 60:
            changes.append(parameter.detach() - before)
    return parameter, changes


def _largest(changes: list[torch.Tensor]) -> float:
    return max(float(change[0].abs()) for change in changes)


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
def test_a_rarely_updated_element_stays_within_the_bound_of_the_floor(cls: type[torch.optim.Optimizer]):
    bare, default, high = (_trained(cls, variance_floor=floor)[1] for floor in (0.0, 0.01, 0.25))
    assert _largest(bare) > 0.1 > _largest(default)
    for floor, changes in ((0.01, default), (0.25, high)):
        assert _largest(changes) <= RATE / (floor * 6 / 8) ** 0.5  # six of eight variances are 1
    assert all(torch.allclose(a[2:], b[2:], rtol=1e-3) for a, b in zip(bare, default, strict=True))


def test_an_element_without_any_gradient_in_the_warm_up_stays_as_it_is():
    parameter, changes = _trained()
    assert float(parameter[1].detach()) == 0.0 and all(float(change[1]) == 0.0 for change in changes)
    assert bool(torch.isfinite(parameter).all())


def test_a_floor_that_is_no_share_is_refused():
    with pytest.raises(autoplan.UsageError, match=r"variance_floor=1\.5"):
        one_bit_adam(torch.optim.Adam)([torch.nn.Parameter(torch.zeros(1))], variance_floor=1.5)
