"""Rows dealt to the data ranks as the plan's shares say or as evenly as possible, then to micro-batches."""

from __future__ import annotations

import math

from autoplan.errors import UsageError
from autoplan.plan import Plan, workers_of
from autoplan.schemes import row_unit
from autoplan.shares import row_shares, scaled_shares
from runtime.program import MicroBatch


def data_shares(plan: Plan, global_rows: int) -> tuple[int, ...]:
    """Rows of a global batch that every data rank takes: the plan's shares, in proportion where the batch is another one; else equal ones, in
    multiples of what the tensor axes that divide rows ask for. None for ranks that serve and do not compute."""
    if plan.workers:
        rows = dict(zip(plan.workers, row_shares(global_rows, len(plan.workers), row_unit(plan.axes)), strict=True))
        return tuple(rows.get(rank, 0) for rank in range(plan.degree("dp")))
    if not plan.shares:
        return row_shares(global_rows, plan.degree("dp"), row_unit(plan.axes))
    return plan.shares if global_rows == plan.global_batch else scaled_shares(plan.shares, global_rows)


def deal_rows(plan: Plan, global_rows: int) -> tuple[tuple[MicroBatch, ...], ...]:
    """Rows of every micro-batch of every data rank, in multiples of what the tensor axes that divide rows ask for.

    Raises UsageError where a data rank that computes would get no row.
    """
    dp, unit = len(workers_of(plan)), row_unit(plan.axes)
    if global_rows % unit:
        raise UsageError(f"a batch of {global_rows} rows is no multiple of {unit}, by which the tensor axes divide rows: use one that is, or another plan.")
    shares = data_shares(plan, global_rows)
    if any(share % unit for share in shares):
        raise UsageError(f"the plan's shares {shares} are no multiples of {unit}, by which the tensor axes divide rows: plan again.")
    least = min(shares[rank] for rank in workers_of(plan))
    if least == 0:
        raise UsageError(f"a batch of {global_rows} rows does not reach {dp} data ranks: give at least {dp * unit} rows, or plan with a smaller dp.")
    count = plan.num_micro_batches
    if count > 1 and global_rows != plan.global_batch:
        each = plan.most("dp") if plan.stage_meshes else unit  # a stage's data ranks share a micro-batch
        count = max(1, min(math.ceil(max(shares) / plan.micro_batch_size), least // each))
    if count * unit > least:
        raise UsageError(
            f"a batch of {global_rows} rows gives a data rank {least} rows, which do not fill {count} micro-batches: give at least {count * dp * unit} rows."
        )
    dealt, start = [], 0
    for share in shares:
        pieces = []
        for rows in row_shares(share, count, unit) if share else ():
            pieces.append(MicroBatch(start, start + rows))
            start += rows
        dealt.append(tuple(pieces))
    return tuple(dealt)
