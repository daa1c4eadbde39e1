"""Quantised columns: the wire form is exact, its size is the closed form, and what is lost is what the residual keeps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.quantiser import CODECS, Encoded
from runtime.stripes import layout

SIZES = st.integers(1, 70)
SEEDS = st.integers(0, 2**16)
DTYPES = st.sampled_from([torch.float32, torch.float64])


def columns(num_columns: int, num_rows: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_columns, num_rows, generator=generator, dtype=dtype)
    return values * torch.randint(0, 3, (num_columns, 1), generator=generator)  # some columns are zero


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=25, deadline=None)
@given(num_columns=SIZES, num_rows=SIZES, seed=SEEDS, dtype=DTYPES)
def test_the_wire_form_has_the_closed_size_and_gives_the_same_values_back(name: str, num_columns: int, num_rows: int, seed: int, dtype: torch.dtype):
    codec = CODECS[name]
    encoded = codec.encode(columns(num_columns, num_rows, seed, dtype))
    wire = codec.pack(encoded)
    assert wire.dtype == torch.uint8
    assert wire.shape == (num_columns, codec.column_bytes(num_rows, dtype.itemsize))
    assert torch.equal(codec.decode(codec.unpack(wire, num_rows, dtype)), codec.decode(encoded))


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=25, deadline=None)
@given(num_rows=SIZES, seed=SEEDS, start=st.integers(0, 69), length=SIZES)
def test_some_rows_of_a_column_travel_with_the_stats_of_the_whole(name: str, num_rows: int, seed: int, start: int, length: int):
    codec, rows = CODECS[name], slice(min(start, num_rows - 1), min(start + length, num_rows))
    stats, codes = codec.encode(columns(5, num_rows, seed, torch.float32))
    part = Encoded(stats, codes[:, rows])
    found = codec.decode(codec.unpack(codec.pack(part), part.codes.shape[1], torch.float32))
    assert torch.equal(found, codec.decode(Encoded(stats, codes))[:, rows])


@settings(max_examples=50, deadline=None)
@given(num_columns=SIZES, num_rows=SIZES, seed=SEEDS)
def test_one_bit_values_are_the_means_of_what_lies_above_and_below_the_mean(num_columns: int, num_rows: int, seed: int):
    values = columns(num_columns, num_rows, seed, torch.float64)
    codec = CODECS["1bit"]
    found = codec.decode(codec.encode(values))
    for column, told in zip(values, found, strict=True):
        above = column >= column.mean()
        for group in (above, ~above):
            if group.any():
                torch.testing.assert_close(told[group], column[group].mean().expand(int(group.sum())), rtol=1e-9, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(num_columns=SIZES, num_rows=SIZES, seed=SEEDS)
def test_eight_bit_values_are_at_most_half_a_step_away(num_columns: int, num_rows: int, seed: int):
    values = columns(num_columns, num_rows, seed, torch.float64)
    codec = CODECS["8bit"]
    step = values.abs().amax(1, keepdim=True) / 127
    assert bool(((codec.decode(codec.encode(values)) - values).abs() <= step * (0.5 + 1e-9)).all())


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("value", [0.0, 3.7, -1e-30])
def test_constant_columns_come_back_and_zero_ones_are_zero(name: str, value: float):
    values = torch.full((3, 45), value, dtype=torch.float64)
    found = CODECS[name].decode(CODECS[name].encode(values))
    assert bool(torch.isfinite(found).all())
    torch.testing.assert_close(found, values, rtol=1e-12, atol=0.0)


def test_a_column_of_1100_rows_takes_148_bytes():
    assert CODECS["1bit"].column_bytes(1100, 4) == 8 + 4 * math.ceil(1100 / 32) == 148
    assert CODECS["8bit"].column_bytes(1100, 4) == 4 + 1100
    assert CODECS["32bit"].column_bytes(1100, 4) == 4400


SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, num_ranks=st.integers(2, 7), zero=st.integers(0, 3), name=st.sampled_from(list(CODECS)))
def test_every_value_has_one_owner_and_bytes_are_the_closed_form(shapes: list[tuple[int, ...]], num_ranks: int, zero: int, name: str):
    zero = 0 if name == "1bit-adam" else zero
    codec = CODECS[name]
    found = layout(codec, shapes, [4] * len(shapes), num_ranks, zero=zero)
    owned = [torch.zeros(m.num_columns, m.num_rows) for m in found.matrices]
    for pieces in found.owners:
        for piece in pieces:
            owned[piece.matrix][slice(*piece.columns), slice(*piece.rows)] += 1
    assert all(bool((count == 1).all()) for count in owned)
    matrices = [(s[0], math.prod(s[1:])) if s else (1, 1) for s in shapes]
    if name == "1bit-adam":
        assert found.total_bytes == sum(num_ranks * (4 + 4 * math.ceil(math.ceil(math.prod(s) / num_ranks) / 32)) for s in shapes)
    elif zero == 0:
        sizes = [codec.column_bytes(rows, 4) for rows, _ in matrices]
        assert found.total_bytes == sum(size * num for size, (_, num) in zip(sizes, matrices, strict=True))
        assert max(map(found.owned_bytes, range(num_ranks))) <= found.total_bytes / num_ranks + max(sizes)
    else:
        parts = [[len(part) for part in torch.arange(rows).chunk(num_ranks)] for rows, _ in matrices]
        assert found.total_bytes == sum(num * codec.column_bytes(n, 4) for rows, (_, num) in zip(parts, matrices, strict=True) for n in rows)
