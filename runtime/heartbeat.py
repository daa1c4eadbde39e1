"""Signs of life: each rank writes once a second to the job's store how far it is; who waits too long looks who does not move.

    number   counts the signs: it stands still where the process is gone or stopped
    moves    counts what the rank has begun and ended: it stands still where the rank is stuck, or computes for long

A rank that waits for others is not at fault. In its first step (tracing, compilation, cold caches) neither is one whose processor
time goes on.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

BEAT_S = 1.0
_BUSY_SHARE = 0.005  # of one core: a rank that uses more is at work, be it one of many on its core


@dataclass(frozen=True, slots=True)
class Sign:
    """What a rank tells of itself. `at` is where it is, in words."""

    number: int
    moves: int
    cpu_s: float
    is_new: bool
    is_waiting: bool
    at: str


@dataclass(frozen=True, slots=True)
class Heart:
    """The thread that writes this rank's signs until `tell` is gone, or `stop`."""

    stopped: threading.Event
    thread: threading.Thread

    @staticmethod
    def start(store: Any, key: str, rank: int, tell: Callable[[int], Sign | None]) -> Heart:
        """`tell(number)` gives the next sign, None at the end. A rank that others have found stuck ends here: nothing else can end it."""
        stopped = threading.Event()
        own = store.clone()  # a call of the main thread that blocks must not hold this one up
        heart = Heart(stopped, threading.Thread(target=_beat, args=(own, key, rank, tell, stopped), name="runtime-heart", daemon=True))
        heart.thread.start()
        return heart

    def stop(self) -> None:
        """End the thread, and wait until it has left the store: a process that ends meanwhile is aborted by the thread's return into Python."""
        self.stopped.set()
        if threading.current_thread() is not self.thread:
            self.thread.join(2 * BEAT_S)


def _beat(store: Any, key: str, rank: int, tell: Callable[[int], Sign | None], stopped: threading.Event) -> None:
    number = 0
    try:
        while (sign := tell(number)) is not None:
            store.set(f"{key}/{rank}", json.dumps(asdict(sign)))
            if store.check([f"{key}/stuck/{rank}"]):
                moves, _, text = store.get(f"{key}/stuck/{rank}").decode().partition("|")
                if int(moves) == sign.moves:
                    sys.stderr.write(f"{text}\n")
                    sys.stderr.flush()
                    os._exit(1)
            number += 1
            if stopped.wait(BEAT_S):
                return
    except RuntimeError:  # the store is gone, and the job with it
        return


class Watch:
    """Looks at the signs of all ranks while this one waits."""

    def __init__(self, store: Any, key: str, rank: int, world_size: int) -> None:
        self._store, self._key = store, key
        self._others = [other for other in range(world_size) if other != rank]
        self._start_s = time.monotonic()
        self._alive: dict[int, tuple[int, float]] = {}  # rank -> number of its last sign, when it was first seen
        self._moved: dict[int, tuple[Sign, float]] = {}  # rank -> the sign with which it last moved, when it was first seen
        self._last: dict[int, Sign] = {}

    def look(self) -> None:
        """Take notice of every rank's sign."""
        now_s = time.monotonic()
        for rank in self._others:
            name = f"{self._key}/{rank}"
            if not self._store.check([name]):
                continue
            sign = Sign(**json.loads(self._store.get(name)))
            self._last[rank] = sign
            if rank not in self._alive or self._alive[rank][0] != sign.number:
                self._alive[rank] = (sign.number, now_s)
            if rank not in self._moved or self._moved[rank][0].moves != sign.moves or sign.is_waiting:
                self._moved[rank] = (sign, now_s)

    def gone(self, limit_s: float) -> str | None:
        """A rank without a sign for `limit_s`, in words; None where all live."""
        for rank in self._others:
            _, since_s = self._alive.get(rank, (0, self._start_s))
            silent_s = time.monotonic() - since_s
            if silent_s > limit_s:
                last = f", last seen: {self._last[rank].at}" if rank in self._last else ""
                return f"rank {rank} is gone: no sign of it for {silent_s:.0f} s{last}"
        return None

    def stuck(self, limit_s: float) -> str | None:
        """A rank that lives, waits for nobody and has not moved for `limit_s`, in words; it is told so, and ends."""
        for rank, (sign, since_s) in sorted(self._moved.items()):
            still_s = time.monotonic() - since_s
            if still_s <= limit_s or self._last[rank].is_waiting:
                continue
            is_at_work = self._last[rank].cpu_s - sign.cpu_s > _BUSY_SHARE * still_s
            if sign.is_new and is_at_work:
                continue
            text = f"rank {rank} has not moved for {still_s:.0f} s, {sign.at}"
            self._store.set(f"{self._key}/stuck/{rank}", f"{sign.moves}|{text}")
            return text
        return None
