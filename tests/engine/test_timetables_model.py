"""Timetables against what is slow and obvious: every second around a change of a clock is looked
at, and every minute of some weeks; wall times against ``cronsim``'s own search; counts and newest
ones against a walk."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice, pairwise, product
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from engine.test_timetables import ALL, ms, schedule
from support.odd_values import almost
from tickwheel.engine.timetables import YEARS_MAX, BadTiming, Timetable, _WallTimes

SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)
AROUND = 3 * HOUR


def field(low: int, high: int, *, stars: bool = True) -> st.SearchStrategy[str]:
    number = st.integers(low, high)
    one = number.map(str)
    span = st.tuples(number, number).map(lambda two: f"{min(two)}-{max(two)}")
    # cronsim itself goes on beyond a range of one value; the sweep over every minute has those.
    wide = st.tuples(number, number).filter(lambda two: two[0] < two[1])
    step = st.tuples(wide.map("{0[0]}-{0[1]}".format), st.integers(1, 20)).map(
        lambda two: f"{two[0]}/{two[1]}"
    )
    some = st.lists(st.one_of(one, span, step), min_size=1, max_size=3).map(",".join)
    if not stars:
        return some
    return st.one_of(some, st.sampled_from(["*", "*/2", "*/7"]))


DAYS = st.one_of(field(1, 31), st.sampled_from(["L", "LW", "29", "31", "13"]))
WEEKDAYS = st.one_of(field(0, 7), st.sampled_from(["MON#5", "5L", "FRI#1", "SUN#2,WED"]))
TIMES = st.tuples(
    st.one_of(st.just("0"), field(0, 59)), field(0, 59), st.one_of(st.just("*"), field(0, 23))
)
FIXED = st.tuples(field(0, 59, stars=False), field(0, 59, stars=False), field(0, 23, stars=False))
EXPRESSIONS = st.tuples(st.one_of(TIMES, FIXED), DAYS, field(1, 12), WEEKDAYS).map(
    lambda parts: " ".join([*parts[0], *parts[1:]])
)
NIGHTLY = st.tuples(
    st.one_of(st.sampled_from(["0", "0,59", "*/20"]), field(0, 59)),
    field(0, 59),
    st.sampled_from(["*", "0-4,22-23", "*/2", "2", "1-3", "0", "23"]),
).map(lambda parts: " ".join([*parts, "* * *"]))
IN_THE_HOUR = "0 0,30 1-3 * * *"
SPRING, AUTUMN = (
    (name, at) for name, at in ALL if name == "Europe/Berlin" and at.year == 2026
)  # fmt: skip
MANY = settings(max_examples=3 * settings().max_examples, deadline=None)
MOMENTS = st.datetimes(datetime(1990, 1, 1), datetime(2090, 1, 1))  # noqa: DTZ001


def first_of(text: str, wall: datetime) -> datetime | None:
    """As cronsim finds it, from second to second."""
    try:
        return next(CronSim(text, wall - SECOND))
    except StopIteration:
        return None


@given(text=EXPRESSIONS, wall=MOMENTS)
@settings(max_examples=300, deadline=None)
def test_the_next_wall_time_equals_cronsims(text: str, wall: datetime) -> None:
    wall = wall.replace(microsecond=0)
    try:
        walls = _WallTimes(text)
    except Exception:  # no such day in these months, which is said when it is put
        return
    result = walls.at_or_after(wall, wall.year + YEARS_MAX)
    assert result == first_of(text, wall)


@given(
    text=NIGHTLY,
    change=st.sampled_from(ALL),
    gap=st.sampled_from(["after", "skip"]),
    fold=st.sampled_from(["first", "second", "both"]),
)
@example(text=IN_THE_HOUR, change=AUTUMN, gap="after", fold="first")
@example(text=IN_THE_HOUR, change=AUTUMN, gap="after", fold="second")
@example(text=IN_THE_HOUR, change=AUTUMN, gap="after", fold="both")
@example(text=IN_THE_HOUR, change=SPRING, gap="after", fold="first")
@example(text=IN_THE_HOUR, change=SPRING, gap="skip", fold="first")
@settings(max_examples=60, deadline=None)
def test_every_second_around_a_clock_change_matches(
    text: str, change: tuple[str, datetime], gap: str, fold: str
) -> None:
    name, at = change
    table = Timetable(schedule(cron=text, timezone=name, gap=gap, fold=fold))
    is_fixed = not any(part.startswith("*") for part in text.split()[:3])
    zone, cron = ZoneInfo(name), CronSim(text, datetime(2024, 1, 1))  # noqa: DTZ001
    first, until = ms(at - AROUND) // 1000, ms(at + AROUND) // 1000
    shown = [(t, datetime.fromtimestamp(t, zone).replace(tzinfo=None)) for t in range(first, until)]

    def matches(wall: datetime) -> bool:
        return (
            wall.hour in cron.hours and wall.minute in cron.minutes and wall.second in cron.seconds
        )

    moments: dict[datetime, list[int]] = {}
    for t, wall in shown:
        if matches(wall):
            moments.setdefault(wall, []).append(t)
    kept = {"first": slice(1), "second": slice(-1, None)}.get(fold, slice(None))
    expected = {t for hits in moments.values() for t in hits[kept if is_fixed else slice(None)]}
    for (_, a), (t, b) in pairwise(shown):
        jumped = [a + n * SECOND for n in range(1, (b - a) // SECOND)]
        if is_fixed and gap == "after" and any(map(matches, jumped)):
            expected.add(t)
    # What the clock shows once within these hours it may show again outside of them.
    low, high = ms(at - HOUR * 3 / 2), ms(at + HOUR * 3 / 2)
    wanted = sorted(t * 1000 for t in expected if low <= t * 1000 <= high)
    assert list(table.between(low, high)) == wanted
    for begin in (low, ms(at) - 1000, ms(at), ms(at) + 1000, ms(at + HOUR / 2)):
        assert table.count(begin, high, 10**9) == sum(t >= begin for t in wanted)
    if wanted:
        assert table.newest(wanted[0], high) == wanted[-1]


@given(
    given_=st.one_of(
        st.builds(dict, cron=EXPRESSIONS, timezone=st.sampled_from([name for name, _ in ALL])),
        st.builds(dict, every_ms=st.integers(1_000, 10**8), anchor_ms=st.integers(0, 2 * 10**12)),
    ),
    begin=MOMENTS,
    span=st.one_of(
        st.timedeltas(timedelta(), 2 * HOUR), st.timedeltas(timedelta(), 400 * 24 * HOUR)
    ),
    most=st.sampled_from([1, 10, 200]),
    ends=st.sampled_from([None, "start", "end"]),
    fold=st.sampled_from(["first", "second", "both"]),
)
@settings(max_examples=200, deadline=None)
def test_counting_equals_walking(
    given_: dict[str, Any], begin: datetime, span: timedelta, most: int, ends: str | None, fold: str
) -> None:
    begin_ms = ms(begin.replace(tzinfo=UTC))
    until_ms = begin_ms + span // timedelta(milliseconds=1)
    bounds = {}
    if ends is not None:
        bounds[f"{ends}_ms"] = (begin_ms + until_ms) // 2
    try:
        table = Timetable(schedule(**given_, **bounds, fold=fold))
    except ValueError:
        return
    walked: list[int] = []
    for planned_ms in table.between(begin_ms, until_ms):
        walked.append(planned_ms)
        if len(walked) == most:
            break
    assert table.count(begin_ms, until_ms, most) == len(walked)
    if walked and len(walked) < most:
        assert table.newest(walked[0], until_ms) == walked[-1]


Term = tuple[str, set[int]]
"""A field or one of its terms: the text, and the values that it means by crontab(5)."""


@st.composite
def terms(draw: st.DrawFn, low: int, high: int, names: str = "") -> Term:
    """A value, a range or all of them, with or without a step that goes through the range."""
    shown = dict(zip(range(low, high + 1), names.split(), strict=False))
    first = draw(st.integers(low, high))
    last = draw(st.one_of(st.just(first), st.integers(first, high)))

    def text_of(value: int) -> str:
        named = shown.get(value % 7 if value == 7 and "SUN" in names else value)
        return draw(st.sampled_from([str(value), named, named.lower()])) if named else str(value)

    begin, end = text_of(first), text_of(last)
    match draw(st.sampled_from(["value", "range", "range", "all", "on"])):
        case "value":
            return begin, {first}
        case "all":
            text, first, last = "*", low, high
        case "on":
            step = draw(st.integers(1, high))
            start = 0 if begin.upper() == "SUN" else first  # day 0 here, as in a range
            return f"{begin}/{step}", set(range(start, high + 1, step))
        case _:
            if end.upper() == "SUN" and begin == "7":
                begin = "SUN"
            text = f"{begin}-{end}"
            if begin.upper() == "SUN":  # as the beginning of a range it is day 0
                first = 0
                if end.upper() == "SUN":
                    last = 0
    step = draw(st.one_of(st.none(), st.integers(1, high)))
    if step is not None:
        return f"{text}/{step}", set(range(first, last + 1, step))
    return text, set(range(first, last + 1))


def some_terms(low: int, high: int, names: str = "") -> st.SearchStrategy[Term]:
    one = terms(low, high, names)
    return st.one_of(one, st.lists(one, min_size=1, max_size=3).map(together))


def together(found: list[Term]) -> Term:
    return ",".join(text for text, _ in found), set().union(*(values for _, values in found))


FIVE = st.tuples(
    some_terms(0, 59),
    some_terms(0, 23),
    some_terms(1, 31),
    some_terms(1, 12, "JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC"),
    some_terms(0, 7, "SUN MON TUE WED THU FRI SAT"),
)
MINUTE = timedelta(minutes=1)


def matching(parts: tuple[Term, ...]) -> Callable[[datetime], bool]:
    """Whether a minute matches five fields, as crontab(5) says."""
    minutes, hours, days, months, weekdays = (values for _, values in parts)
    is_either = not (parts[2][0].startswith("*") or parts[4][0].startswith("*"))

    def matches(at: datetime) -> bool:
        of_month = at.day in days
        of_week = at.isoweekday() in weekdays or at.isoweekday() % 7 in weekdays
        is_day = of_month or of_week if is_either else of_month and of_week
        return at.minute in minutes and at.hour in hours and at.month in months and is_day

    return matches


@given(parts=FIVE, begin=st.datetimes(datetime(2024, 1, 1), datetime(2026, 12, 31)))  # noqa: DTZ001
@settings(max_examples=150, deadline=None)
def test_every_minute_of_some_days_matches_as_crontab_says(
    parts: tuple[Term, ...], begin: datetime
) -> None:
    text, matches = " ".join(text for text, _ in parts), matching(parts)
    begin = begin.replace(second=0, microsecond=0, tzinfo=UTC)
    shown = [begin + n * MINUTE for n in range(8 * 24 * 60)]
    expected = [ms(at) for at in shown if matches(at)]
    try:
        table = Timetable(schedule(cron=text), is_new=True)
    except BadTiming as error:
        assert "never runs" in str(error) and not expected, text
        return
    until = begin + 8 * 24 * HOUR - MINUTE
    assert list(table.between(ms(begin), ms(until))) == expected, text


# --- fields that are written almost as they must be ----------------------------------------------


class Field(NamedTuple):
    """A field of an expression: where it stands among others that match, and what it may hold."""

    among: str
    value_of: Callable[[datetime], int]
    terms: dict[str, set[int]]
    """Every term of one value, one range or all, in capitals, and its values in January 2024, or
    in that year."""
    steps: set[str]


def spans(low: int, high: int, names: str = "") -> dict[str, set[int]]:
    spellings = {n: [str(n), f"{n:02}"] for n in range(low, high + 1)}
    for n, name in zip(spellings, names.split(), strict=False):
        spellings[n].append(name)
    result = {"*": set(range(low, high + 1))}
    for first, last in product(spellings, repeat=2):
        for begin, end in product(spellings[first], spellings[last]):
            if begin.isdigit() and first == last:
                result[begin] = {first}
            if first <= last:
                result[f"{begin}-{end}"] = set(range(first, last + 1))
    return result | {name: {n} for n, name in zip(spellings, names.split(), strict=False)}


def weekday_spans() -> dict[str, set[int]]:
    """The numbers of weekdays. SUN is 7 at the end of a range that does not begin with it."""
    names = "SUN MON TUE WED THU FRI SAT"
    result = spans(0, 7, names)
    for begin, values in list(result.items()):
        if begin.isdigit() and values != {0}:
            result[f"{begin}-SUN"] = set(range(min(values), 8))
    for n, name in enumerate(names.split()[1:], 1):
        result[f"{name}-SUN"] = set(range(n, 8))
    return result


JANUARY = [datetime(2024, 1, day, tzinfo=UTC) for day in range(1, 32)]


def of_weekdays() -> dict[str, set[int]]:
    """The terms of weekdays with no step: the last and the nth ones of January."""
    result: dict[str, set[int]] = {}
    for text, values in spans(0, 7, "SUN MON TUE WED THU FRI SAT").items():
        if len(values) > 1 or "-" in text:
            continue
        (day,) = values
        days = [at.day for at in JANUARY if at.isoweekday() % 7 == day % 7]
        if text.isdigit():
            result[f"{text}L"] = {days[-1]}
        for n in range(1, 6):
            result[f"{text}#{n}"] = set(days[n - 1 : n])
    return result


def steps(high: int) -> set[str]:
    return {text for n in range(1, high + 1) for text in (str(n), f"{n:02}")}


MONTH_NAMES = "JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC"
FIELDS = (
    Field("{} * * * *", lambda at: at.minute, spans(0, 59), steps(59)),
    Field("0 {} * * *", lambda at: at.hour, spans(0, 23), steps(23)),
    Field("0 0 {} * *", lambda at: at.day, spans(1, 31) | {"L": {31}, "LW": {31}}, steps(31)),
    Field("0 0 1 {} *", lambda at: at.month, spans(1, 12, MONTH_NAMES), steps(12)),
    Field("0 0 * 1 {}", lambda at: at.day, weekday_spans(), steps(7)),
)
NTH = of_weekdays()


def slow_field(field: Field, text: str) -> set[int] | None:
    """The values of a field, each term looked up; None: one is none."""
    result = set[int]()
    is_weekday = field.among.endswith("{}")
    for term in text.upper().split(","):
        span, slash, step = term.partition("/")
        values = field.terms.get(span)
        if is_weekday and term in NTH:
            result |= NTH[term]
            continue
        if values is None or (slash and (step not in field.steps or span in ("L", "LW"))):
            return None
        if slash and len(values) == 1 and "-" not in span:
            values = set(range(min(values), max(field.terms["*"]) + 1))  # from there to the end
        values = set(sorted(values)[:: int(step or 1)])
        if is_weekday:
            values = {at.day for at in JANUARY if {at.isoweekday(), at.isoweekday() % 7} & values}
        result |= values
    return result


@st.composite
def written_fields(draw: st.DrawFn) -> tuple[Field, str]:
    field = draw(st.sampled_from(FIELDS))
    names = sorted(field.terms) + (sorted(NTH) if field.among.endswith("{}") else [])
    texts = []
    for _ in range(draw(st.sampled_from([1, 1, 2]))):
        text = draw(st.sampled_from(names))
        step = draw(st.one_of(st.just(""), st.sampled_from(sorted(field.steps))))
        texts.append(draw(st.sampled_from([text, text.lower()])) + (step and f"/{step}"))
    return field, draw(almost(",".join(texts), "0123456789-/,*LW#?SUNJAe\u0661\u017f"))


@given(written_fields())
@MANY
def test_fields_are_parsed_exactly_or_refused(written: tuple[Field, str]) -> None:
    field, text = written
    assume(text and not re.search(r"[0-9]{3}", text))  # 005 is 5
    wanted = slow_field(field, text)
    try:
        table = Timetable(schedule(cron=field.among.format(text)), is_new=True)
    except BadTiming as error:
        assert wanted is None or (not wanted and "never runs" in str(error)), (text, str(error))
        return
    first = JANUARY[0]
    ends = {"{}": HOUR, "0 {}": 24 * HOUR, "0 0 {}": 31 * 24 * HOUR, "0 0 * 1 {}": 31 * 24 * HOUR}
    end = first + ends.get(field.among.partition("}")[0] + "}", 366 * 24 * HOUR)
    times = [datetime.fromtimestamp(t / 1000, UTC) for t in table.between(ms(first), ms(end) - 1)]
    assert {field.value_of(at) for at in times} == wanted, text


YEARS = {
    "America/Sao_Paulo": 2018,  # at midnight
    "Asia/Beirut": 2026,  # at midnight, the day before at its end
    "America/Havana": 2026,  # at midnight, and at one
    "Australia/Lord_Howe": 2026,  # by half an hour
    "Antarctica/Troll": 2026,  # by two hours
    "Pacific/Apia": 2011,  # by a day
    "Asia/Pyongyang": 2018,  # by half an hour, for good
    "Africa/Casablanca": 2026,  # backwards in spring
    "Europe/Berlin": 2030,
    "Europe/Dublin": 2026,
}
"""Zone → a year in which its clock is changed."""


def days_of_change(name: str, year: int) -> list[tuple[str, datetime]]:
    """The days of UTC on which the zone's offset changes."""
    zone, first = ZoneInfo(name), datetime(year, 1, 1, tzinfo=UTC)
    days = [first + timedelta(days=n) for n in range(366)]
    offsets = [day.astimezone(zone).utcoffset() for day in days]
    return [(name, day) for day, (a, b) in zip(days, pairwise(offsets), strict=False) if a != b]


