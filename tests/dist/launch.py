"""Run one function on several gloo ranks of this machine and return what each rank returned."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_POLL_S = 0.05
_GRACE_S = 2.0  # after the first failure, ranks that still wait for the failed one are given this long to report


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """`fn(*args)` on ranks 0 .. world_size-1 of a fresh gloo group; the results in rank order.

    `fn` is a module-level function (it is pickled by name) and finds its rank with `torch.distributed.get_rank()`.
    Results travel by pickle (tensors as CPU tensors).

    Raises RuntimeError with the traceback of the rank that failed first, and TimeoutError when a rank has not ended after
    `timeout_s` seconds. No process outlives the call.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        workers = [context.Process(target=_rank_main, args=(rank, world_size, folder, timeout_s, fn, args), daemon=True) for rank in range(world_size)]
        for worker in workers:
            worker.start()
        try:
            _wait(workers, Path(folder), timeout_s)
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.kill()
                worker.join()
        return [pickle.loads((Path(folder) / f"result.{rank}").read_bytes()) for rank in range(world_size)]


def _wait(workers: list[Any], folder: Path, timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    failed_s: float | None = None
    while any(worker.is_alive() for worker in workers):
        now_s = time.monotonic()
        if failed_s is None and any(worker.exitcode not in (None, 0) for worker in workers):
            failed_s = now_s
        if failed_s is not None and now_s > failed_s + _GRACE_S:
            break
        if now_s > end_s:
            alive = [rank for rank, worker in enumerate(workers) if worker.is_alive()]
            raise TimeoutError(f"ranks {alive} of {len(workers)} have not ended after {timeout_s} s\n{_first_error(folder)}")
        time.sleep(_POLL_S)
    codes = [worker.exitcode for worker in workers]
    if any(codes):
        raise RuntimeError(f"exit codes of the ranks: {codes}\n{_first_error(folder)}")


def _first_error(folder: Path) -> str:
    errors = sorted(folder.glob("error.*"), key=lambda path: path.stat().st_mtime_ns)
    return errors[0].read_text() if errors else "no rank reported an error"


def _rank_main(rank: int, world_size: int, folder: str, timeout_s: float, fn: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s))
        result = fn(*args)
        (Path(folder) / f"result.{rank}").write_bytes(pickle.dumps(result))
        dist.destroy_process_group()
        os._exit(0)  # a thread that waits for a rank that is gone must not delay the end
    except BaseException:
        (Path(folder) / f"error.{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise SystemExit(1) from None
