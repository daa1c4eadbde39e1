"""Routes: which axes change their layout in which order when a value goes from one layout on every axis to another.

Where several axes divide one factor they nest: the first in `order` is outermost. An outer axis cannot be gathered, nor cut, while an inner
one divides the same factor: the parts would come out in another order. So the inner ones become whole first, and are cut again afterwards.
"""

from __future__ import annotations

from autoplan.layout import WHOLE, Layout, Split

Layouts = tuple[Layout, ...]


def route(have: Layouts, need: Layouts, order: tuple[int, ...]) -> tuple[tuple[int, Layout], ...]:
    """Changes (axis, its next layout), one axis at a time, from `have` to `need`. In the order of the axes where nothing nests."""
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

    for factor in sorted(nested):
        outer = [n for n in order if have[n] == factor]
        wanted = [n for n in order if need[n] == factor]
        same = 0
        while same < min(len(outer), len(wanted)) and outer[same] == wanted[same]:
            same += 1
        for n in reversed(outer[same:]):
            go(n, need[n] if not isinstance(need[n], Split) else WHOLE)
    for n in changed:
        if need[n] not in nested:
            go(n, need[n])
    for n in order:
        go(n, need[n])
    return tuple(steps)
