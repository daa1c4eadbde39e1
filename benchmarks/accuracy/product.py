"""A run through the product itself: model on meta, capture, fixed plan, forecast by replay.

The model is a decoder as training stacks write it (models.py), captured once for each size. The plan is the row's; how operators
and weights are laid out over its tensor axis is the planner's own choice among those that divide the weights (autoplan/choose.py), stages
send what the planner would send (autoplan/transit.py), and the schedule is the executor's, replayed event by event (autoplan/replay.py).
Blocks are priced once for each layout and number of rows, whatever the rest of the plan.

The software of the rows is not ours. What a stack does its own way is a property of it:

    fuses and launches      each operator's device seconds and kernels at the stack's constants; a layer takes the larger of both (step.py)
    keeps                   fused norms keep their input alone, dropout its mask, attention that is not fused the weights besides (footprint.py)
    waits                   a stage waits for what it sends (Megatron's and DeepSpeed's pipelines do)
    gathers again           sequence-parallel stacks keep what lies split and gather it again in the backward pass
    hides                   overlap, gradient reduction, optimizer and host time of a step (step.py)
    computes products in    8-bit or TF32 beside the dtype of activations
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from autoplan import AutoplanError, Constraints, capture
from autoplan.blockprices import storage_roots
from autoplan.choose import Chooser, Chosen
from autoplan.graph import Graph, Option
from autoplan.layout import Split
from autoplan.price import LocalGraph, Pricer, axis_group
from autoplan.problem import Price
from autoplan.replay import Durations, send_s, step_seconds
from autoplan.shapebounds import ShapeBounds
from autoplan.space import Shape, Storing
from autoplan.stagework import Work
from autoplan.task import Task
from autoplan.transit import gather_s
from benchmarks.accuracy import footprint
from benchmarks.accuracy.block import padded_vocab
from benchmarks.accuracy.models import Decoder
from benchmarks.accuracy.record import Model, Run, UnsupportedRowError
from benchmarks.accuracy.step import LayerCost, Pass, StageTime, layer_s, overlapped_s, step_time
from benchmarks.accuracy.step import Pricer as StackPricer
from costmodel.analytic import AnalyticPrices
from costmodel.calibration import Calibration
from costmodel.opclass import op_class
from costmodel.opkey import Collective, OpKey, OpTime
from costmodel.roofline import Cost, item_bytes, op_costs

_ROWS = 128 * 105  # of the captured batch: a multiple of most micro-batches, so that a model is captured once
_MANY_CHUNKS = 4
_DIVIDED = 4.0  # how much more than its time a layer's weights weigh where they are whole on the tensor axis: the row says that they are divided


def predicted(run: Run, calibration: Calibration) -> dict[str, float | bool]:
    """Seconds of a step, GiB of the reported rank and whether the run fits. UnsupportedRowError for what the planner does not offer."""
    try:
        product = Product(run, calibration)
        saved = product.saved_bytes
        return {
            "iteration_s": step_time(run, calibration, product.pipeline).total_s,
            "peak_mem_GiB": footprint.reported(run, calibration, saved).total / 2**30,
            "fits": footprint.fits(run, calibration, saved),
        }
    except AutoplanError as error:
        raise UnsupportedRowError(f"the planner refuses: {error}") from error


@lru_cache(maxsize=256)
def captured(model: Model, vocab: int, dtype: str, rows: int) -> Graph:
    """The captured graph of one training step over `rows` rows; nothing is allocated."""
    with torch.device("meta"):
        made = Decoder(model, vocab).to(getattr(torch, dtype))
        tokens = torch.zeros(rows, model.seq, dtype=torch.long)
    return capture(made, {"ids": tokens, "labels": tokens.clone()})


@dataclass(frozen=True)
class StackPrices:
    """Prices of a run's stack as the device of global rank `rank` sees them: device seconds, launches left to whoever adds operators up."""

    run: Run
    calibration: Calibration
    rank: int
    analytic: AnalyticPrices
    source: str = "analytic"

    def op(self, key: OpKey, device: int = 0) -> OpTime:
        forward, backward_input, backward_weight = self.costs(key)
        return OpTime(forward.device_s, backward_input.device_s, backward_weight.device_s)

    def costs(self, key: OpKey) -> tuple[Cost, Cost, Cost]:
        """Device seconds and kernels of an operator's passes."""
        run, device = self.run, self.run.cluster.device(self.rank)
        stack = replace(self.calibration.stack(run.stack), flash=run.flash)
        constants = self.calibration.device(device.name)
        is_product = key.target == "aten.linear.default" and run.gemm_dtype != run.dtype
        if not is_product or (run.gemm_dtype == "float8" and max(key.operands[1][0]) == self.vocab):
            return op_costs(key, device, constants, stack)
        cast = tuple((shape, run.gemm_dtype) for shape, _ in key.operands)
        costs = op_costs(replace(key, operands=cast), device, constants, stack)
        if run.gemm_dtype != "float8":
            return costs
        quantised = OpKey("aten.to.dtype", key.operands[:1], key.operands[:1], "", (True,), 0)
        forward, backward_input, backward_weight = op_costs(quantised, device, constants, stack)
        return costs[0] + forward, costs[1] + backward_input, costs[2] + backward_weight

    @property
    def vocab(self) -> int:
        """The longer side of the head's weight on one rank."""
        return padded_vocab(self.run.model, self.run.tp) // self.run.tp

    def collective(self, collective: Collective) -> float:
        group = collective.group
        return self.analytic.collective(replace(collective, group=replace(group, start=group.start + self.rank // self.run.tp * self.run.tp)))

    def optimizer_s(self, num_elements: int, optimizer: str, num_bytes_per_element: float, device: int = 0) -> float:
        return self.analytic.optimizer_s(num_elements, optimizer, num_bytes_per_element, self.rank)

    def memory_limit_bytes(self, device: int = 0) -> int:
        return 1 << 62  # what fits is asked of the footprint

    def peak_flops_per_s(self, dtype: str, device: int = 0) -> float:
        return self.analytic.peak_flops_per_s(dtype, self.rank)

    def assumptions(self) -> tuple[str, ...]:
        return self.analytic.assumptions()


@dataclass(frozen=True)
class BlockCost:
    """One block of a pattern on one rank: its passes, and what it keeps of a micro-batch with fused attention; `scores` besides without."""

    cost: LayerCost
    saved_bytes: int
    scores_bytes: int


class Product:
    """The planner's blocks for one run."""

    def __init__(self, run: Run, calibration: Calibration) -> None:
        self.run, self.calibration = run, calibration
        rows = _ROWS if _ROWS % run.micro_batch == 0 else 2 * run.micro_batch
        self.graph = captured(run.model, padded_vocab(run.model, run.tp), run.dtype, rows)
        layers = sum(block.layer for block in self.graph.blocks)
        if layers != run.model.layers:
            raise UnsupportedRowError(f"{layers} layers were found in a model of {run.model.layers}")
        self._found: dict[int, tuple[ShapeBounds, Chooser, Chosen]] = {}

    @property
    def shape(self) -> Shape:
        run = self.run
        chunks = _chunks(run)
        schedule = "interleaved" if chunks > 1 else "1f1b"
        context = "ring" if run.cp > 1 else ""
        return Shape(run.pp, run.dp, run.tp, run.micro_batch, run.num_micro, schedule, cp=run.cp, context=context, num_chunks=chunks)

    def chosen(self, rank: int) -> tuple[ShapeBounds, Chooser, Chosen]:
        """The layout of every pattern on the device of a rank."""
        if rank not in self._found:
            run, shape = self.run, self.shape
            prices = StackPrices(run, self.calibration, rank, AnalyticPrices(run.cluster, self.calibration, run.stack))
            asked = Constraints(sequence_parallel=run.sequence_parallel if run.tp > 1 else None)
            bounds = ShapeBounds(Task(self.graph, run.cluster, prices, asked, "adamw", None, None))
            chooser, price = self._chooser(bounds)
            found = [chosen for b in bounds.boundaries(shape) if (chosen := chooser.choose(b, price)) is not None]
            if not found:
                raise UnsupportedRowError(f"tensor parallelism {run.tp} cannot divide this model")
            counts = bounds.outline.counts
            best = min(found, key=lambda chosen: sum(counts[p] * solution.objective_s for p, solution in chosen.solutions.items()))
            self._found[rank] = bounds, chooser, best
        return self._found[rank]

    def _chooser(self, bounds: ShapeBounds) -> tuple[Chooser, Price]:
        """Of layouts at a price at which weights that are whole on the tensor axis cost more than they can save."""
        shape, outline = self.shape, bounds.outline
        pattern = next(block.pattern for block in self.graph.blocks if block.layer)
        boundary = bounds.boundaries(shape)[0]
        split = frozenset(b.factor for b in outline.boundaries(shape.tp, None) if b.factor is not None)
        forbidden = split if shape.tp > 1 and not self.run.sequence_parallel else frozenset()

        def chooser(price: Price) -> Chooser:
            return Chooser(outline, shape.rows, shape.tensor, bounds.pricer, forbidden, price, contexts=bounds.contexts.local(shape))

        problem = chooser(Price(1, 0.0)).problem(pattern, boundary)
        seconds = sum(min(choice.seconds for choice in item.choices) for item in problem.items)
        price = Price(1, _DIVIDED * seconds / sum(weight.num_bytes for weight in problem.weights.values()))
        return chooser(price), price

    def block(self, pattern: str, rank: int) -> BlockCost:
        """The costs of a pattern's blocks on the device of a rank."""
        bounds, chooser, chosen = self.chosen(rank)
        return _block_cost(self.run, bounds, chooser, chosen, pattern)

    def saved_bytes(self, run: Run, flash: bool) -> float:
        """What a layer keeps of one micro-batch."""
        found = self.block(next(block.pattern for block in self.graph.blocks if block.layer), run.stages[0].device)
        return float(found.saved_bytes + (0 if flash else found.scores_bytes))

    # -- time ---------------------------------------------------------------------------------------------------------

    def pipeline(self, pricer: StackPricer) -> tuple[float, tuple[StageTime, ...]]:
        """Seconds of all micro-batches by replay, and of one on every stage."""
        run, shape = self.run, self.shape
        starts, devices = self._starts()
        first, (bounds, chooser, chosen) = self.graph.blocks, self.chosen(devices[0])
        seconds = {d: {p: self._block_s(pricer, p, d) for p in bounds.outline.examples} for d in dict.fromkeys(devices)}
        step = bounds.step(shape, Storing(0, "none"))
        work = Work(bounds.outline, chooser.local, chosen, "none", step)
        loads = work.stage_loads(starts, shape.stage_ranks)
        links = Pricer(AnalyticPrices(run.cluster, self.calibration, run.stack), None)
        own = [[seconds[d][first[n].pattern] for n in range(a, b)] for d, (a, b) in zip(devices, itertools.pairwise(starts), strict=True)]
        forward, backward = [sum(f for f, _ in stage) for stage in own], [sum(b for _, b in stage) for stage in own]
        for src, send in ((load.index, send) for load in loads for send in load.sends):
            gathered_s = gather_s(bounds.pricer, step, send.gathered_bytes) if send.gathered_bytes else 0.0
            sent_s = send_s(links, step, src, send.dst, send.num_bytes)
            forward[src], forward[send.dst] = forward[src] + sent_s, forward[send.dst] + gathered_s
            if send.grad:
                backward[send.dst], backward[src] = backward[send.dst] + sent_s, backward[src] + gathered_s
        waited = tuple(replace(load, sends=tuple(replace(send, num_bytes=0) for send in load.sends)) for load in loads)
        times = tuple(Durations(f, f, b, b, ()) for f, b in zip(forward, backward, strict=True))
        totals = [StageTime(0.0, 0.0)] * run.pp
        for rank, time in zip(shape.stage_ranks, times, strict=True):
            totals[rank] = StageTime(totals[rank].forward_s + time.forward_s, totals[rank].backward_s + time.backward_s)
        return step_seconds(waited, times, step, links)[0], tuple(totals)

    def _starts(self) -> tuple[tuple[int, ...], list[int]]:
        """First block of every stage and the number of blocks; the device rank of every stage."""
        run, shape = self.run, self.shape
        counts = [0] * len(shape.stage_ranks)
        for stage, rank in enumerate(shape.stage_ranks):
            whole, more = divmod(run.stages[rank].layers, shape.num_chunks)
            counts[stage] = whole + (stage // run.pp < more)
        where = [number for number, block in enumerate(self.graph.blocks) if block.layer]
        ends = [sum(counts[: stage + 1]) for stage in range(len(counts) - 1)]
        starts = (0, *(where[end] if end < len(where) else where[-1] + 1 for end in ends), len(self.graph.blocks))
        if any(a >= b for a, b in itertools.pairwise(starts)):
            raise UnsupportedRowError(f"stages of {counts} layers leave one without work")
        return starts, [_kind(run, run.stages[rank].device) for rank in shape.stage_ranks]

    def _block_s(self, pricer: StackPricer, pattern: str, rank: int) -> tuple[float, float]:
        """Forward and backward seconds of a micro-batch: of a layer as the stack runs it, of what is no layer without recomputation."""
        cost = self.block(pattern, rank).cost
        if any(block.layer and block.pattern == pattern for block in self.graph.blocks):
            return layer_s(pricer, rank, cost)
        whole, stack = cost.products + cost.attention + cost.memory, pricer.stack
        forward = pricer.seconds(whole.forward_s, whole.forward_kernels, rank)
        backward = pricer.seconds(whole.backward_s, whole.backward_kernels, rank)
        return (
            overlapped_s(forward, cost.forward_tp_s, stack.tensor_overlap, stack.slowdown),
            overlapped_s(backward, cost.backward_tp_s, stack.tensor_overlap, stack.slowdown),
        )


def _chunks(run: Run) -> int:
    """Stages on a rank: as the run says, or the next larger number by which its layers divide; as the run says where there is none up to _MANY_CHUNKS."""
    layers = [stage.layers for stage in run.stages]
    if run.pp == 1 or run.vpp == 1 or min(layers) < run.vpp:
        return 1
    even = [v for v in range(run.vpp, max(run.vpp, _MANY_CHUNKS) + 1) if all(count % v == 0 for count in layers)]
    return even[0] if even else run.vpp


def _kind(run: Run, rank: int) -> int:
    """The first rank on the same group of devices: ranks of a group are alike."""
    return run.cluster.group_of(rank)[1]


def _block_cost(run: Run, bounds: ShapeBounds, chooser: Chooser, chosen: Chosen, pattern: str) -> BlockCost:
    graph, local, point = bounds.task.graph, chooser.local, chosen.point(pattern)
    block = graph.blocks[bounds.outline.examples[pattern]]
    prices = bounds.task.prices
    assert isinstance(prices, StackPrices)
    kernels = LocalGraph(
        graph,
        local.batch_options,
        local.batch_layouts,
        local.rows,
        local.degree,
        Pricer(_Kernels(prices.run, prices.calibration, prices.rank, prices.analytic), None),
        local.grid,
        local.contexts,
    )
    parts = {"gemm": Pass(), "attention": Pass(), "memory": Pass()}
    kept = _Kept(run, graph, local, storage_roots(graph, block.start, block.stop))
    device = [0.0, 0.0]
    for index, label in zip(bounds.outline.indices(block), point.labels, strict=True):
        op = graph.ops[index]
        option = next(option for option in chooser.prices.options(index) if option.label == label)
        time, count = local.op_time(index, option), kernels.op_time(index, option)
        passes = any(graph.values[name].requires_grad for name in op.outputs)
        found = Pass(time.forward_s, round(count.forward_s), time.backward_s if passes else 0.0, round(count.backward_s) if passes else 0)
        kind = op_class(op.instr.target)
        part = kind if kind in ("gemm", "attention") else "memory"
        parts[part] = parts[part] + found
        device[0], device[1] = device[0] + found.forward_s, device[1] + found.backward_s
        if passes:
            kept.add(index, option, kind)
    again_s = 0.0
    if run.sequence_parallel and run.tp > 1:
        group = axis_group(local.grid, "tp")
        again_s = sum(bounds.pricer.collective("all_gather", size, group) for size in kept.gathered.values())
    cost = LayerCost(
        parts["gemm"], parts["attention"], parts["memory"], max(0.0, point.forward_s - device[0]), max(0.0, point.backward_s - device[1]) + again_s
    )
    return BlockCost(cost, kept.num_bytes, kept.scores_bytes)


class _Kernels(StackPrices):
    """Kernels of an operator in the place of seconds."""

    def op(self, key: OpKey, device: int = 0) -> OpTime:
        return OpTime(*(float(cost.kernels) for cost in self.costs(key)))


class _Kept:
    """What a block keeps for its backward pass, as fused kernels do."""

    def __init__(self, run: Run, graph: Graph, local: LocalGraph, roots: Mapping[str, str]) -> None:
        self.run, self.graph, self.local, self.roots = run, graph, local, roots
        self.layouts: dict[str, object] = {}  # how values lie where they are made
        self.saved: dict[str, int] = {}
        self.gathered: dict[str, int] = {}  # kept split, read whole
        self.masks_bytes = self.scores_bytes = 0

    def add(self, index: int, option: Option, kind: str) -> None:
        """One operator under an option."""
        op, operands = self.graph.ops[index], self.local.operands(index)
        self.layouts.update(zip(op.outputs, option.writes, strict=True))
        name = op.instr.target.split(".")[1]
        names = op.saved
        if name in ("layer_norm", "rms_norm"):
            names = operands[:1]
        elif kind == "attention":
            names = (*operands[:3], *op.outputs)
            e, dropout = item_bytes(self.run.dtype), self._has_dropout
            queries = self.graph.values[operands[0]].spec.shape
            scores = math.prod(queries[:-1]) * self.graph.values[operands[1]].spec.shape[-2]
            self.scores_bytes += (2 * e + 1 if dropout else e) * scores // self.local.share(index, option)
        elif name == "dropout":
            names = ()
            self.masks_bytes += op.saved_extra_bytes // self.local.share(index, option) if self._has_dropout else 0
        elif name == "cross_entropy_loss":
            names = ()  # the loss is the stack's own
        for value in names:
            root = self.roots.get(value, value)
            if self.graph.values[root].kind != "activation":
                continue
            layout = option.reads[operands.index(value)] if value in operands else option.writes[op.outputs.index(value)]
            size, parts = self.local.num_bytes(root), self.local.degree
            lies_split = isinstance(self.layouts.get(value), Split)
            if self.run.sequence_parallel and lies_split and not isinstance(layout, Split):
                self.gathered[root] = size
            self.saved[root] = max(self.saved.get(root, 0), size // parts if isinstance(layout, Split) or root in self.gathered else size)

    @property
    def _has_dropout(self) -> bool:
        return not self.run.model.gated and not self.run.stack.startswith(("llm-foundry", "sailor"))

    @property
    def num_bytes(self) -> int:
        return sum(self.saved.values()) + self.masks_bytes
