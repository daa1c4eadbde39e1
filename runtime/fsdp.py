"""FSDP2 under this executor: its collectives recorded, its prefetch made explicit.

Its implicit backward prefetch follows the order of all forwards since the last backward, which under pipelining is not the
order of the next backward. So every group is told which group comes next.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from runtime.collective import gather_into, scatter_into, wait
from runtime.mesh import Axis, Mesh
from runtime.paceclock import PacedClock

# Blocks may put out views: no instruction of a later block writes into them.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")


@dataclass(frozen=True, eq=False)
class _Comm:
    axis: Axis
    replicas: Axis

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _run(self, kind: str, num_bytes: int, issue: Callable[[], Any], *, is_async: bool) -> Any:
        if not is_async:
            return wait(self.axis, kind, num_bytes, issue)
        work = issue()
        wait(self.axis, kind, num_bytes, lambda: None)
        return work


class RecordedAllGather(_Comm):
    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False) -> Any:
        return self._run("all_gather", output_tensor.nbytes, lambda: gather_into(output_tensor, input_tensor, group=group, async_op=True), is_async=async_op)


class RecordedReduceScatter(_Comm):
    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        work = self._run(
            "reduce_scatter", input_tensor.nbytes, lambda: scatter_into(output_tensor, input_tensor, group=group, op=op, async_op=True), is_async=async_op
        )
        if self.replicas.size > 1:  # FSDP2 sums the result over the replicas itself, at once
            start, clock = self.axis.recorder.mark(), self.axis.recorder.clock
            if isinstance(clock, PacedClock):
                clock.rest(clock.links.seconds("all_reduce", "dp", output_tensor.nbytes, self.replicas.ranks))
            self.axis.recorder.add("all_reduce", "dp", output_tensor.nbytes, start)
        return work


def shard(module: nn.Module, mesh: Mesh, *, zero: int, read_dtype: torch.dtype | None = None) -> FSDPModule:
    """Put a module's own parameters into one group that ZeRO stage `zero` divides over the data ranks. Gradients are sums.

    `read_dtype`: the parameters are gathered in it and are fp32 at rest, their gradients are reduced and kept in fp32.
    """
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if read_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=read_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(module, mesh=mesh.shards, reshard_after_forward=zero == 3, mp_policy=policy)  # type: ignore[arg-type]
    assert isinstance(module, FSDPModule)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    module.set_gradient_divide_factor(1.0)  # losses are normalised already
    module.set_custom_all_gather(RecordedAllGather(mesh.shard_axis, mesh.replica_axis))  # type: ignore[arg-type]
    module.set_custom_reduce_scatter(RecordedReduceScatter(mesh.shard_axis, mesh.replica_axis))  # type: ignore[arg-type]
    return module


def take_whole_grads(module: FSDPModule) -> dict[torch.Tensor, torch.Tensor]:
    """Parameter at rest -> what backward passes without a reduction have added up for the whole of it; none is left here."""
    found: dict[torch.Tensor, torch.Tensor] = {}
    for state in module._get_fsdp_state()._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            for parameter in group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)
                grad = parameter.unsharded_accumulated_grad
                grad = grad if grad is not None or whole is None else whole.grad
                parameter.unsharded_accumulated_grad = None
                if whole is not None:
                    whole.grad = None
                if grad is not None:
                    found[parameter.sharded_param] = grad
    return found


def chain_prefetch(forward: Sequence[FSDPModule], backward: Sequence[FSDPModule]) -> None:
    """Each group of `forward` gathers the next one ahead, each of `backward` (in forward order) the one before it."""
    for module, following in itertools.pairwise(forward):
        module.set_modules_to_forward_prefetch([following])
    for module in forward:
        module.set_modules_to_backward_prefetch([module])  # already gathered then: no prefetch, and no implicit one
    for module, previous in zip(backward[1:], backward[:-1], strict=True):
        module.set_modules_to_backward_prefetch([previous])
