"""Whether a plan is whole: what an edited or damaged file may hold, found before anything is captured, lowered or run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from autoplan.constraints import CHOICES
from autoplan.errors import StalePlanError
from autoplan.graph import Graph
from autoplan.plan import Plan
from autoplan.precision import COMPUTE
from autoplan.space import RECOMPUTES

_AXES = ("pp", "dp", "cp", "ep", "tp", "tpd", "tpx", "tpy", "tpz")
_STAGES_ON_A_RANK = {"gpipe": 1, "1f1b": 1, "zb": 1, "zbv": 2}


def check_whole(plan: Plan) -> None:
    """Raise StalePlanError, naming the entry, where a plan contradicts itself."""
    _refuse(_in_itself(plan))


def check_fits(plan: Plan, graph: Graph) -> None:
    """Raise StalePlanError where the stages and blocks of a plan are not those of `graph`, in the order of the plan's stages."""
    _refuse(_against(plan, graph))


def _refuse(found: Iterator[str]) -> None:
    fault = next(found, None)
    if fault is not None:
        raise StalePlanError(f"the plan is damaged or edited: {fault}; plan again")


def _in_itself(plan: Plan) -> Iterator[str]:
    for mesh in (plan.axes, *plan.stage_meshes):
        names = [name for name, _ in mesh]
        if odd := [name for name in names if name not in _AXES] or [name for name in names if names.count(name) > 1]:
            yield f"axes has {odd[0]!r}, an axis is one of {', '.join(_AXES)}, each once"
        if wrong := next(((name, size) for name, size in mesh if size < 1), None):
            yield f"axes gives {wrong[0]!r} {wrong[1]} ranks, an axis has at least 1"
    for name in ("global_batch", "micro_batch_size", "num_micro_batches", "num_chunks"):
        if getattr(plan, name) < 1:
            yield f"{name} is {getattr(plan, name)}, at least 1 is needed"
    for name, choices in (*CHOICES.items(), ("precision", tuple(COMPUTE))):
        value = getattr(plan, name, None)
        if value is not None and value not in choices:
            yield f"{name} is {value!r}, it is one of {', '.join(map(str, choices))}"
    replicas = plan.degree("dp")
    if plan.zero_group is not None and (plan.zero_group < 1 or replicas % plan.zero_group):
        yield f"zero_group is {plan.zero_group}, which does not divide the {replicas} data ranks"
    if plan.shares and (len(plan.shares) != replicas or sum(plan.shares) != plan.global_batch or min(plan.shares) < 1):
        yield f"shares {plan.shares} do not deal {plan.global_batch} rows to {replicas} data ranks"
    for name in ("servers", "workers"):
        ranks = getattr(plan, name)
        if ranks and (len({*ranks}) < len(ranks) or not {*ranks} <= {*range(replicas)} or plan.sync == "allreduce"):
            yield f"{name} {ranks} are not some of {replicas} data ranks, under sync ps or async (here {plan.sync})"
    yield from _stages(plan)
    for block in plan.blocks:
        if block.recompute not in RECOMPUTES:
            yield f"recompute of block {block.example!r} is {block.recompute!r}, it is one of {', '.join(RECOMPUTES)}"
    patterns = [block.pattern for block in plan.blocks]
    if twice := next((block.example for block in plan.blocks if patterns.count(block.pattern) > 1), None):
        yield f"the pattern of block {twice!r} is there twice"


def _stages(plan: Plan) -> Iterator[str]:
    stages, ranks = plan.stages, dict(plan.axes).get("pp")
    if ranks is None or not stages:
        yield "it has no stages" if ranks is not None else "axes lacks 'pp'"
        return
    spans = ", ".join(f"[{stage.start}, {stage.stop})" for stage in stages)
    if stages[0].start != 0 or any(stage.start >= stage.stop for stage in stages) or any(a.stop != b.start for a, b in pairwise(stages)):
        yield f"stages hold blocks {spans}: each begins where the one before ends, the first at 0, and none is empty"
    held = [stage.rank for stage in stages]
    if {*held} != {*range(ranks)}:
        yield f"stages are on pipeline ranks {', '.join(map(str, held))}, every one of 0 to {ranks - 1} needs one"
    many = _STAGES_ON_A_RANK.get(plan.schedule, len(stages) // ranks)
    if not plan.placement and any(held.count(rank) != many for rank in range(ranks)):
        yield f"{len(stages)} stages on {ranks} pipeline ranks: schedule {plan.schedule} has {many} on each"
    order = [*range(ranks), *reversed(range(ranks))] if plan.schedule == "zbv" else [stage % ranks for stage in range(len(stages))]
    if not plan.placement and held != order:
        yield f"stages are on pipeline ranks {', '.join(map(str, held))}, schedule {plan.schedule} has them on {', '.join(map(str, order))}"


def _against(plan: Plan, graph: Graph) -> Iterator[str]:
    if graph.batch_size is not None and plan.global_batch != graph.batch_size:
        yield f"global_batch is {plan.global_batch}, the model was captured with {graph.batch_size} rows"
    if plan.stages[-1].stop != len(graph.blocks):
        yield f"stages hold {plan.stages[-1].stop} blocks, the model has {len(graph.blocks)}"
    first = {block.pattern: block for block in reversed(graph.blocks)}
    decided = {block.pattern: block for block in plan.blocks}
    if missing := next((block.name for block in graph.blocks if block.pattern not in decided), None):
        yield f"no entry of blocks is for {missing!r}"
    for pattern, decision in decided.items():
        if pattern not in first:
            yield f"block {decision.example!r} has the pattern {pattern!r}, which the model lacks"
        block = first[pattern]
        names = {op.name for op in graph.ops[block.start : block.stop]}
        if unknown := next((name for name in decision.splits if name not in names), None):
            yield f"block {decision.example!r} splits {unknown!r}, which is none of its operators"
