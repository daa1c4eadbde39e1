"""Ranks that meet in a store where an earlier try of the job has left its keys."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from runtime.errors import CommunicationError
from runtime.meeting import meet


def _stores(count: int) -> list[Any]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))  # type: ignore[attr-defined]
    clients = [dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=30)) for _ in range(count - 1)]  # type: ignore[attr-defined]
    return [server, *clients]


def _try(stores: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(stores)) as pool:
        return list(pool.map(lambda rank: meet(stores[rank], rank, len(stores), 30.0), range(len(stores))))


def test_every_try_meets_where_no_earlier_one_has_written() -> None:
    stores = _stores(3)
    for _ in range(3):
        met = _try(stores)
        assert not any(store.check([f"address/{rank}"]) for store in met for rank in range(3))
        for rank, store in enumerate(met):
            store.set(f"address/{rank}", str(rank))
        assert [[store.get(f"address/{rank}") for rank in range(3)] for store in met] == [[b"0", b"1", b"2"]] * 3


def test_a_try_that_broke_off_before_its_ranks_had_met_leaves_nothing_that_the_next_one_takes() -> None:
    stores = _stores(2)
    with pytest.raises(CommunicationError, match="rank 0 did not come"):
        meet(stores[1], 1, 2, 0.05)
    first, second = _try(stores)
    first.set("a", "1")
    assert second.get("a") == b"1"


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(CommunicationError, match="rank 1 did not come"):
        meet(_stores(2)[0], 0, 2, 0.05)
