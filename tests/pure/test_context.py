"""Context and expert axes: what is divided, what is kept, what is refused and why."""

from __future__ import annotations

import pytest

import autoplan
from autoplan.contextaxis import check_context, context_axis
from autoplan.frontend import capture
from autoplan.graph import Graph
from autoplan.layout import PARTIAL, WHOLE, Split
from autoplan.lower import lower
from autoplan.planfile import dumps, loads
from autoplan.price import Pricer
from autoplan.route import route
from autoplan.workload import load_of
from tests.plans import manual_plan
from tests.pure.handmade import FlatPrices
from tests.zoo import gpt2, llama, mixtral, mlp, vit


@pytest.fixture(scope="module")
def decoder() -> Graph:
    model, batch = llama()
    return capture(model, batch, check=False)


def test_a_sequence_is_divided_in_every_operator_of_a_decoder(decoder: Graph) -> None:
    axis = context_axis(decoder, "cp")
    assert [decoder.factor_sizes[f] for f in axis.factors] == [20] and axis.blocker is None
    assert decoder.loss is not None and axis.layouts[decoder.loss] == PARTIAL
    heavy = [(op, option) for op, option in zip(decoder.ops, axis.options, strict=True) if op.flops]
    assert all(any(isinstance(layout, Split) for layout in option.reads) for _, option in heavy)
    assert [option.label for op, option in heavy if "attention" in op.instr.target] == ["ring", "ring"]


@pytest.mark.parametrize("way", ["ring", "heads", "self"])
def test_a_rank_keeps_its_part_of_the_activations(way: str) -> None:
    model, batch = gpt2()
    graph = capture(model, batch, check=False)
    kept = {}
    for cp in (1, 2, 4):
        plan = manual_plan(graph, cp=cp, context=way if cp > 1 else "")
        (program,) = lower(plan, graph)
        kept[cp] = load_of(program, program.stages[0], graph, Pricer(FlatPrices(), None)).saved_bytes
    assert kept[4] == pytest.approx(kept[2] / 2, rel=0.01)
    if way == "ring":
        assert kept[2] == pytest.approx(kept[1] / 2, rel=0.01)
    elif way == "heads":  # attention's output in both layouts
        assert kept[1] / 2 < kept[2] < 1.06 * kept[1] / 2
    else:  # the weights of all keys besides
        assert kept[2] > kept[1] / 2


def test_an_expert_axis_divides_rows_and_rests_experts() -> None:
    model, batch = mixtral()
    graph = capture(model, batch, check=False)
    (program,) = lower(manual_plan(graph, ep=2, dp=2), graph)
    stored = {s.fqn: s for s in program.stages[0].stored}
    experts = next(s for name, s in stored.items() if name.endswith("gate_up_proj"))
    other = next(s for name, s in stored.items() if name.endswith("q_proj.weight"))
    assert [chunk.axis for chunk in experts.chunks] == ["ep"] and experts.partial == ("dp",)
    assert other.chunks == () and other.partial == ("dp", "ep") and program.stages[0].loss_partial == ("dp", "ep")


def refusal(graph: Graph, name: str, degree: int, way: str | None = None) -> str:
    with pytest.raises(autoplan.InfeasibleError) as error:
        check_context(graph, name, degree, context_axis(graph, name, (), way or "ring"), way)
    return str(error.value)


def test_what_cannot_be_divided_is_refused_with_the_nearest_fix(decoder: Graph) -> None:
    check_context(decoder, "cp", 3, context_axis(decoder, "cp"))  # 6, 7 and 7 of 20 positions
    told = refusal(decoder, "cp", 21)
    assert "does not divide a sequence of 20, and some ranks would have no position: make it 21 with padding whose labels are ignored" in told
    assert "2 key heads" in refusal(decoder, "cp", 4, "heads")
    assert "no layer of experts" in refusal(decoder, "ep", 2)
    images = capture(*vit(), check=False)
    assert "aten.conv2d.default in vit.embeddings" in refusal(images, "cp", 2)
    assert "no attention operator" in refusal(capture(*mlp(), check=False), "cp", 2)
    experts = capture(*mixtral(), check=False)
    assert "does not divide 4 experts: nearest that does is ep=4" in refusal(experts, "ep", 8)


def test_cp_is_searched_where_it_is_asked_for_and_where_sequences_are_long() -> None:
    model, batch = llama()
    short = autoplan.find_plan(model, batch, cluster="cpu:1x4")
    assert short.space["cp"] == (1,) and short.space["ep"] == (1,)
    asked = autoplan.find_plan(model, batch, cluster="cpu:1x4", constraints=autoplan.Constraints(cp=2, pp=1))
    assert asked.space["cp"] == (2,) and asked.degree("cp") == 2 and asked.context in ("ring", "heads")
    assert asked.space["context"] == ("heads", "ring") and asked.gap >= 0
    assert loads(dumps(asked)) == asked
    uneven = autoplan.find_plan(model, batch, cluster="cpu:1x3", constraints=autoplan.Constraints(cp=3))
    assert uneven.degree("cp") == 3, "6, 7 and 7 of 20 positions"
    with pytest.raises(autoplan.InfeasibleError, match="no layer of experts"):
        autoplan.find_plan(model, batch, cluster="cpu:1x4", constraints=autoplan.Constraints(ep=2))


def test_an_outer_axis_never_moves_while_an_inner_one_divides_the_same_factor() -> None:
    here, there = Split(1), Split(2)
    order = {here: (0, 1, 2), there: (0, 2, 1)}  # axis 1 is a guest of the second factor
    layouts = (WHOLE, here, there)
    for have in ((a, b, c) for a in layouts for b in layouts for c in layouts):
        for need in ((a, b, c) for a in layouts for b in layouts for c in layouts):
            at = list(have)
            for axis, layout in route(have, need, lambda where: order[where]):
                for factor in {at[axis], layout} - {WHOLE}:
                    nest = order[factor]  # type: ignore[index]
                    assert not any(at[inner] == factor for inner in nest[nest.index(axis) + 1 :]), (have, need)
                at[axis] = layout
            assert tuple(at) == need
