"""Values between stages in transit: whole from every tensor rank, or in pieces that are gathered where they arrive.

Where the p ranks of the tensor axis hold a value of n bytes alike, each may send 1/p of it to its peer, and the receiving ranks gather; its
gradient comes back the same way and is gathered by the stage that made the value. Seconds of one direction:

    whole        send(n)
    in pieces    send(n / p) + all_gather(n, p)

A stage gathers what it receives if that is faster for all values that it receives together. The ranks that gather are busy meanwhile, while
sends run beside compute, hidden where a stage has slack: so the search replays a step both so and with all values whole, and takes the faster.

Pieces are consecutive entries of the first dimension that divides by p; a value with none is sent whole. Values without gradient (masks, tables
of positions) are few and travel once: they are sent whole too.

Source: Narayanan et al. 2021 (SC21), section 4.1, the scatter/gather optimization.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoplan.load import Send
from autoplan.price import Pricer, axis_group
from autoplan.replay import Step, send_s

AXIS = "tp"  # whose ranks may hold a value alike


def pieces_dim(shape: tuple[int, ...], num_ranks: int) -> int | None:
    """The dimension of a local tensor that is cut in transit; None where no dimension divides."""
    return next((dim for dim, size in enumerate(shape) if size and size % num_ranks == 0), None) if num_ranks > 1 else None


def gather_s(pricer: Pricer, step: Step, num_bytes: int) -> float:
    """Seconds to gather a value of `num_bytes` on the ranks of the tensor axis."""
    return pricer.collective("all_gather", num_bytes, axis_group(step.axes, AXIS, pricer.device))


def is_gathered(pricer: Pricer, step: Step, entering: Iterable[tuple[int, Send]]) -> bool:
    """Whether a stage gathers what it receives. `entering`: (stage that sends, what), as it would travel in pieces."""
    whole_s = in_pieces_s = 0.0
    for src, send in entering:
        if send.gathered_bytes:
            whole_s += send_s(pricer, step, src, send.dst, send.gathered_bytes)
            in_pieces_s += send_s(pricer, step, src, send.dst, send.num_bytes) + gather_s(pricer, step, send.gathered_bytes)
    return in_pieces_s < whole_s
