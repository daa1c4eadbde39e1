"""Random operands for one operator call: floats in fp64, indices in the range that the operator looks up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from autoplan.rules.registry import call_of
from autoplan.rules.signature import Call
from runtime.call import dtype_of
from runtime.instr import Instr, Ref, TensorSpec

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


@dataclass(frozen=True, slots=True)
class _Indices:
    """Integers in [0, bound). `ignored` replaces some of them; `ascending`: sorted, the last is `bound` itself."""

    bound: int
    ignored: int | None = None
    ascending: bool = False


Domain = Literal["normal", "unit", "large"]
DOMAINS: tuple[Domain, ...] = ("normal", "unit", "large")


def random_operands(instr: Instr, inputs: tuple[TensorSpec, ...], seed: int, domain: Domain = "normal") -> list[torch.Tensor]:
    """One tensor for each operand of `instr`, by specs. Floats are normal, or uniform in [0.05, 0.95) or [1.05, 1.95)."""
    generator = torch.Generator().manual_seed(seed)
    ranges = _index_ranges(instr, inputs)
    made = []
    for i, spec in enumerate(inputs):
        if spec.dtype in FLOATS:
            draw = torch.randn if domain == "normal" else torch.rand
            x = draw(spec.shape, generator=generator, dtype=torch.float64)
            x = x if domain == "normal" else x * 0.9 + (0.05 if domain == "unit" else 1.05)
        elif spec.dtype == "bool":
            x = torch.rand(spec.shape, generator=generator) < 0.6
        else:
            x = _integers(ranges.get(i) or _Indices(_smallest(inputs)), spec, generator)
        made.append(x)
    return made


def _integers(which: _Indices, spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    x = torch.randint(0, max(which.bound, 1), spec.shape, generator=generator)
    if which.ascending and x.numel():
        x = x.flatten().sort()[0].reshape(spec.shape)
        x[..., -1] = which.bound
    if which.ignored is not None:
        x[torch.rand(spec.shape, generator=generator) < 0.25] = which.ignored
    return x.to(dtype_of(spec.dtype))


def _smallest(inputs: tuple[TensorSpec, ...]) -> int:
    """A range that lies within every dimension that an unknown operator might index."""
    return min((n for spec in inputs for n in spec.shape if n > 1), default=2)


def _index_ranges(instr: Instr, inputs: tuple[TensorSpec, ...]) -> Mapping[int, _Indices]:
    call = call_of(instr, inputs)
    if call is None or not inputs:
        return {}
    name = call.target.split(".")[1]
    if name in ("embedding", "vocab_embedding"):
        return {1: _Indices(inputs[0].shape[:1][0])}
    if name in ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "vocab_cross_entropy"):
        classes = inputs[0].shape[:2][-1]
        return {1: _Indices(classes, ignored=int(call.get("ignore_index", -100)))}
    if name == "one_hot":
        return {0: _Indices(int(call.get("num_classes", 2)))}
    if name == "experts":
        return {1: _Indices(int(call.args["num_experts"]))}  # type: ignore[arg-type]
    if name == "index":
        return _positions(call)
    if name in ("_grouped_mm", "grouped_mm_fallback") and len(inputs) > 2:
        return {2: _Indices(call.inputs[0].shape[:1][-1], ascending=True)}
    dim, sizes = call.args.get("dim"), list(call.inputs[0].shape)
    if call.has("index") and isinstance(dim, int) and sizes:
        return {call.at["index"][0]: _Indices(sizes[dim])}
    return {}


def _positions(call: Call) -> Mapping[int, _Indices]:
    given, shape = call.args["indices"], call.inputs[0].shape
    assert isinstance(given, tuple)
    indexed = [dim for dim, item in enumerate(given) if isinstance(item, Ref)]
    return {i: _Indices(shape[dim]) for i, dim in zip(call.at["indices"], indexed, strict=True)}
