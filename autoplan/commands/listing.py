"""`autoplan detect`, `clusters`, `models` and `env`: what there is."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from dataclasses import asdict
from typing import Any

from autoplan.commands.console import say, say_json, working
from autoplan.errors import ClusterError, UsageError
from autoplan.units import count, num_bytes, seconds
from costmodel.cluster import Cluster


def detect_command(ranks: int | None, *, as_json: bool) -> None:
    import torch

    from costmodel.detect import detect

    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks must be at least 1, found {ranks}")
    cluster = detect(ranks or (torch.cuda.device_count() if torch.cuda.is_available() else len(os.sched_getaffinity(0))))
    if as_json:
        say_json({"name": cluster.name, "fingerprint": cluster.fingerprint(), "num_devices": cluster.num_devices, **_described(cluster)})
    else:
        say("\n".join(_cluster_lines(cluster)))


def clusters_command(*, as_json: bool) -> None:
    from costmodel.clusterfile import preset_names

    try:
        presets = {name: Cluster.parse(f"{name}:2x8") for name in preset_names()}
    except ValueError as error:
        raise ClusterError(str(error)) from error
    if as_json:
        say_json({name: asdict(cluster.device(0)) | {"peak_flops_per_s": dict(cluster.device(0).peak_flops_per_s)} for name, cluster in presets.items()})
        return
    rows = [("preset", "memory", "memory speed", "peak (dense)", "link", "network")]
    for name, cluster in presets.items():
        device, tiers = cluster.device(0), cluster.groups[0].tiers
        links = [f"{tier.name} {tier.bandwidth_bytes_per_s / 1e9:g} GB/s" for tier in tiers]
        dtype = "bfloat16" if "bfloat16" in dict(device.peak_flops_per_s) and device.kind == "cuda" else "float32"
        peak = f"{device.peak(dtype) / 1e12:g} TFLOP/s {dtype}"
        rows.append((name, num_bytes(device.memory_bytes), f"{device.memory_bytes_per_s / 1e9:,.0f} GB/s", peak, links[0], links[-1] if len(links) > 1 else ""))
    say(table(rows) + "\n\nUse one with its size, nodes x devices a node: --cluster h100-sxm-80gb:16x8. A YAML file describes anything else.")


def models_command(*, as_json: bool) -> None:
    from autoplan.modelsource import OWN, presets

    if as_json:
        own = {name: {"about": about, "model": None, "seq": None} for name, (about, _) in OWN.items()}
        say_json({name: {"about": p.about, "model": p.model, "seq": p.seq} for name, p in presets().items()} | own)
        return
    rows = [("preset", "what", "tokens a row", "architecture")]
    rows += [(name, p.about, f"{p.seq:,}" if p.seq else "", p.model) for name, p in presets().items()]
    rows += [(name, about, "", "autoplan.models") for name, (about, _) in OWN.items()]
    say(table(rows) + "\n\nOther models: hf:PATH_OR_ID for a transformers config, FILE_OR_MODULE:FACTORY for your own.")


def env_command(*, as_json: bool) -> None:
    with working("looking around"):
        import torch

        from costmodel.profile import Profile, environment

        found: dict[str, Any] = {
            "autoplan": _version("autoplan"),
            "python": platform.python_version(),
            "platform": platform.platform(),
            **{name: _version(name) for name in ("torch", "transformers", "pulp", "highspy", "networkx")},
            "cuda": torch.version.cuda or "none in this build of torch",
            "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or [environment().device],
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "solver": _solver(),
        }
        profile = Profile()
        found |= {"profile": str(profile.path), "operators measured": profile.num_ops, "links measured": len(profile.links()), "executable": sys.executable}
    if as_json:
        say_json(found)
    else:
        say(table([(key, ", ".join(value) if isinstance(value, list) else str(value)) for key, value in found.items()]))


def table(rows: list[tuple[str, ...]]) -> str:
    """Left-aligned columns, two spaces apart."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _cluster_lines(cluster: Cluster) -> list[str]:
    lines = [f"{cluster.name}: {cluster.num_devices} devices"]
    for group in cluster.groups:
        device = group.device
        each = f"{num_bytes(device.memory_bytes)} each, peak {count(device.peak('float32'), 'FLOP/s')} in float32"
        lines.append(f"  {group.num_nodes} x {group.devices_per_node} {device.name}, {each}")
        if group.contention > 1:
            lines.append(f"  {group.devices_per_node} ranks share {group.cores_per_node:g} cores: compute takes {group.contention:.2f} times as long")
        lines += [f"  {t.name}: {t.port_bytes_per_s / 1e9:g} GB/s a direction, {seconds(t.latency_s)}, joins {t.domain} devices" for t in group.tiers]
    return lines


def _described(cluster: Cluster) -> dict[str, Any]:
    return {"groups": [asdict(group) for group in cluster.groups], "fabric": asdict(cluster.fabric) if cluster.fabric else None}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _solver() -> str:
    import pulp

    return "HiGHS, in process" if pulp.HiGHS().available() else "missing; fix: pip install highspy"
