"""Seconds of a push to parameter servers, or of a pull from them: by the port that has most to carry.

Of p ranks, w are workers and s are servers (they may be the same). Each worker gives n bytes, n / s to each server; what a rank has for itself
stays. Below a tier lie domains d in which w_d ranks work and s_d serve, and every rank of d carries through its port of that tier

    out    n (s - s_d) / s   where it works          in    n (w - w_d) / s   where it serves

A port carries what the ranks at it have, twins counted; both directions at once. So

    push = base + latency + max over tiers and ports of max(out, in) / rate              rate = port_bytes_per_s * efficiency * ring_share

The tiers of a rank are those of its own node group, up to the first that joins all ranks, and the fabric where they lie in several groups. Where
devices are wired to each other without a switch, every pair's n / s take the wire between the two. A pull is a push the other way: the same seconds.
A visit is the push of one worker while the others are silent, of the one that takes longest: in = n / s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from costmodel.calibration import Calibration
from costmodel.cluster import Cluster, Tier
from costmodel.opkey import Collective, RankGroup


@dataclass(frozen=True, slots=True)
class Roles:
    """Places of a group that serve and that work, and how many of the workers push at once."""

    servers: frozenset[int]
    workers: frozenset[int]
    is_visit: bool

    @staticmethod
    def of(collective: Collective) -> Roles:
        every = range(collective.group.size)
        return Roles(frozenset(collective.servers or every), frozenset(collective.workers or every), collective.kind == "visit")

    def given(self, place: int, near_servers: int) -> float:
        """What a rank gives to servers other than `near_servers`, as a share of n."""
        return (len(self.servers) - near_servers) / len(self.servers) if place in self.workers else 0.0

    def taken(self, place: int, near_workers: int) -> float:
        """What a rank takes from workers other than `near_workers`."""
        far = len(self.workers) - near_workers
        return (min(1, far) if self.is_visit else far) / len(self.servers) if place in self.servers else 0.0


def busiest_share(collective: Collective) -> float:
    """What the busiest rank gives or takes, as a share of n, where all links are alike."""
    roles = Roles.of(collective)
    given = (roles.given(place, place in roles.servers) for place in roles.workers)
    taken = (roles.taken(place, place in roles.workers) for place in roles.servers)
    return max(*given, *taken)


def served_s(collective: Collective, cluster: Cluster, calibration: Calibration) -> float:
    """Seconds of a push, a pull or a visit. Formulas: the module's text."""
    group, roles = collective.group, Roles.of(collective)
    base_s = latency_s = moved_s = 0.0
    for level in _levels(group, cluster):
        tier, constants = level.tier, calibration.link(level.tier.name)
        rate = tier.port_bytes_per_s * constants.ring_share * (1.0 if tier.measured_bytes_per_s else constants.efficiency)
        share = level.share(roles, group)
        if share:
            moved_s = max(moved_s, share * collective.num_bytes / rate)
            base_s, latency_s = max(base_s, constants.base_s), max(latency_s, tier.latency_s)
    return base_s + latency_s + moved_s


@dataclass(frozen=True, slots=True)
class _Level:
    """A tier as those places of a group see it that lie in one node group. `below`: the domain of each place of the group under the tier, numbered;
    `ports`: the port of each of `places`; `width`: devices in a domain under the tier."""

    tier: Tier
    places: range
    below: tuple[int, ...]
    ports: tuple[int, ...]
    width: int

    def share(self, roles: Roles, group: RankGroup) -> float:
        """What the busiest port carries, as a share of n, in units of a whole port."""
        near_servers, near_workers = (Counter(self.below[place] for place in own) for own in (roles.servers, roles.workers))
        given, taken = Counter[int](), Counter[int]()
        for place, port in zip(self.places, self.ports, strict=True):
            domain = self.below[place]
            own = roles.given(place, near_servers[domain])
            theirs = roles.taken(place, near_workers[domain])
            if self.tier.peers:  # one wire for each pair
                own, theirs = min(own, 1 / len(roles.servers)), min(theirs, 1 / len(roles.servers))
            given[port] = max(given[port], own) if roles.is_visit else given[port] + own  # type: ignore[assignment]
            taken[port] += theirs  # type: ignore[assignment]
        members = Counter(self.ports)
        twins = max(1, min(group.concurrent, group.stride, self.tier.shared_by))
        most = 0.0
        for port, count in members.items():
            at_once = max(twins, self.tier.shared_by // self.width / count)  # where a node's devices share one port, all are taken to send
            most = max(most, max(given[port], taken[port]) * at_once)
        return most * max(1, self.tier.peers)


def _levels(group: RankGroup, cluster: Cluster) -> Iterator[_Level]:
    ranks = [group.start + place * group.stride for place in range(group.size)]
    homes = [cluster.group_of(rank) for rank in ranks]
    starts = [start for _, start in homes]
    is_spread = starts[0] != starts[-1]
    first_place = 0
    for start in dict.fromkeys(starts):
        places = range(first_place, first_place + starts.count(start))
        first_place = places.stop
        node_group, width = homes[places.start][0], 1
        outside = [-1 - s for s in starts]  # of another node group
        tiers = [*node_group.tiers] if is_spread else [*cluster.tiers_within(group)]
        for tier in tiers:
            below = tuple((rank - start) // width if s == start else o for rank, s, o in zip(ranks, starts, outside, strict=True))
            yield _Level(tier, places, below, tuple((ranks[place] - start) // tier.shared_by for place in places), width)
            width = tier.domain
        if is_spread and cluster.fabric is not None:
            ports = tuple((ranks[place] - start) // cluster.fabric.shared_by for place in places)
            yield _Level(cluster.fabric, places, tuple(starts), ports, node_group.num_devices)
