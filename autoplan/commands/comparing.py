"""`autoplan compare`: plans that well-known systems would use, priced by the same model as the one found here.

    ddp       replicas only
    fsdp      replicas with ZeRO-3
    megatron  Narayanan et al. 2021, section 3: tensor parallel inside a node (up to 8), the fewest stages that fit, then
              replicas; 1F1B with ZeRO-1
    gpipe     one stage a device, GPipe schedule

Each is the best plan under these constraints, so that what is compared is the strategy and not its tuning.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.api import load_cluster
from autoplan.commands.console import note, say, say_json
from autoplan.commands.listing import table
from autoplan.commands.planning import load_model, plan_for
from autoplan.constraints import Constraints
from autoplan.errors import InfeasibleError, UsageError
from autoplan.explain import degrees
from autoplan.modelsource import Source
from autoplan.plan import Plan
from autoplan.units import num_bytes, seconds
from costmodel.cluster import Cluster

BASELINES = ("ddp", "fsdp", "megatron", "gpipe")


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy: its plan, or why it has none."""

    name: str
    plan: Plan | None
    reason: str = ""


def compare_command(model: str, cluster: str, baselines: str, global_batch: int | None, seq: int | None, precision: str | None, *, as_json: bool) -> None:
    names = [name.strip() for name in baselines.split(",") if name.strip()]
    for name in names:
        if name not in BASELINES:
            raise UsageError(f"--baselines {name}: known are {', '.join(BASELINES)}")
    found = load_cluster(cluster)
    source = load_model(model, found, global_batch, seq)
    rows = [Row("autoplan", plan_for(source, found, Constraints(), precision=precision))]
    rows += [baseline(name, source, found, precision) for name in names]
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
                (row.name, seconds(forecast.step_time_s), f"{forecast.step_time_s / best_s:.2f}×", num_bytes(forecast.peak_memory_bytes), degrees(row.plan))
            )
    say(table(lines))
    note("Predicted, all by one cost model.")


def baseline(name: str, source: Source, cluster: Cluster, precision: str | None) -> Row:
    """The best plan under a strategy's constraints, the first that is feasible."""
    reason = "nothing fits"
    for constraints in candidates(name, cluster):
        try:
            return Row(name, plan_for(source, cluster, constraints, precision=precision))
        except InfeasibleError as error:
            reason = str(error)
    return Row(name, None, reason)


def candidates(name: str, cluster: Cluster) -> list[Constraints]:
    """Constraints in the order in which the strategy tries them."""
    devices, per_node = cluster.num_devices, cluster.groups[0].devices_per_node
    if name == "ddp":
        return [Constraints(dp=devices, tp=1, pp=1, zero=0)]
    if name == "fsdp":
        return [Constraints(dp=devices, tp=1, pp=1, zero=3)]
    if name == "gpipe":
        return [Constraints(dp=1, tp=1, pp=devices, schedule="gpipe")]
    tp = max(t for t in (1, 2, 4, 8) if per_node % t == 0)
    return [Constraints(tp=tp, pp=pp, schedule="1f1b", zero=1) for pp in range(1, devices // tp + 1) if (devices // tp) % pp == 0]


def _as_dict(row: Row) -> dict[str, object]:
    if row.plan is None:
        return {"name": row.name, "plan": None, "reason": row.reason}
    forecast = row.plan.forecast
    return {
        "name": row.name,
        "plan": degrees(row.plan),
        "step_time_s": forecast.step_time_s,
        "peak_memory_bytes": forecast.peak_memory_bytes,
        "mfu": forecast.mfu,
    }
