"""Routes: which axes change their layout in which order when a value goes from one layout on every axis to another.

Where several axes divide one factor they nest. An outer axis cannot be gathered, nor cut, while an inner one divides the same factor: the
parts would come out in another order. So the inner ones become whole first, and are cut again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

from autoplan.layout import WHOLE, Layout, Split

Layouts = tuple[Layout, ...]


def route(have: Layouts, need: Layouts, order: Callable[[Split], tuple[int, ...]]) -> tuple[tuple[int, Layout], ...]:
    """Changes (axis, its next layout), one axis at a time, from `have` to `need`. In the order of the axes where nothing nests.

    `order(factor)` are the axes by how they nest where they divide that factor, outermost first.
    """
    changed = [n for n in range(len(have)) if have[n] != need[n]]
    touched = {layout for n in changed for layout in (have[n], need[n]) if isinstance(layout, Split)}
    nested = {f for f in touched if max(have.count(f), need.count(f)) > 1 or (have.count(f) and need.count(f))}
    if not nested:
        return tuple((n, need[n]) for n in changed)
    at, steps = list(have), []

    def go(n: int, layout: Layout) -> None:
        if at[n] != layout:
            at[n] = layout
            steps.append((n, layout))

    def blocked(n: int) -> bool:
        """Whether another axis divides what axis n leaves or takes inside of it, or has yet to take it outside."""
        for factor in {f for f in (at[n], need[n]) if isinstance(f, Split)}:
            nest = order(factor)
            inner = nest[nest.index(n) + 1 :]
            outer = nest[: nest.index(n)]
            if any(at[m] == factor for m in inner) or (factor == need[n] and any(need[m] == factor != at[m] for m in outer)):
                return True
        return False

    waiting = list(changed)
    while waiting:
        ready = next((n for n in waiting if not blocked(n)), None)
        if ready is not None:
            go(ready, need[ready])
            waiting.remove(ready)
            continue
        # an axis inside of one that has to move steps aside: the innermost one first
        n = waiting[0]
        factor = next(f for f in (at[n], need[n]) if isinstance(f, Split) and any(at[m] == f for m in order(f)[order(f).index(n) + 1 :]))
        aside = next(m for m in reversed(order(factor)) if at[m] == factor)
        go(aside, WHOLE)
        if aside not in waiting:
            waiting.append(aside)
    return tuple(steps)
