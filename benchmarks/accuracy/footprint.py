"""Peak memory of a run: states at rest, activations by schedule position, gathered parameters, logits, reserve.

Saved bytes of a layer and micro-batch with r = tokens of the micro-batch on a rank, h hidden, t tensor ranks, e bytes an element
(Korthikanti et al. 2022, section 4, by tensor):

    GPT    r h (4 e + 2) + 12 e r h / t + scores           norm inputs and outputs, dropout masks; q k v, context, feed-forward twice
                                                           (once with ReLU, whose backward pass reads the output that the next product keeps)
    Llama  4 e r h + e r (2 heads d + 2 kv d + 4 ffn) / t      norm inputs and outputs; q k v, context; gate, up, activation, product
    scores (2 e + 1) r s heads / t where attention is not fused: softmax, its dropout and mask; e without dropout

With sequence parallelism the terms in r h are divided by t too. Full recomputation keeps the layer's input, e r h; one layer's saved
bytes come back at a time, when those of the loss are gone: the larger of the two counts. Stage j of p holds min(p - j, m) micro-batches
(1F1B), interleaving adds (p - 1) / v of a stage's chunk; of each it keeps the output as well until the backward pass starts from it.
torch's pipelines keep the last stage's outputs of all micro-batches, and join them at the end of the step.

The peak is of the fullest stage. What a source reports may be another stage's (record.py, `reported_stage`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.accuracy import block
from benchmarks.accuracy.record import DEEPSPEED, UNFUSED, Run
from costmodel.calibration import Calibration
from costmodel.memory import Widths, states
from costmodel.roofline import item_bytes

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one rank by kind. `activations`: kept from forward to backward; `working`: logits and what the loss makes of them, or a layer
    that is computed again. `slack`: held by the allocator beyond what is live; it gives that up before it fails."""

    states: int
    activations: int
    gathered: int
    working: int
    reserve: int
    slack: int

    @property
    def needed(self) -> int:
        return self.states + self.activations + self.gathered + self.working + self.reserve

    @property
    def total(self) -> int:
        return self.needed + self.slack


Saved = Callable[[Run, bool], float]  # bytes that a layer keeps of a micro-batch; with fused attention or without


def footprint(run: Run, calibration: Calibration, saved: Saved | None = None) -> Footprint:
    """Bytes of the fullest stage. Formulas: the module's text; `saved`: another way to what a layer keeps."""
    last = len(run.stages) - 1
    kinds = {(s.layers, s.device): i for i, s in reversed(list(enumerate(run.stages)))}  # the first of each kind holds the most micro-batches
    return max((_stage(run, calibration, i, saved or saved_bytes) for i in sorted({0, last, *kinds.values()})), key=lambda f: f.total)


def reported(run: Run, calibration: Calibration, saved: Saved | None = None) -> Footprint:
    """Bytes of the stage whose memory the run's source reports."""
    if run.reported == "fullest":
        return footprint(run, calibration, saved)
    return _stage(run, calibration, 0 if run.reported == "first" else len(run.stages) - 1, saved or saved_bytes)


def settled(run: Run, calibration: Calibration) -> Run:
    """The run with a recomputation that is not stated decided: none where it fits the device, else full."""
    if run.recompute != "unstated":
        return run
    free = replace(run, recompute="none")
    return free if fits(free, calibration) else replace(run, recompute="full")


def fits(run: Run, calibration: Calibration, saved: Saved | None = None) -> bool:
    """Whether the fullest rank stays within its device's memory, and every stage has something to train (an optimizer of none is refused)."""
    if any(stage.layers == 0 for stage in run.stages[1:-1]):
        return False
    return footprint(run, calibration, saved).needed <= min(g.device.memory_bytes for g in run.cluster.groups)


