"""`parallelize`: a model becomes one that trains over all ranks of this job, with the results of the model in one process."""

from __future__ import annotations

from pathlib import Path

import torch

from autoplan.api import Batch, LossFn
from autoplan.constraints import Constraints
from autoplan.errors import StalePlanError
from autoplan.example import example_batch
from autoplan.parallelmodel import ParallelModel
from autoplan.plan import Plan
from autoplan.precision import check_precision
from autoplan.settings import Settings, world_size
from costmodel.cluster import Cluster
from runtime.mesh import default_device, init_process_group


def parallelize(
    model: torch.nn.Module,
    batch: Batch | None = None,
    plan: Plan | str | Path | None = None,
    cluster: str | Path | Cluster | None = None,
    constraints: Constraints | None = None,
    loss_fn: LossFn | None = None,
    optimizer: str = "adamw",
    precision: str | None = None,
    seed: int = 0,
    *,
    timeout_s: float | None = None,
    check_data: bool = False,
    compile_backend: str | None = None,
) -> ParallelModel:
    """`model` as this job trains it, under torchrun or alone. Every rank calls it with the same arguments.

    `batch` is an example of the global batch; without one it is taken from what the model offers, or planning waits for the
    first `forward_backward`. `plan` (a Plan or its file) is used instead of searching. `precision`: "fp32", "bf16" or "fp16"
    (autoplan/precision.py); None computes as the plan says, or as the model is. A rank that is gone, or has not moved for `timeout_s`
    (None: the larger of 30 s and five steps of the forecast) while others wait for it, ends the job with one message. `check_data`
    compares at every call what the ranks were given (autoplan/share.py). `compile_backend` ("inductor"): the blocks of the program are
    compiled by torch.compile. Raises the errors of `find_plan`, and
    StalePlanError for a plan of another model, precision or number of ranks.
    """
    check_precision(precision)
    device = default_device()
    init_process_group(device, timeout_s=600.0)
    given = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    if given is not None:
        if precision not in (None, given.precision):
            raise StalePlanError(f"the plan computes in {given.precision or 'the precision of the model'}, asked for is {precision}: plan again for it.")
        precision = given.precision
    settings = Settings(given, cluster, constraints or Constraints(), loss_fn, optimizer, precision, seed, device, timeout_s, check_data, compile_backend)
    parallel = ParallelModel(model, settings)
    rows = given.global_batch if given is not None else max(8, 2 * world_size())
    example = batch if batch is not None else example_batch(model, rows)
    if example is not None:
        parallel.prepare(example)
    return parallel
