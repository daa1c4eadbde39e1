"""Architectures of transformers under plans of two and eight ranks: the plain model's loss, gradients and weights after two steps, or
a refusal that names the node.

    python benchmarks/architectures/table.py [NAME...] [--ranks 2|8] [--results FILE] [--models 8]

runs the named architectures (default: those that FILE lacks, at most `--models` of them) and prints the table of all in FILE as Markdown.
A cell is the worst relative L2 error of the loss, of any gradient and of any weight or buffer after two steps of SGD with momentum, in
float32, of two towers in float64 ("m=1": one micro-batch, since the batch cannot be divided in time); "split" is the share of the
forward pass' FLOPs in operators that are divided.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autoplan
import autoplan.parallelmodel
from autoplan.assignments import tensor_options
from autoplan.batchaxis import batch_axis
from autoplan.frontend import capture
from autoplan.graph import Graph
from autoplan.plan import Plan
from benchmarks.architectures.models import ARCHITECTURES
from tests.dist.launch import run_ranks
from tests.dist.parity import loss_of, relative_errors
from tests.plans import manual_plan

Row = dict[str, str]
TOLERANCE = 1e-5
COLUMNS = ("architecture", "dp2", "split", "zero3", "tp2", "tp2 split", "pp2", "pp2 recomputed", "dp2 tp2 pp2")


STEPS = 2


def _searched(graph: Graph) -> Plan:
    return autoplan.find_plan(graph, None, "cpu:1x2", autoplan.Constraints(dp=1, tp=2, pp=1))


def _searched_everywhere(graph: Graph) -> Plan:
    assert graph.batch_size is not None
    rows = graph.batch_size // (2 if batch_axis(graph).blocker else 4)
    return autoplan.find_plan(graph, None, "cpu:1x8", autoplan.Constraints(dp=2, tp=2, pp=2, micro_batch_size=rows))


def _staged(graph: Graph, recompute: str) -> Plan:
    return manual_plan(graph, pp=2, num_micro_batches=1 if batch_axis(graph).blocker else 2, recompute=recompute)


PLANS: dict[str, Callable[[Graph], Plan]] = {
    "dp2": lambda graph: manual_plan(graph, dp=2),
    "zero3": lambda graph: manual_plan(graph, dp=2, zero=3),
    "tp2": _searched,
    "pp2": lambda graph: _staged(graph, "none"),
    "pp2 recomputed": lambda graph: _staged(graph, "full"),
}
ON_EIGHT: dict[str, Callable[[Graph], Plan]] = {"dp2 tp2 pp2": _searched_everywhere}


def share(graph: Graph, labels: list[str]) -> str:
    """The part of the FLOPs in operators that run neither whole nor alike on every rank."""
    total = sum(op.flops for op in graph.ops)
    return f"{sum(op.flops for op, label in zip(graph.ops, labels, strict=True) if label not in ('whole', 'vary')) / max(total, 1):.0%}"


def rows(names: list[str], results: str) -> None:
    """Run the architectures on this job's ranks; rank 0 writes every row to the file at once."""
    torch.set_num_threads(1)
    for name in names:
        row = _row(name)
        if dist.get_rank() == 0:
            file = Path(results)
            known = json.loads(file.read_text()) if file.exists() else {}
            file.write_text(json.dumps(known | {name: known.get(name, {}) | row}, indent=1))


def _row(name: str) -> Row:
    try:
        model, batch = ARCHITECTURES[name]()
        graph = capture(model, batch)
    except autoplan.AutoplanError as error:
        return {"dp2": f"refused: {error}"}
    loss, true, weights = _plain(copy.deepcopy(model), batch)
    row = {"split": share(graph, [option.label for option in batch_axis(graph).options])}
    autoplan.parallelmodel.capture = lambda *_, **__: graph  # one capture serves every plan
    for column, make in (PLANS if dist.get_world_size() == 2 else ON_EIGHT).items():
        try:
            plan = _agreed(make, graph)
            pm = autoplan.parallelize(model, batch, plan=plan)
            found = pm.forward_backward(batch).item()
            grads = pm.full_grads()
            state = _trained(pm, batch)
        except autoplan.AutoplanError as error:
            row[column] = f"refused: {error}"
            continue
        error, where = max(_worst(grads, true), _worst(state, weights), (abs(found - loss) / max(abs(loss), 1e-30), "loss"))
        row[column] = f"{error:.0e}" + (f" WRONG ({where})" if not error <= TOLERANCE else "")
        if column == "tp2":
            row["tp2 split"] = share(graph, [option.label for option in tensor_options(graph, plan, 0, plan.axes)])
        elif "pp2" in column and plan.num_micro_batches == 1:
            row[column] += " m=1"
    return row


def _agreed(make: Callable[[Graph], Plan], graph: Graph) -> Plan:
    """The plan that rank 0 makes."""
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            shared = [make(graph)]
        except autoplan.AutoplanError as error:
            shared = [error]
    dist.broadcast_object_list(shared, src=0)
    if isinstance(shared[0], Exception):
        raise shared[0]
    return shared[0]


def _plain(model: torch.nn.Module, batch: Any) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The first loss and gradients of the plain model, and its state after the steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    loss = loss_of(model, batch)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}
    for step in range(STEPS):
        if step:
            loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), grads, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _trained(pm: autoplan.ParallelModel, batch: Any) -> dict[str, torch.Tensor]:
    """The state after the steps; the first gradients are there."""
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        if step:
            pm.forward_backward(batch)
        optimizer.step()
        optimizer.zero_grad()
    return pm.full_state_dict()


def _worst(found: dict[str, torch.Tensor], true: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The worst error of equally named tensors; infinite where one side alone has one."""
    if dist.get_rank() == 0 and found.keys() != true.keys():
        return float("inf"), f"one side alone has {sorted(found.keys() ^ true.keys())[:3]}"
    return relative_errors(found, true)


def markdown(results: dict[str, Row]) -> str:
    """The table, in the order of ARCHITECTURES, and why what is refused or undivided is so."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    notes: list[str] = []
    for name in (name for name in ARCHITECTURES if name in results):
        cells = [name]
        for column in COLUMNS[1:]:
            cell = results[name].get(column, "")
            if cell.startswith("refused: "):
                notes.append(f"- {name}, {column}: {re.sub(r'/[^ ]*/site-packages/', '', cell.removeprefix('refused: '))}")
                cell = "refused"
            cells.append(cell)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *notes])


def _is_done(row: Row, num_ranks: int) -> bool:
    return row.get("dp2", "").startswith("refused") or all(column in row for column in (PLANS if num_ranks == 2 else ON_EIGHT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--results", default="build/architectures.json")
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--ranks", type=int, choices=(2, 8), default=2, help="2: the first plans; 8: dp2 tp2 pp2")
    options = parser.parse_args()
    file = Path(options.results)
    file.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(file.read_text()) if file.exists() else {}
    unknown = [name for name in options.names if name not in ARCHITECTURES]
    if unknown:
        sys.exit(f"no architecture is called {unknown[0]!r}; there are {', '.join(ARCHITECTURES)}")
    names = options.names or [name for name in ARCHITECTURES if not _is_done(known.get(name, {}), options.ranks)][: options.models]
    if names:
        run_ranks(rows, options.ranks, names, str(file), timeout_s=60.0 * options.ranks * len(names))
    results = json.loads(file.read_text())
    print(markdown(results))
    sys.exit(any("WRONG" in cell for row in results.values() for cell in row.values()))


if __name__ == "__main__":
    main()
