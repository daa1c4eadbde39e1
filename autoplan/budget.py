"""A long-term budget on what changes cost: drift plus penalty.

Every slot t has a cost c_t >= 0 (bytes moved, money, whatever the caller counts), and the mean over time is to stay within a budget b. The virtual
queue

    Q <- max(0, Q + c_t - b)

remembers what was overspent: the costs of T slots are at most T b + Q_T. In each slot the choice that minimises V * T_i + Q * c_i is taken, T_i
the step time and c_i the cost of choice i, and V the worth of a second. So a change is dear while the queue is long and free once it is empty, and no
knowledge of the future is needed.

Source: Neely 2010, Stochastic Network Optimization, chapter 4; Ling et al. 2024 (IEEE TPDS 36(2)).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Choice:
    """One plan in one slot. `cost` in the caller's unit."""

    step_time_s: float
    cost: float


@dataclass(frozen=True, slots=True)
class Budget:
    """The state of the queue. `mean_cost`: allowed on average a slot (None: no limit); `worth` is V, cost units squared a second."""

    mean_cost: float | None = None
    worth: float = 1.0
    queue: float = 0.0
    spent: float = 0.0
    num_slots: int = 0

    def choose(self, choices: Sequence[Choice]) -> int:
        """The index of the choice that minimises V * T + Q * c; the first of equal ones."""
        return min(range(len(choices)), key=lambda i: (self.worth * choices[i].step_time_s + self.queue * choices[i].cost, i))

    def after(self, cost: float) -> Budget:
        """The state after a slot that cost `cost`."""
        queue = 0.0 if self.mean_cost is None else max(0.0, self.queue + cost - self.mean_cost)
        return replace(self, queue=queue, spent=self.spent + cost, num_slots=self.num_slots + 1)

    @property
    def average(self) -> float:
        """Mean cost of the slots so far."""
        return self.spent / self.num_slots if self.num_slots else 0.0
