"""From module to plan: seconds of capture, search and lowering, and of them in the solver.

    python benchmarks/search/plan_time.py llama3-8b:h100-sxm-80gb:8x8:512:8192 ...    MODEL:CLUSTER:GLOBAL_BATCH:SEQ, [--time-limit SECONDS]

Prints one line of JSON a case. CPU seconds are this process' own; wall seconds depend on what else runs.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

import pulp
import torch

from autoplan import capture
from autoplan.api import load_cluster
from autoplan.constraints import Constraints
from autoplan.modelsource import BatchSizes, Source, from_config, load
from autoplan.plan import recomputed
from autoplan.search import search
from costmodel.analytic import AnalyticPrices


class SolverClock:
    """Counts the solver's runs and their CPU seconds while it is entered."""

    def __enter__(self) -> SolverClock:
        self.seconds, self.runs = 0.0, 0
        self._solve = pulp.LpProblem.solve

        def timed(problem: Any, *args: Any, **kwargs: Any) -> Any:
            start_s = time.process_time()
            result = self._solve(problem, *args, **kwargs)
            self.seconds += time.process_time() - start_s
            self.runs += 1
            return result

        pulp.LpProblem.solve = timed
        return self

    def __exit__(self, *_: object) -> None:
        pulp.LpProblem.solve = self._solve


DEEP = "gpt-1024-layers"


def deep_gpt(rows: int, seq: int) -> Source:
    """A GPT-2 of 1,024 layers of width 1,024."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1024, n_embd=1024, n_head=16, n_positions=seq, vocab_size=50304, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return from_config(DEEP, GPT2LMHeadModel, config, BatchSizes(rows, seq))


def measure(case: str, time_limit_s: float | None = None) -> dict[str, Any]:
    """One case, as the fields of its line."""
    model, device, nodes, rows, seq = case.split(":")
    cluster = load_cluster(f"{device}:{nodes}")
    source = deep_gpt(int(rows), int(seq)) if model == DEEP else load(model, BatchSizes(int(rows), int(seq)))
    marks = [(time.process_time(), time.perf_counter())]
    graph = capture(source.model, source.batch, precision="bf16")
    marks.append((time.process_time(), time.perf_counter()))
    with SolverClock() as solver:
        plan = search(graph, cluster, AnalyticPrices(cluster), Constraints(), precision="bf16", time_limit_s=time_limit_s)
    marks.append((time.process_time(), time.perf_counter()))
    (cpu0, wall0), (cpu1, wall1), (cpu2, wall2) = marks
    return {
        "case": case,
        "ops": len(graph.ops),
        "capture_cpu_s": round(cpu1 - cpu0, 2),
        "search_cpu_s": round(cpu2 - cpu1, 2),
        "solver_cpu_s": round(solver.seconds, 2),
        "solver_runs": solver.runs,
        "capture_wall_s": round(wall1 - wall0, 2),
        "search_wall_s": round(wall2 - wall1, 2),
        "peak_memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "plan": dict(plan.axes) | {"zero": plan.zero, "micro_batch_size": plan.micro_batch_size, "recompute": sorted(set(recomputed(plan)))},
        "step_time_s": plan.forecast.step_time_s,
        "gap": plan.gap,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="MODEL:CLUSTER:GLOBAL_BATCH:SEQ")
    parser.add_argument("--time-limit", type=float, help="seconds after which a search ends with the best plan so far")
    asked = parser.parse_args()
    for case in asked.cases:
        print(json.dumps(measure(case, asked.time_limit)), flush=True)
