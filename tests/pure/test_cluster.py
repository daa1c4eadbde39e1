"""Clusters: presets, files, ranks, and what is said about mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from costmodel.cluster import Cluster
from costmodel.clusterfile import ClusterFileError, preset_names
from costmodel.opkey import RankGroup

LAB = """
name: lab
groups:
  - device: a100-sxm-80gb
    nodes: 2
    devices_per_node: 4
    tiers:
      - {name: nvlink, latency_us: 4, bandwidth_gb_per_s: 300, measured_gb_per_s: 235}
      - {name: fabric, latency_us: 20, bandwidth_gb_per_s: 100}
  - device: v100-sxm2-32gb
    nodes: 1
    devices_per_node: 8
fabric: {name: ethernet, shared_by: 4, latency_us: 40, bandwidth_gb_per_s: 12.5}
"""


def write(tmp_path: Path, text: str) -> str:
    file = tmp_path / "lab.yaml"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_sane_figures(name: str) -> None:
    cluster = Cluster.parse(f"{name}:2x8")
    device = cluster.device(15)
    assert cluster.num_devices == 16
    assert 2**30 < cluster.memory_bytes(0) < 300 * 2**30
    assert device.peak("bfloat16") > 0 and device.peak("float64") > 0
    assert all(tier.bandwidth_bytes_per_s > 0 for tier in cluster.groups[0].tiers)
    assert cluster.groups[0].tiers[-1].domain == 16


def test_a_cluster_parses_to_itself_and_its_fingerprint_depends_on_its_content() -> None:
    one = Cluster.parse("h100-sxm-80gb:16x8")
    assert Cluster.parse(one) is one
    assert one.fingerprint() == Cluster.parse("h100-sxm-80gb:16x8").fingerprint()
    assert len({Cluster.parse(c).fingerprint() for c in ("h100-sxm-80gb:16x8", "h100-sxm-80gb:8x16", "a100-sxm-80gb:16x8")}) == 3


def test_a_file_mixes_devices_and_ranks_fill_nodes_in_order(tmp_path: Path) -> None:
    cluster = Cluster.parse(write(tmp_path, LAB))
    assert cluster.num_devices == 16 and cluster.mixed
    assert [cluster.device(r).name for r in (0, 7, 8, 15)] == ["A100-SXM-80GB"] * 2 + ["V100-SXM2-32GB"] * 2
    assert [cluster.node_of(r) for r in (0, 3, 4, 7, 8, 15)] == [0, 0, 1, 1, 2, 2]
    assert cluster.groups[0].tiers[0].port_bytes_per_s == 235e9
    assert cluster.differences() == ("nvlink: measured 235.0 of nominal 300.0 GB/s (78%)",)


def test_a_group_of_ranks_uses_the_innermost_tiers_that_join_it(tmp_path: Path) -> None:
    cluster = Cluster.parse(write(tmp_path, LAB))
    names = {key: [t.name for t in cluster.tiers_within(RankGroup(*key))] for key in ((4, 1, 0), (8, 1, 0), (2, 4, 0), (8, 1, 8), (2, 8, 0))}
    assert names[4, 1, 0] == ["nvlink"] and names[8, 1, 8] == ["nvlink2"]
    assert names[8, 1, 0] == names[2, 4, 0] == ["nvlink", "fabric"]
    assert names[2, 8, 0] == ["nvlink", "fabric", "ethernet"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("bandwidth_gb_per_s: 100", "bandwidth_gb_per_s: -100"), ("groups.0.tiers.1.bandwidth_gb_per_s", "greater than 0", "-100")),
        (("latency_us: 20", "latency_uss: 20"), ("groups.0.tiers.1.latency_uss", "unknown key", "latency_us")),
        (("nodes: 2", "nodes: 0"), ("groups.0.nodes", "greater than 0")),
        (("nodes: 2", "nodes: 2\n    nodes: 3"), ("not valid YAML", "'nodes' is there twice")),
        (("nodes: 2", "nodes: two"), ("groups.0.nodes", "two")),
        (("nodes: 2", "nodes: 2.5"), ("groups.0.nodes", "2.5")),
        (("device: a100-sxm-80gb", "device: a100-sxm-90gb"), ("groups.0.device", "a100-sxm-80gb")),
        (("fabric: {", "fabrik: {"), ("fabrik", "nearest valid key: fabric")),
        (("latency_us: 20", "latency_us: .inf"), ("latency_us", "finite")),
    ],
)
def test_a_mistake_in_a_file_is_named_with_file_and_key(tmp_path: Path, change: tuple[str, str], words: tuple[str, ...]) -> None:
    file = write(tmp_path, LAB.replace(*change))
    with pytest.raises(ClusterFileError) as caught:
        Cluster.parse(file)
    assert all(word in str(caught.value) for word in (file, *words)), str(caught.value)


def test_an_unknown_key_in_a_device_mapping_is_named(tmp_path: Path) -> None:
    text = LAB.replace("device: v100-sxm2-32gb", "device: {name: X, memory_gib: 8, memory_gb_per_s: 100, peak_tflops: {fp32: 1}, memmory: 3}")
    with pytest.raises(ClusterFileError, match=r"device\.memmory: unknown key; nearest valid key: memory"):
        Cluster.parse(write(tmp_path, text))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("h100-sxm-80gb", "NODESxPER_NODE"),
        ("h100-sxm-80gb:8", "NODESxPER_NODE"),
        ("h100-sxm-80gb:0x8", "NODESxPER_NODE"),
        ("h100-smx-80gb:1x8", "nearest: h100-sxm-80gb"),
        ("missing.yaml", "no such file"),
        ("", "neither a file nor a preset"),
    ],
)
def test_text_that_is_no_cluster_is_refused_with_the_nearest_form(source: str, words: str) -> None:
    with pytest.raises(ClusterFileError, match=words):
        Cluster.parse(source)


def test_files_that_are_no_mapping_or_no_yaml_are_refused(tmp_path: Path) -> None:
    for text in ("", "- 1", "a: [", "name: x\ngroups: []"):
        with pytest.raises(ClusterFileError):
            Cluster.parse(write(tmp_path, text))


def test_ranks_that_share_cores_slow_each_other(tmp_path: Path) -> None:
    node = "name: x\ngroups: [{device: cpu, nodes: 1, devices_per_node: 8, cores_per_node: 2}]\n"
    assert Cluster.parse(write(tmp_path, node)).groups[0].contention == 4.0
    assert Cluster.parse("cpu:1x8").groups[0].contention == 1.0
