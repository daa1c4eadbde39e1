"""The Python interface: capture and plan anywhere, parallelize inside a job."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from autoplan.clusterprices import prices_of
from autoplan.constraints import Constraints
from autoplan.errors import ClusterError, UsageError
from autoplan.frontend import capture
from autoplan.graph import Graph
from autoplan.ownprices import own_prices
from autoplan.plan import Plan
from costmodel.cluster import Cluster
from costmodel.detect import detect
from costmodel.memory import widths
from costmodel.prices import Prices

Batch = Mapping[str, Any] | tuple[Any, ...]
LossFn = Callable[[Any, Any], torch.Tensor]


def load_cluster(cluster: str | Path | Cluster) -> Cluster:
    """A preset "DEVICE:NODESxPER_NODE", a YAML file, a Cluster, or "detect:RANKS" of this machine. Raises ClusterError."""
    if is_own(cluster):
        ranks = str(cluster).partition(":")[2] or "1"
        if not ranks.isdigit() or int(ranks) < 1:
            raise ClusterError(f"cluster {cluster!r}: expected detect or detect:RANKS, like detect:4")
        return detect(int(ranks))
    try:
        return Cluster.parse(cluster)
    except ValueError as error:
        raise ClusterError(str(error)) from error


def is_own(cluster: str | Path | Cluster | None) -> bool:
    """Whether a cluster argument means the present machine."""
    return cluster is None or (isinstance(cluster, str) and cluster.partition(":")[0] == "detect")


def find_plan(
    model: torch.nn.Module | Graph,
    batch: Batch | None = None,
    cluster: str | Path | Cluster | None = None,
    constraints: Constraints | None = None,
    optimizer: str = "adamw",
    precision: str | None = None,
    time_limit_s: float | None = None,
    *,
    loss_fn: LossFn | None = None,
    prices: Prices | None = None,
) -> Plan:
    """The best plan for training `model` on the global batch `batch` on `cluster` (None: this job's own ranks). No device of the cluster is needed.

    `model` may live on the meta device, or be a graph that was captured before. `prices` default to the analytic
    model of the cluster, and to measurements where its devices are paced; for the present machine (None, "detect:RANKS") to what
    `autoplan profile` measured, if it did. Raises CaptureError, ClusterError, UsageError or InfeasibleError.
    """
    from autoplan.search import search

    if time_limit_s is not None and not time_limit_s >= 0:
        raise UsageError(f"time_limit_s={time_limit_s}: a number of seconds is needed, or None for no limit")
    found = load_cluster(cluster) if cluster is not None else detect()
    try:
        widths(None, optimizer)
    except ValueError as error:
        raise UsageError(str(error)) from error
    graph = model if isinstance(model, Graph) else capture(model, _example(model, batch, found.num_devices), loss_fn, precision=precision)
    if graph.loss is None:
        warnings.warn(f"{graph.name} gives no loss, so the plan is one of its forward pass: to train, give labels in the batch, or loss_fn", stacklevel=2)
    prices = prices or (own_prices(graph, found) if is_own(cluster) else prices_of(found))
    return search(graph, found, prices, constraints or Constraints(), optimizer=optimizer, precision=precision, time_limit_s=time_limit_s)


def _example(model: torch.nn.Module, batch: Batch | None, num_devices: int) -> Batch:
    from autoplan.example import example_batch

    found = batch if batch is not None else example_batch(model, max(8, 2 * num_devices))
    if found is None:
        raise UsageError(f"{type(model).__name__} does not say what it takes: give an example of the global batch, find_plan(model, batch, ...).")
    return found
