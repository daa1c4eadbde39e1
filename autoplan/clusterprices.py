"""The prices of a cluster where nobody gives others: formulas, or for paced devices what was measured on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from costmodel.analytic import AnalyticPrices
from costmodel.calibration import Calibration, load
from costmodel.cluster import Cluster
from costmodel.measured import MeasuredPrices
from costmodel.paced import PacedDevices
from costmodel.prices import Prices
from costmodel.profile import Profile
from costmodel.scaled import ScaledPrices
from costmodel.stopwatch import PacedStopwatch, paced_environment


def prices_of(cluster: Cluster, profile: Path | None = None) -> Prices:
    """Prices of `cluster`. `profile`: the file of measurements of paced devices (default: the user's)."""
    return AnalyticPrices(cluster) if cluster.paced is None else _measured(cluster, cluster.paced, profile)


def _without_overheads(cluster: Cluster) -> Calibration:
    """The constants for what is not measured: the memory that a file states is all usable, and views launch nothing."""
    known, name = load(), cluster.device().name
    own = replace(known.device(name), reserve_bytes=0, launch_s=0.0)
    return replace(known, devices={**known.devices, name: own})


def _measured(cluster: Cluster, devices: PacedDevices, path: Path | None) -> Prices:
    """The profile's times of one of the fastest devices, the others by their speeds; what is not in the profile is measured."""
    profile, stopwatch = Profile(path, paced_environment(devices)), PacedStopwatch(devices)
    prices = MeasuredPrices(cluster, profile, AnalyticPrices(cluster, _without_overheads(cluster)), stopwatch)
    speeds = []
    for rank in range(devices.num_devices):
        known = profile.speed(rank)
        if known is None:
            known = stopwatch.speed(rank)
            profile.put_speed(rank, known)
        speeds.append(known)
    return prices if set(speeds) == {1.0} else ScaledPrices(prices, tuple(speeds))
