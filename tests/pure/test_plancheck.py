"""A plan that contradicts itself or its model is refused before anything is lowered, and the entry is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from autoplan.errors import StalePlanError
from autoplan.frontend import capture
from autoplan.models import MLP
from autoplan.plan import Plan
from autoplan.retarget import check_plan
from tests.plans import manual_plan

torch.set_num_threads(1)
GRAPH = capture(MLP((8, 16, 16, 16, 4)), {"x": torch.randn(8, 8), "labels": torch.arange(8) % 4})
PLAN = manual_plan(GRAPH, pp=2, dp=2, num_micro_batches=2)
FIRST, LAST = PLAN.stages
BLOCK = PLAN.blocks[0]


def stages(*changed: object) -> Callable[[], Plan]:
    return lambda: replace(PLAN, stages=changed)  # type: ignore[arg-type]


EDITED: dict[str, tuple[Callable[[], Plan], str]] = {
    "bounds descend": (stages(replace(FIRST, start=2, stop=1), LAST), r"\[2, 1\)"),
    "a gap": (stages(replace(FIRST, stop=FIRST.stop - 1), LAST) if FIRST.stop > 1 else stages(FIRST, replace(LAST, start=LAST.start + 1)), "begins where"),
    "an overlap": (stages(replace(FIRST, stop=FIRST.stop + 1), LAST), "begins where"),
    "too few blocks": (stages(FIRST, replace(LAST, stop=LAST.stop - 1)), "the model has"),
    "too many blocks": (stages(FIRST, replace(LAST, stop=99)), "stages hold 99 blocks"),
    "a lost stage": (stages(replace(FIRST, stop=LAST.stop)), "pipeline ranks 0, every one of 0 to 1"),
    "two stages on a rank": (stages(FIRST, replace(LAST, rank=0)), "pipeline ranks 0, 0"),
    "a rank beyond": (stages(FIRST, replace(LAST, rank=7)), "pipeline ranks 0, 7"),
    "ranks swapped": (stages(replace(FIRST, rank=1), replace(LAST, rank=0)), "pipeline ranks 1, 0"),
    "no pipeline axis": (lambda: replace(PLAN, axes=(("dp", 2), ("tp", 2))), "lacks 'pp'"),
    "an unknown axis": (lambda: replace(PLAN, axes=(("pp", 2), ("xp", 2))), "'xp'"),
    "an empty axis": (lambda: replace(PLAN, axes=(("pp", 2), ("dp", 0))), "gives 'dp' 0 ranks"),
    "no micro-batch": (lambda: replace(PLAN, num_micro_batches=0), "num_micro_batches is 0"),
    "other rows": (lambda: replace(PLAN, global_batch=16), "captured with 8 rows"),
    "a ZeRO stage": (lambda: replace(PLAN, zero=5), "zero is 5"),
    "a schedule": (lambda: replace(PLAN, schedule="2f2b"), "schedule is '2f2b'"),
    "a schedule of two chunks": (lambda: replace(PLAN, schedule="zbv"), "zbv has 2 on each"),
    "a precision": (lambda: replace(PLAN, precision="int4"), "precision is 'int4'"),
    "shares": (lambda: replace(PLAN, shares=(3, 4)), "do not deal 8 rows to 2"),
    "servers": (lambda: replace(PLAN, sync="ps", servers=(7,)), r"servers \(7,\)"),
    "states of three": (lambda: replace(PLAN, zero=1, zero_group=3), "zero_group is 3"),
    "a way of recomputing": (lambda: replace(PLAN, blocks=(replace(BLOCK, recompute="some"), *PLAN.blocks[1:])), "'some'"),
    "an unknown operator": (lambda: replace(PLAN, blocks=(replace(BLOCK, splits={"nonsuch": "i"}), *PLAN.blocks[1:])), "splits 'nonsuch'"),
    "an unknown block": (lambda: replace(PLAN, blocks=(*PLAN.blocks, replace(BLOCK, pattern="zzz"))), "pattern 'zzz'"),
    "a lost block": (lambda: replace(PLAN, blocks=PLAN.blocks[1:]), "no entry of blocks"),
    "a block twice": (lambda: replace(PLAN, blocks=(BLOCK, *PLAN.blocks)), "there twice"),
}


def test_the_plan_itself_is_whole() -> None:
    check_plan(PLAN, GRAPH, 4)


@pytest.mark.parametrize("name", EDITED)
def test_an_edited_plan_is_refused_and_the_entry_named(name: str) -> None:
    edited, said = EDITED[name]
    with pytest.raises(StalePlanError, match=said):
        check_plan(edited(), GRAPH, 4)
