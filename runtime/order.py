"""The record of an asynchronous run: on each server, every push and pull in the order in which they took effect.

    ahead      of a pull: how many steps the slowest worker is behind the step that the weights are for (stale-synchronous
               parallel, Ho et al. 2013: never over the bound)
    staleness  of a push: updates by other workers between the pull of the weights that its gradient is of and this update
               (at most the number of other workers where workers take turns)

The order on one server is total; servers are independent of each other, each keeps its own part of every weight.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class Exchange:
    """One push, skipped push (a step that was not finite), or pull. `step` counts a worker's steps from 0: of a push the step
    whose gradient it brings, of a pull the step that its weights are for. `version`: updates that the server had made before."""

    kind: Literal["push", "skip", "pull"]
    worker: int
    step: int
    version: int
    staleness: int = 0
    ahead: int = 0
    rates: tuple[float, ...] = ()  # of a push: the learning rate of each group of parameters


@dataclass(frozen=True)
class Record:
    """Exchanges of a whole run by server. `updates`: optimizer steps that each server made; `bound`: steps that a worker may be
    ahead (None: any number)."""

    num_workers: int
    servers: tuple[int, ...]
    bound: int | None
    exchanges: tuple[tuple[Exchange, ...], ...]
    updates: tuple[int, ...]

    @property
    def pushes(self) -> tuple[int, ...]:
        """Pushes that arrived at each server."""
        return tuple(sum(e.kind == "push" for e in own) for own in self.exchanges)

    @property
    def max_ahead(self) -> int:
        return max((e.ahead for e in self._all()), default=0)

    @property
    def max_staleness(self) -> int:
        return max((e.staleness for e in self._all()), default=0)

    @property
    def mean_staleness(self) -> float:
        pushes = [e.staleness for e in self._all() if e.kind == "push"]
        return sum(pushes) / max(1, len(pushes))

    def _all(self) -> Iterable[Exchange]:
        return (exchange for own in self.exchanges for exchange in own)

    def save(self, path: str | Path) -> None:
        """Write the record as JSON."""
        Path(path).write_text(json.dumps(asdict(self)) + "\n")

    @staticmethod
    def load(path: str | Path) -> Record:
        """Read what `save` wrote. Raises ValueError for anything else."""
        try:
            data = json.loads(Path(path).read_text())
            logs = tuple(tuple(Exchange(**{**e, "rates": tuple(e["rates"])}) for e in own) for own in data["exchanges"])
            return Record(data["num_workers"], tuple(data["servers"]), data["bound"], logs, tuple(data["updates"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is no record of an asynchronous run: {error}") from error
