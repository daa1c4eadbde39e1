"""Plans that others published against the plan that is found for the same model, devices and batch, at equal prices.

    python benchmarks/search/published.py [--time-limit SECONDS] [--plans FOLDER] [CASE...]

Published plans (published.yaml) are given as constraints and priced by the same forecast; both are priced by an outside model too (outside.py), which
sees degrees alone. Where that model cannot say the plan found (context axes, grids of tensor axes), a second one is found that it can say.
One line of JSON for every plan of a case; `faster`: how much less than the published plan the found one takes. With --plans, plans are kept in a folder
and read from it again.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from outside import SYSTEMS, Degrees, Layers, step

from autoplan import Constraints, Plan, capture, find_plan
from autoplan.errors import InfeasibleError
from autoplan.explain import short
from autoplan.graph import Graph
from autoplan.modelsource import BatchSizes, Source, load, presets
from costmodel.analytic import AnalyticPrices
from costmodel.cluster import Cluster

_SAYABLE = Constraints(cp=1, tensor="1d")
_CASES: Mapping[str, Any] = yaml.safe_load((Path(__file__).parent / "published.yaml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Case:
    """A model, devices and a batch, with plans that were published for them."""

    name: str
    time_limit_s: float | None
    folder: Path | None

    @property
    def told(self) -> Mapping[str, Any]:
        return _CASES[self.name]

    @cached_property
    def source(self) -> Source:
        return load(self.told["model"], BatchSizes(*self.told["batch"]))

    @cached_property
    def graph(self) -> Graph:
        return capture(self.source.model, self.source.batch, precision="bf16")

    @cached_property
    def cluster(self) -> Cluster:
        return Cluster.parse(self.told["cluster"])

    @cached_property
    def layers(self) -> Layers:
        config = presets()[self.told["model"]].config
        if "n_layer" in config:
            width, heads = config["n_embd"], config["n_head"]
            return Layers(config["n_layer"], width, heads, heads, 4 * width, False, self.told["batch"][1])
        heads = config["num_attention_heads"]
        kept = config.get("num_key_value_heads", heads)
        return Layers(config["num_hidden_layers"], config["hidden_size"], heads, kept, config["intermediate_size"], True, self.told["batch"][1])

    def plan(self, label: str, constraints: Constraints) -> Plan:
        path = None if self.folder is None else self.folder / (re.sub(r"[^a-z0-9]+", "-", f"{self.name} {label}".lower()) + ".json")
        if path is not None and path.exists():
            return Plan.load(path)
        plan = find_plan(self.graph, None, self.cluster, constraints, precision="bf16", prices=AnalyticPrices(self.cluster), time_limit_s=self.time_limit_s)
        if path is not None:
            plan.save(path)
        return plan

    def outside_s(self, plan: Plan, adapters: str = "flat") -> dict[str, float] | None:
        """The outside model's seconds, and what they are spent on; None where it cannot say the plan."""
        degrees = Degrees.of(plan)
        if degrees is None:
            return None
        priced = step(self.layers, degrees, SYSTEMS[self.told["cluster"].partition(":")[0]], adapters)
        return {"step": priced.step_s} | {field.name.removesuffix("_s"): getattr(priced, field.name) for field in fields(priced)}


def compare(case: Case) -> None:
    found = case.plan("found", Constraints())
    sayable = found if case.outside_s(found) else case.plan("found, sayable", _SAYABLE)
    print(json.dumps({"case": case.name, "plan": "found", "gap": found.gap} | _told(case, found)), flush=True)
    if sayable is not found:
        print(json.dumps({"case": case.name, "plan": "found, sayable", "gap": sayable.gap} | _told(case, sayable)), flush=True)
    for label, asked in case.told["plans"].items():
        try:
            plan = case.plan(label, Constraints(**asked))
        except InfeasibleError as error:
            print(json.dumps({"case": case.name, "plan": label, "refused": str(error)}), flush=True)
            continue
        faster = {"faster": round(1 - found.forecast.step_time_s / plan.forecast.step_time_s, 4)}
        for adapters in ("flat", "rails"):
            ours, theirs = case.outside_s(sayable, adapters), case.outside_s(plan, adapters)
            if ours and theirs:
                faster[f"faster_outside_{adapters}"] = round(1 - ours["step"] / theirs["step"], 4)
        print(json.dumps({"case": case.name, "plan": label} | faster | _told(case, plan)), flush=True)


def _told(case: Case, plan: Plan) -> dict[str, Any]:
    outside = {
        f"outside_{adapters}_s": told and {name: round(seconds, 3) for name, seconds in told.items() if seconds}
        for adapters in ("flat", "rails")
        for told in (case.outside_s(plan, adapters),)
    }
    return {
        "step_s": round(plan.forecast.step_time_s, 4),
        "is": short(plan),
        "memory_gib": round(plan.forecast.peak_memory_bytes / 2**30, 1),
        "spends": plan.reasons[0].removeprefix("the step spends ") if plan.reasons else "",
    } | outside


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--time-limit", type=float, help="seconds after which a search ends with the best plan so far")
    parser.add_argument("--plans", type=Path, help="a folder that keeps plans")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.plans is not None:
        args.plans.mkdir(parents=True, exist_ok=True)
    for name in args.cases or _CASES:
        compare(Case(name, args.time_limit, args.plans))
