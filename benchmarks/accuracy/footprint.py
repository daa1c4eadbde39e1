"""Peak memory of a run: states at rest, activations by schedule position, gathered parameters, logits, reserve.

Saved bytes of a layer and micro-batch with r = tokens of the micro-batch on a rank, h hidden, t tensor ranks, e bytes an element
(Korthikanti et al. 2022, section 4, by tensor):

    GPT    r h (4 e + 2) + 12 e r h / t + scores           norm inputs and outputs, dropout masks; q k v, context, feed-forward twice
    Llama  4 e r h + e r (2 heads d + 2 kv d + 4 ffn) / t      norm inputs and outputs; q k v, context; gate, up, activation, product
    scores (2 e + 1) r s heads / t where attention is not fused: softmax, its dropout and mask; e without dropout

With sequence parallelism the terms in r h are divided by t too. Full recomputation keeps the layer's input, e r h, and one layer's
saved bytes at a time. Stage j of p holds min(p - j, m) micro-batches (1F1B), interleaving adds (p - 1) / v of a stage's chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.accuracy import block
from benchmarks.accuracy.record import Run
from costmodel.calibration import Calibration
from costmodel.memory import Widths, states
from costmodel.roofline import item_bytes

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of the fullest rank by kind. `slack`: held by the allocator beyond what is live; it gives that up before it fails."""

    states: int
    activations: int
    gathered: int
    logits: int
    reserve: int
    slack: int

    @property
    def needed(self) -> int:
        return self.states + self.activations + self.gathered + self.logits + self.reserve

    @property
    def total(self) -> int:
        return self.needed + self.slack


def footprint(run: Run, calibration: Calibration) -> Footprint:
    """Bytes of the fullest stage. Formulas: the module's text."""
    last = len(run.stages) - 1
    return max((_stage(run, calibration, i) for i in sorted({0, min(1, last), last})), key=lambda f: f.total)


def settled(run: Run, calibration: Calibration) -> Run:
    """The run with a recomputation that is not stated decided: none where it fits the device, else full."""
    if run.recompute != "unstated":
        return run
    free = replace(run, recompute="none")
    return free if fits(free, calibration) else replace(run, recompute="full")


def fits(run: Run, calibration: Calibration) -> bool:
    """Whether the fullest rank stays within its device's memory."""
    return footprint(run, calibration).needed <= min(g.device.memory_bytes for g in run.cluster.groups)


def widths(run: Run) -> Widths:
    """Bytes an element at rest, by stack and precision."""
    e = item_bytes(run.dtype)
    if run.stack == "sailor":  # DeepSpeed keeps an fp32 copy of the partition's gradients and a flat temporary of its own
        return Widths(4, 4, 0, 16)
    if run.dtype == "float32":
        return Widths(4, 4, 0, 8)
    if run.pure:
        return Widths(2, 2, 0, 4)
    if run.stack in ("llm-foundry", "torchtitan-eager", "torchtitan-compile", "xla", "default"):  # fp32 at rest, cast when gathered
        return Widths(4, 4, 0, 8)
    if run.stack in ("megatron-deepspeed", "deepspeed-zero3"):
        # fp32 copy and temporary as above; BF16_Optimizer accumulates unsharded fp32 gradients instead
        if run.dtype == "bfloat16":
            return Widths(e, e + 4, 4, 8)
        return Widths(e, e, 4, 16 if run.zero else 12)
    if run.stack == "internevo":
        return Widths(e, e, 4, 12)
    return Widths(e, 4 if run.stack in ("megatron-lm", "amp") else e, 4, 8)


def saved_bytes(run: Run, flash: bool) -> float:
    """Bytes that the backward pass of one layer keeps of one micro-batch. Formulas: the module's text."""
    m, t, e = run.model, run.tp, item_bytes(run.dtype)
    rows = run.micro_batch * m.seq // run.cp
    narrow = t if run.sequence_parallel else 1
    d = m.hidden // m.heads
    dropout = not run.stack.startswith(("llm-foundry", "sailor"))
    scores = 0.0 if flash else ((2 * e + 1) if dropout else e) * rows * m.seq * m.heads / t
    if m.gated:
        return 4 * e * rows * m.hidden / narrow + e * rows * (2 * m.heads * d + 2 * m.kv_heads * d + 4 * m.ffn) / t
    return rows * m.hidden * (4 * e + 2 * dropout) / narrow + e * rows * (4 * m.hidden + 2 * m.ffn) / t + scores


def logit_bytes(run: Run) -> int:
    """Bytes a logit at the loss: the logits, their fp32 copy, its softmax, and the gradients of both in eager torch; the fused losses
    of the other stacks work in place."""
    e = item_bytes(run.dtype)
    if run.stack in ("torchtitan-eager", "default"):
        return 2 * e + 12
    if run.stack.startswith("llm-foundry"):
        return 2 * e
    return e + 4 if run.stack in ("megatron-deepspeed", "megatron-lm", "deepspeed-zero3") else e + 8


def _stage(run: Run, calibration: Calibration, index: int) -> Footprint:
    stack, stage = calibration.stack(run.stack), run.stages[index]
    m, e, last = run.model, item_bytes(run.dtype), len(run.stages) - 1
    ranks = run.dp * run.cp
    tables = (index == 0) + (index == last and m.head and (last > 0 or m.gated))
    size = stage.layers * block.layer_parameters(run) + tables * block.vocab_parameters(run)
    rest = states(size, widths(run), run.zero, min(run.zero_group, ranks))
    rows = run.micro_batch * m.seq // run.cp
    inputs = e * rows * m.hidden / (run.tp if run.sequence_parallel else 1)
    layer = saved_bytes(run, run.flash)
    kept, working = {
        "full": (inputs, layer),
        "partial": ((inputs + layer) / 2, layer),
        "selective_layer": ((inputs + layer) / 2, layer),
        "selective": (saved_bytes(run, flash=True), layer - saved_bytes(run, flash=True)),
        "selective_op": (0.35 * layer, 0.65 * layer),  # every second product, the attention's output, the layer's input
    }.get(run.recompute, (layer, 0.0))
    held = min(len(run.stages) - index, run.num_micro) if last else 1
    depth = held + (len(run.stages) - 1) / run.vpp * (run.vpp > 1)
    activations = kept * stage.layers * depth + working
    gathered = 0.0
    if run.zero >= 3 and ranks > 1:
        gathered = block.layer_parameters(run) * (2 * e + 4) + block.vocab_parameters(run) * e
        if run.pp > 1:  # kept for the step, with gradients that micro-batches add up in
            gathered = size * (e + (2 if run.pure else 4))
    logits = rows * block.padded_vocab(m, run.tp) / run.tp * logit_bytes(run) if index == last and m.head else 0.0
    device = calibration.device(run.cluster.device(stage.device).name)
    context = 0 if run.stack.startswith("torchtitan") else device.reserve_bytes  # allocator statistics leave the context out
    return Footprint(rest.total, int(activations), int(gathered), int(logits), context + stack.reserve_bytes, int(stack.slack * activations))
