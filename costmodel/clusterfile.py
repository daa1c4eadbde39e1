"""Cluster files and presets: YAML in, Cluster out, every mistake named with its file and key.

    name: lab                         # a cluster file
    groups:
      - device: a100-sxm-80gb         # a preset's device, or a mapping like the one in a preset
        nodes: 4
        devices_per_node: 8
        tiers:                        # optional: the preset's
          - {name: nvlink, latency_us: 8, bandwidth_gb_per_s: 300, measured_gb_per_s: 235}
          - {name: fabric, shared_by: 8, latency_us: 20, bandwidth_gb_per_s: 200}
    fabric: {name: ethernet, shared_by: 8, latency_us: 40, bandwidth_gb_per_s: 12.5}   # between groups

`gb` is 1e9 bytes, `gib` 2**30. `shared_by`: devices that share a port (default: 1 in the first tier, the node's
devices after it). `domain`: devices that a tier joins (default: the node in the first tier, everything in the last).
`peers`: wires of a device to others where there is no switch.
"""

from __future__ import annotations

import itertools
import math
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, Union

import yaml
from pydantic import Field

from costmodel import pacedfile
from costmodel.cluster import Cluster, Device, NodeGroup, Tier, peaks_of
from costmodel.forms import ClusterFileError, Count, KeysOnce, Positive, Strict, nearest, validate
from costmodel.paced import PacedDevices

