"""How much the scores depend on the rows that the constants are fitted on.

python benchmarks/accuracy/robustness.py ROWS... [--seeds 5] [--left-out [SOURCE...]] [--path canonical|product] [--product PRED.json]

For each seed a tenth of every source's rows, at least one, is drawn at random, the constants are fitted on them from priors.json, and all rows are
predicted. Printed: the means over the seeds. --left-out: for each source (or those named), constants fitted on the rows of fit_rows.json of all others.
The product path is taken once, under the constants that ship: what it says over the closed formulas hardly depends on the constants. --product: what
predict.py wrote of these rows with those constants, so that it need not be taken again.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.accuracy.predict import Rows, predict, product_over_canonical, read, refit_through, seconds, timed  # noqa: E402
from benchmarks.accuracy.score import Score, score, table  # noqa: E402
from costmodel.calibration import Calibration, load, priors  # noqa: E402

FIT_ROWS = Path(__file__).parent / "fit_rows.json"
SHARE = 0.1
NONE: Mapping[str, float] = {}


def drawn(rows: Mapping[str, Rows], seed: int, share: float = SHARE) -> dict[str, Rows]:
    """`share` of each source's rows that carry a measurement, rounded down, at least one. The same for the same seed."""
    generator = random.Random(seed)
    useful = {source: [row for row in records if set(row["measured"]) - {"mfu", "tflops_per_gpu"}] for source, records in sorted(rows.items())}
    return {source: generator.sample(records, max(1, int(share * len(records)))) for source, records in useful.items() if records}


def chosen(rows: Mapping[str, Rows]) -> dict[str, Rows]:
    """The rows of fit_rows.json."""
    listed = json.loads(FIT_ROWS.read_text())
    return {source: [row for row in records if row["row_id"] in listed.get(source, ())] for source, records in rows.items()}


def scores(rows: Mapping[str, Rows], calibration: Calibration, ratios: Mapping[str, float] = NONE) -> dict[str, Score]:
    """Scores of all sources under one calibration: of the closed formulas times `ratios` by row, 1 where there is none."""
    predictions = {}
    for row in (row for records in rows.values() for row in records):
        said = predict(row, calibration)
        timed_s = said.get("iteration_s")
        predictions[row["row_id"]] = said | {"iteration_s": timed_s * ratios.get(row["row_id"], 1.0)} if timed_s else said
    return {source: score(records, predictions) for source, records in rows.items()}


def over_canonical(rows: Mapping[str, Rows], said: Path | None) -> dict[str, float]:
    """Row -> seconds of the product path over those of the closed formulas, under the constants that ship; `said`: its predictions, where they are there."""
    shipped, samples = load(), timed(rows)
    if said is None:
        return {s.run.row_id: product_over_canonical(s.run, shipped) for s in samples}
    known = json.loads(said.read_text())
    return {s.run.row_id: known[s.run.row_id]["iteration_s"] / seconds(s.run, shipped) for s in samples}


def mean(found: list[Score]) -> Score:
    """Field by field; counts rounded."""
    merged = {}
    for field in fields(Score):
        values = [value for s in found if (value := getattr(s, field.name)) is not None]
        average = statistics.mean(values) if values else None
        merged[field.name] = round(average) if field.type == "int" and average is not None else average
    return Score(**merged)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--left-out", nargs="*")
    parser.add_argument("--path", choices=("canonical", "product"), default="product")
    parser.add_argument("--product", type=Path)
    options = parser.parse_args()
    rows = read(options.rows)
    ratios = over_canonical(rows, options.product) if options.path == "product" else NONE
    if options.left_out is not None:
        picked, found = chosen(rows), {}
        for source in options.left_out or rows:
            others = {other: records for other, records in picked.items() if other != source}
            found[source] = scores({source: rows[source]}, refit_through(others, priors(), ratios), ratios)[source]
            print(table({source: found[source]}).splitlines()[1], flush=True)
        print(table(found).splitlines()[-1])
        return
    runs = []
    for seed in range(options.seeds):
        runs.append(scores(rows, refit_through(drawn(rows, seed), priors(), ratios), ratios))
        print(f"seed {seed}: {table(runs[-1]).splitlines()[-1]}", flush=True)
    print(table({source: mean([run[source] for run in runs]) for source in rows}))


if __name__ == "__main__":
    main()
