"""Regret: is any other plan of the space, priced by the same forecast, better than the chosen one by more than its gap?

    python benchmarks/regret/regret.py constraints [--num 300] [CASE...]     random legal constraints, each planned and forecast
    python benchmarks/regret/regret.py published [CASE...]                   plans that others published

One line of JSON a case, and one for every plan that is better than (1 - gap) times the chosen one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autoplan import AutoplanError, Constraints, Plan, capture, find_plan
from autoplan.graph import Graph
from autoplan.modelsource import BatchSizes, load
from autoplan.space import divisors
from costmodel.analytic import AnalyticPrices
from costmodel.cluster import Cluster


@dataclass(frozen=True)
class Case:
    """A model, a cluster and a global batch, with plans that were published for it."""

    model: str
    cluster: str
    rows: int
    seq: int
    published: tuple[tuple[str, dict[str, Any]], ...] = ()


# Narayanan et al. 2021 (SC21), tables 1 and 2: 1F1B (interleaved where they say so, which is faster here too), full recomputation
def _sc21(tp: int, pp: int, zero: int = 0, micro: int = 1) -> dict[str, Any]:
    return {"tp": tp, "pp": pp, "zero": zero, "micro_batch_size": micro, "recompute": "full"} | ({"schedule": "1f1b"} if pp > 1 else {})


# torchtitan's published runs of Llama 3
def _titan(tp: int, pp: int, recompute: str, micro: int) -> dict[str, Any]:
    return {"tp": tp, "pp": pp, "zero": 3, "micro_batch_size": micro, "recompute": recompute} | ({"schedule": "1f1b"} if pp > 1 else {})


PUBLISHED = {
    "gpt3-175b-768": Case("gpt3-175b", "a100-sxm-80gb:96x8", 1536, 2048, (("SC21 table 2, pipeline and tensor parallel", _sc21(8, 12)),)),
    "gpt3-175b-1536": Case(
        "gpt3-175b", "a100-sxm-80gb:192x8", 1536, 2048,
        (("SC21 table 2, pipeline and tensor parallel", _sc21(8, 12)), ("SC21 table 2, ZeRO-3", _sc21(1, 1, 3))),
    ),
    "gpt-530b-2520": Case("gpt-530b", "a100-sxm-80gb:315x8", 2520, 2048, (("SC21 table 1", _sc21(8, 35)),)),
    "gpt-1t-3072": Case("gpt-1t", "a100-sxm-80gb:384x8", 3072, 2048, (("SC21 table 1", _sc21(8, 64)),)),
    "llama3-8b-128": Case("llama3-8b", "h100-sxm-96gb:16x8", 256, 8192, (("torchtitan, FSDP", _titan(1, 1, "none", 2)),)),
    "llama3-70b-256": Case("llama3-70b", "h100-sxm-96gb:32x8", 512, 8192, (("torchtitan, 2D", _titan(8, 1, "full", 16)),)),
    "llama3-405b-512": Case("llama3-405b", "h100-sxm-96gb:64x8", 256, 8192, (("torchtitan, 3D, 1F1B", _titan(8, 8, "full", 4)),)),
}  # fmt: skip

RANDOM = {
    "llama3-8b-64": Case("llama3-8b", "h100-sxm-80gb:8x8", 512, 8192),
    "llama3-70b-128": Case("llama3-70b", "h100-sxm-80gb:16x8", 256, 8192),
    "gpt3-13b-32": Case("gpt3-13b", "a100-sxm-80gb:4x8", 128, 2048),
    "gpt2-xl-8": Case("gpt2-xl", "v100-sxm2-32gb:1x8", 64, 1024),
}


@dataclass(frozen=True)
class Setting:
    """One case made ready: prices and graph are shared by all its plans."""

    case: Case
    graph: Graph
    cluster: Cluster
    prices: AnalyticPrices

    def plan(self, constraints: Constraints) -> Plan:
        return find_plan(self.graph, None, self.cluster, constraints, precision="bf16", prices=self.prices)


def ready(case: Case) -> Setting:
    source = load(case.model, BatchSizes(case.rows, case.seq))
    cluster = Cluster.parse(case.cluster)
    return Setting(case, capture(source.model, source.batch, precision="bf16"), cluster, AnalyticPrices(cluster))


def random_constraints(setting: Setting, draw: random.Random) -> Constraints:
    """A legal mesh, and most of the other fields too."""
    world, rows = setting.cluster.num_devices, setting.case.rows
    while True:
        tp = draw.choice([d for d in divisors(world) if d <= 16])
        pp = draw.choice([d for d in divisors(world // tp) if d <= len(setting.graph.blocks)])
        dp = world // tp // pp
        if rows % dp == 0:
            break
    fields: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp}
    if draw.random() < 0.8:
        fields["micro_batch_size"] = draw.choice([d for d in divisors(rows // dp) if d <= 16])
    if draw.random() < 0.7:
        fields["zero"] = draw.choice([0, 1, 2, 3]) if dp > 1 else 0
    if draw.random() < 0.7:
        fields["recompute"] = draw.choice(["none", "full"])
    if pp > 1 and draw.random() < 0.7:
        fields["schedule"] = draw.choice(["gpipe", "1f1b"])
    if tp > 1 and draw.random() < 0.5:
        fields["sequence_parallel"] = draw.choice([True, False])
    return Constraints(**fields)


def others(setting: Setting, kind: str, num: int) -> Iterator[tuple[str, Constraints]]:
    if kind == "published":
        for name, fields in setting.case.published:
            yield name, Constraints(**fields)
        return
    draw = random.Random(setting.case.model)
    for _ in range(num):
        constraints = random_constraints(setting, draw)
        yield str({f.name: v for f in dataclasses.fields(constraints) if (v := getattr(constraints, f.name)) is not None}), constraints


def regret(name: str, case: Case, kind: str, num: int) -> None:
    setting = ready(case)
    chosen = setting.plan(Constraints())
    best_s = chosen.forecast.step_time_s
    fitting, better = 0, 0
    slower: list[float] = []
    for label, constraints in others(setting, kind, num):
        try:
            plan = setting.plan(constraints)
        except AutoplanError as error:
            if kind == "published":
                print(json.dumps({"case": name, "plan": label, "refused": str(error)}), flush=True)
            continue
        fitting += 1
        slower.append(plan.forecast.step_time_s / best_s)
        wrong = plan.forecast.step_time_s < best_s * (1 - chosen.gap) * (1 - 1e-9)
        better += wrong
        if wrong or kind == "published":
            print(
                json.dumps({"case": name, "plan": label, "step_s": plan.forecast.step_time_s, "chosen_s": best_s, "is_better": wrong} | _why(plan)), flush=True
            )
    told = {
        "case": name, "chosen": dict(chosen.axes) | {"zero": chosen.zero, "rows": chosen.micro_batch_size}, "step_s": best_s, "gap": chosen.gap,
        "asked": len(case.published) if kind == "published" else num, "fitting": fitting, "better_than_the_gap_allows": better,
        "fastest_other": min(slower, default=None), "median_other": sorted(slower)[len(slower) // 2] if slower else None,
    }  # fmt: skip
    print(json.dumps(told | _why(chosen)), flush=True)


def _why(plan: Plan) -> dict[str, Any]:
    return {"spends": plan.reasons[0] if plan.reasons else "", "memory_gib": round(plan.forecast.peak_memory_bytes / 2**30, 1)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["constraints", "published"])
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--num", type=int, default=300)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    table = PUBLISHED if asked.kind == "published" else RANDOM
    for case_name in asked.cases or table:
        regret(case_name, table[case_name], asked.kind, asked.num)
