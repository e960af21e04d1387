"""When occurrences are planned: over every change of a clock, against the zone's own arithmetic."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.vectors import vectors
from tickwheel.engine.timetables import MACROS, BadTiming, Timetable
from tickwheel.model.kinds import Schedule

ZONES = (
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",  # by half an hour
    "America/Santiago",  # at midnight
    "Africa/Casablanca",  # backwards in spring, for a month
)
BEGIN, END = datetime(2020, 1, 1, tzinfo=UTC), datetime(2030, 1, 1, tzinfo=UTC)
STEP = timedelta(minutes=15)
"""Every change of these zones is at a whole quarter of an hour."""


def schedule(**fields: Any) -> Schedule:
    given = {"cron": None, "timezone": "UTC", "every_ms": None, "anchor_ms": 0} | fields
    return Schedule("s", "t", b"", None, **given)


def ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def utc(text: str) -> int:
    return ms(datetime.fromisoformat(text).replace(tzinfo=UTC))


def local(text: str, zone: str, fold: int = 0) -> int:
    return ms(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold))


def times(from_ms: int, until_ms: int, **fields: Any) -> list[int]:
    return list(Timetable(schedule(**fields)).between(from_ms, until_ms))


def changes(zone: ZoneInfo) -> list[datetime]:
    """Every moment of ten years at which the offset changes."""
    results = []
    day = BEGIN
    while day < END:
        following = day + timedelta(days=1)
        if day.astimezone(zone).utcoffset() != following.astimezone(zone).utcoffset():
            at = day
            while at.astimezone(zone).utcoffset() == day.astimezone(zone).utcoffset():
                at += STEP
            results.append(at)
        day = following
    return results


ALL = [(name, at) for name in ZONES for at in changes(ZoneInfo(name))]


def test_the_zones_under_test_have_clock_changes() -> None:
    assert {(name, at.year) for name, at in ALL} == {
        (name, year) for name in ZONES for year in range(2020, 2030)
    }
    assert len(ALL) == sum(len(changes(ZoneInfo(name))) for name in ZONES) >= 100


def walls(zone: ZoneInfo, first: datetime, until: datetime) -> list[tuple[datetime, datetime]]:
    """(moment, wall clock) of each quarter of an hour."""
    count = (until - first) // STEP
    moments = [first + n * STEP for n in range(count + 1)]
    return [(at, at.astimezone(zone).replace(tzinfo=None)) for at in moments]


@pytest.mark.parametrize(("name", "at"), ALL, ids=lambda v: v if isinstance(v, str) else f"{v:%F}")
def test_a_fixed_time_is_once_a_day_over_every_change(name: str, at: datetime) -> None:
    zone = ZoneInfo(name)
    first, until = at - timedelta(days=2), at + timedelta(days=2)
    shown = walls(zone, first, until)
    for hour, minute in ((0, 0), (0, 30), (1, 0), (1, 45), (2, 0), (2, 15), (2, 30), (3, 0)):
        for gap in ("after", "skip"):
            for fold in ("first", "second", "both"):
                expected = set()
                for day in {wall.date() for _, wall in shown}:
                    wanted = datetime(day.year, day.month, day.day, hour, minute)  # noqa: DTZ001
                    hits = [moment for moment, wall in shown if wall == wanted]
                    if hits:
                        expected |= {"first": {hits[0]}, "second": {hits[-1]}}.get(fold, set(hits))
                    elif gap == "after":
                        # The first moment at which the clock shows something later.
                        expected |= {
                            b for (_, a_wall), (b, b_wall) in pairwise(shown)
                            if a_wall < wanted < b_wall and b_wall - a_wall > STEP
                        }  # fmt: skip
                times_ms = times(
                    ms(first), ms(until), cron=f"{minute} {hour} * * *", timezone=name,
                    gap=gap, fold=fold,
                )  # fmt: skip
                assert times_ms == sorted(map(ms, expected)), (hour, minute, gap, fold)


@pytest.mark.parametrize(("name", "at"), ALL, ids=lambda v: v if isinstance(v, str) else f"{v:%F}")
def test_every_n_goes_on_by_elapsed_time_over_every_change(name: str, at: datetime) -> None:
    zone = ZoneInfo(name)
    first, until = at - timedelta(hours=5), at + timedelta(hours=5)
    shown = walls(zone, first, until)
    assert times(ms(first), ms(until), cron="*/15 * * * *", timezone=name) == [
        ms(moment) for moment, _ in shown
    ]
    assert times(ms(first), ms(until), cron="30 * * * *", timezone=name) == [
        ms(moment) for moment, wall in shown if wall.minute == 30
    ]
    assert times(ms(first), ms(until), cron="*/15 2 * * *", timezone=name) == [
        ms(moment) for moment, wall in shown if wall.hour == 2
    ]


def test_berlins_clock_changes_match_the_document() -> None:
    berlin, day_ms = "Europe/Berlin", 86_400_000
    spring, autumn = utc("2026-03-28T12:00"), utc("2026-10-24T12:00")
    at = {"cron": "30 2 * * *", "timezone": berlin}
    assert times(spring, spring + day_ms, **at) == [utc("2026-03-29T01:00")]  # 3:00 by then
    assert times(spring, spring + day_ms, **at, gap="skip") == []
    assert times(autumn, autumn + day_ms, **at) == [utc("2026-10-25T00:30")]
    assert times(autumn, autumn + day_ms, **at, fold="second") == [utc("2026-10-25T01:30")]
    assert times(autumn, autumn + day_ms, **at, fold="both") == [
        utc("2026-10-25T00:30"), utc("2026-10-25T01:30"),
    ]  # fmt: skip
    nine = times(spring, spring + 3 * day_ms, cron="0 9 * * *", timezone=berlin)
    assert nine == [local(f"2026-03-{day}T09:00", berlin) for day in (29, 30, 31)]


def test_fixed_times_in_a_skipped_hour_are_one_occurrence() -> None:
    times_ms = times(
        utc("2026-03-29T00:00"), utc("2026-03-29T03:00"), cron="0,15,30 2 * * *",
        timezone="Europe/Berlin",
    )  # fmt: skip
    assert times_ms == [utc("2026-03-29T01:00")]


def test_a_day_that_a_zone_left_out() -> None:
    times_ms = times(
        utc("2011-12-29T00:00"), utc("2012-01-01T12:00"), cron="0 12 * * *", timezone="Pacific/Apia"
    )
    assert times_ms == [
        utc("2011-12-29T22:00"), utc("2011-12-30T10:00"), utc("2011-12-30T22:00"),
        utc("2011-12-31T22:00"),
    ]  # fmt: skip


def test_day_of_month_and_weekday_are_combined_with_or() -> None:
    times_ms = times(utc("2026-06-01T01:00"), utc("2026-06-16T00:00"), cron="0 0 13 * 5")
    assert times_ms == [utc(f"2026-06-{day}T00:00") for day in ("05", "12", "13")]


@pytest.mark.parametrize(("macro", "cron"), MACROS.items())
def test_macros(macro: str, cron: str) -> None:
    begin = utc("2026-06-01T01:00")
    one, other = Timetable(schedule(cron=macro)), Timetable(schedule(cron=cron))
    far = utc("2036-01-01T00:00")
    assert list(islice(one.between(begin, far), 5)) == list(islice(other.between(begin, far), 5))


def test_seconds_come_first() -> None:
    begin = utc("2026-06-01T01:00")
    assert times(begin, begin + 60_000, cron="*/20 * * * * *") == [
        begin, begin + 20_000, begin + 40_000, begin + 60_000,
    ]  # fmt: skip


@given(
    st.integers(1, 10**9), st.integers(0, 2 * 10**12), st.integers(0, 2 * 10**12),
    st.integers(0, 10**6),
)  # fmt: skip
def test_an_interval_is_its_anchor_and_a_multiple(
    every_ms: int, anchor_ms: int, at_ms: int, ahead_ms: int
) -> None:
    table = Timetable(schedule(every_ms=every_ms, anchor_ms=anchor_ms))
    planned_ms = table.after(at_ms)
    assert planned_ms is not None
    assert at_ms < planned_ms <= at_ms + every_ms
    assert (planned_ms - anchor_ms) % every_ms == 0
    newest_ms = table.newest(planned_ms, planned_ms + ahead_ms)
    assert newest_ms <= planned_ms + ahead_ms < newest_ms + every_ms


def test_the_newest_time_is_found_directly() -> None:
    table = Timetable(schedule(cron="*/10 * * * * *"))
    first, until = utc("2020-01-01T00:00"), utc("2026-01-01T00:00:05")
    assert table.newest(first, until) == utc("2026-01-01T00:00")
    nine = Timetable(schedule(cron="0 9 * * 1", timezone="Europe/Berlin"))
    assert nine.newest(local("2020-01-06T09:00", "Europe/Berlin"), until) == local(
        "2025-12-29T09:00", "Europe/Berlin"
    )


def test_planned_times_lie_between_start_and_end() -> None:
    fields = {"every_ms": 10, "start_ms": 25, "end_ms": 50}
    assert times(0, 100, **fields) == [30, 40, 50]
    assert Timetable(schedule(**fields)).after(50) is None


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"cron": "0 0 31 2 *"}, "cron", "never runs: there is no such day"),
        ({"cron": "0 0 30 2 *"}, "cron", "never runs"),
        ({"cron": "0 0 31 4,6,9,11 *"}, "cron", "never runs"),
        ({"cron": "* * */20 * 1L"}, "cron", "never runs: no time matches in 50 years"),
        ({"cron": "60 * * * *"}, "cron", "cannot be read: minute 60 is not a number from 0 to 59"),
        ({"cron": "* * *"}, "cron", "must have 5 fields, or 6 with seconds first, not 3"),
        ({"cron": ""}, "cron", "must have 5 fields, or 6 with seconds first, not 0"),
        ({"cron": "@never"}, "cron", "is not a valid macro; use @yearly"),
        ({"cron": "@every 1h"}, "cron", "is an interval; use every instead of cron (--every 1h"),
        ({"cron": "L/2 * * * *"}, "cron", "cannot be read"),
        ({"cron": "* * * * 1L/2"}, "cron", "cannot be read"),
        ({"cron": "*" * 256}, "cron", "256 characters; the limit is 255"),
        ({"cron": "@daily", "timezone": "Mars/Olympus"}, "timezone", "is not known"),
        ({"cron": "@daily", "timezone": "../etc/passwd"}, "timezone", "is not known"),
        ({"cron": "@daily", "timezone": ""}, "timezone", "is not known"),
    ],
)
def test_invalid_timings_name_the_field(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(BadTiming) as caught:
        Timetable(schedule(**fields))
    assert caught.value.field == field and words in str(caught.value)


# Cases of our own, from the rules of crontab(5). 1 June 2026 is a Monday.
READ = (
    ("0 0 * * SAT-SUN", (6, 7, 13, 14, 20, 21, 27, 28)),  # day 7 is Sunday, as day 0 is
    ("0 0 * * fri-sun", (5, 6, 7, 12, 13, 14, 19, 20, 21, 26, 27, 28)),
    ("0 0 * * 6-sun", (6, 7, 13, 14, 20, 21, 27, 28)),
    ("0 0 * * Sun-mon", (1, 7, 8, 14, 15, 21, 22, 28, 29)),
    ("0 0 * * SAT-SUN/2", (6, 13, 20, 27)),  # a step goes through the range
    ("0 0 * * SUN-SUN/3", (7, 14, 21, 28)),
    ("0 0 * * MON-MON/2", (1, 8, 15, 22, 29)),
    ("0 0 * * 7-7/2", (7, 14, 21, 28)),
    ("0 0 2-2/5 * *", (2,)),
    ("0 0 2-2/5,9 * *", (2, 9)),
    ("0 0 2-9/5 * *", (2, 7)),
    ("0 0 20/5 * *", (20, 25, 30)),  # an extension: from 20 to the end
    ("0 0 1 JUN-JUN/2 *", (1,)),
    ("0 0 1 6-6/1 *", (1,)),
    ("0 0 1 4-4/2 *", ()),
    ("0-0/7 0-0/7 3 * *", (3,)),
    ("0 0-0/7 0-0/23 3 * *", (3,)),
    ("0 0 */31 * *", (1,)),
    ("0 0 * * */7", (7, 14, 21, 28)),
    ("0 0 L,01 * *", (1, 30)),
    ("0 0 LW * *", (30,)),
    ("0 0 * * 5L", (26,)),
    ("0 0 * * fri#2,SUN#1", (7, 12)),
)


@pytest.mark.parametrize(("cron", "days"), READ)
def test_cron_expressions_follow_crontab(cron: str, days: tuple[int, ...]) -> None:
    table = Timetable(schedule(cron=cron), is_new=True)
    result = table.between(utc("2026-06-01T00:00"), utc("2026-06-30T23:59:59"))
    assert list(result) == [utc(f"2026-06-{day:02}T00:00") for day in days]


@pytest.mark.parametrize(
    ("cron", "words"),
    [
        ("0 0 1 FOO *", "month FOO is not a number from 1 to 12 or a name from JAN to DEC"),
        ("0 0 31 13 *", "month 13 is not a number from 1 to 12"),
        ("0 0 1 jan-foo *", "month FOO is not"),
        ("0 24 * * *", "hour 24 is not a number from 0 to 23"),
        ("60 0 0 * * *", "second 60 is not a number from 0 to 59"),
        ("0 0 0 * *", "day of month 0 is not a number from 1 to 31 or L or LW"),
        ("0 0 15W * *", "day of month 15W is not"),
        ("0 0 * * 8", "day of week 8 is not a number from 0 to 7 or a name from SUN to SAT"),
        ("0 0 * * MONDAY", "day of week MONDAY is not"),
        ("0 0 * * L", "day of week L is not"),
        ("0 0 * * 8L", "day of week 8 is not"),
        ("0 0 * * 1#6", "day of week 1#6 must have a number from 1 to 5 after the #, not 6"),
        ("1,,2 * * * *", "minute (nothing) is not"),
        ("-5 * * * *", "minute (nothing) is not"),
        ("\u0661 * * * *", "minute \u0661 is not"),
        ("5-1 * * * *", "minute 5-1 has a range that ends before it begins"),
        ("0 0 * * FRI-TUE", "day of week FRI-TUE has a range that ends before it begins"),
        (
            "0 0 * * 5-0",
            "day of week 5-0 has a range that ends before it begins; Sunday is 7 at the end of",
        ),
        ("*/0 * * * *", "minute */0 must have a step of at least 1, not 0"),
        ("*/ * * * *", "minute */ must have a step of at least 1, not (nothing)"),
        ("*/2/3 * * * *", "minute */2/3 must have a step of at least 1, not 2/3"),
        ("*/90 * * * *", "minute */90 has the step 90; the limit is 59"),
        ("7,*/60 * * * * *", "second */60 has the step 60; the limit is 59"),
        ("0 */24 * * *", "hour */24 has the step 24; the limit is 23"),
        ("0 0 1-9/32 * *", "day of month 1-9/32 has the step 32; the limit is 31"),
        ("0 0 1 2/13 *", "month 2/13 has the step 13; the limit is 12"),
        ("0 0 * * MON-MON/8", "day of week MON-MON/8 has the step 8; the limit is 7"),
        ("0 0 L/2 * *", "day of month L/2 must not have a step, because L is a single day"),
        ("0 0 1,LW/2 * *", "day of month LW/2 must not have a step, because LW is a single day"),
        ("0 0 ? * MON", "day of month ? has a ?, which is not supported; write * for any value"),
        ("0 0 12 1 * ?", "day of week ? has a ?, which is not supported; write * for any value"),
    ],
)
def test_invalid_cron_names_field_and_value(cron: str, words: str) -> None:
    with pytest.raises(BadTiming) as caught:
        Timetable(schedule(cron=cron), is_new=True)
    assert caught.value.field == "cron" and f"cannot be read: {words}" in str(caught.value)


ODD_ZONES = ("right/Europe/Berlin", "posix/Europe/Berlin", "posixrules", "Factory", "localtime")
# --- what others answer ----------------------------------------------------------------------

CLOCKS = {
    "cronsim": {},
    "croniter": {"fold": "both"},
    "robfig_cron": {"gap": "skip", "fold": "both"},
}
"""What a fixed time becomes at a change of the clock, as each of them has it."""
REFUSED = {
    r"\*/100": "has the step 100; the limit is 31",
    r"29-L|1-l": "L is not a number from 1 to 31",
    r"\dW": "W is not a number from 1 to 31",
    r"W\d": "W15 is not a number from 1 to 31",
    r"MON-FRI#1": "day of week MON-FRI is not a number",
    r"Apr-(Feb|Mar)|Nov-Mar|[Tt]hu-[Tt]ue|7-[a-z]|[a-z]-0": "a range that ends before it begins",
    r"^(\S+ ){6}": "must have 5 fields, or 6 with seconds first, not 7",
    r"\?": "has a ?, which is not supported; write * for any value",
}
"""Expressions that others read, and why they are refused here: each is more probably a mistake, or
has another meaning elsewhere."""
OTHERWISE = {
    # Both fields of days count where one begins with *, as in Vixie's cron.
    "0 16 */2 * sat": ["2023-05-13T16:00Z", "2023-05-27T16:00Z", "2023-06-03T16:00Z"],
    # A * in a list is every day, whatever else the list has.
    "0 0 * * *,sat#3": ["2019-01-15T00:00Z", "2019-01-16T00:00Z"],
    # A range of one value is that value, and not all of them.
    "0 0 * * Sun-Sun": ["2024-01-07T00:00Z", "2024-01-14T00:00Z"],
    "0 0 * * 7-7": ["2024-01-07T00:00Z", "2024-01-14T00:00Z"],
    "0 0 * * 0-0": ["2024-01-07T00:00Z", "2024-01-14T00:00Z"],
}
"""Expressions of croniter that mean something else here, and their times."""
ACCEPTED = {"0 0 * * 5,6#3": ["2024-01-05T00:00Z", "2024-01-12T00:00Z", "2024-01-19T00:00Z"]}
"""Expressions that others refuse, and their times: a list may have a weekday and an nth one."""


def as_here(name: str, row: list[Any], used: set[str]) -> Timetable | None:
    """The timetable of a row; None: the expression is refused, with the words that it must be."""
    cron, zone, clocks = row[0], row[1], CLOCKS[name]
    for pattern, words in REFUSED.items():
        if re.search(pattern, cron):
            used.add(pattern)
            with pytest.raises(BadTiming, match=re.escape(words)):
                Timetable(schedule(cron=cron, timezone=zone, **clocks), is_new=True)
            if "?" not in cron or pattern != r"\?":
                return None
            cron = cron.replace("?", "*")
    try:
        return Timetable(schedule(cron=cron, timezone=zone, **clocks), is_new=True)
    except BadTiming as error:
        assert "never runs" in str(error) and row[3] == [None], row
        return None


def moment(text: str) -> int:
    return ms(datetime.fromisoformat(text))


@pytest.mark.parametrize("name", CLOCKS)
def test_times_equal_those_of_other_libraries(name: str) -> None:
    given, used = vectors(name), set[str]()
    differ: list[object] = []
    for row in given["next"]:
        table = as_here(name, row, used)
        if table is None:
            continue
        wanted = row[3]
        if row[0] in OTHERWISE and len(row) == 4:
            wanted = OTHERWISE[row[0]]
            used.add(row[0])
        results = list(islice(table.between(moment(row[2]) + 1, 2**53), len(wanted)))
        if results != [moment(text) for text in wanted]:
            differ.append((row, results))
    for row in given.get("previous", ()):
        table, wanted = as_here(name, row, used), row[3]
        if table is None:
            continue
        first_ms = moment(wanted[-1])
        results = list(table.between(first_ms, moment(row[2]) - 1))
        if results[::-1] != [moment(text) for text in wanted]:
            differ.append((row, results))
        assert table.newest(first_ms, moment(row[2]) - 1) == moment(wanted[0])
    for row in given.get("matches", ()):
        table = as_here(name, row, used)
        if table is not None and (table.after(moment(row[2]) - 1) == moment(row[2])) != row[3]:
            differ.append(row)
    assert not differ
    if name == "croniter":
        assert used >= {*REFUSED, *OTHERWISE} - {r"\*/100"}


@pytest.mark.parametrize("name", CLOCKS)
def test_expressions_refused_by_others_are_refused(name: str) -> None:
    for cron in vectors(name)["refused"]:
        if cron in ACCEPTED:
            table = Timetable(schedule(cron=cron), is_new=True)
            results = list(islice(table.between(utc("2024-01-01T00:00"), 2**53), 3))
            assert results == [moment(text) for text in ACCEPTED[cron]]
        else:
            with pytest.raises(BadTiming) as caught:
                Timetable(schedule(cron=cron), is_new=True)
            assert caught.value.field == "cron"


@given(
    st.sampled_from(["0 0 1 jan *", "@weekly", "0 0 * * sun,fri", "*/5 9-17 * * mon-fri"]),
    st.data(),
)
def test_blanks_and_letters_are_those_of_ascii(cron: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(cron) - 1))
    other = data.draw(st.sampled_from([*LOOK_ALIKES.get(cron[at], ""), *OTHER_BLANKS]))
    changed = cron[:at] + other + cron[at + (cron[at] == " " or other in LOOK_ALIKES.values()) :]
    with pytest.raises(BadTiming):
        Timetable(schedule(cron=changed), is_new=True)
    assert Timetable(schedule(cron=f"\t{cron} \n".replace(" ", " \t")), is_new=True).after(0)


LOOK_ALIKES = {"s": "\u017f", "k": "\u212a", "i": "\u0131"}
"""Letters whose capital, or small one, is a letter of ASCII."""
OTHER_BLANKS = "\x0b\x0c\x1c\x1f\x85\xa0\u2003\u3000"

OF_BEFORE = (
    {"cron": "0\xa00 * * *"}, {"cron": "0 0 * * \u017fun"},
    {"cron": "*/90 * * * *"}, {"cron": "0 0 L/2 * *"}, {"cron": "0 0 1,LW/3 * *"},
    {"cron": "0 0 * * MON-MON/99"},
)  # fmt: skip
"""Timings that an earlier release accepted and a store can hold."""


@pytest.mark.parametrize("name", ODD_ZONES)
def test_a_timezone_must_be_an_iana_name(name: str) -> None:
    """Whatever other files a machine has among those of the zones."""
    with pytest.raises(BadTiming, match="it must be an IANA name such as Europe/Berlin or UTC"):
        Timetable(schedule(cron="@daily", timezone=name), is_new=True)
    for of_iana in (*ZONES, "UTC", "Etc/UTC", "GMT", "US/Eastern"):
        assert Timetable(schedule(cron="@daily", timezone=of_iana), is_new=True).after(0)


@pytest.mark.parametrize("fields", OF_BEFORE)
def test_stored_timings_refused_now_still_load(fields: dict[str, Any]) -> None:
    assert Timetable(schedule(**fields)).after(0) is not None
    with pytest.raises(BadTiming):
        Timetable(schedule(**fields), is_new=True)


def test_a_stored_zone_that_is_refused_now_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tickwheel.engine.timetables._iana_names", frozenset)
    fields = {"cron": "@daily", "timezone": "Europe/Berlin"}
    assert Timetable(schedule(**fields)).after(0) is not None
    with pytest.raises(BadTiming):
        Timetable(schedule(**fields), is_new=True)


@given(st.text(alphabet="*/-,0123456789LW#MONJAN @?", max_size=30), st.booleans())
def test_any_text_is_a_timetable_or_an_error(text: str, is_new: bool) -> None:
    try:
        table = Timetable(schedule(cron=text, timezone="Europe/Berlin"), is_new=is_new)
    except BadTiming:
        return
    planned_ms = table.after(utc("2026-03-28T23:59"))
    assert planned_ms is None or planned_ms > utc("2026-03-28T23:59")
