"""Fits the constants that ship with costmodel, on the rows that fit_rows.json lists: at most a tenth of a source, at least one row.

python benchmarks/accuracy/ship.py ROWS.json...         writes costmodel/data/calibration.json and prints the scores
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.accuracy.calibrate import BOUNDS, Sample, knobs, touches  # noqa: E402
from benchmarks.accuracy.predict import predict, read, refit, seconds, timed  # noqa: E402
from benchmarks.accuracy.score import score, table  # noqa: E402
from costmodel.calibration import Calibration, priors  # noqa: E402

TARGET = ROOT / "costmodel" / "data" / "calibration.json"


def residuals(samples: list[Sample], calibration: Calibration) -> dict[str, str]:
    """How far the fitted rows are from their measurements, by device, link and stack."""
    found: dict[str, str] = {}
    for knob in knobs(samples, BOUNDS):
        errors = [abs(math.log(seconds(s.run, calibration) / s.measured)) for s in samples if touches(knob, s.run)]
        found[f"{knob.table}.{knob.key}"] = f"mean |ln(predicted / measured)| of {len(errors)} rows: {statistics.mean(errors):.3f}"
    return found


def main() -> None:
    rows = read([Path(name) for name in sys.argv[1:]])
    chosen = json.loads((Path(__file__).parent / "fit_rows.json").read_text())
    picked = {source: [row for row in records if row["row_id"] in chosen.get(source, ())] for source, records in rows.items()}
    fitted = refit(picked, priors(), "product")
    notes = dict(priors().provenance) | {"fit": "benchmarks/accuracy/ship.py on the rows of benchmarks/accuracy/fit_rows.json, from priors.json"}
    fitted = replace(fitted, provenance=notes | residuals(timed(picked), fitted))
    fitted.save(TARGET)
    predictions = {row["row_id"]: predict(row, fitted) for records in rows.values() for row in records}
    print(table({source: score(records, predictions) for source, records in rows.items()}))


if __name__ == "__main__":
    main()
