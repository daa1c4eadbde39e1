"""What data ranks and contexts exchange inside the passes of a block, whatever the options of its operators: statistics of a whole batch, losses that
are no sum of rows, attention over a divided sequence, tokens that travel to experts. Prices of operators do not contain it."""

from __future__ import annotations

from dataclasses import replace

from autoplan.blockprices import data_uses
from autoplan.load import Traffic
from autoplan.localcontext import Exchanges, LocalContext, context_exchanges
from autoplan.price import LocalGraph, axis_group
from autoplan.schemes import Axes, row_axes


def exchanges(local: LocalGraph, indices: tuple[int, ...], given: tuple[str, ...], axes: Axes) -> Exchanges:
    """Those of the operators `indices` for one micro-batch. `given`: values of the preamble."""
    names = ["dp", *(name for name, _ in row_axes(axes) if local.divided is None)]  # else the prices of operators contain it
    uses = [replace(use, axis=name) for name in names if axis_group(axes, name).size > 1 for use in data_uses(local, indices, given)]
    seconds = {"forward": 0.0, "backward": 0.0}
    for use in uses:
        seconds[use.phase] = seconds.get(use.phase, 0.0) + local.pricer.collective(use.kind, use.num_bytes, axis_group(axes, use.axis))
    traffic = tuple(Traffic(use.kind, use.axis, use.phase, use.num_bytes) for use in uses)
    forward_s, backward_s = seconds["forward"], seconds["backward"]
    for context in (context for context in local.contexts if isinstance(context, LocalContext)):
        found = context_exchanges(local, context, indices, given)
        traffic, forward_s, backward_s = (*traffic, *found.traffic), forward_s + found.forward_s, backward_s + found.backward_s
    return Exchanges(traffic, forward_s, backward_s)
