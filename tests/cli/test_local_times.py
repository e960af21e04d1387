"""Times and durations that people write: exact, or refused; never earlier than what was asked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.api.times import parse_time
from tickwheel.cli.options import parse_coming, parse_moment
from tickwheel.cli.schedules import _value
from tickwheel.model.policies import UNITS_MS, parse_duration, parse_shift

GAPS = {
    "Europe/Berlin": datetime(2030, 3, 31),  # noqa: DTZ001
    "America/New_York": datetime(2027, 3, 14),  # noqa: DTZ001
    "Australia/Lord_Howe": datetime(2026, 10, 4),  # noqa: DTZ001
    "America/Sao_Paulo": datetime(2018, 11, 4),  # noqa: DTZ001
    "Asia/Beirut": datetime(2027, 3, 28),  # noqa: DTZ001
    "Pacific/Apia": datetime(2011, 12, 30),  # noqa: DTZ001
}
"""Zone → a day with times that its clock skips."""


@pytest.fixture(params=GAPS)
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


def test_every_local_time_around_a_gap_is_that_of_the_offset_before(zone: str) -> None:
    clock, skipped = ZoneInfo(zone), 0
    for minutes in range(-60, 26 * 60, 10):
        naive = GAPS[zone] + timedelta(minutes=minutes)
        wanted = naive.replace(tzinfo=clock).astimezone(UTC)
        skipped += wanted.astimezone(clock).replace(tzinfo=None) != naive
        assert parse_time(naive.isoformat()) == wanted
        assert parse_moment(naive.isoformat()) == parse_coming(naive.isoformat()) == wanted
        assert _value("start", naive) == _value("start", naive.isoformat()) == wanted
    assert skipped >= 3


@pytest.mark.parametrize(
    "text",
    ["2030-01-31T09.5Z", "2030-01-31T09:30.5Z", "2030-01-31T0930.5Z", "2030-01-31T09,5",
     "2030-01-31T09:30,5", "2030-01-31T09:00:00.1234567Z", "2030-W05-4", "2030-0131",
     "2030-01-31x09:00", "2030-01-31T09:00:00+01:00:30", "", "10 0", "0001-01-01"],
)  # fmt: skip
def test_other_times_are_refused_with_form_and_value(text: str) -> None:
    with pytest.raises(ValueError, match="is no ISO-8601 time; write for example") as refused:
        parse_time(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize("text", ["10 0", "1 2 3s", "5 m s", "1. 5s", "1 .5s", "٣s", "1m1h", "s"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write for example 30s"):
        parse_duration(text)


@pytest.mark.parametrize("parse", [parse_moment, parse_coming])
def test_a_date_without_signs_is_not_taken_for_seconds(parse: object) -> None:
    with pytest.raises(ValueError, match="write 2026-11-29, or 20261129s"):
        parse("20261129")  # type: ignore[operator]


NUMBERS = st.from_regex(r"[0-9]{1,5}(\.[0-9]{1,8})?", fullmatch=True)
UNITS = sorted(UNITS_MS, key=lambda unit: -UNITS_MS[unit])


@given(st.dictionaries(st.sampled_from(UNITS), NUMBERS, min_size=1), st.sampled_from(["", " "]))
def test_durations_are_the_sum_of_their_parts_rounded_up(parts: dict[str, str], gap: str) -> None:
    written = [(parts[unit], unit) for unit in UNITS if unit in parts]
    exact = sum(Fraction(number) * UNITS_MS[unit] for number, unit in written)
    found = parse_duration(gap.join(number + gap + unit for number, unit in written))
    assert round(found * 1000) == -(-exact // 1)


def test_a_shift_never_makes_anything_earlier_than_asked() -> None:
    assert (parse_shift("1.4ms"), parse_shift("-1.6ms")) == (0.002, -0.001)
