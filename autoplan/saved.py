"""What autograd keeps of one operator call for the backward pass.

Found by asking autograd: the call runs once on the meta device with gradients on, and every tensor that its nodes save is traced to an
operand or output by its memory (`torch.autograd.graph.saved_tensors_hooks`, torch docs, "Autograd mechanics"). What
belongs to neither is counted in bytes (statistics, masks, intermediate results). Where the meta device runs another kernel than the devices do,
the table here says what those keep:

    attention           q, k, v, the output, and one float32 log-sum-exp per query and head; a mask of numbers, or the numbers made of a boolean one.
                        With a mask that is learned: as the meta device says (the weights are kept)
    runtime.attention   as it is written out in runtime/sharded/stochastic.py
    runtime.batch_norm  x and the weight, the new running statistics; mean and inverse deviation per channel
    runtime.dropout     one byte per element
    runtime.experts     weights; for each slot its row, gate and up, the activation's two factors and product, and its result
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from runtime.call import decode, dtype_of, resolve
from runtime.instr import Instr, Ref, TensorSpec, uses


def saved(instr: Instr, grads: Sequence[bool], specs: Sequence[TensorSpec]) -> tuple[tuple[str, ...], int]:
    """(names of the operands and outputs that autograd keeps, bytes that it keeps besides).

    `grads[i]` and `specs[i]` belong to operand i, in the order of `runtime.instr.uses`. Works on local shapes as well. Views of
    a value count as that value.
    """
    operands = uses(instr)
    assert len(operands) == len(grads) == len(specs)
    if not any(grads):
        return (), 0
    numbers = {name: str(i) for i, name in reversed(list(enumerate(operands)))}
    outputs = tuple(out.spec for out in instr.outputs)
    found, extra = _saved(_numbered(instr, numbers), tuple(grads), tuple(specs), outputs)
    names = (*operands, *(out.name for out in instr.outputs))
    return tuple(dict.fromkeys(names[i] for i in found)), extra


def _numbered(instr: Instr, numbers: dict[str, str]) -> Instr:
    """The call with operands called "0", "1", ...: equal for equal calls."""

    def arg(a: Any) -> Any:
        if isinstance(a, Ref):
            return Ref(numbers[a.name])
        return tuple(map(arg, a)) if isinstance(a, tuple) else a

    args = tuple(map(arg, instr.args))
    if instr.target in ("runtime.dropout", "runtime.attention"):
        args = args[:-1]  # its own name is no matter here
    return Instr((), instr.target, args, tuple((k, arg(a)) for k, a in instr.kwargs), instr.is_sequence)


@lru_cache(maxsize=65536)
def _saved(instr: Instr, grads: tuple[bool, ...], specs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec | None, ...]) -> tuple[tuple[int, ...], int]:
    """Indices into operands + outputs, and extra bytes."""
    num = len(specs)
    if instr.target == "aten.scaled_dot_product_attention.default" and not (num > 3 and grads[3]):
        q = specs[0].shape
        statistics = 4 * math.prod(q[:-1])
        if num > 3 and specs[3].dtype == "bool":
            return (0, 1, 2, num), statistics + dtype_of(specs[0].dtype).itemsize * math.prod(specs[3].shape)
        return (0, 1, 2, *((3,) if num > 3 else ()), num), statistics
    if instr.target == "runtime.attention":
        return _dropped_attention(instr, specs)
    if instr.target == "runtime.batch_norm":
        channels = specs[0].shape[1]
        weight = (1,) if isinstance(instr.args[1], Ref) else ()
        statistics = (num + 1, num + 2) if isinstance(instr.args[3], Ref) else ()
        return (0, *weight, *statistics), 2 * 4 * channels
    if instr.target == "runtime.dropout":
        return (), math.prod(specs[0].shape)
    if instr.target == "runtime.experts":
        (rows, hidden), slots, (held, double, _) = specs[0].shape, specs[1].shape[-1], specs[3].shape
        num_experts = instr.args[6]
        assert isinstance(num_experts, int)
        kept = rows * slots * held // num_experts * (2 * hidden + double + 3 * (double // 2))  # x by slot, gate and up, three of the gate, y by slot
        return (2, 3, 4), kept * dtype_of(specs[0].dtype).itemsize
    if instr.target == "runtime.scale_by_count":
        return ((1,), 0) if num > 1 else ((), 0)
    return _ask(instr, grads, specs)


def _dropped_attention(instr: Instr, specs: tuple[TensorSpec, ...]) -> tuple[tuple[int, ...], int]:
    """Attention written out in at least float32: scaled queries, keys, values, and of the weights the softmax, the mask and the product."""
    dtype = dtype_of(specs[0].dtype)
    size = max(4, dtype.itemsize)
    queries, keys, values = (spec.shape for spec in specs[:3])
    repeats = queries[-3] // keys[-3] if instr.args[7] else 1
    extra = size * math.prod(queries) + (2 * size + 1) * math.prod(queries[:-1]) * keys[-2]
    if size == dtype.itemsize and repeats == 1:
        return (1, 2), extra
    return (), extra + size * repeats * (math.prod(keys) + math.prod(values))


def _ask(instr: Instr, grads: tuple[bool, ...], specs: tuple[TensorSpec, ...]) -> tuple[tuple[int, ...], int]:
    meta = torch.device("meta")
    leaves = [torch.empty(spec.shape, dtype=dtype_of(spec.dtype), device=meta) for spec in specs]
    for leaf, grad in zip(leaves, grads, strict=True):
        if grad and (leaf.is_floating_point() or leaf.is_complex()):
            leaf.requires_grad_()
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(_memory(tensor), tensor)
        return tensor

    env = {str(i): leaf for i, leaf in enumerate(leaves)}
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = resolve(instr.target)(*(decode(a, env, meta) for a in instr.args), **{k: decode(a, env, meta) for k, a in instr.kwargs})
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    where: dict[int, int] = {}
    for i, tensor in enumerate([*leaves, *results]):
        if isinstance(tensor, torch.Tensor):
            where.setdefault(_memory(tensor), i)
    indices = tuple(sorted(where[m] for m in kept if m in where))
    extra = sum(t.untyped_storage().nbytes() for m, t in kept.items() if m not in where)
    return indices, extra


def _memory(tensor: torch.Tensor) -> int:
    return StorageWeakRef(tensor.untyped_storage()).cdata
