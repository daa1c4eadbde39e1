"""What a rank reads of a batch: values by their path, rows by micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from runtime.call import dtype_name
from runtime.collective import Part, everyone, raw_all_gather
from runtime.errors import BatchError
from runtime.mesh import Axis
from runtime.program import Feed, MicroBatch


def lookup(batch: Any, path: str) -> torch.Tensor:
    """The tensor at a path like "input_ids", "0" or "pair.1". Raises BatchError where there is none."""
    value = batch
    for part in path.split("."):
        try:
            if isinstance(value, Mapping):
                value = value[part] if part in value else value[int(part)]
            elif isinstance(value, (tuple, list)):
                value = value[int(part)]
            else:
                value = getattr(value, part)
        except (KeyError, IndexError, ValueError, AttributeError):
            found = ", ".join(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
            raise BatchError(f"the batch has no {path!r} (looking for {part!r}, found {found}): give a batch of the form that was captured") from None
    if not isinstance(value, torch.Tensor):
        raise BatchError(f"{path!r} in the batch is a {type(value).__name__}, it should be a tensor")
    return value


def first_row(batch: Any, feeds: tuple[Feed, ...], micro_batches: tuple[MicroBatch, ...], global_rows: int) -> int:
    """The global number of the batch's first row: 0 for a global batch, this data rank's first row for its own share.

    Raises BatchError where the batch is neither.
    """
    start, stop = micro_batches[0].start, micro_batches[-1].stop
    for feed in feeds:
        if feed.batch_dim is None:
            continue
        rows = lookup(batch, feed.path).shape[feed.batch_dim]
        if rows == global_rows:
            return 0
        if rows == stop - start:
            return start
        raise BatchError(
            f"{feed.path!r} has {rows} rows: give the global batch of {global_rows}, or this rank's share of {stop - start} (rows {start} to {stop})"
        )
    return 0


def read(batch: Any, feed: Feed, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Rows [start, stop) of one feed on `device`. Raises BatchError where shape or dtype are not the captured ones."""
    value = lookup(batch, feed.path)
    if dtype_name(value.dtype) != feed.spec.dtype:
        raise BatchError(f"{feed.path!r} is {dtype_name(value.dtype)}, the model was captured with {feed.spec.dtype}")
    if feed.batch_dim is not None:
        if value.dim() <= feed.batch_dim or not 0 <= start <= stop <= value.shape[feed.batch_dim]:
            raise BatchError(f"{feed.path!r} of shape {tuple(value.shape)} has no rows {start} to {stop} on dimension {feed.batch_dim}")
        value = value.narrow(feed.batch_dim, start, stop - start)
    expected = [n for i, n in enumerate(feed.spec.shape) if i != feed.batch_dim]
    if [n for i, n in enumerate(value.shape) if i != feed.batch_dim] != expected:
        raise BatchError(f"{feed.path!r} has shape {tuple(value.shape)}, the model was captured with {feed.spec.shape}")
    return value.to(device, non_blocking=True)


def gather_rows(pieces: list[torch.Tensor], dealt: Sequence[Sequence[MicroBatch]], axis: Axis) -> torch.Tensor:
    """The rows of all data ranks in order, from this rank's micro-batches. `dealt`: micro-batches by data rank.

    A value without rows (its first dimension is not the micro-batch's) is the last micro-batch's own.
    """
    counts = [[m.stop - m.start for m in own] for own in dealt]
    if not _has_rows(pieces, dealt[axis.index]):
        return pieces[-1]
    own, totals = torch.cat(pieces), [sum(rows) for rows in counts]
    padded = own.new_zeros((max(totals), *own.shape[1:]))
    padded[: own.shape[0]] = own
    everything = raw_all_gather(padded, Part(0, 1, max(totals) * axis.size, 1), axis).chunk(axis.size)
    return _in_order([list(rows[:total].split(sizes)) for rows, total, sizes in zip(everything, totals, counts, strict=True)], dealt)


def gather_rows_for_all(pieces: list[torch.Tensor], dealt: Sequence[Sequence[MicroBatch]], axis: Axis) -> torch.Tensor:
    """The same where some data ranks have no micro-batches, and so do not know the value's form: through memory, from whoever has pieces."""
    everything = [[piece.to(axis.device) for piece in own] for own in everyone(axis, [piece.cpu() for piece in pieces])]
    first = next(rank for rank, own in enumerate(dealt) if own)
    return _in_order(everything, dealt) if _has_rows(everything[first], dealt[first]) else everything[first][-1]


def _has_rows(pieces: list[torch.Tensor], own: Sequence[MicroBatch]) -> bool:
    return all(piece.dim() > 0 and piece.shape[0] == m.stop - m.start for piece, m in zip(pieces, own, strict=True))


def _in_order(parts: Sequence[Sequence[torch.Tensor]], dealt: Sequence[Sequence[MicroBatch]]) -> torch.Tensor:
    """Pieces of all data ranks by their first row."""
    placed = [(m.start, piece) for own, pieces in zip(dealt, parts, strict=True) for m, piece in zip(own, pieces, strict=True)]
    return torch.cat([piece for _, piece in sorted(placed, key=lambda item: item[0])])
