"""A wait that is cut into slices ends as the collective does, wherever in a slice that is."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch

from runtime.guard import Guard


@dataclass
class _LateWork:
    """A collective that ends just after the first slice has run out, before anybody asks whether it has."""

    error: str = ""
    is_over: bool = False

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self.is_over:
            self.is_over = True
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return self.is_over


def _guard() -> Guard:
    guard = Guard(None, 2)
    guard.store = object()  # there are others to ask, but nobody has to be asked
    return guard


def test_a_collective_that_ends_just_after_a_slice_has_ended_well():
    _guard().wait_collective(_LateWork(), torch.device("cpu"), 10.0)


def test_a_collective_that_fails_just_after_a_slice_raises_its_own_error():
    with pytest.raises(RuntimeError, match="connection closed"):
        _guard().wait_collective(_LateWork("connection closed by peer"), torch.device("cpu"), 10.0)
