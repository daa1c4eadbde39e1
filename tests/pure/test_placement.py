"""Placement by hand, planned: pins are obeyed, the rest lies where it costs least, refusals name what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import autoplan
from autoplan.arrange import arrange, arranged, stages_of
from autoplan.graph import Graph
from autoplan.lower import lower
from autoplan.placement import modules_of
from autoplan.plan import Plan
from autoplan.planfile import dumps, loads
from tests.dist.placed_models import factorisation, fan, towers


def _plan(built: tuple, world: int = 2, **constraints: object) -> tuple[Plan, Graph]:
    graph = autoplan.capture(*built)
    return autoplan.find_plan(graph, cluster=f"cpu:1x{world}", constraints=autoplan.Constraints(**constraints)), graph  # type: ignore[arg-type]


def _ranks(plan: Plan, graph: Graph) -> dict[str, set[int]]:
    """Module -> the ranks of its operators."""
    found: dict[str, set[int]] = {}
    for op, stage in zip(graph.ops, stages_of(plan.placement, len(graph.ops)), strict=True):
        found.setdefault(op.module, set()).add(plan.stages[stage].rank)
    return found


def test_pinned_modules_are_on_their_ranks() -> None:
    plan, graph = _plan(factorisation(), placement={"user": 1, "item": 1, "fc": 0})
    ranks = _ranks(plan, graph)
    assert ranks["user"] == ranks["item"] == {1} and ranks["fc"] == {0}
    assert [stage.rank for stage in plan.stages] == [1, 0] and plan.degree("pp") == 2


def test_the_longest_name_wins() -> None:
    plan, graph = _plan(towers(), placement={"": 0, "right": 1, "right.2": 0})
    ranks = _ranks(plan, graph)
    assert ranks["left.0"] == ranks["head"] == ranks["right.2"] == {0} and ranks["right.0"] == {1}


class _Wide(nn.Module):
    """Much data flows from `large` to `free`, little from `free` to `small`."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.free, self.small = nn.Linear(4, 4096), nn.Linear(4096, 2), nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(self.free(self.large(x))).square().mean()


@pytest.mark.parametrize(("large", "small"), [(0, 1), (1, 0)])
def test_a_module_without_a_pin_goes_where_it_costs_least_not_first(large: int, small: int) -> None:
    plan, graph = _plan((_Wide(), {"x": torch.randn(64, 4)}), placement={"large": large, "small": small}, micro_batch_size=64)
    assert _ranks(plan, graph)["free"] == {large}
    assert any("free" in reason and f"rank {large}" in reason for reason in plan.reasons)


def test_ranks_take_turns_where_values_go_back_and_forth() -> None:
    plan, _ = _plan(factorisation(), placement={"user": 0, "fc": 1, "item": 0, "": 0})
    assert [stage.rank for stage in plan.stages] == [0, 1, 0] and plan.schedule == "gpipe" and plan.num_chunks == 2


def test_turns_under_another_schedule_are_refused() -> None:
    with pytest.raises(autoplan.InfeasibleError, match="take turns"):
        _plan(factorisation(), placement={"user": 0, "fc": 1, "item": 0, "": 0}, schedule="1f1b")


def test_an_unknown_module_is_an_error_with_the_nearest_names() -> None:
    with pytest.raises(autoplan.InfeasibleError, match=r"'branches.11'.*nearest: branches\.1"):
        _plan(fan(), placement={"branches.11": 1})


def test_a_rank_without_work_is_refused() -> None:
    with pytest.raises(autoplan.InfeasibleError, match="leaves ranks 1"):
        _plan(factorisation(), placement={"": 0}, pp=2)


@pytest.mark.parametrize(
    ("constraints", "said"),
    [({"placement": {}}, "module paths"), ({"placement": {"fc": -1}}, "module paths"), ({"placement": {"fc": 2}, "pp": 2}, "pp=3 or more")],
)
def test_placements_that_make_no_sense_are_refused(constraints: dict, said: str) -> None:
    with pytest.raises(autoplan.AutoplanError, match=said):
        autoplan.Constraints(**constraints)


def test_a_plan_file_keeps_the_placement() -> None:
    plan, graph = _plan(fan(), placement={"branches.0": 0, "branches.1": 1})
    assert loads(dumps(plan)) == plan
    assert [s.stages for s in lower(loads(dumps(plan)), graph)] == [s.stages for s in lower(plan, arranged(graph, plan))]


def test_nothing_flows_to_an_earlier_stage() -> None:
    graph = autoplan.capture(*towers())
    half = len(graph.ops) // 2
    with pytest.raises(autoplan.AutoplanError, match="earlier stage"):
        arrange(graph, ((0, 1), (half, 0)))


def test_an_arranged_graph_has_the_same_operators() -> None:
    plan, graph = _plan(fan(), placement={"branches.0": 1, "branches.1": 0})
    other = arranged(graph, plan)
    assert sorted(op.name for op in other.ops) == sorted(op.name for op in graph.ops)
    assert other.fingerprint == graph.fingerprint and arranged(other, plan) is other
    assert [b.start for b in other.blocks[1:]] == [b.stop for b in other.blocks[:-1]]
    assert replace(other, ops=graph.ops, blocks=graph.blocks, runs=()) == graph


def test_modules_are_told_by_every_prefix() -> None:
    assert {"", "left", "left.0", "right.2", "head"} <= set(modules_of(autoplan.capture(*towers())))
