"""The communication of one instruction in each pass: which collectives, over which axis, of how many bytes.

Instruction outputs hold *local* specs; the bytes of a collective are those of the value on the axis' ranks together:

    forward                          backward, where a gradient arrives
    all_reduce       n               -
    vary             -               all_reduce n
    all_gather       n               -                    (n: bytes of the output; with the room that ranks have, runtime/pieces.py)
    all_gather_vary  n               reduce_scatter n
    slice            -               all_gather p n
    reduce_scatter   p n             all_gather p n
    all_to_all       p n             all_to_all p n
    vocab_cross_entropy              3 all_reduces of a row statistic each, 4 with label smoothing; none backward
    sync_batch_norm                  all_reduces of C + 1 and C; backward 2 of C, on each axis
    sync_group_norm                  2 all_reduces of n G forward, 2 backward, on each axis
    halo_conv, halo_max_pool, ...    sends of rows to both neighbours, and back: runtime/window_traffic.py
    split_layer_norm                 2 all_reduces of a row statistic; backward 1 of two.  split_rms_norm: 1 and 1 of one
    gathered_linear                  all_gather of each divided operand; backward again where the other one needs a gradient,
                                     reduce_scatter where it needs one; all of them in panels (runtime/sharded/gathered.py)
    attention over a divided sequence, experts on several ranks: runtime/context_traffic.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from runtime.call import dtype_of, num_bytes
from runtime.collective import Part
from runtime.context_traffic import NAMES, exchanges
from runtime.flow import Flow
from runtime.instr import Instr, Ref, TensorSpec, uses
from runtime.pieces import real, room
from runtime.sharded.gathered import streamed
from runtime.window_traffic import WINDOWED, exchanged_rows


@dataclass(frozen=True, slots=True)
class Use:
    """A collective of one instruction in one pass. `towards`: of a message, which neighbour it goes to (-1, 1)."""

    kind: str
    axis: str
    num_bytes: int
    towards: int = 0


def gathered_uses(instr: Instr, specs: Mapping[str, TensorSpec], sizes: Mapping[str, int], needs: frozenset[str] | None = None) -> tuple[Use, ...]:
    """The collectives of a `gathered_linear`: of its forward pass, or (`needs`: the values that need a gradient) of its backward pass."""
    given = dict(instr.kwargs)
    names = [arg.name for arg in instr.args if isinstance(arg, Ref)]
    axes, gathers = given["axes"], given["gathers"]
    assert isinstance(axes, tuple) and isinstance(gathers, tuple) and len(names) == 2
    parts: list[Part | None] = [None, None]
    over = ["", ""]
    for axis, place in zip(axes, gathers, strict=True):
        assert isinstance(axis, str) and isinstance(place, tuple)
        operand, *part = (n for n in place if isinstance(n, int))
        if sizes.get(axis, 1) > 1:
            parts[operand], over[operand] = Part(*part), axis
    contracted = [len(specs[names[0]].shape) - 1, 0 if instr.target == "runtime.gathered_mm" else 1]
    panels, is_streamed = streamed(parts, [sizes.get(axis, 1) for axis in over], contracted)
    found: list[Use] = []
    for operand, part in enumerate(parts):
        if part is None:
            continue
        count = panels.count if panels is not None and is_streamed[operand] else 1
        whole = num_bytes(specs[names[operand]]) * sizes[over[operand]] // count
        kinds = ["all_gather"] if needs is None or names[1 - operand] in needs else []
        kinds += ["reduce_scatter"] if needs is not None and names[operand] in needs else []
        found += [Use(kind, over[operand], whole) for kind in kinds for _ in range(count)]
    return tuple(found)


def _axes(instr: Instr, sizes: Mapping[str, int]) -> list[str]:
    axis = dict(instr.kwargs).get("axis")
    names = axis if isinstance(axis, tuple) else (axis,) if axis else ()
    return [name for name in names if isinstance(name, str) and sizes.get(name, 1) > 1]


def forward_uses(instr: Instr, specs: Mapping[str, TensorSpec], sizes: Mapping[str, int]) -> tuple[Use, ...]:
    """The collectives of an instruction's forward pass, in order; `specs` of the values known so far, its outputs included."""
    if instr.target in GATHERED:
        return gathered_uses(instr, specs, sizes)
    axes = _axes(instr, sizes)
    if not axes or not instr.target.startswith("runtime."):
        return ()
    name = instr.target.removeprefix("runtime.")
    if name in _NORMS:
        return (Use("all_reduce", axes[0], _row_bytes(instr, specs)),) * _NORMS[name]
    if name in NAMES:
        return tuple(
            Use(kind, axes[0], size) for kind, size in exchanges(instr.target, [specs[operand] for operand in uses(instr)], sizes[axes[0]], is_backward=False)
        )
    if name == "vocab_cross_entropy":
        return _vocabulary_uses(instr, specs, axes[0])
    if name == "sync_batch_norm":
        channels = _channel_bytes(instr, specs)
        counted = 0 if dict(instr.kwargs).get("count") is not None else channels // _channels(instr, specs)
        return tuple(Use("all_reduce", axis, channels + counted) for axis in axes) + tuple(Use("all_reduce", axis, channels) for axis in axes)
    if instr.target in WINDOWED:
        return tuple(use for a, before, after, row in exchanged_rows(instr, specs, sizes) if a in axes for use in _sends(a, after * row, before * row))
    if name == "sync_group_norm":
        return tuple(Use("all_reduce", axis, _group_bytes(instr, specs)) for axis in axes) * 2
    kind = {"all_gather_vary": "all_gather"}.get(name, name)
    return (Use(kind, axes[0], _value_bytes(instr, name, sizes[axes[0]])),) if name in _FORWARD else ()


