"""Seconds of an operator call on a device, from its shapes (Williams et al. 2009, with shape-dependent ceilings).

    view           0; the backward pass of a slice, select or split writes a full-size gradient
    gemm           costmodel/gemm.py; backward input: dA = dC B^T, weight: dB = A^T dC, bias: one pass over dC
    attention      fused: forward flops F = 4 b h s_q s_k d (half of it if causal), F / (peak * share(d)); backward 2.5 F
                   unfused: two batched products and the memory passes of scale, mask, softmax over b h s_q s_k
    convolution    as the product [pixels, in * window] x [in * window, out]
    lookup, memory bytes moved / (bandwidth * efficiency) + shortest kernel a kernel (costmodel/opclass.py counts passes)
    seconds        GPU: max(device time, launch floor * kernels): launches run ahead of the device
                   CPU: device time + call overhead * calls, times the contention of ranks that share cores

share(d): fused kernels are tuned for head dims of 64, 128 and 256; others are padded to the next multiple of 32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from costmodel.argtext import argument
from costmodel.calibration import DeviceConstants, StackConstants
from costmodel.cluster import Device
from costmodel.gemm import Gemm, gemm_s
from costmodel.opclass import base_name, op_class, passes
from costmodel.opkey import OpKey, OpTime, Shape

_SLICES = ("slice", "select", "split", "split_with_sizes", "chunk", "unbind", "narrow", "expand", "expand_as", "broadcast_to")
_ITEM_BYTES = {"float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "complex128": 16}


def item_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype by its short name (1 for bool, int8, float8)."""
    return _ITEM_BYTES.get(dtype, 1)


def tensor_bytes(shape: Shape, dtype: str) -> int:
    """Bytes of a dense tensor."""
    return math.prod(shape) * item_bytes(dtype)


@dataclass(frozen=True, slots=True)
class Cost:
    """Device seconds and kernels of one pass."""

    device_s: float
    kernels: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.device_s + other.device_s, self.kernels + other.kernels)


FREE = Cost(0.0, 0)


def op_costs(key: OpKey, device: Device, constants: DeviceConstants, stack: StackConstants) -> tuple[Cost, Cost, Cost]:
    """Device seconds and kernels of forward, backward-input and backward-weight, without launches. Formulas: the module's text."""
    rate = _Rate(device, constants, stack)
    kind = op_class(key.target)
    price = {"view": _view, "create": _create, "gemm": _gemm, "attention": _attention, "convolution": _convolution, "lookup": _lookup, "memory": _memory}[kind]
    forward, backward_input, backward_weight = price(key, rate)
    return (forward, backward_input, backward_weight) if any(key.grads) else (forward, FREE, FREE)


def op_time(key: OpKey, device: Device, constants: DeviceConstants, stack: StackConstants, contention: float = 1.0) -> OpTime:
    """Seconds of forward, backward-input and backward-weight of one call. Formulas: the module's text."""
    launch_s = constants.launch_s * stack.launch_factor

    def seconds(cost: Cost) -> float:
        if device.kind == "cpu":
            return (cost.device_s + cost.kernels * launch_s) * contention
        return max(cost.device_s, cost.kernels * launch_s)

    return OpTime(*(seconds(cost) for cost in op_costs(key, device, constants, stack)))


@dataclass(frozen=True, slots=True)
class _Rate:
    device: Device
    constants: DeviceConstants
    stack: StackConstants

    def memory(self, num_bytes: float, kernels: int = 1, fusible: bool = True) -> Cost:
        """A pass over `num_bytes`; fused into a neighbour to the stack's share."""
        share = self.stack.fused_share if fusible else 1.0
        seconds = num_bytes / (self.device.memory_bytes_per_s * self.constants.memory_efficiency)
        return Cost((seconds + kernels * self.constants.kernel_s) * share, kernels)

    def gemm(self, sizes: Gemm, dtype: str) -> Cost:
        return Cost(gemm_s(sizes, dtype, item_bytes(dtype), self.device, self.constants) / self.stack.gemm_share, 1)

    def flops(self, flops: float, dtype: str, share: float) -> Cost:
        return Cost(flops / (self.device.peak(dtype) * share) + self.constants.kernel_s, 1)


_Three = tuple[Cost, Cost, Cost]


def _sum_bytes(tensors: tuple[tuple[Shape, str], ...]) -> int:
    return sum(tensor_bytes(*t) for t in tensors)


def _grad(key: OpKey, i: int) -> bool:
    return i < len(key.grads) and key.grads[i]


def _view(key: OpKey, rate: _Rate) -> _Three:
    if base_name(key.target) not in _SLICES or not key.operands:
        return FREE, FREE, FREE
    return FREE, rate.memory(_sum_bytes(key.operands[:1]) + _sum_bytes(key.outputs)), FREE


def _create(key: OpKey, rate: _Rate) -> _Three:
    return rate.memory(_sum_bytes(key.outputs)), FREE, FREE


