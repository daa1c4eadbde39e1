"""Architectures of transformers under plans of two and eight ranks: the plain model's loss, gradients and weights after two steps, or
a refusal that names the node.

    python benchmarks/architectures/table.py [NAME...] [--ranks 2|8] [--optimizers] [--results FILE] [--models 8]

runs the named architectures (default: those that FILE lacks, at most `--models` of them) and prints the table of all in FILE as Markdown.
A cell is the worst relative L2 error of the loss, of any gradient and of any weight or buffer after two steps of SGD with momentum, in
float32, of two towers in float64 ("m=1": one micro-batch, since the batch cannot be divided in time); with `--optimizers` of any weight or buffer after two
steps of other optimizers. What a rank holds, computes and sends has to be what its plan says. "split" is the share of the
forward pass' FLOPs in operators that are divided.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import autoplan
import autoplan.parallelmodel
from autoplan.agreement import from_first_rank
from autoplan.assignments import tensor_options
from autoplan.batchaxis import batch_axis
from autoplan.frontend import capture
from autoplan.graph import Graph
from autoplan.plan import Plan
from benchmarks.architectures.models import ARCHITECTURES
from benchmarks.architectures.trial import RECIPES, SGD, Recipe, plain, tried
from tests.dist.launch import run_ranks
from tests.plans import manual_plan

Row = dict[str, str]
Plans = dict[str, Callable[[Graph], Plan]]
_LIMIT_S = 5.0  # of a search
_ONE_LAUNCH = 3  # models: process groups stay until a rank ends, and each of them costs its hosts a thread


def _searched(graph: Graph) -> Plan:
    return autoplan.find_plan(graph, None, "cpu:1x2", autoplan.Constraints(dp=1, tp=2, pp=1), time_limit_s=_LIMIT_S)


def _searched_everywhere(graph: Graph) -> Plan:
    assert graph.batch_size is not None
    rows = graph.batch_size // (2 if batch_axis(graph).blocker else 4)
    return autoplan.find_plan(graph, None, "cpu:1x8", autoplan.Constraints(dp=2, tp=2, pp=2, micro_batch_size=rows), time_limit_s=_LIMIT_S)


def _staged(graph: Graph, recompute: str) -> Plan:
    return manual_plan(graph, pp=2, num_micro_batches=1 if batch_axis(graph).blocker else 2, recompute=recompute)


PLANS: Plans = {
    "dp2": lambda graph: manual_plan(graph, dp=2),
    "zero3": lambda graph: manual_plan(graph, dp=2, zero=3),
    "tp2": _searched,
    "pp2": lambda graph: _staged(graph, "none"),
    "pp2 recomputed": lambda graph: _staged(graph, "full"),
}
ON_EIGHT: Plans = {"dp2 tp2 pp2": _searched_everywhere}
OPTIMIZED = ("zero3", "tp2", "pp2")
COLUMNS = ("dp2", "split", "zero3", "tp2", "tp2 split", "pp2", "pp2 recomputed", "dp2 tp2 pp2")


def columns_of(num_ranks: int, *, with_optimizers: bool) -> dict[str, tuple[Callable[[Graph], Plan], Recipe]]:
    """Name of a column: how its plan is made, and its optimizer."""
    if with_optimizers:
        return {f"{name} {recipe.name}": (PLANS[name], recipe) for recipe in RECIPES for name in OPTIMIZED}
    return {name: (make, SGD) for name, make in (PLANS if num_ranks == 2 else ON_EIGHT).items()}


def share(graph: Graph, labels: list[str]) -> str:
    """The part of the FLOPs in operators that run neither whole nor alike on every rank."""
    total = sum(op.flops for op in graph.ops)
    return f"{sum(op.flops for op, label in zip(graph.ops, labels, strict=True) if label not in ('whole', 'vary')) / max(total, 1):.0%}"


def rows(names: list[str], columns: list[str], results: str) -> None:
    """Run the architectures on this job's ranks; rank 0 writes every row to the file at once."""
    torch.set_num_threads(1)
    for name in names:
        start_s = time.monotonic()
        row = _row(name, columns)
        if dist.get_rank() == 0:
            print(f"{name}: {row} ({time.monotonic() - start_s:.0f} s)", file=sys.stderr, flush=True)
            write(Path(results), {name: row})


