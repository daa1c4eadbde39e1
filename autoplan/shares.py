"""Uneven data shares: how many rows of the batch each data rank takes.

With t_i(r) the seconds of data rank i for r rows, not decreasing in r, and caps c_i from its memory,

    minimise  max over i of t_i(r_i)    where   r_1 + ... + r_p = B,   least <= r_i <= c_i

is solved exactly by giving one row after the other to the rank that would end first with it: if an optimum gave rank i more rows
than the rule does, some rank j would have fewer, and moving a row from i to j does not raise the maximum. Gradients need no weights: every
loss is a sum over rows (divided by a count of the whole batch), so a rank's part is in proportion to its rows by itself.

Source: Ling et al. 2024 (IEEE TPDS 36(2)), uneven data assignment.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from autoplan.errors import InfeasibleError


def best_shares(seconds: Sequence[Callable[[int], float]], num_rows: int, *, least: int = 1, caps: Sequence[int] | None = None) -> tuple[int, ...]:
    """Rows of every rank; `seconds[i](r)` is its time for r rows. Among equal times the first rank takes the row.

    Raises InfeasibleError where the rows cannot be dealt within `least` and `caps`.
    """
    limits = list(caps) if caps is not None else [num_rows] * len(seconds)
    if len(seconds) * least > num_rows:
        raise InfeasibleError(f"{num_rows} rows do not give each of {len(seconds)} data ranks the {least} that its micro-batches need: use a smaller dp")
    if any(limit < least for limit in limits) or sum(limits) < num_rows:
        raise InfeasibleError(f"{num_rows} rows do not fit: the data ranks have memory for {', '.join(map(str, limits))}, at least {least} each")
    rows = [least] * len(seconds)
    heap = [(time(least + 1), i) for i, time in enumerate(seconds) if limits[i] > least]
    heapq.heapify(heap)
    for _ in range(num_rows - len(seconds) * least):
        _, i = heapq.heappop(heap)
        rows[i] += 1
        if rows[i] < limits[i]:
            heapq.heappush(heap, (seconds[i](rows[i] + 1), i))
    return tuple(rows)


def row_shares(num_rows: int, num_parts: int, unit: int = 1) -> tuple[int, ...]:
    """`num_rows` dealt to `num_parts` as evenly as possible in multiples of `unit`, larger shares first."""
    units, rest = divmod(num_rows, unit)
    shares = [(units // num_parts + (part < units % num_parts)) * unit for part in range(num_parts)]
    return (shares[0] + rest, *shares[1:])


def scaled_shares(shares: Sequence[int], num_rows: int) -> tuple[int, ...]:
    """`num_rows` dealt in proportion to `shares`, largest remainders first; every part at least one row where there are enough."""
    total = sum(shares)
    rows = [max(1, share * num_rows // total) for share in shares]
    # the part that is furthest below its due takes a row, the one that is furthest above gives one
    while sum(rows) != num_rows:
        due = [share * num_rows / total - own for share, own in zip(shares, rows, strict=True)]
        if sum(rows) < num_rows:
            rows[max(range(len(rows)), key=lambda i: (due[i], -i))] += 1
        else:
            rows[min((i for i in range(len(rows)) if rows[i] > 1 or num_rows < len(rows)), key=lambda i: (due[i], -i))] -= 1
    return tuple(rows)
