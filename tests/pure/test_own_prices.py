"""Plans for the present machine are priced by what was measured on it, where something was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import autoplan
from autoplan.api import load_cluster
from costmodel.analytic import AnalyticPrices
from costmodel.measured import MeasuredPrices
from costmodel.opkey import OpKey, OpTime
from costmodel.profile import Profile
from tests.zoo import ZOO


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    """An empty one, where this user's is looked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.set_num_threads(1)
    return Profile()


def test_without_a_profile_formulas_price_this_machine(profile: Profile) -> None:
    model, batch = ZOO["mlp"]()
    profile.put_op(OpKey("aten.relu.default", (), (), "", (), 0), OpTime(1e-6, 1e-6, 0.0), 1)  # but no product
    assert autoplan.find_plan(model, batch, "detect:2").forecast.source == "analytic"


def test_what_was_profiled_prices_the_next_plans_of_this_machine(profile: Profile) -> None:
    model, batch = ZOO["mlp"]()
    graph, cluster = autoplan.capture(model, batch), load_cluster("detect:2")
    autoplan.find_plan(graph, None, cluster, prices=MeasuredPrices(cluster, profile, AnalyticPrices(cluster)))
    known = Profile().num_ops
    plan = autoplan.find_plan(graph, None, "detect:2")
    assert plan.forecast.source == "measured" and Profile().num_ops == known
    counted = next(line for line in plan.forecast.assumptions if "keys measured" in line)
    assert " 0 keys measured" not in counted and counted.endswith("0 from formulas")
    assert autoplan.find_plan(graph, None, "cpu:1x2").forecast.source == "analytic", "which may be another machine"
    assert autoplan.parallelize(model, batch).plan.forecast.source == "measured"


def test_sizes_that_were_not_timed_are_interpolated_from_the_first_question_on(profile: Profile) -> None:
    cluster = load_cluster("detect:1")
    analytic = AnalyticPrices(cluster)

    def product(size: int) -> OpKey:
        weight = ((size, size), "float32")
        return OpKey("aten.linear.default", (weight, weight), (weight,), "", (True, True), 2 * size**3)

    for size, factor in ((64, 2.0), (256, 4.0)):
        formula = analytic.op(product(size))
        profile.put_op(product(size), OpTime(factor * formula.forward_s, factor * formula.backward_input_s, factor * formula.backward_weight_s), 1)
    again = MeasuredPrices(cluster, Profile(), analytic, budget_s=0.0)
    assert 2.0 < again.op(product(128)).forward_s / analytic.op(product(128)).forward_s < 4.0
    assert again.op(product(1024)).forward_s == pytest.approx(4.0 * analytic.op(product(1024)).forward_s)
    assert again.origins == {"interpolated": 2}


def test_a_machine_that_is_asked_for_wrongly_is_refused() -> None:
    with pytest.raises(autoplan.ClusterError, match="detect:RANKS"):
        load_cluster("detect:many")
