"""For each scheme a model and cluster where it is best: a table of all schemes there, and how the order changes with ranks, batch and links.

    python -m benchmarks.tensor.crossover 1.5d|2d|3d|context|domain [--without-sweeps | --sweeps ranks rows link ...]

Every scheme takes the best plan of the whole space in which it is fixed, at the product's own analytic prices; no device is needed.

    data        replicas alone, with whatever ZeRO stage is best
    line        one line of all ranks of a stage: 1d without replicas
    1d .. 3d    `Constraints(tensor=...)` beside the other axes, sequences and images whole; of an image's loops 1d divides channels
    context     the best degree of "cp", everything else free
    domain      `Constraints(tensor="domain")`: of an image's loops positions alone are divided
    free        what the search takes when nothing is fixed
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import nn

import autoplan
from autoplan.frontend import capture
from autoplan.graph import Graph
from autoplan.plan import Plan
from autoplan.schemes import SCHEMES
from autoplan.units import num_bytes, seconds
from benchmarks.tensor.context import decoder
from benchmarks.tensor.domain import SCHEMES as LOOPS
from benchmarks.tensor.domain import captured, restricted
from benchmarks.tensor.schemes import cluster_of, found, graph_of, mesh_of, wire_bytes

Kind = Literal["features", "sequence", "image"]
COLUMNS = ("data", "line", *(s for s in SCHEMES if s != "domain"), "context", "domain", "free")


class Normed(nn.Module):
    """Layers each followed by a norm, which needs all of its features: no product can read the divided result of another."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.LayerNorm(b) for b in widths[1:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.relu(norm(layer(x)))
        return x.square().mean()


def normed(rows: int, *widths: int) -> Graph:
    with torch.device("meta"):
        return capture(Normed(widths), {"x": torch.empty(rows, widths[0])}, precision="bf16")


@dataclass(frozen=True)
class Case:
    """`graph`: of so many rows. `sweeps`: values of ranks and rows, and of links and memory in times of the preset's."""

    what: str
    kind: Kind
    device: str
    ranks: int
    per_node: int
    rows: int
    graph: Callable[[int], Graph]
    sweeps: Mapping[str, tuple[float, ...]]


LINKS = (0.25, 1.0, 4.0)
CASES: Mapping[str, Case] = {
    "1.5d": Case(
        "3 layers from 4,096 to 32,768 features", "features", "h100-sxm-80gb", 64, 8, 16384, lambda rows: normed(rows, 4096, 8192, 16384, 32768),
        dict(ranks=(16, 64, 256), rows=(16384, 65536, 262144), link=LINKS),
    ),
    "2d": Case(
        "12 pairs of 8,192 x 32,768, 65,536 positions a row", "features", "a100-sxm-40gb", 16, 64, 4, lambda rows: graph_of(rows, 8192, 12, 65536),
        dict(ranks=(4, 16, 64), rows=(2, 4, 8), link=LINKS, memory=(1.0, 2.0)),
    ),
    "3d": Case(
        "3 layers from 4,096 to 32,768 features", "features", "h100-sxm-80gb", 64, 8, 65536, lambda rows: normed(rows, 4096, 8192, 16384, 32768),
        dict(ranks=(16, 64, 256), rows=(16384, 65536, 262144), link=LINKS),
    ),
    "context": Case(
        "a decoder of Llama-3-8B's sizes, 131,072 positions", "sequence", "h100-sxm-80gb", 32, 8, 2, lambda rows: decoder(32, rows, 131072),
        dict(ranks=(8, 32, 64), rows=(2, 8, 32), link=LINKS),
    ),
    "domain": Case(
        "a U-Net on images of 1,024 x 1,024", "image", "h100-sxm-80gb", 8, 8, 1, lambda rows: captured(1024, rows),
        dict(ranks=(2, 8, 16), rows=(1, 2, 8), link=(0.05, 1.0, 4.0)),
    ),
}  # fmt: skip


def candidates(name: str, kind: Kind, ranks: int) -> Iterator[tuple[str, autoplan.Constraints]]:
    """(which loops of an image, constraints) of a scheme; its plan is the best of them. None where it has no meaning for the model."""
    whole = {"cp": 1} if kind == "sequence" else {}
    loops = "channels" if kind == "image" else "all"
    if name == "free":
        yield "all", autoplan.Constraints()
    elif name == "data":
        yield "data" if kind == "image" else "all", autoplan.Constraints(dp=ranks, tp=1, pp=1)
    elif name == "line":
        yield loops, autoplan.Constraints(tensor="1d", dp=1, **whole)
    elif name == "context":
        degrees = [1 << n for n in range(1, 6) if ranks % (1 << n) == 0] if kind == "sequence" else []
        yield from (("all", autoplan.Constraints(cp=degree)) for degree in degrees)
    elif name == "domain":
        yield from [("all", autoplan.Constraints(tensor="domain"))] if kind == "image" else []
    else:
        yield loops, autoplan.Constraints(tensor=name, **whole)


