"""The same training step by this project and by hand with torch: each a function that runs one whole step and returns its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import autoplan
from benchmarks.runtime.model import Part, built

Step = Callable[[], float]
NUM_MICRO_BATCHES = 4
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "eager": {},
    "ddp": dict(dp=2, zero=0),
    "fsdp": dict(dp=2, zero=3),
    "tensor": dict(tp=2, sequence_parallel=False),
    "pipeline": dict(pp=2, schedule="1f1b"),
}


def _trained(model: Any, optimizer: torch.optim.Optimizer, run: Callable[[], torch.Tensor]) -> Step:
    def step() -> float:
        loss = run()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def ours(peer: str, num_layers: int, num_rows: int, *, from_meta: bool = False) -> Step:
    """The step under the plan whose degrees `peer` has. `from_meta`: the model has no weights of its own, each rank loads its part."""
    model, batch = built(num_layers, num_rows)
    state = model.state_dict()
    model = model.to("meta") if from_meta else model
    wanted = dict(CONSTRAINTS[peer], micro_batch_size=num_rows // CONSTRAINTS[peer].get("dp", 1) // (NUM_MICRO_BATCHES if peer == "pipeline" else 1))
    pm = autoplan.parallelize(model, batch, cluster=f"cpu:1x{_size()}", constraints=autoplan.Constraints(**wanted, recompute="none"))
    if from_meta:
        pm.load_full_state_dict(state)
    optimizer = pm.optimizer(torch.optim.AdamW, lr=1e-3)
    return _trained(pm, optimizer, lambda: pm.forward_backward(batch))


def theirs(peer: str, num_layers: int, num_rows: int) -> Step:
    """The step as `peer` is written by hand."""
    model, batch = built(num_layers, num_rows)
    if peer == "pipeline":
        return _pipeline(model, batch)
    if peer in ("ddp", "fsdp"):
        each, rank = num_rows // _size(), dist.get_rank()
        batch = {name: tensor[rank * each : (rank + 1) * each] for name, tensor in batch.items()}
    module: Any = model
    if peer == "ddp":
        module = DistributedDataParallel(model)
    elif peer == "fsdp":
        mesh = init_device_mesh("cpu", (_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif peer == "tensor":
        mesh = init_device_mesh("cpu", (_size(),))
        columns, rows = ColwiseParallel(), RowwiseParallel()
        for layer in model.layers:
            parallelize_module(layer, mesh, {"q": columns, "k": columns, "v": columns, "gate": columns, "up": columns, "out": rows, "down": rows})
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    def run() -> torch.Tensor:
        loss = module(**batch)
        loss.backward()
        return loss

    return _trained(module, optimizer, run)


def _pipeline(model: Any, batch: dict[str, torch.Tensor]) -> Step:
    rank, size = dist.get_rank(), _size()
    part = Part(model, rank, size)
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, NUM_MICRO_BATCHES, loss_fn=lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()))
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)

    def run() -> torch.Tensor:
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(batch["ids"])
        else:
            schedule.step(target=batch["labels"], losses=losses)
        return torch.stack(losses).mean() if losses else torch.zeros(())

    return _trained(part, optimizer, run)


def _size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
