"""Unequal devices, measured: slower paced ranks take as long as the forecast says."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

import autoplan
from autoplan.clusterprices import prices_of
from autoplan.lower import lower
from autoplan.models import MLP
from autoplan.simulate import forecast
from tests.dist.launch import run_ranks

LAB: dict[str, Any] = {
    "name": "mixed",
    "paced": True,
    "nodes": 1,
    "memory_gib": 1,
    "ops": [{"op": "*", "base_ms": 4, "gflops_per_s": 0.002}],
    "links": [{"name": "wire", "latency_ms": 1, "mb_per_s": 20}],
}


def _measured(file: Path, constraints: dict[str, Any]) -> list[tuple[float, float]]:
    """(measured, forecast) seconds of a step under the plan for these devices, and under the same with even shares."""
    torch.set_num_threads(1)
    batch = {"x": torch.zeros(16, 64), "labels": torch.zeros(16, dtype=torch.long)}
    model = MLP((64, 96, 96, 96, 96, 8))
    cluster = autoplan.Cluster.parse(file)
    prices = prices_of(cluster, file.with_name(f"profile.{dist.get_rank()}"))
    pm = autoplan.parallelize(model, batch, cluster=file, constraints=autoplan.Constraints(**constraints), optimizer="sgd")
    first, found = pm.plan, []
    for plan in (first, replace(first, shares=(), micro_batch_size=16 // first.degree("dp") // first.num_micro_batches)):
        pm.move_to(plan)
        optimizer = pm.optimizer(torch.optim.SGD, lr=0.1)
        told = forecast(lower(plan, pm.graph), plan, pm.graph, prices, overlap=False)
        times = []
        for _ in range(6):
            dist.barrier()
            start_s = time.perf_counter()
            pm.forward_backward(batch)
            optimizer.step()
            dist.barrier()
            times.append(time.perf_counter() - start_s)
            optimizer.zero_grad()
        found.append((min(times), told.step_time_s))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slow", "world", "constraints"),
    [((0,), 2, dict(dp=2, zero=0, micro_batch_size=8)), ((0, 1), 4, dict(dp=2, pp=2, zero=0, micro_batch_size=2, schedule="gpipe"))],
    ids=["shares", "shares and stages"],
)
def test_steps_take_as_long_as_forecast(tmp_path: Path, slow: tuple[int, ...], world: int, constraints: dict[str, Any]) -> None:
    file = tmp_path / "mixed.yaml"
    file.write_text(yaml.safe_dump(LAB | {"devices_per_node": world, "slowdowns": dict.fromkeys(slow, 3.0)}))
    (uneven_s, foretold_s), (even_s, even_foretold_s) = run_ranks(_measured, world, file, constraints, timeout_s=300.0)[0]
    assert uneven_s == pytest.approx(foretold_s, rel=0.2) and even_s == pytest.approx(even_foretold_s, rel=0.2)
    assert even_s / uneven_s == pytest.approx(even_foretold_s / foretold_s, rel=0.2)
