"""What a push to parameter servers takes, by the links between each worker and each server: closed forms by hand, and pair by pair."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.analytic import AnalyticPrices
from costmodel.calibration import load
from costmodel.cluster import Cluster, Device, NodeGroup, Tier
from costmodel.opkey import Collective, RankGroup

N = 2**26
FAST, SLOW = 1e9, 2.5e6
DEVICE = Device("cpu", "cpu", 2**34, 1e10, (("float32", 1e11),))


def tier(name: str, domain: int, shared_by: int, bytes_per_s: float, peers: int = 0) -> Tier:
    return Tier(name, domain, shared_by, 0.0, bytes_per_s, bytes_per_s, peers)


def seconds(cluster: Cluster, kind: str, group: RankGroup | None = None, servers: tuple[int, ...] = (), workers: tuple[int, ...] = ()) -> float:
    return AnalyticPrices(cluster).collective(Collective(kind, N, group or RankGroup(cluster.num_devices), servers, workers))  # type: ignore[arg-type]


def over(bytes_per_s: float, share: float = 1.0, name: str = "wire") -> float:
    """Seconds of `share` N bytes over a port."""
    constants = load().link(name)
    return constants.base_s + share * N / (bytes_per_s * constants.ring_share)


@pytest.fixture
def hosts() -> Cluster:
    """Two hosts joined by a fast link, and one behind a slow one."""
    pair = NodeGroup(DEVICE, 2, 1, (tier("wire", 2, 1, FAST),))
    return Cluster("hosts", (pair, NodeGroup(DEVICE, 1, 1, (tier("wire", 1, 1, FAST),))), tier("wire", 3, 1, SLOW))


@pytest.mark.parametrize(
    ("servers", "workers", "share"),
    [
        ((0,), (), 1),  # the last host pushes all over its link
        ((1,), (), 1),
        ((2,), (), 2),  # both others push to it
        ((), (), 2 / 3),  # it gives two of three thirds, and takes a third of two
        ((0, 1), (), 1),
        ((1, 2), (), 1),  # it takes a half of two
        ((0,), (1, 2), 1),
        ((2,), (0, 1), 2),
        ((1, 2), (0,), 1 / 2),  # half of what one worker gives
        ((0, 1), (2,), 1),
    ],
)
def test_one_slow_link_counts_where_it_lies_between_a_worker_and_a_server(hosts, servers, workers, share):
    assert seconds(hosts, "push", None, servers, workers) == pytest.approx(over(SLOW, share))
    assert seconds(hosts, "pull", None, servers, workers) == pytest.approx(over(SLOW, share))


def test_no_slow_link_between_worker_and_server_costs_nothing(hosts):
    assert seconds(hosts, "push", RankGroup(2)) == pytest.approx(over(FAST, 1 / 2))
    assert seconds(hosts, "push", RankGroup(2), (1,), (0,)) == pytest.approx(over(FAST))
    assert seconds(hosts, "visit", None, (2,)) == pytest.approx(over(SLOW))  # one worker while the others are silent
    assert seconds(hosts, "visit") == pytest.approx(over(SLOW, 2 / 3))


def test_the_ranks_of_a_node_share_its_port():
    cluster = Cluster("nodes", (NodeGroup(DEVICE, 2, 4, (tier("wire", 4, 1, FAST), tier("wire", 8, 4, SLOW))),))
    for servers, workers, share in [((0,), (), 4), ((), (), 2), ((0, 4), (), 2), ((0, 1), (), 4), ((0,), (4, 5), 2), ((0, 1), (4, 5), 2), ((3,), (0, 4), 1)]:
        assert seconds(cluster, "push", None, servers, workers) == pytest.approx(over(SLOW, share))
    assert seconds(cluster, "push", RankGroup(2, 4, 0, 4)) == pytest.approx(over(SLOW, 4 / 2))  # four groups leave by the same port
    assert seconds(cluster, "push", RankGroup(4), (0,)) == pytest.approx(over(FAST, 3))


def test_wires_without_a_switch_carry_a_pair_each():
    cluster = Cluster("wired", (NodeGroup(DEVICE, 1, 4, (tier("wire", 4, 1, FAST, peers=3),)),))
    assert seconds(cluster, "push", None, (0,)) == pytest.approx(over(FAST / 3))
    assert seconds(cluster, "push") == pytest.approx(over(FAST / 3, 1 / 4))


@st.composite
def placements(draw):
    nodes, devices, shared_by = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    world = nodes * devices
    some = st.lists(st.integers(0, world - 1), min_size=1, unique=True).map(lambda found: tuple(sorted(found)))
    return nodes, devices, min(shared_by, devices), draw(some), draw(some)


@given(placements())
def test_the_busiest_port_is_the_one_that_pairs_add_up_on(placement):
    nodes, devices, shared_by, servers, workers = placement
    cluster = Cluster("x", (NodeGroup(DEVICE, nodes, devices, (tier("wire", devices, 1, 4 * SLOW), tier("wire", nodes * devices, shared_by, SLOW))),))
    loads: dict[tuple, float] = defaultdict(float)  # seconds by port and direction
    for i in workers:
        for j in set(servers) - {i}:
            for rank, way in ((i, "out"), (j, "in")):
                loads["device", rank, way] += over(4 * SLOW, 1 / len(servers)) - over(4 * SLOW, 0)
                if i // devices != j // devices:
                    loads["node", rank // shared_by, way] += over(SLOW, 1 / len(servers)) - over(SLOW, 0)
    expected = max(loads.values()) + over(SLOW, 0) if loads else 0.0
    assert seconds(cluster, "push", None, servers, workers) == pytest.approx(expected if nodes * devices > 1 else 0.0)


def test_spread_servers_take_what_an_all_reduce_takes():
    cluster = Cluster.parse("cpu:4x1")
    assert seconds(cluster, "push", None, (1,)) > 3.5 * seconds(cluster, "push")
    assert seconds(cluster, "push") + seconds(cluster, "pull") == pytest.approx(seconds(cluster, "all_reduce"), rel=0.2)
