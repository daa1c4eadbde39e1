"""Unequal devices: rows and stages by speed, exact optima, cuts away from slow links, forecasts on each rank's own device."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autoplan
from autoplan.graph import Graph
from autoplan.lower import lower
from autoplan.models import MLP
from autoplan.plan import Plan
from autoplan.planfile import dumps, loads
from autoplan.shares import best_shares, row_shares, scaled_shares
from autoplan.simulate import forecast
from costmodel.cluster import Cluster
from costmodel.opkey import Collective, OpKey, OpTime
from tests.plans import manual_plan


@dataclass(frozen=True)
class Speeds:
    """An operator takes its FLOPs over the speed of its device; links and optimizer cost nothing, unless `link_s` a byte is given."""

    speeds: tuple[float, ...]
    limits: tuple[int, ...] = ()
    slow_link: tuple[int, float] = (0, 0.0)  # (rank, seconds a byte) of transfers to this rank or beyond
    source: str = "analytic"

    def op(self, key: OpKey, device: int = 0) -> OpTime:
        seconds = key.flops / self.speeds[device]
        return OpTime(seconds, seconds, seconds)

    def collective(self, collective: Collective) -> float:
        group = collective.group
        beyond = group.start < self.slow_link[0] <= group.start + (group.size - 1) * group.stride
        return collective.num_bytes * self.slow_link[1] if beyond else 0.0

    def optimizer_s(self, num_elements: int, optimizer: str, num_bytes_per_element: float, device: int = 0) -> float:
        return 0.0

    def memory_limit_bytes(self, device: int = 0) -> int:
        return self.limits[device] if self.limits else 1 << 40

    def peak_flops_per_s(self, dtype: str, device: int = 0) -> float:
        return self.speeds[device]

    def assumptions(self) -> tuple[str, ...]:
        return ()


@pytest.fixture(scope="module")
def graph() -> Graph:
    return autoplan.capture(MLP((32, 64, 64, 64, 64, 8)), {"x": torch.randn(8, 32), "labels": torch.randint(0, 8, (8,))})


def _find(graph: Graph, prices: Speeds, **constraints: object) -> Plan:
    cluster = Cluster.parse(f"cpu:1x{len(prices.speeds)}")
    return autoplan.find_plan(graph, cluster=cluster, prices=prices, optimizer="sgd", constraints=autoplan.Constraints(**constraints))  # type: ignore[arg-type]


def test_speeds_of_three_and_one_deal_six_and_two_rows_in_half_the_time(graph: Graph) -> None:
    prices = Speeds((3e6, 1e6))
    plan = _find(graph, prices, dp=2, zero=0, micro_batch_size=4)
    even = replace(plan, shares=())
    even_s = forecast(lower(even, graph), even, graph, prices, overlap=False).step_time_s
    assert plan.shares == (6, 2)
    assert plan.forecast.step_time_s == pytest.approx(even_s / 2)


def test_the_golden_times() -> None:
    seconds = [lambda rows: rows / 3, lambda rows: rows / 1]
    shares = best_shares(seconds, 8)
    assert shares == (6, 2)
    assert max(t(r) for t, r in zip(seconds, shares, strict=True)) == 2 and max(t(4) for t in seconds) == 4


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=4), st.integers(1, 12), st.integers(1, 2), st.data())
def test_shares_are_the_integer_optimum(speeds: list[tuple[int, int]], num_rows: int, least: int, data: st.DataObject) -> None:
    """Against brute force, with a fixed time of each rank beside its rate, and with caps."""
    caps = data.draw(st.lists(st.integers(1, 12), min_size=len(speeds), max_size=len(speeds)))
    seconds = [lambda rows, speed=speed, base=base: base + rows / speed for speed, base in speeds]
    possible = [shares for shares in itertools.product(*(range(least, min(cap, num_rows) + 1) for cap in caps)) if sum(shares) == num_rows]
    slowest = lambda shares: max(t(r) for t, r in zip(seconds, shares, strict=True))  # noqa: E731
    if not possible:
        with pytest.raises(autoplan.InfeasibleError):
            best_shares(seconds, num_rows, least=least, caps=caps)
        return
    found = best_shares(seconds, num_rows, least=least, caps=caps)
    assert found in possible and slowest(found) == pytest.approx(min(map(slowest, possible)))


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(6, 60))
def test_shares_of_another_batch_keep_the_proportions(shares: list[int], num_rows: int) -> None:
    found = scaled_shares(shares, num_rows)
    assert sum(found) == num_rows and min(found) >= 1
    assert scaled_shares(shares, sum(shares)) == tuple(shares)


@pytest.mark.parametrize("speeds", [(3e6, 1e6), (2e6, 1e6), (5e6, 4e6), (1e6, 7e6)])
def test_the_plan_is_as_good_as_every_way_to_deal_rows(graph: Graph, speeds: tuple[float, ...]) -> None:
    prices = Speeds(speeds)
    plan = _find(graph, prices, dp=2, zero=0, micro_batch_size=4)
    every = [replace(plan, shares=(r, 8 - r), micro_batch_size=max(r, 8 - r)) for r in range(1, 8)]
    assert plan.forecast.step_time_s <= min(forecast(lower(p, graph), p, graph, prices, overlap=False).step_time_s for p in every) * (1 + 1e-9)


@pytest.mark.parametrize("speeds", [(3e6, 1e6), (1e6, 3e6)])
def test_the_faster_stage_holds_more_blocks(graph: Graph, speeds: tuple[float, ...]) -> None:
    plan = _find(graph, Speeds(speeds), pp=2, micro_batch_size=2)
    work = [sum(op.flops for b in graph.blocks[s.start : s.stop] for op in graph.ops[b.start : b.stop]) for s in plan.stages]
    fast = speeds.index(max(speeds))
    assert work[fast] > 1.5 * work[1 - fast]


class _Waist(nn.Module):
    """Wide values everywhere but at one place, which is not the middle of the work."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [16, 96, 96, 4, 96, 96, 96, 96]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