def widths(run: Run) -> Widths:
    """Bytes an element at rest, by stack and precision.

    Optimizers that cast the gradients of their share to fp32 one by one and then join them (DeepSpeed's ZeRO for fp16, InternEvo's)
    hold 8 bytes more of it, which the allocator does not give back; DeepSpeed's without ZeRO 4. BF16_Optimizer sums unsharded fp32 gradients; 2 bytes more
    a parameter are measured there that no line of its code explains (benchmarks/accuracy/README.md).
    """
    e = item_bytes(run.dtype)
    if run.stack == "sailor":
        return Widths(4, 4, 0, 16)
    if run.dtype == "float32":
        return Widths(4, 4, 0, 8)
    if run.pure:
        return Widths(2, 2, 0, 4)
    if run.stack in ("llm-foundry", "torchtitan-eager", "torchtitan-compile", "xla", "default"):  # fp32 at rest, cast when gathered
        return Widths(4, 4, 0, 8)
    if run.stack in ("megatron-deepspeed", "deepspeed-zero3"):
        return Widths(e, e + 6, 4, 8) if run.dtype == "bfloat16" else Widths(e, e, 4, 16 if run.zero else 12)
    if run.stack == "internevo":
        return Widths(e, e, 4, 16)
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
    return rows * m.hidden * (4 * e + 2 * dropout) / narrow + e * rows * (4 * m.hidden + (1 if m.relu else 2) * m.ffn) / t + scores


def logit_bytes(run: Run) -> int:
    """Bytes a logit at the loss, e those of a logit itself, c = 4 of an fp32 copy where e < 4.

    eager torch                    e + c + 12   the copy's log-softmax and the gradients of both
    torchtitan                     14       the logits are dropped before the backward pass: log-softmax, gradients of it and of the copy, of the logits
    torchtitan, vocabulary split   20       the parallel loss makes three more temporaries, and drops two at once
    Megatron                       e + c + 4        the copy, and a second one that becomes the softmax; with DeepSpeed's pipeline e more: it keeps
                                            the outputs of the micro-batch before
    InternEvo                      e + c        in place on the copy
    compiled loss                  2 e      logits and their gradient; llm-foundry's fused loss alike
    """
    e = item_bytes(run.dtype)
    copied = 4 if e < 4 else 0
    if run.compiled_loss or run.stack.startswith("llm-foundry"):
        return 2 * e
    if run.stack.startswith("torchtitan"):
        return 14 if run.tp == 1 else 20
    if run.stack == "internevo":
        return e + copied
    if run.stack in UNFUSED or run.stack == "xla":
        return (2 if run.stack in DEEPSPEED else 1) * e + copied + 4
    return e + copied + 12


def _stage(run: Run, calibration: Calibration, index: int, saved: Saved) -> Footprint:
    stack, stage = calibration.stack(run.stack), run.stages[index]
    m, e, last = run.model, item_bytes(run.dtype), len(run.stages) - 1
    ranks = run.dp * run.cp
    tables = (index == 0) + (index == last and m.head and (last > 0 or m.gated))
    size = stage.layers * block.layer_parameters(run) + tables * block.vocab_parameters(run)
    rest = states(size, widths(run), run.zero, min(run.zero_group, ranks))
    rows = run.micro_batch * m.seq // run.cp
    inputs = e * rows * m.hidden / (run.tp if run.sequence_parallel else 1)
    layer = saved(run, run.flash)
    kept, working = {
        "full": (inputs, layer),
        "partial": ((inputs + layer) / 2, layer),
        "selective_layer": ((inputs + layer) / 2, layer),
        "selective": (saved(run, True), layer - saved(run, True)),
        "selective_op": (0.35 * layer, 0.65 * layer),  # every second product, the attention's output, the layer's input
    }.get(run.recompute, (layer, 0.0))
    held = min(len(run.stages) - index, run.num_micro) if last else 1
    depth = held + (len(run.stages) - 1) / run.vpp * (run.vpp > 1)
    activations = (kept * stage.layers + (inputs if index < last else 0)) * depth
    gathered = 0.0
    if run.zero >= 3 and ranks > 1:
        gathered = block.layer_parameters(run) * (2 * e + 4) + block.vocab_parameters(run) * e
        if run.pp > 1:  # kept for the step, with gradients that micro-batches add up in
            gathered = size * (e + (2 if run.pure else 4))
    logits: float = rows * block.padded_vocab(m, run.tp) / run.tp * logit_bytes(run) if index == last and m.head else 0.0
    if last and index == last and m.head and run.stack.startswith("torchtitan"):
        logits += 2 * e * run.num_micro * rows * block.padded_vocab(m, run.tp) / run.tp
    device = calibration.device(run.cluster.device(stage.device).name)
    context = 0 if run.stack.startswith("torchtitan") else device.reserve_bytes  # allocator statistics leave the context out
    live = Footprint(rest.total, int(activations), int(gathered), int(max(logits, working)), int(context + stack.reserve_bytes), 0)
    free = run.cluster.device(stage.device).memory_bytes - live.needed
    return replace(live, slack=max(0, min(int(stack.slack * (activations + live.working)), free)))