def mostly_any(low: int, high: int) -> st.SearchStrategy[Term]:
    """Some terms of a date, or oftener every one, so that something matches in two days."""
    every = st.just(("*", set(range(low, high + 1))))
    return st.one_of(every, every, some_terms(low, high))


NIGHT: list[Term] = [
    ("0", {0}), ("2", {2}), ("23", {23}), ("0-3", {0, 1, 2, 3}), ("1-3/2", {1, 3}),
    ("22,1", {1, 22}),
]  # fmt: skip
"""Hours in which clocks are changed."""
HOURS = st.one_of(st.sampled_from(NIGHT), st.sampled_from(NIGHT), some_terms(0, 23))
AT_SOME_TIME = st.tuples(
    some_terms(0, 59), HOURS, mostly_any(1, 31), mostly_any(1, 12), mostly_any(0, 7)
)
CHANGES = [change for name, year in YEARS.items() for change in days_of_change(name, year)]


def test_every_zone_of_the_sweep_has_changes() -> None:
    assert {name for name, _ in CHANGES} == set(YEARS)


@lru_cache(maxsize=1)
def shown_around(name: str, at: datetime) -> list[tuple[datetime, datetime]]:
    """(moment, wall clock) of each minute of three days before and after."""
    moments = [at + n * MINUTE for n in range(-3 * 24 * 60, 3 * 24 * 60)]
    zone = ZoneInfo(name)
    return [(moment, moment.astimezone(zone).replace(tzinfo=None)) for moment in moments]


