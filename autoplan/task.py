"""What a search is asked."""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.constraints import Constraints
from autoplan.graph import Graph
from costmodel.cluster import Cluster
from costmodel.prices import Prices


@dataclass(frozen=True)
class Stages:
    """Stages that are given: their first blocks, with the number of blocks at the end, and the rank of each."""

    starts: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """One search: its inputs."""

    graph: Graph
    cluster: Cluster
    prices: Prices
    constraints: Constraints
    optimizer: str
    precision: str | None
    time_limit_s: float | None
    stages: Stages | None = None  # None: cut as is best
