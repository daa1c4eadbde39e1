"""Convolution, pooling and resampling: rows, channels, and positions with rows exchanged between neighbours.

A window of stride s makes n positions of n s: the input's dimension is then the product (x s), x divided among the ranks, each
with the rows that its outputs need from its neighbours (runtime/sharded/halo.py, Gholami et al. 2018, section 4). Other lengths (windows
without padding, odd lengths under a stride) have nothing in common: both are divided, and the rows follow from where the parts begin.
Positions stay whole where one side is padded more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from autoplan.graph import Inside
from autoplan.rules.signature import OPAQUE, Call, Dim, Inner, Signature, Slide, labels
from runtime.sharded.halo import Span, Window, reach, transposed_halo, window_halo
from runtime.sharded.windows import same_padding, spread


@dataclass(frozen=True, slots=True)
class _Positions:
    """One dimension of positions: its labels in the input and the output, and how it is divided."""

    read: Dim
    write: Dim
    sizes: dict[str, int]
    inner: dict[str, Inner]
    slide: Slide | None = None


_WHOLE = _Positions(OPAQUE, OPAQUE, {}, {})


def _exchanged(label: str, lowering: str, length: int, before: int, after: int, minimum: int) -> dict[str, Inner]:
    """`length` positions of the input, of which a rank sends `after` to the rank before it and `before` to the one after."""
    parts = tuple(Inside("send", ("in", 0), phase, Fraction(rows, length)) for phase in ("forward", "backward") for rows in (before, after) if rows)
    return {label: Inner("map", lowering, parts, minimum, even=True, contiguous=True)} if parts else {}


def _steps(sizes: Mapping[str, int]) -> frozenset[str]:
    """Labels of the positions within a stride: they are made, or read, together."""
    return frozenset(label for label in sizes if label.startswith("y"))


_MOST_RANKS = 64  # that divide one image, where a bound has to hold for any number of them


@cache
def _farthest(lengths: tuple[int, int], window: Window) -> tuple[int, int]:
    """Rows of the neighbours that a rank needs at most, however many ranks divide input and output."""
    needed = [reach(Span(lengths[0], 1, lengths[1], 1), window, ranks) for ranks in range(2, min(*lengths, _MOST_RANKS) + 1)]
    return max((n.before for n in needed), default=0), max((n.after for n in needed), default=0)


def _sliding(k: int, lengths: tuple[int, int], window: Window, lowering: str) -> _Positions:
    """Position dimension k where input and output have lengths without a common factor."""
    if min(lengths) <= 1:
        return _WHOLE
    before, after = _farthest(lengths, window)
    parts = tuple(Inside("send", ("in", 0), phase, Fraction(rows, lengths[0])) for phase in ("forward", "backward") for rows in (before, after) if rows)
    read, write = f"z{k}", f"x{k}"
    return _Positions((read,), (write,), {}, {}, Slide(read, write, window, Inner("map", lowering, parts, even=True, contiguous=True)))


def _slides(positions: Sequence[_Positions]) -> tuple[Slide, ...]:
    return tuple(position.slide for position in positions if position.slide is not None)


def _whole(sizes: Mapping[str, int], slides: Sequence[Slide]) -> frozenset[str]:
    """Labels that are no loops of their own."""
    return _steps(sizes) | {label for slide in slides for label in (slide.read, slide.write)}


def _window(k: int, lengths: tuple[int, int], kernel: int, stride: int, padding: int, dilation: int, lowering: str) -> _Positions:
    """Position dimension k of a window that slides: `lengths` of input and output."""
    length, num_outputs = lengths
    if length != num_outputs * stride:
        return _sliding(k, lengths, Window(kernel, stride, padding, dilation), lowering)
    if num_outputs <= 1:
        return _WHOLE
    before, after = window_halo(kernel, stride, padding, dilation)
    x, y = f"x{k}", f"y{k}"
    return _Positions(
        (x, y) if stride > 1 else (x,),
        (x,),
        {x: num_outputs, y: stride} if stride > 1 else {},
        _exchanged(x, lowering, length, before, after, -(-max(before, after, 1) // stride)),
    )


def _transposed(k: int, lengths: tuple[int, int], kernel: int, stride: int, padding: int, dilation: int) -> _Positions:
    length, num_outputs = lengths
    if num_outputs != length * stride:
        if kernel < stride:
            return _WHOLE  # gaps between the windows
        return _sliding(k, lengths, Window(kernel, stride, padding, dilation, True), "runtime.halo_conv_transpose")
    if length <= 1:
        return _WHOLE
    before, after = transposed_halo(kernel, stride, padding, dilation)
    x, y = f"x{k}", f"y{k}"
    inner = _exchanged(x, "runtime.halo_conv_transpose", length, before, after, max(before, after, 1))
    if kernel < stride or (before == after == 0 and (padding or dilation * (kernel - 1) + 1 != stride)):
        return _WHOLE  # gaps between the windows
    return _Positions((x,), (x, y) if stride > 1 else (x,), {x: length, y: stride} if stride > 1 else {}, inner)


def conv(call: Call) -> Signature | None:
    """Weight [o, c, ...], or [c, o, ...] when transposed; with groups every channel dimension is (group, channel).

    Where input channels are divided each of p ranks adds a p-th part of the bias.
    """
    name = call.target.split(".")[1]
    source = "input" if "input" in call.args else "self"
    if call.rank(source) != call.rank("weight"):
        return None
    groups = int(call.get("groups", 1))
    transposed = bool(call.get("transposed", "transpose" in name))
    bias = call.has("bias")
    sizes = {"g": groups, "c": call.shape(source)[1] // groups, "o": call.out()[1] // groups}
    linear = ((0, 2), (1, 2)) if bias else ((0,), (1,))
    positions = [_WHOLE] * (call.rank(source) - 2) if name == "convolution" else _conv_positions(call, transposed)
    inner: dict[str, Inner] = {}
    if bias and name != "convolution":
        inner["c"] = Inner("sum", "runtime.conv_transpose_part" if transposed else "runtime.conv_part")
    for position in positions:
        sizes |= position.sizes
        inner |= position.inner
    slides = _slides(positions)
    kernel = (OPAQUE,) * len(positions)
    weight: tuple[Dim, ...] = (("g", "c"), ("o",), *kernel) if transposed else (("g", "o"), ("c",), *kernel)
    reads = ((("n",), ("g", "c"), *(p.read for p in positions)), weight, *(((("g", "o"),),) if bias else ()))
    writes = ((("n",), ("g", "o"), *(p.write for p in positions)),)
    sums, whole = frozenset() if bias else frozenset("c"), _whole(sizes, slides)
    return Signature(reads, writes, sums=sums, whole=whole, linear=linear, sizes=sizes, inner=inner, slides=slides)


def _conv_positions(call: Call, transposed: bool) -> list[_Positions]:
    kernel = call.shape("weight")[2:]
    rank = len(kernel)
    strides, dilations = spread(call.get("stride", 1), rank), spread(call.get("dilation", 1), rank)
    try:
        paddings = same_padding(call.get("padding", 0), kernel, dilations)
    except ValueError:
        return [_WHOLE] * rank
    lengths = list(zip(call.shape("input")[2:], call.out()[2:], strict=True))
    rows = list(zip(range(rank), lengths, kernel, strides, paddings, dilations, strict=True))
    if transposed:
        return [_transposed(*row) for row in rows]
    return [_window(*row, lowering="runtime.halo_conv") for row in rows]


def spatial(call: Call) -> Signature | None:
    """Pooling and resampling over the last 1, 2 or 3 dimensions."""
    name = call.target.split(".")[1]
    num = next((k for k in (1, 2, 3) if f"{k}d" in name), None)
    rank = len(call.inputs[0].shape)
    if num is None or rank < num or len(call.inputs) != 1:
        return None
    positions = _pool_positions(call, name, num) if len(call.outputs) == 1 and rank == num + 2 else [_WHOLE] * num
    sizes = {label: size for position in positions for label, size in position.sizes.items()}
    inner = {label: how for position in positions for label, how in position.inner.items()}
    read = (*labels(rank - num), *(position.read for position in positions))
    write = (*labels(rank - num), *(position.write for position in positions))
    slides, linear = _slides(positions), ((0,),) if "max" not in name else ()
    return Signature((read,), (write,) * len(call.outputs), linear=linear, whole=_whole(sizes, slides), sizes=sizes, inner=inner, slides=slides)


def _pool_positions(call: Call, name: str, num: int) -> list[_Positions]:
    lengths = list(zip(call.inputs[0].shape[-num:], call.out()[-num:], strict=True))
    if "adaptive_avg" in name:
        whole_mean = all(made == 1 for _, made in lengths)
        share = Inner("sum", "runtime.adaptive_average_part", even=True)
        return [_Positions((f"x{k}",), (), {}, {f"x{k}": share}) if whole_mean and n > 1 else _WHOLE for k, (n, _) in enumerate(lengths)]
    if name not in (f"max_pool{num}d", f"avg_pool{num}d") or call.get("ceil_mode", False):
        return [_WHOLE] * num
    kernel = spread(_sequence(call.args["kernel_size"]), num)
    strides, paddings = spread(_sequence(call.get("stride", ())), num, kernel), spread(_sequence(call.get("padding", 0)), num)
    dilations = spread(_sequence(call.get("dilation", 1)), num)
    if name.startswith("avg") and any(paddings) and call.args.get("count_include_pad") is False:
        return [_WHOLE] * num  # divisors differ at the ends
    lowering = "runtime.halo_max_pool" if name.startswith("max") else "runtime.halo_avg_pool"
    rows = zip(range(num), lengths, kernel, strides, paddings, dilations, strict=True)
    return [_window(*row, lowering=lowering) for row in rows]


def _sequence(arg: object) -> int | Sequence[int]:
    assert isinstance(arg, (int, tuple, list))
    return arg


def enlarged(call: Call) -> Signature | None:
    """Nearest-neighbour resampling by whole numbers: each position becomes `factor` positions."""
    name = call.target.split(".")[1]
    num = next((k for k in (1, 2, 3) if f"{k}d" in name), None)
    rank = len(call.inputs[0].shape)
    if num is None or rank != num + 2 or len(call.inputs) != 1 or not call.target.endswith(".vec"):
        return spatial(call)
    positions = []
    for k, (length, made) in enumerate(zip(call.inputs[0].shape[2:], call.out()[2:], strict=True)):
        factor, rest = divmod(made, length)
        x, y = f"x{k}", f"y{k}"
        sizes = {x: length, y: factor} if factor > 1 else {}
        positions.append(_Positions((x,), (x, y) if factor > 1 else (x,), sizes, {}) if rest == 0 and length > 1 else _WHOLE)
    sizes = {label: size for position in positions for label, size in position.sizes.items()}
    first = labels(2)
    return Signature(((*first, *(p.read for p in positions)),), ((*first, *(p.write for p in positions)),), linear=((0,),), whole=_steps(sizes), sizes=sizes)


def rearranged(call: Call) -> Signature:
    """pixel_shuffle and pixel_unshuffle: what comes before channels and positions."""
    rank = len(call.inputs[0].shape)
    dims = (*labels(rank - 3), *((OPAQUE,) * 3))
    return Signature((dims,), (dims,), linear=((0,),))


def columns(call: Call) -> Signature:
    """im2col(x[n, c, h, w]) -> [n, c k, l] and its inverse: rows map."""
    rank = len(call.inputs[0].shape)
    batched = rank == len(call.out()) + (1 if "im2col" in call.target else -1) and rank == (4 if "im2col" in call.target else 3)
    first = ("n",) if batched else OPAQUE
    return Signature(((first, *(OPAQUE,) * (rank - 1)),), ((first, *(OPAQUE,) * (len(call.out()) - 1)),), linear=((0,),))


CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_POOL = [f"{kind}_pool{k}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for k in (1, 2, 3)]
_POOL += ["_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices"]
_NEAREST = [f"upsample_nearest{k}d" for k in (1, 2, 3)] + [f"_upsample_nearest_exact{k}d" for k in (1, 2, 3)]
_RESIZE = ["upsample_bilinear2d", "upsample_bicubic2d", "upsample_linear1d", "upsample_trilinear3d"]

RULES = {
    **{f"aten.{name}": conv for name in CONVOLUTIONS},
    **{f"aten.{name}": spatial for name in [*_POOL, *_RESIZE]},
    **{f"aten.{name}": enlarged for name in _NEAREST},
    "aten.pixel_shuffle": rearranged,
    "aten.pixel_unshuffle": rearranged,
    "aten.im2col": columns,
    "aten.col2im": columns,
}
