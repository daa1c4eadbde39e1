"""Small relatives of large models: the same architecture with few, narrow layers, on the CPU, with a real batch.

What decides how a model may be split is kept: grouped heads stay grouped, tied weights stay tied, sizes that the tensor
degree divides stay divided by it and those that it does not stay so.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autoplan.errors import UsageError
from autoplan.modelsource import OWN, Batch, BatchSizes, Source, from_config

HEAD_DIM, SEQ = 8, 24


def shrunk(source: Source, *, tp: int, pp: int, rows: int) -> Source:
    """A small model of `source`'s kind, random weights, with a batch of `rows` rows. Raises UsageError where that is not known how."""
    if source.config is not None:
        config = shrunk_config(source.config, tp=tp, num_layers=max(2, pp))
        seq = SEQ if hasattr(config, "vocab_size") else None
        torch.manual_seed(0)
        small = from_config(source.name, type(source.model), config, BatchSizes(rows, seq), device="cpu")
        return Source(source.name, small.model, _filled(small.batch, getattr(config, "vocab_size", None) or config.num_labels), config)
    if source.name in OWN:
        model, batch = _own(source.name, rows)
        return Source(source.name, model.train(), batch)
    if any(parameter.is_meta for parameter in source.model.parameters()):
        raise UsageError(f"{source.name} is on the meta device and how to shrink it is not known; let the function return a small model with real weights")
    return source


def shrunk_config(config: Any, *, tp: int, num_layers: int) -> Any:
    """A copy of a transformers config with small sizes."""
    small = copy.deepcopy(config)
    heads = getattr(config, "num_attention_heads", None)
    if heads:
        groups = getattr(config, "num_key_value_heads", None) or heads
        kept_groups = _like(groups, tp, 2)
        kept_heads = kept_groups * min(2, heads // groups) if groups < heads else _like(heads, tp, 4)
        _set(small, num_attention_heads=kept_heads, num_key_value_heads=kept_groups if groups < heads else kept_heads, head_dim=HEAD_DIM)
        _set(small, hidden_size=kept_heads * HEAD_DIM)
        for name in ("intermediate_size", "d_ff", "n_inner"):
            _set(small, **{name: _like(getattr(config, name, None) or tp, tp, 48)})
    _set(small, num_hidden_layers=num_layers, num_decoder_layers=num_layers, vocab_size=_like(getattr(config, "vocab_size", tp), tp, 96))
    _set(small, max_position_embeddings=2 * SEQ, num_local_experts=4, num_experts=4, image_size=32, patch_size=8, num_labels=_like(10, tp, 12))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "sep_token_id", "cls_token_id"):
        if getattr(small, name, None) is not None:
            setattr(small, name, 0)
    if isinstance(getattr(small, "layer_types", None), list):
        small.layer_types = small.layer_types[:num_layers]
    return small


def _like(size: int, degree: int, wanted: int) -> int:
    """A number near `wanted` that `degree` divides exactly where it divides `size`."""
    near = max(degree, wanted // degree * degree)
    return near if size % degree == 0 else near + 1


def _set(config: Any, **sizes: int) -> None:
    for name, size in sizes.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, size)


def _filled(batch: Batch, num_classes: int) -> Batch:
    """The batch with random content; an uneven share of the token labels is ignored."""
    generator = torch.Generator().manual_seed(1)

    def fill(name: str, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator)
        values = torch.randint(1, num_classes, tensor.shape, generator=generator)
        if name == "labels" and values.dim() == 2:
            values[0, : SEQ // 3] = -100
        return values

    assert isinstance(batch, Mapping)
    return {name: fill(name, tensor) for name, tensor in batch.items()}


def _own(name: str, rows: int) -> tuple[torch.nn.Module, Batch]:
    from autoplan.models import MLP, UNet, resnet50

    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    labels = torch.randint(0, 12, (rows,), generator=generator)
    if name == "resnet50":
        return resnet50(width=8, num_classes=12), {"images": torch.randn(rows, 3, 32, 32, generator=generator), "labels": labels}
    if name == "unet":
        images = torch.randn(2, rows, 3, 16, 16, generator=generator)
        return UNet(3, 3, width=8, depth=2), {"x": images[0], "target": images[1]}
    return MLP((32, 64, 64, 48, 12)), {"x": torch.randn(rows, 32, generator=generator), "labels": labels}
