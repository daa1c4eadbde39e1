"""`autoplan explain`."""

from __future__ import annotations

from pathlib import Path

from autoplan.commands.console import note, say, write_whole
from autoplan.errors import UsageError
from autoplan.plan import Plan
from autoplan.planfile import load as load_plan


def explain_command(path: Path, form: str, output: Path | None) -> None:
    if form not in ("text", "json", "html", "trace"):
        raise UsageError(f"--format {form}: expected text, json, html or trace")
    text = rendered(load_plan(path), form)
    if output is None:
        say(text.rstrip("\n"))
    else:
        write_whole(output, text)
        note(str(output) + (" (open it in https://ui.perfetto.dev)" if form == "trace" else ""))


def rendered(plan: Plan, form: str) -> str:
    """The plan as text, JSON, HTML or trace, with a newline at its end."""
    if form == "json":
        from autoplan.planfile import dumps

        return dumps(plan).rstrip("\n") + "\n"
    if form == "html":
        from autoplan.report import html

        return html(plan)
    if form == "trace":
        from autoplan.trace import trace

        return trace(plan)
    from autoplan.explain import explain

    return explain(plan) + "\n"
