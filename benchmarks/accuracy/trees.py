"""Gradient-boosted regression trees on the numbers of a row, for comparison (Friedman 2001; squared error).

    F_0 = mean y;  F_k = F_{k-1} + rate * tree fitted on y - F_{k-1}

A tree splits greedily where the sum of squares falls most and predicts the mean of a leaf. The target is ln(step seconds), or
with `ideal` ln(step seconds / (model FLOPs / the cluster's peak)): what remains to be learned is then one over the share of the peak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.accuracy.calibrate import Sample
from benchmarks.accuracy.record import Run
from costmodel.roofline import item_bytes

RECOMPUTE = ("none", "selective", "selective_op", "selective_layer", "partial", "full")  # others count as one kind
Array = np.ndarray


def ideal_s(run: Run) -> float:
    """Seconds of the model's FLOPs (6 a parameter and token, and attention) on the cluster's peak."""
    m = run.model
    layer = 2 * m.hidden * (m.hidden + m.kv_heads * m.hidden // m.heads) + (3 if m.gated else 2) * m.hidden * m.ffn
    flops = run.global_batch * m.seq * (6 * (m.layers * layer + m.hidden * m.vocab) + 12 * m.layers * m.hidden * m.seq / 2)
    return flops / sum(g.num_devices * g.device.peak(run.gemm_dtype) for g in run.cluster.groups)


def features(run: Run) -> list[float]:
    """The numbers of a row: model, plan, device and links; sizes as logarithms."""
    m, g = run.model, run.cluster.groups[0]
    sizes = (m.layers, m.hidden, m.heads, m.kv_heads, m.ffn, m.seq, m.vocab, run.cluster.num_devices, g.devices_per_node)
    plan = (run.tp, run.pp, run.dp, run.cp, run.vpp, run.micro_batch, run.num_micro, run.global_batch, run.zero_group)
    rates = (g.device.peak(run.gemm_dtype), g.device.memory_bytes_per_s, g.device.memory_bytes, g.tiers[0].port_bytes_per_s, g.tiers[-1].port_bytes_per_s)
    flags = (run.zero, (*RECOMPUTE, run.recompute).index(run.recompute), item_bytes(run.dtype), m.gated, run.sequence_parallel, run.flash)
    return [math.log(value) for value in (*sizes, *plan, *rates, ideal_s(run))] + [float(flag) for flag in flags]


@dataclass(frozen=True)
class Leaf:
    """Predicts `value`."""

    value: float

    def predict(self, x: Array) -> Array:
        return np.full(len(x), self.value)


@dataclass(frozen=True)
class Split:
    """Rows with column `column` at most `limit` go to `low`."""

    column: int
    limit: float
    low: Leaf | Split
    high: Leaf | Split

    def predict(self, x: Array) -> Array:
        return np.where(x[:, self.column] <= self.limit, self.low.predict(x), self.high.predict(x))


def grown(x: Array, y: Array, depth: int, least: int) -> Leaf | Split:
    """A tree on x [rows, columns], y [rows]; leaves hold at least `least` rows."""
    best, place = 1e-12, None
    if depth and len(y) >= 2 * least:
        for column in range(x.shape[1]):
            order = np.argsort(x[:, column], kind="stable")
            values, total = x[order, column], np.cumsum(y[order])
            counts = np.arange(1, len(y))
            gain = total[:-1] ** 2 / counts + (total[-1] - total[:-1]) ** 2 / counts[::-1] - total[-1] ** 2 / len(y)
            gain[(values[1:] <= values[:-1]) | (counts < least) | (counts[::-1] < least)] = 0.0
            at = int(np.argmax(gain))
            if gain[at] > best:
                best, place = float(gain[at]), (column, float(values[at] + values[at + 1]) / 2)
    if place is None:
        return Leaf(float(y.mean()))
    low = x[:, place[0]] <= place[1]
    return Split(*place, grown(x[low], y[low], depth - 1, least), grown(x[~low], y[~low], depth - 1, least))


@dataclass(frozen=True)
class Boosted:
    """Trees fitted on the residuals of those before."""

    start: float
    rate: float
    trees: tuple[Leaf | Split, ...]
    ideal: bool

    @staticmethod
    def fit(samples: Sequence[Sample], ideal: bool, rounds: int = 300, depth: int = 3, rate: float = 0.05, least: int = 2) -> Boosted:
        """Fitted on step times; `ideal`: the module's text. Deterministic."""
        x = np.array([features(s.run) for s in samples])
        y = np.array([math.log(s.measured / (ideal_s(s.run) if ideal else 1.0)) for s in samples])
        start, trees = float(y.mean()), []
        rest = y - start
        for _ in range(rounds):
            tree = grown(x, rest, depth, least)
            rest = rest - rate * tree.predict(x)
            trees.append(tree)
        return Boosted(start, rate, tuple(trees), ideal)

    def seconds(self, runs: Sequence[Run]) -> list[float]:
        """Predicted seconds of a step."""
        x = np.array([features(run) for run in runs])
        y = self.start + self.rate * sum((tree.predict(x) for tree in self.trees), np.zeros(len(x)))
        return [math.exp(value) * (ideal_s(run) if self.ideal else 1.0) for value, run in zip(y, runs, strict=True)]
