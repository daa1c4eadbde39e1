"""Synchronous parameter servers on the data axis: push gradients, update on the server, pull weights.

    push   every worker sends each server the gradients of what it serves; the server adds them in order of the workers' ranks
    pull   every server sends the workers the weights that its optimizer has updated

A server is one of the data ranks, and its part of the weights is its own replica's: what a rank pushes to itself is counted
but not sent. A data rank that is no worker only serves: it pushes nothing and pulls nothing in a step, and its replica is true in what it serves
alone, until `refresh`. Between push and update the gradient at rest on a rank is the sum on what it serves and zero elsewhere, so norms,
scaling, clipping and accumulation need no exchange. Tensor and pipeline coordinates have servers of their own.

Every tensor is dealt by runtime/partition.py. Source: Li et al. 2014; MXNet's dist_sync.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from runtime.collective import raw_all_reduce
from runtime.errors import failing
from runtime.mesh import Mesh
from runtime.partition import Bucket, Piece, Tensor, buckets, givers, partition
from runtime.storage import Resident


def served_tensors(residents: Iterable[Resident]) -> tuple[Tensor, ...]:
    """What is dealt to the servers: the local tensors of trainable parameters, in order."""
    return tuple(Tensor(r.local().numel(), r.stored.at_rest, r.local().element_size(), "dp" in r.stored.partial) for r in residents)


@dataclass(frozen=True, eq=False)
class _Transfer:
    """One message to or from a data rank."""

    buffer: torch.Tensor
    peer: int  # data rank
    is_send: bool
    what: str


class Servers:
    """The servers of one tensor and pipeline coordinate, as one of its data ranks sees them. `servers` and `workers` are data ranks."""

    def __init__(self, residents: Sequence[Resident], servers: tuple[int, ...], workers: tuple[int, ...], mesh: Mesh) -> None:
        self.residents = tuple(residents)
        self.servers, self.workers = servers, workers
        self.mesh = mesh
        self.axis = mesh.axis("dp")
        self.tensors = served_tensors(residents)
        self.pieces = partition(self.tensors, servers)

    def own_pieces(self, tensor: torch.Tensor) -> tuple[Piece, ...]:
        """What this rank serves of a parameter; nothing of one that is not trained."""
        number = next((i for i, r in enumerate(self.residents) if r.tensor is tensor), None)
        return tuple(p for p in self.pieces if p.tensor == number and p.server == self.axis.index)

    def view(self, piece: Piece) -> torch.Tensor:
        """The elements of a piece in this rank's replica, a flat view."""
        return self.residents[piece.tensor].local().detach().view(-1)[piece.start : piece.stop]

    def grad(self, piece: Piece) -> torch.Tensor | None:
        """The elements of a piece in the gradient at rest, a flat view."""
        grad = self.residents[piece.tensor].tensor.grad
        return None if grad is None else grad.detach().view(-1)[piece.start : piece.stop]

    def push(self) -> None:
        """Sum the gradients on their servers, in place; elsewhere they become zero. All data ranks call it."""
        with torch.no_grad():
            for resident in self.residents:
                grad = resident.tensor.grad
                if grad is not None and not grad.is_contiguous():
                    resident.tensor.grad = grad.contiguous()
            present = [piece for piece in self.pieces if self.residents[piece.tensor].tensor.grad is not None]
            for turn in _turns(buckets(self.tensors, present, self.servers)):
                self._push(turn)
            for piece in present:
                if piece.server != self.axis.index:
                    grad = self.grad(piece)
                    assert grad is not None
                    grad.zero_()

    def _push(self, turn: Sequence[Bucket]) -> None:
        axis, start = self.axis, self.mesh.recorder.mark()
        transfers: list[_Transfer] = []
        given: dict[int, torch.Tensor] = {}  # gradients of the bucket that this rank serves, by worker
        for bucket in turn:
            peers = givers(bucket, self.workers)
            grads = [self.grad(piece) for piece in bucket.pieces]
            flat = torch.cat([grad for grad in grads if grad is not None])
            if bucket.server != axis.index:
                if axis.index in peers:
                    transfers.append(_Transfer(flat, bucket.server, True, f"push of {flat.nbytes} bytes to the server on"))
                continue
            for worker in peers:
                given[worker] = flat
                if worker != axis.index:
                    given[worker] = torch.empty_like(flat)
                    transfers.append(_Transfer(given[worker], worker, False, f"push of {flat.nbytes} bytes from {self._role(worker)} on"))
        self._exchange(transfers)
        for bucket in turn:
            peers = givers(bucket, self.workers)
            if axis.index in peers:
                axis.recorder.add("push", axis.name, bucket.num_bytes, start)
            if bucket.server == axis.index and peers:
                axis.recorder.add("push_in", axis.name, bucket.num_bytes * len(peers), start)
                total = given[peers[0]].clone()
                for worker in peers[1:]:
                    total += given[worker]
                for piece, part in zip(bucket.pieces, total.split([p.num_elements for p in bucket.pieces]), strict=True):
                    grad = self.grad(piece)
                    assert grad is not None
                    grad.copy_(part)

    def pull(self, updated: Iterable[torch.Tensor]) -> None:
        """Bring the weights of these parameters from their servers into every worker's replica. All data ranks call it with the same ones."""
        wanted = {id(tensor) for tensor in updated}
        present = [piece for piece in self.pieces if id(self.residents[piece.tensor].tensor) in wanted]
        with torch.no_grad(), self.mesh.recorder.action("pull", "update"):
            for turn in _turns(buckets(self.tensors, present, self.servers)):
                start = self.mesh.recorder.mark()
                self._pull(turn, self.workers)
                for bucket in turn:
                    if self.axis.index in self.workers:
                        self.axis.recorder.add("pull", self.axis.name, bucket.num_bytes, start)
                    if bucket.server == self.axis.index:
                        self.axis.recorder.add("pull_out", self.axis.name, bucket.num_bytes * len(self.workers), start)

    def refresh(self) -> None:
        """Bring all weights into the replicas of the ranks that only serve. All data ranks call it, between steps."""
        others = tuple(rank for rank in range(self.axis.size) if rank not in self.workers)
        if others:
            with torch.no_grad():
                for turn in _turns(buckets(self.tensors, self.pieces, self.servers)):
                    self._pull(turn, others)

    def _pull(self, turn: Sequence[Bucket], takers: tuple[int, ...]) -> None:
        axis = self.axis
        transfers: list[_Transfer] = []
        coming: list[tuple[Bucket, torch.Tensor]] = []
        for bucket in turn:
            views = [self.view(piece) for piece in bucket.pieces]
            if bucket.server == axis.index:
                flat = torch.cat(views)
                for taker in takers:
                    if taker != axis.index:
                        transfers.append(_Transfer(flat, taker, True, f"pull of {flat.nbytes} bytes by {self._role(taker)} on"))
                continue
            if axis.index not in takers:
                continue
            flat = views[0].new_empty(sum(view.numel() for view in views))
            coming.append((bucket, flat))
            transfers.append(_Transfer(flat, bucket.server, False, f"pull of {flat.nbytes} bytes from the server on"))
        self._exchange(transfers)
        for bucket, flat in coming:
            for piece, part in zip(bucket.pieces, flat.split([p.num_elements for p in bucket.pieces]), strict=True):
                self.view(piece).copy_(part)

    def _role(self, data_rank: int) -> str:
        return "the server" if data_rank in self.servers else "the worker"

    def _exchange(self, transfers: Sequence[_Transfer]) -> None:
        """Run messages to their ends. Raises CommunicationError naming the peer, StageError where another rank fails."""
        if not transfers:
            return
        axis, now = self.axis, transfers[0]
        with failing(lambda: f"rank {axis.rank}: {now.what} rank {axis.ranks[now.peer]}", axis.timeout_s):
            operations = [dist.P2POp(dist.isend if t.is_send else dist.irecv, t.buffer, axis.ranks[t.peer], axis.group) for t in transfers]
            works: list[Any] = dist.batch_isend_irecv(operations)
            for place, work in enumerate(works):
                now = transfers[min(place, len(transfers) - 1)]
                axis.guard.wait_transfer(work, axis.device)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of which every rank has what it serves and zeros elsewhere, whole on all data ranks, which all call it."""
        return raw_all_reduce(tensor, self.axis)


def _turns(by_server: Sequence[Sequence[Bucket]]) -> Iterable[tuple[Bucket, ...]]:
    """The first bucket of every server, the second of every server, ..."""
    for turn in range(max(map(len, by_server), default=0)):
        yield tuple(own[turn] for own in by_server if turn < len(own))
