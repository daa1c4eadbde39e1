"""How the ranks of a job meet where it may have been started before: torchrun starts it again (`--max-restarts`) with the store of the last try, and all
that was left there, addresses of ranks that are gone among it. Its ranks agree on a name that nothing bears yet, and meet below it:

    rank r > 0    writes a name of its own at join/r, and takes what is answered below that name
    rank 0        answers whatever name it finds at join/r with the new one, until every rank has taken it

No rank of an earlier try lives any more: what it left is answered in vain.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from runtime.errors import CommunicationError

_KEY = "runtime/meeting"
_PAUSE_S = 0.005
_PROCESS = uuid.uuid4().hex  # names this process


def meet(store: Any, rank: int, world_size: int, timeout_s: float) -> Any:
    """A part of `store` that is empty, the same for all ranks. All of them call it. Raises CommunicationError for a rank that does not come."""
    end_s, own = time.monotonic() + timeout_s, uuid.uuid4().hex
    if rank == 0:
        _answer(store, own, world_size, end_s)
        return dist.PrefixStore(own, store)  # type: ignore[attr-defined]
    store.set(f"{_KEY}/join/{rank}", own)
    answer = f"{_KEY}/answer/{own}"
    while not store.check([answer]):
        if time.monotonic() > end_s:
            raise CommunicationError(f"rank {rank}: rank 0 did not come to the job's meeting within {timeout_s:g} s")
        time.sleep(_PAUSE_S)
    found = store.get(answer).decode()
    store.set(f"{_KEY}/taken/{found}/{rank}", "")
    return dist.PrefixStore(found, store)  # type: ignore[attr-defined]


def _answer(store: Any, own: str, world_size: int, end_s: float) -> None:
    answered: dict[int, str] = {}
    missing = list(range(1, world_size))
    while missing:
        for rank in missing:
            if store.check([f"{_KEY}/join/{rank}"]):
                name = store.get(f"{_KEY}/join/{rank}").decode()
                if answered.get(rank) != name:
                    store.set(f"{_KEY}/answer/{name}", own)
                    answered[rank] = name
        missing = [rank for rank in missing if not store.check([f"{_KEY}/taken/{own}/{rank}"])]
        if missing and time.monotonic() > end_s:
            raise CommunicationError(f"rank 0: rank {missing[0]} did not come to the job's meeting")
        time.sleep(_PAUSE_S if missing else 0.0)


def own_part(store: Any, device: torch.device) -> Any:
    """The part of a job's store that belongs to the present process of rank 0. All ranks call it, connected already."""
    found: list[Any] = [_PROCESS]
    dist.broadcast_object_list(found, src=0, device=device)
    return dist.PrefixStore(found[0], store)  # type: ignore[attr-defined]


def joined(timeout_s: float) -> tuple[Any, int, int]:
    """(store, rank, number of ranks) of the job that torchrun describes in the environment, what earlier tries left out of sight."""
    store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    return meet(store, rank, world_size, timeout_s), rank, world_size
