"""A ring of ranks: tensors go to the next rank and come from the one before, while this rank computes.

Rank i of p sends to i + 1 and receives from i - 1, modulo p, so after t hops it holds what rank i - t began with. Hops between
two ranks arrive in the order in which they were sent.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from runtime.errors import failing
from runtime.mesh import Axis


@dataclass(eq=False)
class Hop:
    """Tensors on their way. `wait()` gives what came from the rank before, once."""

    axis: Axis
    shapes: tuple[tuple[int, ...], ...]
    incoming: torch.Tensor
    outgoing: torch.Tensor  # kept until it has left
    works: tuple[Any, ...]
    start: Any

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the rank before, of the shapes of those that left here. Recorded as one "send".

        Raises CommunicationError naming rank, axis and bytes, and StageError where another rank fails meanwhile.
        """
        axis = self.axis
        with _hopping(axis, self.outgoing):
            for work in self.works:
                axis.guard.wait_transfer(work, axis.device)
        axis.recorder.add("send", axis.name, self.outgoing.nbytes, self.start)
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        return tuple(part.view(shape) for part, shape in zip(self.incoming.split(sizes), self.shapes, strict=True))


def pass_on(tensors: tuple[torch.Tensor, ...], axis: Axis) -> Hop:
    """Send `tensors` (of one dtype, equal shapes on all ranks) to the next rank; returns at once."""
    assert axis.size > 1 and len({t.dtype for t in tensors}) == 1
    outgoing = torch.cat([t.reshape(-1) for t in tensors])
    incoming = torch.empty_like(outgoing)
    start = axis.recorder.mark()
    to, source = axis.ranks[(axis.index + 1) % axis.size], axis.ranks[axis.index - 1]
    with _hopping(axis, outgoing):
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, outgoing, to, axis.group), dist.P2POp(dist.irecv, incoming, source, axis.group)])
    return Hop(axis, tuple(tuple(t.shape) for t in tensors), incoming, outgoing, tuple(works), start)


def _hopping(axis: Axis, outgoing: torch.Tensor) -> AbstractContextManager[None]:
    what = f"a hop of {outgoing.nbytes} bytes round the ring of axis"
    return failing(lambda: f"rank {axis.rank}: {what} {axis.name!r} (ranks {list(axis.ranks)})", axis.timeout_s)
