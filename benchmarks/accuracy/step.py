"""Step time of a run from block costs: the formulas of the schedule, of overlap and of the tail.

With forward f_j and backward b_j of a micro-batch on stage j (tensor-axis collectives, transfers and recomputation
included), p stages, m micro-batches and v chunks a rank:

    pipeline   m max_j(f_j + b_j) + (1/v) sum_{j not the slowest} (f_j + b_j)               (1F1B, interleaved)
    overlap    compute c beside communication q, of which a share o may hide:
               c beside o q, which slows it (costmodel/overlap.py), + (1 - o) q
    tail       gradient reduction (its share that does not hide behind the last backward), gather of updated parameters,
               optimizer pass, clip and host time of a step
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from benchmarks.accuracy import block
from benchmarks.accuracy.record import Run
from costmodel.calibration import Calibration, DeviceConstants, StackConstants
from costmodel.cluster import Device
from costmodel.collective import collective_s
from costmodel.opkey import Collective, CollectiveKind, OpKey, RankGroup
from costmodel.overlap import beside_s, slowed_s
from costmodel.roofline import item_bytes, op_costs


@lru_cache(maxsize=1 << 18)
def _costs(key: OpKey, device: Device, constants: DeviceConstants, stack: StackConstants) -> tuple[float, int, float, int]:
    forward, backward_input, backward_weight = op_costs(key, device, constants, stack)
    return forward.device_s, forward.kernels, backward_input.device_s + backward_weight.device_s, backward_input.kernels + backward_weight.kernels


@dataclass(frozen=True, slots=True)
class Pass:
    """Device seconds of forward and backward, and their kernels."""

    forward_s: float = 0.0
    forward_kernels: int = 0
    backward_s: float = 0.0
    backward_kernels: int = 0

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            self.forward_s + other.forward_s,
            self.forward_kernels + other.forward_kernels,
            self.backward_s + other.backward_s,
            self.backward_kernels + other.backward_kernels,
        )

    def times(self, factor: float) -> Pass:
        return Pass(self.forward_s * factor, self.forward_kernels, self.backward_s * factor, self.backward_kernels)


@dataclass(frozen=True, slots=True)
class Pricer:
    """Prices of one run under one calibration."""

    run: Run
    calibration: Calibration

    @property
    def stack(self) -> StackConstants:
        return replace(self.calibration.stack(self.run.stack), flash=self.run.flash)

    def ops(self, keys: tuple[OpKey, ...], rank: int) -> Pass:
        device = self.run.cluster.device(rank)
        constants = self.calibration.device(device.name)
        total = Pass()
        for key in keys:
            total += Pass(*_costs(key, device, constants, self.stack))
        return total

    def seconds(self, device_s: float, kernels: int, rank: int) -> float:
        """Launches run ahead of the device, but for the stack's exposed share of the shorter of the two; all of it where they block."""
        host_s = kernels * self.calibration.device(self.run.cluster.device(rank).name).launch_s * self.stack.launch_factor
        exposed = 1.0 if self.run.is_blocking else self.stack.launch_exposed
        return max(device_s, host_s) + exposed * min(device_s, host_s)

    def collective(self, kind: CollectiveKind, num_bytes: float, group: RankGroup) -> float:
        return collective_s(Collective(kind, int(num_bytes), group), self.run.cluster, self.calibration)

    def tensor_group(self, rank: int) -> RankGroup:
        return RankGroup(self.run.tp, 1, rank // self.run.tp * self.run.tp)

    def data_group(self) -> RankGroup:
        run = self.run
        return RankGroup(run.dp * run.cp, run.tp, 0, run.tp)


def overlapped_s(compute_s: float, traffic_s: float, share: float, slowdown: float) -> float:
    """Compute beside traffic of which `share` may hide. Formula: the module's text."""
    hidden = share * traffic_s
    return beside_s(compute_s, hidden, slowdown) + traffic_s - hidden


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one micro-batch on a stage."""

    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step by part."""

    pipeline_s: float
    reduce_s: float
    optimizer_s: float
    host_s: float
    stages: tuple[StageTime, ...]

    @property
    def total_s(self) -> float:
        return self.pipeline_s + self.reduce_s + self.optimizer_s + self.host_s


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer and micro-batch on one rank: products, attention, passes over memory, and the seconds of its tensor-axis collectives."""

    products: Pass
    attention: Pass
    memory: Pass
    forward_tp_s: float
    backward_tp_s: float


Pipeline = Callable[[Pricer], tuple[float, tuple[StageTime, ...]]]  # -> seconds of all micro-batches, and of one on each stage


def step_time(run: Run, calibration: Calibration, pipeline: Pipeline | None = None) -> StepTime:
    """Predicted time of one training step. Formulas: the module's text; `pipeline`: another way to the time of the micro-batches."""
    pricer = Pricer(run, calibration)
    pipeline_s, stages = (pipeline or canonical_pipeline)(pricer)
    reduce_s = _reduce_s(pricer, max(s.backward_s for s in stages))
    return StepTime(pipeline_s, reduce_s, _optimizer_s(pricer), pricer.stack.step_s, stages)


def canonical_pipeline(pricer: Pricer) -> tuple[float, tuple[StageTime, ...]]:
    """From the operators of the canonical block. Formulas: the module's text."""
    run = pricer.run
    layers = {device: _layer(pricer, device) for device in dict.fromkeys(_device_of(run, s.device) for s in run.stages)}
    kinds = {_kind(run, i): i for i in reversed(range(len(run.stages)))}
    times = {kind: _stage(pricer, i, layers[_device_of(run, run.stages[i].device)]) for kind, i in kinds.items()}
    stages = tuple(times[_kind(run, i)] for i in range(len(run.stages)))
    slowest = max(s.total_s for s in stages)
    return run.num_micro * slowest + (sum(s.total_s for s in stages) - slowest) / run.vpp, stages


def _device_of(run: Run, rank: int) -> int:
    """The first rank on the same group of devices: ranks of a group are alike."""
    return run.cluster.group_of(rank)[1]


def _kind(run: Run, index: int) -> tuple[int, int, bool, bool, bool]:
    """What a stage's time depends on: layers, devices, ends of the pipeline, transfers across nodes."""
    stride = run.tp * run.dp * run.cp
    crossing = index + 1 < len(run.stages) and run.cluster.node_of(index * stride) != run.cluster.node_of((index + 1) * stride)
    return run.stages[index].layers, _device_of(run, run.stages[index].device), index == 0, index == len(run.stages) - 1, crossing


def _stage(pricer: Pricer, index: int, layer: tuple[float, float]) -> StageTime:
    run, stage = pricer.run, pricer.run.stages[index]
    rank = _device_of(run, stage.device)
    forward, backward = layer[0] * stage.layers, layer[1] * stage.layers
    ends: tuple[OpKey, ...] = ()
    if index == 0:
        ends += block.embedding(run)
    if index == len(run.stages) - 1:
        ends += block.head(run)
    cost = pricer.ops(ends, rank)
    forward += pricer.seconds(cost.forward_s, cost.forward_kernels, rank)
    backward += pricer.seconds(cost.backward_s, cost.backward_kernels, rank)
    if len(run.stages) > 1:
        transfer = _transfer_s(pricer, index)
        forward, backward = forward + transfer, backward + transfer
    return StageTime(forward, backward)


def _layer(pricer: Pricer, rank: int) -> tuple[float, float]:
    heavy, light = block.layer(pricer.run)
    traffic = _tensor_traffic_s(pricer, rank)
    return layer_s(pricer, rank, LayerCost(pricer.ops(heavy[:-1], rank), pricer.ops(heavy[-1:], rank), pricer.ops(light, rank), *traffic))


def layer_s(pricer: Pricer, rank: int, cost: LayerCost) -> tuple[float, float]:
    """Forward and backward seconds of a layer, with tensor-axis traffic, ZeRO-3 gathers and recomputation."""
    run, stack = pricer.run, pricer.stack
    products, attention, memory = cost.products, cost.attention, cost.memory
    if run.cp > 1:
        attention = attention.times(stack.ring_factor)
    whole = products + attention + memory
    forward_tp, backward_tp = cost.forward_tp_s, cost.backward_tp_s
    again, again_kernels, again_tp = {
        "full": (whole.forward_s, whole.forward_kernels, forward_tp),
        "partial": (whole.forward_s / 2, whole.forward_kernels // 2, forward_tp / 2),
        "selective_layer": (whole.forward_s / 2, whole.forward_kernels // 2, forward_tp / 2),
        "selective": (attention.forward_s, attention.forward_kernels, 0.0),
        "selective_op": (memory.forward_s + products.forward_s / 2, whole.forward_kernels // 2, 0.0),
    }.get(run.recompute, (0.0, 0, 0.0))
    forward = pricer.seconds(whole.forward_s, whole.forward_kernels, rank)
    backward = pricer.seconds(whole.backward_s + again, whole.backward_kernels + again_kernels, rank)
    ring = _ring_s(pricer, rank)
    share = 0.8 if run.async_tp else stack.tensor_overlap
    forward = overlapped_s(forward, forward_tp, share, stack.slowdown) + max(0.0, ring - attention.forward_s)
    backward = overlapped_s(backward, backward_tp + again_tp, share, stack.slowdown) + max(0.0, 2 * ring - attention.backward_s)
    if run.zero >= 3 and run.dp * run.cp > 1 and run.pp == 1:
        size = block.layer_parameters(run)
        gather = _gathered_s(pricer, "all_gather", size * item_bytes(run.dtype))
        scatter = _gathered_s(pricer, "reduce_scatter", size * reduce_bytes(run))
        forward = overlapped_s(forward, gather, stack.gather_overlap, stack.slowdown)
        backward = overlapped_s(backward, gather + scatter, stack.gather_overlap, stack.slowdown)
    return forward, backward


def _gathered_s(pricer: Pricer, kind: CollectiveKind, num_bytes: float) -> float:
    """A ZeRO-3 collective over the data axis, through all ports that the group has or, by the stack (`port_share`), through one of each node."""
    run, group = pricer.run, pricer.data_group()
    seconds = pricer.collective(kind, num_bytes, group)
    tier = run.cluster.tiers_within(group)[-1]
    share = pricer.stack.port_share
    if share and tier is not run.cluster.groups[0].tiers[0]:
        link = pricer.calibration.link(tier.name)
        rate = share * tier.port_bytes_per_s * link.ring_share * (1.0 if tier.measured_bytes_per_s else link.efficiency)
        seconds = max(seconds, (group.size - 1) / group.size * num_bytes / rate)
    return seconds


def sums_whole(run: Run) -> bool:
    """Whether ZeRO-1 sums whole gradients on every rank: DeepSpeed's BF16_Optimizer does, over the fp32 ones that it accumulates."""
    return run.stack == "megatron-deepspeed" and run.dtype == "bfloat16" and run.zero == 1


def reduce_bytes(run: Run) -> int:
    """Bytes an element of the gradient reduction: fp32 for FSDP stacks with fp32 masters, AMP and BF16_Optimizer, else the compute dtype's."""
    if run.pure:
        return item_bytes(run.dtype)
    if sums_whole(run):
        return 4
    return 4 if run.stack in ("llm-foundry", "torchtitan-eager", "torchtitan-compile", "amp", "default") else item_bytes(run.dtype)


def _tensor_traffic_s(pricer: Pricer, rank: int) -> tuple[float, float]:
    run = pricer.run
    if run.tp == 1:
        return 0.0, 0.0
    num_bytes = run.micro_batch * run.model.seq // run.cp * run.model.hidden * item_bytes(run.dtype)
    group = pricer.tensor_group(rank)
    if run.sequence_parallel:
        gather, scatter = pricer.collective("all_gather", num_bytes, group), pricer.collective("reduce_scatter", num_bytes, group)
        return 2 * (gather + scatter), 2 * (gather + scatter) + 2 * gather
    reduce = pricer.collective("all_reduce", num_bytes, group)
    return 2 * reduce, 2 * reduce


def _ring_s(pricer: Pricer, rank: int) -> float:
    """Keys and values once around the context-parallel ring."""
    run = pricer.run
    if run.cp == 1:
        return 0.0
    m = run.model
    part = 2 * run.micro_batch * m.seq // run.cp * max(1, m.kv_heads // run.tp) * (m.hidden // m.heads) * item_bytes(run.dtype)
    return (run.cp - 1) * pricer.collective("send", part, RankGroup(2, run.tp, rank, run.tp))


def _transfer_s(pricer: Pricer, index: int) -> float:
    run = pricer.run
    stride = run.tp * run.dp * run.cp
    num_bytes = run.micro_batch * run.model.seq // run.cp * run.model.hidden * item_bytes(run.dtype)
    if run.sequence_parallel or run.stack != "default":  # scattered and gathered over the tensor axis
        num_bytes /= run.tp
    source = min(index, len(run.stages) - 2) * stride
    return pricer.collective("send", num_bytes, RankGroup(2, stride, min(source, run.cluster.num_devices - stride - 1), stride))


def rank_parameters(run: Run) -> int:
    """Elements of the fullest rank."""
    layers = max(s.layers for s in run.stages)
    tables = 1 if len(run.stages) > 1 or not (run.model.gated and run.model.head) else 2
    return layers * block.layer_parameters(run) + tables * block.vocab_parameters(run)


def _reduce_s(pricer: Pricer, backward_s: float) -> float:
    run, stack = pricer.run, pricer.stack
    ranks = run.dp * run.cp
    total = owners_s = 0.0
    if ranks > 1:
        group, size = pricer.data_group(), rank_parameters(run)
        gradient, parameter = size * reduce_bytes(run), size * item_bytes(run.dtype)
        if run.zero >= 3:  # a pipeline keeps what it has gathered for the step, and reduces at its end
            tables = block.vocab_parameters(run) if run.pp == 1 else size
            total = pricer.collective("reduce_scatter", tables * reduce_bytes(run), group) + pricer.collective(
                "all_gather", tables * item_bytes(run.dtype), group
            )
        elif run.zero == 0 or sums_whole(run):
            total = pricer.collective("all_reduce", gradient, group)
        else:
            total = pricer.collective("reduce_scatter", gradient, group)
            if run.zero_group < ranks:  # states shared in a subgroup: gradients are summed over its replicas
                total = pricer.collective("all_reduce", gradient, group)
        if run.zero in (1, 2):
            shard = RankGroup(min(run.zero_group, ranks), run.tp, 0, run.tp)
            total += pricer.collective("all_gather", parameter, shard)
            owners_s = stack.owner_s * shard.size
        hidden = min(total * stack.gradient_overlap, backward_s)
        total += owners_s - hidden + slowed_s(hidden, stack.slowdown)
    if len(run.stages) > 1 and run.model.head and not run.model.gated:  # tied tables of the first and last stage
        total += pricer.collective(
            "all_reduce", block.vocab_parameters(run) * reduce_bytes(run), RankGroup(2, run.tp * ranks * (run.pp - 1), 0, run.tp * ranks)
        )
    return total


def _optimizer_s(pricer: Pricer) -> float:
    """Adam on fp32 masters: 30 bytes an element; a pass of norm and clip over the gradients."""
    run = pricer.run
    device = run.cluster.device(run.stages[0].device)
    constants = pricer.calibration.device(device.name)
    size = rank_parameters(run)
    owned = size / (min(run.zero_group, run.dp * run.cp) if run.zero >= 1 else 1)
    return (30 * owned + 8 * (owned if run.zero >= 2 else size)) / (device.memory_bytes_per_s * constants.memory_efficiency)
