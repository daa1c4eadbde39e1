"""Forecasts and plans against steps on paced devices.

    python benchmarks/paced/paced.py schedules [DEVICES...]               every schedule: forecast and measured step
    python benchmarks/paced/paced.py plans MODEL:DEVICES... [--num 60]    the chosen plan and a sample of others: errors, Kendall's tau, regret
    python benchmarks/paced/paced.py draw MODEL:DEVICES... --folder F     the same plans, kept in F and not measured: `plans` takes them from there

DEVICES: a file in benchmarks/paced/devices without its ending, a path, or `drawn:RANKS:SEED` (devices.py). One line of JSON for every plan and case.
With `--folder F` what was measured is kept in F: the same command goes on with other plans.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pickle
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autoplan.plan import Plan
from benchmarks.modes.namespaces import SUBNET, hosts, throttle
from benchmarks.paced.cases import Setting, described, ready, sample
from benchmarks.paced.jobs import SLACK_S, Host, Ranks, jobs_of, ranks


@dataclass(frozen=True)
class How:
    """How plans are measured: runtime/paceclock.py has `slack_s`, costmodel/paced.py `slower`. Nothing new is measured after `most_s` seconds.
    `wire_mbit`: every node is a host of its own, in a network namespace, the last one behind a link of that rate."""

    slack_s: float
    slower: float
    folder: Path | None
    most_s: float
    wire_mbit: int

    @property
    def label(self) -> str:
        return f"{self.slower:g}{'' if self.slack_s < math.inf else '-unslept'}{f'-{self.wire_mbit}-mbit' if self.wire_mbit else ''}"

    def file(self, case: str, kind: str) -> Path | None:
        """Where what is known of a case is kept: "jsonl", what was measured; "plans", of which the clock of the ranks knows nothing."""
        label = self.label if kind == "jsonl" else f"{self.slower:g}"
        return self.folder / f"{case.replace(':', '-').replace('/', '-')}-{label}.{kind}" if self.folder else None

    @contextmanager
    def pool(self, setting: Setting) -> Iterator[Ranks]:
        devices = setting.cluster.paced
        assert devices is not None
        with ExitStack() as stack:
            found = []
            if self.wire_mbit:
                names = stack.enter_context(hosts(devices.num_nodes))
                throttle(names, self.wire_mbit)
                found = [Host(name, "eth0", f"{SUBNET}.{i + 1}") for i, name in enumerate(names)]
            yield stack.enter_context(ranks(devices.num_devices, self.slack_s, hosts=found))


Row = dict[str, Any]
SLOWEST = 5.0  # times the chosen plan's forecast: slower plans are not measured
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {}, "1f1b": {}, "interleaved": {"num_chunks": 2}, "zb": {}, "zbv": {},
}  # fmt: skip


def measured(setting: Setting, pool: Ranks, name: str, plan: Plan) -> Row:
    assert setting.cluster.paced is not None
    print(f"{name}: forecast {plan.forecast.step_time_s:.2f} s", file=sys.stderr, flush=True)
    found = pool.measure(plan, jobs_of(plan, setting.graph, setting.cluster.paced, setting.batch, pool.slack_s))
    row = {"model": setting.model, "devices": setting.cluster.name, "plan": name, "forecast_s": round(plan.forecast.step_time_s, 4)}
    row |= {"measured_s": round(found.step_s, 4), "error": round(found.error, 4), "late_s": round(found.late_s, 4)}
    print(json.dumps(row), flush=True)
    return row


def schedules(devices: Iterable[str], how: How) -> None:
    """Pipelines as deep as the devices allow, up to 8 stages, the rest data parallel."""
    for name in devices:
        setting = ready("mlp", name, how.slower)
        with how.pool(setting) as pool:
            for schedule, more in SCHEDULES.items():
                pp = min(8, setting.cluster.num_devices)
                plan = setting.plan(pp=pp, tp=1, dp=setting.cluster.num_devices // pp, zero=0, schedule=schedule, micro_batch_size=1, **more)
                measured(setting, pool, described(plan), plan)


def plans(case: str, num: int, how: How) -> None:
    """The chosen plan and `num - 1` others."""
    setting, end_s = ready(*case.split(":", 1), slower=how.slower), time.monotonic() + how.most_s
    log = how.file(case, "jsonl")
    rows: list[Row] = [json.loads(line) for line in log.read_text().splitlines()] if log and log.exists() else []
    kept = _kept(case, how)
    chosen = kept[0][1] if kept else setting.plan()
    with how.pool(setting) as pool:
        for name, plan in kept or _others(setting, chosen, num, seed=len(rows)):
            if len(rows) >= num or time.monotonic() > end_s:
                break
            if all(row["plan"] != name for row in rows):
                rows.append(measured(setting, pool, name, plan))
                if log:
                    log.parent.mkdir(parents=True, exist_ok=True)
                    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(json.dumps(summary(case, described(chosen), rows)), flush=True)


def draw(case: str, num: int, how: How) -> None:
    """Keep plans for `plans`, chosen first."""
    setting, end_s, kept = ready(*case.split(":", 1), slower=how.slower), time.monotonic() + how.most_s, _kept(case, how)
    file = how.file(case, "plans")
    if file is None:
        sys.exit("draw keeps plans in --folder: name one")
    file.parent.mkdir(parents=True, exist_ok=True)
    chosen = kept[0][1] if kept else setting.plan()
    for name, plan in _others(setting, chosen, num, seed=len(kept)):
        if all(name != known for known, _ in kept):
            kept.append((name, plan))
            file.write_bytes(pickle.dumps(kept))
        if len(kept) >= num or time.monotonic() > end_s:
            break
    print(f"{case}: {len(kept)} plans")


def _kept(case: str, how: How) -> list[tuple[str, Plan]]:
    file = how.file(case, "plans")
    return pickle.loads(file.read_bytes()) if file and file.exists() else []


def _others(setting: Setting, chosen: Plan, num: int, seed: int) -> Iterator[tuple[str, Plan]]:
    """The chosen plan first."""
    yield described(chosen), chosen
    yield from sample(setting, num, SLOWEST * chosen.forecast.step_time_s, seed)


def summary(case: str, chosen: str, rows: list[Row]) -> Row:
    """`within_5`: forecasts within 5 % of what was measured; `regret`: of the chosen plan, against the best measured one."""
    row: Row = {"case": case, "plans": len(rows), "chosen": chosen}
    by_name = {one["plan"]: one for one in rows}
    if chosen not in by_name or len(rows) < 2:
        return row
    errors, best = [abs(one["error"]) for one in rows], min(rows, key=lambda one: one["measured_s"])
    row |= {"chosen_s": by_name[chosen]["measured_s"], "best": best["plan"], "best_s": best["measured_s"]}
    row["regret"] = round(by_name[chosen]["measured_s"] / best["measured_s"] - 1, 4)
    row |= {"mean_error": round(sum(errors) / len(errors), 4), "largest_error": max(errors), "within_5": sum(error <= 0.05 for error in errors)}
    return row | {"kendall_tau": kendall([(one["forecast_s"], one["measured_s"]) for one in rows])}


def kendall(pairs: list[tuple[float, float]]) -> float:
    """Kendall's tau of (forecast, measured): pairs in the same order less those in the other, as a share of all."""
    signs = [(a - c > 0) - (a - c < 0) == (b - d > 0) - (b - d < 0) for (a, b), (c, d) in itertools.combinations(pairs, 2)]
    return round(2 * sum(signs) / len(signs) - 1, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=["schedules", "plans", "draw"])
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--num", type=int, default=60, help="of plans, the chosen one among them")
    parser.add_argument("--unslept", action="store_true", help="let nothing sleep: the clocks of the devices tell")
    parser.add_argument("--slower", type=float, default=1.0, help="let everything take so many times as long: hosts that are late count less")
    parser.add_argument("--folder", type=Path, help="keep what was measured here, and go on with what is there")
    parser.add_argument("--minutes", type=float, default=math.inf, help="measure nothing new after so long")
    parser.add_argument("--wire", type=int, default=0, help="Mbit/s: nodes are network namespaces (root), the last one behind a link throttled to this")
    asked = parser.parse_args()
    how = How(math.inf if asked.unslept else SLACK_S, asked.slower, asked.folder, 60 * asked.minutes, asked.wire)
    if asked.kind == "schedules":
        return schedules(asked.cases or ["board8", "wide32"], how)
    for case in asked.cases:
        (draw if asked.kind == "draw" else plans)(case, asked.num, how)


if __name__ == "__main__":
    main()
