"""How far predictions are from measurements, by source.

MAPE counts a row that is not predicted as 100 % wrong. Pairs: plans of one model, GPU count, batch and precision whose measured times
differ by more than 5 %. Regret: measured time of the plan predicted fastest over the fastest measured, groups of three or more.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def measured_s(row: Mapping[str, Any]) -> float | None:
    """Seconds of a step as printed or derived from printed figures."""
    measured, batch = row["measured"], row["plan"].get("global_batch")
    stated = measured.get("iteration_s") or row.get("derived", {}).get("iteration_s")
    if stated:
        return float(stated)
    rate = measured.get("tokens_per_s_per_gpu")
    return batch * row["model"]["seq_len"] / (rate * row["cluster"]["n_gpus"]) if rate and batch else None


def out_of_memory(row: Mapping[str, Any]) -> bool:
    return bool(row["measured"].get("oom") or row["measured"].get("oom_or_failed"))


@dataclass(frozen=True, slots=True)
class Score:
    """Of one source. None where the source has nothing to compare."""

    num_timed: int
    time_mape: float | None
    time_bias: float | None
    num_pairs: int
    ordered: float | None
    regret: float | None
    num_memory: int
    memory_mape: float | None
    oom_missed: int
    refused: int


def score(rows: Sequence[Mapping[str, Any]], predictions: Mapping[str, Mapping[str, Any]]) -> Score:
    errors, signed, groups, memory = [], [], defaultdict(list), []
    missed = refused = 0
    for row in rows:
        said, seconds = predictions.get(row["row_id"], {}), measured_s(row)
        if seconds is not None:
            guess = said.get("iteration_s")
            errors.append(abs(guess / seconds - 1) if guess else 1.0)
            if guess:
                signed.append(guess / seconds - 1)
                key = (json.dumps(row["model"], sort_keys=True), row["cluster"]["gpu"], row["cluster"]["n_gpus"], row["plan"]["global_batch"], row["precision"])
                groups[key].append((seconds, guess))
        peak = row["measured"].get("peak_mem_GiB")
        if peak and said.get("peak_mem_GiB"):
            memory.append(abs(said["peak_mem_GiB"] / peak - 1))
        missed += out_of_memory(row) and said.get("fits") is not False
        refused += not out_of_memory(row) and said.get("fits") is False
    pairs = [(a, b) for g in groups.values() for a, b in itertools.combinations(g, 2) if abs(a[0] - b[0]) / max(a[0], b[0]) > 0.05]
    regrets = [min(g, key=lambda x: x[1])[0] / min(t for t, _ in g) - 1 for g in groups.values() if len(g) >= 3]
    mean = lambda values: statistics.mean(values) if values else None  # noqa: E731
    right = [(a[0] < b[0]) == (a[1] < b[1]) and a[1] != b[1] for a, b in pairs]
    return Score(len(errors), mean(errors), mean(signed), len(pairs), mean(right), mean(regrets), len(memory), mean(memory), missed, refused)


def table(scores: Mapping[str, Score]) -> str:
    """Scores as text, a line a source, and their mean."""
    share = lambda x: "-" if x is None else f"{100 * x:.1f}%"  # noqa: E731
    lines = [f"{'source':24}{'rows':>6}{'time':>8}{'bias':>8}{'pairs':>7}{'ordered':>9}{'regret':>8}{'memory':>8}{'rows':>6}{'oom missed':>12}{'refused':>9}"]
    for name, s in scores.items():
        lines.append(
            f"{name[:23]:24}{s.num_timed:>6}{share(s.time_mape):>8}{share(s.time_bias):>8}{s.num_pairs:>7}{share(s.ordered):>9}{share(s.regret):>8}"
            f"{share(s.memory_mape):>8}{s.num_memory:>6}{s.oom_missed:>12}{s.refused:>9}"
        )
    mean = lambda field: statistics.mean(v) if (v := [getattr(s, field) for s in scores.values() if getattr(s, field) is not None]) else None  # noqa: E731
    weights = {name: min(s.num_pairs, 50) for name, s in scores.items()}
    ordered = sum(weights[n] * (s.ordered or 0.0) for n, s in scores.items()) / max(1, sum(weights.values()))
    time, regret, memory = (share(mean(field)) for field in ("time_mape", "regret", "memory_mape"))
    lines.append(f"{'mean over sources':30}{time:>8}{'':>15}{share(ordered):>9}{regret:>8}{memory:>8}")
    return "\n".join(lines)
