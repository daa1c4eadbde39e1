"""The optimizer of a plan: the class that is exact for the way in which the plan keeps parameters and sums gradients."""

from __future__ import annotations

from typing import Any

import torch

from autoplan.onebitadam import one_bit_adam
from autoplan.optimizers import optimizer_class
from autoplan.plan import Plan
from autoplan.served import served_class, worker_class
from runtime.executor import Executor


def make_optimizer(cls: type[torch.optim.Optimizer], params: list[Any], executor: Executor, plan: Plan, options: dict[str, Any]) -> torch.optim.Optimizer:
    """`cls(params, **options)` as the plan needs it: over divided tensors (autoplan/optimizers.py), on parameter servers (autoplan/served.py) or
    with compressed momenta (autoplan/onebitadam.py). Every rank calls it. Raises UnsupportedOpError."""
    reducer = executor.reducer
    if reducer is not None and reducer.codec == "1bit-adam":
        adam = one_bit_adam(cls)(params, **options)
        reducer.momenta = adam
        return adam
    if plan.compression == "1bit-adam":
        options = {name: value for name, value in options.items() if name != "warmup_steps"}
    made: Any
    if plan.sync == "allreduce":
        made = optimizer_class(cls, executor.trainable, plan.degree("pp"))
    else:
        made = (served_class if plan.sync == "ps" else worker_class)(cls, executor)
    return made(params, **options)
