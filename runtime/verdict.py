"""What the ranks agree on about a step: its loss, whether it counts, and the first error of the job where it fails."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from runtime.errors import BatchError, CommunicationError, StageError
from runtime.mesh import Mesh
from runtime.program import StageCode
from runtime.reduction import all_reduce_bucket

_LOSS_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def told(stages: Sequence[StageCode], mesh: Mesh, own_loss: torch.Tensor | None, suspicious: torch.Tensor, first_worker: int = 0) -> tuple[torch.Tensor, bool]:
    """(loss of the global batch with its dtype, whether `suspicious` was not zero on some rank): the same on every rank.

    `own_loss`: this rank's sum over its micro-batches, where one of its `stages` makes the loss and it has any; the data rank `first_worker` has.
    """
    firsts = {"dp": first_worker}
    found = torch.zeros(3, dtype=torch.float64, device=mesh.device)
    found[2] = suspicious
    for stage in stages:
        if stage.loss is None or own_loss is None:
            continue
        others = [axis for name, axis in mesh.axes.items() if name != "pp" and name not in stage.loss_partial]
        if all(axis.index == firsts.get(axis.name, 0) for axis in others):
            found[0] = own_loss.double()
        if all(axis.index == firsts.get(name, 0) for name, axis in mesh.axes.items() if name != "pp"):
            found[1] = _LOSS_DTYPES.index(own_loss.dtype)
    (total,) = all_reduce_bucket([found], mesh.world)
    loss, dtype, suspects = total.tolist()
    return torch.tensor(loss, dtype=torch.float64, device=mesh.device).to(_LOSS_DTYPES[int(dtype)]), suspects > 0


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
        if first is None:
            text = f"rank {mesh.rank}, {at.place}: {type(error).__name__}: {error}"
            first = guard.report(text if gone is None else f"{gone}. Seen by {text}")
        if isinstance(error, BatchError) and str(error) in first:
            raise
        if isinstance(error, CommunicationError):
            raise CommunicationError(first) from error
        raise StageError(first) from error
