"""Expansions as late as they can be: an elementwise operator runs on what varies, and attention reads a narrow mask.

op(expand(x), y) -> expand(op(x, y))        attention(..., mask=expand(m)) -> attention(..., mask=m)
"""

from __future__ import annotations

import torch

from autoplan.canonical.attention import SDPA
from autoplan.canonical.fold import is_pointwise, is_random
from autoplan.canonical.trace import Rewriter, Trace, substitute
from runtime.instr import Ref, TensorSpec, uses


def delay_expansion(trace: Trace) -> Trace:
    rewriter = Rewriter(trace)
    source: dict[str, str] = {}  # expanded value -> what it was expanded from
    for step in trace.steps:
        target, args = step.instr.target, rewriter.args(step)
        if target == "aten.expand.default":
            assert isinstance(args[0], Ref)
            source[step.instr.name] = source.get(args[0].name, args[0].name)
            rewriter.keep(step, args=(Ref(source[step.instr.name]), *args[1:]))
        elif target in (SDPA, "runtime.attention"):
            mask = args[3]
            wide = rewriter.specs[mask.name].shape if isinstance(mask, Ref) else ()
            if isinstance(mask, Ref) and mask.name in source and rewriter.specs[source[mask.name]].shape[-2:] == wide[-2:]:
                mask = Ref(source[mask.name])
            rewriter.keep(step, args=(*args[:3], mask, *args[4:]))
        elif any(rewriter.now(name) in source for name in uses(step.instr)) and is_pointwise(target) and not is_random(target):
            spec = step.instr.outputs[0].spec
            assert spec is not None
            narrow = tuple(substitute(a, source) for a in args)
            kwargs = tuple((k, substitute(a, source)) for k, a in rewriter.kwargs(step))
            names = [source.get(rewriter.now(n), rewriter.now(n)) for n in uses(step.instr)]
            shape = tuple(torch.broadcast_shapes(*(rewriter.specs[n].shape for n in names)))
            if shape == spec.shape:
                rewriter.keep(step, args=narrow, kwargs=kwargs)
            else:
                made = rewriter.emit(step, target, narrow, kwargs, spec=TensorSpec(shape, spec.dtype))
                source[step.instr.name] = made
                rewriter.keep(step, "aten.expand.default", (Ref(made), spec.shape), ())
        else:
            rewriter.keep(step)
    return rewriter.finish()
