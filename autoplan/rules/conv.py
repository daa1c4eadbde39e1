"""Convolution, pooling and resampling: rows and channels; positions stay whole."""

from __future__ import annotations

from autoplan.rules.signature import OPAQUE, Call, Signature, labels, sign


def conv(call: Call) -> Signature | None:
    """Weight [o, c, ...], or [c, o, ...] when transposed; with groups every channel dimension is (group, channel).

    With a bias the input channels stay whole: every rank would add it.
    """
    name = call.target.split(".")[1]
    source = "input" if "input" in call.args else "self"
    if call.rank(source) != call.rank("weight"):
        return None
    groups = int(call.get("groups", 1))
    transposed = bool(call.get("transposed", "transpose" in name))
    text = "n (g c) _*, (g c) o _*" if transposed else "n (g c) _*, (g o) c _*"
    bias = call.has("bias")
    text += (", (g o)" if bias else "") + " -> n (g o) _*"
    sizes = {"g": groups, "c": call.shape(source)[1] // groups, "o": call.out()[1] // groups}
    linear = ((0, 2), (1, 2)) if bias else ((0,), (1,))
    return sign(call, text, sums="" if bias else "c", sizes=sizes, linear=linear)


def spatial(call: Call) -> Signature | None:
    """Pooling and resampling over the last 1, 2 or 3 dimensions."""
    name = call.target.split(".")[1]
    num = next((k for k in (1, 2, 3) if f"{k}d" in name), None)
    rank = len(call.inputs[0].shape)
    if num is None or rank < num or len(call.inputs) != 1:
        return None
    dims = (*labels(rank - num), *((OPAQUE,) * num))
    linear = ((0,),) if "max" not in name else ()
    return Signature((dims,), (dims,) * len(call.outputs), linear=linear)


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
_RESIZE = ["upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d", "upsample_bicubic2d", "_upsample_nearest_exact2d"]

RULES = {
    **{f"aten.{name}": conv for name in CONVOLUTIONS},
    **{f"aten.{name}": spatial for name in [*_POOL, *_RESIZE]},
    "aten.pixel_shuffle": rearranged,
    "aten.pixel_unshuffle": rearranged,
    "aten.im2col": columns,
    "aten.col2im": columns,
}
