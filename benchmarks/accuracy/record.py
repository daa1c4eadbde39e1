"""A published row as a run: model, cluster and plan in this project's terms.

Keys that a source does not state get one default for all sources:

    recompute           none where the run then fits the device, else full
    vpp                 2 where there is a pipeline, else 1
    zero_stage          1 in Megatron-DeepSpeed (its optimizer's default), else 0
    micro_batch         as many micro-batches as stages
    sequence_parallel   false
    node network        the device preset's
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks.accuracy.splits import layers_of_stages
from costmodel.cluster import Cluster, NodeGroup, Tier

# GPU names of the rows by their first words -> device preset
DEVICES = (
    ("V100-SXM2-16GB", "v100-sxm2-16gb"),
    ("V100", "v100-sxm2-32gb"),
    ("A100-SXM-40GB", "a100-sxm-40gb"),
    ("A800", "a800-sxm-80gb"),
    ("A100", "a100-sxm-80gb"),
    ("H100-SXM-96GB", "h100-sxm-96gb"),
    ("H100", "h100-sxm-80gb"),
    ("H200", "h200-sxm-141gb"),
    ("GH200", "gh200-96gb"),
    ("GB200", "gb200-186gb"),
    ("B200", "b200-sxm-180gb"),
    ("MI300X", "mi300x-192gb"),
    ("T4", "t4-16gb"),
    ("L4", "l4-24gb"),
    ("RTX-4090", "rtx4090-24gb"),
    ("RTX4090", "rtx4090-24gb"),
    ("RTX-3090", "rtx3090-24gb"),
    ("RTX-2080", "rtx2080ti-11gb"),
    ("Titan", "titan-rtx-24gb"),
)
# words of a source -> software stack (constants: costmodel/data/calibration.json)
STACKS = (
    ("sailor", "sailor"),
    ("vtrain", "megatron-deepspeed"),
    ("bigscience", "megatron-deepspeed"),
    ("dachengli1/amp", "amp"),
    ("llm-foundry", "llm-foundry"),
    ("internevo", "internevo"),
    ("torchtitan", "torchtitan-eager"),
    ("jax", "xla"),
    ("maxtext", "xla"),
    ("megatron", "megatron-lm"),
)
COMPILED = ("torch.compile", "asynctp", "1f1b", "interleaved")  # torchtitan pages that measured with torch.compile name one of these
DEEPSPEED = ("megatron-deepspeed", "deepspeed-zero3", "amp", "sailor")  # pipelines that DeepSpeed splits
UNFUSED = ("megatron-deepspeed", "deepspeed-zero3", "megatron-lm", "amp", "sailor")  # stacks without a fused attention kernel
BLOCKING = ("tr11-176B",)  # sources whose job scripts set CUDA_LAUNCH_BLOCKING=1 (theirs did to keep the job from hanging)
NETWORKS = (("omni-path", "omni-path"), ("opa", "omni-path"), ("roce", "roce"), ("efa", "efa"), ("tcpx", "tcpx"), ("gb/s; pcie", "ethernet"))


class UnsupportedRowError(ValueError):
    """A row that the model cannot express; the reason is in the message."""


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a decoder-only transformer. `gated`: SwiGLU with RMSNorm and rotary positions (Llama), else GPT, with GELU unless `relu`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    seq: int
    vocab: int
    gated: bool
    head: bool
    relu: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers of a pipeline stage, and the device rank that is slowest in it."""

    layers: int
    device: int


@dataclass(frozen=True)
class Run:
    """One row. `micro_batch` in sequences; `num_micro` micro-batches a replica and step."""

    row_id: str
    model: Model
    cluster: Cluster
    stack: str
    tp: int
    pp: int
    dp: int
    cp: int
    vpp: int
    micro_batch: int
    num_micro: int
    global_batch: int
    recompute: str
    sequence_parallel: bool
    zero: int
    zero_group: int
    dtype: str  # of activations
    gemm_dtype: str  # of block products ("float8" where the row says so)
    pure: bool  # parameters and gradients at rest in the compute dtype
    stages: tuple[Stage, ...]
    async_tp: bool
    flash: bool  # fused attention; the stack's where the row does not say
    compiled_loss: bool  # the loss is compiled with the model: no fp32 copy of the logits
    reported: Literal["fullest", "first", "last"]  # the stage whose memory the source reports
    is_blocking: bool  # every launch waits for the device


