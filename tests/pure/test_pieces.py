"""Parts of positions that ranks do not divide evenly: they cover, differ by one at most, and are put together again without what fills them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.collective import Part
from runtime.pieces import count, most, real, start
from runtime.sharded.halo import Span, Window, reach

SIZES = st.integers(1, 40).flatmap(lambda parts: st.tuples(st.integers(parts, 90), st.just(parts)))


@given(SIZES)
def test_parts_follow_each_other_and_differ_by_one(case):
    size, parts = case
    held = [range(start(size, parts, r), start(size, parts, r) + count(size, parts, r)) for r in range(parts)]
    assert [i for own in held for i in own] == list(range(size))
    assert {len(own) for own in held} <= {size // parts, most(size, parts)} and min(map(len, held)) > 0


@given(SIZES, st.integers(1, 3), st.integers(1, 3))
def test_what_is_cut_is_put_together_again(case, outer, inner):
    size, parts = case
    x = torch.arange(2 * outer * size * inner).view(2, -1).double() + 1
    part = Part(1, outer, size, inner)
    cut, grads = part.parts(x, parts), part.parts(x, parts, is_grad=True)
    assert cut.shape == (parts, 2, part.local(parts)) and torch.equal(part.whole(cut), x) and torch.equal(part.whole(grads), x)
    assert bool((cut > 0).all()), "copies of real entries fill a part"
    assert grads.count_nonzero() == x.numel(), "zeros fill a gradient"


@given(st.integers(2, 5), st.integers(2, 5), st.integers(0, 60))
def test_nested_parts_hold_every_position_once(first, second, more):
    size = first * second + more
    inner = most(size, first)
    held = [real((size, inner), (first, second), (i, j)) for i in range(first) for j in range(second)]
    assert sum(held) == size and max(held) <= most(inner, second)


@given(st.integers(2, 6), st.integers(1, 5), st.integers(1, 3), st.integers(1, 2), st.data())
def test_a_window_reads_all_rows_that_its_outputs_need_and_neighbours_have_them(ranks, kernel, stride, dilation, data):
    padding = data.draw(st.integers(0, kernel // 2))
    length = data.draw(st.integers(ranks + dilation * (kernel - 1) + 1, 80))
    made = (length + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    span, found = Span(length, 1, made, 1), reach(Span(length, 1, made, 1), Window(kernel, stride, padding, dilation), ranks)
    for rank in range(ranks):
        (first, end), (low, high) = span.rows(ranks, rank), found.reads[rank]
        outputs = range(*span.outputs(ranks, rank))
        needed = [o * stride - padding + dilation * tap for o in outputs for tap in range(kernel)]
        if needed:
            assert (min(needed), max(needed) + 1) == (first + low, first + high)
            assert rank == 0 or first + low >= first - found.before
            assert rank == ranks - 1 or first + high <= end + found.after
