"""The report is one page that says what the plan says, opens offline, and lets nothing be injected."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

from sampleplan import sample_measured, sample_plan

from autoplan.report import Row, comparison, html
from autoplan.units import count, num_bytes, seconds

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Balance(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []
        self.rects: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "rect":
            css = dict(attrs).get("class") or ""
            self.rects[css] = self.rects.get(css, 0) + 1
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(page: str) -> Balance:
    reader = Balance()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return reader


def test_the_page_is_whole_and_needs_nothing_from_outside() -> None:
    page = html(sample_plan(), sample_measured())
    parsed(page)
    assert not re.search(r"""(src|href)\s*=|url\((?!#)|@import|<script|https?://""", page)
    assert page == html(sample_plan(), sample_measured())


def test_every_action_of_every_stage_is_drawn() -> None:
    plan = sample_plan()
    drawn = parsed(html(plan)).rects
    for kind in ("forward", "backward"):
        expected = sum(event.kind == kind for event in plan.forecast.events)
        assert drawn[f"kind {kind}"] == expected + 1  # and once in the legend


def test_every_stage_shows_its_own_blocks() -> None:
    drawn = parsed(html(sample_plan())).rects
    columns_on_features, layers_stages = 5, 4  # gate, act, up, mlp, down
    assert drawn["split features"] == columns_on_features * layers_stages + 1
    assert drawn["split vocabulary"] == 1 + 2 + 1  # embedding on the first stage, head and loss on the last, legend


def test_many_short_events_are_drawn_as_few() -> None:
    plan = sample_plan()
    event = next(e for e in plan.forecast.events if e.kind == "forward")
    many = tuple(replace(event, start_s=k * 1e-6, end_s=(k + 1) * 1e-6) for k in range(20_000))
    page = html(replace(plan, forecast=replace(plan.forecast, events=many)))
    assert len(page) < 200_000


def test_names_are_escaped() -> None:
    page = html(replace(sample_plan(), model="<script>alert(1)</script>", reasons=("a < b & c",)))
    assert "<script>" not in page
    assert "a &lt; b &amp; c" in page


def test_a_plan_without_splits_notes_or_limits_has_a_report() -> None:
    plan = sample_plan()
    stages = tuple(replace(stage, memory_limit_bytes=0) for stage in plan.forecast.stages)
    bare = replace(
        plan, blocks=(), alternatives=(), reasons=(), warnings=(), space={}, forecast=replace(plan.forecast, stages=stages, collectives=(), events=())
    )
    parsed(html(bare))


def test_quantities_read_well() -> None:
    assert [seconds(v) for v in (0.0, 1.5e-6, 0.01234, 1.0, 59.96, 150, 7200)] == ["0 µs", "1.5 µs", "12.3 ms", "1 s", "60 s", "2.5 min", "2 h"]
    assert [num_bytes(v) for v in (0, 1023, 1536, 80 * 2**30)] == ["0 B", "1,023 B", "1.5 KiB", "80 GiB"]
    assert [count(v) for v in (999, 1.27e6)] == ["999", "1.27 M"]
    assert count(3e12, "FLOP") == "3 TFLOP"


def test_strategies_are_drawn_side_by_side_and_one_without_a_plan_says_why() -> None:
    plan = sample_plan()
    slow = replace(plan, forecast=replace(plan.forecast, step_time_s=2 * plan.forecast.step_time_s))
    page = comparison([Row("autoplan", plan), Row("ddp <b>", slow), Row("fsdp", None, "needs 3 GiB more")])
    drawn = parsed(page).rects
    assert drawn["lane"] == 3  # a step of each plan, and once in the legend
    assert "2.00×" in page and "needs 3 GiB more" in page and "<b>ddp &lt;b&gt;</b>" in page
    assert page == comparison([Row("autoplan", plan), Row("ddp <b>", slow), Row("fsdp", None, "needs 3 GiB more")])