def run_of(row: Mapping[str, Any]) -> Run:
    """Raises UnsupportedRowError for what cannot be expressed."""
    m, p, text = row["model"], row["plan"], f"{row['source']} {row.get('notes', '')}"
    if p.get("ep") not in (None, 1) or m.get("experts"):
        raise UnsupportedRowError("expert parallelism is not expressed")
    tp, pp, cp = (int(p.get(k) or 1) for k in ("tp", "pp", "cp"))
    gpus = int(row["cluster"]["n_gpus"])
    dp = int(p.get("dp") or max(1, gpus // (tp * pp * cp)))
    batch = int(p.get("global_batch") or int(p.get("micro_batch") or 1) * dp)
    micro = int(p.get("micro_batch") or max(1, batch // (dp * pp)))
    stack = stack_of(row)
    zero = p.get("zero_stage")
    zero = (1 if stack == "megatron-deepspeed" else 0) if zero is None else int(zero)
    if zero == 3 and stack.startswith("megatron"):
        stack = "deepspeed-zero3"
    precision = str(row["precision"]).lower()
    dtype = "float16" if "fp16" in precision else "float32" if precision.startswith("fp32") else "bfloat16"
    # products with a scale a row ran on kernels without fast accumulation, at the bf16 rate
    eight = ("fp8" in precision or "float8" in precision) and "rowwise" not in precision
    gemm = "float8" if eight else "tf32" if "tf32" in precision else dtype
    model = Model(
        int(m["layers"]),
        int(m["hidden"]),
        int(m["heads"]),
        int(m.get("kv_heads") or m["heads"]),
        int(m.get("ffn") or 4 * m["hidden"]),
        int(m["seq_len"]),
        int(m["vocab"]),
        "glu" in str(m.get("act", "")),
        m.get("lm_head", True) is not False,
        m.get("act") == "relu",
    )
    cluster = cluster_of(row["cluster"])
    return Run(
        row["row_id"],
        model,
        cluster,
        stack,
        tp,
        pp,
        dp,
        cp,
        int(p.get("vpp") or (2 if pp > 1 else 1)),
        micro,
        max(1, -(-batch // (dp * micro))),
        batch,
        p.get("recompute") or "unstated",
        bool(p.get("sequence_parallel")),
        zero,
        int(p.get("zero_group") or dp * cp),
        dtype,
        gemm,
        "PURE" in str(row["precision"]),
        stages_of(layers_of_stages(model.layers, pp, p, str(row.get("notes", "")), stack in DEEPSPEED), tp * dp * cp, p, cluster),
        "asynctp" in f"{row['row_id']} {row.get('notes', '')}".lower().replace("-", ""),  # a page named for it measures both ways
        "flash attention off" not in text and stack not in UNFUSED,
        stack == "torchtitan-compile" and dated(row["source"]) >= 2025,
        reported_stage(stack, text),
        any(words in row["source"] for words in BLOCKING),
    )


def dated(source: str) -> int:
    """The year in a source's name (benchmarks_202506.md, "(Dec 2024)"); 0 where there is none."""
    return max((int(year) for year in re.findall(r"(?<![0-9a-z])20[12]\d", source)), default=0)


def reported_stage(stack: str, text: str) -> Literal["fullest", "first", "last"]:
    """The stage whose memory is reported. torchtitan logs the rank that sees the loss; who reads nvidia-smi without saying of which rank
    is taken to have looked at the first (runs that went out of memory where that one showed 3 GiB free say so)."""
    if stack.startswith("torchtitan"):
        return "last"
    return "first" if "nvidia-smi memory incl" in text else "fullest"


def stack_of(row: Mapping[str, Any]) -> str:
    """The software stack that a source names; "default" for one that is not known."""
    source, text = row["source"].lower(), f"{row.get('notes', '')} {row['row_id']}".lower()
    stack = next((stack for words, stack in STACKS if words in source), "default")
    if stack == "torchtitan-eager" and any(words in text for words in COMPILED):
        return "torchtitan-compile"
    if stack == "llm-foundry" and row["cluster"]["gpu"].startswith("H100"):
        return "llm-foundry-hopper"  # libraries of the year in which Hopper came out
    return stack


def stages_of(counts: Sequence[int], ranks: int, plan: Mapping[str, Any], cluster: Cluster) -> tuple[Stage, ...]:
    """Stages of `counts` layers and `ranks` ranks each, on the devices that the plan states."""
    stated = plan.get("stages")
    found = []
    for i, count in enumerate(counts):
        rank = min(i * ranks, cluster.num_devices - 1)
        if stated:
            gpus = stated[i]["gpu"] if isinstance(stated[i]["gpu"], list) else [stated[i]["gpu"]]
            rank = min((first_rank(cluster, gpu) for gpu in gpus), key=lambda r: cluster.device(r).peak("float32"))
        found.append(Stage(count, rank))
    return tuple(found)


def first_rank(cluster: Cluster, gpu: str) -> int:
    """The first rank of a mixed cluster on this GPU type."""
    start = 0
    for group in cluster.groups:
        if group.device.name == Cluster.parse(f"{preset_of(gpu)}:1x1").device().name:
            return start
        start += group.num_devices
    raise UnsupportedRowError(f"no {gpu} in the cluster")


def preset_of(gpu: str) -> str:
    """The preset of a GPU name of the rows."""
    for words, preset in DEVICES:
        if gpu.lower().startswith(words.lower()):
            return preset
    raise UnsupportedRowError(f"no device preset for {gpu}")


def cluster_of(record: Mapping[str, Any]) -> Cluster:
    """A row's cluster: the preset's device, the row's links."""
    if "groups" in record:
        groups = tuple(
            _group(g["gpu"], int(g["n_gpus"]), int(g["gpus_per_node"]), g["intra_bw_GBps"], g["inter_bw_GBps"], "measured", True) for g in record["groups"]
        )
        total = sum(g.num_devices for g in groups)
        slowest = min(float(word) for word in _figures(record["inter_note"].partition("Between types")[2]))
        return Cluster("mixed", groups, Tier("gigabit", total, groups[0].devices_per_node, 5e-5, slowest * 1e9, slowest * 1e9))
    group = _group(
        record["gpu"],
        int(record["n_gpus"]),
        int(record["gpus_per_node"]),
        record.get("intra_bw_GBps"),
        record.get("inter_bw_GBps"),
        record.get("inter_note") or "",
        False,
    )
    return Cluster(record["gpu"], (group,))


def _figures(text: str) -> list[str]:
    return [word.strip(".,;") for word in text.split() if word.strip(".,;").replace(".", "", 1).isdigit() and "." in word.strip(".,;")]


def _group(gpu: str, total: int, per_node: int, intra: float | None, inter: float | None, note: str, measured: bool) -> NodeGroup:
    """Links as stated; a node's bandwidth is spread over NICs of at least 12.5 GB/s each."""
    base = Cluster.parse(f"{preset_of(gpu)}:2x{per_node}").groups[0]
    per_node = min(per_node, total)
    inside = base.tiers[0]
    if intra:  # stated a GPU
        inside = replace(inside, shared_by=1)
        inside = replace(inside, bandwidth_bytes_per_s=intra * 1e9, measured_bytes_per_s=intra * 1e9 if measured else None)
    inside = replace(inside, domain=min(per_node, total))
    nodes = -(-total // per_node)
    if nodes == 1:
        return replace(base, num_nodes=1, devices_per_node=per_node, tiers=(inside,))
    outside = base.tiers[-1]
    if inter:
        nics = max(1, min(per_node, int(inter // 12.5)))
        outside = replace(
            outside, shared_by=max(1, per_node // nics), bandwidth_bytes_per_s=inter * 1e9 / nics, measured_bytes_per_s=inter * 1e9 / nics if measured else None
        )
    name = next((name for words, name in NETWORKS if words in note.lower()), outside.name)
    return replace(base, num_nodes=nodes, devices_per_node=per_node, tiers=(inside, replace(outside, name=name, domain=nodes * per_node)))