Setting = tuple[tuple[str, float], ...]  # ranks, rows, link, memory


class Bench:
    """The plans of one case; every setting is searched once."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._graphs: dict[int, Graph] = {}
        self._plans: dict[tuple[str, Setting], Plan | str] = {}

    @property
    def base(self) -> dict[str, float]:
        return {"ranks": self.case.ranks, "rows": self.case.rows, "link": 1.0, "memory": 1.0}

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(name for name in COLUMNS if any(True for _ in candidates(name, self.case.kind, self.case.ranks)))

    def best(self, name: str, given: Mapping[str, float]) -> Plan | str:
        """The plan of a scheme, or why it has none."""
        key = name, tuple(given.items())
        if key not in self._plans:
            self._plans[key] = self._searched(name, given)
        return self._plans[key]

    def _searched(self, name: str, given: Mapping[str, float]) -> Plan | str:
        ranks, rows = int(given["ranks"]), int(given["rows"])
        if rows not in self._graphs:
            self._graphs[rows] = self.case.graph(rows)
        graph, cluster = self._graphs[rows], cluster_of(self.case.device, ranks, self.case.per_node, given["link"], given["memory"])
        plans: list[Plan | str] = []
        for loops, constraints in candidates(name, self.case.kind, ranks):
            plans.append(found(graph if loops == "all" else restricted(graph, LOOPS[loops]), cluster, constraints))
        fitting = [plan for plan in plans if isinstance(plan, Plan)]
        if fitting:
            return min(fitting, key=lambda plan: plan.forecast.step_time_s)
        return "does not fit" if any("fits on" in str(plan) for plan in plans) else "not possible"


def told(plan: Plan) -> str:
    """Mesh and ways; on one line of ranks also what its products divide: output features (o), the contraction (i)."""
    labels = sorted({label[0] for block in plan.blocks for name, label in block.splits.items() if name.startswith("linear") and label[0] in "oi"})
    products = f", products by {' and '.join(labels)}" if labels and dict(plan.axes).get("tp", 1) > 1 else ""
    return mesh_of(plan) + products + (f", {plan.context}" if plan.context else "")


def table(bench: Bench) -> None:
    case = bench.case
    print(f"\n{case.what}, {case.rows} rows, {cluster_of(case.device, case.ranks, case.per_node).name}\n")
    print("| scheme | mesh | step | memory | sent by a rank |\n|---|---|---|---|---|")
    for name in bench.columns:
        plan = bench.best(name, bench.base)
        if isinstance(plan, str):
            print(f"| {name} | {plan} | | | |", flush=True)
            continue
        step, memory = seconds(plan.forecast.step_time_s), num_bytes(plan.forecast.peak_memory_bytes)
        print(f"| {name} | {told(plan)} | {step} | {memory} | {num_bytes(int(wire_bytes(plan)))} |", flush=True)


def sweep(bench: Bench, quantity: str) -> None:
    """A line for each value of one quantity, a column for each scheme."""
    print(f"\n| {quantity} | {' | '.join(bench.columns[:-1])} | the search takes |\n|{'---|' * (len(bench.columns) + 1)}")
    for value in bench.case.sweeps[quantity]:
        plans = [bench.best(name, bench.base | {quantity: value}) for name in bench.columns]
        cells = [seconds(plan.forecast.step_time_s) if isinstance(plan, Plan) else "-" for plan in plans]
        free = plans[-1]
        taken = f"{cells[-1]}: {told(free)}" if isinstance(free, Plan) else free
        print(f"| {value:g} | {' | '.join(cells[:-1])} | {taken} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=tuple(CASES))
    parser.add_argument("--without-sweeps", action="store_true")
    parser.add_argument("--sweeps", nargs="+", help="these alone, without the table")
    asked = parser.parse_args()
    bench = Bench(CASES[asked.case])
    if not asked.sweeps:
        table(bench)
    for quantity in asked.sweeps or ([] if asked.without_sweeps else bench.case.sweeps):
        sweep(bench, quantity)


if __name__ == "__main__":
    main()
