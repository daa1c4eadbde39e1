"""Attention without masks that say nothing, and without copies of heads.

A constant mask that is True (or 0) exactly where key j <= query i, and False (or the lowest number) elsewhere, is `is_causal`; one that hides nothing is
none. Keys and values that are repeated for groups of query heads go in unrepeated, with `enable_gqa`: query head h reads key head h // repeats either way.
Attention with dropout becomes `runtime.attention`, whose random numbers follow global indices.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autoplan.canonical.fold import core, uniform
from autoplan.canonical.trace import Rewriter, Step, Trace
from runtime.instr import Arg, Instr, Ref

SDPA = "aten.scaled_dot_product_attention.default"
_ROWS = 1024  # a mask is compared this many rows at a time


def fold_attention(trace: Trace, known: Mapping[str, torch.Tensor]) -> Trace:
    """`trace` with plain attention where `known` constants allow it."""
    rewriter = Rewriter(trace)
    producers = {out.name: step for step in trace.steps for out in step.instr.outputs}
    causal: dict[str, bool] = {}
    for step in trace.steps:
        if step.instr.target != SDPA:
            rewriter.keep(step)
            continue
        args = dict(zip(("q", "k", "v", "mask", "p", "is_causal"), rewriter.args(step), strict=False)) | dict(rewriter.kwargs(step))
        q, k, v = args["q"], args["k"], args["v"]
        mask = args.get("mask", args.get("attn_mask"))
        is_causal = bool(args.get("is_causal", False))
        p, scale, gqa = args.get("p", args.get("dropout_p", 0.0)), args.get("scale"), bool(args.get("enable_gqa", False))
        if isinstance(mask, Ref) and mask.name in known:
            if _hides_nothing(known[mask.name]):
                mask = None
            elif not is_causal:
                if mask.name not in causal:
                    causal[mask.name] = is_causal_mask(known[mask.name])
                if causal[mask.name]:
                    mask, is_causal = None, True
        if not gqa and isinstance(k, Ref) and isinstance(v, Ref):
            short_k, short_v = _unrepeated(k.name, producers), _unrepeated(v.name, producers)
            if short_k is not None and short_v is not None and rewriter.specs[short_k].shape[1] == rewriter.specs[short_v].shape[1]:
                k, v, gqa = Ref(rewriter.now(short_k)), Ref(rewriter.now(short_v)), True
        if p:
            call: tuple[Arg, ...] = (q, k, v, mask, p, is_causal, scale, gqa, step.instr.name)
            rewriter.keep(step, "runtime.attention", call, ())
        else:
            rewriter.keep(step, SDPA, (q, k, v, mask, 0.0, is_causal), (("scale", scale), ("enable_gqa", gqa)))
    return rewriter.finish()


def _hides_nothing(mask: torch.Tensor) -> bool:
    value = uniform(mask)
    return value is True if mask.dtype == torch.bool else value == 0


def is_causal_mask(mask: torch.Tensor) -> bool:
    """Whether `mask` (..., queries, keys) lets query i see exactly the keys j <= i."""
    if mask.dim() < 2 or core(mask).shape[:-2].numel() != 1 or min(mask.shape[-2:]) < 2:
        return False
    rows = mask[(0,) * (mask.dim() - 2)]
    columns = torch.arange(rows.shape[1])
    for start in range(0, rows.shape[0], _ROWS):
        part = rows[start : start + _ROWS]
        visible = columns <= torch.arange(start, start + part.shape[0]).unsqueeze(1)
        if mask.dtype != torch.bool:
            hidden = part <= torch.finfo(mask.dtype).min
            if not bool((hidden | (part == 0)).all()):
                return False
            part = ~hidden
        if not torch.equal(part, visible):
            return False
    return True


def _unrepeated(name: str, producers: Mapping[str, Step]) -> str | None:
    """The (batch, heads, sequence, dim) tensor whose every head `name` holds several times in a row; None if it is no such thing."""

    def made_by(value: str, target: str) -> Instr | None:
        step = producers.get(value)
        return step.instr if step is not None and step.instr.target == target else None

    def operand(instr: Instr) -> str:
        assert isinstance(instr.args[0], Ref)
        return instr.args[0].name

    repeat = made_by(name, "aten.repeat_interleave.self_int")
    if repeat is not None:
        return operand(repeat) if len(repeat.args) > 2 and repeat.args[2] in (1, -3) else None
    expand = made_by(name, "aten.expand.default")
    if expand is not None:  # one head for all queries
        spec, wide = producers.get(operand(expand)), expand.outputs[0].spec
        source = next((o.spec for o in spec.instr.outputs if o.name == operand(expand)), None) if spec else None
        if source is None or wide is None or len(source.shape) != 4 or source.shape[1] != 1:
            return None
        return operand(expand) if source.shape[0] == wide.shape[0] and source.shape[2:] == wide.shape[2:] else None
    reshape = made_by(name, "aten.reshape.default")
    expand = made_by(operand(reshape), "aten.expand.default") if reshape else None
    unsqueeze = made_by(operand(expand), "aten.unsqueeze.default") if expand else None
    if reshape is None or expand is None or unsqueeze is None or unsqueeze.args[1] != 2:
        return None
    flat, wide, thin = (i.outputs[0].spec for i in (reshape, expand, unsqueeze))
    assert flat is not None and wide is not None and thin is not None
    if len(wide.shape) != 5 or wide.shape[:2] != thin.shape[:2] or wide.shape[3:] != thin.shape[3:]:
        return None
    if flat.shape != (wide.shape[0], wide.shape[1] * wide.shape[2], *wide.shape[3:]):
        return None
    return operand(unsqueeze)
