"""Small pieces of HTML and SVG as text. Everything that comes from outside goes through `esc`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def esc(value: object) -> str:
    return escape(str(value), quote=True)


def rect(x: float, y: float, width: float, height: float, css: str, title: str = "", radius: float = 2) -> str:
    """A rectangle with a tool-tip. Coordinates in pixels."""
    tip = f"<title>{esc(title)}</title>" if title else ""
    return f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.3):.2f}" height="{height:.1f}" rx="{radius:g}" class="{css}">{tip}</rect>'


def text(x: float, y: float, content: object, css: str = "", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}"{" " + extra if extra else ""}>{esc(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def svg(width: float, height: float, label: str, parts: Iterable[str]) -> str:
    """A drawing that scales down with the page and scrolls sideways where it would get too small. `label` is read aloud."""
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{esc(label)}"><svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'style="min-width:{min(width, 760):.0f}px" role="img" aria-label="{esc(label)}">{"".join(parts)}</svg></div>'
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numeric: Iterable[int] = (), marked: int | None = None) -> str:
    """Rows of ready-made HTML. `numeric` columns align right; row number `marked` is emphasised."""
    right = set(numeric)

    def cell(tag: str, i: int, content: str) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        return f"<{tag}{scope}{' class=num' if i in right else ''}>{content}</{tag}>"

    body = "".join(
        f"<tr{' class=marked' if k == marked else ''}>{''.join(cell('td', i, content) for i, content in enumerate(row))}</tr>" for k, row in enumerate(rows)
    )
    return f'<div class="scroll"><table><thead><tr>{"".join(cell("th", i, esc(h)) for i, h in enumerate(head))}</tr></thead><tbody>{body}</tbody></table></div>'


def legend(items: Iterable[tuple[str, str]]) -> str:
    """(css class, label) pairs."""

    def swatch(css: str) -> str:
        hatch = rect(0, 0, 14, 14, "hatched", radius=3) if css.endswith("summed") else ""
        return f'<svg width="14" height="14" aria-hidden="true">{rect(0, 0, 14, 14, css, radius=3)}{hatch}</svg>'

    keys = "".join(f"<li>{swatch(css)}{esc(label)}</li>" for css, label in items)
    return f'<ul class="legend">{keys}</ul>'
