"""Quantised columns: what a gradient becomes before it is sent, and back.

A column is R values that share their reconstruction values ("stats"). Columns are the rows of a matrix [C, R] here.

    name        stats                       code of v             value of a code       bytes of a column (w bytes a stat)
    1bit        means of the two groups     v >= mean(column)     the group's mean      2 w + 4 ceil(R / 32)
    1bit-adam   s = |column| / sqrt(R)      v >= 0                s or -s               w + 4 ceil(R / 32)
    8bit        s = max |v| / 127           round(v / s)          s * code              w + 4 ceil(R / 4)
    32bit       none                        v                     v                     w R

A column of zeros has the value 0 in each. Values are float32, or float64 where gradients are; w is their size.

Sources: Seide, Fu, Droppo, Li, Yu 2014 (1-bit SGD), section 3; Tang et al. 2021 (1-bit Adam), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Encoded(NamedTuple):
    """Columns [C, R]: `stats` [C, k], and a code for every value."""

    stats: torch.Tensor
    codes: torch.Tensor


@dataclass(frozen=True, slots=True)
class Codec:
    """One way to quantise. `num_stats` values are sent with a column, `bits` with each of its values (0: the value itself).

    `encode`: columns [C, R] to stats and codes, R > 0; `decode`: the values [C, R] that they stand for.
    """

    name: str
    num_stats: int
    bits: int
    encode: Callable[[torch.Tensor], Encoded]
    decode: Callable[[Encoded], torch.Tensor]

    def column_bytes(self, num_rows: int, width: int) -> int:
        """Bytes of a column of `num_rows` values of `width` bytes on the wire."""
        if num_rows == 0:
            return 0
        return self.num_stats * width + (4 * math.ceil(num_rows * self.bits / 32) if self.bits else num_rows * width)

    def pack(self, encoded: Encoded) -> torch.Tensor:
        """The wire form of columns, uint8 [C, column_bytes]. Codes may be some rows of the columns only."""
        stats, codes = encoded
        if not self.bits:
            return _bytes(codes)
        payload = _pack_bits(codes) if self.bits == 1 else _padded(codes.view(torch.uint8), 4)
        return torch.cat([_bytes(stats), payload], dim=1)

    def unpack(self, wire: torch.Tensor, num_rows: int, dtype: torch.dtype) -> Encoded:
        """The inverse of `pack` for columns of `num_rows` values of `dtype`."""
        if not self.bits:
            return Encoded(wire.new_empty((wire.shape[0], 0), dtype=dtype), _values(wire, dtype))
        head = self.num_stats * dtype.itemsize
        payload = wire[:, head:]
        codes = _unpack_bits(payload, num_rows) if self.bits == 1 else payload[:, :num_rows].contiguous().view(torch.int8)
        return Encoded(_values(wire[:, :head], dtype), codes)


def _two_means(columns: torch.Tensor) -> Encoded:
    mean = columns.mean(1, keepdim=True)
    codes = columns >= mean
    num_high = codes.sum(1, keepdim=True)
    num_low = columns.shape[1] - num_high
    high = (columns * codes).sum(1, keepdim=True)
    low = torch.where(num_low > 0, mean * columns.shape[1] - high, 0.0)
    return Encoded(torch.cat([low / num_low.clamp(min=1), high / num_high.clamp(min=1)], dim=1), codes)


def _signs(columns: torch.Tensor) -> Encoded:
    scale = torch.linalg.vector_norm(columns, dim=1, keepdim=True) / math.sqrt(columns.shape[1])
    return Encoded(scale, columns >= 0)


def _steps(columns: torch.Tensor) -> Encoded:
    scale = columns.abs().amax(1, keepdim=True) / 127
    steps = torch.where(scale > 0, columns / scale, columns.new_zeros(())).round_().clamp_(-127, 127)
    return Encoded(scale, steps.to(torch.int8))


def _as_they_are(columns: torch.Tensor) -> Encoded:
    return Encoded(columns.new_empty((columns.shape[0], 0)), columns.clone())


CODECS: Mapping[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("1bit", 2, 1, _two_means, lambda e: torch.where(e.codes, e.stats[:, 1:], e.stats[:, :1])),
        Codec("1bit-adam", 1, 1, _signs, lambda e: torch.where(e.codes, e.stats, -e.stats)),
        Codec("8bit", 1, 8, _steps, lambda e: e.codes.to(e.stats.dtype) * e.stats),
        Codec("32bit", 0, 0, _as_they_are, lambda e: e.codes),
    )
}


def _bytes(values: torch.Tensor) -> torch.Tensor:
    values = values.contiguous()
    return values.view(torch.uint8) if values.shape[1] else values.new_empty(values.shape, dtype=torch.uint8)


def _values(wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return wire.clone(memory_format=torch.contiguous_format).view(dtype)  # memory of its own is aligned


def _padded(codes: torch.Tensor, multiple: int) -> torch.Tensor:
    return torch.nn.functional.pad(codes, (0, -codes.shape[1] % multiple))


def _pack_bits(codes: torch.Tensor) -> torch.Tensor:
    """Booleans [C, R] as bytes [C, 4 ceil(R / 32)], the first in the lowest bit."""
    padded = _padded(codes, 32).view(torch.uint8).unflatten(1, (-1, 8))
    packed = padded[:, :, 0].clone()
    for place in range(1, 8):
        packed |= padded[:, :, place] << place
    return packed


def _unpack_bits(packed: torch.Tensor, num_rows: int) -> torch.Tensor:
    places = torch.tensor([1 << place for place in range(8)], dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(2) & places).ne(0).flatten(1)[:, :num_rows]