_FORWARD = ("all_reduce", "all_gather", "all_gather_vary", "reduce_scatter", "all_to_all")


_BACKWARD = {
    "vary": "all_reduce",
    "all_gather_vary": "reduce_scatter",
    "slice": "all_gather",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
}


_NORMS = {"split_layer_norm": 2, "split_rms_norm": 1}  # statistics of a row


GATHERED = ("runtime.gathered_linear", "runtime.gathered_mm")


_BY_OPERAND = (*GATHERED, "runtime.split_layer_norm", "runtime.split_rms_norm")


_OUTPUT_IS_PART = ("slice", "reduce_scatter", "all_to_all")


def backward_uses(instr: Instr, specs: Mapping[str, TensorSpec], sizes: Mapping[str, int], needs: frozenset[str]) -> tuple[Use, ...]:
    """The collectives of an instruction's backward pass, if a gradient arrives at an operand. `needs`: the values that need one."""
    if instr.target in GATHERED:
        return gathered_uses(instr, specs, sizes, needs)
    axes = _axes(instr, sizes)
    if not axes or not instr.target.startswith("runtime."):
        return ()
    name = instr.target.removeprefix("runtime.")
    if name in _NORMS:
        return (Use("all_reduce", axes[0], _row_bytes(instr, specs) * _NORMS[name]),) if uses(instr)[0] in needs else ()
    if name in NAMES:
        return tuple(
            Use(kind, axes[0], size) for kind, size in exchanges(instr.target, [specs[operand] for operand in uses(instr)], sizes[axes[0]], is_backward=True)
        )
    if name == "sync_batch_norm":
        return tuple(Use("all_reduce", axis, _channel_bytes(instr, specs)) for axis in axes for _ in range(2))
    if instr.target in WINDOWED:
        return tuple(use for a, before, after, row in exchanged_rows(instr, specs, sizes) if a in axes for use in _sends(a, before * row, after * row))
    if name == "sync_group_norm":
        return tuple(Use("all_reduce", axis, _group_bytes(instr, specs)) for axis in axes) * 2
    return (Use(_BACKWARD[name], axes[0], _value_bytes(instr, name, sizes[axes[0]])),) if name in _BACKWARD else ()