def test_cuts_stay_away_from_fat_values_on_a_slow_link() -> None:
    waist = autoplan.capture(_Waist(), {"x": torch.randn(8, 16)})
    free = _find(waist, Speeds((1.1e6, 1e6)), pp=2, micro_batch_size=8)
    slow = _find(waist, Speeds((1.1e6, 1e6), slow_link=(1, 1e-3)), pp=2, micro_batch_size=8)
    bytes_of = lambda plan: max(use.num_bytes for use in plan.collectives if use.kind == "send")  # noqa: E731
    assert bytes_of(slow) == 8 * 4 * 4 < bytes_of(free)


def test_each_rank_is_priced_on_its_own_device_and_the_slowest_ends_the_step(graph: Graph) -> None:
    plan = manual_plan(graph, dp=2)
    alike = forecast(lower(plan, graph), plan, graph, Speeds((2e6, 2e6)), overlap=False)
    mixed = forecast(lower(plan, graph), plan, graph, Speeds((2e6, 1e6)), overlap=False)
    assert mixed.step_time_s == pytest.approx(2 * alike.step_time_s)
    assert {event.rank for event in mixed.events} == {0, 1}
    piped = manual_plan(graph, pp=2, num_micro_batches=4)
    one, other = (forecast(lower(piped, graph), piped, graph, Speeds(speeds), overlap=False) for speeds in ((2e6, 2e6), (2e6, 1e6)))
    assert other.stages[0].forward_s == pytest.approx(one.stages[0].forward_s) and other.stages[1].forward_s == pytest.approx(2 * one.stages[1].forward_s)


def _step_s(graph: Graph, speeds: tuple[float, ...], shares: tuple[int, ...] = (), **asked: object) -> float:
    plan = replace(manual_plan(graph, **asked), shares=shares)  # type: ignore[arg-type]
    return forecast(lower(plan, graph), plan, graph, Speeds(speeds), overlap=False).step_time_s


def test_under_zero_1_replicas_wait_for_each_other_on_every_stage(graph: Graph) -> None:
    """One replica is slow on its first stage, the other on its second: both meet in each of them, as if all were slow."""
    crossed, all_slow = (1e6, 3e6, 3e6, 1e6), (1e6,) * 4
    apart, together = (_step_s(graph, crossed, pp=2, dp=2, zero=zero) for zero in (0, 1))
    assert together == pytest.approx(_step_s(graph, all_slow, pp=2, dp=2, zero=1))
    assert apart < 0.9 * together


