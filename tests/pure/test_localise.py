"""Localising: size arguments follow local shapes, everything else of a call stays as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from autoplan.graph import Op, Value
from autoplan.layout import Split
from autoplan.localise import local_shape, localise
from runtime.instr import Arg, Instr, Output, Ref, TensorSpec

Shape = tuple[int, ...]
X, W, B = Ref("x"), Ref("w"), Ref("b")


def local(target: str, args: tuple[Arg, ...], dense: list[Shape], shapes: Mapping[str, Shape], **kwargs: Any) -> Instr:
    outputs = tuple(Output(f"y{i}", TensorSpec(shape, "float32")) for i, shape in enumerate(dense))
    op = Op(Instr(outputs, target, args, tuple(kwargs.items()), len(dense) > 1), (), (), "", "", 0, ())
    return localise(op, shapes.__getitem__)


def test_a_view_gets_local_sizes_in_place_of_dense_ones_and_of_minus_one() -> None:
    found = local("aten.view.default", (X, (8, 20, -1, 16)), [(8, 20, 4, 16)], {"x": (3, 20, 32), "y0": (3, 20, 2, 16)})
    assert found.args == (X, (3, 20, 2, 16))
    assert found.outputs[0].spec == TensorSpec((3, 20, 2, 16), "float32")


def test_a_view_whose_elements_do_not_agree_is_an_invariant_broken() -> None:
    with pytest.raises(AssertionError, match="cannot be viewed"):
        local("aten.reshape.default", (X, (8, 4)), [(8, 4)], {"x": (8, 4), "y0": (4, 4)})


def test_a_squeeze_keeps_dimensions_that_only_their_division_made_one() -> None:
    found = local("aten.squeeze.default", (X,), [(2, 6)], {"x": (1, 1, 6), "y0": (1, 6)})
    assert (found.target, found.args) == ("aten.reshape.default", (X, (1, 6)))


CALLS: list[tuple[str, tuple[Arg, ...], list[Shape], dict[str, Shape], tuple[Arg, ...]]] = [
    ("aten.expand.default", (X, (8, -1, 6)), [(8, 4, 6)], {"x": (1, 2, 6), "y0": (4, 2, 6)}, (X, (4, 2, 6))),
    ("aten.unflatten.int", (X, -1, (-1, 16)), [(8, 4, 16)], {"x": (8, 32), "y0": (8, 2, 16)}, (X, -1, (2, 16))),
    ("aten.repeat.default", (X, (4, 3)), [(8, 12)], {"x": (2, 2), "y0": (4, 6)}, (X, (2, 3))),
    ("aten.repeat_interleave.self_int", (X, 4, 1), [(8, 24)], {"x": (8, 6), "y0": (8, 12)}, (X, 2, 1)),
    ("aten.zeros.default", ((8, 4),), [(8, 4)], {"y0": (2, 4)}, ((2, 4),)),
    ("aten.new_full.default", (X, (8, 4), 1.5), [(8, 4)], {"x": (3,), "y0": (8, 2)}, (X, (8, 2), 1.5)),
    ("aten.slice.Tensor", (X, 1, 0, 6), [(8, 6)], {"x": (8, 3), "y0": (8, 3)}, (X, 1, 0, 3)),
    ("aten.slice.Tensor", (X, 1, 2, 6), [(8, 4)], {"x": (4, 8), "y0": (4, 4)}, (X, 1, 2, 6)),
    ("aten.narrow.default", (X, 1, 0, 6), [(8, 6)], {"x": (8, 3), "y0": (8, 3)}, (X, 1, 0, 3)),
    ("aten.split.Tensor", (X, 64, 2), [(8, 5, 64)] * 3, {"x": (8, 5, 96), **{f"y{i}": (8, 5, 32) for i in range(3)}}, (X, 32, 2)),
    ("aten.split.sizes", (X, (4, 4), -1), [(8, 4)] * 2, {"x": (8, 4), "y0": (8, 2), "y1": (8, 2)}, (X, (2, 2), -1)),
    ("aten.split_with_sizes.default", (X, (4, 8), -1), [(8, 4), (8, 8)], {"x": (4, 12), "y0": (4, 4), "y1": (4, 8)}, (X, (4, 8), -1)),
    ("aten.group_norm.default", (X, 4, W, B), [(8, 12, 5)], {"x": (8, 6, 5), "w": (6,), "b": (6,), "y0": (8, 6, 5)}, (X, 2, W, B)),
    (
        "aten.conv2d.default",  # the groups are divided
        (X, W, None, (1, 1), (0, 0), (1, 1), 4),
        [(2, 12, 5, 5)],
        {"x": (2, 4, 5, 5), "w": (6, 2, 1, 1), "y0": (2, 6, 5, 5)},
        (X, W, None, (1, 1), (0, 0), (1, 1), 2),
    ),
    (
        "aten.conv2d.default",  # output channels inside each group are divided
        (X, W, None, (1, 1), (0, 0), (1, 1), 4),
        [(2, 16, 5, 5)],
        {"x": (2, 8, 5, 5), "w": (8, 2, 1, 1), "y0": (2, 8, 5, 5)},
        (X, W, None, (1, 1), (0, 0), (1, 1), 4),
    ),
    (
        "aten.conv_transpose2d.input",
        (X, W, None, (1, 1), (0, 0), (0, 0), 4),
        [(2, 12, 5, 5)],
        {"x": (2, 4, 5, 5), "w": (4, 3, 1, 1), "y0": (2, 6, 5, 5)},
        (X, W, None, (1, 1), (0, 0), (0, 0), 2),
    ),
    ("aten.softmax.int", (X, -1), [(8, 6)], {"x": (4, 6), "y0": (4, 6)}, (X, -1)),
    ("aten.layer_norm.default", (X, (6,), W, B), [(8, 6)], {"x": (4, 6), "w": (6,), "b": (6,), "y0": (4, 6)}, (X, (6,), W, B)),
]


@pytest.mark.parametrize(("target", "args", "dense", "shapes", "expected"), CALLS, ids=[f"{c[0]}{c[1][1:]}" for c in CALLS])
def test_arguments_that_are_sizes_follow(target: str, args: tuple[Arg, ...], dense: list[Shape], shapes: dict[str, Shape], expected: tuple[Arg, ...]) -> None:
    found = local(target, args, dense, shapes)
    assert (found.target, found.args, found.kwargs) == (target, expected, ())
    assert [output.spec and output.spec.shape for output in found.outputs] == [shapes[f"y{i}"] for i in range(len(dense))]


def test_sizes_given_by_keyword_follow_too() -> None:
    found = local("aten.full.default", (), [(8, 4)], {"y0": (8, 2)}, size=(8, 4), fill_value=0.5)
    assert found.kwargs == (("size", (8, 2)), ("fill_value", 0.5))


def test_local_shapes_divide_the_factors_that_are_split() -> None:
    value = Value("w", TensorSpec((24, 10), "float32"), "parameter", ((0, 1, 2), (3,)), True)
    lengths = (3, 4, 2, 10)
    assert local_shape(value, lengths, [(Split(0, 1), 2)]) == (12, 10)
    assert local_shape(value, lengths, [(Split(0, 1), 4), (Split(1, 0), 5)]) == (6, 2)
    assert local_shape(value, {**dict(enumerate(lengths)), 3: 7}, []) == (24, 7)
    with pytest.raises(AssertionError, match="not divisible by 2"):
        local_shape(value, lengths, [(Split(0, 0), 2)])
