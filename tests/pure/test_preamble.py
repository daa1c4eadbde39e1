"""What a preamble does at once, and what it leaves until its values are read; the buckets of sums."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.instr import Instr, Output, Ref, TensorSpec
from runtime.mesh import build_mesh
from runtime.preamble import Coming, make_preamble
from runtime.program import BlockCode
from runtime.reduction import BUCKET_BYTES, sum_buckets

COUNT = TensorSpec((), "int64")
LABELS = torch.tensor([3, -100, 5, -100, 7])


def call(name: str, target: str, *args: object, **kwargs: object) -> Instr:
    return Instr((Output(name, COUNT),), target, tuple(args), tuple(kwargs.items()))  # type: ignore[arg-type]


BEFORE = (call("valid", "aten.ne.Scalar", Ref("labels"), -100), call("own", "aten.sum.default", Ref("valid")))
TOTAL = call("total", "runtime.all_reduce", Ref("own"), axis="dp")
AFTER = call("safe", "aten.clamp_min.default", Ref("total"), 1)
AGAIN = call("again", "runtime.all_reduce", Ref("safe"), axis="dp")


def begun(*instrs: Instr, outputs: tuple[str, ...]) -> tuple[bool, dict[str, Coming]]:
    preamble = make_preamble(BlockCode("preamble", ("labels",), (), instrs, outputs), build_mesh((("dp", 1),)))
    return preamble.tail is not None, dict(preamble.begin(LABELS))


def test_what_follows_from_a_sum_is_left_until_it_is_read() -> None:
    is_put_off, values = begun(*BEFORE, TOTAL, AFTER, outputs=("own", "total", "safe"))
    assert is_put_off
    assert [values[name].arrived().item() for name in ("safe", "own", "total")] == [3, 3, 3]


def test_a_sum_of_a_sum_is_made_at_once() -> None:
    is_put_off, values = begun(*BEFORE, TOTAL, AFTER, AGAIN, outputs=("again",))
    assert not is_put_off and values["again"].arrived().item() == 3


def test_without_sums_all_is_made_at_once() -> None:
    is_put_off, values = begun(*BEFORE, outputs=("own",))
    assert not is_put_off and values["own"].arrived().item() == 3


@given(st.lists(st.integers(1, 40 * 2**20), min_size=1, max_size=30))
def test_buckets_hold_all_in_order_and_a_quarter_at_most(sizes: list[int]) -> None:
    found = list(sum_buckets(sizes))
    limit = min(BUCKET_BYTES, max(2**20, -(-sum(sizes) // 4)))
    assert [size for bucket in found for size in bucket] == sizes
    assert all(sum(bucket) <= limit or len(bucket) == 1 for bucket in found)
