"""Where dividing the images themselves wins: data, channel and domain parallelism of a U-Net at the product's own prices.

    python benchmarks/tensor/domain.py [--size 1024] [--batches 1 2 4 8] [--clusters h100-sxm-80gb:1x8 l4-24gb:1x8]

Each scheme is a search of the whole space with a part of the loops taken away: "data" divides rows alone, "channels" rows and
channels, "positions" rows and positions, "all" what is best for each operator.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

import autoplan
from autoplan.graph import Graph, Loop
from autoplan.models import UNet
from autoplan.plan import Plan


def _positions(loop: Loop) -> bool:
    """Whether a loop runs over positions, whichever operator it belongs to: it lies beyond the channels of what is read or written."""
    return any(where is not None and where.dim >= 2 for where in (*loop.reads, *loop.writes))


SCHEMES: Mapping[str, Callable[[Loop], bool]] = {
    "data": lambda _: False,
    "channels": lambda loop: not _positions(loop),
    "positions": _positions,
    "all": lambda _: True,
}


def restricted(graph: Graph, keep: Callable[[Loop], bool]) -> Graph:
    """The graph with those loops alone that divide rows or that `keep` takes."""
    ops = tuple(replace(op, loops=tuple(loop for loop in op.loops if loop.factor == graph.batch_factor or keep(loop))) for op in graph.ops)
    return replace(graph, ops=ops)


def captured(size: int, rows: int) -> Graph:
    with torch.device("meta"):
        model = UNet(3, 4, width=64, depth=3)
        batch = {"x": torch.empty(rows, 3, size, size), "target": torch.empty(rows, 4, size, size)}
    return autoplan.capture(model, batch, precision="bf16")


def row(plan: Plan) -> str:
    sent = {axis: sum(use.num_bytes * use.count for use in plan.collectives if use.axis == axis) for axis in ("dp", "tp")}
    degrees = " x ".join(f"{name} {size}" for name, size in plan.axes if size > 1) or "one device"
    memory = plan.forecast.peak_memory_bytes / 2**30
    return f"{plan.forecast.step_time_s * 1e3:8.2f} ms | {memory:5.2f} GiB | {sent['dp'] / 2**20:7.1f} | {sent['tp'] / 2**20:7.1f} | {degrees}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--clusters", nargs="+", default=["h100-sxm-80gb:1x8", "l4-24gb:1x8"])
    args = parser.parse_args()
    print("| cluster | images | scheme | step | memory | dp MiB | tp MiB | plan |\n|---|---|---|---|---|---|---|---|")
    for cluster in args.clusters:
        for rows in args.batches:
            graph = captured(args.size, rows)
            for name, keep in SCHEMES.items():
                try:
                    told = row(autoplan.find_plan(restricted(graph, keep), cluster=cluster, constraints=autoplan.Constraints(pp=1), precision="bf16"))
                except autoplan.InfeasibleError as error:
                    told = f"- | - | - | - | {str(error).splitlines()[0][:80]}"
                print(f"| {cluster} | {rows} | {name} | {told} |", flush=True)


if __name__ == "__main__":
    main()