def check_around(parts: tuple[Term, ...], name: str, at: datetime, gap: str, fold: str) -> None:
    """See that the times of a day before and after ``at`` are those of each minute's clock."""
    text, matches = " ".join(text for text, _ in parts), matching(parts)
    is_fixed = not any(text.startswith("*") for text, _ in parts[:2])
    # What the clock shows once in these two days it may show again within two more.
    low, high = at - 24 * HOUR, at + 24 * HOUR
    shown = shown_around(name, at)
    hits: dict[datetime, list[datetime]] = {}
    for moment, wall in shown:
        if matches(wall):
            hits.setdefault(wall, []).append(moment)
    kept = {"first": slice(1), "second": slice(-1, None)}.get(fold, slice(None))
    expected = {hit for both in hits.values() for hit in both[kept if is_fixed else slice(None)]}
    if is_fixed and gap == "after":
        for (_, a), (moment, b) in pairwise(shown):
            if any(matches(a + n * MINUTE) for n in range(1, (b - a) // MINUTE)):
                expected.add(moment)
    wanted = sorted(ms(moment) for moment in expected if low <= moment <= high)
    try:
        table = Timetable(schedule(cron=text, timezone=name, gap=gap, fold=fold), is_new=True)
    except BadTiming as error:
        assert "never runs" in str(error) and not wanted, text
        return
    assert list(table.between(ms(low), ms(high))) == wanted, text
    assert table.count(ms(low), ms(high), 10**9) == len(wanted)
    if wanted:
        assert table.newest(wanted[0], ms(high)) == wanted[-1]


@given(
    parts=AT_SOME_TIME,
    change=st.sampled_from(CHANGES),
    ahead=st.integers(-12 * 60, 36 * 60),
    gap=st.sampled_from(["after", "skip"]),
    fold=st.sampled_from(["first", "second", "both"]),
)
@MANY
def test_minutes_around_a_clock_change_follow_the_rules(
    parts: tuple[Term, ...], change: tuple[str, datetime], ahead: int, gap: str, fold: str
) -> None:
    name, day = change
    check_around(parts, name, day + ahead * MINUTE, gap, fold)


@pytest.mark.parametrize(
    ("name", "day"), CHANGES, ids=lambda v: v if isinstance(v, str) else f"{v:%F}"
)
def test_each_rule_holds_at_each_change(name: str, day: datetime) -> None:
    """Times that each clock change skips or shows twice."""
    every = [("*", set(range(low, high + 1))) for low, high in ((1, 31), (1, 12), (0, 7))]
    at = day + 12 * HOUR
    for gap, fold in (("after", "first"), ("skip", "second"), ("after", "both")):
        for hours in (("0-3,22-23", {0, 1, 2, 3, 22, 23}), ("*", set(range(24)))):
            check_around((("15,45", {15, 45}), hours, *every), name, at, gap, fold)


FOLDS = ("first", "second", "both")
RARE = (
    "0 0 29 2 */7", "59 59 23 29 2 */7", "* * * 29 2 */7", "0 0 31 12 SUN#5", "0 0 L 2 */7",
    "0 0 31 1-12/11 *", "30 2 */31 3 0", "0 0 29 2 *", "@yearly", "* * * * * *", "*/5 * * * *",
    "0-59 0-59 0-23 * * *", "0-59 0-59 2 * * *", "0 9 * * 1-5",
)  # fmt: skip
"""From never to every second; of those in between the fewest are years apart."""


@pytest.mark.parametrize("text", RARE)
@pytest.mark.parametrize(
    ("fold", "gap"),
    [
        ("both", "after"),
        # The costliest is quick.
        *(pytest.param(fold, "skip", marks=pytest.mark.slow) for fold in FOLDS),
        *(pytest.param(fold, "after", marks=pytest.mark.slow) for fold in FOLDS[:2]),
    ],
)
def test_questions_have_a_bounded_cost(text: str, fold: str, gap: str) -> None:
    """However rare its times are, and however many lie between."""
    table = Timetable(schedule(cron=text, timezone="Europe/Berlin", fold=fold, gap=gap))
    for now in (datetime(2026, 3, 28, 1), datetime(2026, 10, 24, 23), datetime(2088, 3, 1)):  # noqa: DTZ001
        now_ms = ms(now.replace(tzinfo=UTC))
        first_ms = table.after(now_ms)
        assert cost(table, table.after, now_ms) <= 1_000
        assert cost(table, some, table, now_ms, 100) <= 6_000
        assert cost(table, some, table, 0, 1_001) <= 40_000
        for hours in (1, 24, 24 * 366, 24 * 366 * 40):
            until_ms = now_ms + hours * 3_600_000
            assert cost(table, table.count, now_ms, until_ms, 1_000) <= 4_000
            if first_ms is not None and first_ms <= until_ms:
                assert cost(table, table.newest, first_ms, until_ms) <= 3_000


def some(table: Timetable, from_ms: int, count: int) -> list[int]:
    """As ``show`` and a backfill ask for."""
    return list(islice(table.between(from_ms, 2**53), count))


def cost(table: Timetable, question: Callable[..., object], *given: object) -> int:
    before = table.steps
    question(*given)
    return table.steps - before
