"""Plans as JSON: versioned, readable, names instead of ids, bound to model and cluster by fingerprints.

Dataclasses become objects, tuples lists, and back by their type annotations. Every field has to be there with the right type:
a file that is cut short, edited wrongly or of another version is refused, never half-read. Events of the timeline are rows, one
a line. Numbers are written so that they read back equal: `loads(dumps(plan)) == plan`.
"""

from __future__ import annotations

import json
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Union

from autoplan.errors import StalePlanError, UsageError
from autoplan.forecast import Event
from autoplan.graph import Graph
from autoplan.plan import PLAN_VERSION, Plan
from costmodel.cluster import Cluster

_EVENT_FIELDS = tuple(f.name for f in fields(Event))
_LINE = 150  # characters


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data. Events are lists in the order of `event_fields`."""
    data = _plain(plan)
    data["forecast"]["events"] = [[getattr(event, name) for name in _EVENT_FIELDS] for event in plan.forecast.events]
    data["forecast"]["event_fields"] = list(_EVENT_FIELDS)
    return {"format": "autoplan plan", "version": data.pop("version"), **data}


def dumps(plan: Plan) -> str:
    """The file's text: what fits on a line is on one line, with a newline at its end."""
    return _pretty(to_json(plan), 0) + "\n"


def _pretty(value: Any, depth: int) -> str:
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + depth <= _LINE or not isinstance(value, (dict, list)):
        return line
    inner = " " * (depth + 1)
    if isinstance(value, dict):
        items = [f"{inner}{json.dumps(key, ensure_ascii=False)}: {_pretty(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + "\n" + " " * depth + "}"
    return "[\n" + ",\n".join(inner + _pretty(item, depth + 1) for item in value) + "\n" + " " * depth + "]"


def loads(text: str, where: str = "the plan") -> Plan:
    """Read a plan. Raises StalePlanError for anything that is not a whole plan of this version."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise StalePlanError(f"{where} is cut short or damaged (line {error.lineno}: {error.msg}): plan again and save it anew") from error
    if not isinstance(data, dict) or data.pop("format", None) != "autoplan plan":
        raise StalePlanError(f"{where} is no plan file: one made by `autoplan plan -o` or Plan.save is needed")
    if data.get("version") != PLAN_VERSION:
        raise StalePlanError(f"{where} has version {data.get('version')!r}, this release reads version {PLAN_VERSION}: plan again")
    forecast = data.get("forecast")
    if isinstance(forecast, dict):
        names, rows = forecast.pop("event_fields", None), forecast.get("events")
        if names != list(_EVENT_FIELDS) or not isinstance(rows, list) or any(not isinstance(r, list) or len(r) != len(names) for r in rows):
            raise StalePlanError(f"{where}: forecast.events is damaged: plan again")
        forecast["events"] = [dict(zip(names, row, strict=True)) for row in rows]
    return _build(Plan, data, where)


def save(plan: Plan, path: str | Path) -> None:
    """Write the plan; the previous file stays until the new one is complete. Raises UsageError where it cannot be written."""
    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_text(dumps(plan), encoding="utf-8")
        os.replace(part, target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UsageError(f"the plan cannot be written to {target}: {error.strerror or error}") from error


def load(path: str | Path) -> Plan:
    """Read a plan file. Raises UsageError where there is none, StalePlanError where it is damaged or of another version."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise StalePlanError(f"{path} is no plan file: it is not text") from error
    except OSError as error:
        raise UsageError(f"the plan file {path} cannot be read: {error.strerror or error}") from error
    return loads(text, str(path))


def check_fresh(plan: Plan, graph: Graph | None = None, cluster: Cluster | None = None) -> None:
    """Raises StalePlanError, naming what differs, unless the plan was made for this model, batch and cluster."""
    found = []
    if graph is not None and plan.model_fingerprint != graph.fingerprint:
        found.append(f"the model (plan: {plan.model} {plan.model_fingerprint[:12]}, here: {graph.name} {graph.fingerprint[:12]})")
    if graph is not None and graph.batch_size is not None and plan.global_batch != graph.batch_size:
        found.append(f"the global batch (plan: {plan.global_batch} rows, here: {graph.batch_size})")
    if cluster is not None and plan.cluster_fingerprint != cluster.fingerprint():
        found.append(f"the cluster (plan: {plan.cluster} {plan.cluster_fingerprint[:12]}, here: {cluster.name} {cluster.fingerprint()[:12]})")
    if found:
        raise StalePlanError(f"the plan is stale, it was made for something else: {'; '.join(found)}. Plan again")


def diff(one: Plan, other: Plan) -> str:
    """What differs between two plans, a line each ("zero: 1 -> 3"); empty where they are equal. The timeline is left out."""
    lines: list[str] = []
    before, after = _plain(one), _plain(other)
    for data in (before, after):
        data["forecast"].pop("events")
    _compare("", before, after, lines)
    return "\n".join(lines)


def _compare(path: str, before: Any, after: Any, lines: list[str]) -> None:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            _compare(f"{path}.{key}" if path else str(key), before.get(key), after.get(key), lines)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (old, new) in enumerate(zip(before, after, strict=True)):
            _compare(f"{path}[{i}]", old, new, lines)
    elif before != after:
        lines.append(f"{path}: {_short(before)} -> {_short(after)}")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def _build(kind: Any, value: Any, where: str) -> Any:
    """`value` as an instance of the annotation `kind`. Raises StalePlanError naming the field that does not fit."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        return _build_dataclass(kind, value, where)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _build(next(a for a in arguments if a is not type(None)), value, where)
    if kind is tuple or origin is tuple:
        if not isinstance(value, list):
            raise _misfit(where, "a list", value)
        if not arguments:
            return tuple(tuple(v) if isinstance(v, list) else v for v in value)
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_build(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
        if len(value) != len(arguments):
            raise _misfit(where, f"{len(arguments)} entries", value)
        return tuple(_build(a, item, f"{where}[{i}]") for i, (a, item) in enumerate(zip(arguments, value, strict=True)))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise _misfit(where, "an object", value)
        return {key: _build(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise _misfit(where, getattr(kind, "__name__", str(kind)), value)


def _build_dataclass(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _misfit(where, "an object", value)
    names = [f.name for f in fields(kind)]
    missing = [name for name in names if name not in value]
    unknown = [key for key in value if key not in names]
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"has unknown entries {', '.join(unknown)}"
        raise StalePlanError(f"{where} {what}: the file is damaged or of another release; plan again")
    hints = _hints(kind)
    return kind(**{name: _build(hints[name], value[name], f"{where}.{name}") for name in names})


def _misfit(where: str, wanted: str, value: Any) -> StalePlanError:
    return StalePlanError(f"{where} should be {wanted}, found {_short(value)}: the file is damaged; plan again")
