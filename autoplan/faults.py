"""Errors of the packages below become errors of this one, so that users catch one family."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autoplan.errors import RunError, UsageError
from runtime.errors import BatchError, CheckpointError, CommunicationError, ScheduleError, StageError


@contextmanager
def told() -> Iterator[None]:
    """Raise what the runtime raises inside as RunError (a rank or its communication failed) or UsageError (what it was given)."""
    try:
        yield
    except (StageError, CommunicationError) as error:
        raise RunError(str(error)) from error
    except (BatchError, CheckpointError, ScheduleError) as error:
        raise UsageError(str(error)) from error
