"""Which rows the shipped constants are fitted on: at most a tenth of a source's rows, at least one.

Rows are grouped by stack, chip and precision, the groups sorted by size; the sample goes round the groups, and inside a group
takes rows evenly spaced by time a unit of work, those with a measured peak before those without.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.accuracy.calibrate import chip
from benchmarks.accuracy.record import UnsupportedRowError, run_of
from benchmarks.accuracy.score import measured_s

Row = Mapping[str, Any]


def choose(rows: Sequence[Row], share: float = 0.1) -> list[Row]:
    """The sample of one source, deterministic. Empty for a source without measurements."""
    groups: dict[tuple[str, str, str, bool], list[Row]] = defaultdict(list)
    for row in rows:
        try:
            run = run_of(row)
        except UnsupportedRowError:
            continue
        timed, weighed = measured_s(row) is not None, bool(row["measured"].get("peak_mem_GiB"))
        if timed or weighed:
            groups[run.stack, chip(run.cluster.device().name), row["precision"], timed].append(row)
    count = max(1, int(len(rows) * share))
    ordered = sorted(groups.values(), key=lambda g: (-len(g), g[0]["row_id"]))[:count]
    quota = _quota([len(g) for g in ordered], count)
    return [row for group, n in zip(ordered, quota, strict=True) for row in _spaced(group, n)]


def _quota(sizes: list[int], count: int) -> list[int]:
    """One a group, the rest in proportion to size."""
    quota = [1] * len(sizes)
    while sum(quota) < min(count, sum(sizes)):
        most = max(range(len(sizes)), key=lambda i: (sizes[i] / (quota[i] + 1) if quota[i] < sizes[i] else -1.0, -i))
        quota[most] += 1
    return quota


def _spaced(group: list[Row], count: int) -> list[Row]:
    ordered = sorted(group, key=lambda row: (_pace(row), row["row_id"]))
    weighed = [row for row in ordered if row["measured"].get("peak_mem_GiB")]
    pool = weighed if len(weighed) >= count else ordered
    return [pool[int((i + 0.5) * len(pool) / count)] for i in range(count)]


def _pace(row: Row) -> float:
    """Device seconds a token and parameter."""
    m, seconds = row["model"], measured_s(row) or 0.0
    return seconds * row["cluster"]["n_gpus"] / row["plan"]["global_batch"] / m["seq_len"] / m["layers"] / m["hidden"] ** 2
