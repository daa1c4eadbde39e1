"""Plans and graphs that belong together: the check, and the transfer to other input shapes."""

from __future__ import annotations

from dataclasses import replace

from autoplan.arrange import arranged
from autoplan.errors import StalePlanError, UsageError
from autoplan.graph import Graph
from autoplan.plan import BlockPlan, Plan
from autoplan.plancheck import check_fits, check_whole
from autoplan.space import RECOMPUTES


def check_plan(plan: Plan, graph: Graph, world_size: int) -> None:
    """Raises StalePlanError unless `plan` is whole and was made for this graph and number of ranks."""
    check_whole(plan)
    if plan.model_fingerprint != graph.fingerprint:
        raise StalePlanError(
            f"the plan was made for {plan.model} (fingerprint {plan.model_fingerprint}), this model is {graph.name} ({graph.fingerprint}): "
            "plan again for it, with a batch of this shape."
        )
    ranks = plan.num_ranks
    if ranks != world_size:
        text = " | ".join(" x ".join(f"{axis}={size}" for axis, size in mesh) for mesh in plan.stage_meshes or (plan.axes,))
        raise StalePlanError(f"the plan is for {ranks} ranks ({text}), this job has {world_size}: start {ranks} ranks, or plan again for {world_size}.")
    check_fits(plan, arranged(graph, plan))
    for stage in plan.stages:
        odd = sorted(set(stage.recompute) - set(RECOMPUTES))
        if stage.recompute and (odd or len(stage.recompute) != stage.stop - stage.start):
            found = f"the unknown ways {', '.join(odd)}" if odd else f"{len(stage.recompute)} ways of recomputing for {stage.stop - stage.start} blocks"
            raise StalePlanError(f"the plan's stage {stage.first} ... {stage.last} has {found}: give one of {', '.join(RECOMPUTES)} for every block, or none")


def retarget(plan: Plan, old: Graph, new: Graph) -> Plan:
    """`plan` for the same model captured at other input shapes. Raises UsageError where the operators differ."""
    old, new = arranged(old, plan), arranged(new, plan)
    same = len(old.blocks) == len(new.blocks) and [op.instr.target for op in old.ops] == [op.instr.target for op in new.ops]
    if not same:
        raise UsageError(
            "the model runs other operators for inputs of this shape than for those that it was planned for: plan again with a batch of this shape."
        )
    decided = {block.pattern: block for block in plan.blocks}
    names = {before.name: after.name for before, after in zip(old.ops, new.ops, strict=True)}
    blocks: dict[str, BlockPlan] = {}
    for before, after in zip(old.blocks, new.blocks, strict=True):
        if before.pattern in decided and after.pattern not in blocks:
            found = decided[before.pattern]
            first = next(block for block in old.blocks if block.pattern == before.pattern)
            shift = before.start - first.start
            spelled = {names[old.ops[old.producer[name] + shift].name]: label for name, label in found.splits.items()}
            blocks[after.pattern] = replace(found, pattern=after.pattern, example=after.name, splits=spelled)
    return replace(plan, blocks=tuple(blocks.values()), model_fingerprint=new.fingerprint)
