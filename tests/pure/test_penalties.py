"""Terms of a loss that depend on weights alone are computed where the weights are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoplan.frontend import capture
from autoplan.lower import lower
from tests.plans import manual_plan

X, Y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 6


class Penalised(nn.Module):
    """Four layers, a first and a last map that share a weight, and a loss with a term of all weights."""

    def __init__(self, penalty: Callable[[nn.Module], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.penalty = penalty

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).relu()
        return F.cross_entropy(x @ self.first.weight.t(), labels) + self.penalty(self)


PENALTIES = [
    lambda model: 1e-2 * sum(p.square().sum() for p in model.parameters()),
    lambda model: 1e-2 * torch.stack([p.abs().sum() for p in model.parameters()]).sum(),
    lambda model: 1e-2 * torch.stack([(layer.weight @ layer.weight.t() - torch.eye(6)).pow(2).mean() for layer in model.layers]).mean().sqrt(),
]


@pytest.mark.parametrize("penalty", PENALTIES, ids=["squares", "absolute", "orthogonal"])
def test_no_stage_keeps_weights_of_another_for_a_penalty(penalty: Callable[[nn.Module], torch.Tensor]) -> None:
    graph = capture(Penalised(penalty), {"x": X, "labels": Y})
    plan = manual_plan(graph, pp=4, num_micro_batches=2)
    kept = {s.fqn: s.stages for program in lower(plan, graph) for stage in program.stages for s in stage.stored if s.kind == "parameter"}
    assert {fqn: stages for fqn, stages in kept.items() if len(stages) > 1} == {"first.weight": (0, 3)}
    assert len({stages for fqn, stages in kept.items() if fqn.endswith("bias")}) > 2, "layers are on several stages"
    sent = {t.value: t.spec.shape for program in lower(plan, graph) for stage in program.stages for t in stage.bodies[0].sends}
    assert set(sent.values()) <= {(4, 6), ()}, "activations and single numbers alone"
