"""The compressed sum of gradients over the data axis, with error feedback.

With g_k the gradient of rank k, e_k its own and E_j the owner's residual (runtime/stripes.py says who owns what):

    v_k = g_k + e_k        send Q(v_k) to the owners       e_k <- v_k - Q(v_k)
    V_j = sum_k Q(v_k) + E_j    send Q(V_j) to all ranks   E_j <- V_j - Q(V_j)        where the sum is gathered; else V_j is the result

So nothing is lost: the sum of all results and of all residuals is the sum of all gradients, up to rounding. A rank's own pieces are quantised
like the others'. Both sends are all_to_all of uneven parts, so that no byte is padding.

Source: Seide et al. 2014, sections 3 and 4; CNTK's AllReduceDistGradAggregator sends in the same two phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from runtime.collective import wait
from runtime.mesh import Axis
from runtime.quantiser import Encoded
from runtime.stripes import Layout, Matrix, Piece


def value_dtype(width: int) -> torch.dtype:
    return torch.float64 if width == 8 else torch.float32


def columns_of(tensor: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """A tensor as columns [C, R]."""
    if matrix.is_chunked:
        flat = tensor.reshape(-1)
        return torch.nn.functional.pad(flat, (0, matrix.num_columns * matrix.num_rows - flat.numel())).view(matrix.num_columns, matrix.num_rows)
    return tensor.reshape(-1, matrix.num_columns).t()


def tensor_of(columns: torch.Tensor, matrix: Matrix, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of `columns_of`; where the columns are some rows of a matrix only, `shape` is theirs. Contiguous."""
    if matrix.is_chunked:
        return columns.reshape(-1)[: torch.Size(shape).numel()].view(tuple(shape)).clone()
    return columns.t().reshape(tuple(shape)).contiguous()


@dataclass(eq=False)
class Residuals:
    """What was not sent yet: `own` [C, R] of every matrix, `owned` of every piece that this rank owns (none where nothing is gathered)."""

    own: list[torch.Tensor]
    owned: list[torch.Tensor]

    @staticmethod
    def zero(layout: Layout, rank: int, device: torch.device) -> Residuals:
        own = [torch.zeros((m.num_columns, m.num_rows), dtype=value_dtype(m.width), device=device) for m in layout.matrices]
        pieces = layout.owners[rank] if layout.is_gathered else ()
        owned = [torch.zeros((p.num_columns, p.num_rows), dtype=value_dtype(layout.matrices[p.matrix].width), device=device) for p in pieces]
        return Residuals(own, owned)

    def clear(self) -> None:
        for residual in (*self.own, *self.owned):
            residual.zero_()

    @property
    def num_bytes(self) -> int:
        return sum(residual.nbytes for residual in (*self.own, *self.owned))


def exchange(layout: Layout, axis: Axis, residuals: Residuals) -> list[torch.Tensor]:
    """The sums over the axis of what `residuals.own` holds (the gradients added to it), in columns.

    A tensor [C, R] for every matrix where they are gathered, else one for every piece that this rank owns. The residuals are brought up
    to date. All ranks of the axis call it.
    """
    sums = _to_owners(layout, axis, residuals.own)
    return _from_owners(layout, axis, sums, residuals.owned) if layout.is_gathered else sums


def _to_owners(layout: Layout, axis: Axis, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Sums of the pieces that this rank owns; `values` become residuals."""
    codec = layout.codec
    encoded = [codec.encode(value) for value in values]
    send = _joined([codec.pack(_part(encoded[p.matrix], p)).flatten() for pieces in layout.owners for p in pieces], axis)
    for value, sent in zip(values, encoded, strict=True):
        value.sub_(codec.decode(sent))
    del encoded
    each = layout.owned_bytes(axis.index)
    sizes = [layout.owned_bytes(rank) for rank in range(axis.size)]
    received = _send(send, sizes, [each] * axis.size, axis, "all_to_all", layout.total_bytes * axis.size)
    found, at = [], 0
    by_rank = received.view(axis.size, each)
    for piece in layout.owners[axis.index]:
        width = layout.matrices[piece.matrix].width
        stop = at + layout.piece_bytes(piece)
        columns = by_rank[:, at:stop].reshape(axis.size * piece.num_columns, -1)
        parts = codec.decode(codec.unpack(columns, piece.num_rows, value_dtype(width)))
        found.append(parts.view(axis.size, piece.num_columns, piece.num_rows).sum(0))
        at = stop
    return found


def _from_owners(layout: Layout, axis: Axis, sums: Sequence[torch.Tensor], owned: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    codec, wires = layout.codec, []
    for total, residual in zip(sums, owned, strict=True):
        residual.add_(total)
        encoded = codec.encode(residual)
        residual.sub_(codec.decode(encoded))
        wires.append(codec.pack(encoded).flatten())
    own = _joined(wires, axis)
    sizes = [layout.owned_bytes(rank) for rank in range(axis.size)]
    received = _send(own.repeat(axis.size), [own.numel()] * axis.size, sizes, axis, "all_gather", layout.total_bytes)
    out = [torch.empty((m.num_columns, m.num_rows), dtype=value_dtype(m.width), device=axis.device) for m in layout.matrices]
    at = 0
    for piece in (p for pieces in layout.owners for p in pieces):
        stop = at + layout.piece_bytes(piece)
        columns = received[at:stop].view(piece.num_columns, -1)
        whole = out[piece.matrix]
        whole[piece.columns[0] : piece.columns[1]] = codec.decode(codec.unpack(columns, piece.num_rows, whole.dtype))
        at = stop
    return out


def _part(encoded: Encoded, piece: Piece) -> Encoded:
    columns, rows = slice(*piece.columns), slice(*piece.rows)
    return Encoded(encoded.stats[columns], encoded.codes[columns, rows].contiguous())


def _joined(wires: list[torch.Tensor], axis: Axis) -> torch.Tensor:
    return torch.cat(wires) if wires else torch.empty(0, dtype=torch.uint8, device=axis.device)


def _send(data: torch.Tensor, sent: list[int], received: list[int], axis: Axis, kind: str, num_bytes: int) -> torch.Tensor:
    out = data.new_empty(sum(received))
    wait(axis, kind, num_bytes, lambda: dist.all_to_all_single(out, data, received, sent, group=axis.group, async_op=True))
    return out
