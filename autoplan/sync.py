"""Who sums gradients over the data axis: what of it the constraints may say together, and what follows for the search."""

from __future__ import annotations

from autoplan.constraints import Constraints
from autoplan.errors import InfeasibleError


def is_served(constraints: Constraints) -> bool:
    """Whether parameter servers take the place of all_reduce."""
    return constraints.sync in ("ps", "async")


def servers_among(constraints: Constraints, dp: int) -> tuple[int, ...]:
    """Data ranks that serve; () without servers."""
    return (constraints.servers or tuple(range(dp))) if is_served(constraints) else ()


def check_sync(constraints: Constraints) -> None:
    """Raises InfeasibleError, with the reason and a fix, for values that exclude each other."""
    sync, fixed = constraints.sync, constraints
    for name in ("servers", "workers"):
        if (given := getattr(fixed, name)) is not None and not is_served(fixed):
            raise InfeasibleError(f"{name}={given} without parameter servers (sync={sync!r}): say sync='ps' or 'async', or leave {name} out")
    if fixed.staleness is not None and sync != "async":
        raise InfeasibleError(f"staleness={fixed.staleness} with sync={sync!r}: gradients are stale under sync='async' alone. Say so, or leave staleness out")
    if not is_served(fixed):
        return
    if fixed.zero or fixed.zero_group is not None:
        raise InfeasibleError(f"zero={fixed.zero} with sync={sync!r}: servers keep the optimizer's state, workers whole weights. Use zero=0, or leave it out")
    if fixed.delay or fixed.compression is not None:
        what = f"delay={fixed.delay}" if fixed.delay else f"compression={fixed.compression!r}"
        raise InfeasibleError(f"{what} with sync={sync!r} cannot be had: it changes an all_reduce. Use sync='allreduce', or leave it out")
    if fixed.servers is not None and fixed.dp is not None and max(fixed.servers) >= fixed.dp:
        raise InfeasibleError(f"servers={fixed.servers} with dp={fixed.dp}: servers are data ranks, 0 to {fixed.dp - 1}")
    if sync == "async":
        for axis in ("tp", "pp", "cp", "ep"):
            if (getattr(fixed, axis) or 1) > 1:
                raise InfeasibleError(
                    f"{axis}={getattr(fixed, axis)} with sync='async': copies of a parameter on that axis would be updated in different orders. "
                    f"Use {axis}=1, or sync='ps'"
                )
        for name in ("stage_layers", "placement"):
            if getattr(fixed, name) is not None:
                raise InfeasibleError(f"{name} with sync='async': a worker is one rank. Leave it out, or use sync='ps'")


def allows_mesh(constraints: Constraints, pp: int, dp: int, tp: int) -> bool:
    """Whether a mesh can have the servers that are asked for."""
    if not is_served(constraints):
        return True
    return (constraints.servers is None or max(constraints.servers) < dp) and (constraints.sync == "ps" or pp == tp == 1)
