"""Times and durations that people write: exact, or refused; never earlier than what was asked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from fractions import Fraction
from functools import partial
from itertools import groupby, product
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.odd_values import almost
from tickwheel.api.times import _TIME as FORM_OF_COMMANDS
from tickwheel.api.times import parse_time
from tickwheel.cli.options import parse_coming, parse_moment
from tickwheel.cli.schedules import _value
from tickwheel.model.policies import DURATION_MS_MAX, UNITS_MS, parse_duration, parse_shift
from tickwheel.reports import _TIME as FORM_OF_REPORTS
from tickwheel.reports import ReportError, at_ms

GAPS = {
    "Europe/Berlin": datetime(2030, 3, 31),  # noqa: DTZ001
    "America/New_York": datetime(2027, 3, 14),  # noqa: DTZ001
    "Australia/Lord_Howe": datetime(2026, 10, 4),  # noqa: DTZ001
    "America/Sao_Paulo": datetime(2018, 11, 4),  # noqa: DTZ001
    "Asia/Beirut": datetime(2027, 3, 28),  # noqa: DTZ001
    "Pacific/Apia": datetime(2011, 12, 30),  # noqa: DTZ001
}
"""Zone → a day with times that its clock skips."""


@contextmanager
def clock_of(zone: str) -> Iterator[None]:
    """This machine's local time is that of a zone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        yield
    time.tzset()


@pytest.fixture(params=GAPS)
def zone(request: pytest.FixtureRequest) -> Iterator[str]:
    with clock_of(request.param):
        yield request.param


def test_local_times_in_a_dst_gap_use_the_offset_before_it(zone: str) -> None:
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
     "2030-01-31x09:00", "2030-01-31T09:00:00+01:00:30", "2030-01-31T09:00+00:60",
     "", "10 0", "0001-01-01"],
)  # fmt: skip
def test_invalid_times_are_refused_with_form_and_value(text: str) -> None:
    with pytest.raises(ValueError, match="is not an ISO-8601 time; write for example") as refused:
        parse_time(text)
    assert repr(text) in str(refused.value)


def test_a_report_reads_the_times_that_commands_read() -> None:
    assert FORM_OF_REPORTS.pattern == FORM_OF_COMMANDS.pattern
    assert FORM_OF_REPORTS.flags == FORM_OF_COMMANDS.flags


@pytest.mark.parametrize("text", ["10 0", "1 2 3s", "5 m s", "1. 5s", "1 .5s", "٣s", "1m1h", "s"])
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write for example 30s"):
        parse_duration(text)


@pytest.mark.parametrize("parse", [parse_moment, parse_coming])
def test_a_date_without_separators_is_not_parsed_as_seconds(parse: object) -> None:
    with pytest.raises(ValueError, match="write 2026-11-29, or 20261129s"):
        parse("20261129")  # type: ignore[operator]


NUMBERS = st.from_regex(r"[0-9]{1,5}(\.[0-9]{1,8})?", fullmatch=True)
UNITS = sorted(UNITS_MS, key=lambda unit: -UNITS_MS[unit])


