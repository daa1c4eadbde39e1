"""A made-up plan in the true form: a small Llama on two data ranks, two tensor ranks and four stages under 1F1B."""

from __future__ import annotations

from autoplan.forecast import CollectiveUse, Event, Forecast, Measured, Memory, StageForecast
from autoplan.plan import Alternative, BlockPlan, OpNote, Plan, StagePlan
from runtime.schedule import schedule

FORWARD_S, BACKWARD_S, SEND_S = 0.011, 0.021, 0.001
STAGES, MICRO_BATCHES, LAYERS = 4, 8, 8
GIB = 2**30


def events(stretch: float = 1.0) -> tuple[Event, ...]:
    """1F1B replayed: an action starts when its rank is free and its inputs have arrived."""
    size = {"F": FORWARD_S * stretch, "B": BACKWARD_S * stretch}
    queues = [list(actions) for actions in schedule("1f1b", tuple(range(STAGES)), MICRO_BATCHES)]
    free_s, ended, found = [0.0] * STAGES, {}, []
    while any(queues):
        for s, queue in enumerate(queues):
            if not queue:
                continue
            action = queue[0]
            source = (action.kind, s - 1 if action.kind == "F" else s + 1, action.micro_batch)
            if 0 <= source[1] < STAGES and source not in ended:
                continue
            queue.pop(0)
            start_s = max(free_s[s], ended.get(source, 0.0) + (SEND_S if source in ended else 0.0))
            end_s = start_s + size[action.kind] * (1.15 if s == STAGES - 1 else 1.0)
            kind = "forward" if action.kind == "F" else "backward"
            rank = s * 4
            found.append(Event(rank, "compute", f"{action.kind} {s}.{action.micro_batch}", kind, start_s, end_s, s, action.micro_batch))
            third_s = (end_s - start_s) / 3
            found += [
                Event(rank, "tp", "all_reduce", "collective", start_s + k * third_s, start_s + (k + 0.3) * third_s, s, action.micro_batch) for k in (1, 2)
            ]
            if source in ended:
                found.append(Event(rank, "pp", f"recv {action.kind} {s}.{action.micro_batch}", "transfer", start_s - SEND_S, start_s, s, action.micro_batch))
            ended[(action.kind, s, action.micro_batch)] = free_s[s] = end_s
    for s in range(STAGES):
        found.append(Event(s * 4, "dp", "reduce gradients", "reduce", free_s[s], free_s[s] + 0.012, s))
        found.append(Event(s * 4, "compute", "optimizer", "optimizer", free_s[s] + 0.012, free_s[s] + 0.018, s))
    return tuple(found)


def _note(name: str, target: str, module: str, flops: int, split: str) -> OpNote:
    return OpNote(name, target, module, flops, split)


LAYER = (
    _note("rms_norm", "rms_norm", "input_layernorm", 10**7, "sequence"),
    _note("linear", "linear", "self_attn.q_proj", 10**12, "heads"),
    _note("linear_1", "linear", "self_attn.k_proj", 10**11, "heads"),
    _note("linear_2", "linear", "self_attn.v_proj", 10**11, "heads"),
    _note("mul", "mul", "self_attn", 10**7, "heads"),
    _note("sdpa", "scaled_dot_product_attention", "self_attn", 10**12, "heads"),
    _note("linear_3", "linear", "self_attn.o_proj", 10**12, "heads (sum)"),
    _note("add", "add", "", 10**6, "sequence"),
    _note("rms_norm_1", "rms_norm", "post_attention_layernorm", 10**7, "sequence"),
    _note("linear_4", "linear", "mlp.gate_proj", 3 * 10**12, "features"),
    _note("silu", "silu", "mlp.act_fn", 10**7, "features"),
    _note("linear_5", "linear", "mlp.up_proj", 3 * 10**12, "features"),
    _note("mul_1", "mul", "mlp", 10**7, "features"),
    _note("linear_6", "linear", "mlp.down_proj", 3 * 10**12, "features (sum)"),
    _note("add_1", "add", "", 10**6, "partial"),
)


