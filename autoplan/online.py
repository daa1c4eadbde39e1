"""Plans that follow their devices: speeds are watched, and where they have changed the plan is, in the same job.

After every step the ranks exchange how long their own operators took (one number each). Where speeds have drifted (autoplan/drift.py) rank 0 plans again for
the speeds that were seen: the running mesh with other shares and cuts, and everything that the constraints leave. A new plan has to be faster than
the running one at the new speeds by `least_gain`, and of these and staying the one that minimises V * T + Q * cost is taken
(autoplan/budget.py). Then weights, buffers and optimizer state move in place (ParallelModel.move_to).

Source: Ling et al. 2024 (IEEE TPDS 36(2)), per-slot problems by tentative search.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from autoplan.agreement import from_first_rank
from autoplan.api import load_cluster
from autoplan.budget import Budget, Choice
from autoplan.clusterprices import prices_of
from autoplan.constraints import Constraints
from autoplan.drift import Drift, grouped
from autoplan.errors import InfeasibleError, UsageError
from autoplan.lower import lower
from autoplan.moving import rests_alike
from autoplan.parallelmodel import ParallelModel
from autoplan.plan import Plan
from autoplan.planfile import dumps, loads
from autoplan.price import precision_left
from autoplan.replicas import kinds, operator_seconds, replicas
from autoplan.search import search
from autoplan.simulate import forecast
from costmodel.cluster import Cluster
from costmodel.detect import detect
from costmodel.prices import Prices
from costmodel.scaled import ScaledPrices
from runtime.collective import everyone
from runtime.record import Recorder

Cost = Callable[[Plan, int], float]  # (plan of the slot, bytes that it moved) -> cost of the slot
_ALIKE = 0.1  # speeds that differ by less are one when plans are looked for


@dataclass(frozen=True, slots=True)
class Change:
    """A change of plan. `speeds` of the devices against what their prices say; seconds are forecasts at these speeds."""

    step: int
    plan: Plan
    speeds: tuple[float, ...]
    before_s: float
    after_s: float
    moved_bytes: int


class OnlinePlanner:
    """Re-plans a running model when its devices change speed. Every rank makes one and calls `after_step()` after every step:

        planner = autoplan.OnlinePlanner(pm, opt, cluster="lab.yaml")
        for batch in batches:
            loss = pm.forward_backward(batch)
            opt.step(); opt.zero_grad()
            planner.after_step()

    `cluster` and `prices`: as for find_plan (default: this job's devices, analytic). `constraints` bind every new plan. `budget`: the mean cost of a
    step that is allowed in the long run (None: no limit), in the unit of `cost(plan, moved_bytes)`, by default the bytes moved; `worth` is V, how
    much a second of step time weighs against it. `least_gain`: the part of the step time that a change has to save. `window`, `tolerance`: see
    autoplan/drift.py. `optimizer` has to be elementwise.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        cluster: str | Cluster | None = None,
        prices: Prices | None = None,
        constraints: Constraints | None = None,
        budget: float | None = None,
        worth: float = 1.0,
        cost: Cost | None = None,
        least_gain: float = 0.05,
        window: int = 7,
        tolerance: float = 0.2,
    ) -> None:
        if model.plan.stage_meshes:
            raise UsageError("a plan whose stages have meshes of their own is not replaced while it runs: no search finds its like. Use a plan of one mesh.")
        self.budget = Budget(budget, worth)
        self.changes: list[Change] = []
        self._model, self._optimizer = model, optimizer
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._cluster = load_cluster(cluster) if cluster is not None else detect(self._world)
        if self._cluster.num_devices != self._world:
            raise InfeasibleError(
                f"the cluster {self._cluster.name} has {self._cluster.num_devices} devices, this job {self._world} ranks: describe this job's devices"
            )
        self._prices: Prices = prices or prices_of(self._cluster)
        self._constraints = constraints or Constraints()
        self._cost: Cost = cost or (lambda plan, moved_bytes: float(moved_bytes))
        self._least_gain = least_gain
        self._drift = Drift((1.0,) * self._world, window, tolerance)
        self._expected: tuple[Plan, tuple[float, ...]] | None = None
        self._found: tuple[tuple[float, ...], tuple[str, ...]] = ((), ())  # speeds -> plans, of the last search

    @property
    def speeds(self) -> tuple[float, ...]:
        """Of every rank, against its prices: the median of the last steps; those that the plan was made for until there are enough."""
        return self._drift.speeds if self._drift.seen else self._drift.planned

    def after_step(self) -> Change | None:
        """Look at the step that has ended; change the plan where that pays. Gradients have to be cleared. Every rank calls it."""
        model = self._model
        busy = everyone(model.executor.mesh.world, own_seconds(model.executor.mesh.recorder))
        expected = self._expected_s(model.plan)
        if min(busy) > 0.0 and min(expected) > 0.0:
            self._drift = self._drift.after([e / b for e, b in zip(expected, busy, strict=True)])
        change = self._decide() if self._drift.has_drifted else None
        self.budget = self.budget.after(self._cost(model.plan, change.moved_bytes if change is not None else 0))
        return change

    def _expected_s(self, plan: Plan) -> tuple[float, ...]:
        """Of every rank, the seconds that its own operators should take by the prices."""
        if self._expected is None or self._expected[0] is not plan:
            graph = self._model.graph
            programs = lower(plan, graph)
            classes = replicas(programs[0], kinds(self._prices, self._world))
            at = operator_seconds(programs, classes, graph, self._prices, precision_left(graph, plan.precision))
            axes = self._model.executor.mesh.axes
            own = at[axes["pp"].index if "pp" in axes else 0, axes["dp"].index if "dp" in axes else 0]
            self._expected = (plan, tuple(everyone(self._model.executor.mesh.world, own)))
        return self._expected[1]

    def _decide(self) -> Change | None:
        speeds, model = grouped(self._drift.speeds, _ALIKE), self._model
        text, before_s, after_s, is_worth_it = from_first_rank(lambda: self._best(speeds))
        # what was refused for its cost is asked for again; what cannot be improved is what speeds are judged against from now on
        self._drift = self._drift.settled(speeds if text or not is_worth_it else self._drift.planned)
        if not text:
            return None
        plan = loads(text)
        moved = model.move_to(plan, self._optimizer)
        self.changes.append(Change(self.budget.num_slots, plan, speeds, before_s, after_s, moved))
        return self.changes[-1]

    def _best(self, speeds: tuple[float, ...]) -> tuple[str, float, float, bool]:
        """On rank 0: (the plan to go on with, "" to stay; seconds of a step before and after; whether some plan is worth its time)."""
        now, graph = self._model.plan, self._model.graph
        prices = ScaledPrices(self._prices, speeds)
        now_s = forecast(lower(now, graph), now, graph, prices, overlap=self._cluster.overlaps).step_time_s
        plans = [plan for plan in self._plans(speeds, prices) if plan.forecast.step_time_s <= now_s * (1 - self._least_gain)]
        choices = [Choice(now_s, self._cost(now, 0)), *(Choice(p.forecast.step_time_s, self._cost(p, self._bytes_to_move(now, p))) for p in plans)]
        chosen = self.budget.choose(choices)
        return (dumps(plans[chosen - 1]) if chosen else "", now_s, choices[chosen].step_time_s, bool(plans))

    def _plans(self, speeds: tuple[float, ...], prices: Prices) -> tuple[Plan, ...]:
        """Plans for these speeds: on the running mesh, and on every one that the constraints leave."""
        known, texts = self._found
        if known and max(abs(math.log(a / b)) for a, b in zip(known, speeds, strict=True)) < math.log1p(_ALIKE):
            return tuple(loads(text) for text in texts)
        now, found = self._model.plan, []
        more = {axis: now.degree(axis) for axis in ("cp", "ep") if now.degree(axis) > 1}
        same = replace(self._constraints, dp=now.degree("dp"), tp=now.degree("tp"), pp=now.degree("pp"), zero=now.zero, **more)
        for constraints in (same,) if same == self._constraints else (same, self._constraints):
            try:
                plan = search(self._model.graph, self._cluster, prices, constraints, optimizer=now.optimizer, precision=now.precision)
            except InfeasibleError:
                continue
            found.append(replace(plan, forecast=replace(plan.forecast, events=())))
        self._found = (speeds, tuple(dumps(plan) for plan in found))
        return tuple(found)

    def _bytes_to_move(self, now: Plan, plan: Plan) -> int:
        """Bytes of the dense tensors that `move_to` would send."""
        graph = self._model.graph
        if rests_alike(lower(now, graph), lower(plan, graph)):
            return 0
        parameters, buffers = (
            sum(math.prod(v.spec.shape) * getattr(torch, graph.at_rest(v.name)).itemsize for v in graph.values.values() if v.kind == kind)
            for kind in ("parameter", "buffer")
        )
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        copies = max((sum(1 for value in state.values() if isinstance(value, torch.Tensor) and value.dim()) for state in states), default=0)
        return parameters * (1 + copies) + buffers


def own_seconds(recorder: Recorder) -> float:
    """Seconds that this rank's own operators took in the last step: its passes without the collectives inside."""
    passes = sum(r.end_s - r.start_s for r in recorder.ran if r.kind in ("F", "B", "BI", "BW"))
    inside = sum(s.end_s - s.start_s for s in recorder.sent if s.axis != "pp" and s.phase in ("forward", "backward"))
    return max(0.0, passes - inside)
