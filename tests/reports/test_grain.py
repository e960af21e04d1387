"""Buckets by the span: from a second to a day, and never too many."""

from __future__ import annotations

import pytest

from tickwheel.reports import HOUR_MS, QUARTER_MS, ReportSettings
from tickwheel.reports.page import BUCKETS_MAX, FINE_ROWS_MAX, STEPS_MS, Grain, grain
from tickwheel.reports.state import Manifest

T0 = 1_795_176_000_000
DAY_MS = 24 * HOUR_MS


def of(span_ms: int, rows: int = 1_000, **more: int) -> Grain:
    manifest = Manifest(rows=rows, first_ms=T0, last_ms=T0 + span_ms)
    return grain(manifest, ReportSettings(("history",), "out", **more))  # type: ignore[arg-type]  # times only


@pytest.mark.parametrize(
    ("span_ms", "text"),
    [
        (0, "second"), (25_000, "second"), (10 * 60_000, "5 seconds"), (HOUR_MS, "30 seconds"),
        (3 * HOUR_MS, "minute"), (DAY_MS, "15 minutes"), (2 * DAY_MS, "15 minutes"),
        (7 * DAY_MS, "hour"), (15 * DAY_MS, "hour"), (16 * DAY_MS, "day"), (900 * DAY_MS, "day"),
    ],
)  # fmt: skip
def test_the_grain_follows_the_time_span(span_ms: int, text: str) -> None:
    result = of(span_ms)
    assert result.text == text
    assert span_ms / result.step_ms <= 1_000
    if result.name == "step":
        assert span_ms < BUCKETS_MAX * result.step_ms


def test_a_part_of_a_long_time_has_a_finer_grain() -> None:
    since_ms = T0 + DAY_MS
    part = {"since_ms": since_ms, "until_ms": since_ms + QUARTER_MS}
    assert of(9 * DAY_MS, **part).text == "5 seconds"
    # With many events nothing finer is counted than what is kept.
    assert of(9 * DAY_MS, FINE_ROWS_MAX + 1, **part).text == "15 minutes"
    assert not of(25_000, FINE_ROWS_MAX + 1).is_fine


def test_steps_divide_a_quarter_of_an_hour() -> None:
    assert [step_ms for step_ms in STEPS_MS if QUARTER_MS % step_ms] == []
