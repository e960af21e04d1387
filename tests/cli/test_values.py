"""What people type at the command line, and how values are shown to them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.cli import options, output
from tickwheel.model.policies import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30), ("5m", 300), ("1h30m", 5400), ("500ms", 0.5), ("2d", 172_800), ("1w", 604_800),
        ("1.5s", 1.5), ("0", 0), ("0s", 0), ("2", 2), ("2.25", 2.25), (" 1H 30M ", 5400),
        ("1d12h", 129_600), ("1m500ms", 60.5), ("0.0015s", 0.002), ("1.9996ms", 0.002),
    ],
)  # fmt: skip
def test_durations_are_parsed(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "s",
        "-5s",
        "5x",
        "5 parsecs",
        "30m1h",
        "1s1s",
        "1h30",
        "1e3",
        "inf",
        "nan",
        "½h",
        "9" * 5_000,
        "1..5s",
    ],
)
def test_an_invalid_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="30s, 5m"):
        parse_duration(text)


def test_a_duration_that_cannot_be_counted_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than the limit"):
        parse_duration("9" * 40 + "d")


def test_a_time_with_a_zone_is_that_moment() -> None:
    expected = datetime(2030, 1, 31, 8, 0, tzinfo=UTC)
    assert options.parse_time("2030-01-31T09:00:00+01:00") == expected
    assert options.parse_time("2030-01-31T08:00Z") == expected


def test_a_time_without_a_zone_is_local() -> None:
    result = options.parse_time("2030-01-31T09:00")
    assert result.tzinfo is not None
    assert result == datetime(2030, 1, 31, 9, 0).astimezone()  # local is the point


@pytest.mark.parametrize("text", ["", "tomorrow", "2030-13-01", "12:00", "0001-01-01T00:00:00x"])
def test_an_invalid_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ISO-8601"):
        options.parse_time(text)


def test_ids_are_parsed() -> None:
    assert options.parse_id("0") == 0
    assert options.parse_id(str(2**63 - 1)) == 2**63 - 1
    for text in ("", "-1", "x", "1.0", "٣", str(2**63), "9" * 5_000):
        with pytest.raises(ValueError, match="not a valid task id"):
            options.parse_id(text)


def test_properties_are_parsed() -> None:
    assert options.parse_property("a=b=c") == ("a", "b=c")
    assert options.parse_property("a=") == ("a", "")
    assert options.parse_property("a=1") == ("a", "1")
    for text, value in (("1", 1), ("-1.5e3", -1500.0), ("true", True), (" 2", 2)):
        result = options.parse_property(f"a:={text}")
        assert (result, type(result[1])) == (("a", value), type(value))
    for text in ("", "x", "null", '"x"', "[1]"):
        with pytest.raises(ValueError, match="a number, true or false"):
            options.parse_property(f"a:={text}")
    for text in ("a", "=b", "", ":=1"):
        with pytest.raises(ValueError, match="name=value"):
            options.parse_property(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"), (0.003, "3 ms"), (1, "1 s"), (12.5, "12.5 s"), (60, "1m 0s"),
        (5400, "1h 30m"), (90_061, "1d 1h"), (-2, "-2 s"),
    ],
)  # fmt: skip
def test_durations_are_formatted_for_people(seconds: float, text: str) -> None:
    assert output.format_duration(seconds) == text


@given(st.integers(min_value=0, max_value=2**53))
def test_any_time_of_a_daemon_is_formatted(at_ms: int) -> None:
    assert output.format_time(at_ms) and output.iso_time(at_ms)


def test_times_keep_their_milliseconds() -> None:
    at = datetime(2026, 3, 4, 5, 6, 7, 89_000, tzinfo=UTC)
    at_ms = (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
    assert output.iso_time(at_ms) == "2026-03-04T05:06:07.089Z"
    assert re.search(r"07\.089[+-]\d\d:\d\d$", output.format_time(at_ms)), "its zone is said"
    assert output.format_time(None) == "-"


def test_a_body_is_text_when_it_can_be() -> None:
    assert output.body_fields("grüße".encode()) == {"body": "grüße"}
    assert output.body_fields(b"\xff\x00") == {"body_base64": "/wA="}


def test_control_characters_are_escaped_for_the_terminal() -> None:
    assert output.printable("a\x1b[31mb\n\x07") == "a\\x1b[31mb\\n\\x07"
    assert output.printable("x" * 9, 5) == "xxxx…"
    assert output.body_text(b"\xff\xfe") == "(2 bytes that are not text)"
