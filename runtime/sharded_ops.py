"""The functions that instructions call by name ("runtime.sync_batch_norm") where a plain operator does not do.

Those that communicate take `axis`, a `runtime.mesh.Axis`; an instruction's text holds the axis' name instead.
"""

from __future__ import annotations

import torch

from runtime.sharded.batch_norm import batch_norm, batch_norm_eval, sync_batch_norm
from runtime.sharded.dispatch import dispatch_experts
from runtime.sharded.experts import experts
from runtime.sharded.gathered import gathered_linear, gathered_mm
from runtime.sharded.group_norm import sync_group_norm
from runtime.sharded.ring_attention import ring_attention
from runtime.sharded.self_attention_ring import self_attention_ring
from runtime.sharded.split_norm import split_layer_norm, split_rms_norm
from runtime.sharded.stochastic import attention, dropout
from runtime.sharded.uneven import real_rows
from runtime.sharded.vocabulary import vocab_cross_entropy, vocab_embedding
from runtime.sharded.windows import (
    adaptive_average_part,
    conv_part,
    conv_transpose_part,
    halo_avg_pool,
    halo_conv,
    halo_conv_transpose,
    halo_max_pool,
    mean_part,
)

__all__ = [
    "adaptive_average_part",
    "attention",
    "batch_norm",
    "batch_norm_eval",
    "conv_part",
    "conv_transpose_part",
    "dispatch_experts",
    "dropout",
    "experts",
    "gathered_linear",
    "gathered_mm",
    "halo_avg_pool",
    "halo_conv",
    "halo_conv_transpose",
    "halo_max_pool",
    "mean_part",
    "real_rows",
    "ring_attention",
    "scale_by_count",
    "self_attention_ring",
    "split_layer_norm",
    "split_rms_norm",
    "sync_batch_norm",
    "sync_group_norm",
    "vocab_cross_entropy",
    "vocab_embedding",
]


def scale_by_count(x: torch.Tensor, count: torch.Tensor | int) -> torch.Tensor:
    """A sum over the whole batch, or a part of it, as its share of the mean over `count` entries."""
    return x / count
