"""The frame of every page: one style sheet, no script and nothing from outside."""

from __future__ import annotations

from pathlib import Path

from autoplan.report.markup import esc

STYLE = Path(__file__).parent.parent / "data" / "report.css"


def document(title: str, body: str) -> str:
    """One HTML document that opens offline. `body` is HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{esc(title)} – autoplan</title><style>{STYLE.read_text(encoding="utf-8")}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )


def section(anchor: str, title: str, body: str, note: str = "") -> str:
    """A titled part of a page; nothing where `body` is empty."""
    if not body:
        return ""
    said = f'<p class="quiet">{esc(note)}</p>' if note else ""
    return f'<section id="{anchor}" aria-labelledby="{anchor}-title"><h2 id="{anchor}-title">{esc(title)}</h2>{said}{body}</section>'