def _sends(axis: str, to_before: int, to_after: int) -> tuple[Use, ...]:
    return tuple(Use("send", axis, size, towards) for size, towards in ((to_before, -1), (to_after, 1)) if size)


def _group_bytes(instr: Instr, specs: Mapping[str, TensorSpec]) -> int:
    """One statistic of every row and group."""
    num_groups = instr.args[1]
    assert isinstance(num_groups, int)
    return _first(instr, specs).shape[0] * num_groups * _wide_bytes(_first(instr, specs).dtype)


def with_room(instr: Instr, size: int, num_ranks: int) -> int:
    """`size` bytes of what a gathering instruction gives, with the room for positions that some of the ranks do not hold."""
    if instr.target not in _GATHERING:
        return size
    positions = instr.args[3]
    assert isinstance(positions, int)
    return room(size, positions, num_ranks) * num_ranks


def real_spec(instr: Instr, source: TensorSpec, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> TensorSpec:
    """The spec of what `runtime.real_rows` gives the rank at `coordinates`, of a local `source`."""
    dim, outer, held, inner = instr.args[1:5]
    axes = dict(instr.kwargs)["axis"]
    assert isinstance(dim, int) and isinstance(outer, int) and isinstance(inner, int) and isinstance(held, tuple) and isinstance(axes, tuple)
    names, lengths = [a for a in axes if isinstance(a, str)], [n for n in held if isinstance(n, int)]
    rows = real(lengths, [sizes[a] for a in names], [coordinates.get(a, 0) for a in names])
    return TensorSpec((*source.shape[:dim], outer * rows * inner, *source.shape[dim + 1 :]), source.dtype)


_GATHERING = ("runtime.all_gather", "runtime.all_gather_vary", "runtime.all_to_all")


def _value_bytes(instr: Instr, name: str, num_ranks: int) -> int:
    spec = instr.outputs[0].spec
    assert spec is not None, f"{instr.name} = {instr.target} has no spec"
    return with_room(instr, num_bytes(spec), num_ranks) * (num_ranks if name in _OUTPUT_IS_PART else 1)


def _first(instr: Instr, specs: Mapping[str, TensorSpec]) -> TensorSpec:
    operand = instr.args[0]
    assert isinstance(operand, Ref)
    return specs[operand.name]


def _wide_bytes(dtype: str) -> int:
    """Statistics of 16-bit values are kept in 32."""
    return max(4, dtype_of(dtype).itemsize)


def _channels(instr: Instr, specs: Mapping[str, TensorSpec]) -> int:
    return _first(instr, specs).shape[1]


def _channel_bytes(instr: Instr, specs: Mapping[str, TensorSpec]) -> int:
    return _channels(instr, specs) * _wide_bytes(_first(instr, specs).dtype)


def _row_bytes(instr: Instr, specs: Mapping[str, TensorSpec]) -> int:
    """One statistic of every row of the first operand."""
    x = _first(instr, specs)
    return math.prod(x.shape[:-1]) * _wide_bytes(x.dtype)


def _vocabulary_uses(instr: Instr, specs: Mapping[str, TensorSpec], axis: str) -> tuple[Use, ...]:
    logits = _first(instr, specs)
    classes = logits.shape[1 if len(logits.shape) > 1 else 0]
    smoothing = instr.args[5] if len(instr.args) > 5 else dict(instr.kwargs).get("label_smoothing", 0.0)
    size = math.prod(logits.shape) // classes * _wide_bytes(logits.dtype)
    return (Use("all_reduce", axis, size),) * (4 if smoothing else 3)


def gradient_passes(instr: Instr, found: Flow) -> bool:
    """Whether the backward pass goes through an instruction: a gradient arrives at an output, and an operand needs one."""
    operands = uses(instr) if instr.target in _BY_OPERAND else uses(instr)[:1]
    return any(o.name in found.arrives for o in instr.outputs) and any(name in found.needs for name in operands)
