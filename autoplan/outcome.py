"""What a search found: plans that were worked out, bounds of what was not."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoplan.choose import Chosen
from autoplan.forecast import Memory
from autoplan.load import StageLoad
from autoplan.replay import Durations
from autoplan.space import Shape, Space, Storing


@dataclass(frozen=True)
class Result:
    """One plan, worked out. `fullest` is a stage of the pipeline rank with the most memory."""

    shape: Shape
    storing: Storing
    chosen: Chosen
    starts: tuple[int, ...]  # of the stages, in graph blocks, and the end
    step_s: float
    memory: Memory
    fullest: int
    limit_bytes: int
    loads: tuple[StageLoad, ...]
    times: tuple[Durations, ...]
    bubble_s: float
    is_bent: bool  # whether other cuts would be faster, but for memory
    stage_ranks: tuple[int, ...]
    modes: tuple[str, ...] = ()  # how each block of the graph is recomputed, where they are not alike

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.limit_bytes

    @property
    def order(self) -> tuple:
        return (self.step_s, self.memory.total, self.shape, self.storing, self.starts)


@dataclass
class Outcome:
    """All that the search knows at its end."""

    space: Space
    fitting: list[Result] = field(default_factory=list)
    too_large: list[Result] = field(default_factory=list)
    bounds: dict[Shape, float] = field(default_factory=dict)  # tightest known of every shape
    worked_out: set[Shape] = field(default_factory=set)

    def best(self) -> Result:
        return min(self.fitting, key=lambda r: r.order)

    def gap(self, chosen: Result) -> float:
        """How much faster than `chosen` any plan of the space could be at most: a shape that was worked out counts with its bound too,
        since not every choice inside it was looked at."""
        return max(0.0, 1.0 - min([chosen.step_s, *self.bounds.values()]) / chosen.step_s)
