"""Run one function on several gloo ranks of this machine and return what each rank returned."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from autoplan import launch


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """`fn(*args)` on ranks 0 .. world_size-1 of a fresh gloo group; the results in rank order.

    `fn` is a module-level function (it is pickled by name) and finds its rank with `torch.distributed.get_rank()`.
    Results travel by pickle (tensors as CPU tensors).

    Raises RuntimeError with the traceback of the rank that failed first, or with the ranks that have not ended after
    `timeout_s` seconds. No process outlives the call.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    try:
        return launch.run_ranks(_in_group, world_size, store.port, timeout_s, fn, args, timeout_s=timeout_s)
    except launch.RankError as error:
        raise RuntimeError(f"{error}\n{error.details}") from None


def _in_group(port: int, timeout_s: float, fn: Callable[..., Any], args: tuple) -> Any:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", port, None, False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s))
    return fn(*args)
