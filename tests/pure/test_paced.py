"""Paced devices: their files, what they take, and what a planner learns of them."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan import Constraints, capture, find_plan
from autoplan.clusterprices import prices_of
from autoplan.models import MLP
from autoplan.pacing import PricedLinks
from benchmarks.paced.drawn import drawn
from costmodel.cluster import Cluster
from costmodel.forms import ClusterFileError
from costmodel.opkey import Collective, OpKey, RankGroup
from costmodel.paced import PacedPrices
from runtime.code import Code
from runtime.mesh import build_mesh
from runtime.paceclock import PacedClock
from runtime.paced import Pace, paced
from runtime.program import Program

LAB: dict[str, Any] = {
    "name": "lab",
    "paced": True,
    "nodes": 2,
    "devices_per_node": 4,
    "memory_gib": 0.5,
    "ops": [
        {"op": "aten.linear*", "base_ms": 2, "gflops_per_s": 0.001, "backward_weight": 2, "multiple": 8, "odd_factor": 1.5},
        {"op": "*", "base_ms": 1, "mb_per_s": 1},
    ],
    "links": [{"name": "board", "domain": 4, "latency_ms": 1, "mb_per_s": 2}, {"name": "wire", "latency_ms": 4, "mb_per_s": 0.5}],
    "slowdowns": {5: 1.25},
    "optimizer": {"base_ms": 3, "ns_per_element": 100},
}


def cluster(folder: Path, **changes: Any) -> Cluster:
    file = folder / "lab.yaml"
    file.write_text(yaml.safe_dump(LAB | changes))
    return Cluster.parse(file)


def linear(m: int, n: int, k: int, *, needs_input: bool = True) -> OpKey:
    shapes = (((m, k), "float32"), ((n, k), "float32")), (((m, n), "float32"),)
    return OpKey("aten.linear.default", *shapes, "", (needs_input, True), 2 * m * n * k)


def test_an_operator_takes_what_the_first_pattern_that_matches_says(tmp_path: Path) -> None:
    devices = cluster(tmp_path).paced
    assert devices is not None
    time = devices.op(linear(8, 16, 8))
    assert time.forward_s == pytest.approx(0.002 + 2 * 8 * 16 * 8 / 1e6)
    assert (time.backward_input_s, time.backward_weight_s) == pytest.approx((time.forward_s, 2 * time.forward_s))
    assert devices.op(linear(8, 16, 8, needs_input=False)).backward_input_s == 0
    add = OpKey("aten.add.Tensor", (((10,), "float32"),) * 2, (((10,), "float32"),), "", (False, False), 0)
    assert devices.op(add).forward_s == pytest.approx(0.001 + 120 / 1e6) and devices.op(add).backward_s == 0
    view = OpKey("aten.view.default", (((10,), "float32"),), (((10,), "float32"),), "", (True,), 0)
    assert devices.op(view).forward_s == devices.op(view).backward_s == 0


def test_odd_shapes_and_stragglers_take_longer(tmp_path: Path) -> None:
    devices = cluster(tmp_path).paced
    assert devices is not None
    even, odd = devices.op(linear(8, 16, 8)).forward_s, devices.op(linear(8, 15, 8)).forward_s
    assert odd == pytest.approx(1.5 * (0.002 + 2 * 8 * 15 * 8 / 1e6)) and odd > even
    assert devices.op(linear(8, 16, 8), 5).forward_s == pytest.approx(1.25 * even)
    assert devices.optimizer_s(1000, 5) == pytest.approx(1.25 * devices.optimizer_s(1000))


@pytest.mark.parametrize(
    ("kind", "group", "seconds"),
    [
        ("all_reduce", RankGroup(4, 1, 4), 6 * 0.001 + 1.5 * 4000 / 2e6),
        ("all_reduce", RankGroup(2, 4), 2 * 0.004 + 4000 / 0.5e6),
        ("all_gather", RankGroup(4, 1), 3 * 0.001 + 0.75 * 4000 / 2e6),
        ("send", RankGroup(2, 1, 2), 0.001 + 4000 / 2e6),
        ("send", RankGroup(2, 1, 3), 0.004 + 4000 / 0.5e6),
        ("push", RankGroup(4, 1), 0.001 + 0.75 * 4000 / 2e6),
    ],
)
def test_a_group_talks_over_the_link_that_joins_it(tmp_path: Path, kind: Any, group: RankGroup, seconds: float) -> None:
    devices = cluster(tmp_path).paced
    assert devices is not None
    assert devices.collective_s(Collective(kind, 4000, group)) == pytest.approx(seconds)


@pytest.mark.parametrize(("kind", "num_alike"), [("all_reduce", 4), ("send", 4), ("all_gather", 1)])
def test_groups_alike_share_the_rate_of_a_shared_link(tmp_path: Path, kind: Any, num_alike: int) -> None:
    board, wire = LAB["links"]
    found = cluster(tmp_path, links=[board, wire | {"shared": True}])
    assert found.paced is not None
    across, alone = RankGroup(2, 4, 0, num_alike), RankGroup(2, 4, 0, 1)
    once, fixed = found.paced.collective_s(Collective(kind, 4000, alone)), found.paced.collective_s(Collective(kind, 0, alone))
    assert found.paced.collective_s(Collective(kind, 4000, across)) == pytest.approx(fixed + num_alike * (once - fixed))
    inside = RankGroup(2, 1, 0, num_alike)
    assert found.paced.collective_s(Collective(kind, 4000, inside)) == found.paced.collective_s(Collective(kind, 4000, replace(inside, concurrent=1)))
    told = prices_of(found, tmp_path / "profile.sqlite")
    assert told.collective(Collective(kind, 54_321, across)) == pytest.approx(found.paced.collective_s(Collective(kind, 54_321, across)))


def test_a_device_makes_up_for_a_late_host_within_a_step_but_not_between_steps() -> None:
    clock = PacedClock(PricedLinks(PacedPrices(drawn(8, 0)), ()), slack_s=0.5)
    clock.reset()
    began_s = clock.free_s
    time.sleep(0.01)
    clock.rest(0.02)
    assert clock.free_s == pytest.approx(began_s + 0.02, abs=1e-4)
    time.sleep(0.03)
    clock.begin()
    assert clock.free_s >= began_s + 0.05


@settings(deadline=None)
@given(st.integers(0, 1000), st.sampled_from([8, 16, 32]))
def test_drawn_devices_are_legal_and_the_same_for_the_same_seed(seed: int, num_ranks: int) -> None:
    devices = drawn(num_ranks, seed)
    assert devices == drawn(num_ranks, seed) and devices.num_devices == num_ranks
    assert len(devices.slowdowns) == 1 and all(cost.odd_factor > 1 for cost in devices.ops[:-1])


def test_a_planner_learns_by_measuring_what_they_take(tmp_path: Path) -> None:
    found = cluster(tmp_path)
    assert found.paced is not None
    told, true = prices_of(found, tmp_path / "profile.sqlite"), PacedPrices(found.paced)
    assert told.source == "measured" and told.memory_limit_bytes() <= found.paced.memory_bytes
    for rank in (0, 5):
        for key in (linear(8, 16, 8), linear(7, 16, 8), linear(8, 64, 32, needs_input=False)):
            a, b = told.op(key, rank), true.op(key, rank)
            assert (a.forward_s, a.backward_input_s, a.backward_weight_s) == pytest.approx((b.forward_s, b.backward_input_s, b.backward_weight_s))
        assert told.optimizer_s(123_456, "adamw", 16.0, rank) == pytest.approx(true.optimizer_s(123_456, "adamw", 16.0, rank))
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"):
        asked = Collective(kind, 54_321, RankGroup(2, 4, 1, 4))  # type: ignore[arg-type]
        assert told.collective(asked) == pytest.approx(true.collective(asked))


def test_what_was_measured_is_kept_for_these_devices_alone(tmp_path: Path) -> None:
    kept, key = tmp_path / "profile.sqlite", linear(8, 16, 8)
    first = prices_of(cluster(tmp_path), kept).op(key)
    assert prices_of(cluster(tmp_path), kept).op(key) == first
    slower = [{"op": "*", "base_ms": 50}]
    assert prices_of(cluster(tmp_path, ops=slower), kept).op(key).forward_s == pytest.approx(0.05)
    assert cluster(tmp_path, ops=slower).fingerprint() != cluster(tmp_path).fingerprint()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ops": LAB["ops"][:1]}, r"ops\.0\.op: the last pattern has to be '\*'"),
        ({"ops": [{"op": "*", "base_ms": -1}]}, r"ops\.0\.base_ms: .* found -1"),
        ({"ops": [{"op": "*", "base_msec": 1}]}, r"unknown key; nearest valid key: base_ms"),
        ({"links": [{"name": "a", "latency_ms": 1, "mb_per_s": 1}] * 2}, r"links\.0\.domain: a link that is not the last one"),
        ({"links": [{"name": "a", "domain": 4, "latency_ms": 1, "mb_per_s": 1}]}, r"it joins 4 of 8 ranks"),
        ({"slowdowns": {8: 2.0}}, r"slowdowns\.8: there are 8 ranks, 0 to 7"),
        ({"paced": False}, r"paced: "),
        ({"memory_gib": math.inf}, r"memory_gib: "),
    ],
)
def test_a_mistake_is_named_with_file_and_key(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ClusterFileError, match=words) as caught:
        cluster(tmp_path, **changes)
    assert "lab.yaml" in str(caught.value)


def test_with_a_straggler_no_fixed_mesh_is_better_than_the_free_plan(tmp_path: Path) -> None:
    found = cluster(tmp_path, nodes=1, links=LAB["links"][1:], slowdowns={2: 1.5}, ops=[{"op": "*", "base_ms": 1, "gflops_per_s": 0.01}])
    batch = {"x": torch.zeros(8, 16), "labels": torch.zeros(8, dtype=torch.long)}
    graph, prices = capture(MLP((16, 24, 32, 24, 32, 8)), batch), prices_of(found, tmp_path / "profile.sqlite")
    free = find_plan(graph, None, found, optimizer="sgd", prices=prices)
    for fixed in (dict(pp=4), dict(pp=2, dp=2), dict(dp=4)):
        plan = find_plan(graph, None, found, Constraints(**fixed), optimizer="sgd", prices=prices)
        assert free.forecast.step_time_s <= plan.forecast.step_time_s * 1.03, fixed


@pytest.mark.parametrize("changes", [{"sync": "ps"}, {"delay": 1}, {"axes": (("pp", 1), ("dp", 1), ("cp", 2))}])
def test_what_has_no_pace_is_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    devices, program = cluster(tmp_path).paced, Program((("pp", 1), ("dp", 2)), 1, (0,), (), "gpipe", ((), ()), None, (), (), 0, None, 8)
    assert devices is not None
    code = Code(replace(program, **changes), {}, {}, {}, None, {}, ())
    with pytest.raises(ValueError, match="plan with"):
        paced(code, Pace({}, PricedLinks(PacedPrices(devices), program.axes)), build_mesh((("pp", 1),)))
