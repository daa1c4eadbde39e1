"""Predicts published runs: step time, peak memory, whether it fits.

    python benchmarks/accuracy/predict.py ROWS.json... [--fit ROWS.json...] [--path canonical|product] -o PRED.json

ROWS are files of records (benchmarks/accuracy/README.md). --fit refits the calibration constants on the rows of other files
first, from what is known without any; without it the constants that ship with costmodel apply. The product path (product.py) captures the
model on meta and forecasts the fixed plan; the canonical path prices the operators of the canonical block (block.py) by closed formulas. --fit
fits what the chosen path predicts. PRED.json maps row_id to iteration_s, peak_mem_GiB and fits, or to {"unsupported": reason}. The scores of rows
with measurements go to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.accuracy.calibrate import MEMORY_BOUNDS, Sample, fit  # noqa: E402
from benchmarks.accuracy.footprint import fits, footprint, reported, settled  # noqa: E402
from benchmarks.accuracy.record import Run, UnsupportedRowError, run_of  # noqa: E402
from benchmarks.accuracy.score import measured_s, out_of_memory, score, table  # noqa: E402
from benchmarks.accuracy.step import step_time  # noqa: E402
from costmodel.calibration import Calibration, load, priors  # noqa: E402

MARGIN = 0.97  # a run that is known to fit is fitted to at most this share of the memory
ROUNDS = 2  # of the fit of the product path: its ratio to the canonical path hardly depends on the constants
MEMORY_PULL = 0.001  # reserves differ by gigabytes from stack to stack: little is known of them beforehand
Rows = Sequence[Mapping[str, Any]]


def read(paths: Iterable[Path]) -> dict[str, Rows]:
    """Rows by source, a file or all files of a folder; files that hold no records are left out. A row may carry no measurement."""
    found = {}
    for path in (file for p in paths for file in (sorted(p.glob("*.json")) if p.is_dir() else [p])):
        content = json.loads(path.read_text())
        if isinstance(content, list) and content and {"row_id", "plan", "model"} <= set(content[0]):
            found[path.stem] = [row | {"measured": row.get("measured") or {}} for row in content]
    return found


def seconds(run: Run, calibration: Calibration) -> float:
    """Predicted seconds of a step."""
    return step_time(settled(run, calibration), calibration).total_s


def step_s(sample: Sample, calibration: Calibration) -> float:
    """What a timed sample is compared with."""
    return seconds(sample.run, calibration)


def peak_bytes(sample: Sample, calibration: Calibration) -> float:
    """What a weighed sample is compared with: the peak, or what must fit."""
    run = settled(sample.run, calibration)
    return float(reported(run, calibration).total if sample.sense == "is" else footprint(run, calibration).needed)


def timed(rows: Mapping[str, Rows]) -> list[Sample]:
    """Rows whose step time is known and that can be expressed."""
    return [Sample(source, run, seconds) for source, row, run in _runs(rows) if (seconds := measured_s(row)) is not None]


def weighed(rows: Mapping[str, Rows]) -> list[Sample]:
    """What is known of memory: a peak, or that the run stayed below its device's memory, or did not."""
    found = []
    for source, row, run in _runs(rows):
        peak, limit = row["measured"].get("peak_mem_GiB"), float(min(g.device.memory_bytes for g in run.cluster.groups))
        if peak:
            found.append(Sample(source, run, peak * 2**30))
        elif out_of_memory(row):
            found.append(Sample(source, run, limit, "above"))
        elif measured_s(row) is not None:
            found.append(Sample(source, run, MARGIN * limit, "below"))
    return found


def _runs(rows: Mapping[str, Rows]) -> Iterator[tuple[str, Mapping[str, Any], Run]]:
    for source, records in rows.items():
        for row in records:
            with contextlib.suppress(UnsupportedRowError):
                yield source, row, run_of(row)


def refit(rows: Mapping[str, Rows], start: Calibration, path: str = "canonical") -> Calibration:
    """Constants fitted on rows: those of memory first, which settle what recomputation a run needs.

    A fit asks for tens of thousands of predictions, so that of the product path goes through the canonical one: of each row, its closed
    formula times what the product says over it under the constants found before (space mapping, Bandler et al. 1994), in a few rounds.
    """
    found = refit_through(rows, start, {})
    for _ in range(ROUNDS if path == "product" else 0):
        found = refit_through(rows, start, {s.run.row_id: product_over_canonical(s.run, found) for s in timed(rows)})
    return found


def refit_through(rows: Mapping[str, Rows], start: Calibration, ratios: Mapping[str, float]) -> Calibration:
    """Constants fitted on rows, where a row's closed formula counts `ratios` times (1 where it has none)."""
    start = fit(weighed(rows), start, peak_bytes, MEMORY_BOUNDS, MEMORY_PULL)
    return fit(timed(rows), start, lambda sample, calibration: ratios.get(sample.run.row_id, 1.0) * step_s(sample, calibration))


def product_over_canonical(run: Run, calibration: Calibration) -> float:
    """Seconds of the product path over those of the canonical path; 1 for what the planner does not offer."""
    from benchmarks.accuracy.product import predicted  # imports torch

    run = settled(run, calibration)
    try:
        return predicted(run, calibration)["iteration_s"] / step_time(run, calibration).total_s
    except UnsupportedRowError:
        return 1.0


def predict(row: Mapping[str, Any], calibration: Calibration, path: str = "canonical") -> dict[str, Any]:
    """The prediction of one row. What the planner does not offer (a stage without layers) is predicted by the canonical path, and says so."""
    try:
        run = settled(run_of(row), calibration)
    except UnsupportedRowError as error:
        return {"unsupported": str(error)}
    if path == "product":
        from benchmarks.accuracy.product import predicted  # imports torch

        try:
            return predicted(run, calibration)
        except UnsupportedRowError as error:
            return predict(row, calibration) | {"canonical": str(error)}
    return {"iteration_s": step_time(run, calibration).total_s, "peak_mem_GiB": reported(run, calibration).total / 2**30, "fits": fits(run, calibration)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("--fit", nargs="+", type=Path, default=[], help="files of rows to refit the constants on")
    parser.add_argument("--save", type=Path, help="where to write the refitted constants")
    parser.add_argument("--path", choices=("canonical", "product"), default="product")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    calibration = load()
    if options.fit:
        calibration = refit(read(options.fit), priors(), options.path)
        if options.save:
            calibration.save(options.save)
    rows = read(options.rows)
    predictions = {row["row_id"]: predict(row, calibration, options.path) for records in rows.values() for row in records}
    options.output.write_text(json.dumps(predictions, indent=1, sort_keys=True) + "\n")
    print(table({source: score(records, predictions) for source, records in rows.items()}), file=sys.stderr)


if __name__ == "__main__":
    main()