def write(file: Path, more: dict[str, Row]) -> None:
    known: dict[str, Row] = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | {name: known.get(name, {}) | row for name, row in more.items()}, indent=1))


def _row(name: str, columns: list[str]) -> Row:
    all_columns = columns_of(dist.get_world_size(), with_optimizers=columns[0] not in (*PLANS, *ON_EIGHT))
    model, batch = ARCHITECTURES[name]()
    try:
        graph = from_first_rank(lambda: capture(model, batch))
    except autoplan.AutoplanError as error:
        return {"dp2": f"refused: {error}"}
    row = {"split": share(graph, [option.label for option in batch_axis(graph).options])}
    autoplan.parallelmodel.capture = lambda *_, **__: graph  # one capture serves every plan
    true = {recipe: plain(model, batch, recipe) for recipe in dict.fromkeys(all_columns[column][1] for column in columns)}
    for column in columns:
        make, recipe = all_columns[column]
        try:
            plan = from_first_rank(lambda make=make: make(graph))
            row[column] = tried(model, batch, plan, true[recipe], recipe)
        except autoplan.AutoplanError as error:
            row[column] = f"refused: {error}"
            continue
        if column == "tp2":
            row["tp2 split"] = share(graph, [option.label for option in tensor_options(graph, plan, 0, plan.axes)])
        elif "pp2" in column and plan.num_micro_batches == 1:
            row[column] += " m=1"
    return row


def markdown(results: dict[str, Row], columns: tuple[str, ...]) -> str:
    """The table, in the order of ARCHITECTURES, and why what is refused is so."""
    lines = ["| " + " | ".join(("architecture", *columns)) + " |", "|---" * (len(columns) + 1) + "|"]
    notes: list[str] = []
    for name in (name for name in ARCHITECTURES if any(column in results.get(name, {}) for column in columns)):
        cells = [name]
        for column in columns:
            cell = results[name].get(column, "")
            if cell.startswith("refused: "):
                notes.append(f"- {name}, {column}: {re.sub(r'/[^ ]*/site-packages/', '', cell.removeprefix('refused: '))}")
                cell = "refused"
            cells.append(cell)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *notes])


def _lacking(row: Row, columns: list[str]) -> list[str]:
    return [] if row.get("dp2", "").startswith("refused") else [column for column in columns if column not in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--results", default="build/architectures.json")
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--ranks", type=int, choices=(2, 8), default=2, help="2: the first plans; 8: dp2 tp2 pp2")
    parser.add_argument("--optimizers", action="store_true", help="other optimizers than SGD, on two ranks")
    options = parser.parse_args()
    file = Path(options.results)
    file.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(file.read_text()) if file.exists() else {}
    unknown = [name for name in options.names if name not in ARCHITECTURES]
    if unknown:
        sys.exit(f"no architecture is called {unknown[0]!r}; there are {', '.join(ARCHITECTURES)}")
    columns = list(columns_of(options.ranks, with_optimizers=options.optimizers))
    names = options.names or [name for name in ARCHITECTURES if _lacking(known.get(name, {}), columns)][: options.models]
    while names:
        try:
            run_ranks(rows, options.ranks, names[:_ONE_LAUNCH], columns, str(file), timeout_s=60.0 * options.ranks * _ONE_LAUNCH)
            names = names[_ONE_LAUNCH:]
        except RuntimeError as error:  # a rank crashed: with the first model that has no row yet
            known = json.loads(file.read_text()) if file.exists() else {}
            failed = next(name for name in names if _lacking(known.get(name, {}), columns))
            print(error, file=sys.stderr, flush=True)
            write(file, {failed: dict.fromkeys(_lacking(known.get(failed, {}), columns), f"WRONG ({str(error).splitlines()[0]})")})
            names = names[names.index(failed) + 1 :]
    results = json.loads(file.read_text())
    print(markdown(results, COLUMNS))
    if any(column in row for row in results.values() for column in columns_of(2, with_optimizers=True)):
        print("\n" + markdown(results, tuple(columns_of(2, with_optimizers=True))))
    sys.exit(any("WRONG" in cell for row in results.values() for cell in row.values()))


if __name__ == "__main__":
    main()
