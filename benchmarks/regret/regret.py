"""Regret: is any other plan of the space, priced by the same forecast, better than the chosen one by more than its gap?

    python benchmarks/regret/regret.py [--num 300] [--first 0] [CASE...]

Random legal constraints, each planned and forecast, until `num` of them have a plan: what cannot be had is counted apart. One line of JSON after every 25, and
one for every plan that is better than (1 - gap) times the chosen one. Searches share prices and integer programs (sharing.py).
Constraints that ask for another result or another arrangement (sync, staleness, servers, delay, compression, placement) are left out: they are modes, not
plans of the space. `first`: the number of the first drawn constraints, to go on where another run ended.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sharing import shared_searches

from autoplan import AutoplanError, Constraints, Plan, capture, find_plan
from autoplan.api import load_cluster
from autoplan.batchaxis import batch_axis
from autoplan.graph import Graph
from autoplan.modelsource import BatchSizes, Source, from_config, load
from autoplan.schemes import LINES, grids
from autoplan.space import divisors
from costmodel.analytic import AnalyticPrices
from costmodel.cluster import Cluster

_TOLD_EVERY = 25
_SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb", "zbv"]
_LEAST_CHUNKS = {"interleaved": 2, "zbv": 2}


def _experts(rows: int, seq: int) -> Source:
    """A Mixtral of 6 layers of width 1,024, 8 experts of which 2 are used."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        num_hidden_layers=6, hidden_size=1024, intermediate_size=3584, num_attention_heads=16, num_key_value_heads=4, num_local_experts=8,
        num_experts_per_tok=2, vocab_size=32000,
    )  # fmt: skip
    return from_config("mixtral-6-layers", MixtralForCausalLM, config, BatchSizes(rows, seq))


def _preset(name: str) -> Callable[[int, int | None], Source]:
    return lambda rows, seq: load(name, BatchSizes(rows, seq))


@dataclass(frozen=True)
class Case:
    """A model, a cluster and a global batch."""

    source: Callable[[int, Any], Source]
    cluster: str
    rows: int
    seq: int | None
    has_experts: bool = False


CASES = {
    "gpt2-a100": Case(_preset("gpt2"), "a100-sxm-80gb:1x8", 64, 1024),
    "mixtral-a100": Case(_experts, "a100-sxm-80gb:2x4", 32, 2048, has_experts=True),
    "resnet50-v100": Case(_preset("resnet50"), "v100-sxm2-32gb:2x4", 256, None),
    "gpt2-mixed": Case(_preset("gpt2"), str(Path(__file__).parent / "mixed8.yaml"), 32, 1024),
}


@dataclass(frozen=True)
class Setting:
    """One case made ready: prices and graph are shared by all its plans."""

    case: Case
    graph: Graph
    cluster: Cluster
    prices: AnalyticPrices
    can_micro_batch: bool

    def plan(self, constraints: Constraints) -> Plan:
        return find_plan(self.graph, None, self.cluster, constraints, precision="bf16", prices=self.prices)


def ready(case: Case) -> Setting:
    source = case.source(case.rows, case.seq)
    cluster = load_cluster(case.cluster)
    graph = capture(source.model, source.batch, precision="bf16")
    return Setting(case, graph, cluster, AnalyticPrices(cluster), batch_axis(graph).blocker is None)


