"""An example batch from what a model itself offers, for `autoplan.parallelize(model)` without a batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

Batch = Mapping[str, Any] | tuple[Any, ...]

_DEFAULT_SEQUENCE = 512


def example_batch(model: torch.nn.Module, num_rows: int) -> Batch | None:
    """A batch of `num_rows` rows that `model` says it takes: Lightning's `example_input_array`, or a transformers model's
    configuration or `dummy_inputs`, with labels where its forward takes them. None if the model offers nothing."""
    offered = getattr(model, "example_input_array", None)
    if offered is not None:
        batch = offered if isinstance(offered, (tuple, Mapping)) else (offered,)
        return _resized(batch, num_rows)
    config = getattr(model, "config", None)
    parameters = inspect.signature(model.forward).parameters
    vocab, image = getattr(config, "vocab_size", None), getattr(config, "image_size", None)
    if "pixel_values" in parameters and isinstance(image, int):
        batch = {"pixel_values": torch.randn(num_rows, getattr(config, "num_channels", 3), image, image, generator=_generator())}
        if "labels" in parameters:
            batch["labels"] = torch.randint(0, getattr(config, "num_labels", 2), (num_rows,), generator=_generator())
        return batch
    if "input_ids" in parameters and isinstance(vocab, int):
        limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or _DEFAULT_SEQUENCE
        ids = torch.randint(0, vocab, (num_rows, min(int(limit), _DEFAULT_SEQUENCE)), generator=_generator())
        batch = {"input_ids": ids}
        if "labels" in parameters:
            batch["labels"] = ids.clone()
        return batch
    dummy = getattr(model, "dummy_inputs", None)
    return _resized(dummy, num_rows) if isinstance(dummy, Mapping) and dummy else None


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _resized(batch: Any, num_rows: int) -> Any:
    """`batch` with rows repeated or cut to `num_rows`."""
    if isinstance(batch, Mapping):
        return {key: _resized(value, num_rows) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(_resized(value, num_rows) for value in batch)
    if isinstance(batch, torch.Tensor) and batch.dim() > 0:
        repeats = -(-num_rows // batch.shape[0])
        return torch.cat([batch] * repeats)[:num_rows]
    return batch
