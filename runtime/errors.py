"""Errors of the runtime. Each names the rank and what it was at."""

from __future__ import annotations


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
