"""Who serves what: the tensors of a rank dealt to parameter servers, as pure data.

A tensor of at least SPLIT_BYTES is cut evenly over all servers (MXNet's kvstore: MXNET_KVSTORE_BIGARRAY_BOUND); a smaller one
goes whole to the server that has least so far, largest first. Elements are those of the flattened local tensor. Messages are
buckets of pieces of one kind, so that their number does not grow with the number of tensors.

Per step, W bytes of gradients, w workers, s servers: a worker pushes W and pulls W; a server takes in and gives out w W / s.
Source: Li et al. 2014 (parameter server); MXNet kvstore.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from runtime.program import Program
from runtime.reduction import BUCKET_BYTES, bucket_sizes

SPLIT_BYTES = 2**13


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor to be served. `summed`: its gradients are partial sums over the workers; else each has the complete one,
    and the server takes its own."""

    num_elements: int
    dtype: str
    width: int  # bytes an element
    summed: bool = True


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of tensor number `tensor`, kept by the data rank `server`."""

    tensor: int
    start: int
    stop: int
    server: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Bucket:
    """Pieces that travel together."""

    server: int
    dtype: str
    summed: bool
    pieces: tuple[Piece, ...]
    num_bytes: int


def servers_of(program: Program) -> tuple[int, ...]:
    """The data ranks that serve; () where gradients are all-reduced."""
    return (program.servers or tuple(range(dict(program.axes).get("dp", 1)))) if program.sync != "allreduce" else ()


def workers_of(program: Program) -> tuple[int, ...]:
    """The data ranks that compute."""
    return program.workers or tuple(range(dict(program.axes).get("dp", 1)))


def givers(bucket: Bucket, workers: Sequence[int]) -> tuple[int, ...]:
    """The workers whose gradients a server adds up: all, or of complete ones its own, or the first one's where it does not compute."""
    if bucket.summed:
        return tuple(workers)
    return () if bucket.server in workers else (workers[0],)


def partition(tensors: Sequence[Tensor], servers: Sequence[int], split_bytes: int = SPLIT_BYTES) -> tuple[Piece, ...]:
    """Every element of every tensor in exactly one piece, by tensor and start. No piece is larger than a bucket."""
    held = dict.fromkeys(servers, 0)
    whole: list[int] = []
    found: list[Piece] = []
    for number, tensor in enumerate(tensors):
        if tensor.num_elements * tensor.width < split_bytes or len(held) == 1:
            whole.append(number)
            continue
        for start, stop, server in _even(tensor.num_elements, servers):
            found.append(Piece(number, start, stop, server))
            held[server] += (stop - start) * tensor.width
    for number in sorted(whole, key=lambda n: (-tensors[n].num_elements * tensors[n].width, n)):
        server = min(servers, key=lambda s: held[s])
        found.append(Piece(number, 0, tensors[number].num_elements, server))
        held[server] += tensors[number].num_elements * tensors[number].width
    return tuple(sorted((small for piece in found for small in _cut(piece, tensors[piece.tensor].width)), key=lambda p: (p.tensor, p.start)))


def _even(num_elements: int, servers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    each, more = divmod(num_elements, len(servers))
    start = 0
    for place, server in enumerate(servers):
        stop = start + each + (place < more)
        if stop > start:
            yield start, stop, server
        start = stop


def _cut(piece: Piece, width: int) -> Iterator[Piece]:
    most = BUCKET_BYTES // width
    for start in range(piece.start, piece.stop, most):
        yield Piece(piece.tensor, start, min(piece.stop, start + most), piece.server)
    if piece.num_elements == 0:
        yield piece


def buckets(tensors: Sequence[Tensor], pieces: Sequence[Piece], servers: Sequence[int]) -> tuple[tuple[Bucket, ...], ...]:
    """The buckets of each server, in order of `servers`: pieces of one dtype and kind, at most BUCKET_BYTES together."""
    found = []
    for server in servers:
        kinds: dict[tuple[str, bool], list[Piece]] = {}
        for piece in pieces:
            if piece.server == server:
                kinds.setdefault((tensors[piece.tensor].dtype, tensors[piece.tensor].summed), []).append(piece)
        own = []
        for (dtype, summed), members in kinds.items():
            rest = iter(members)
            for sizes in bucket_sizes([p.num_elements * tensors[p.tensor].width for p in members]):
                own.append(Bucket(server, dtype, summed, tuple(next(rest) for _ in sizes), sum(sizes)))
        found.append(tuple(own))
    return tuple(found)


def moves_of(program: Program, tensors: Sequence[Tensor], with_grads: frozenset[int], data_rank: int) -> Iterator[tuple[str, str, str, int]]:
    """Pushes and pulls of a data rank in a step, and what it takes in and gives out if it serves: (kind, axis, phase, bytes).

    What an asynchronous server does belongs to no step of its own worker.
    """
    servers, workers = servers_of(program), workers_of(program)
    pieces = tuple(piece for piece in partition(tensors, servers) if piece.tensor in with_grads)
    for own in buckets(tensors, pieces, servers):
        for bucket in own:
            if program.sync == "async":
                yield "push", "dp", "reduce", bucket.num_bytes
                yield "pull", "dp", "update", bucket.num_bytes
                continue
            for role, served, phase, peers in (("push", "push_in", "reduce", givers(bucket, workers)), ("pull", "pull_out", "update", workers)):
                if data_rank in peers:
                    yield role, "dp", phase, bucket.num_bytes
                if bucket.server == data_rank and peers:
                    yield served, "dp", phase, bucket.num_bytes * len(peers)
