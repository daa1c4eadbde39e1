"""Ranks that may die: what each of them said last, and when, without one's end being the end of the test."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoplan.launch import fork_server


@dataclass(frozen=True)
class End:
    """How a rank ended: its exit code, its error's type and text (empty where it wrote none), seconds from the fault to the error."""

    exit_code: int | None
    kind: str
    text: str
    after_s: float


def ends(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float) -> list[End]:
    """`fn(*args)` on every rank of a gloo job whose store this process holds, as torchrun does. `fn` calls `note_fault` on the rank
    that fails. Ranks that have not ended after `timeout_s` have exit code None and are killed."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        context = fork_server()
        workers = [context.Process(target=_main, args=(rank, world_size, store.port, folder, fn, args), daemon=True) for rank in range(world_size)]
        for worker in workers:
            worker.start()
        end_s = time.monotonic() + timeout_s
        for worker in workers:
            worker.join(max(0.0, end_s - time.monotonic()))
        codes = [worker.exitcode for worker in workers]
        for worker in workers:
            worker.kill()
            worker.join()
        fault_s = float((Path(folder) / "fault").read_text()) if (Path(folder) / "fault").exists() else 0.0
        found = []
        for rank, code in enumerate(codes):
            file = Path(folder) / f"end.{rank}"
            told = json.loads(file.read_text()) if file.exists() else {"kind": "", "text": "", "at_s": fault_s}
            found.append(End(code, told["kind"], told["text"], told["at_s"] - fault_s))
        return found


def note_fault() -> None:
    """Called by the rank that is about to fail."""
    (Path(os.environ["MORTAL"]) / "fault").write_text(str(time.time()))


def _main(rank: int, world_size: int, port: int, folder: str, fn: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ["MORTAL"] = folder
    store = dist.TCPStore("127.0.0.1", port, None, False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
    code, told = 0, {"kind": "", "text": ""}
    try:
        fn(*args)
    except BaseException as error:
        code, told = 1, {"kind": type(error).__name__, "text": str(error)}
    (Path(folder) / f"end.{rank}").write_text(json.dumps({**told, "at_s": time.time()}))
    os._exit(code)
