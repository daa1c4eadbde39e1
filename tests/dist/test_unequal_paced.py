"""Unequal devices, measured: paced ranks of stated speeds take as long as the forecast says."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autoplan
from autoplan.lower import lower
from autoplan.models import MLP
from autoplan.price import precision_left
from autoplan.replay import Step
from autoplan.replicas import kinds, paces, replicas
from autoplan.simulate import forecast
from costmodel.analytic import AnalyticPrices
from runtime.paced import pace
from tests.dist.launch import run_ranks

_GROUP = """
  - device: {{name: {name}, kind: cpu, memory_gib: 8, memory_gb_per_s: 1000, peak_tflops: {{fp32: {peak}}}}}
    nodes: 1
    devices_per_node: {count}
    tiers: [{{name: loopback, latency_us: 100, bandwidth_gb_per_s: 1}}]"""


def _cluster(folder: Path, speeds: tuple[tuple[float, int], ...]) -> Path:
    groups = "".join(_GROUP.format(name=f"speed-{peak}", peak=peak, count=count) for peak, count in speeds)
    file = folder / "mixed.yaml"
    file.write_text(f"name: mixed\ngroups:{groups}\nfabric: {{name: loopback, latency_us: 100, bandwidth_gb_per_s: 1}}\n")
    return file


def _measured(file: Path, constraints: dict[str, Any]) -> list[tuple[float, float]]:
    """(measured, forecast) seconds of a step under the plan for these devices, and under the same with even shares."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(7)
    batch = {"x": torch.randn(16, 64, generator=generator), "labels": torch.randint(0, 8, (16,), generator=generator)}
    model = MLP((64, 96, 96, 96, 96, 8))
    prices = AnalyticPrices(autoplan.Cluster.parse(file))
    pm = autoplan.parallelize(model, batch, cluster=file, constraints=autoplan.Constraints(**constraints), optimizer="sgd")
    graph, first, found = pm.graph, pm.plan, []
    for plan in (first, replace(first, shares=(), micro_batch_size=16 // first.degree("dp") // first.num_micro_batches)):
        pm.move_to(plan)
        programs = lower(plan, graph)
        classes = replicas(programs[0], kinds(prices, dist.get_world_size()))
        step = Step(plan.axes, plan.schedule, plan.num_micro_batches, plan.zero, None, "sgd", None, programs[0].stage_ranks, overlap=False)
        told = forecast(programs, plan, graph, prices, overlap=False)
        pace(pm.executor, paces(programs, classes, graph, prices, step, precision_left(graph, None))[pm.data_rank])
        times = []
        for _ in range(6):
            dist.barrier()
            start_s = time.perf_counter()
            pm.forward_backward(batch)
            dist.barrier()
            times.append(time.perf_counter() - start_s)
            for parameter in pm.parameters():
                parameter.grad = None
        found.append((statistics.median(times), told.step_time_s))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("speeds", "constraints"),
    [
        (((3e-5, 1), (1e-5, 1)), dict(dp=2, zero=0, micro_batch_size=8)),
        pytest.param(((3e-5, 2), (1e-5, 2)), dict(dp=2, pp=2, zero=0, micro_batch_size=2, schedule="gpipe")),
    ],
    ids=["shares", "shares and stages"],
)
def test_steps_take_as_long_as_forecast(tmp_path: Path, speeds: tuple[tuple[float, int], ...], constraints: dict[str, Any]) -> None:
    file = _cluster(tmp_path, speeds)
    (uneven_s, foretold_s), (even_s, even_foretold_s) = run_ranks(_measured, sum(count for _, count in speeds), file, constraints, timeout_s=200.0)[0]
    assert uneven_s == pytest.approx(foretold_s, rel=0.2) and even_s == pytest.approx(even_foretold_s, rel=0.2)
    assert even_s / uneven_s == pytest.approx(even_foretold_s / foretold_s, rel=0.2)
