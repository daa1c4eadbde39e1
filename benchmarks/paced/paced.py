"""Forecasts and plans against steps on paced devices.

    python benchmarks/paced/paced.py schedules [DEVICES...]               every schedule: forecast and measured step
    python benchmarks/paced/paced.py accuracy MODEL:DEVICES [--num 20]    plans of a model: errors, and Kendall's tau
    python benchmarks/paced/paced.py regret MODEL:DEVICES [--num 60]      the chosen plan against the best measured of a sample

DEVICES: a file in benchmarks/paced/devices without its ending, or a path. One line of JSON for every plan and case.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.paced.cases import Setting, described, ready, sample
from benchmarks.paced.jobs import SLACK_S, Measured, Ranks, jobs_of, ranks


@dataclass(frozen=True)
class How:
    """How plans are measured: runtime/paceclock.py has `slack_s`, costmodel/paced.py `slower`."""

    slack_s: float
    slower: float


SLOWEST = 5.0  # times the chosen plan's forecast: slower plans are not measured
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {}, "1f1b": {}, "interleaved": {"num_chunks": 2}, "zb": {}, "zbv": {},
}  # fmt: skip


def measured(setting: Setting, pool: Ranks, name: str, plan: Any, **more: Any) -> Measured:
    assert setting.cluster.paced is not None
    print(f"{name}: forecast {plan.forecast.step_time_s:.2f} s", file=sys.stderr, flush=True)
    jobs = jobs_of(plan, setting.graph, setting.cluster.paced, setting.batch, pool.slack_s)
    found = pool.measure(plan, jobs)
    row = {"model": setting.model, "devices": setting.cluster.name, "plan": name, "forecast_s": round(plan.forecast.step_time_s, 4)}
    row |= {"measured_s": round(found.step_s, 4), "error": round(found.error, 4), "late_s": round(found.late_s, 4)}
    print(json.dumps(row | more), flush=True)
    return found


def schedules(devices: Iterable[str], how: How) -> None:
    """Pipelines as deep as the devices allow, up to 8 stages, the rest data parallel."""
    for name in devices:
        setting = ready("mlp", name, how.slower)
        with ranks(setting.cluster.num_devices, how.slack_s) as pool:
            for schedule, more in SCHEDULES.items():
                pp = min(8, setting.cluster.num_devices)
                plan = setting.plan(pp=pp, tp=1, dp=setting.cluster.num_devices // pp, zero=0, schedule=schedule, micro_batch_size=1, **more)
                measured(setting, pool, described(plan), plan)


def accuracy(case: str, num: int, how: How) -> None:
    setting = ready(*case.split(":", 1), slower=how.slower)
    with ranks(setting.cluster.num_devices, how.slack_s) as pool:
        most_s = SLOWEST * setting.plan().forecast.step_time_s
        found = [measured(setting, pool, name, plan) for name, plan in sample(setting, num, most_s)]
    errors = [abs(m.error) for m in found]
    tau = kendall([(m.plan.forecast.step_time_s, m.step_s) for m in found])
    print(json.dumps({"case": case, "plans": len(found), "mean_error": mean(errors), "largest_error": max(errors), "kendall_tau": tau}), flush=True)


def regret(case: str, num: int, how: How) -> None:
    setting = ready(*case.split(":", 1), slower=how.slower)
    with ranks(setting.cluster.num_devices, how.slack_s) as pool:
        chosen_plan = setting.plan()
        chosen = measured(setting, pool, described(chosen_plan), chosen_plan, chosen=True)
        others = sample(setting, num, SLOWEST * chosen_plan.forecast.step_time_s)
        found = [measured(setting, pool, name, plan) for name, plan in others if name != described(chosen_plan)]
    best = min([chosen, *found], key=lambda m: m.step_s)
    row = {"case": case, "plans": len(found) + 1, "chosen": described(chosen_plan), "chosen_s": chosen.step_s, "gap": chosen_plan.gap}
    row |= {"best": described(best.plan), "best_s": best.step_s, "regret": round(chosen.step_s / best.step_s - 1, 4)}
    errors = [abs(m.error) for m in (chosen, *found)]
    tau = kendall([(m.plan.forecast.step_time_s, m.step_s) for m in (chosen, *found)])
    print(json.dumps(row | {"mean_error": mean(errors), "largest_error": max(errors), "kendall_tau": tau}), flush=True)


def kendall(pairs: list[tuple[float, float]]) -> float:
    """Kendall's tau of (forecast, measured): pairs in the same order less those in the other, as a share of all."""
    signs = [(a - c > 0) - (a - c < 0) == (b - d > 0) - (b - d < 0) for (a, b), (c, d) in itertools.combinations(pairs, 2)]
    return round(2 * mean([float(sign) for sign in signs]) - 1, 4)


def mean(values: list[float]) -> float:
    return round(sum(values) / max(1, len(values)), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=["schedules", "accuracy", "regret"])
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--num", type=int, default=0)
    parser.add_argument("--unslept", action="store_true", help="let nothing sleep: the clocks of the devices tell")
    parser.add_argument("--slower", type=float, default=1.0, help="let everything take so many times as long: hosts that are late count less")
    asked = parser.parse_args()
    how = How(math.inf if asked.unslept else SLACK_S, asked.slower)
    if asked.kind == "schedules":
        return schedules(asked.cases or ["board8", "wide32"], how)
    for case in asked.cases:
        accuracy(case, asked.num or 20, how) if asked.kind == "accuracy" else regret(case, asked.num or 60, how)


if __name__ == "__main__":
    main()
