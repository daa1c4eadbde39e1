"""Rules that users give: labels are claims, proved before use; a wrong one stays whole and says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autoplan.errors import UsageError
from autoplan.factors import annotate
from autoplan.graph import Graph, Op, Value
from autoplan.rules import Registry
from autoplan.shardsim import with_proved_rules
from runtime.instr import Instr, Output, Ref, TensorSpec


@pytest.fixture(scope="module", autouse=True)
def custom_operator() -> Iterator[None]:
    """`rulestest::blend(x, y)`: softmax over the last dimension of x, times y."""
    library = torch.library.Library("rulestest", "DEF")
    library.define("blend(Tensor x, Tensor y) -> Tensor")
    library.impl("blend", lambda x, y: torch.softmax(x, -1) * y, "CompositeImplicitAutograd")
    yield
    library._destroy()


def graph_under(*rules: str) -> Graph:
    registry = Registry()
    for text in rules:
        registry.register("rulestest::blend", text)
    spec = TensorSpec((4, 6, 8), "float32")
    values = {name: Value(name, spec, kind, (), True) for name, kind in (("x", "input"), ("y", "input"), ("z", "activation"))}
    op = Op(Instr((Output("z", spec),), "rulestest.blend.default", (Ref("x"), Ref("y"))), (), (), "", "", 1, ())
    new_values, ops, sizes, batch = annotate(values, (op,), (), registry)
    return Graph("one", new_values, ops, (), sizes, batch, None, ("z",), (), "")


def test_without_a_rule_the_operator_stays_whole() -> None:
    assert graph_under().ops[0].loops == ()


def test_a_right_rule_is_used_once_it_is_proved() -> None:
    claimed = graph_under("b s _, b s _ -> b s _")
    assert not claimed.ops[0].proved and [loop.label for loop in claimed.ops[0].loops] == ["b", "s"]
    proved = with_proved_rules(claimed)
    assert proved.ops[0].proved and [loop.label for loop in proved.ops[0].loops] == ["b", "s"] and proved.warnings == ()


def test_a_wrong_claim_is_dropped_with_the_operator_named() -> None:
    proved = with_proved_rules(graph_under("b s v, b s v -> b s v"))
    assert [loop.label for loop in proved.ops[0].loops] == ["b", "s"]
    (warning,) = proved.warnings
    assert "rulestest.blend.default" in warning and "'v'" in warning


def test_a_label_that_the_output_lacks_is_not_taken_for_a_sum() -> None:
    assert [loop.label for loop in graph_under("b s k, b s k -> b s _").ops[0].loops] == ["b", "s"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rulestest.blend", "b -> b", "namespace::operator"),
        ("rulestest::blend", "b s", "no '->'"),
        ("rulestest::blend", "b* s* -> b*", "two starred labels"),
        ("rulestest::blend", "b, s! -> b", "cannot read"),
    ],
)
def test_a_rule_that_cannot_be_read_is_refused(name: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Registry().register(name, text)


def test_a_rule_that_does_not_fit_the_shapes_names_both() -> None:
    with pytest.raises(UsageError, match=r"'b s, b s -> b s' of rulestest.blend.default does not fit shapes \[4, 6, 8\]"):
        graph_under("b s, b s -> b s")


def test_a_label_with_two_lengths_is_refused() -> None:
    with pytest.raises(UsageError, match="two lengths"):
        graph_under("b b c, b s c -> b s c")


def test_a_rule_with_too_few_operands_is_refused() -> None:
    with pytest.raises(UsageError, match="1 operands and 1 outputs, the call 2"):
        graph_under("b s c -> b s c")


def test_a_product_of_unknown_labels_is_refused() -> None:
    with pytest.raises(UsageError, match="does not tell the length of"):
        graph_under("b s (h d), b s (h d) -> b s (h d)")
