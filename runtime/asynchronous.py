"""An asynchronous run as the executor of one rank sees it: every worker steps by itself, servers keep the weights (runtime/workers.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from runtime.mesh import Mesh, alone
from runtime.order import Record
from runtime.parameter_server import MakeOptimizer
from runtime.reduction import all_reduce_bucket
from runtime.verdict import guarded
from runtime.workers import Worker


class AsynchronousRun:
    """`own` are the ranks that step together: this one. `reshard` drops what is computed from weights that change."""

    def __init__(self, worker: Worker, mesh: Mesh, reshard: Callable[[], None]) -> None:
        self.worker, self.mesh, self.own = worker, mesh, alone(mesh)
        self._reshard = reshard

    def start(self, groups: Sequence[Sequence[torch.Tensor]], make: MakeOptimizer) -> None:
        """Begin to serve and to work. All ranks call it; returns when all serve."""
        with guarded(self.mesh):
            self.worker.start(groups, make)
            self._meet()

    def exchange(self, rates: Sequence[float]) -> None:
        """Push this worker's gradients with the learning rates of the optimizer's groups, and pull weights. Raises as a step."""
        with guarded(self.mesh):
            self.worker.exchange(rates)
        self._reshard()

    def finish(self) -> Record:
        """End the run: wait until every worker has ended, take the last weights; what happened, on every rank."""
        with guarded(self.mesh):
            if not self.worker.has_finished:
                self.worker.finish()
            self._reshard()
            return self.worker.record()

    def settle(self) -> None:
        """Give all workers the servers' weights, once every worker is here."""
        if not self.worker.has_started or self.worker.has_finished:
            return
        with guarded(self.mesh):
            self.worker.rest()
            self._meet()
            self.worker.refresh()
            self._meet()
            self._reshard()

    def take(self) -> None:
        """Give the servers the weights that were loaded."""
        if self.worker.has_started:
            with guarded(self.mesh):
                self._meet()
                self.worker.take()
                self._meet()

    def _meet(self) -> None:
        with self.mesh.recorder.action("wait", "reduce"):
            all_reduce_bucket([torch.zeros(1, device=self.mesh.device)], self.mesh.world)
