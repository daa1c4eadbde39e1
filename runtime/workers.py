"""An asynchronous worker: pushes its gradients to parameter servers, pulls weights, and answers for what its own rank serves.

Every serving rank has a thread for each other worker, which waits for that worker's requests on a gloo group of its own: a header
(request, step, learning rates), then the gradients of what the server keeps, one message a dtype. The answer is the weights, once
the bound of staleness allows it. Servers keep their part in the CPU's memory.

    push     apply the gradients; answer with weights for the next step       refresh   answer with the weights as they are
    skip     the step had no gradient; as a push without one                  finish    answer once every worker has finished
    rest     the worker waits for all others; no answer. Who waits for its next push under the bound is given an error

Waiting for an answer ends with an error of any rank, and where a worker makes no request for IDLE_S seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from runtime.collective import everyone
from runtime.errors import CommunicationError, StageError, failing
from runtime.mesh import Mesh
from runtime.order import Record
from runtime.parameter_server import MakeOptimizer, ParameterServer
from runtime.partition import Piece, partition
from runtime.servers import served_tensors
from runtime.storage import Resident

IDLE_S = 3600.0  # a worker that asks for nothing so long is taken to hang
_RUN_S = 365 * 24 * 3600.0  # no run is longer: a rank that only serves asks for nothing until its end
_REQUESTS, _ANSWERS = 1, 2  # tags
_PUSH, _SKIP, _REFRESH, _FINISH, _REST = range(5)


@dataclass(frozen=True, eq=False)
class Part:
    """What one server keeps, in the order of messages: pieces of equal dtype together."""

    server: int  # data rank
    pieces: tuple[Piece, ...]
    dtypes: tuple[tuple[torch.dtype, int], ...]  # and how many pieces have it

    def packed(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One CPU tensor a dtype from the pieces' own."""
        found, at = [], 0
        for _, count in self.dtypes:
            found.append(torch.cat([flat.detach().reshape(-1).cpu() for flat in flats[at : at + count]]))
            at += count
        return found

    def buffers(self) -> list[torch.Tensor]:
        found, at = [], 0
        for dtype, count in self.dtypes:
            found.append(torch.empty(sum(p.num_elements for p in self.pieces[at : at + count]), dtype=dtype))
            at += count
        return found

    def unpacked(self, messages: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found, at = [], 0
        for message, (_, count) in zip(messages, self.dtypes, strict=True):
            found += message.split([p.num_elements for p in self.pieces[at : at + count]])
            at += count
        return found


@dataclass(frozen=True, eq=False)
class _Patient:
    """A wait that may take longer than its group's time-out, for `Guard.wait_transfer`."""

    work: Any
    most_s: float

    def wait(self) -> None:
        self.work.wait(timedelta(seconds=self.most_s))


class Worker:
    """This rank as a worker among `mesh`'s data ranks, some of which serve. All of them construct one, those that are not among `workers` too: they
    make no steps, and take part in what all do together."""

    def __init__(self, residents: Sequence[Resident], servers: tuple[int, ...], workers: tuple[int, ...], bound: int | None, mesh: Mesh) -> None:
        self.residents, self.servers, self.workers, self.bound, self.mesh = tuple(residents), servers, workers, bound, mesh
        self.axis = mesh.axis("dp")
        self.steps = 0
        self.has_finished = False
        self.server: ParameterServer | None = None
        self._parts: tuple[Part, ...] = ()
        self._threads: list[threading.Thread] = []
        timeout = timedelta(seconds=mesh.timeout_s)
        self._group: Any = dist.new_group(list(self.axis.ranks), backend="gloo", timeout=timeout) if self.axis.size > 1 else None

    @property
    def has_started(self) -> bool:
        return bool(self._parts)

    @property
    def works(self) -> bool:
        """Whether this rank makes steps."""
        return self.axis.index in self.workers

    @property
    def own(self) -> tuple[tuple[Piece, torch.nn.Parameter], ...]:
        """What this rank serves, with the server's own weights."""
        part = next((part for part in self._parts if part.server == self.axis.index), None)
        return () if part is None or self.server is None else tuple(zip(part.pieces, self.server.weights, strict=True))

    def start(self, groups: Sequence[Sequence[torch.Tensor]], make: MakeOptimizer) -> None:
        """Begin to serve and to work: `groups` are the parameters of each group of the optimizer that `make` makes on a server."""
        group_of = {id(tensor): number for number, group in enumerate(groups) for tensor in group}
        number_of = {i: group_of[id(r.tensor)] for i, r in enumerate(self.residents) if id(r.tensor) in group_of}
        self._parts = parts_of(self.residents, self.servers, number_of)
        self._num_rates = len(groups)
        own = next((part for part in self._parts if part.server == self.axis.index), None)
        if own is None:
            return
        silent = [rank for rank in range(self.axis.size) if rank not in self.workers]
        members = [[i for i, piece in enumerate(own.pieces) if number_of[piece.tensor] == group] for group in range(len(groups))]
        self.server = ParameterServer([self._weight(p).cpu() for p in own.pieces], members, make, self.axis.size, self.bound, silent)
        for worker in range(self.axis.size):
            if worker != self.axis.index:
                thread = threading.Thread(target=self._serve, args=(own, worker), name=f"server-of-{worker}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _weight(self, piece: Piece) -> torch.Tensor:
        return self.residents[piece.tensor].local().detach().view(-1)[piece.start : piece.stop]

    def _grad(self, piece: Piece) -> torch.Tensor:
        grad = self.residents[piece.tensor].tensor.grad
        assert grad is not None, self.residents[piece.tensor].stored.fqn
        return grad.detach().reshape(-1)[piece.start : piece.stop]

    # -- the worker ---------------------------------------------------------------------------------------------------------

    def exchange(self, rates: Sequence[float]) -> None:
        """Push this step's gradients (if it left any) and pull the weights for the next one."""
        has_grads = any(self.residents[p.tensor].tensor.grad is not None for part in self._parts for p in part.pieces)
        self.steps += 1
        self._ask(_PUSH if has_grads else _SKIP, rates)

    def rest(self) -> None:
        """Tell the servers that this worker waits for all others, until `refresh`."""
        header = torch.tensor([_REST, self.steps] + [0.0] * self._num_rates, dtype=torch.float64)
        for part in self._parts:
            if part.server == self.axis.index:
                assert self.server is not None
                self.server.rest(self.axis.index)
            else:
                with self._failing(part.server, "message to"):
                    self._wait(dist.isend(header, self.axis.ranks[part.server], self._group, _REQUESTS), part.server, "message to")
        if not self.works and self.server is not None:
            with self.axis.guard.waiting():
                self.server.wait_for_rest(self._look())

    def refresh(self) -> None:
        """Pull the weights as they are."""
        self._ask(_REFRESH, [0.0] * self._num_rates)

    def finish(self) -> None:
        """Make no more steps; returns with the last weights once every worker has finished."""
        self.has_finished = True
        self._ask(_FINISH, [0.0] * self._num_rates)
        for thread in self._threads:
            thread.join(self.mesh.timeout_s)

    def take(self) -> None:
        """Let this rank's server go on from the weights of its replica."""
        if self.server is not None:
            self.server.take([self._weight(piece).cpu() for piece, _ in self.own])

    def record(self) -> Record:
        """What happened, from all servers. All ranks call it, after `finish`."""
        own = None if self.server is None else (tuple(self.server.exchanges), self.server.updates)
        told = everyone(replace(self.axis, group=self._group), own)
        found = [told[server] for server in self.servers]
        return Record(self.axis.size, self.servers, self.bound, tuple(log for log, _ in found), tuple(updates for _, updates in found))

    def _ask(self, request: int, rates: Sequence[float]) -> None:
        """One request to every server, and its answer into this rank's replica."""
        step = self.steps - 1 if request in (_PUSH, _SKIP) else self.steps
        recorder, axis = self.mesh.recorder, self.axis
        with torch.no_grad():
            with recorder.action("push", "reduce"):
                start, sent = recorder.mark(), []
                for part in self._parts:
                    grads = part.packed([self._grad(p) for p in part.pieces]) if request == _PUSH else []
                    if part.server == axis.index:
                        assert self.server is not None
                        _apply(self.server, axis.index, request, step, part.unpacked(grads) if grads else None, rates)
                    else:
                        header = torch.tensor([request, step, *rates], dtype=torch.float64)
                        with self._failing(part.server, "push to"):
                            sent += [(t, dist.isend(t, axis.ranks[part.server], self._group, _REQUESTS), part.server) for t in (header, *grads)]
                    for grad in grads:
                        recorder.add("push", axis.name, grad.nbytes, start)
                for _, work, server in sent:
                    self._wait(work, server, "push to")
            with recorder.action("pull", "update"):
                start, coming = recorder.mark(), []
                for part in self._parts:
                    if part.server != axis.index:
                        messages = part.buffers()
                        with self._failing(part.server, "pull from"):
                            works = [dist.irecv(t, axis.ranks[part.server], self._group, _ANSWERS) for t in messages]
                        coming.append((part, messages, works))
                for part in self._parts:
                    if part.server == axis.index:
                        assert self.server is not None
                        with axis.guard.waiting():
                            messages = part.packed(_answer(self.server, axis.index, request, step, self._look()))
                        self._write(part, messages, start)
                for part, messages, works in coming:
                    for work in works:
                        self._wait(_Patient(work, 2 * IDLE_S if self.works else _RUN_S), part.server, "pull from")
                    self._write(part, messages, start)

    def _look(self) -> Callable[[], None]:
        """What to do twice a second while this rank's own server lets it wait."""
        guard = self.axis.guard
        if guard.store is None:
            return lambda: None
        watch = guard.watch()
        return lambda: guard.look(watch)

    def _write(self, part: Part, messages: Sequence[torch.Tensor], start: Any) -> None:
        for message in messages:
            self.mesh.recorder.add("pull", self.axis.name, message.nbytes, start)
        for piece, weight in zip(part.pieces, part.unpacked(messages), strict=True):
            self._weight(piece).copy_(weight)

    def _wait(self, work: Any, server: int, what: str) -> None:
        with self._failing(server, what):
            self.axis.guard.wait_transfer(work, torch.device("cpu"))

    def _failing(self, server: int, what: str) -> AbstractContextManager[None]:
        return failing(lambda: f"rank {self.axis.rank}, step {self.steps}: {what} the server on rank {self.axis.ranks[server]}")

    # -- the server's threads -----------------------------------------------------------------------------------------------

    def _serve(self, part: Part, worker: int) -> None:
        """Answer one worker until it has finished."""
        server, peer = self.server, self.axis.ranks[worker]
        assert server is not None
        try:
            while True:
                header = torch.empty(2 + self._num_rates, dtype=torch.float64)
                _received(dist.irecv(header, peer, self._group, _REQUESTS), IDLE_S if worker in self.workers else _RUN_S)
                request, step, rates = int(header[0]), int(header[1]), header[2:].tolist()
                if request == _REST:
                    server.rest(worker)
                    continue
                grads = part.buffers() if request == _PUSH else []
                for message in grads:
                    _received(dist.irecv(message, peer, self._group, _REQUESTS), self.mesh.timeout_s)
                _apply(server, worker, request, step, part.unpacked(grads) if grads else None, rates)
                answer = part.packed(_answer(server, worker, request, step, self.axis.guard.check))
                for work in [dist.isend(message, peer, self._group, _ANSWERS) for message in answer]:
                    _received(work, self.mesh.timeout_s)
                if request == _FINISH:
                    return
        except StageError:
            return  # told by the rank that failed; whoever waits for this server looks for it too
        except CommunicationError as error:
            self.axis.guard.report(f"the server on rank {self.axis.rank}: {error}")
        except Exception as error:
            self.axis.guard.report(f"the server on rank {self.axis.rank} lost the worker on rank {peer} before pm.finish(): {type(error).__name__}: {error}")


def _received(work: Any, timeout_s: float) -> None:
    work.wait(timedelta(seconds=timeout_s))


def _apply(server: ParameterServer, worker: int, request: int, step: int, grads: list[torch.Tensor] | None, rates: Sequence[float]) -> None:
    if request in (_PUSH, _SKIP):
        server.push(worker, step, grads, rates)
    elif request == _REFRESH:
        server.go_on(worker)
    elif request == _FINISH:
        server.finish(worker)


def _answer(server: ParameterServer, worker: int, request: int, step: int, check: Callable[[], None]) -> Sequence[torch.Tensor]:
    """The weights that a request is answered with, waited for."""
    if request == _FINISH:
        server.wait_for_all(check)
    following = step + 1 if request in (_PUSH, _SKIP) else step
    return server.pull(worker, following, check, waits=request in (_PUSH, _SKIP))


def parts_of(residents: Sequence[Resident], servers: Sequence[int], chosen: Iterable[int]) -> tuple[Part, ...]:
    """What each server keeps of the chosen tensors."""
    wanted, found = frozenset(chosen), []
    dtype_of = [r.local().dtype for r in residents]
    pieces = partition(served_tensors(residents), servers)
    for server in servers:
        own = [p for p in pieces if p.server == server and p.tensor in wanted]
        dtypes = list(dict.fromkeys(dtype_of[p.tensor] for p in own))
        ordered = tuple(p for dtype in dtypes for p in own if dtype_of[p.tensor] == dtype)
        found.append(Part(server, ordered, tuple((dtype, sum(dtype_of[p.tensor] == dtype for p in own)) for dtype in dtypes)))
    return tuple(found)
