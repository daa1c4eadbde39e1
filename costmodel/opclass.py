"""What kind of work an operator does, by the name in its target.

Classes: view (no data moves), create (writes its output), gemm, attention, convolution, lookup (reads rows that an
index names), and memory (passes over its operands). For memory ops, `Passes` counts how often each pass of
forward and backward goes over the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OpClass = Literal["view", "create", "gemm", "attention", "convolution", "lookup", "memory"]

_VIEWS = """view reshape _unsafe_view transpose permute t mT unsqueeze squeeze expand expand_as slice select split split_with_sizes chunk
unbind narrow flatten unflatten detach alias lift_fresh getitem movedim swapaxes swapdims view_as diagonal tensor_split numel sym_size size
is_floating_point lift_fresh_copy broadcast_to"""
_CREATES = """arange zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty
eye linspace scalar_tensor rand randn randint bernoulli randperm"""
_GEMMS = "linear matmul mm bmm addmm baddbmm einsum addbmm mv dot"
_ATTENTION = "scaled_dot_product_attention _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention"
_CONVOLUTIONS = "convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d _convolution"
_LOOKUPS = "embedding index index_select gather take_along_dim embedding_bag"

_NAMES: tuple[tuple[OpClass, str], ...] = (
    ("view", _VIEWS),
    ("create", _CREATES),
    ("gemm", _GEMMS),
    ("attention", _ATTENTION),
    ("convolution", _CONVOLUTIONS),
    ("lookup", _LOOKUPS),
)
_CLASS: dict[str, OpClass] = {name: kind for kind, names in _NAMES for name in names.split()}


@dataclass(frozen=True, slots=True)
class Passes:
    """Kernels of a memory op and their traffic, in passes over its outputs and inputs.

    Forward always reads inputs and writes outputs once; `forward_extra` more passes over the inputs. Backward reads
    the output's gradient and writes the inputs'; `backward_reads` more passes over the inputs. `backward` False:
    gradients pass through and only operands smaller than the output cost a sum.
    """

    forward_kernels: int = 1
    forward_extra: float = 0.0
    backward_kernels: int = 1
    backward_reads: float = 1.0
    backward: bool = True


_PASS_THROUGH = Passes(backward_reads=0.0, backward=False)
_PASSES = {
    **dict.fromkeys(("add", "add_", "sub", "sub_", "rsub", "contiguous"), _PASS_THROUGH),
    **dict.fromkeys(
        ("clone", "neg", "to", "_to_copy", "type_as", "cat", "stack", "concat", "sum", "mean", "pad", "constant_pad_nd", "roll", "flip", "repeat"),
        Passes(backward_reads=0.0),
    ),
    **dict.fromkeys(
        ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm", "group_norm", "batch_norm", "native_batch_norm"),
        Passes(backward_kernels=2, backward_reads=2.0),
    ),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), Passes(backward_reads=1.0)),
    **dict.fromkeys(("dropout", "native_dropout"), Passes(forward_extra=0.25, backward_reads=0.25)),
    **dict.fromkeys(("cross_entropy_loss", "cross_entropy"), Passes(forward_kernels=2, forward_extra=2.0, backward_kernels=2, backward_reads=2.0)),
    **dict.fromkeys(("mul", "mul_", "div", "div_"), Passes(backward_kernels=1, backward_reads=1.0)),
    # a chain of operators around its sums (runtime/sharded/batch_norm.py), none fused: 12 passes forward, 18 backward
    "sync_batch_norm": Passes(forward_kernels=9, forward_extra=10.0, backward_kernels=11, backward_reads=16.0),
    "var_mean": Passes(backward_kernels=3, backward_reads=2.0),
}


def base_name(target: str) -> str:
    """The operator's name alone: "aten.linear.default" -> "linear", "runtime.halo_conv2d" -> "halo_conv2d"."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def op_class(target: str) -> OpClass:
    """The class of an operator; one that is not known passes over its operands ("memory")."""
    name = base_name(target)
    if target.startswith("operator."):
        return "view"
    found = _CLASS.get(name)
    if found is None and target.startswith("runtime."):
        kinds = [
            kind
            for part, kind in (("conv", "convolution"), ("attention", "attention"), ("embedding", "lookup"), ("linear", "gemm"), ("slice", "view"))
            if part in name
        ]
        return kinds[0] if kinds else "memory"  # type: ignore[return-value]
    return found or "memory"


def passes(target: str) -> Passes:
    """Traffic of a memory op."""
    return _PASSES.get(base_name(target), Passes())
