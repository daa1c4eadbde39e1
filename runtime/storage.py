"""Tensors at rest: what this rank keeps of a stage's parameters and buffers, and constants cut for it.

A dense tensor is cut in two steps: by `Stored.chunks` on the mesh axes that divide the computation, then, under ZeRO, along
its first dimension over the data ranks by FSDP2 (uneven parts allowed). Parameters are plain tensors without ZeRO and
DTensors on the data axis with it, so all parameters of a program are of one kind and the elementwise optimizers of torch work
on them. Nothing else knows how a dense tensor is cut: `Resident.gather` is the exact inverse.

Source: Zhao et al. 2023 (PyTorch FSDP), Rajbhandari et al. 2020 (ZeRO).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from runtime.call import dtype_name, dtype_of
from runtime.collective import Part, raw_all_gather
from runtime.flow import flow, has_backward, users
from runtime.fsdp import chain_prefetch, shard, take_whole_grads
from runtime.mesh import Mesh
from runtime.module import Holder, StageModule
from runtime.program import Chunk, StageCode, Stored, row_range
from runtime.split import WeightGrads

Dense = Callable[[str], torch.Tensor]


def cut(dense: torch.Tensor, chunks: tuple[Chunk, ...], mesh: Mesh) -> torch.Tensor:
    """This rank's part of a dense tensor, contiguous and with memory of its own."""
    local = dense
    for chunk in chunks:
        axis = mesh.axis(chunk.axis)
        part = Part(chunk.dim, chunk.outer, chunk.size, chunk.inner)
        part.check(local, chunk.outer * chunk.size * chunk.inner, axis.size)
        local = part.parts(local, axis.size)[axis.index]
    return local.detach().clone(memory_format=torch.contiguous_format)


def join(local: torch.Tensor, chunks: tuple[Chunk, ...], mesh: Mesh) -> torch.Tensor:
    """The dense tensor, on every rank of the axes that `chunks` name."""
    for chunk in reversed(chunks):
        local = raw_all_gather(local, Part(chunk.dim, chunk.outer, chunk.size, chunk.inner), mesh.axis(chunk.axis))
    return local


def local_shape(stored: Stored, mesh: Mesh) -> tuple[int, ...]:
    """The shape that `cut` leaves."""
    return stored.local_shape({chunk.axis: mesh.axis(chunk.axis).size for chunk in stored.chunks})


@dataclass(frozen=True, eq=False)
class Resident:
    """One tensor at rest. `tensor` is the parameter that optimizers see, or the local tensor of a buffer."""

    stored: Stored
    stage: int
    tensor: torch.Tensor
    mesh: Mesh
    is_sharded: bool  # over the data ranks, by FSDP2
    is_served: bool = False  # its gradient is summed by parameter servers (runtime/servers.py)

    @property
    def is_divided(self) -> bool:
        """Whether this rank holds a part of the tensor only."""
        return self.is_sharded or any(self.mesh.axis(chunk.axis).size > 1 for chunk in self.stored.chunks)

    def local(self, tensor: torch.Tensor | None = None) -> torch.Tensor:
        """The plain tensor that this rank holds of `tensor` (the parameter, its gradient, or optimizer state alike)."""
        tensor = self.tensor if tensor is None else tensor
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def gather(self, tensor: torch.Tensor | None = None) -> torch.Tensor:
        """The dense tensor under the model's own shape, on every rank of this stage. All of them have to call it."""
        local = self.local(tensor).detach()
        shape = local_shape(self.stored, self.mesh)
        if self.is_sharded:
            local = _gather_rows(local, (shape or (1,))[0], self.mesh)
        return join(local.reshape(shape), self.stored.chunks, self.mesh)

    def cut(self, dense: torch.Tensor) -> torch.Tensor:
        """This rank's part of a dense tensor, in the shape of `local()`."""
        if tuple(dense.shape) != self.stored.spec.shape:
            raise ValueError(f"{self.stored.fqn} has shape {self.stored.spec.shape}, got {tuple(dense.shape)}")
        local = cut(dense, self.stored.chunks, self.mesh)
        if self.is_sharded:
            start, stop = row_range(max(local.shape[0] if local.dim() else 1, 1), self.mesh.shard_axis.index, self.mesh.shard_axis.size)
            local = local.reshape(local.shape or (1,))[start:stop]
        return local.reshape(self.local().shape)

    def like(self, local: torch.Tensor) -> torch.Tensor:
        """A plain local tensor in the kind of the parameter (a DTensor where that is one)."""
        if not isinstance(self.tensor, DTensor):
            return local
        return DTensor.from_local(local, self.tensor.device_mesh, self.tensor.placements, run_check=False, shape=self.tensor.shape, stride=self.tensor.stride())

    def write(self, dense: torch.Tensor) -> None:
        with torch.no_grad():
            self.local().copy_(self.cut(dense))


