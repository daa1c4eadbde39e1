"""Every model under every plan against the plain model in one process, as a Markdown table.

    python -m benchmarks.exactness.table [MODEL ...] [--adamw]

fp32: loss, every gradient and the weights after two SGD steps. --adamw: fp64, weights after two AdamW steps (in fp32 AdamW divides rounding
noise by its own size). A cell is the worst relative L2 error of any tensor, and the largest share of the model's FLOPs that one rank computes.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from tests.dist.cases import PLANS, cases_for
from tests.dist.launch import run_ranks
from tests.dist.parity import Outcome, run_cases
from tests.zoo import ZOO

# Batch statistics over few pixels amplify rounding (measured: four decimal places), so the comparison needs fp64.
AMPLIFIES = ("resnet50",)


def cell(outcome: Outcome) -> str:
    """ "2e-7, 51 %" or the reason of a refusal."""
    if outcome.refused:
        return f"refused: {outcome.refused}"
    if outcome.missing:
        return f"MISSING {', '.join(outcome.missing)}"
    for rank, held in enumerate(outcome.held):
        if held.sent != held.planned_sent:
            return f"rank {rank} SENT other collectives than listed"
    share = max(held.flops for held in outcome.held) / outcome.dense_flops
    return f"{max(outcome.errors()):.0e}, {100 * share:.0f} %"


def row(model: str, adamw: bool) -> str:
    cells = {}
    for ranks in sorted({ranks for ranks, _ in PLANS.values()}):
        names = [name for name, (count, _) in PLANS.items() if count == ranks]
        cases = cases_for(ranks, (model,))
        if adamw:
            cases = [replace(case, dtype="float64", optimizer="AdamW") for case in cases]
        elif model in AMPLIFIES:
            cases = [replace(case, dtype="float64") for case in cases]
        outcomes = run_ranks(run_cases, ranks, cases, timeout_s=1800)[0]
        cells.update(zip(names, map(cell, outcomes), strict=True))
    return f"| {model} | " + " | ".join(cells[name] for name in PLANS) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(ZOO))
    parser.add_argument("--adamw", action="store_true")
    asked = parser.parse_args()
    print("| model | " + " | ".join(PLANS) + " |\n|" + "---|" * (len(PLANS) + 1), flush=True)
    for model in asked.models:
        print(row(model, asked.adamw), flush=True)


if __name__ == "__main__":
    sys.exit(main())
