"""`autoplan compare`: plans that well-known systems would use (autoplan/baselines.py) beside the one found here."""

from __future__ import annotations

from pathlib import Path

from autoplan.api import find_plan, load_cluster
from autoplan.baselines import BASELINES, baseline
from autoplan.clusterprices import prices_of
from autoplan.commands.console import check_writable, note, say, say_json, working, write_whole
from autoplan.commands.listing import table
from autoplan.commands.planning import default_precision, load_model
from autoplan.errors import InfeasibleError, UsageError
from autoplan.explain import short
from autoplan.frontend import capture
from autoplan.report import Row, comparison
from autoplan.units import num_bytes, seconds


def compare_command(
    model: str, cluster: str, baselines: str, global_batch: int | None, seq: int | None, precision: str | None, output: Path | None, *, as_json: bool
) -> None:
    check_writable(output)
    names = [*dict.fromkeys(name.strip() for name in baselines.split(",") if name.strip())]
    for name in names:
        if name not in BASELINES:
            raise UsageError(f"--baselines {name}: known are {', '.join(BASELINES)}")
    found = load_cluster(cluster)
    source = load_model(model, found, global_batch, seq)
    precision = default_precision(precision, found)
    with working("capturing the model"):
        graph = capture(source.model, source.batch)
    with working("planning"):
        rows = [Row("autoplan", find_plan(graph, None, found, precision=precision))]
    prices = prices_of(found)
    for name in names:
        with working(f"planning as {name}"):
            try:
                rows.append(Row(name, baseline(name, graph, found, prices, precision=precision)))
            except InfeasibleError as error:
                rows.append(Row(name, None, str(error)))
    if output is not None:
        write_whole(output, comparison(rows))
    if as_json:
        say_json([_as_dict(row) for row in rows])
        return
    best_s = rows[0].plan.forecast.step_time_s if rows[0].plan else 0.0
    lines = [("", "step", "against autoplan", "peak memory", "plan")]
    for row in rows:
        if row.plan is None:
            lines.append((row.name, "-", "-", "-", row.reason))
        else:
            forecast = row.plan.forecast
            lines.append(
                (row.name, seconds(forecast.step_time_s), f"{forecast.step_time_s / best_s:.2f}×", num_bytes(forecast.peak_memory_bytes), short(row.plan))
            )
    say(table(lines))
    note("Predicted, all by one cost model." + ("" if output is None else f" Picture: {output}"))


def _as_dict(row: Row) -> dict[str, object]:
    if row.plan is None:
        return {"name": row.name, "plan": None, "reason": row.reason}
    forecast = row.plan.forecast
    return {
        "name": row.name,
        "plan": short(row.plan),
        "step_time_s": forecast.step_time_s,
        "peak_memory_bytes": forecast.peak_memory_bytes,
        "mfu": forecast.mfu,
    }