def _gather_rows(local: torch.Tensor, num_rows: int, mesh: Mesh) -> torch.Tensor:
    axis = mesh.shard_axis
    each = row_range(num_rows, 0, axis.size)[1]
    padded = local.new_zeros((each, *local.shape[1:]))
    padded[: local.shape[0]] = local
    return raw_all_gather(padded, Part(0, 1, each * axis.size, 1), axis)[:num_rows]


@dataclass(frozen=True, eq=False)
class Storage:
    """A stage at rest: the module that computes with its tensors, and the tensors."""

    module: StageModule
    residents: tuple[Resident, ...]
    zero: int
    later: WeightGrads | None  # of split backward passes
    keeps_whole_grads: bool = False  # FSDP2 reduces none: runtime/reducer.py does

    def before_backward(self, *, is_first: bool, is_last: bool) -> None:
        """Tell FSDP2 which of a step's backward passes comes: gradients are reduced every time, under ZeRO-1 only in the last;
        gathered parameters are dropped every time under ZeRO-3, else after the last."""
        if not self.zero or not (is_first or is_last):
            return
        is_last = is_last and self.later is None  # a split backward pass ends with `finish_backward`
        for module in self.fsdp_modules:
            syncs = not self.keeps_whole_grads and (is_last or (self.zero > 1 and self.later is None))
            module.set_requires_gradient_sync(syncs, recurse=False)
            module.set_reshard_after_backward(is_last or (self.zero > 2 and self.later is None), recurse=False)
        root = self.module
        assert isinstance(root, FSDPModule)
        root.set_is_last_backward(is_last)

    def check_readers(self, stage: StageCode) -> None:
        """Raise ValueError where a block would read what another block holds."""
        held = {name: block for block, holder in self.module.holders() for name in holder.names()}
        for name, blocks in users(stage).items():
            if name in held and any(block != held[name] for block in blocks):
                raise ValueError(f"stage {stage.index}: {name!r} is held by block {held[name]!r}, but the program reads it in {', '.join(blocks)}")

    def finish_backward(self) -> None:
        """Reduce what split backward passes have gathered in the weights' gradients.

        FSDP2 reduces in a hook of autograd, which runs before the weights' half; torch's own pipelining calls it by hand alike.
        """
        if not self.zero:
            return
        root = self.module
        assert isinstance(root, FSDPModule)
        root.set_requires_gradient_sync(not self.keeps_whole_grads)
        root.set_reshard_after_backward(True)
        root.set_is_last_backward(True)
        for group in self._groups():
            group.post_backward()
        root._get_fsdp_state()._root_post_backward_final_callback()

    @property
    def fsdp_modules(self) -> tuple[FSDPModule, ...]:
        return tuple(m for m in self.module.modules() if isinstance(m, FSDPModule))

    def reshard(self) -> None:
        """Drop the gathered parameters and copies in another dtype, so that later changes of the shards are seen."""
        for module in self.fsdp_modules:
            module.reshard()
        for module in self.module.modules():
            if isinstance(module, Holder):
                module.copies.drop()

    def widen_grads(self) -> None:
        """Keep what was added to the gradients of gathered weights since the last call in the dtype of their reduction."""
        for group in self._groups() if self.zero else ():
            for parameter in group.fsdp_params:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()

    def take_grads(self) -> dict[Resident, torch.Tensor]:
        """The whole local gradients of the parameters that have one, shaped as `local_shape`; none is left here."""
        if not self.zero:
            found = {r: r.tensor.grad for r in self.residents if r.tensor.grad is not None}
            for resident in found:
                resident.tensor.grad = None
            return found
        assert isinstance(self.module, FSDPModule)
        whole = take_whole_grads(self.module)
        return {r: whole[r.tensor].reshape(local_shape(r.stored, r.mesh)) for r in self.residents if r.tensor in whole}

    def _groups(self) -> Iterator[Any]:
        root = self.module
        assert isinstance(root, FSDPModule)
        for each in root._get_fsdp_state()._state_ctx.all_states:
            yield from each._fsdp_param_groups


