"""Runs one function on several ranks of this machine, with the environment that torchrun would give them.

Nothing hangs: when a rank fails or the time is over, every rank is stopped and the first error is raised.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoplan.errors import AutoplanError

_POLL_S = 0.05
_GRACE_S = 3.0  # after the first failure, ranks that wait for the failed one are given this long to report
_PRELOADED = ["torch.distributed.tensor", "torch._dynamo", "autoplan.parallel", "transformers"]  # what every rank would import


class RankError(AutoplanError):
    """A rank failed or did not end. The message has the first error; `details` its trace-back."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


def run_ranks(fn: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float) -> list[Any]:
    """`fn(*args)` on ranks 0 .. num_ranks-1 as separate processes; what each returned, in rank order.

    `fn` is a module-level function. It finds RANK, WORLD_SIZE, LOCAL_RANK and so on in its environment and makes its own
    process group. One thread a rank. Raises RankError.
    """
    with tempfile.TemporaryDirectory(prefix="autoplan-") as folder:
        context = fork_server()
        port = _free_port()
        environment = dict(os.environ)
        workers = [context.Process(target=_main, args=(rank, num_ranks, port, folder, environment, fn, args), daemon=True) for rank in range(num_ranks)]
        for worker in workers:
            worker.start()
        try:
            _wait(workers, Path(folder), timeout_s)
        finally:
            for worker in workers:
                if worker.is_alive():
                    worker.kill()
                worker.join()
        return [pickle.loads((Path(folder) / f"result.{rank}").read_bytes()) for rank in range(num_ranks)]


def fork_server() -> Any:
    """Where processes come from: copies of one process that has imported torch and has done nothing else, so it has no threads
    and no device. A rank then starts in a hundredth of the seconds that the imports take. The copies have the environment that
    the server was started with; a caller hands them its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


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
            alive = ", ".join(str(rank) for rank, worker in enumerate(workers) if worker.is_alive())
            raise RankError(f"rank {alive} of {len(workers)} did not end within {timeout_s:g} s; all were stopped{_first_error(folder)[0]}")
        time.sleep(_POLL_S)
    codes = [worker.exitcode for worker in workers]
    if any(codes):
        said, details = _first_error(folder)
        rank = next(rank for rank, code in enumerate(codes) if code)
        raise RankError(f"a rank failed, all {len(workers)} were stopped{said or f': rank {rank} ended with exit code {codes[rank]}'}", details)


def _first_error(folder: Path) -> tuple[str, str]:
    errors = sorted(folder.glob("error.*"), key=lambda path: path.stat().st_mtime_ns)
    if not errors:
        return "", ""
    said, _, details = errors[0].read_text(encoding="utf-8").partition("\0")
    return f": rank {errors[0].suffix[1:]}: {said}", details


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _main(rank: int, num_ranks: int, port: int, folder: str, environment: dict[str, str], fn: Callable[..., Any], args: tuple) -> None:
    os.environ.clear()
    os.environ.update(environment)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "GROUP_RANK": 0}
    os.environ.update({key: str(value) for key, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        result = fn(*args)
        (Path(folder) / f"result.{rank}").write_bytes(pickle.dumps(result))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        kind = "" if isinstance(error, AutoplanError) else f"{type(error).__name__}: "
        part = Path(folder) / f"part.{rank}"
        part.write_text(f"{kind}{error}\0{traceback.format_exc()}", encoding="utf-8")
        part.rename(Path(folder) / f"error.{rank}")
        raise SystemExit(1) from None
