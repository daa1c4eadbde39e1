"""Who sums what in a compressed reduction: matrices of columns, and their pieces on the ranks that own them.

A gradient is a matrix of columns; each tensor-parallel shard is a matrix of its own:

    shape                   rows R (one column)      columns C
    [R, ...]                its first dimension      the product of the others: the fan-out of each input; of a convolution, of each
                                                     input channel and place in the kernel
    [R] and []              all its elements         1
    under 1-bit Adam        ceil(n / p)              p: the elements in order, zeros at the end

    ZeRO-0       the columns of all matrices in a row are cut into p stripes of nearly equal bytes; 1-bit Adam: column j is rank j's
    ZeRO-1..3    a rank owns its own rows of every matrix, as FSDP2 divides the first dimension, and each piece of a column carries the
                 column's stats along

Bytes of the value on all ranks together, B = sum of the bytes of all (pieces of) columns, each rank's own:

    to the owners   all_to_all p B      from the owners, ZeRO-0 only: all_gather B     (ZeRO gathers parameters, not gradients)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime.call import dtype_of
from runtime.flow import trained
from runtime.program import Program, Stored, row_range
from runtime.quantiser import CODECS, Codec


@dataclass(frozen=True, slots=True)
class Matrix:
    """The gradient of one parameter as columns. `width`: bytes of a value; `is_chunked`: its elements in order, zeros at the end."""

    num_rows: int
    num_columns: int
    width: int
    is_chunked: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows and columns [start, stop) of a matrix."""

    matrix: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def num_columns(self) -> int:
        return self.columns[1] - self.columns[0]


Owners = tuple[tuple[Piece, ...], ...]  # of each rank


@dataclass(frozen=True)
class Layout:
    """A compressed reduction over `num_ranks` ranks. `is_gathered`: every rank gets the whole sum, else its own pieces."""

    codec: Codec
    matrices: tuple[Matrix, ...]
    owners: Owners
    is_gathered: bool

    def piece_bytes(self, piece: Piece) -> int:
        return piece.num_columns * self.codec.column_bytes(piece.num_rows, self.matrices[piece.matrix].width)

    def owned_bytes(self, rank: int) -> int:
        """What each rank sends to this owner."""
        return sum(map(self.piece_bytes, self.owners[rank]))

    @property
    def total_bytes(self) -> int:
        return sum(self.owned_bytes(rank) for rank in range(len(self.owners)))


def layout(codec: Codec, shapes: Sequence[tuple[int, ...]], widths: Sequence[int], num_ranks: int, *, zero: int) -> Layout:
    """How gradients of these local shapes are reduced."""
    is_chunked = codec.name == "1bit-adam"
    assert not (is_chunked and zero), "1-bit Adam keeps whole momenta on every rank"
    matrices = tuple(_matrix(shape, width, num_ranks if is_chunked else 0) for shape, width in zip(shapes, widths, strict=True))
    if is_chunked:
        owners = tuple(tuple(Piece(i, (0, m.num_rows), (rank, rank + 1)) for i, m in enumerate(matrices)) for rank in range(num_ranks))
    elif zero:
        owners = tuple(tuple(p for p in (_rows_of(i, m, rank, num_ranks) for i, m in enumerate(matrices)) if p.num_rows) for rank in range(num_ranks))
    else:
        owners = _stripes(codec, matrices, num_ranks)
    return Layout(codec, matrices, owners, not zero)


def _matrix(shape: tuple[int, ...], width: int, num_chunks: int) -> Matrix:
    if num_chunks:
        return Matrix(math.ceil(math.prod(shape) / num_chunks), num_chunks, width, True)
    rows, *rest = shape or (1,)
    return Matrix(rows, math.prod(rest), width, False)


def _rows_of(index: int, matrix: Matrix, rank: int, num_ranks: int) -> Piece:
    return Piece(index, row_range(matrix.num_rows, rank, num_ranks), (0, matrix.num_columns))


def _stripes(codec: Codec, matrices: Sequence[Matrix], num_ranks: int) -> Owners:
    """Rank r owns the columns that begin in the r-th part of all bytes."""
    sizes = [codec.column_bytes(m.num_rows, m.width) for m in matrices]
    total = sum(size * m.num_columns for size, m in zip(sizes, matrices, strict=True))
    owners: list[tuple[Piece, ...]] = []
    for rank in range(num_ranks):
        low, high = total * rank, total * (rank + 1)  # in units of 1 / num_ranks bytes
        own, start = [], 0
        for i, (size, m) in enumerate(zip(sizes, matrices, strict=True)):
            first, last = (min(m.num_columns, max(0, -(-(at - start * num_ranks) // (size * num_ranks)))) for at in (low, high))
            if last > first:
                own.append(Piece(i, (0, m.num_rows), (first, last)))
            start += size * m.num_columns
        owners.append(tuple(own))
    return tuple(owners)


# -- of programs --------------------------------------------------------------------------------------------------------


def reduces_itself(program: Program) -> bool:
    """Whether the runtime sums gradients over the data axis itself, under ZeRO too: once a step, in a form or at a time that FSDP2 has not."""
    return bool(program.compression or program.delay) and dict(program.axes).get("dp", 1) > 1


def reduced(program: Program) -> tuple[tuple[int, Stored], ...]:
    """(stage, parameter) of every gradient that is summed over the data axis, in the order of the program; none without elements."""
    return tuple((i, s) for i, s in trained(program) if 0 not in s.spec.shape and (program.zero or "dp" in s.partial))


def value_bytes(stored: Stored) -> int:
    """Bytes of a value in the sums of a gradient: those of float32, or float64 where the parameter is that."""
    return max(4, dtype_of(stored.at_rest).itemsize)


def program_layout(program: Program) -> Layout:
    """The layout of a program's compressed reduction on each rank of the data axis."""
    sizes: Mapping[str, int] = dict(program.axes)
    own = [stored for _, stored in reduced(program)]
    shapes = [stored.local_shape(sizes) for stored in own]
    return layout(CODECS[program.compression], shapes, [value_bytes(s) for s in own], sizes.get("dp", 1), zero=program.zero)
