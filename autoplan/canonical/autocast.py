"""torch's autocast policy: the type that an operator computes in (torch docs, "Automatic Mixed Precision", lists of CPU and CUDA operators)."""

from __future__ import annotations

from collections.abc import Sequence

# fmt: off
# Run in the low precision.
_LOW = frozenset((
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "linear", "matmul", "mm", "bmm", "addmm",
    "addbmm", "baddbmm", "addmv", "mv", "chain_matmul", "scaled_dot_product_attention", "prelu", "einsum", "__matmul__", "linalg_vecdot",
    "grouped_mm",
))
# Run in float32: on both kinds of device, on one.
_FULL = frozenset((
    "binary_cross_entropy", "mse_loss", "cosine_embedding_loss", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss",
    "nll_loss", "nll_loss_nd", "nll_loss2d", "cross_entropy_loss", "ctc_loss", "margin_ranking_loss", "multilabel_margin_loss", "multi_margin_loss",
    "poisson_nll_loss", "soft_margin_loss", "triplet_margin_loss", "cdist", "binary_cross_entropy_with_logits",
))
_FULL_CUDA = frozenset((
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan", "pow", "softplus",
    "layer_norm", "group_norm", "norm", "cosine_similarity", "cumprod", "cumsum", "dist", "pdist", "renorm", "logsumexp", "prod", "softmax",
    "log_softmax", "sum",
))
_FULL_CPU = frozenset((
    "avg_pool3d", "grid_sampler", "polar", "quantile", "nanquantile", "stft", "view_as_complex", "cholesky", "inverse", "linalg_eigh",
))
# Run in the widest type of their operands.
_WIDEST = frozenset((
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add", "tensordot", "cat", "stack", "index_copy",
))
# fmt: on


def compute_dtype(target: str, device: str, low: str, floats: Sequence[str]) -> str | None:
    """What autocast casts the floating operands of `target` to; None where it leaves them.

    `device` is "cpu" or "cuda", `low` the region's dtype name, `floats` the dtype names of the floating operands (float64 is never cast).
    """
    op = target.split(".")[1].removesuffix("_")
    if op in _LOW:
        return low
    if op in _FULL or op in (_FULL_CUDA if device == "cuda" else _FULL_CPU):
        return "float32"
    if op in _WIDEST and floats:
        return "float32" if "float32" in floats else floats[0]
    return None
