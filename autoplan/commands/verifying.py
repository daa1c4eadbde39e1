"""`autoplan verify`: a shrunk model under a plan's degrees, against one process."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoplan.api import find_plan
from autoplan.commands.console import note, say, working
from autoplan.commands.listing import table
from autoplan.constraints import Constraints
from autoplan.errors import InfeasibleError, UsageError
from autoplan.explain import degrees
from autoplan.launch import run_ranks
from autoplan.modelsource import BatchSizes, Source, load
from autoplan.parallel import parallelize
from autoplan.plan import Plan, recomputed, ways_by_pattern, with_ways
from autoplan.planfile import dumps, loads
from autoplan.planfile import load as load_plan
from autoplan.schemes import row_unit, scheme_of
from autoplan.shrink import shrunk
from autoplan.space import RECOMPUTES
from autoplan.stagemeshes import with_stage_meshes

TOLERANCE = 1e-5  # relative L2 of every tensor, fp32
ZERO_SHARE = 1e-4  # a gradient below this share of the global norm is measured against it
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Differences between the plan and one process."""

    loss: float
    plain_loss: float
    num_tensors: int
    worst_name: str
    worst_error: float
    missing: tuple[str, ...]

    @property
    def passed(self) -> bool:
        loss_error = abs(self.loss - self.plain_loss) / max(abs(self.plain_loss), 1e-30)
        return not self.missing and loss_error <= TOLERANCE and self.worst_error <= TOLERANCE


@dataclass(frozen=True, slots=True)
class Recipe:
    """How every rank builds the shrunk model: a class of a user's own file, or inside a function, cannot be sent to it."""

    model: str
    tp: int
    pp: int
    rows: int

    def of(self, source: Source) -> Source:
        return shrunk(source, tp=self.tp, pp=self.pp, rows=self.rows)


def verify_command(model: str, path: Path | None, ranks: int) -> int:
    if ranks < 1:
        raise UsageError(f"--ranks must be at least 1, found {ranks}")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # both sides on the CPU, in the same arithmetic
    wanted = load_plan(path) if path is not None else None
    if wanted is not None and not wanted.is_exact:
        how = "is asynchronous" if wanted.sync == "async" else "compresses or delays gradients"
        raise UsageError(
            f"{path} {how}: its steps are not those of one process. Verify the plan without that; asynchronous runs are checked by a replay, autoplan.retrace"
        )
    own = wanted.stage_meshes if wanted is not None else ()
    if wanted is not None and own and wanted.num_ranks > ranks:
        raise UsageError(
            f"{path} gives its stages meshes of {wanted.num_ranks} ranks together, which are not reduced: verify it with --ranks {wanted.num_ranks}"
        )
    constraints, used = _constraints(wanted, ranks)
    with working(f"building {model}"):
        source = load(model, BatchSizes())
        rows = 2 * (constraints.dp or ranks) * (constraints.pp or 1) * (row_unit(wanted.axes) if wanted is not None else 1)
        recipe = Recipe(model, constraints.tp or ranks, (constraints.pp or 1) * (constraints.num_chunks or 1), rows)
        small = recipe.of(source)
    with working("planning"):
        plan = _planned(small, used, constraints, must=wanted is not None)
        if wanted is not None and len(_ways(wanted)) > 1:
            plan = _in_turn(plan, _ways(wanted))
    if own:
        plan = with_stage_meshes(plan, own)
        used = plan.num_ranks
    if wanted is not None and wanted.axes != plan.axes:
        note(f"the plan's degrees, {degrees(wanted)}, were reduced to fit {ranks} ranks")
    with working(f"running {used} ranks and one process"):
        outcome = compare(small, plan, used, recipe)
    say(f"{model}, shrunk to {sum(p.numel() for p in small.model.parameters()):,} parameters, under {degrees(plan)}")
    rows_out = [("", "plan", "one process", "relative difference")]
    rows_out.append(("loss", f"{outcome.loss:.7f}", f"{outcome.plain_loss:.7f}", f"{abs(outcome.loss / outcome.plain_loss - 1):.1e}"))
    rows_out.append((f"worst of {outcome.num_tensors} gradients", outcome.worst_name, "", f"{outcome.worst_error:.1e}"))
    say(table(rows_out))
    for name in outcome.missing:
        say(f"no gradient under the plan: {name}")
    say(f"equal to {TOLERANCE:g}: {'yes' if outcome.passed else 'NO'}")
    return 0 if outcome.passed else 1


