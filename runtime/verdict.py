"""What the ranks agree on about a step: its loss, whether it counts, and the first error of the job where it fails."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from runtime.collective import Begun
from runtime.errors import BatchError, CommunicationError, StageError
from runtime.mesh import Mesh
from runtime.program import StageCode

_LOSS_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Telling:
    """What the ranks tell each other of a step, from where every rank has made it; it runs beside what follows.

    `own_loss`: this rank's sum over its micro-batches, where one of its `stages` makes the loss and it has any; the data rank `first_worker` has.
    `suspicious`: a scalar, not zero where this rank's gradients may not be finite; None where it is not known yet.
    """

    def __init__(self, stages: Sequence[StageCode], mesh: Mesh, own_loss: torch.Tensor | None, suspicious: torch.Tensor | None, first_worker: int) -> None:
        self._found = found = _own(stages, mesh, own_loss, {"dp": first_worker})
        if suspicious is not None:
            found[2] = suspicious
        all_reduce = lambda: dist.all_reduce(found, async_op=True)  # noqa: E731
        self._begun = Begun(mesh.world, "all_reduce", found.nbytes, all_reduce, is_hidden=suspicious is None) if mesh.world_size > 1 else None

    def result(self, suspicious: torch.Tensor | None = None) -> tuple[torch.Tensor, bool]:
        """(loss of the global batch with its dtype, whether any rank, or `suspicious` here, told of gradients that may not be finite)."""
        if self._begun is not None:
            self._begun.wait()
        here = torch.zeros_like(self._found[2]) if suspicious is None else suspicious
        loss, dtype, elsewhere, own = torch.cat([self._found, here.reshape(1)]).tolist()
        return torch.tensor(loss, dtype=torch.float64, device=self._found.device).to(_LOSS_DTYPES[int(dtype)]), elsewhere > 0 or own > 0


def _own(stages: Sequence[StageCode], mesh: Mesh, own_loss: torch.Tensor | None, firsts: Mapping[str, int]) -> torch.Tensor:
    """[the loss, the number of its dtype, 0] of this rank, zeros where others tell them: float64, to be summed over all ranks."""
    found = torch.zeros(3, dtype=torch.float64, device=mesh.device)
    for stage in stages:
        if stage.loss is None or own_loss is None:
            continue
        others = [axis for name, axis in mesh.axes.items() if name != "pp" and name not in stage.loss_partial]
        if all(axis.index == firsts.get(axis.name, 0) for axis in others):
            found[0] = own_loss.double()
        if all(axis.index == firsts.get(name, 0) for name, axis in mesh.axes.items() if name != "pp"):
            found[1] = _LOSS_DTYPES.index(own_loss.dtype)
    return found


def warn_of_skipped(step: int, loss: torch.Tensor, faults: tuple[str, ...]) -> None:
    """Say that a step was skipped, at the line that called the executor's `step`. `faults`: parameters whose gradient is not finite."""
    more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
    what = f", gradients that are not finite: {', '.join(faults[:5])}{more}" if faults else ""
    warnings.warn(f"step {step} was skipped on all ranks: loss {loss.item():g}{what}", RuntimeWarning, stacklevel=5)


@contextmanager
def guarded(mesh: Mesh) -> Iterator[None]:
    """Whatever fails inside is told to all ranks, and the first error of the job is what all raise."""
    try:
        yield
    except StageError:
        raise
    except Exception as error:
        guard, at = mesh.guard, mesh.recorder
        is_told = not isinstance(error, CommunicationError) or isinstance(error.__cause__, CommunicationError)
        first, gone = (None, None) if is_told else guard.cause()
        if first is not None:  # a broken connection is seen before the error of the rank that broke it, or after it: all the same
            raise StageError(first) from error
        text = f"rank {mesh.rank}, {at.place}: {type(error).__name__}: {error}"
        first = guard.report(text if gone is None else f"{gone}. Seen by {text}")
        if isinstance(error, BatchError) and str(error) in first:
            raise
        if isinstance(error, CommunicationError):
            raise CommunicationError(first) from error
        raise StageError(first) from error
