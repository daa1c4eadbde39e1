"""Floating-point operations of one operator call, forward.

Products, convolutions and attention are counted as `torch.utils.flop_counter.FlopCounterMode` counts them: 2 m n k for a product; attention as its two
products over all keys, causal or not. Everything else counts 0: its time is that of moving its bytes, which the price knows by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from runtime.instr import Arg, TensorSpec


def flops(target: str, operands: Sequence[TensorSpec], outputs: Sequence[TensorSpec], args: Sequence[Arg] = ()) -> int:
    """FLOPs of `target` on operands and outputs of these (whole or local) shapes.

    Order of operands: `runtime.instr.uses`. `args` are the call's positional arguments.
    """
    name = target.split(".")[1]
    out = math.prod(outputs[0].shape) if outputs else 0
    if name in ("linear", "mm", "bmm", "matmul", "mv", "dot", "vecdot"):
        return 2 * out * operands[0].shape[-1]
    if name in ("addmm", "baddbmm", "addbmm", "addmv"):
        rows = operands[1].shape
        return 2 * out * rows[-1] * (rows[0] if name == "addbmm" else 1)
    if name == "einsum":
        return _einsum(str(args[0]), operands)
    if name == "bilinear":
        return 2 * out * operands[0].shape[-1] * (operands[1].shape[-1] + 1)
    if name in ("scaled_dot_product_attention", "attention"):
        *batch, queries, dim = operands[0].shape
        keys, value_dim = operands[2].shape[-2:]
        return 2 * math.prod(batch) * queries * keys * (dim + value_dim)
    if name in ("conv1d", "conv2d", "conv3d", "convolution", "_convolution"):
        if name.endswith("convolution") and len(args) > 6 and args[6] is True:
            return _transposed(operands)
        return 2 * out * math.prod(operands[1].shape[1:])
    if name.startswith("conv_transpose"):
        return _transposed(operands)
    if name == "experts":  # each row of each slot meets one expert; a rank that holds e of E meets e/E of them
        (rows, hidden), slots, (held, double, _) = operands[0].shape, operands[1].shape[-1], operands[3].shape
        num_experts = args[6]
        assert isinstance(num_experts, int)
        return 2 * rows * slots * hidden * (double + double // 2) * held // num_experts
    if name.startswith(_RECURRENT):  # every matrix of weights meets every step of every row
        matrices = [math.prod(spec.shape) for spec in _matrices(name, operands)]
        return 2 * math.prod(operands[0].shape[:-1]) * sum(matrices)
    if "grouped_mm" in name:  # (rows, k) x (groups, k, n): each row meets one group
        return 2 * out * operands[0].shape[-1]
    return 0


def backward_flops(target: str, forward: int, grads: Sequence[bool]) -> int:
    """FLOPs of the backward pass of an operator that takes `forward` in its own; `grads`: which operands get a gradient.

    A product, each operand's gradient is one of the same size. Attention, whose two products give way to five: the scores once
    more, and the gradients of scores, values, queries and keys.
    """
    name = target.split(".")[1]
    if name in ("scaled_dot_product_attention", "attention"):
        return 5 * forward // 2 if any(grads) else 0
    if name == "einsum":
        return forward * sum(grads) // max(1, len(grads) - 1)
    if name == "experts":
        return forward * (bool(grads[0]) + any(grads[3:]))
    if name.startswith(_RECURRENT):
        return forward * (bool(grads[0]) + any(grads[1:]))
    factors = grads[1:3] if name in ("addmm", "baddbmm", "addbmm", "addmv") else grads[:2]
    return forward * sum(factors)


_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _matrices(name: str, operands: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
    """Weights of a recurrent layer or cell; a cell's states have two dimensions as well."""
    states = (1 + (name == "lstm_cell")) if name.endswith("_cell") else 0
    return [spec for spec in operands[1 + states :] if len(spec.shape) == 2]


def _transposed(operands: Sequence[TensorSpec]) -> int:
    """Each input element meets its whole kernel."""
    return 2 * math.prod(operands[0].shape) * math.prod(operands[1].shape[1:])


def _einsum(equation: str, operands: Sequence[TensorSpec]) -> int:
    """Operands are contracted from the left, two at a time; a letter is kept while a later operand or the output has it."""
    terms, _, result = equation.replace(" ", "").partition("->")
    names = terms.split(",")
    if "." in equation or len(names) < 2 or len(names) != len(operands):
        return 0
    sizes = {letter: size for name, spec in zip(names, operands, strict=True) for letter, size in zip(name, spec.shape, strict=True)}
    if "->" not in equation:
        result = "".join(letter for letter in sizes if terms.count(letter) == 1)
    total, left = 0, dict.fromkeys(names[0])
    for i, name in enumerate(names[1:], start=1):
        met = left | dict.fromkeys(name)
        total += 2 * math.prod(sizes[letter] for letter in met)
        rest = "".join(names[i + 1 :]) + result
        left = {letter: None for letter in met if letter in rest}
    return total
