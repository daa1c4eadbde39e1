"""Rules of custom operators are used in a capture as far as they prove; the rest is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoplan
from autoplan.frontend import capture
from autoplan.rules.registry import DEFAULT


@torch.library.custom_op("user_rules_test::gate", mutates_args=())
def gate(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1) * scale


@gate.register_fake
def _(x, scale):
    return torch.empty_like(x)


def _backward(ctx, dy):
    x, scale = ctx.saved_tensors
    weights = torch.softmax(x, -1)
    dw = dy * scale
    return weights * (dw - (dw * weights).sum(-1, keepdim=True)), (dy * weights).flatten(0, -2).sum(0)


gate.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gate(gate(self.up(x), self.scale), self.scale).square().sum()


@pytest.fixture
def rule():
    autoplan.register_rule("user_rules_test::gate", "b s h, h -> b s h")
    yield
    DEFAULT.texts.pop("user_rules_test.gate")


def test_a_capture_keeps_what_proves_of_a_users_rule_and_warns_of_the_rest(rule):
    graph = capture(Gated(), {"x": torch.randn(8, 4, 6)})
    ops = [op for op in graph.ops if op.instr.target.startswith("user_rules_test")]
    assert len(ops) == 2 and all(op.proved and [loop.label for loop in op.loops] == ["b", "s"] for op in ops)
    assert [warning for warning in graph.warnings if "'h'" in warning and "user_rules_test.gate" in warning]
