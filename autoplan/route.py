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

    def nest_of(n: int, factor: Split) -> tuple[int, ...]:
        """The axes inside of axis n where they divide `factor`, outermost first."""
        nest = order(factor)
        return nest[nest.index(n) + 1 :]

    def blocked(n: int) -> bool:
        """Whether another axis divides what axis n leaves or takes inside of it, or has yet to leave or take it outside."""
        for factor in {f for f in (at[n], need[n]) if isinstance(f, Split)}:
            inner, nest = nest_of(n, factor), order(factor)
            outer = nest[: nest.index(n)]
            moving = any(at[m] != need[m] and factor in (at[m], need[m]) for m in outer)
            if any(at[m] == factor for m in inner) or (factor == need[n] and moving):
                return True
        return False

    waiting = list(changed)
    while waiting:
        ready = next((n for n in waiting if not blocked(n)), None)
        if ready is not None:
            go(ready, need[ready])
            waiting.remove(ready)
            continue
        # An axis inside of one that has to move steps aside, the innermost one first; where axes wait for each other in turn, one
        # of them. It comes back once nothing outside of it is left to move, so every axis steps aside once at most.
        inside = (m for n in waiting for f in (at[n], need[n]) if isinstance(f, Split) for m in reversed(nest_of(n, f)) if at[m] == f)
        aside = next(inside, None)
        if aside is None:
            aside = next(n for n in waiting if at[n] != WHOLE)
        go(aside, WHOLE)
        if aside not in waiting:
            waiting.append(aside)
    return tuple(steps)
