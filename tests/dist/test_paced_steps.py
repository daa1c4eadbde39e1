"""Paced devices: a step of the real executor takes as long as its plan's forecast says, and moves what its program lists."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from autoplan import Constraints, capture, find_plan
from autoplan.clusterprices import prices_of
from autoplan.graph import Graph
from autoplan.lower import lower
from autoplan.models import MLP
from autoplan.pacing import SLACK_S, pace_of
from autoplan.plan import Plan
from autoplan.replicas import place_of
from costmodel.cluster import Cluster
from costmodel.paced import PacedPrices
from runtime.pacedjob import Found, Job, least_disturbed, run
from runtime.traffic import traffic
from tests.dist.launch import run_ranks

LAB: dict[str, Any] = {
    "name": "lab",
    "paced": True,
    "nodes": 1,
    "devices_per_node": 4,
    "memory_gib": 1,
    "ops": [{"op": "aten.linear*", "base_ms": 6, "backward_weight": 1.5, "multiple": 8, "odd_factor": 2}, {"op": "*", "base_ms": 2}],
    "links": [{"name": "board", "domain": 2, "latency_ms": 2, "mb_per_s": 10}, {"name": "wire", "latency_ms": 4, "mb_per_s": 4}],
    "optimizer": {"base_ms": 4},
}
PIPELINES = {
    name: dict(pp=4, dp=1, tp=1, micro_batch_size=8, schedule=name, num_chunks=2 if name in ("interleaved", "zbv") else None)
    for name in ("gpipe", "1f1b", "interleaved", "zb", "zbv")
}
MESHES: dict[str, dict[str, Any]] = {
    "dp2 x pp2": dict(dp=2, pp=2, tp=1, zero=0, micro_batch_size=8),
    "tp2 x pp2, recomputed": dict(dp=1, pp=2, tp=2, micro_batch_size=16, recompute="full"),
    "zero3": dict(dp=4, pp=1, tp=1, zero=3, micro_batch_size=4),
    "zero2 in groups": dict(dp=4, pp=1, tp=1, zero=2, zero_group=2, micro_batch_size=4),
    "zero3 x pp2, interleaved": dict(dp=2, pp=2, tp=1, zero=3, micro_batch_size=8, schedule="interleaved"),
    "zero1 x pp2, zb, kept in part": dict(dp=2, pp=2, tp=1, zero=1, micro_batch_size=8, schedule="zb", recompute="selective"),
    "zero2 x tp2": dict(dp=2, pp=1, tp=2, zero=2, micro_batch_size=8),
}


def lab(folder: Path, **changes: Any) -> Cluster:
    file = folder / "lab.yaml"
    file.write_text(yaml.safe_dump(LAB | changes))
    return Cluster.parse(file)


def model_and_batch() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return MLP((16, 24, 16, 24, 17, 24, 16, 24, 8)), {"x": torch.zeros(32, 16), "labels": torch.zeros(32, dtype=torch.long)}


def jobs_of(plan: Plan, graph: Graph, cluster: Cluster, batch: Any, slack_s: float) -> list[Job]:
    found = []
    assert cluster.paced is not None
    for rank in range(cluster.num_devices):
        program = lower(plan, graph, data_rank=place_of(plan.axes, "dp", rank))[place_of(plan.axes, "pp", rank)]
        found.append(Job(program, pace_of(program, plan, graph, PacedPrices(cluster.paced), rank, slack_s), batch))
    return found


def _run(jobs: list[list[Job]]) -> list[Found]:
    import torch.distributed as dist

    return [run(own[dist.get_rank()], 1, most_steps=8) for own in jobs]


def _check(folder: Path, cases: dict[str, dict[str, Any]], slack_s: float, within: float) -> None:
    cluster = lab(folder)
    model, batch = model_and_batch()
    graph, prices = capture(model, batch), prices_of(cluster, folder / "profile.sqlite")
    plans = {name: find_plan(graph, None, cluster, Constraints(**fixed), "sgd", prices=prices) for name, fixed in cases.items()}
    jobs = [jobs_of(plan, graph, cluster, batch, slack_s) for plan in plans.values()]
    by_rank = run_ranks(_run, 4, jobs, timeout_s=120.0)
    for number, (name, plan) in enumerate(plans.items()):
        found = [own[number] for own in by_rank]
        step = least_disturbed(found)
        assert step.seconds == pytest.approx(plan.forecast.step_time_s, rel=within), (name, step.seconds, step.late_s)
        for rank, one in enumerate(found):
            coordinates = {axis: place_of(plan.axes, axis, rank) for axis, _ in plan.axes}
            assert one.traffic == traffic(jobs[number][rank].program, coordinates), (name, rank)


def test_the_clocks_of_paced_devices_agree_with_the_forecast(tmp_path: Path) -> None:
    """Nothing sleeps, so that the load of the machine does not count."""
    _check(tmp_path, PIPELINES | MESHES, math.inf, 0.01)


@pytest.mark.slow
def test_every_schedule_takes_as_long_as_forecast(tmp_path: Path) -> None:
    _check(tmp_path, PIPELINES, SLACK_S, 0.05)