def test_micro_batches_of_unlike_size_take_times_of_their_own() -> None:
    """Two equal layers on two stages, a seconds a row forward; backward 2 a, of the first a, as its input needs none. Of 3 and 2 rows the larger fills the
    pipeline, forward (3 + 3 + 2) a; backward (6 + 4 + 2) a. Of 2 and 2: (2 + 2 + 2) a and (4 + 4 + 2) a."""
    graph = autoplan.capture(MLP((32, 32, 32)), {"x": torch.randn(8, 32), "labels": torch.randint(0, 8, (8,))})
    unlike, alike = (_step_s(graph, (1e6,) * 4, shares, pp=2, dp=2, num_micro_batches=2) for shares in ((5, 3), (4, 4)))
    assert unlike / alike == pytest.approx(20 / 16)


def test_a_small_device_gets_no_more_rows_than_it_holds(graph: Graph) -> None:
    roomy = _find(graph, Speeds((1e6, 3e6)), dp=2, zero=0, micro_batch_size=4, recompute="none")
    limit = _memory(graph, roomy, 5)
    tight = _find(graph, Speeds((1e6, 3e6), limits=(1 << 40, limit)), dp=2, zero=0, micro_batch_size=4, recompute="none")
    assert roomy.shares == (2, 6) and tight.shares == (3, 5)
    assert _memory(graph, roomy, 6) > limit
    with pytest.raises(autoplan.InfeasibleError, match="device"):
        _find(graph, Speeds((1e6, 3e6), limits=(1 << 40, 1 << 10)), dp=2)


def _memory(graph: Graph, plan: Plan, rows: int) -> int:
    alone = replace(plan, shares=(rows, 8 - rows) if rows != 4 else (), micro_batch_size=max(rows, 8 - rows))
    told = forecast(lower(alone, graph), alone, graph, Speeds((1e6, 3e6), limits=(1, 1 << 40)), overlap=False)
    return told.stages[0].memory.total


def test_model_parallelism_lies_inside_a_group_and_data_parallelism_across(graph: Graph) -> None:
    """Transfers over the link between the groups cost so much that only gradients may cross it."""
    prices = Speeds((3e6, 3e6, 1e6, 1e6), slow_link=(2, 1e-7))
    plan = _find(graph, prices, dp=2, pp=2, zero=0, micro_batch_size=2)
    assert plan.axes[0] == ("dp", 2) and plan.shares[0] > plan.shares[1]


def test_a_plan_file_keeps_shares_and_order(graph: Graph) -> None:
    plan = _find(graph, Speeds((3e6, 3e6, 1e6, 1e6), slow_link=(2, 1e-7)), dp=2, pp=2, zero=0, micro_batch_size=2)
    assert loads(dumps(plan)) == plan
    assert f"rows {', '.join(map(str, plan.shares))}" in plan.explain()


def test_the_gap_is_below_every_plan(graph: Graph) -> None:
    prices = Speeds((3e6, 1e6))
    free = _find(graph, prices)
    bound_s = free.forecast.step_time_s * (1 - free.gap)
    for constraints in (dict(dp=2), dict(pp=2), dict(tp=2)):
        assert bound_s <= _find(graph, prices, **constraints).forecast.step_time_s


def test_a_cluster_file_with_two_kinds_of_devices(tmp_path: Path, graph: Graph) -> None:
    file = tmp_path / "mixed.yaml"
    kind = "{{name: {0}, kind: cpu, memory_gib: 8, memory_gb_per_s: {1}, peak_tflops: {{fp32: {2}}}}}"
    tiers = "[{name: wire, latency_us: 1, bandwidth_gb_per_s: 10}]"
    groups = "".join(
        f"  - {{device: {kind.format(*device)}, nodes: 1, devices_per_node: 1, tiers: {tiers}}}\n" for device in (("fast", 300, 0.003), ("slow", 100, 0.001))
    )
    file.write_text(f"name: mixed\ngroups:\n{groups}fabric: {{name: wire, latency_us: 1, bandwidth_gb_per_s: 10}}\n")
    plan = autoplan.find_plan(graph, cluster=file, constraints=autoplan.Constraints(dp=2, zero=0))
    assert plan.shares and plan.shares[0] > plan.shares[1] and sum(plan.shares) == 8
    assert row_shares(8, 2) == (4, 4)