def _products(key: OpKey) -> tuple[Gemm, int, int]:
    """The product of a gemm key, and which operands are its two factors."""
    name = base_name(key.target)
    first = 1 if name in ("addmm", "baddbmm", "addbmm") else 0
    if len(key.operands) < first + 2:
        return Gemm(1, 1, 1, key.flops // 2), 0, 0
    a, b = key.operands[first][0], key.operands[first + 1][0]
    out = math.prod(key.outputs[0][0])
    if name == "linear" or "linear" in name:
        return Gemm(1, math.prod(a[:-1]), math.prod(b[:-1]), a[-1]), first, first + 1
    if name == "einsum" or not a or not b:
        k = max(1, key.flops // max(2 * out, 1))
        n = max(1, math.prod(b) // k)
        return Gemm(1, max(1, out // n), n, k), first, first + 1
    k = a[-1]
    n = b[-1] if len(b) > 1 else 1
    batch = math.prod(b[:-2]) if len(b) > 2 else 1
    return Gemm(batch, max(1, out // max(1, n * batch)), n, k), first, first + 1


def _gemm(key: OpKey, rate: _Rate) -> _Three:
    sizes, i, j = _products(key)
    dtype = key.operands[i][1] if key.operands else "float32"
    b, m, n, k = sizes.b, sizes.m, sizes.n, sizes.k
    backward_input = rate.gemm(Gemm(b, m, k, n), dtype) if _grad(key, i) else FREE
    backward_weight = rate.gemm(Gemm(b, k, n, m), dtype) if _grad(key, j) and j != i else FREE
    for other in range(len(key.operands)):
        if other not in (i, j) and _grad(key, other):
            backward_weight += rate.memory(_sum_bytes(key.outputs), fusible=False)
    return rate.gemm(sizes, dtype), backward_input, backward_weight


def _attention(key: OpKey, rate: _Rate) -> _Three:
    (q, dtype), (k, _), (v, _) = key.operands[:3]
    batch, s_q, s_k, d = math.prod(q[:-2]), q[-2], k[-2], max(q[-1], v[-1])
    causal = bool(argument(key.args, 5, "is_causal", False))
    mask = len(key.operands) > 3
    if rate.stack.flash and not (mask and rate.device.kind == "cuda"):
        flops = 4.0 * batch * s_q * s_k * (-(-d // 32) * 32) * (0.5 if causal else 1.0)
        forward = rate.flops(flops, dtype, rate.constants.attention_forward)
        return forward, rate.flops(2.5 * flops, dtype, rate.constants.attention_backward), FREE
    scores = batch * s_q * s_k * item_bytes(dtype) * rate.stack.score_passes
    dropout = float(argument(key.args, 4, "dropout_p", 0.0) or 0.0) > 0
    one, two = Gemm(batch, s_q, s_k, d), Gemm(batch, s_q, d, s_k)
    forward = rate.gemm(one, dtype) + rate.gemm(two, dtype) + rate.memory((2 + 2.5 * dropout) * scores, 1 + dropout, fusible=False)
    back = rate.gemm(two, dtype) + rate.gemm(one, dtype) + rate.gemm(two, dtype) + rate.gemm(two, dtype)
    return forward, back + rate.memory((3 + 2.5 * dropout) * scores, 1 + dropout, fusible=False), FREE


def _convolution(key: OpKey, rate: _Rate) -> _Three:
    weight, dtype = key.operands[1]
    batch, channels, *image = key.outputs[0][0]
    pixels = batch * math.prod(image)
    window = math.prod(weight[1:])
    sizes = Gemm(1, pixels, channels, window)
    backward_input = rate.gemm(Gemm(1, pixels, window, channels), dtype) if _grad(key, 0) else FREE
    backward_weight = rate.gemm(Gemm(1, window, channels, pixels), dtype) if _grad(key, 1) else FREE
    if _grad(key, 2):
        backward_weight += rate.memory(_sum_bytes(key.outputs), fusible=False)
    return rate.gemm(sizes, dtype), backward_input, backward_weight


def _lookup(key: OpKey, rate: _Rate) -> _Three:
    out = _sum_bytes(key.outputs)
    table = tensor_bytes(*key.operands[0])
    return rate.memory(2 * out, fusible=False), FREE, rate.memory(table + 3 * out, 2, fusible=False) if _grad(key, 0) else FREE


def _memory(key: OpKey, rate: _Rate) -> _Three:
    count = passes(key.target)
    read, written = _sum_bytes(key.operands), _sum_bytes(key.outputs)
    largest = max([tensor_bytes(*t) for t in key.operands], default=0)
    forward = rate.memory(read + written + count.forward_extra * largest, count.forward_kernels)
    wanted = [i for i in range(len(key.operands)) if _grad(key, i)]
    if not count.backward:
        small = [i for i in wanted if tensor_bytes(*key.operands[i]) < written]
        return forward, rate.memory(len(small) * written, len(small)) if small else FREE, FREE
    grads = sum(tensor_bytes(*key.operands[i]) for i in wanted)
    kernels = max(count.backward_kernels, len(wanted))
    return forward, rate.memory(written + grads + count.backward_reads * largest * max(1, min(2, len(wanted))), kernels), FREE
