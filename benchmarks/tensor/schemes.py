"""All schemes of tensor parallelism for one model and cluster, at the product's own prices: step time, memory and wire volume of a rank.

    python benchmarks/tensor/schemes.py [--ranks 4 16 64] [--rows 1024] [--width 8192] [--layers 4] [--device h100-sxm-80gb] [--per-node 8]

The model is an MLP of square layers in bf16. Every scheme takes all ranks (dp = pp = 1; 1.5D the best split into dp x tp), so that the
schemes themselves are compared; the last row of each table is the free search.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

import autoplan
from autoplan.frontend import capture
from autoplan.models import MLP
from autoplan.plan import Plan
from autoplan.schemes import SEARCHED, degree_of, grids
from autoplan.units import num_bytes, seconds


def wire_bytes(plan: Plan) -> float:
    """Bytes that a rank sends in a step, by rings."""
    total = 0.0
    for use in plan.collectives:
        size = degree_of(plan.axes, use.axis)
        share = 1.0 if use.kind == "send" else (size - 1) / size if size > 1 else 0.0
        total += (2 if use.kind == "all_reduce" else 1) * share * use.num_bytes
    return total


def schemes(ranks: int) -> Iterator[tuple[str, autoplan.Constraints]]:
    yield "data", autoplan.Constraints(dp=ranks, tp=1, pp=1)
    yield "1d", autoplan.Constraints(tensor="1d", tp=ranks, pp=1)
    yield "1.5d", autoplan.Constraints(tensor="1.5d", pp=1)
    for scheme in SEARCHED:
        if grids(scheme, ranks):
            yield scheme, autoplan.Constraints(tensor=scheme, tp=ranks, pp=1)
    yield "free", autoplan.Constraints()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="h100-sxm-80gb")
    parser.add_argument("--per-node", type=int, default=8)
    asked = parser.parse_args()
    with torch.device("meta"):
        model = MLP((asked.width,) * (asked.layers + 1))
        batch = {"x": torch.empty(asked.rows, asked.width), "labels": torch.zeros(asked.rows, dtype=torch.int64)}
    graph = capture(model, batch, precision="bf16")
    for ranks in asked.ranks:
        nodes = max(1, ranks // asked.per_node)
        cluster = f"{asked.device}:{nodes}x{ranks // nodes}"
        print(f"\n{asked.layers} layers of {asked.width} x {asked.width}, {asked.rows} rows, {cluster}\n")
        print("| scheme | mesh | step | memory | sent by a rank |\n|---|---|---|---|---|")
        for name, constraints in schemes(ranks):
            try:
                plan = autoplan.find_plan(graph, cluster=cluster, constraints=constraints, precision="bf16")
            except autoplan.InfeasibleError as error:
                print(f"| {name} | does not fit: {str(error)[:80]} | | | |")
                continue
            mesh = " x ".join(f"{axis} {size}" for axis, size in plan.axes if size > 1) + (f", ZeRO {plan.zero}" if plan.zero else "")
            told = plan.forecast
            print(f"| {name} | {mesh} | {seconds(told.step_time_s)} | {num_bytes(told.peak_memory_bytes)} | {num_bytes(int(wire_bytes(plan)))} |", flush=True)


if __name__ == "__main__":
    main()