def materialise(
    stage: StageCode,
    dense: Dense,
    mesh: Mesh,
    *,
    zero: int,
    is_split_backward: bool = False,
    is_served: bool = False,
    keeps_whole_grads: bool = False,
) -> Storage:
    """A stage's tensors, cut from the dense ones and placed.

    `dense(fqn)` gives the dense tensor; it is called once for each tensor and only this rank's part is kept, which has no values yet
    (NaN) where that tensor is on the meta device. Groups of FSDP2
    are a block each, and the stage for parameters that several blocks use; with `is_split_backward` everything is one group
    (nested groups give wrong gradients where a backward pass is split in two). `keeps_whole_grads`: see Storage.

    Raises ValueError where a dense tensor is not of the shape and dtype that the program says.
    """
    zero = zero if mesh.shards is not None else 0
    module = StageModule()
    for block in stage.bodies[0].blocks:
        module.block(block.name)
    read_by = users(stage)

    def holder(name: str) -> Holder:
        blocks = read_by[name]
        return module.block(blocks[0]) if len(blocks) == 1 and not is_split_backward else module

    state = tuple(stored for stored in stage.stored if stored.kind != "constant")
    for stored in state:
        local = _real(cut(_checked(dense(stored.fqn), stored), stored.chunks, mesh), mesh.device, dtype_of(stored.at_rest))
        share_over = mesh.axis("dp") if zero and "dp" not in stored.partial else None
        holder(stored.name).hold(stored, local, at_least_1d=zero > 0, share_over=share_over)
    if zero:
        _shard(stage, module, mesh, zero, is_split_backward=is_split_backward)
    residents = tuple(Resident(s, stage.index, holder(s.name).kept(s.name), mesh, zero > 0 and s.kind == "parameter", is_served) for s in state)
    return Storage(module, residents, zero, WeightGrads() if is_split_backward else None, keeps_whole_grads)


def _real(local: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if not local.is_meta:
        return local.to(device, dtype)
    made = torch.empty(local.shape, device=device, dtype=dtype)
    return made.fill_(torch.nan) if dtype.is_floating_point or dtype.is_complex else made.zero_()


def constants(stage: StageCode, dense: Dense, mesh: Mesh) -> dict[str, torch.Tensor]:
    """This rank's parts of the constants of a stage: part of its code, not of its state."""
    wanted = (stored for stored in stage.stored if stored.kind == "constant")
    return {s.name: cut(_checked(dense(s.fqn), s), s.chunks, mesh).to(mesh.device) for s in wanted}


def _checked(value: torch.Tensor, stored: Stored) -> torch.Tensor:
    is_cast = bool(stored.master) and value.is_floating_point()
    if tuple(value.shape) != stored.spec.shape or not (is_cast or dtype_name(value.dtype) == stored.spec.dtype):
        raise ValueError(f"{stored.fqn} should be {stored.spec.shape} {stored.spec.dtype}, found {tuple(value.shape)} {dtype_name(value.dtype)}")
    return value


def _shard(stage: StageCode, module: StageModule, mesh: Mesh, zero: int, *, is_split_backward: bool) -> None:
    body = stage.bodies[0]
    found = flow(stage, body)
    forward, backward = [], []
    zero = min(zero, 2) if is_split_backward else zero  # weights stay gathered until the last half pass
    for block in body.blocks:
        layers = [shard(layer, mesh, zero=zero, read_dtype=layer.read_dtype) for layer in module.block(block.name).layers() if layer.has_parameters]
        forward += reversed(layers)
        backward += reversed(layers) if has_backward(block, found) else []
    root = [shard(layer, mesh, zero=zero, read_dtype=layer.read_dtype) for layer in module.layers() if layer.has_parameters or layer is module]
    chain_prefetch([*reversed(root), *forward], backward)
