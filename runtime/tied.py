"""Gradients of a parameter that several stages keep: summed over them in stage order, so that the copies stay equal bit for bit.

equal meshes     the ranks of one place on all stages: the first stage adds and sends the sum back
other meshes     every rank gathers the dense gradient of its stage and takes that of each other stage from one of its ranks, rank j from
                 number j modulo their count; all add them in stage order and keep their own part
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from runtime.call import spec_of
from runtime.crossing import num_ranks
from runtime.errors import failing
from runtime.mesh import Mesh
from runtime.paceclock import PacedClock
from runtime.program import StageMesh
from runtime.storage import Resident


def sum_tied(residents: tuple[Resident, ...], stage_ranks: tuple[int, ...], mesh: Mesh, meshes: tuple[StageMesh, ...] = ()) -> None:
    """Sum the gradients of each tied parameter over the stages that keep it; afterwards all hold the sum.

    A stage without a gradient counts as zero. Parameters are taken in order of their names, the same on every rank. `meshes`: those of the
    "pp" coordinates, where they are not all alike.
    """
    tied = {r.stored.fqn: r.stored for r in residents if len(r.stored.stages) > 1 and r.stored.requires_grad and r.stored.kind == "parameter"}
    me = mesh.axis("pp").index
    for fqn in sorted(tied):
        own = sorted((r for r in residents if r.stored.fqn == fqn), key=lambda r: r.stage)
        grads = [r.local(r.tensor.grad) if r.tensor.grad is not None else torch.zeros_like(r.local()) for r in own]
        ranks = list(dict.fromkeys(stage_ranks[s] for s in sorted(tied[fqn].stages)))
        total = grads[0].clone()
        for grad in grads[1:]:
            total += grad
        if len(ranks) > 1:
            total = own[0].cut(_dense_sum(own[0].gather(total), ranks, me, mesh, meshes)) if meshes else _star_sum(total, ranks, me, mesh)
        for resident in own:
            resident.tensor.grad = resident.like(total.clone())


def partners(ranks: list[int], me: int, rank: int, meshes: tuple[StageMesh, ...]) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Other "pp" coordinate -> (the global rank that this one takes its gradient from, those that take this one's)."""
    own, place = num_ranks(meshes[me]), rank - meshes[me].first
    found = {}
    for other in ranks:
        if other != me:
            first, count = meshes[other].first, num_ranks(meshes[other])
            found[other] = (first + place % count, tuple(first + i for i in range(count) if i % own == place))
    return found


def _dense_sum(own: torch.Tensor, ranks: list[int], me: int, mesh: Mesh, meshes: tuple[StageMesh, ...]) -> torch.Tensor:
    """The sum of dense gradients over some "pp" coordinates, in their order, on all ranks of them."""
    group, own = mesh.channels["backward up"], own.contiguous()
    spec = spec_of(own)
    clock = mesh.recorder.clock if isinstance(mesh.recorder.clock, PacedClock) else None
    coming: dict[int, torch.Tensor] = {}
    works: list[tuple[Any, str]] = []
    for other, (source, takers) in partners(ranks, me, mesh.rank, meshes).items():
        for taker in takers:
            start = mesh.recorder.mark()
            sent = own if clock is None else clock.seal(own, mesh.rank, taker)
            works.append((dist.isend(sent, taker, group=group), f"send of a tied gradient to rank {taker}"))
            mesh.recorder.add("send", "tied", own.nbytes, start)
        coming[other] = torch.empty_like(own) if clock is None else clock.envelope(spec)
        works.append((dist.irecv(coming[other], source, group=group), f"receive of a tied gradient from rank {source}"))
    for work, what in works:
        with failing(lambda what=what: f"rank {mesh.rank}: {what} on axis 'pp'", mesh.timeout_s):
            mesh.guard.wait_transfer(work, mesh.device)
    found = {other: buffer if clock is None else clock.opened(buffer, spec) for other, buffer in coming.items()} | {me: own}
    total = found[ranks[0]].clone()
    for other in ranks[1:]:
        total += found[other]
    return total


def _star_sum(own: torch.Tensor, ranks: list[int], me: int, mesh: Mesh) -> torch.Tensor:
    """The sum over some "pp" coordinates, added by the first of them in order and sent back."""
    axis = mesh.axis("pp")
    up, down = mesh.channels["backward up"], mesh.channels["backward down"]
    first, others = ranks[0], ranks[1:]
    clock = axis.recorder.clock if isinstance(axis.recorder.clock, PacedClock) else None
    spec = spec_of(own)

    def send(tensor: torch.Tensor, to: int) -> None:
        start = axis.recorder.mark()
        sent = tensor if clock is None else clock.seal(tensor, axis.rank, axis.ranks[to])
        with failing(lambda: f"rank {mesh.rank}: send of a tied gradient to rank {axis.ranks[to]} on axis 'pp'", mesh.timeout_s):
            mesh.guard.wait_transfer(dist.isend(sent, axis.ranks[to], group=up if to > me else down), mesh.device)
        axis.recorder.add("send", "tied", tensor.nbytes, start)

    def receive(source: int) -> torch.Tensor:
        buffer = torch.empty_like(own, memory_format=torch.contiguous_format) if clock is None else clock.envelope(spec)
        with failing(lambda: f"rank {mesh.rank}: receive of a tied gradient from rank {axis.ranks[source]} on axis 'pp'", mesh.timeout_s):
            mesh.guard.wait_transfer(dist.irecv(buffer, axis.ranks[source], group=up if me > source else down), mesh.device)
        return buffer if clock is None else clock.opened(buffer, spec)

    if me != first:
        send(own.contiguous(), first)
        return receive(first)
    total = own.contiguous()
    for other in others:
        total = total + receive(other)
    for other in others:
        send(total, other)
    return total
