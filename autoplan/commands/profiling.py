"""`autoplan profile`: measures a model's operators and this machine's links, or those of paced devices, into the cache that measured plans read."""

from __future__ import annotations

from autoplan.api import find_plan, load_cluster
from autoplan.commands.console import note, say, working
from autoplan.commands.listing import table
from autoplan.commands.planning import load_model
from autoplan.errors import UsageError
from autoplan.launch import run_ranks
from autoplan.modelsource import BatchSizes, load
from autoplan.onerank import on_one_rank
from autoplan.units import num_bytes, seconds
from costmodel.analytic import AnalyticPrices
from costmodel.cluster import Cluster, Sharing
from costmodel.measured import MeasuredPrices
from costmodel.profile import LinkFit, Profile
from costmodel.stopwatch import PresentDevice, paced_environment

_LINK_BUDGET_S = 6.0


def profile_command(model: str, cluster: str | None, ranks: int, global_batch: int | None, seq: int | None, budget_s: float) -> None:
    if cluster is not None:
        return profile_paced(model, load_cluster(cluster), global_batch, seq)
    if ranks < 1:
        raise UsageError(f"--ranks must be at least 1, found {ranks}")
    with working(f"building {model}"):
        source = load(model, BatchSizes(global_batch, seq))
    profile = Profile()
    before = profile.num_ops
    with working(f"measuring the links of {ranks} ranks"):
        machine, fits = measured_machine(ranks)
    prices = measured_prices(machine, budget_s)
    with working("measuring operators"):
        find_plan(source.model, source.batch, machine, prices=prices)
    rows = [("collective", "ranks", "latency", "bandwidth", "error of the fit")]
    rows += [(f.kind, str(f.size), seconds(f.base_s), f"{num_bytes(f.bytes_per_s)}/s", f"{f.error:.0%}") for f in fits]
    say(
        f"{Profile().num_ops - before} operators measured on {profile.env.device}, {Profile().num_ops} in all\n"
        + (table(rows) if fits else "one rank: no links")
    )
    note(f"kept in {profile.path}")


def profile_paced(model: str, cluster: Cluster, global_batch: int | None, seq: int | None) -> None:
    """What a plan of the model needs to know of paced devices, into the cache."""
    if cluster.paced is None:
        raise UsageError(f"--cluster {cluster.name} has no devices to measure here: give a file of paced devices, or leave it out to measure this machine")
    source = load_model(model, cluster, global_batch, seq)
    profile = Profile(env=paced_environment(cluster.paced))
    before = profile.num_ops
    with working(f"measuring operators and links of {cluster.name}"):
        find_plan(source.model, source.batch, cluster)
    profile = Profile(env=profile.env)
    speeds = sorted({profile.speed(rank) or 1.0 for rank in range(cluster.num_devices)}, reverse=True)
    slower = ", ".join(f"{speed:.3g}" for speed in speeds[1:])
    say(
        f"{profile.num_ops - before} operators measured on {profile.env.device}, {profile.num_ops} in all\n"
        f"{cluster.num_devices} devices, {f'some at {slower} of the speed of the fastest' if slower else 'all equally fast'}"
    )
    note(f"kept in {profile.path}")


def measured_machine(ranks: int) -> tuple[Cluster, tuple[LinkFit, ...]]:
    """This machine as a cluster of `ranks`, with what they cost each other and the links among them measured."""
    from costmodel.detect import detect

    if ranks == 1:
        return detect(1), ()
    sharing, fits = run_ranks(_measure_links, ranks, timeout_s=120.0)[0]
    return detect(ranks, sharing=sharing), fits


def measured_prices(cluster: Cluster, budget_s: float) -> MeasuredPrices:
    """Prices from the profile; operators that are not in it are measured within `budget_s`."""
    import torch

    torch.set_num_threads(1)  # as a rank computes
    return MeasuredPrices(cluster, Profile(), AnalyticPrices(cluster), PresentDevice(on_one_rank), budget_s=budget_s)


def _measure_links() -> tuple[Sharing, tuple[LinkFit, ...]]:
    import torch
    import torch.distributed as dist

    from costmodel.links import measure_links, measure_sharing

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return measure_sharing(), measure_links(Profile(), _LINK_BUDGET_S)
