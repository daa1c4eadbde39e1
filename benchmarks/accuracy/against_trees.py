"""This cost model against boosted trees (trees.py): the same rows to fit on, step-time MAPE, mean over sources.

python benchmarks/accuracy/against_trees.py ROWS... [--seeds 0] [--product PRED.json]

Listed: fitted on the rows of fit_rows.json (the constants that ship), tested on all others. Larger: fitted on those of them with at most 128
GPUs, tested on all rows with 256 and more; trees also on all rows with at most 128 GPUs; this model's order of pairs, regret and memory
there besides, by the closed formulas and, with --product (what predict.py wrote of these rows), through them by the product path. Draws: fitted on
a tenth of every source's rows, as robustness.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.accuracy.calibrate import Sample  # noqa: E402
from benchmarks.accuracy.predict import Rows, read, refit, refit_through, seconds, timed  # noqa: E402
from benchmarks.accuracy.record import Run  # noqa: E402
from benchmarks.accuracy.robustness import chosen, drawn, over_canonical, scores  # noqa: E402
from benchmarks.accuracy.score import table  # noqa: E402
from benchmarks.accuracy.trees import Boosted  # noqa: E402
from costmodel.calibration import Calibration, load, priors  # noqa: E402

SMALL, LARGE = 128, 256
Predictor = Callable[[Sequence[Run]], Sequence[float]]


def with_constants(calibration: Calibration) -> Predictor:
    """This cost model under a calibration."""
    return lambda runs: [seconds(run, calibration) for run in runs]


def errors(predict: Predictor, tested: Sequence[Sample]) -> dict[str, float]:
    """MAPE by source, and their mean as "mean"."""
    off: dict[str, list[float]] = {}
    for sample, guess in zip(tested, predict([s.run for s in tested]), strict=True):
        off.setdefault(sample.source, []).append(abs(guess / sample.measured - 1))
    found = {source: statistics.mean(values) for source, values in off.items()}
    return found | {"mean": statistics.mean(found.values())}


def trees(rows: Mapping[str, Rows]) -> dict[str, Predictor]:
    """Trees fitted on `rows`: on seconds, and on seconds relative to the ideal."""
    return {"trees": Boosted.fit(timed(rows), ideal=False).seconds, "trees on the ideal": Boosted.fit(timed(rows), ideal=True).seconds}


def unknown(samples: Sequence[Sample], rows: Mapping[str, Rows]) -> list[Sample]:
    """Samples that are not among `rows`."""
    known = {row["row_id"] for records in rows.values() for row in records}
    return [sample for sample in samples if sample.run.row_id not in known]


def limited(rows: Mapping[str, Rows], most: int) -> dict[str, Rows]:
    """Rows of at most `most` GPUs; sources that have none are left out."""
    found = {source: [row for row in records if int(row["cluster"]["n_gpus"]) <= most] for source, records in rows.items()}
    return {source: records for source, records in found.items() if records}


def report(title: str, found: Mapping[str, Mapping[str, float]]) -> None:
    """A table, a line a source."""
    print(title)
    print(f"{'':24}" + "".join(f"{name:>28}" for name in found))
    for source in next(iter(found.values())):
        print(f"{source:24}" + "".join(f"{100 * values[source]:>27.1f}%" for values in found.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--product", type=Path)
    options = parser.parse_args()
    rows = read(options.rows)
    everything, listed = timed(rows), chosen(rows)
    found = {"this model": with_constants(load())} | trees(listed)
    report("fitted on the listed rows, tested on the others", {name: errors(predict, unknown(everything, listed)) for name, predict in found.items()})
    small, large = limited(listed, SMALL), [s for s in everything if s.run.cluster.num_devices >= LARGE]
    fitted = refit(small, priors())
    found = {"this model": with_constants(fitted)} | trees(small) | {"trees on all small rows": trees(limited(rows, SMALL))["trees on the ideal"]}
    report(f"fitted on at most {SMALL} GPUs, tested on {LARGE} and more ({len(large)} rows)", {name: errors(predict, large) for name, predict in found.items()})
    beyond = {source: [row for row in records if int(row["cluster"]["n_gpus"]) >= LARGE] for source, records in rows.items()}
    beyond = {source: records for source, records in beyond.items() if records}
    print(table(scores(beyond, fitted)))
    if options.product:
        ratios = over_canonical(rows, options.product)
        print(table(scores(beyond, refit_through(small, priors(), ratios), ratios)))
    runs: dict[str, list[dict[str, float]]] = {}
    for seed in range(options.seeds):
        picked = drawn(rows, seed)
        for name, predict in ({"this model": with_constants(refit(picked, priors()))} | trees(picked)).items():
            runs.setdefault(name, []).append(errors(predict, unknown(everything, picked)))
    if runs:
        means = {name: {k: statistics.mean(f[k] for f in found if k in f) for k in found[0]} for name, found in runs.items()}
        report(f"fitted on a tenth, tested on the others, means over {options.seeds} draws", means)


if __name__ == "__main__":
    main()
