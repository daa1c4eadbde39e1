"""Actions: what the ranks of a pipeline do, one after the other."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from runtime.errors import ScheduleError

Kind = Literal["F", "B", "BI", "BW"]
Edges = frozenset[tuple[int, int]]  # (src stage, dst stage)


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """Forward (F), backward (B), or its halves, of one micro-batch on one stage: gradients of inputs (BI) and of weights (BW)."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"


def parse_action(text: str) -> Action:
    """ "F0.3" -> forward of stage 0, micro-batch 3. Raises ScheduleError."""
    found = re.fullmatch(r"(BI|BW|F|B)(\d+)\.(\d+)", text)
    if not found:
        raise ScheduleError(f"{text!r} is no action: write kind ({', '.join(get_args(Kind))}), stage, a dot and the micro-batch, like F0.3")
    return Action(found[1], int(found[2]), int(found[3]))  # type: ignore[arg-type]


Schedule = tuple[tuple[Action, ...], ...]  # the actions of each rank
