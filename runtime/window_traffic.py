"""Rows that windowed operators exchange with neighbours (runtime/sharded/windows.py): their bytes, from an instruction alone.

`before` rows go to the next rank and `after` rows to the one before it; their gradients go the other way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from runtime.call import num_bytes
from runtime.instr import Arg, Instr, Ref, TensorSpec, uses
from runtime.sharded.halo import Span, Window, reach, transposed_halo, window_halo
from runtime.sharded.windows import same_padding, spread

_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "runtime.halo_conv": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "runtime.halo_conv_transpose": ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"),
    "runtime.halo_max_pool": ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode"),
    "runtime.halo_avg_pool": ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
}
WINDOWED = frozenset(_PARAMETERS)


def exchanged_rows(instr: Instr, specs: Mapping[str, TensorSpec], sizes: Mapping[str, int]) -> Iterator[tuple[str, int, int, int]]:
    """(axis, rows of the rank before, rows of the rank after, bytes of one row) for every divided dimension, in order; `sizes` of the axes."""
    args: dict[str, Arg] = dict(zip(_PARAMETERS[instr.target], instr.args, strict=False)) | dict(instr.kwargs)
    axes, dims = args["axis"], args["dims"]
    axes = axes if isinstance(axes, tuple) else (axes,)
    assert isinstance(dims, tuple)
    source = specs[uses(instr)[0]]
    weight = args.get("weight")
    kernel = list(specs[weight.name].shape[2:]) if isinstance(weight, Ref) else spread(_sizes(args["kernel_size"]), len(source.shape) - 2)
    rank = len(kernel)
    strides = spread(_sizes(args.get("stride") or (1 if isinstance(weight, Ref) else ())), rank, kernel)
    dilations = spread(_sizes(args.get("dilation", 1)), rank)
    padding = args.get("padding", 0)
    paddings = same_padding(padding if isinstance(padding, str) else _sizes(padding), kernel, dilations)
    find = transposed_halo if instr.target == "runtime.halo_conv_transpose" else window_halo
    shape = list(source.shape)
    spans = args.get("spans") or ((),) * len(dims)
    assert isinstance(spans, tuple)
    for axis, dim, span in zip(axes, dims, spans, strict=True):
        assert isinstance(axis, str) and isinstance(dim, int) and isinstance(span, tuple)
        how = (kernel[dim - 2], strides[dim - 2], paddings[dim - 2], dilations[dim - 2])
        if span:
            before, after, _ = reach(Span(*(n for n in span if isinstance(n, int))), Window(*how, find is transposed_halo), sizes[axis])
        else:
            before, after = find(*how)
        yield axis, before, after, num_bytes(source) // math.prod(source.shape) * math.prod(shape) // shape[dim]
        shape[dim] += before + after  # the next dimension's rows carry what this one received


def _sizes(arg: Arg) -> int | tuple[int, ...]:
    if isinstance(arg, int):
        return arg
    assert isinstance(arg, tuple)
    return tuple(n for n in arg if isinstance(n, int))
