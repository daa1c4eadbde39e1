"""What a step leaves for later ones besides weights and optimizer state, in checkpoints: residuals and sums that are pending.

Dense tensors of float32 or float64 under the parameter's own name, s a stage and r a data rank:

    NAME@residual.S.R   what rank R has not sent yet        NAME@owned.S    what the owners have not sent yet, all of it
    NAME@pending.S      the sum that the next step leaves

Read under a plan with as many data ranks that gathers sums alike, every rank gets its own again: training goes on as if it had not stopped.
Under any other plan the sum of a parameter's residuals, over ranks, owners and stages, is kept: of E each data rank of the parameter's
first stage gets E / p, before the sum over tied stages. Where nothing is compressed, E is added to the complete gradients of the next step, on every
stage that keeps a copy of the parameter, and so are pending sums where nothing is late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from runtime.collective import raw_all_reduce
from runtime.exchange import columns_of, tensor_of, value_dtype
from runtime.mesh import Mesh
from runtime.reducer import Reducer
from runtime.storage import Resident, cut, join, local_shape

Read = Callable[[str], torch.Tensor]


def written(reducer: Reducer | None, carried: Iterable[tuple[Resident, torch.Tensor]], mesh: Mesh) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, dense tensor) of what this rank has to write. All ranks iterate."""
    others_first = all(axis.index == 0 for name, axis in mesh.axes.items() if name not in ("pp", "dp"))
    dp = mesh.axis("dp")
    pending = {r: r.local(grad) for r, grad in carried if r.stage == min(r.stored.stages)}  # every copy of a tied parameter carries the same
    if reducer is not None:
        for resident, total in reducer.pending:
            pending[resident] = pending[resident] + total if resident in pending else total
    for resident, total in pending.items():
        dense = resident.gather(total)
        if others_first and dp.index == 0:
            yield f"{resident.stored.fqn}@pending.{resident.stage}", dense
    if reducer is None or reducer.layout is None or reducer.residuals is None:
        return
    for i, (resident, matrix) in enumerate(zip(reducer.gradients, reducer.layout.matrices, strict=True)):
        shape = local_shape(resident.stored, mesh)
        own = join(tensor_of(reducer.residuals.own[i], matrix, shape), resident.stored.chunks, mesh)
        if others_first:
            yield f"{resident.stored.fqn}@residual.{resident.stage}.{dp.index}", own
        if not reducer.layout.is_gathered:
            continue
        owned = torch.zeros_like(reducer.residuals.own[i])
        for piece, residual in zip(reducer.layout.owners[dp.index], reducer.residuals.owned, strict=True):
            if piece.matrix == i:
                owned[slice(*piece.columns)] = residual
        dense = join(tensor_of(raw_all_reduce(owned, dp), matrix, shape), resident.stored.chunks, mesh)
        if others_first and dp.index == 0:
            yield f"{resident.stored.fqn}@owned.{resident.stage}", dense


def restored(reducer: Reducer | None, residents: Iterable[Resident], names: Iterable[str], read: Read, mesh: Mesh) -> list[tuple[Resident, torch.Tensor]]:
    """Give the reducer what a checkpoint says; returns what is to be added to the gradients of the next step, each parameter once."""
    kept: dict[str, list[str]] = {}
    for name in names:
        fqn, mark, _ = name.rpartition("@")
        if mark:
            kept.setdefault(fqn, []).append(name)
    residents = [r for r in residents if r.stored.kind == "parameter" and r.stored.requires_grad]
    carried: list[tuple[Resident, torch.Tensor]] = []
    pending: list[tuple[Resident, torch.Tensor]] = []
    if reducer is not None and reducer.residuals is not None:
        reducer.settle()  # a sum in the background changes residuals
        reducer.residuals.clear()
    is_late = reducer is not None and bool(reducer.delay)
    compressed = {} if reducer is None or reducer.residuals is None else {r: i for i, r in enumerate(reducer.gradients)}
    for resident in residents:
        found = next((kept[fqn] for fqn in (resident.stored.fqn, *resident.stored.aliases) if fqn in kept), [])
        is_first = resident.stage == min(resident.stored.stages)
        late = [name for name in found if "@pending." in name]
        unsent = [name for name in found if "@pending." not in name]
        if resident in compressed and _same_ranks(reducer, resident, unsent, mesh):
            _give_back(reducer, compressed[resident], resident, unsent, read, mesh)
            unsent = []
        if unsent and is_first and resident in compressed:
            assert reducer is not None and reducer.residuals is not None and reducer.layout is not None
            local = cut(_total(unsent, read) / mesh.axis("dp").size, resident.stored.chunks, mesh).to(mesh.device)
            reducer.residuals.own[compressed[resident]].copy_(columns_of(local, reducer.layout.matrices[compressed[resident]]))
        if late and is_first and is_late:
            pending.append((resident, _local(resident, _total(late, read))))
        to_add = (unsent if resident not in compressed else []) + (late if not is_late else [])
        if to_add:
            carried.append((resident, resident.like(_local(resident, _total(to_add, read)))))
    if reducer is not None and is_late:
        reducer.restore(pending)
    return carried


def _total(names: list[str], read: Read) -> torch.Tensor:
    total = read(names[0]).clone()
    for name in names[1:]:
        total += read(name)
    return total


def _local(resident: Resident, dense: torch.Tensor) -> torch.Tensor:
    return resident.cut(dense).to(resident.local())


def _same_ranks(reducer: Reducer | None, resident: Resident, names: list[str], mesh: Mesh) -> bool:
    """Whether these are residuals of as many data ranks, on the same stages, of sums that are gathered as here."""
    assert reducer is not None and reducer.layout is not None
    of_stage = [name for name in names if name.rpartition("@")[2].split(".")[1] == str(resident.stage)]
    num_ranks = sum("@residual." in name for name in of_stage)
    has_owned = any("@owned." in name for name in of_stage)
    stages = {int(name.rpartition("@")[2].split(".")[1]) for name in names}
    return num_ranks == mesh.axis("dp").size and has_owned == reducer.layout.is_gathered and stages == set(resident.stored.stages)


def _give_back(reducer: Reducer | None, index: int, resident: Resident, names: list[str], read: Read, mesh: Mesh) -> None:
    assert reducer is not None and reducer.residuals is not None and reducer.layout is not None
    matrix, dp = reducer.layout.matrices[index], mesh.axis("dp").index
    for name in names:
        kind, stage, *rank = name.rpartition("@")[2].split(".")
        if int(stage) != resident.stage or (rank and int(rank[0]) != dp):
            continue
        columns = columns_of(cut(read(name), resident.stored.chunks, mesh).to(mesh.device, value_dtype(matrix.width)), matrix)
        if kind == "residual":
            reducer.residuals.own[index].copy_(columns)
            continue
        for piece, residual in zip(reducer.layout.owners[dp], reducer.residuals.owned, strict=True):
            if piece.matrix == index:
                residual.copy_(columns[slice(*piece.columns)])