def _planned(small: Source, ranks: int, constraints: Constraints, *, must: bool) -> Plan:
    """The plan under `constraints`; where they are only a wish and cannot be had, the best plan of all."""
    try:
        return find_plan(small.model, small.batch, f"cpu:1x{ranks}", constraints)
    except InfeasibleError:
        if must:
            raise
        return find_plan(small.model, small.batch, f"cpu:1x{ranks}")


def compare(source: Source, plan: Plan, ranks: int, recipe: Recipe) -> Outcome:
    """Loss and every gradient of one step under `plan` and in this process."""
    state = {name: tensor for name, tensor in source.model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    loss, grads = run_ranks(_step, ranks, recipe, state, source.batch, dumps(plan), timeout_s=_TIMEOUT_S)[0]
    plain_loss, plain = _plain_step(source)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in plain.values()))
    errors = {name: _error(grads[name], g, norm) for name, g in plain.items() if name in grads}
    worst = max(errors, key=lambda name: errors[name], default="")
    missing = tuple(name for name in plain if name not in grads)
    return Outcome(loss, plain_loss, len(plain), worst, errors.get(worst, 0.0), missing)


def _constraints(wanted: Plan | None, ranks: int) -> tuple[Constraints, int]:
    """The plan's degrees, the largest reduced until all fit; the most of each where stages have meshes of their own. Without a plan: degrees
    that use every axis they can."""
    if wanted is None:
        sizes, left = {"tp": 1, "pp": 1, "dp": 1}, ranks
        while left > 1:
            factor = next(f for f in range(2, left + 1) if left % f == 0)
            sizes[min(sizes, key=lambda axis: sizes[axis])] *= factor
            left //= factor
        return Constraints(dp=sizes["dp"], tp=sizes["tp"], pp=sizes["pp"]), ranks
    sizes = {axis: max(wanted.degree(axis), wanted.most(axis)) for axis in ("tp", "pp", "dp", "cp", "ep")}
    while math.prod(sizes.values()) > ranks and not wanted.stage_meshes:
        largest = max(sizes, key=lambda axis: sizes[axis])
        smaller = max(d for d in range(1, sizes[largest]) if sizes[largest] % d == 0)
        sizes[largest] = smaller
    tp, pp, dp, cp, ep = sizes.values()
    found = Constraints(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=ep,
        tensor=scheme_of(wanted.axes) if tp == wanted.most("tp") else None,
        zero=wanted.zero if dp > 1 else None,
        schedule=wanted.schedule if pp > 1 else None,
        num_chunks=wanted.num_chunks if pp == wanted.degree("pp") > 1 else None,
        recompute=_ways(wanted)[-1],
        sync=None if wanted.sync == "allreduce" else wanted.sync,
    )
    return found, math.prod(sizes.values())


def _ways(wanted: Plan) -> tuple[str, ...]:
    """The ways of recomputing of the plan's layers, in the order of RECOMPUTES."""
    found = list(ways_by_pattern(wanted).values())
    ways = {way for own in found for way in own if len(own) > 1 or way != "none"} or {"none"}
    return tuple(way for way in RECOMPUTES if way in ways)


def _in_turn(plan: Plan, ways: tuple[str, ...]) -> Plan:
    """The plan with its recomputed blocks recomputed in these ways, in turn."""
    turn = itertools.cycle(ways)
    return with_ways(plan, [way if way == "none" else next(turn) for way in recomputed(plan)])


def _error(found: torch.Tensor, wanted: torch.Tensor, global_norm: float) -> float:
    scale = max(float(wanted.double().norm()), ZERO_SHARE * global_norm, 1e-30)
    return float((found.double() - wanted.double()).norm()) / scale


def _plain_step(source: Source) -> tuple[float, dict[str, torch.Tensor]]:
    model, batch = source.model, source.batch
    output = model(**batch) if isinstance(batch, dict) else model(*batch)
    loss = output if isinstance(output, torch.Tensor) else output["loss"]
    loss.backward()
    grads = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return float(loss.detach()), grads


def _step(recipe: Recipe, state: dict[str, torch.Tensor], batch: Any, plan: str) -> tuple[float, dict[str, torch.Tensor]]:
    model = recipe.of(load(recipe.model, BatchSizes())).model
    model.load_state_dict(state)
    parallel = parallelize(model, batch, plan=loads(plan))
    loss = parallel.forward_backward(batch)
    return float(loss.detach()), parallel.full_grads()