def random_constraints(setting: Setting, draw: random.Random) -> Constraints:
    """A legal mesh, and some of the other fields as they can stand beside it."""
    world, rows = setting.cluster.num_devices, setting.case.rows
    blocks = len(setting.graph.blocks)
    while True:
        tp = draw.choice([d for d in divisors(world) if d <= 16])
        cp = draw.choice([1, 1, 1, 2, 4]) if setting.case.seq else 1
        ep = draw.choice([1, 1, 2, 4]) if setting.case.has_experts else 1
        pp = draw.choice([d for d in divisors(world) if d <= blocks])
        if world % (tp * cp * ep * pp) == 0 and rows % (world // (tp * cp * pp)) == 0:
            break
    dp = world // (tp * cp * ep * pp)
    fields: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp} | ({"cp": cp} if cp > 1 or draw.random() < 0.5 else {})
    fields |= {"ep": ep} if ep > 1 else {}
    if draw.random() < 0.6:
        fields["micro_batch_size"] = draw.choice([d for d in divisors(rows // dp) if d <= 16]) if setting.can_micro_batch else rows // dp
    if draw.random() < 0.6:
        fields["zero"] = draw.choice([0, 1, 2, 3]) if dp > 1 else 0
        if fields["zero"] and draw.random() < 0.3:
            fields["zero_group"] = draw.choice([d for d in divisors(dp) if d > 1])
    if draw.random() < 0.6:
        fields["recompute"] = draw.choice(["none", "selective", "full"])
    if pp > 1 and draw.random() < 0.7:
        found = _SCHEDULES[:2] if len(setting.cluster.groups) > 1 else [name for name in _SCHEDULES if pp * _LEAST_CHUNKS.get(name, 1) <= blocks]
        fields["schedule"] = draw.choice(found)
        if fields["schedule"] == "interleaved" and draw.random() < 0.7:
            fields["num_chunks"] = draw.choice([n for n in (2, 3, 4) if pp * n <= blocks])
    if tp > 1 and draw.random() < 0.5:
        fields["tensor"] = draw.choice([scheme for scheme in ("1d", "1.5d", "2d", "2.5d", "3d") if scheme in LINES or (cp == ep == 1 and grids(scheme, tp))])
    if tp > 1 and fields.get("tensor", "1d") == "1d" and draw.random() < 0.5:
        fields["sequence_parallel"] = draw.choice([True, False])
    layers = sum(block.layer for block in setting.graph.blocks)
    if pp > 1 and fields.get("schedule") in ("gpipe", "1f1b", "zb") and layers >= pp and draw.random() < 0.3:
        cuts = sorted(draw.sample(range(1, layers), pp - 1))
        fields["stage_layers"] = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
    if draw.random() < 0.1:
        fields["max_memory_bytes"] = int(draw.uniform(2, 40) * 2**30)
    return Constraints(**fields)


def regret(name: str, case: Case, num: int, first: int) -> None:
    """Draws until `num` constraints have a plan."""
    setting = ready(case)
    chosen = setting.plan(Constraints())
    best_s = chosen.forecast.step_time_s
    better, number = 0, first
    slower: list[float] = []
    refused: Counter[str] = Counter()
    while len(slower) < num:
        constraints = random_constraints(setting, random.Random(f"{name} {number}"))
        number += 1
        try:
            plan = setting.plan(constraints)
        except AutoplanError as error:
            refused[type(error).__name__ + ": " + " ".join(str(error).split()[:4])] += 1
            continue
        slower.append(plan.forecast.step_time_s / best_s)
        wrong = plan.forecast.step_time_s < best_s * (1 - chosen.gap) * (1 - 1e-9)
        better += wrong
        if wrong:
            told = {"case": name, "number": number - 1, "asked": _fields(constraints), "step_s": plan.forecast.step_time_s, "times": slower[-1]}
            print(json.dumps(told | _why(plan)), flush=True)
        if len(slower) % _TOLD_EVERY == 0 or len(slower) == num:
            print(json.dumps(_summary(name, chosen, number, slower, refused, better)), flush=True)


def _summary(name: str, chosen: Plan, number: int, slower: list[float], refused: Counter[str], better: int) -> dict[str, Any]:
    found = sorted(slower)
    return {
        "case": name, "chosen": dict(chosen.axes) | {"zero": chosen.zero, "rows": chosen.micro_batch_size, "schedule": chosen.schedule},
        "step_s": chosen.forecast.step_time_s, "gap": chosen.gap, "next": number, "have_a_plan": len(found), "refused": sum(refused.values()),
        "better_than_the_gap_allows": better, "fastest_other": found[0], "median_other": found[len(found) // 2], "cpu_s": round(time.process_time()),
        "space": sorted(chosen.space), "why_refused": dict(refused.most_common(8)),
    } | _why(chosen)  # fmt: skip


def _fields(constraints: Constraints) -> dict[str, Any]:
    return {field.name: value for field in dataclasses.fields(constraints) if (value := getattr(constraints, field.name)) is not None}


def _why(plan: Plan) -> dict[str, Any]:
    return {"spends": plan.reasons[0] if plan.reasons else "", "memory_gib": round(plan.forecast.peak_memory_bytes / 2**30, 1)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--num", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for case_name in asked.cases or CASES:
        with shared_searches():
            regret(case_name, CASES[case_name], asked.num, asked.first)
