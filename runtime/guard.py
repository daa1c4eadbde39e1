"""Nobody waits for a rank that has failed: the first error of a job, told to all ranks through the store.

A rank that fails writes its error down; a rank that waits looks there twice a second. On the CPU every wait is cut into
slices for that: gloo's collectives can be waited for in pieces, its receives cannot (a time-out closes the connection), so
a thread waits for those. On a GPU the host does not block in a collective; NCCL's own watchdog ends what hangs.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from runtime.errors import StageError

SLICE_S = 0.5
LINGER_S = 5.0  # how long a failed rank stays for the others to read its error, and a rank whose peer is gone looks for the cause
_ERROR, _READERS = "runtime/first_error", "runtime/error_readers"


@dataclass(eq=False)
class Guard:
    """The first error of the job. `store`: torch's key-value store; None alone, with nobody to tell."""

    store: Any
    world_size: int
    _told: str | None = None
    _waiter: _Waiter | None = None

    def report(self, text: str) -> str:
        """Write an error down unless there is one already; returns the first. Stays until the others have read it, LINGER_S at most."""
        if self.store is None or self._told is not None:
            return self._told or text
        try:
            text = self.store.compare_set(_ERROR, "", text).decode()
            self._told = text
            self.store.add(_READERS, 1)
            end_s = time.monotonic() + LINGER_S
            while time.monotonic() < end_s and self.store.add(_READERS, 0) < self.world_size:
                time.sleep(0.05)
        except RuntimeError:  # the store went with rank 0: this rank's own error is all there is
            self._told = self._told or text
        return text

    def first(self) -> str | None:
        """The first error of any rank, if there is one."""
        if self._told is None and self.store is not None:
            try:
                if self.store.check([_ERROR]):
                    self._told = self.store.get(_ERROR).decode()
                    self.store.add(_READERS, 1)
            except RuntimeError:
                return None
        return self._told

    def cause(self) -> str | None:
        """The first error, waited for: a closed connection is seen before the error of the rank that closed it."""
        end_s = time.monotonic() + LINGER_S
        while (found := self.first()) is None and self.store is not None and time.monotonic() < end_s:
            time.sleep(0.05)
        return found

    def check(self) -> None:
        """Raise StageError with the first error of another rank, if there is one."""
        found = self.first()
        if found is not None:
            raise StageError(found)

    def wait_collective(self, work: Any, device: torch.device, timeout_s: float) -> None:
        """Wait for a collective. Raises RuntimeError where it fails or takes longer than `timeout_s`, StageError where another rank fails."""
        if self.store is None or device.type != "cpu":
            work.wait()
            return
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                work.wait(timedelta(seconds=SLICE_S))
                return
            except RuntimeError as error:
                if work.is_completed():
                    raise
                self.check()
                if time.monotonic() > end_s:
                    raise RuntimeError(f"no end after {timeout_s:g} s") from error

    def wait_transfer(self, work: Any, device: torch.device) -> None:
        """Wait for a send or receive; its group's time-out holds. Raises as `wait_collective`."""
        if self.store is None or device.type != "cpu":
            work.wait()
            return
        self._waiter = self._waiter or _Waiter()
        self._waiter.start(work)
        while not self._waiter.is_over(SLICE_S):
            self.check()


@dataclass(eq=False)
class _Waiter:
    """A thread that blocks in waits so that its owner does not have to."""

    _work: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    _over: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        threading.Thread(target=self._run, name="runtime-waiter", daemon=True).start()

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                work.wait()
                self._over.put(None)
            except RuntimeError as error:
                self._over.put(error)

    def start(self, work: Any) -> None:
        self._work.put(work)

    def is_over(self, timeout_s: float) -> bool:
        """Whether the wait has ended within `timeout_s`. Raises its error."""
        try:
            error = self._over.get(timeout=timeout_s)
        except queue.Empty:
            return False
        if error is not None:
            raise error
        return True


def default_store() -> Any:
    """The job's key-value store; None alone. (torch offers it under a private name only.)"""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() and dist.get_world_size() > 1 else None