DTYPES = {"fp64": "float64", "fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}


class _Peaks(Strict):
    fp64: Positive | None = None
    fp32: Positive
    tf32: Positive | None = None
    bf16: Positive | None = None
    fp16: Positive | None = None
    fp8: Positive | None = None


class _Device(Strict):
    name: str
    kind: Literal["cuda", "cpu"] = "cuda"
    memory_gib: Positive
    memory_gb_per_s: Positive
    peak_tflops: _Peaks
    num_sms: Count = 1


class _Tier(Strict):
    name: str
    domain: Count | None = None
    shared_by: Count | None = None
    latency_us: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    bandwidth_gb_per_s: Positive
    measured_gb_per_s: Positive | None = None
    peers: Annotated[int, Field(ge=0, strict=True)] = 0


class _Preset(Strict):
    provenance: str
    device: _Device
    tiers: Annotated[list[_Tier], Field(min_length=1)]


class _Group(Strict):
    device: Union[str, _Device]
    nodes: Count
    devices_per_node: Count
    cores_per_node: Positive | None = None
    tiers: Annotated[list[_Tier], Field(min_length=1)] | None = None


class _File(Strict):
    name: str
    groups: Annotated[list[_Group], Field(min_length=1)]
    fabric: _Tier | None = None


_FORMS = (_File, _Group, _Tier, _Device, _Peaks, _Preset)


_NOMINAL = 1e12  # FLOP/s or bytes/s, of what a file of paced devices does not state


def preset_names() -> tuple[str, ...]:
    """Names of the device presets, sorted."""
    return tuple(sorted(entry.name[:-5] for entry in resources.files("costmodel").joinpath("presets").iterdir() if entry.name.endswith(".yaml")))


def parse(source: str | Path) -> Cluster:
    """See Cluster.parse."""
    text = str(source)
    name, colon, counts = text.partition(":")
    if name in preset_names():
        if not colon:
            raise ClusterFileError(text, "", f"a preset needs its size: write {name}:NODESxPER_NODE, such as {name}:1x8")
        nodes, cross, per_node = counts.partition("x")
        if not (cross and nodes.isdigit() and per_node.isdigit() and int(nodes) and int(per_node)):
            raise ClusterFileError(text, "", f"'{counts}' is no NODESxPER_NODE with two positive numbers, such as {name}:2x8")
        preset = _preset(name)
        device, group = _device(preset.device), (int(nodes), int(per_node))
        return Cluster(text, (NodeGroup(device, *group, _tiers(text, preset.tiers, *group)),))
    path = Path(text)
    if path.is_file():
        return _from_file(path)
    if path.suffix in (".yaml", ".yml"):
        raise ClusterFileError(text, "", "no such file")
    names = preset_names()
    raise ClusterFileError(text, "", f"neither a file nor a preset; nearest: {nearest(name.strip().lower(), names)} (presets: {', '.join(names)})")


def _from_file(path: Path) -> Cluster:
    try:
        content = yaml.load(path.read_text(), KeysOnce)
    except yaml.YAMLError as error:
        raise ClusterFileError(str(path), "", f"not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ClusterFileError(str(path), "", "expected a mapping with the keys name and groups")
    if pacedfile.is_paced(content):
        return paced_cluster(pacedfile.read(content, str(path)))
    form = validate(_File, content, str(path), _FORMS)
    groups = []
    for i, group in enumerate(form.groups):
        if isinstance(group.device, str) and group.device not in preset_names():
            raise ClusterFileError(str(path), f"groups.{i}.device", f"no preset '{group.device}'; nearest: {nearest(group.device, preset_names())}")
        preset = _preset(group.device) if isinstance(group.device, str) else None
        device = _device(preset.device if preset else group.device)  # type: ignore[arg-type]
        tiers = group.tiers or (preset.tiers if preset else None)
        if tiers is None:
            raise ClusterFileError(str(path), f"groups.{i}.tiers", "a device that is no preset needs its tiers")
        built = _tiers(f"{path}: groups.{i}", tiers, group.nodes, group.devices_per_node)
        groups.append(NodeGroup(device, group.nodes, group.devices_per_node, built, group.cores_per_node))
    total = sum(group.num_devices for group in groups)
    if len(groups) > 1 and form.fabric is None:
        raise ClusterFileError(str(path), "fabric", "more than one group needs the link that joins them")
    fabric = _tier(form.fabric, total, groups[0].devices_per_node) if form.fabric else None
    return Cluster(form.name, tuple(groups), fabric)


def paced_cluster(devices: PacedDevices) -> Cluster:
    """The cluster of paced devices. What it states of speeds is nominal: prices are measured (costmodel/measured.py)."""
    peak = max((cost.flops_per_s for cost in devices.ops if cost.flops_per_s < math.inf), default=_NOMINAL)
    device = Device(f"paced {devices.name}", "cpu", devices.memory_bytes, _NOMINAL, peaks_of({"float32": peak}))
    tiers = tuple(Tier(link.name, min(link.domain, devices.num_devices), 1, link.latency_s, _NOMINAL) for link in devices.links)
    return Cluster(devices.name, (NodeGroup(device, devices.num_nodes, devices.devices_per_node, tiers),), paced=devices)


def _preset(name: str) -> _Preset:
    text = resources.files("costmodel").joinpath("presets", f"{name}.yaml").read_text()
    return validate(_Preset, yaml.safe_load(text), f"presets/{name}.yaml", _FORMS)


def _device(form: _Device) -> Device:
    peaks = {DTYPES[k]: v * 1e12 for k, v in form.peak_tflops.model_dump(exclude_none=True).items()}
    return Device(form.name, form.kind, int(form.memory_gib * 2**30), form.memory_gb_per_s * 1e9, peaks_of(peaks), form.num_sms)


def _tiers(file: str, forms: list[_Tier], num_nodes: int, per_node: int) -> tuple[Tier, ...]:
    """Tiers of a group; those that lie outside a one-node group are dropped."""
    total, tiers = num_nodes * per_node, []
    for i, form in enumerate(forms):
        last = i == len(forms) - 1
        domain = min(total, form.domain or (total if last and (i or num_nodes == 1) else per_node))
        tiers.append(_tier(form, domain, 1 if i == 0 else per_node))
        if domain == total:
            break
    if tiers[-1].domain != total:
        raise ClusterFileError(file, "tiers", f"they join {tiers[-1].domain} of {total} devices; add a tier between nodes")
    if any(a.domain >= b.domain for a, b in itertools.pairwise(tiers)):
        raise ClusterFileError(file, "tiers", "domains must grow from the first tier to the last")
    return tuple(tiers)


def _tier(form: _Tier, domain: int, shared_by: int) -> Tier:
    measured = form.measured_gb_per_s * 1e9 if form.measured_gb_per_s else None
    return Tier(form.name, domain, form.shared_by or shared_by, form.latency_us * 1e-6, form.bandwidth_gb_per_s * 1e9, measured, form.peers)
