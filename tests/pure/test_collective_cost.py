"""Prices of collectives: volumes, tiers, shared ports, the best algorithm."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.calibration import Calibration, DeviceConstants, LinkConstants, StackConstants
from costmodel.cluster import Cluster, Device, NodeGroup, Tier
from costmodel.collective import collective_s
from costmodel.opkey import Collective, CollectiveKind, RankGroup

PLAIN = Calibration({"default": DeviceConstants()}, {"default": LinkConstants(efficiency=1.0, base_s=0.0)}, {"default": StackConstants()}, {})
MB = 10**6


def cluster(num_nodes: int, per_node: int, shared_by: int = 1, latency_s: float = 0.0) -> Cluster:
    """Devices at 100 GB/s inside a node; ports of 10 GB/s out of it, one for every `shared_by` devices."""
    device = Device("x", "cuda", 2**34, 1e12, (("float32", 1e13),))
    tiers = [Tier("inside", per_node, 1, latency_s, 100e9)]
    if num_nodes > 1:
        tiers.append(Tier("outside", num_nodes * per_node, shared_by, latency_s, 10e9))
    return Cluster("x", (NodeGroup(device, num_nodes, per_node, tuple(tiers)),))


def seconds(kind: CollectiveKind, num_bytes: int, group: RankGroup, on: Cluster) -> float:
    return collective_s(Collective(kind, num_bytes, group), on, PLAIN)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_without_latency_the_time_is_ring_volume_over_bandwidth(p: int) -> None:
    on = cluster(1, 8)
    for kind, volume in (
        ("all_reduce", 2 * (p - 1) / p),
        ("all_gather", (p - 1) / p),
        ("reduce_scatter", (p - 1) / p),
        ("all_to_all", (p - 1) / p),
        ("send", 1),
    ):
        assert seconds(kind, 100 * MB, RankGroup(p), on) == pytest.approx(volume * 100e6 / 100e9)


def test_a_small_all_reduce_takes_the_tree_and_a_large_one_the_ring() -> None:
    on = cluster(1, 8, latency_s=1e-5)
    assert seconds("all_reduce", 8, RankGroup(8), on) == pytest.approx(2 * 3 * 1e-5, rel=1e-3)
    assert seconds("all_reduce", 10**10, RankGroup(8), on) == pytest.approx(2 * 7 * 1e-5 + 2 * 7 / 8 * 0.1)


def test_across_nodes_the_port_of_the_node_is_the_bottleneck() -> None:
    one_port, many = cluster(2, 4, shared_by=4), cluster(2, 4, shared_by=1)
    inside = seconds("all_reduce", 100 * MB, RankGroup(4), one_port)
    assert seconds("all_reduce", 100 * MB, RankGroup(8), one_port) > 5 * inside
    assert seconds("all_reduce", 100 * MB, RankGroup(8), many) < seconds("all_reduce", 100 * MB, RankGroup(8), one_port) / 2


def test_strided_twins_share_the_port_of_their_node() -> None:
    on = cluster(2, 4, shared_by=4)
    alone = seconds("all_reduce", 100 * MB, RankGroup(2, 4, 0, 1), on)
    assert seconds("all_reduce", 100 * MB, RankGroup(2, 4, 0, 4), on) == pytest.approx(4 * alone)
    own_nic = cluster(2, 4, shared_by=1)
    assert seconds("all_reduce", 100 * MB, RankGroup(2, 4, 0, 4), own_nic) == pytest.approx(alone)


def test_sends_between_nodes_take_the_slow_link() -> None:
    on = cluster(2, 4, shared_by=4)
    assert seconds("send", 10 * MB, RankGroup(2, 1), on) == pytest.approx(1e-4)
    assert seconds("send", 10 * MB, RankGroup(2, 4), on) == pytest.approx(1e-3)
    assert seconds("send", 10 * MB, RankGroup(2, 4, 0, 4), on) == pytest.approx(4e-3)


def test_a_measured_bandwidth_is_used_instead_of_the_nominal_one() -> None:
    nominal = cluster(1, 4)
    tier = nominal.groups[0].tiers[0]
    measured = Cluster("m", (NodeGroup(nominal.device(), 1, 4, (Tier(tier.name, 4, 1, 0.0, tier.bandwidth_bytes_per_s, 50e9),)),))
    assert seconds("all_gather", 100 * MB, RankGroup(4), measured) == pytest.approx(2 * seconds("all_gather", 100 * MB, RankGroup(4), nominal))


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]),
    num_bytes=st.integers(0, 10**9),
    size=st.sampled_from([1, 2, 4, 8, 16]),
    stride=st.sampled_from([1, 2, 4]),
    preset=st.sampled_from(["h100-sxm-80gb:16x8", "v100-sxm2-32gb:8x8", "cpu:4x16", "gb200-186gb:32x4"]),
)
def test_prices_are_finite_and_grow_with_the_message(kind: CollectiveKind, num_bytes: int, size: int, stride: int, preset: str) -> None:
    on, group = Cluster.parse(preset), RankGroup(size, stride, 0, stride)
    few, more = seconds(kind, num_bytes, group, on), seconds(kind, 2 * num_bytes, group, on)
    assert 0 <= few <= more < 1e4


def test_one_rank_talks_to_nobody() -> None:
    assert seconds("all_reduce", MB, RankGroup(1), cluster(1, 4)) == 0


def hosts(kind: str, *sizes: int) -> Cluster:
    """Hosts of one device, `sizes` of them on a switch of 100 GB/s each, the switches joined by links of 10 GB/s."""
    device = Device("x", kind, 2**34, 1e12, (("float32", 1e13),))
    groups = tuple(NodeGroup(device, n, 1, (Tier("switch", n, 1, 0.0, 100e9),)) for n in sizes)
    return Cluster("x", groups, fabric=Tier("between", sum(sizes), 1, 0.0, 10e9))


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (3, 1), (1, 1, 2)])
def test_where_switches_hold_unequal_numbers_the_lone_port_decides(sizes: tuple[int, ...]) -> None:
    p = sum(sizes)
    ring = seconds("all_reduce", 60 * MB, RankGroup(p), hosts("cpu", *sizes))
    assert ring == pytest.approx(2 * (p - 1) / p * 60 * MB / 10e9)
    assert seconds("all_gather", 60 * MB, RankGroup(p), hosts("cuda", *sizes)) <= ring


def test_pairs_of_hosts_leave_by_two_ports() -> None:
    assert seconds("all_to_all", 60 * MB, RankGroup(4), hosts("cuda", 2, 2)) == pytest.approx(2 * 2 / 4 * 60 * MB / 20e9)


def test_nodes_of_equal_groups_are_different_nodes_and_parts_hold_their_ranks() -> None:
    on = hosts("cpu", 2, 2)
    assert [on.node_of(rank) for rank in range(4)] == [0, 1, 2, 3]
    assert on.parts(RankGroup(2, stride=3)) == (RankGroup(1, 3, 0), RankGroup(1, 3, 3))
    assert on.parts(RankGroup(2, start=2)) == (RankGroup(2, start=2),)
