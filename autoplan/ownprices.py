"""Prices of the present machine: measured, where `autoplan profile` has timed here what a graph is made of, else from formulas.

Nothing is measured on the way: sizes that were not timed are interpolated between those that were (costmodel/measured.py), and the
forecast says how many. An operator counts as known if some size of it was timed; those that only the runtime has are always from formulas.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from autoplan.graph import Graph
from costmodel.analytic import AnalyticPrices
from costmodel.cluster import Cluster
from costmodel.measured import MeasuredPrices
from costmodel.opclass import op_class
from costmodel.prices import Prices
from costmodel.profile import Profile, default_path, environment


def own_prices(graph: Graph, cluster: Cluster, path: Path | None = None) -> Prices:
    """Prices of `cluster`, which is this machine, from the profile at `path` (default: the user's)."""
    analytic, where = AnalyticPrices(cluster), path or default_path()
    if not os.access(where, os.R_OK | os.W_OK):
        return analytic
    here = environment()
    for env in dict.fromkeys((here, replace(here, threads=1))):  # ranks that share a host compute on one thread each
        profile = Profile(where, env)
        if cluster.device().kind == env.kind and not unknown(graph, profile):
            return MeasuredPrices(cluster, profile, analytic, budget_s=0.0)
    return analytic


def unknown(graph: Graph, profile: Profile) -> tuple[str, ...]:
    """Products, attention and convolutions of a graph of which no size was timed; all operators, where nothing was."""
    targets = dict.fromkeys(op.instr.target for op in graph.ops if op.instr.target.startswith("aten.") and op_class(op.instr.target) not in ("view", "create"))
    heavy = [target for target in targets if op_class(target) in ("gemm", "attention", "convolution")]
    known = {key.target for key, _ in profile.ops()}
    return tuple(target for target in heavy or targets if target not in known)
