"""`autoplan plan`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoplan.api import find_plan, is_own, load_cluster
from autoplan.commands.console import check_writable, note, say, working, write_whole
from autoplan.constraints import Constraints
from autoplan.errors import UsageError
from autoplan.explain import explain
from autoplan.modelsource import DEFAULT_GLOBAL_BATCH, BatchSizes, Source, load
from autoplan.plan import Plan
from autoplan.planfile import dumps
from costmodel.cluster import Cluster

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "tb": 10**12}


def plan_command(
    model: str,
    cluster: str,
    global_batch: int | None,
    seq: int | None,
    fixed: Mapping[str, Any],
    optimizer: str,
    precision: str | None,
    top: int,
    time_limit_s: float | None,
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    check_writable(output)
    found = load_cluster(cluster)
    constraints = read_constraints(fixed)
    source = load_model(model, found, global_batch, seq)
    plan = plan_for(source, cluster if is_own(cluster) else found, constraints, optimizer=optimizer, precision=precision, time_limit_s=time_limit_s)
    if is_own(cluster) and plan.forecast.source == "analytic":
        note(f"priced by formulas: nothing was measured here for this model. To measure it: autoplan profile {model} --ranks {found.num_devices}")
    plan = replace(plan, alternatives=plan.alternatives[: top - 1])
    if output is not None:
        write_whole(output, dumps(plan))
    say(dumps(plan).rstrip() if as_json else explain(plan))
    if output is not None:
        note(f"plan: {output}\nreport: autoplan explain {output} --format html -o report.html")


def load_model(model: str, cluster: Cluster, global_batch: int | None, seq: int | None) -> Source:
    """The model with a global batch as asked, else of at least one row a device."""
    with working(f"building {model}"):
        if ":" in model and not model.startswith("hf:"):
            return load(model, BatchSizes(global_batch, seq))
        rows = max(DEFAULT_GLOBAL_BATCH, cluster.num_devices) if global_batch is None else global_batch
        return load(model, BatchSizes(rows, seq))


def plan_for(
    source: Source,
    cluster: str | Cluster,
    constraints: Constraints,
    *,
    optimizer: str = "adamw",
    precision: str | None = None,
    time_limit_s: float | None = None,
) -> Plan:
    """The best plan, under the name that the user gave the model."""
    found = load_cluster(cluster)
    precision = default_precision(precision, found)
    with working(f"planning {source.name} on {found.name}"):
        plan = find_plan(source.model, source.batch, cluster, constraints, optimizer, precision, time_limit_s)
    return replace(plan, model=source.name)


def default_precision(asked: str | None, cluster: Cluster) -> str | None:
    """bf16 on GPUs where none is asked, else as the model is."""
    return "bf16" if asked is None and cluster.device(0).kind == "cuda" else asked


def read_constraints(fixed: Mapping[str, Any]) -> Constraints:
    """Constraints from options; None: searched. Raises UsageError."""
    values = dict(fixed)
    for name in ("stage_layers", "servers", "workers"):
        if values.get(name) is not None:
            words = values[name].split(",")
            if not all(word.strip().isdigit() for word in words):
                raise UsageError(f"--{name.replace('_', '-')} {values[name]}: expected numbers like {'8,8,8,8' if name == 'stage_layers' else '0,2'}")
            values[name] = tuple(int(word) for word in words)
    if values.get("max_memory_bytes") is not None:
        values["max_memory_bytes"] = read_bytes(values["max_memory_bytes"], "--max-memory")
    return Constraints(**values)


def read_bytes(text: str, flag: str) -> int:
    """ "40GiB" -> 42949672960. Raises UsageError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    if not match or match[2].lower() not in _UNITS:
        raise UsageError(f"{flag} {text}: expected a size like 40GiB or 512MB")
    return int(float(match[1]) * _UNITS[match[2].lower()])
