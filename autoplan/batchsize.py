"""The minibatch size, chosen while training: the largest whose loss on a held-back slice is not worse.

Every now and then the present size and its neighbours are tried: from the same weights and optimizer state, each trains on the same rows,
and the loss on held-back rows tells how well. With L(s) the loss after `trial_rows` rows in batches of s,

    s is accepted if      L(s) <= (1 + margin) * min of L over the sizes that were tried
    taken is              the largest accepted; sizes above the present one are tried upwards until one is not accepted
    throughput            rows a second that the planner predicts for s: told in the record, and what a larger size is for

After a decision training goes on from the state before the trials, so that the schedule changes nothing but the size.

    schedule = autoplan.batch_size_schedule(pm, optimizer, batches, held_back, sizes=(64, 128, 256, 512))
    for batch in data:                     # of schedule.size rows
        pm.forward_backward(batch); optimizer.step(); optimizer.zero_grad()
        decision = schedule.advance()      # None, or what was tried and taken

Sources: Seide et al. 2014, section 4.2 (automatic minibatch-size selection); CNTK's minibatch search with an error margin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from autoplan.api import Batch, LossFn
from autoplan.errors import UsageError
from autoplan.frontend import loss_of
from autoplan.parallelmodel import ParallelModel
from autoplan.plan import workers_of
from autoplan.schemes import row_unit
from runtime.snapshot import revert, snapshot

Batches = Callable[[int], Iterable[Batch]]


class Trainee(Protocol):
    """What is trained. `state` and `restore` bring weights, optimizer and all else back exactly."""

    def train(self, batch: Any) -> None:
        """One update."""
        ...

    def evaluate(self, batch: Any) -> float:
        """The loss of a batch, without gradients."""
        ...

    def state(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Trial:
    """One size that was tried. `rows_per_s`: the throughput that is predicted for it, 0 where nothing predicts it."""

    size: int
    loss: float
    rows_per_s: float
    is_accepted: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """One search: after how many updates, what was tried, and the size before and after it."""

    step: int
    trials: tuple[Trial, ...]
    before: int
    after: int

    def __str__(self) -> str:
        tried = ", ".join(
            f"{t.size}: loss {t.loss:.6g}{f', {t.rows_per_s:.4g} rows/s' if t.rows_per_s else ''}{'' if t.is_accepted else ' (worse)'}" for t in self.trials
        )
        return f"step {self.step}: batch {self.before} -> {self.after} ({tried})"


@dataclass
class BatchSizeSchedule:
    """The size to train with now, and every decision so far. Made by `batch_size_schedule`."""

    trainee: Trainee
    batches: Batches
    held_back: Any
    sizes: tuple[int, ...]
    size: int
    every: int
    trial_rows: int
    margin: float
    throughput: Callable[[int], float]
    decisions: list[Decision] = field(default_factory=list)
    num_steps: int = 0

    def advance(self) -> Decision | None:
        """Count an update; every `every` of them search the size anew. Every rank calls it."""
        self.num_steps += 1
        return self.search() if self.num_steps % self.every == 0 else None

    def search(self) -> Decision:
        """Try the present size and its neighbours now, and take the best. Weights and optimizer are left as they were."""
        state, at = self.trainee.state(), self.sizes.index(self.size)
        losses: dict[int, float] = {}
        for size in self.sizes[max(0, at - 1) : at + 1]:
            losses[size] = self._loss(size, state)
        for size in self.sizes[at + 1 :]:
            losses[size] = self._loss(size, state)
            if not self._is_accepted(losses[size], losses):
                break
        accepted = [size for size in losses if self._is_accepted(losses[size], losses)]
        taken = max(accepted) if accepted else self.sizes[max(0, at - 1)]  # no loss is finite: smaller is safer
        trials = tuple(Trial(size, loss, self.throughput(size), size in accepted) for size, loss in losses.items())
        decision = Decision(self.num_steps, trials, self.size, taken)
        self.decisions.append(decision)
        self.size = taken
        return decision

    def _loss(self, size: int, state: Any) -> float:
        """The held-back loss after `trial_rows` rows in batches of `size`, from `state`, which is there again afterwards."""
        rows = 0
        for batch in self.batches(size):
            if rows + size > self.trial_rows:
                break
            self.trainee.train(batch)
            rows += size
        if rows == 0:
            raise UsageError(f"batches({size}) gave no batch within trial_rows={self.trial_rows}: give at least {size} rows to try a size on")
        loss = self.trainee.evaluate(self.held_back)
        self.trainee.restore(state)
        return loss

    def _is_accepted(self, loss: float, losses: dict[int, float]) -> bool:
        best = min((value for value in losses.values() if math.isfinite(value)), default=math.inf)
        return math.isfinite(loss) and loss <= best + self.margin * abs(best)


def batch_size_schedule(
    model: ParallelModel | torch.nn.Module | Trainee,
    optimizer: torch.optim.Optimizer | None,
    batches: Batches,
    held_back: Batch,
    *,
    sizes: Sequence[int] | None = None,
    start: int | None = None,
    every: int = 100,
    trial_rows: int | None = None,
    margin: float = 0.01,
    throughput: Callable[[int], float] | None = None,
    loss_fn: LossFn | None = None,
) -> BatchSizeSchedule:
    """A schedule of minibatch sizes for `model`, which is a ParallelModel, a module alone, or any Trainee (then `optimizer` is None).

    `batches(size)` gives batches of `size` rows for a trial, the same rows at every call. `sizes` to choose from, ascending; default: the
    plan's global batch times 1/4 .. 16. `start`: the first size, default the plan's, else the smallest. `every`: updates between searches.
    `trial_rows`: rows that every size is tried on, default 8 batches of the largest size. `margin`: by how much a held-back loss may be
    above the best and still not be worse. `throughput`: rows a second of a size, default what the planner predicts. Raises UsageError for
    sizes that the plan cannot divide, and for asynchronous plans.
    """
    if isinstance(model, ParallelModel):
        assert optimizer is not None
        if model.plan.sync == "async":
            raise UsageError(
                "batch sizes are tried from one state that is brought back, and asynchronous servers keep weights of their own: use sync='allreduce' or 'ps'"
            )
        unit = _unit(model)
        found = tuple(sizes) if sizes is not None else tuple(s for s in _around(model.plan.global_batch) if s % unit == 0)
        wrong = [size for size in found if size % unit]
        if wrong:
            raise UsageError(f"batch sizes {wrong} cannot be divided by this plan: {_plan_unit(model)}; take multiples of {unit}")
        trainee: Trainee = _Parallel(model, optimizer)
        predicted = throughput or (lambda size: predicted_rows_per_s(model, size))
        first = model.plan.global_batch
    else:
        if sizes is None:
            raise UsageError("batch_size_schedule of a model without a plan needs the sizes to choose from: sizes=(32, 64, 128)")
        found, predicted, first = tuple(sizes), throughput or (lambda size: 0.0), min(sizes)
        trainee = model if optimizer is None else _Alone(model, optimizer, loss_fn)  # type: ignore[assignment, arg-type]
    if list(found) != sorted(set(found)) or not found or found[0] < 1:
        raise UsageError(f"sizes={found}: positive numbers in ascending order are needed")
    size = start if start is not None else first if first in found else found[0]
    if size not in found:
        raise UsageError(f"start={size} is none of the sizes {found}")
    if every < 1 or margin < 0:
        raise UsageError(f"every={every} and margin={margin}: at least 1 update, and a margin that is not negative")
    rows = trial_rows if trial_rows is not None else 8 * found[-1]
    if rows < found[-1]:
        raise UsageError(f"trial_rows={rows} is less than the largest size, {found[-1]}: every size is tried on at least one batch")
    return BatchSizeSchedule(trainee, batches, held_back, found, size, every, rows, margin, predicted)


def _around(size: int) -> list[int]:
    return [*(size // d for d in (4, 2) if size % d == 0), *(size * f for f in (1, 2, 4, 8, 16))]


def _unit(model: ParallelModel) -> int:
    """What sizes must be multiples of, so that every data rank fills every micro-batch with as many rows, and every rank that divides these."""
    return len(workers_of(model.plan)) * model.plan.num_micro_batches * _row_parts(model)


def _row_parts(model: ParallelModel) -> int:
    """Ranks that divide the rows of a data rank's micro-batch."""
    return row_unit(model.plan.axes) * model.plan.degree("ep")


