"""The time that a search has left."""

from __future__ import annotations

import time

from autoplan.ilp import OutOfTime


class Countdown:
    """Counts to an end that may not be set yet."""

    def __init__(self) -> None:
        self._end_s: float | None = None

    def end_at(self, end_s: float | None) -> None:
        """End at `end_s` of the monotonic clock; None: never."""
        self._end_s = end_s

    def left_s(self) -> float | None:
        """Seconds that are left; None for any number. Raises OutOfTime at the end."""
        if self._end_s is None:
            return None
        left_s = self._end_s - time.monotonic()
        if left_s <= 0.0:
            raise OutOfTime("the time limit has passed")
        return left_s
