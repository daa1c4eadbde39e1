"""autoplan: plans and runs the parallel training of a PyTorch model.

`autoplan.parallelize(model)` inside a job, `autoplan.find_plan(model, batch, cluster)` anywhere. See docs/getting-started.md.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "capture": "autoplan.frontend",
    "find_plan": "autoplan.api",
    "give_meshes": "autoplan.remesh",
    "batch_size_schedule": "autoplan.batchsize",
    "parallelize": "autoplan.parallel",
    "ParallelModel": "autoplan.parallelmodel",
    "retrace": "autoplan.retracing",
    "OnlinePlanner": "autoplan.online",
    "register_rule": "autoplan.rules",
    "Constraints": "autoplan.constraints",
    "Cluster": "costmodel.cluster",
    "Plan": "autoplan.plan",
    "AutoplanError": "autoplan.errors",
    "UsageError": "autoplan.errors",
    "CaptureError": "autoplan.errors",
    "UnsupportedOpError": "autoplan.errors",
    "ClusterError": "autoplan.errors",
    "InfeasibleError": "autoplan.errors",
    "StalePlanError": "autoplan.errors",
    "RunError": "autoplan.errors",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that the command line answers --help without importing torch.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'autoplan' has no attribute {name!r}")
