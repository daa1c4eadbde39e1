"""Replaying an asynchronous run in one process: the recorded order of pushes and pulls, with the same stale gradients.

Every server's exchanges are applied in their order. A worker's gradient of a step is computed once all servers have come to its
push, from the weights that it had pulled from each. The result is the run's, bit for bit: the same operators on the same shapes, and
updates in the same order (on machines whose operators give equal results).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoplan.api import Batch, LossFn
from autoplan.arrange import arranged
from autoplan.errors import UsageError
from autoplan.frontend import capture
from autoplan.lower import lower
from autoplan.plan import Plan
from autoplan.weights import dense_source
from runtime.executor import Executor
from runtime.mesh import build_mesh
from runtime.order import Exchange, Record
from runtime.parameter_server import ParameterServer
from runtime.workers import Part, parts_of


def retrace(
    model: torch.nn.Module,
    plan: Plan,
    record: Record,
    batches: Callable[[int, int], Batch],
    optimizer: type[torch.optim.Optimizer],
    *,
    loss_fn: LossFn | None = None,
    seed: int = 0,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """The weights at the end of the run that `record` tells of, by name.

    `model` has the weights that the run began with; `batches(worker, step)` gives the global batch, or the worker's rows of it, that
    the worker had in its step; `optimizer` with its options is what `pm.optimizer` was given. One `forward_backward` a step, without
    clipping. Raises UsageError for a plan of another number of workers, or a record that waits for itself.
    """
    if plan.sync != "async" or plan.degree("dp") != record.num_workers:
        raise UsageError(f"the record is of {record.num_workers} asynchronous workers, the plan is {plan.sync} with dp={plan.degree('dp')}")
    return _Retrace(model, plan, record, batches, loss_fn, seed).run(optimizer, options)


class _Retrace:
    """One executor that takes every worker's part in turn."""

    def __init__(self, model: torch.nn.Module, plan: Plan, record: Record, batches: Callable[[int, int], Batch], loss_fn: LossFn | None, seed: int) -> None:
        self.record, self.batches = record, batches
        graph = arranged(capture(model, batches(0, 0), loss_fn, check=False), plan)
        workers = range(record.num_workers)
        self.programs = [replace(lower(plan, graph, data_rank=w)[0], sync="allreduce", servers=(), workers=(), staleness=None) for w in workers]
        mesh = build_mesh(self.programs[0].axes)
        self.executor = Executor(self.programs[0], mesh, dense_source(model, graph), seed=seed, random_by_element=True)
        trained = self.executor.with_gradients()
        residents = self.executor.trainable
        self.parts: tuple[Part, ...] = parts_of(residents, record.servers, [i for i, r in enumerate(residents) if r.tensor in trained])
        self.pulled = {(w, s): [self._view(p).clone() for p in part.pieces] for w in range(record.num_workers) for s, part in enumerate(self.parts)}
        self.at = [0] * len(self.parts)
        self.grads: dict[tuple[int, int], list[list[torch.Tensor]]] = {}

    def run(self, cls: type[torch.optim.Optimizer], options: dict[str, Any]) -> dict[str, torch.Tensor]:
        servers = [
            ParameterServer(
                [self._view(p) for p in part.pieces], [range(len(part.pieces))], lambda groups: cls(groups[0], **options), self.record.num_workers, None
            )
            for part in self.parts
        ]
        logs = self.record.exchanges
        while any(at < len(log) for at, log in zip(self.at, logs, strict=True)):
            before = list(self.at)
            for place, (server, log) in enumerate(zip(servers, logs, strict=True)):
                while self.at[place] < len(log) and self._is_ready(log[self.at[place]]):
                    self._apply(server, place, log[self.at[place]])
                    self.at[place] += 1
            if before == self.at:
                raise UsageError("the record waits for itself: it is damaged, or of another run")
        for part, server in zip(self.parts, servers, strict=True):
            self._write(part, [w.detach() for w in server.weights])
        return self.executor.full_state_dict()

    def _is_ready(self, exchange: Exchange) -> bool:
        """Whether a worker has all the weights for the gradient that it pushes: every server has come to that push."""
        known = exchange.kind != "push" or (exchange.worker, exchange.step) in self.grads
        return known or all(self._next(place, exchange.worker) == exchange.step for place in range(len(self.parts)))

    def _next(self, place: int, worker: int) -> int:
        """The step of a worker's next push to a server; -1 where it pulls before."""
        log = self.record.exchanges[place]
        following = next((e for e in log[self.at[place] :] if e.worker == worker), None)
        return -1 if following is None or following.kind == "pull" else following.step

    def _apply(self, server: ParameterServer, place: int, exchange: Exchange) -> None:
        key = (exchange.worker, exchange.step)
        if exchange.kind == "pull":
            self.pulled[exchange.worker, place] = server.pull(exchange.worker, exchange.step, waits=False)
        elif exchange.kind == "skip":
            server.push(exchange.worker, exchange.step, None, exchange.rates)
        else:
            if key not in self.grads:
                self.grads = {known: grads for known, grads in self.grads.items() if known[0] != exchange.worker}
                self.grads[key] = self._gradient(exchange.worker, exchange.step)
            server.push(exchange.worker, exchange.step, self.grads[key][place], exchange.rates)

    def _gradient(self, worker: int, step: int) -> list[list[torch.Tensor]]:
        """By server."""
        executor = self.executor
        if executor.program is not self.programs[worker]:
            executor.rebind(self.programs[worker])
        for place, part in enumerate(self.parts):
            self._write(part, self.pulled[worker, place])
        executor.zero_grad()
        executor.num_steps = step
        executor.step(self.batches(worker, step))
        return [[self._grad(p) for p in part.pieces] for part in self.parts]

    def _view(self, piece: Any) -> torch.Tensor:
        return self.executor.trainable[piece.tensor].local().detach().view(-1)[piece.start : piece.stop]

    def _grad(self, piece: Any) -> torch.Tensor:
        grad = self.executor.trainable[piece.tensor].tensor.grad
        assert grad is not None
        return grad.detach().reshape(-1)[piece.start : piece.stop].clone()

    def _write(self, part: Part, weights: Sequence[torch.Tensor]) -> None:
        for piece, weight in zip(part.pieces, weights, strict=True):
            self._view(piece).copy_(weight)