def _plan_unit(model: ParallelModel) -> str:
    divided = f", whose rows {parts} ranks divide" if (parts := _row_parts(model)) > 1 else ""
    return f"{model.plan.degree('dp')} data ranks take {model.plan.num_micro_batches} micro-batches each{divided}"


def predicted_rows_per_s(model: ParallelModel, size: int) -> float:
    """Rows a second that the planner predicts for a global batch of `size` rows under the model's plan."""
    return size / model.forecast(size).step_time_s


@dataclass(frozen=True, eq=False)
class _Parallel:
    model: ParallelModel
    optimizer: torch.optim.Optimizer

    def train(self, batch: Any) -> None:
        self.model.forward_backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self, batch: Any) -> float:
        return float(self.model.evaluate(batch))

    def state(self) -> Any:
        return snapshot(self.model.executor), _optimizer_state(self.optimizer)

    def restore(self, state: Any) -> None:
        revert(self.model.executor, state[0])
        _set_optimizer_state(self.optimizer, state[1])


@dataclass(frozen=True, eq=False)
class _Alone:
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: LossFn | None

    def _loss(self, batch: Any) -> torch.Tensor:
        loss = loss_of(self.model(*batch) if isinstance(batch, tuple) else self.model(**batch), batch, self.loss_fn)
        if loss is None:
            raise UsageError(f"{type(self.model).__name__} gives no loss on this batch: give labels in the batch, or loss_fn")
        return loss

    def train(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self._loss(batch).backward()
        self.optimizer.step()

    def evaluate(self, batch: Any) -> float:
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad():
            loss = float(self._loss(batch))
        self.model.train(was_training)
        return loss

    def state(self) -> Any:
        weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return weights, _optimizer_state(self.optimizer), torch.get_rng_state(), on_gpus

    def restore(self, state: Any) -> None:
        weights, optimizer, random, on_gpus = state
        self.model.load_state_dict(weights)
        _set_optimizer_state(self.optimizer, optimizer)
        torch.set_rng_state(random)
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)
        self.optimizer.zero_grad()


_State = list[tuple[int, dict[str, Any]]]


def _optimizer_state(optimizer: torch.optim.Optimizer) -> _State:
    """A copy of the state of each parameter, by its place."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return _copied([(i, optimizer.state[p]) for i, p in enumerate(parameters) if p in optimizer.state])


def _set_optimizer_state(optimizer: torch.optim.Optimizer, state: _State) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.state.clear()
    for i, values in _copied(state):
        optimizer.state[parameters[i]] = values


def _copied(state: _State) -> _State:
    return [(i, {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}) for i, values in state]
