"""Work beside the step: communication that runs while the next step computes.

On the CPU a thread does it; on a GPU it is put on a stream of its own, and nothing blocks. One piece of work at a time.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch

from runtime.guard import SLICE_S, Guard

T = TypeVar("T")


class Background(Generic[T]):
    """Runs one function beside its owner, without gradients."""

    def __init__(self, device: torch.device, guard: Guard) -> None:
        self._device, self._guard = device, guard
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._work: queue.SimpleQueue[Callable[[], T]] = queue.SimpleQueue()
        self._over: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        if self._stream is None:
            threading.Thread(target=self._run, name="runtime-background", daemon=True).start()

    def start(self, work: Callable[[], T], reads: Iterable[torch.Tensor] = ()) -> None:
        """Begin; what `work` reads must stay as it is until `result`. `reads`: those tensors among it that may be freed before."""
        if self._stream is None:
            self._work.put(work)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in reads:  # their memory must not be given to the main stream again before this one has read it
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream), torch.no_grad():
            self._over.put((work(), None))

    def result(self) -> T:
        """What the work gave, waited for. Raises its error, or StageError where another rank fails meanwhile."""
        while True:
            try:
                found, error = self._over.get(timeout=SLICE_S)
                break
            except queue.Empty:
                self._guard.check()
        if error is not None:
            raise error
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return found

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                with torch.no_grad():
                    self._over.put((work(), None))
            except BaseException as error:  # told to the owner, which raises it
                self._over.put((None, error))
            del work
