"""What all ranks of a job have to agree on: rank 0 captures and plans for everyone, everyone starts from its weights, and all
run the same program in every call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autoplan.errors import AutoplanError, RunError, UsageError
from autoplan.faults import told
from runtime.guard import SLICE_S
from runtime.mesh import Mesh

T = TypeVar("T")
_REFUSED = "refused: "


def from_first_rank(make: Callable[[], T]) -> T:
    """`make()` as rank 0 makes it, on every rank of the job. What it raises there is raised on every rank."""
    if not dist.is_initialized():
        return make()
    shared: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            shared[0] = make()
        except AutoplanError as error:
            shared[1] = error
        except Exception as error:
            shared[1] = AutoplanError(f"rank 0 failed: {type(error).__name__}: {error}")
            dist.broadcast_object_list([None, shared[1]], src=0)
            raise
    dist.broadcast_object_list(shared, src=0)
    if shared[1] is not None:
        raise shared[1]
    return shared[0]


def share_weights(model: torch.nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0, where they differ.

    Raises UsageError where the ranks' models differ in names, shapes or dtypes.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    own = [(name, tuple(t.shape), str(t.dtype), _checksum(t)) for name, t in tensors.items()]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    first = everyone[0]
    for rank, other in enumerate(everyone):
        if [row[:3] for row in other] != [row[:3] for row in first]:
            wrong = next((a[:3] for a, b in zip(other, first, strict=False) if a[:3] != b[:3]), f"{len(other)} tensors instead of {len(first)}")
            raise UsageError(f"rank {rank} has another model than rank 0 ({wrong}): build the same model on every rank.")
    for number, (name, *_) in enumerate(first):
        if any(other[number][3] != first[number][3] for other in everyone):
            with torch.no_grad():
                dist.broadcast(tensors[name].data, src=0)


def _checksum(tensor: torch.Tensor) -> tuple[float, float] | None:
    """Two sums that differ where values do, nearly always; None for a tensor without values."""
    if tensor.is_meta or tensor.numel() == 0:
        return None
    flat = tensor.detach().reshape(-1)
    values = flat.abs().double() if flat.is_complex() else flat.double()
    weights = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=torch.float64)
    return values.sum().item(), (values * weights.remainder_(1021)).sum().item()


class Calls:
    """Which program each rank runs in each call, written to the job's store.

    A rank writes its own line at every call and reads the others' only where its program changes: if ranks differ, one of them
    sees another program than before.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._number, self._last = mesh, 0, ""
        # models are made in the same order on every rank, so a rank's count of them names this one
        model = mesh.guard.store.add(f"autoplan/models/{mesh.rank}", 1) if mesh.guard.store is not None else 0
        self._key = f"autoplan/calls/{model}"

    def enter(self, program: str) -> None:
        """Begin a call that runs `program`. Raises RunError, on every rank, where another rank runs something else in it."""
        store = self._mesh.guard.store
        self._number += 1
        changed, self._last = program != self._last, program
        if store is None:
            return
        store.set(f"{self._key}/{self._mesh.rank}", f"{self._number}|{program}")
        end_s = time.monotonic() + self._mesh.timeout_s
        for rank in range(self._mesh.world_size if changed else 0):
            other = self._of(rank, end_s)
            if other != program:
                text = f"in call {self._number} rank {self._mesh.rank} runs {program}, rank {rank} {_runs(other)}: give every rank a batch of the same shape"
                raise RunError(self._mesh.guard.report(text))

    def refuse(self, text: str) -> None:
        """Begin a call that this rank refuses. Returns where every rank refuses it; else all others stop with an error that says so."""
        store = self._mesh.guard.store
        self._number, self._last = self._number + 1, ""
        if store is None:
            return
        store.set(f"{self._key}/refused/{self._number}/{self._mesh.rank}", "")  # a line that may be written over before all have read it
        store.set(f"{self._key}/{self._mesh.rank}", f"{self._number}|{_REFUSED}{text}")
        end_s = time.monotonic() + self._mesh.guard.patience_s / 2
        for rank in range(self._mesh.world_size):
            try:
                self._of(rank, end_s)
                alike = store.check([f"{self._key}/refused/{self._number}/{rank}"])
            except RunError:
                alike = False
            if not alike:
                self._mesh.guard.report(f"rank {self._mesh.rank} refused its batch in call {self._number}: {text}")
                return

    def _of(self, rank: int, end_s: float) -> str:
        """What a rank runs in this call. Raises RunError where it does not come, or has failed."""
        guard = self._mesh.guard
        watch, looked_s = guard.watch(), time.monotonic()
        with told(), guard.waiting():
            while True:
                number, _, other = (
                    guard.store.get(f"{self._key}/{rank}").decode().partition("|") if guard.store.check([f"{self._key}/{rank}"]) else ("0", "", "")
                )
                if int(number) >= self._number:
                    return other
                now_s = time.monotonic()
                if now_s > looked_s + SLICE_S:
                    looked_s = now_s
                    guard.look(watch)
                if now_s > end_s:
                    raise RunError(f"rank {rank} did not come to call {self._number} in time")
                time.sleep(0.005)


def _runs(program: str) -> str:
    return f"refused its batch ({program.removeprefix(_REFUSED)})" if program.startswith(_REFUSED) else f"runs {program}"
