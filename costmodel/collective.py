"""Seconds of a collective on a group of ranks: latency and volume by tier, the fastest algorithm chosen (of gloo, on CPUs, the ring).

Wire volume a rank sends, n bytes of the whole tensor, p ranks (Thakur, Rabenseifner, Gropp 2005; Patarasuk, Yuan 2009):

    all_gather, reduce_scatter, broadcast, all_to_all   (p-1)/p n      all_reduce   2 (p-1)/p n      send   n

A tier carries what the group's ports carry, shared with the twins that leave through the same ports:

    rate   = ports of the group in one lower domain * port_bytes_per_s * efficiency * ring_share / twins at a port,
             times (p-1) / peers where devices are wired to each other without a switch
    ring   : base + steps * latency + volume / (rate of the slowest tier); steps = p-1 (all_reduce 2(p-1))
    tree   : base + 2 ceil(log2 p) latency + 2 n / rate                       (all_reduce: small messages)
    levels : base + sum over tiers of steps * latency + (fan-1)/fan n / rate  (all_reduce twice), fan = domains joined

Where domains hold unequal numbers of the ranks, the one with fewest has the fewest ports, and the others wait for it; node groups
joined by a fabric each have their own tiers, and the slowest decides.

Parameter servers are priced in costmodel/served.py.

A strided group has one member a node and as many twins at the node's ports as fit between its members. Where devices of a node share
one port (PCIe through the host), all of them are taken to send at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from costmodel.calibration import Calibration
from costmodel.cluster import Cluster, Tier
from costmodel.opkey import Collective, RankGroup
from costmodel.served import served_s


@dataclass(frozen=True, slots=True)
class Level:
    """A tier as a group of ranks sees it. `fan`: lower domains that it joins; `inside`: members in each of them;
    `rate_bytes_per_s`: what those members together send through it, twins counted."""

    tier: Tier
    fan: int
    inside: int
    rate_bytes_per_s: float
    base_s: float


def paths(group: RankGroup, cluster: Cluster, calibration: Calibration) -> tuple[tuple[Level, ...], ...]:
    """Tiers that the group needs, innermost first, as the ranks of each node group see them; tiers that join nothing new are left out.
    The collective takes as long as by the slowest of the paths."""
    parts = cluster.parts(group)
    if len(parts) == 1 or cluster.fabric is None:
        return (_levels(group, cluster.tiers_within(group), calibration),)
    found = []
    for part in parts:
        inner = _levels(part, cluster.tiers_within(part), calibration) if part.size > 1 else ()
        domain = cluster.group_of(part.start)[0].num_devices
        found.append((*inner, _level(cluster.fabric, len(parts), part.size, part.size, domain, group, calibration)))
    return tuple(found)


def _levels(group: RankGroup, tiers: tuple[Tier, ...], calibration: Calibration) -> tuple[Level, ...]:
    found: list[Level] = []
    inside, domain = 1, 1  # members of the group in one domain of the tier below; devices in that domain
    for tier in tiers:
        members = group.size if tier is tiers[-1] else min(group.size, max(1, tier.domain // group.stride))
        fan = -(-members // inside)
        if fan > 1:
            fewest = members - (fan - 1) * inside  # the last domain may hold fewer
            found.append(_level(tier, fan, inside, fewest, domain, group, calibration))
            inside = members
        domain = tier.domain
    return tuple(found)


def _level(tier: Tier, fan: int, inside: int, fewest: int, domain: int, group: RankGroup, calibration: Calibration) -> Level:
    constants = calibration.link(tier.name)
    share = constants.ring_share * (1.0 if tier.measured_bytes_per_s else constants.efficiency)
    ports = min(fewest, -(-fewest * group.stride // tier.shared_by), max(1, domain // tier.shared_by))
    twins = max(1, min(group.concurrent, group.stride, tier.shared_by), tier.shared_by // domain)
    wired = min(1.0, (fan - 1) / tier.peers) if tier.peers else 1.0
    return Level(tier, fan, inside, ports * tier.port_bytes_per_s * share * wired / twins, constants.base_s)


def collective_s(collective: Collective, cluster: Cluster, calibration: Calibration) -> float:
    """Seconds of one collective. Formulas: the module's text."""
    group = collective.group
    if collective.kind == "send":
        return _send_s(collective, cluster, calibration)
    if collective.kind in ("push", "pull", "visit"):
        return served_s(collective, cluster, calibration)
    if group.size <= 1 or collective.num_bytes == 0:
        return 0.0
    price = _ring_s if cluster.device(group.start).kind == "cpu" and collective.kind in ("all_reduce", "all_gather", "reduce_scatter") else _fastest_s
    return max(price(collective, path) for path in paths(group, cluster, calibration))


def _ring_s(collective: Collective, path: tuple[Level, ...]) -> float:
    n, p = float(collective.num_bytes), collective.group.size
    rate = min(level.rate_bytes_per_s for level in path)
    once = (p - 1) * max(level.tier.latency_s for level in path) + (p - 1) / p * n / rate
    return max(level.base_s for level in path) + (2 * once if collective.kind == "all_reduce" else once)


def _fastest_s(collective: Collective, path: tuple[Level, ...]) -> float:
    n, p = float(collective.num_bytes), collective.group.size
    base = max(level.base_s for level in path)
    rate = min(level.rate_bytes_per_s for level in path)
    if collective.kind == "all_to_all":
        volumes = [level.inside * n * (p - level.inside) / p / level.rate_bytes_per_s for level in path]
        return base + sum((level.fan - 1) * level.tier.latency_s for level in path) + max(volumes)
    if collective.kind == "broadcast":
        return base + sum(math.ceil(math.log2(level.fan)) * level.tier.latency_s for level in path) + n / rate
    twice = 2.0 if collective.kind == "all_reduce" else 1.0
    steps = twice * sum((level.fan - 1) * level.tier.latency_s for level in path)
    stepped = steps + twice * sum((level.fan - 1) / level.fan * n / level.rate_bytes_per_s for level in path)
    best = min(_ring_s(collective, path), base + stepped)
    if collective.kind == "all_reduce":
        best = min(best, base + 2 * sum(math.ceil(math.log2(level.fan)) * level.tier.latency_s for level in path) + 2 * n / rate)
    return best


def _send_s(collective: Collective, cluster: Cluster, calibration: Calibration) -> float:
    group = collective.group
    tier = cluster.tiers_within(RankGroup(2, max(1, group.stride), group.start))[-1]
    constants = calibration.link(tier.name)
    share = 1.0 if tier.measured_bytes_per_s else constants.efficiency
    twins = min(max(1, group.concurrent), tier.shared_by)
    return constants.base_s + tier.latency_s + collective.num_bytes / (tier.port_bytes_per_s * share / max(1, tier.peers) / twins)
