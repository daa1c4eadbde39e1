"""Nobody waits for a rank that has failed: the first error of a job, told to all ranks through the store.

A rank that fails writes its error down; a rank that waits looks there twice a second. On the CPU every wait is cut into
slices for that: gloo's collectives can be waited for in pieces, its receives cannot (a time-out closes the connection), so
a thread waits for those. On a GPU the host does not block in a collective; NCCL's own watchdog ends what hangs.

A rank that is killed or stuck writes nothing down. It is known by its signs (runtime/heartbeat.py): whoever has waited for
`patience_s` names the rank that is gone or does not move.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from runtime.errors import CommunicationError, StageError
from runtime.heartbeat import Heart, Sign, Watch
from runtime.record import Recorder

SLICE_S = 0.5
PATIENCE_S = 30.0  # how long nobody asks why another rank does not come, at least
SILENCE_S = 4.0  # a rank whose connection broke and that gives no sign for so long is gone
LINGER_S = 5.0  # how long a failed rank stays for the others to read its error, and a rank whose peer is gone looks for the cause
_ERROR, _READERS = "runtime/first_error", "runtime/error_readers"


@dataclass(eq=False)
class Guard:
    """The first error of the job. `store`: torch's key-value store; None alone, with nobody to tell. `patience_s`: how long a rank may
    stand still while another waits for it."""

    store: Any
    world_size: int
    rank: int = 0
    recorder: Recorder = field(default_factory=Recorder)
    patience_s: float = PATIENCE_S
    is_new: bool = True  # no step has ended yet
    _told: str | None = None
    _waiter: _Waiter | None = None
    _waits: int = 0
    _exchanges: int = 0
    _key: str = ""
    _heart: Heart | None = None

    def __post_init__(self) -> None:
        if self.store is None:
            return
        # meshes are made in the same order on every rank, so a rank's count of them names this one
        self._key = f"runtime/mesh/{self.store.add(f'runtime/meshes/{self.rank}', 1)}"
        own = weakref.ref(self)
        self._heart = Heart.start(self.store, self._key, self.rank, lambda number: None if own() is None else own()._sign(number))  # type: ignore[union-attr]
        weakref.finalize(self, self._heart.stop)  # at the end of the process too

    def _sign(self, number: int) -> Sign:
        at = self.recorder
        return Sign(number, at.moves, time.process_time(), self.is_new, self._waits > 0, at.place)

    def watch(self) -> Watch:
        """Looks at the other ranks from now on."""
        return Watch(self.store, self._key, self.rank, self.world_size)

    def look(self, watch: Watch) -> None:
        """Raise StageError where another rank has failed, CommunicationError where one is gone or has not moved for `patience_s`."""
        self.check()
        try:
            watch.look()
            found = watch.gone(self.patience_s) or watch.stuck(self.patience_s)
        except StageError:
            raise
        except RuntimeError as error:
            raise CommunicationError(f"the job's store is gone, and the process that holds it (rank 0, or torchrun): {error}") from error
        if found is not None:
            raise CommunicationError(found)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this rank waits (for others, for its disk): it is not stuck."""
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1

    def exchange(self, value: Any, what: str, timeout_s: float) -> list[Any]:
        """What every rank gives, in rank order, through the store: for small things. All ranks call it in the same order.

        Raises CommunicationError naming the first rank that did not come, StageError where another rank fails meanwhile.
        """
        if self.store is None:
            return [value]
        number, self._exchanges = self._exchanges, self._exchanges + 1
        key = f"{self._key}/exchange"
        self.store.set(f"{key}/{number}/{self.rank}", pickle.dumps(value))
        if number > 1:  # who gives the third value has read the first ones
            self.store.delete_key(f"{key}/{number - 2}/{self.rank}")
        end_s, found, watch = time.monotonic() + timeout_s, [], self.watch()
        looked_s = time.monotonic()
        with self.waiting():
            for rank in range(self.world_size):
                while not self.store.check([f"{key}/{number}/{rank}"]):
                    now_s = time.monotonic()
                    if now_s > end_s:
                        raise CommunicationError(f"rank {self.rank}: {what}: rank {rank} did not come within {timeout_s:g} s")
                    if now_s > looked_s + SLICE_S:
                        looked_s = now_s
                        self.look(watch)
                    time.sleep(0.002)
                found.append(pickle.loads(self.store.get(f"{key}/{number}/{rank}")))
        return found

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

    def cause(self) -> tuple[str | None, str | None]:
        """(the first error of the job, the rank that is gone, in words), waited for: a closed connection is seen before the error of
        the rank that closed it, and before it can be known that it gives no sign any more."""
        end_s, gone = time.monotonic() + LINGER_S, None
        watch = self.watch() if self.store is not None else None
        while (found := self.first()) is None and watch is not None and gone is None and time.monotonic() < end_s:
            time.sleep(0.05)
            try:
                watch.look()
            except RuntimeError:
                gone = "the job's store is gone, and the process that holds it (rank 0, or torchrun)"
                break
            gone = watch.gone(SILENCE_S)
        return found, gone

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
        end_s, watch = time.monotonic() + timeout_s, None
        with self.waiting():
            while True:
                try:
                    work.wait(timedelta(seconds=SLICE_S))
                    return
                except RuntimeError as error:
                    if work.is_completed():
                        work.wait()  # raises what it failed with; nothing where it ended just after the slice
                        return
                    watch = watch or self.watch()
                    self.look(watch)
                    if time.monotonic() > end_s:
                        raise RuntimeError(f"no end after {timeout_s:g} s") from error

    def wait_transfer(self, work: Any, device: torch.device) -> None:
        """Wait for a send or receive; its group's time-out holds. Raises as `wait_collective`."""
        if self.store is None or device.type != "cpu":
            work.wait()
            return
        self._waiter = self._waiter or _Waiter()
        self._waiter.start(work)
        watch = None
        with self.waiting():
            while not self._waiter.is_over(SLICE_S):
                watch = watch or self.watch()
                self.look(watch)


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