@given(st.dictionaries(st.sampled_from(UNITS), NUMBERS, min_size=1), st.sampled_from(["", " "]))
def test_durations_are_the_sum_of_their_parts_rounded_up(parts: dict[str, str], gap: str) -> None:
    written = [(parts[unit], unit) for unit in UNITS if unit in parts]
    exact = sum(Fraction(number) * UNITS_MS[unit] for number, unit in written)
    duration = parse_duration(gap.join(number + gap + unit for number, unit in written))
    assert round(duration * 1000) == -(-exact // 1)


def test_a_shift_never_rounds_to_an_earlier_time() -> None:
    assert (parse_shift("1.4ms"), parse_shift("-1.6ms")) == (0.002, -0.001)


# --- what is written almost as it must be, against readers that are slow and obvious --------------

MANY = settings(max_examples=10 * settings().max_examples)

DATES = ("YYYY-MM-DD", "YYYYMMDD")
CLOCKS = ("hh", "hh:mm", "hhmm", "hh:mm:ss", "hhmmss")
FRACTIONS = ["".join(both) for both in product(".,", ["f" * n for n in range(1, 7)])]
OFFSETS = ("", "Z", "z", *map("".join, product("+-", ["HH", "HHMM", "HH:MM"])))
FORMS = [
    *DATES,
    *map("".join, product(DATES, "Tt ", CLOCKS, OFFSETS)),
    *map("".join, product(DATES, "Tt ", [c for c in CLOCKS if "s" in c], FRACTIONS, OFFSETS)),
]
"""Every form of a time, with a letter for each of its digits. ``M`` is the month in front of the
separator, and the minute of the offset behind it."""


def shape_of(text: str) -> str:
    return "".join("0" if char in "YMDhmsfH0123456789" else char for char in text)


BY_SHAPE = {shape_of(form): form for form in FORMS}


def slow_time(text: str, zone: str) -> datetime | None:
    """The moment of a time, digit by digit of the only form that it can have; None: it has none."""
    text = text.strip()
    form = BY_SHAPE.get(shape_of(text))
    if form is None or not set(text) <= set("0123456789-+:.,TtZz "):
        return None
    head, tail = (form[:10], form[10:]) if form.startswith(DATES[0]) else (form[:8], form[8:])

    def digits(letter: str, part: str, first: int) -> str:
        return "".join(text[first + n] for n, char in enumerate(part) if char == letter)

    def number(letter: str) -> int:
        return int(digits(letter, tail, len(head)) or 0)

    year, month, day = (int(digits(letter, head, 0)) for letter in "YMD")
    micros = int((digits("f", tail, len(head)) + "000000")[:6])
    try:
        naive = datetime(year, month, day, number("h"), number("m"), number("s"), micros)  # noqa: DTZ001
        if tail[-1:] in ("Z", "z"):
            return naive.replace(tzinfo=UTC)
        if "H" in tail:
            if number("M") > 59:
                return None
            away = timedelta(hours=number("H"), minutes=number("M"))
            offset = timezone(-away if "-" in tail else away)
            return naive.replace(tzinfo=offset)
        return naive.replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


@st.composite
def written_times(draw: st.DrawFn, zone: str) -> str:
    """A time in one of the forms, at most moments changed by a character or two."""
    near = st.builds(lambda m: GAPS[zone] + timedelta(minutes=m), st.integers(-1_500, 3_000))
    far = st.datetimes(datetime(1973, 1, 1), datetime(2100, 1, 1))  # noqa: DTZ001
    at = draw(st.one_of(near, far))
    parts = {
        "Y": f"{at:%Y}", "D": f"{at:%d}", "h": f"{at:%H}", "m": f"{at:%M}", "s": f"{at:%S}",
        "f": f"{at:%f}", "H": f"{draw(st.integers(0, 25)):02}",
    }  # fmt: skip
    months = [*f"{at:%m}", *f"{draw(st.sampled_from([0, 15, 30, 45, 59, 60])):02}"]
    written = ""
    for char in draw(st.sampled_from(FORMS)):
        if char == "M":
            written, months = written + months[0], months[1:]
        elif parts.get(char):
            written, parts[char] = written + parts[char][0], parts[char][1:]
        else:
            written += char
    return draw(almost(written, "0123456789-+:.,TtZzW \u0661\xa0"))


@given(
    st.sampled_from(sorted(GAPS)).flatmap(
        lambda name: st.tuples(st.just(name), written_times(name))
    )
)
@MANY
def test_times_are_parsed_exactly_or_refused(written: tuple[str, str]) -> None:
    name, text = written
    wanted = slow_time(text, name)
    with clock_of(name):
        if wanted is None:
            for parse in (parse_time, partial(at_ms, timezone=name)):
                with pytest.raises((ValueError, ReportError), match="is not an ISO-8601 time"):
                    parse(text)
        else:
            assert parse_time(text) == wanted
            assert at_ms(text, name) == round(wanted.timestamp() * 1000)
            if not text.strip().isdigit():  # which may be a date or seconds
                assert parse_moment(text) == parse_coming(text) == wanted


def slow_duration(text: str) -> Fraction | None:
    """The milliseconds of a duration, word by word; None: it is none."""
    kinds = {" ": " "} | dict.fromkeys("0123456789.", "number")
    kinds |= dict.fromkeys("abcdefghijklmnopqrstuvwxyz", "unit")
    groups = groupby(text.strip().lower(), key=lambda char: kinds.get(char, "other"))
    words = [(kind, "".join(chars)) for kind, chars in groups if kind != " "]
    if [kind for kind, _ in words] == ["number"]:
        words.append(("unit", "s"))
    if not words or [kind for kind, _ in words] != ["number", "unit"] * (len(words) // 2):
        return None
    numbers, units = [word for _, word in words[::2]], [word for _, word in words[1::2]]
    if units != [unit for unit in UNITS if unit in units]:
        return None
    for number in numbers:
        whole, dot, fraction = number.partition(".")
        if not whole or (dot and not fraction) or "." in fraction:
            return None
    total = sum(Fraction(n) * UNITS_MS[unit] for n, unit in zip(numbers, units, strict=True))
    return Fraction(total) if -(-total // 1) <= DURATION_MS_MAX else None


@st.composite
def written_durations(draw: st.DrawFn) -> str:
    units = draw(st.lists(st.sampled_from(UNITS), min_size=1, max_size=4))
    if draw(st.booleans()):
        units = [unit for unit in UNITS if unit in units]
    gap = st.sampled_from(["", "", " ", "  "])
    number = st.builds(
        "{}{}".format,
        st.one_of(st.integers(0, 99), st.integers(0, 10**17)),
        st.sampled_from(["", "", ".5", ".0004", ".99999999"]),
    )
    text = "".join(draw(number) + draw(gap) + unit + draw(gap) for unit in units)
    return draw(almost(draw(st.sampled_from([text, text.upper()])), "0159. smhdwMx-+_e\u0663"))


@given(written_durations())
@MANY
def test_durations_are_parsed_exactly_or_refused(text: str) -> None:
    wanted = slow_duration(text)
    if wanted is None:
        with pytest.raises(ValueError, match="duration|each unit at most once|longer than"):
            parse_duration(text)
    else:
        assert round(parse_duration(text) * 1000) == -(-wanted // 1)
        assert round(parse_duration(text, up=False) * 1000) == wanted // 1
