"""Errors that users see. Each message says what was asked, what was found, and the nearest fix."""

from __future__ import annotations


class AutoplanError(Exception):
    """Base of every error that this project raises on purpose. `exit_code` is the command line's."""

    exit_code = 1


class UsageError(AutoplanError, ValueError):
    """An argument that cannot be used."""

    exit_code = 2


class CaptureError(AutoplanError, ValueError):
    """A model that cannot be captured exactly."""

    exit_code = 5


class UnsupportedOpError(AutoplanError, ValueError):
    """An operator that cannot be run in the way asked."""

    exit_code = 5


class ClusterError(AutoplanError, ValueError):
    """A cluster description that makes no sense."""

    exit_code = 2


class InfeasibleError(AutoplanError, ValueError):
    """No plan satisfies the constraints and the memory limit."""

    exit_code = 3


class RunError(AutoplanError, RuntimeError):
    """A rank that failed in a step, or its communication. The message names the rank, stage and micro-batch."""


class StalePlanError(AutoplanError, ValueError):
    """A plan of another model or cluster, or a damaged plan file."""

    exit_code = 4
