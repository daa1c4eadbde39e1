"""One asynchronous parameter server: its part of the weights, the optimizer over it, and the order of what happened.

A push is applied at once and as a whole, whoever else is computing. A pull for step c waits until every worker has pushed its
steps up to c - 1 - bound: no worker is more than `bound` steps ahead of the slowest. A worker that has finished is waited for no
longer. Any thread may call any method.

Source: Ho et al. 2013 (stale-synchronous parallel), MXNet's dist_async (an update for each push).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import torch

from runtime.errors import CommunicationError
from runtime.order import Exchange

Groups = list[list[torch.nn.Parameter]]  # the served pieces of each group of the optimizer
MakeOptimizer = Callable[[Groups], torch.optim.Optimizer]


class ParameterServer:
    """Serves flat pieces of weights. `groups[i]` are the numbers of the pieces in the optimizer's group i. `silent` are numbers that never push: of
    ranks that serve and compute nothing."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        groups: Sequence[Sequence[int]],
        make: MakeOptimizer,
        num_workers: int,
        bound: int | None,
        silent: Sequence[int] = (),
    ) -> None:
        self.weights = [torch.nn.Parameter(w.detach().clone()) for w in weights]
        self.optimizer = make([[self.weights[i] for i in group] for group in groups])
        self.bound = bound
        self.updates = 0
        self.exchanges: list[Exchange] = []
        self._steps: list[float] = [math.inf if worker in silent else 0 for worker in range(num_workers)]  # that each has pushed
        self._pulled = [0] * num_workers  # updates that its weights had
        self._resting: set[int] = set()  # workers that wait for all others
        self._changed = threading.Condition()

    def push(self, worker: int, step: int, grads: Sequence[torch.Tensor] | None, rates: Sequence[float]) -> None:
        """Apply a worker's gradient; None: the step had none."""
        with self._changed:
            assert self._steps[worker] == step, f"worker {worker} pushes step {step} after {self._steps[worker]} steps"
            staleness = self.updates - self._pulled[worker]
            kind = "skip" if grads is None else "push"
            self.exchanges.append(Exchange(kind, worker, step, self.updates, 0 if grads is None else staleness, 0, tuple(rates)))
            if grads is not None:
                for weight, grad in zip(self.weights, grads, strict=True):
                    weight.grad = grad
                for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate
                self.optimizer.step()
                self.updates += 1
            self._steps[worker] = step + 1
            self._changed.notify_all()

    def pull(self, worker: int, step: int, check: Callable[[], None] = lambda: None, *, waits: bool = True) -> list[torch.Tensor]:
        """The weights for a worker's step, once they are new enough. `check` is called twice a second and may raise.

        Raises CommunicationError where a worker that has to push first rests: neither could go on.
        """
        with self._changed:
            while waits and not self._is_new_enough(step):
                self._check_that_none_rests(worker, step)
                self._changed.wait(0.5)
                check()
            slowest = min(self._steps)
            ahead = 0 if math.isinf(slowest) else max(0, step - int(slowest))
            self.exchanges.append(Exchange("pull", worker, step, self.updates, 0, ahead))
            self._pulled[worker] = self.updates
            return [weight.detach().clone() for weight in self.weights]

    def _is_new_enough(self, step: int) -> bool:
        return self.bound is None or min(self._steps) >= step - self.bound

    def _check_that_none_rests(self, worker: int, step: int) -> None:
        assert self.bound is not None
        late = next((w for w in sorted(self._resting) if self._steps[w] < step - self.bound), None)
        if late is not None:
            raise CommunicationError(
                f"worker {worker} has made {step} steps, worker {late} {self._steps[late]}, which is more than staleness={self.bound} behind, and worker "
                f"{late} waits for all in evaluate, full_state_dict or save: nobody can go on. Let all workers make as many steps before such a call, or "
                "leave out the bound"
            )

    def rest(self, worker: int) -> None:
        """A worker waits for all others in a call of all: it pushes nothing before they have come."""
        with self._changed:
            self._resting.add(worker)
            self._changed.notify_all()

    def wait_for_rest(self, check: Callable[[], None]) -> None:
        """Until every worker that has not finished rests."""
        with self._changed:
            while any(worker not in self._resting and not math.isinf(steps) for worker, steps in enumerate(self._steps)):
                self._changed.wait(0.5)
                check()

    def go_on(self, worker: int) -> None:
        """All have come."""
        with self._changed:
            self._resting.discard(worker)

    def finish(self, worker: int) -> None:
        """A worker makes no more steps."""
        with self._changed:
            self._steps[worker] = math.inf
            self._changed.notify_all()

    def wait_for_all(self, check: Callable[[], None]) -> None:
        """Until every worker has finished."""
        with self._changed:
            while not math.isinf(min(self._steps)):
                self._changed.wait(0.5)
                check()

    def take(self, weights: Sequence[torch.Tensor]) -> None:
        """Take other weights over: a checkpoint was loaded."""
        with self._changed, torch.no_grad():
            for own, given in zip(self.weights, weights, strict=True):
                own.copy_(given)
