"""Errors of the runtime. Each names the rank and what it was at."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CommunicationError(RuntimeError):
    """A collective or transfer that failed or did not end in time."""


class StageError(RuntimeError):
    """An error inside a stage's own work, here or on another rank."""


class BatchError(ValueError):
    """A batch that the program cannot run."""


class CheckpointError(ValueError):
    """A checkpoint that is damaged or of another model."""


class ScheduleError(ValueError):
    """A schedule that cannot be made or run."""


@contextmanager
def failing(what: Callable[[], str], timeout_s: float | None = None) -> Iterator[None]:
    """Communication, from its issue to its end: what fails inside is raised as CommunicationError that says `what`, asked once it has
    failed, and after how long. StageError passes: another rank has failed."""
    start_s = time.perf_counter()
    try:
        yield
    except StageError:
        raise
    except RuntimeError as error:
        limit = "" if timeout_s is None else f" of at most {timeout_s:g} s"
        raise CommunicationError(f"{what()} failed after {time.perf_counter() - start_s:.1f} s{limit}: {error}") from error