def sample_plan() -> Plan:
    names = ["prologue", *(f"model.layers.{i}" for i in range(LAYERS)), "epilogue"]
    bounds = [(0, 3), (3, 5), (5, 7), (7, 10)]
    shown = events()
    stages = tuple(
        StageForecast(
            s, names[a], names[b - 1], FORWARD_S, BACKWARD_S, 0.27, 0.09, 4 * 10**14,
            Memory(9 * GIB, 9 * GIB, 18 * GIB, (20 - 4 * s) * GIB, GIB // 4, GIB, 2 * GIB), 79 * GIB,
        )
        for s, (a, b) in enumerate(bounds)
    )  # fmt: skip
    step_s = max(e.end_s for e in shown)
    forecast = Forecast(
        step_time_s=step_s,
        peak_memory_bytes=max(s.memory.total for s in stages),
        tokens_per_s=64 * 8192 / step_s,
        mfu=0.412,
        bubble=0.21,
        split_share=0.987,
        stages=stages,
        collectives=(
            CollectiveUse("all_reduce", "tp", "forward", 8 * 2**29, 64),
            CollectiveUse("all_reduce", "tp", "backward", 8 * 2**29, 64),
            CollectiveUse("send", "pp", "forward", 2**28, 8),
            CollectiveUse("reduce_scatter", "dp", "reduce", 9 * GIB, 1),
        ),
        events=shown,
        source="analytic",
        assumptions=("matrix products reach at most 80 % of the peak", "NVLink carries 450 GB/s a direction"),
    )
    return Plan(
        model="llama3-8b", model_fingerprint="0f" * 32, cluster="h100-sxm-80gb:2x8", cluster_fingerprint="1e" * 32, global_batch=64, micro_batch_size=4,
        num_micro_batches=MICRO_BATCHES, axes=(("pp", STAGES), ("dp", 2), ("tp", 2)), zero=1, zero_group=None, schedule="1f1b", num_chunks=1, precision="bf16",
        optimizer="adamw", stages=tuple(StagePlan(a, b, names[a], names[b - 1], s) for s, (a, b) in enumerate(bounds)),
        blocks=(
            BlockPlan("p", "prologue", {"embedding": "v"}, {}, blocks=(0,), ops=(_note("embedding", "embedding", "embed_tokens", 10**6, "vocabulary (sum)"),)),
            BlockPlan("l", "model.layers.0", {op.name: "n" for op in LAYER if op.split != "whole"}, {}, blocks=tuple(range(1, 9)), ops=LAYER),
            BlockPlan("e", "epilogue", {"linear": "n"}, {}, blocks=(9,), ops=(
                _note("rms_norm", "rms_norm", "norm", 10**7, "whole"), _note("linear", "linear", "lm_head", 10**13, "vocabulary"),
                _note("cross_entropy", "cross_entropy", "loss", 10**8, "vocabulary"),
            )),
        ),
        forecast=forecast, gap=0.013,
        space={"pp": (1, 2, 4, 8), "dp": (1, 2, 4, 8, 16), "tp": (1, 2, 4, 8), "zero": (0, 1, 2, 3), "schedule": ("gpipe", "1f1b")},
        alternatives=(
            Alternative("pp 2 × dp 4 × tp 2, ZeRO 1, 1f1b", step_s * 1.07, 61 * GIB, "7 % slower: the gradient reduction over dp 4 is exposed for 31 ms"),
            Alternative("pp 1 × dp 2 × tp 8, ZeRO 1", step_s * 1.31, 55 * GIB, "31 % slower: all-reduces of the tensor axis take 44 % of the step"),
            Alternative("pp 1 × dp 16, ZeRO 3", step_s * 2.2, 70 * GIB, "120 % slower: parameters are gathered in every micro-batch"),
        ),
        reasons=(
            "tp 2 keeps both all-reduces of a layer on NVLink; tp 4 would halve the matrix products to sizes that run at 61 % of their speed",
            "pp 4 with 8 micro-batches idles 21 % and saves 35 GiB of optimizer state on each rank",
        ),
        warnings=("activations of stage 0 use 20 GiB: a longer sequence needs recomputation",),
    )  # fmt: skip


def sample_measured() -> Measured:
    shown = events(1.06)
    return Measured(max(e.end_s for e in shown), 1.2e6, 0.39, shown, 55 * GIB)
