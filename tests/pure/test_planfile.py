"""Plan files: read back equal, refused when damaged or stale."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from handmade import FlatPrices, transformer

from autoplan.constraints import Constraints
from autoplan.errors import StalePlanError, UsageError
from autoplan.plan import Plan
from autoplan.planfile import check_fresh, dumps, loads
from autoplan.search import search
from costmodel.cluster import Cluster

GRAPH = transformer(layers=2, batch=4, seq=16, hidden=64, heads=4, inner=128, vocab=100)
CLUSTER = Cluster.parse("a100-sxm-80gb:1x2")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search(GRAPH, CLUSTER, FlatPrices(), Constraints(pp=2))


def test_a_plan_reads_back_equal(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert plan.diff(again) == ""
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_every_prefix_of_a_file_is_refused(plan: Plan) -> None:
    text = dumps(plan)
    for length in range(0, len(text) - 2, max(1, len(text) // 60)):
        with pytest.raises(StalePlanError, match=r"cut short or damaged|no plan file"):
            loads(text[:length])


def test_missing_unknown_and_misfitting_fields_are_named(plan: Plan) -> None:
    data = json.loads(dumps(plan))
    for change, message in [
        ({"zero": "three"}, r"zero should be int, found \"three\""),
        ({"zzz": 1}, "unknown entries zzz"),
        ({"version": 99}, "version 99"),
        ({"format": "other"}, "no plan file"),
    ]:
        with pytest.raises(StalePlanError, match=message):
            loads(json.dumps(data | change))
    del data["stages"]
    with pytest.raises(StalePlanError, match="lacks stages"):
        loads(json.dumps(data))


def test_a_plan_of_another_model_batch_or_cluster_is_stale(plan: Plan) -> None:
    check_fresh(plan, GRAPH, CLUSTER)
    with pytest.raises(StalePlanError, match="the model"):
        check_fresh(plan, dataclasses.replace(GRAPH, fingerprint="other"))
    with pytest.raises(StalePlanError, match="the cluster"):
        check_fresh(plan, GRAPH, Cluster.parse("a100-sxm-80gb:1x4"))
    with pytest.raises(StalePlanError, match="global batch"):
        check_fresh(dataclasses.replace(plan, global_batch=8), GRAPH)


def test_differences_are_named(plan: Plan) -> None:
    assert plan.diff(dataclasses.replace(plan, zero=3)) == "zero: 0 -> 3"


def test_a_missing_file_and_a_folder_that_is_not_there_are_usage_errors(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(UsageError, match="cannot be written"):
        plan.save(tmp_path / "no" / "plan.json")
