"""All schemes of tensor parallelism for one model and cluster, at the product's own prices: step time, memory and wire volume of a rank.

    python benchmarks/tensor/schemes.py [--ranks 4 16 64] [--rows 1024] [--width 8192] [--layers 4] [--device h100-sxm-80gb] [--per-node 8]
    python benchmarks/tensor/schemes.py --long 65536 ...

The model is an MLP of square layers in bf16, where every scheme takes all ranks (dp = pp = 1; 1.5D the best split into dp x tp), so that the
schemes themselves are compared; the last row of each table is the free search. With `--long` it is residual pairs of layers (width to 4 times that
and back) over so many positions of every row, and each scheme takes the best plan of the whole space in which it is fixed. `--sweep` gives a line for
each value of one quantity instead: the step of the best plan with every scheme.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

import autoplan
from autoplan.frontend import capture
from autoplan.graph import Graph
from autoplan.models import MLP
from autoplan.plan import Plan
from autoplan.schemes import SCHEMES, SEARCHED, degree_of, grids
from autoplan.units import num_bytes, seconds
from costmodel.cluster import Cluster


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Pairs(nn.Module):
    """Residual pairs of layers: a transformer of huge width without its attention."""

    def __init__(self, width: int, num_pairs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair(width) for _ in range(num_pairs))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().mean()


def wire_bytes(plan: Plan) -> float:
    """Bytes that a rank sends in a step, by rings."""
    total = 0.0
    for use in plan.collectives:
        size = degree_of(plan.axes, use.axis)
        share = 1.0 if use.kind == "send" else (size - 1) / size if size > 1 else 0.0
        total += (2 if use.kind == "all_reduce" else 1) * share * use.num_bytes
    return total


def graph_of(rows: int, width: int, layers: int, length: int | None) -> Graph:
    with torch.device("meta"):
        if length is not None:
            shape = (rows, length, width)
            return capture(Pairs(width, layers), {"x": torch.empty(shape), "y": torch.empty(shape)}, precision="bf16")
        batch = {"x": torch.empty(rows, width), "labels": torch.zeros(rows, dtype=torch.int64)}
        return capture(MLP((width,) * (layers + 1)), batch, precision="bf16")


def cluster_of(device: str, ranks: int, per_node: int, link: float = 1.0, memory: float = 1.0) -> Cluster:
    """`link` and `memory`: times those of the preset."""
    found = Cluster.parse(f"{device}:{max(1, ranks // per_node)}x{min(ranks, per_node)}")
    (group,) = found.groups
    tiers = tuple(
        replace(t, bandwidth_bytes_per_s=t.bandwidth_bytes_per_s * link, measured_bytes_per_s=t.measured_bytes_per_s and t.measured_bytes_per_s * link)
        for t in group.tiers
    )
    kept = replace(group.device, memory_bytes=int(group.device.memory_bytes * memory))
    return replace(found, groups=(replace(group, device=kept, tiers=tiers),))


def alone(ranks: int) -> Iterator[tuple[str, autoplan.Constraints]]:
    """Every scheme on all ranks."""
    yield "data", autoplan.Constraints(dp=ranks, tp=1, pp=1)
    yield "1d", autoplan.Constraints(tensor="1d", tp=ranks, pp=1)
    yield "1.5d", autoplan.Constraints(tensor="1.5d", pp=1)
    for scheme in SEARCHED:
        if grids(scheme, ranks):
            yield scheme, autoplan.Constraints(tensor=scheme, tp=ranks, pp=1)
    yield "free", autoplan.Constraints()


def within() -> Iterator[tuple[str, autoplan.Constraints]]:
    """Every scheme beside the axes that it likes."""
    yield from ((scheme, autoplan.Constraints(tensor=scheme)) for scheme in SCHEMES)
    yield "free", autoplan.Constraints()


def mesh_of(plan: Plan) -> str:
    recompute = sorted({block.recompute for block in plan.blocks} - {"none"})
    parts = [" x ".join(f"{axis} {size}" for axis, size in plan.axes if size > 1), f"ZeRO {plan.zero}" if plan.zero else ""]
    parts += [f"{plan.num_micro_batches} micro-batches" if plan.num_micro_batches > 1 else "", f"recompute {recompute[-1]}" if recompute else ""]
    return ", ".join(part for part in parts if part)


def found(graph: Graph, cluster: Cluster, constraints: autoplan.Constraints) -> Plan | str:
    """The plan, or why there is none."""
    try:
        return autoplan.find_plan(graph, cluster=cluster, constraints=constraints, precision="bf16")
    except autoplan.InfeasibleError as error:
        return str(error)


def table(graph: Graph, cluster: Cluster, schemes: Iterator[tuple[str, autoplan.Constraints]]) -> None:
    print("| scheme | mesh | step | memory | sent by a rank |\n|---|---|---|---|---|")
    for name, constraints in schemes:
        plan = found(graph, cluster, constraints)
        if isinstance(plan, str):
            print(f"| {name} | {'does not fit' if 'fits on' in plan else 'not possible'} | | | |")
            continue
        told = plan.forecast
        print(
            f"| {name} | {mesh_of(plan)} | {seconds(told.step_time_s)} | {num_bytes(told.peak_memory_bytes)} | {num_bytes(int(wire_bytes(plan)))} |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="h100-sxm-80gb")
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--long", type=int, help="positions of a row")
    asked = parser.parse_args()
    graph = graph_of(asked.rows, asked.width, asked.layers, asked.long)
    for ranks in asked.ranks:
        cluster = cluster_of(asked.device, ranks, asked.per_node)
        what = f"pairs of {asked.width} x {4 * asked.width}" if asked.long else f"layers of {asked.width} x {asked.width}"
        print(f"\n{asked.layers} {what}, {asked.rows} rows{f' of {asked.long} positions' if asked.long else ''}, {cluster.name}\n")
        table(graph, cluster, within() if asked.long else alone(ranks))


if __name__ == "__main__":
    main()
