"""Planned times of schedules, and the heap of schedules that are due next.

``Timetable`` computes planned times, for cron in a time zone or for an interval. It is pure: the
time is an argument, and time zone data is constant. ``cronsim`` parses the fields of a cron
expression. This module finds matching wall times by arithmetic on months, days and times of day, so
that a rare match costs one step per month. It follows a time zone's clock from one change of its
offset to the next:

* A *fixed time* (none of the fields second, minute and hour begins with ``*``) that the clock skips
  is planned at the end of the gap or not at all (``gap``). A repeated fixed time is planned at its
  first or second occurrence, or at both (``fold``).
* Any other time means "every n". It is planned whenever the wall clock matches.

A planned time is a whole number of milliseconds, or of seconds with cron. Only ``between`` iterates
over planned times. ``Timetable.steps`` counts the work.

``ScheduleHeap`` holds the schedules of an engine, and knows which is due next and which are waiting
for a task to end. It holds the state and the common operations on it; the rules are in
``schedules.py``. Invariants:

* A schedule with a run in a batch that is not durable is *staged*, and does not change until the
  batch has landed, or has been refused and the run undone. So undoing a run restores the schedule
  exactly.
* Every schedule that is due and not staged has exactly one valid entry on the heap.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, NamedTuple
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from tickwheel.engine.queues import DueNames

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from tickwheel.model.kinds import Schedule, ScheduleRow

MACROS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_BLANKS = " \t\r\n"
CRON_LENGTH_MAX = 255
YEARS_MAX = 50
"""How many years ahead to search for a match."""
_DAY_S = 86_400
_HALF_YEAR_S = 183 * _DAY_S
_STRIDE_S = 7 * _DAY_S
"""Minimum time between two changes of a zone's offset, except in a few zones before 1972."""
_OFFSET_CHANGE_MAX_S = 26 * 3_600
"""Upper bound on a change of a zone's offset."""
_FAR_S = int(datetime(9900, 1, 1, tzinfo=UTC).timestamp())
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 (a wall clock, of any zone)
_EPOCH_UTC = _EPOCH.replace(tzinfo=UTC)


def shown_time(at_ms: int) -> str:
    """Return a time in UTC as text for messages, with milliseconds if it has any."""
    try:
        moment = _EPOCH_UTC + timedelta(seconds=at_ms // 1000)
    except OverflowError:
        return f"{at_ms} ms"
    text = moment.strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{at_ms % 1000:03d}Z" if at_ms % 1000 else f"{text}Z"


_SOME_DAY = datetime(2024, 1, 1)  # noqa: DTZ001


class BadTiming(ValueError):
    """A cron expression, a zone or an interval is not valid. ``field`` names it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field


class Timetable:
    """The planned times of one schedule, ascending."""

    def __init__(self, schedule: Schedule, *, is_new: bool = False) -> None:
        """Raise BadTiming for an invalid cron expression or zone. With ``is_new``, also refuse
        values that earlier versions accepted and that a store may contain."""
        self._start_ms = schedule.start_ms
        self._end_ms = schedule.end_ms
        self._every_ms, self._anchor_ms = schedule.every_ms, schedule.anchor_ms
        self._calls = 0
        self._cron: _Cron | None = None
        if schedule.cron is not None:
            zone = zone_of(schedule.timezone, is_new=is_new)
            self._cron = _Cron(_fields(schedule.cron, is_new=is_new), zone, schedule)

    @property
    def steps(self) -> int:
        """The work so far: the number of planned times, months and weeks examined."""
        return self._calls + (0 if self._cron is None else self._cron.steps)

    def after(self, at_ms: int) -> int | None:
        """Return the first planned time after ``at_ms``, or None if there is none."""
        self._calls += 1
        if self._start_ms is not None:
            at_ms = max(at_ms, self._start_ms - 1)
        if self._cron is not None:
            planned_ms = self._cron.after(at_ms)
        else:
            assert self._every_ms is not None
            passed = (at_ms - self._anchor_ms) // self._every_ms
            planned_ms = self._anchor_ms + (passed + 1) * self._every_ms
        if planned_ms is None or (self._end_ms is not None and planned_ms > self._end_ms):
            return None
        return planned_ms

    def newest(self, first_ms: int, until_ms: int) -> int:
        """Return the last planned time up to ``until_ms``. ``first_ms`` must be an earlier planned
        time. The search goes back in doubling steps, and then bisects the last step."""
        newest_ms = low_ms = first_ms
        high_ms, back_ms = until_ms, 1_000
        while high_ms > first_ms:
            at_ms = max(first_ms, until_ms - back_ms)
            planned_ms = self.after(at_ms)
            if planned_ms is not None and planned_ms <= until_ms:
                newest_ms = low_ms = planned_ms
                break
            high_ms, back_ms = at_ms, back_ms * 2
        while low_ms < high_ms:
            middle_ms = (low_ms + high_ms) // 2
            planned_ms = self.after(middle_ms)
            if planned_ms is not None and planned_ms <= until_ms:
                newest_ms = low_ms = planned_ms
            else:
                high_ms = middle_ms
        return newest_ms

    def count(self, first_ms: int, until_ms: int, limit: int) -> int:
        """Return the number of planned times from ``first_ms`` to ``until_ms``, both inclusive, at
        most ``limit``, within ``YEARS_MAX`` years."""
        first_ms = max(first_ms, self._start_ms or 0)
        if self._end_ms is not None:
            until_ms = min(until_ms, self._end_ms)
        if first_ms > until_ms:
            return 0
        self._calls += 1
        if self._cron is not None:
            return min(limit, self._cron.count(-(-first_ms // 1000), until_ms // 1000, limit))
        assert self._every_ms is not None
        passed = (first_ms - 1 - self._anchor_ms) // self._every_ms
        return min(limit, (until_ms - self._anchor_ms) // self._every_ms - passed)

    def between(self, first_ms: int, until_ms: int) -> Iterator[int]:
        """Yield the planned times from ``first_ms`` to ``until_ms``, both inclusive."""
        planned_ms = self.after(first_ms - 1)
        while planned_ms is not None and planned_ms <= until_ms:
            yield planned_ms
            planned_ms = self.after(planned_ms)


def zone_of(name: str, *, is_new: bool = False) -> ZoneInfo:
    """Return the time zone with this name. Raise BadTiming if it is unknown. With ``is_new``, also
    refuse files in the zone folder whose names are not IANA names."""
    try:
        zone = ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        zone = None
    if zone is None or (is_new and name != "UTC" and name not in _iana_names()):
        raise BadTiming(
            "timezone", "is not known; it must be an IANA name such as Europe/Berlin or UTC"
        )
    return zone


@cache
def _iana_names() -> frozenset[str]:
    """Return the names of zones. The result is cached, because listing opens every zone file."""
    return frozenset(available_timezones() - {"Factory", "localtime"})


class _Cron:
    """A cron expression in a time zone. Moments are in seconds since 1970."""

    def __init__(self, fields: list[str], zone: ZoneInfo, schedule: Schedule) -> None:
        _check(fields)
        self._walls = _WallTimes(" ".join(fields))
        self._zone = zone
        is_fixed = not any(field.startswith("*") for field in fields[:-3])
        self._fires_after_gap = is_fixed and schedule.gap == "after"
        self._fold = schedule.fold if is_fixed else "both"
        self._steps = 0
        self._constant_span = 0, -1, 0
        """(first, last, offset) of the last examined span of constant offset, kept as a cache."""

    @property
    def steps(self) -> int:
        return self._steps + self._walls.steps

    def after(self, at_ms: int) -> int | None:
        at = at_ms // 1000 + 1
        if at > _FAR_S:
            return None
        planned = self._from(at)
        return None if planned is None else planned * 1000

    def _offset(self, at: int) -> int:
        first, last, offset = self._constant_span
        if first <= at <= last:
            return offset
        moment = _EPOCH_UTC + timedelta(seconds=at)
        offset_delta = moment.astimezone(self._zone).utcoffset()
        assert offset_delta is not None
        return offset_delta.days * _DAY_S + offset_delta.seconds

    def _from(self, at: int) -> int | None:
        """Return the first planned moment from ``at`` on, or None."""
        until_year = _wall(at).year + YEARS_MAX
        if self._fires_after_gap and self._jumps_over(at):
            return at
        while True:
            self._steps += 1
            offset = self._offset(at)
            wall = _wall(at + offset)
            match = self._walls.at_or_after(wall, until_year)
            if match is None:
                return None
            candidate = at + _seconds(match - wall)
            change = self._change(at, min(candidate, at + 2 * _OFFSET_CHANGE_MAX_S))
            if change is not None:
                if self._fires_after_gap and candidate < change + self._offset(change) - offset:
                    return change  # the clock skips the match
                at = change
            elif candidate - at > 2 * _OFFSET_CHANGE_MAX_S:
                # No wall time before ``match`` can match, even if the offset changes once.
                at = candidate - _OFFSET_CHANGE_MAX_S
            else:
                skips_to = self._end_of_repeat(candidate, match)
                if skips_to is None:
                    return candidate
                at = skips_to

    def _end_of_repeat(self, at: int, wall: datetime) -> int | None:
        """If ``at`` is in the occurrence of a repeated hour that ``fold`` ignores, return the
        moment at which to continue; otherwise return None. ``wall`` is the wall time at ``at``."""
        if self._fold == "both" or self._has_constant_offset(
            at - _OFFSET_CHANGE_MAX_S, at + _OFFSET_CHANGE_MAX_S
        ):
            return None
        first = int(wall.replace(tzinfo=self._zone, fold=0).timestamp())
        second = int(wall.replace(tzinfo=self._zone, fold=1).timestamp())
        if first == second or at == (first if self._fold == "first" else second):
            return None
        change = self._change(first, second)
        assert change is not None
        return change if at == first else change + second - first

    def _change(self, at: int, until: int) -> int | None:
        """Return the first moment after ``at`` and up to ``until`` with a new offset, or None."""
        if self._has_constant_offset(at, until):
            return None
        offset, low = self._offset(at), at
        while low < until:
            self._steps += 1
            high = low + _STRIDE_S
            if self._offset(high) != offset:
                change = self._bisected(low, high)
                self._constant_span = low, change - 1, offset
                return change if change <= until else None
            self._constant_span = at, high, offset
            low = high
        return None

    def _has_constant_offset(self, at: int, until: int) -> bool:
        first, last, _ = self._constant_span
        return first <= at and until <= last

    def _bisected(self, low: int, high: int) -> int:
        """Return the first second with the offset of ``high``, which must differ at ``low``."""
        offset = self._offset(high)
        while high - low > 1:
            middle = (low + high) // 2
            if self._offset(middle) == offset:
                high = middle
            else:
                low = middle
        return high

    def count(self, at: int, until: int, limit: int) -> int:
        """Return the number of planned moments from ``at`` to ``until``, within ``YEARS_MAX``
        years. The count can stop once it reaches ``limit``."""
        total, until = 0, min(until, at + YEARS_MAX * 366 * _DAY_S, _FAR_S)
        while at <= until and total < limit:
            end = min(until, at + _HALF_YEAR_S)
            change = self._change(at, end)
            total += self._count_constant(at, end if change is None else change - 1, limit)
            at = end + 1 if change is None else change
        return total

    def _count_constant(self, at: int, end: int, limit: int) -> int:
        """Return the number of planned moments in a span of constant offset."""
        offset = self._offset(at)
        if self._fold == "first":
            at = self._end_of_repeat(at, _wall(at + offset)) or at
        elif self._fold == "second":
            change = self._end_of_repeat(end, _wall(end + offset))
            if change is not None:
                end = change - 1 - (offset - self._offset(change))
        if at > end:
            return 0
        count = self._walls.count(_wall(at + offset), _wall(end + offset), limit)
        if self._fires_after_gap and self._jumps_over(at):
            count += not self._walls.matches(_wall(at + offset))
        return count

    def _jumps_over(self, at: int) -> bool:
        """Return whether the clock goes forward at ``at`` and skips a match."""
        before, offset = self._offset(at - 1), self._offset(at)
        if offset <= before:
            return False
        match = self._walls.at_or_after(_wall(at + before), _wall(at).year + 1)
        return match is not None and match < _wall(at + offset)


class _WallTimes:
    """The wall times that match an expression, ascending."""

    def __init__(self, text: str) -> None:
        parsed = CronSim(text, _SOME_DAY)
        self._text = text
        self._seconds, self._minutes = _bits(parsed.seconds), _bits(parsed.minutes)
        self._hours, self._months = _bits(parsed.hours), _bits(parsed.months)
        self._first = _lowest(self._hours), _lowest(self._minutes), _lowest(self._seconds)
        self._days: dict[tuple[int, int], int] = {}
        """(weekday of the first day, length of the month) → bits of matching days."""
        self.steps = 0

    def at_or_after(self, wall: datetime, until_year: int) -> datetime | None:
        """Return the first matching wall time from ``wall`` to ``until_year``, or None."""
        year, month, day = wall.year, wall.month, wall.day
        time = self._time(wall.hour, wall.minute, wall.second)
        days = self._days_of(year, month) >> day << day
        if days >> day & 1:
            if time is not None:
                return datetime(year, month, day, *time)  # noqa: DTZ001
            days ^= 1 << day
        while not days:
            month = _next_bit(self._months, month + 1)
            if month < 0:
                year, month = year + 1, _lowest(self._months)
                if year > until_year:
                    return None
            days = self._days_of(year, month)
        return datetime(year, month, _lowest(days), *self._first)  # noqa: DTZ001

    def matches(self, wall: datetime) -> bool:
        return self.at_or_after(wall, wall.year) == wall

    def count(self, first: datetime, last: datetime, limit: int) -> int:
        """Return the number of matching wall times from ``first`` to ``last``. The count can stop
        once it reaches ``limit``."""
        total = self._before(last + timedelta(seconds=1)) - self._before(first)
        times = self._hours.bit_count() * self._minutes.bit_count() * self._seconds.bit_count()
        year, month, day = first.year, first.month, first.day
        last += timedelta(seconds=1)
        while total < limit + times and (year, month) <= (last.year, last.month):
            days = self._days_of(year, month) >> day << day
            if (year, month) == (last.year, last.month):
                days &= (1 << last.day) - 1
            total += times * days.bit_count()
            year, month, day = (year, month + 1, 1) if month < 12 else (year + 1, 1, 1)
        return total

    def _before(self, wall: datetime) -> int:
        """Return the number of matching wall times before ``wall`` on its day."""
        if not self._days_of(wall.year, wall.month) >> wall.day & 1:
            return 0
        minutes, seconds = self._minutes.bit_count(), self._seconds.bit_count()
        total = _count_below(self._hours, wall.hour) * minutes * seconds
        if self._hours >> wall.hour & 1:
            total += _count_below(self._minutes, wall.minute) * seconds
            if self._minutes >> wall.minute & 1:
                total += _count_below(self._seconds, wall.second)
        return total

    def _time(self, hour: int, minute: int, second: int) -> tuple[int, int, int] | None:
        """Return the first matching time of the day from this time on, or None."""
        _, first_minute, first_second = self._first
        if self._hours >> hour & 1:
            if self._minutes >> minute & 1:
                next_second = _next_bit(self._seconds, second)
                if next_second >= 0:
                    return hour, minute, next_second
            next_minute = _next_bit(self._minutes, minute + 1)
            if next_minute >= 0:
                return hour, next_minute, first_second
        next_hour = _next_bit(self._hours, hour + 1)
        return None if next_hour < 0 else (next_hour, first_minute, first_second)

    def _days_of(self, year: int, month: int) -> int:
        """Return the matching days of a month as bits."""
        self.steps += 1
        if not self._months >> month & 1:
            return 0
        first, following = date(year, month, 1), date(year + month // 12, month % 12 + 1, 1)
        weekday, length = first.weekday(), (following - first).days
        days = self._days.get((weekday, length))
        if days is None:
            matches = CronSim(self._text, _SOME_DAY).match_day
            days = _bits(d for d in range(1, length + 1) if matches(date(year, month, d)))
            self._days[weekday, length] = days
        return days


def _wall(seconds: int) -> datetime:
    return _EPOCH + timedelta(seconds=seconds)


def _seconds(span: timedelta) -> int:
    return span.days * _DAY_S + span.seconds


def _bits(numbers: Iterable[int]) -> int:
    return sum(1 << number for number in set(numbers))


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _next_bit(bits: int, start: int) -> int:
    """Return the lowest set bit from ``start`` on, or -1."""
    return _lowest(bits >> start << start)


def _count_below(bits: int, end: int) -> int:
    return (bits & ((1 << end) - 1)).bit_count()


class _Part(NamedTuple):
    """A field of cron expressions, and its allowed values."""

    label: str
    low: int
    high: int
    names: tuple[str, ...] = ()
    """Names of the values, beginning with ``low``."""
    special: tuple[str, ...] = ()

    def number(self, text: str) -> int:
        """Return the value of ``text``, a number or a name. Raise BadTiming if it is neither."""
        if text in self.names:
            return self.low + self.names.index(text)
        if not _is_number(text) or not self.low <= int(text) <= self.high:
            raise self.wrong(text, f"is not {self.values}")
        return int(text)

    @property
    def values(self) -> str:
        text = f"a number from {self.low} to {self.high}"
        if self.names:
            text += f" or a name from {self.names[0]} to {self.names[-1]}"
        return " or ".join([text, *self.special])

    def wrong(self, text: str, reason: str) -> BadTiming:
        return BadTiming("cron", f"cannot be read: {self.label} {text or '(nothing)'} {reason}")


_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_WEEKDAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_SUNDAY = 7
"""The number of Sunday at the end of a range. At the beginning of a range it is 0."""
_WEEKDAY = "day of week"
_PARTS = (
    _Part("second", 0, 59),
    _Part("minute", 0, 59),
    _Part("hour", 0, 23),
    _Part("day of month", 1, 31, special=("L", "LW")),
    _Part("month", 1, 12, _MONTHS),
    _Part(_WEEKDAY, 0, _SUNDAY, _WEEKDAYS),
)


def _fields(expression: str, *, is_new: bool) -> list[str]:
    """Return the five fields of a cron expression, or six with seconds first, in a form that
    ``cronsim`` reads correctly. Raise BadTiming with the field and the value if one is invalid."""
    if len(expression) > CRON_LENGTH_MAX:
        reason = f"has {len(expression)} characters; the limit is {CRON_LENGTH_MAX}"
        raise BadTiming("cron", reason)
    words = _words(expression, is_new=is_new)
    if words and words[0] == "@EVERY":
        raise BadTiming("cron", "is an interval; use every instead of cron (--every 1h, every_ms)")
    if words and words[0].startswith("@"):
        raise BadTiming("cron", f"is not a valid macro; use {', '.join(MACROS)}")
    if len(words) not in (5, 6):
        raise BadTiming("cron", f"must have 5 fields, or 6 with seconds first, not {len(words)}")
    return [
        ",".join(_term(part, term, is_new=is_new) for term in word.split(","))
        for part, word in zip(_PARTS[-len(words) :], words, strict=True)
    ]


def _words(expression: str, *, is_new: bool) -> list[str]:
    """Return the fields of an expression or a macro in capitals. As in crontab, only ASCII blanks
    separate fields, and names consist of ASCII letters."""
    if not is_new:
        return MACROS.get(expression.strip().lower(), expression).upper().split()
    text = expression.strip(_BLANKS)
    if text.isascii():
        text = MACROS.get(text.lower(), text)
    in_capitals = re.sub("[a-z]+", lambda letters: letters[0].upper(), text)
    return re.split(f"[{_BLANKS}]+", in_capitals) if text else []


def _term(part: _Part, text: str, *, is_new: bool) -> str:
    """Check a term between the commas of a field, and return it in ``cronsim``'s form. Raise
    BadTiming if it is not valid."""
    if "?" in text:
        raise part.wrong(text, "has a ?, which is not supported; write * for any value")
    is_last = _is_number(text[:-1]) and text.endswith("L")
    if part.label == _WEEKDAY and (is_last or "#" in text):
        return _nth_weekday(part, text)
    span, slash, step = text.partition("/")
    low, dash, high = span.partition("-")
    is_single = False
    if dash:
        first, last = part.number(low), part.number(high)
        if part.label == _WEEKDAY and high == _WEEKDAYS[0] and first:
            last, span = _SUNDAY, f"{first}-{_SUNDAY}"
        if last < first:
            hint = "; Sunday is 7 at the end of a range" if high == "0" and part.names else ""
            raise part.wrong(text, f"has a range that ends before it begins{hint}")
        is_single = first == last
    elif span != "*" and span not in part.special:
        part.number(span)
    if not slash:
        return span
    if not _is_number(step) or not int(step):
        raise part.wrong(text, f"must have a step of at least 1, not {step or '(nothing)'}")
    if is_new and span in part.special:
        raise part.wrong(text, f"must not have a step, because {span} is a single day")
    if is_new and int(step) > part.high:
        raise part.wrong(text, f"has the step {step}; the limit is {part.high}")
    # crontab(5): a step applies within its range. With a range of one value, cronsim steps past the
    # end of the range.
    return low if is_single else f"{span}/{step}"


def _nth_weekday(part: _Part, text: str) -> str:
    """Check a term such as ``5L`` (the last Friday of a month) or ``FRI#2`` (the second). Raise
    BadTiming if it is not valid."""
    day, mark, nth = text.partition("#")
    part.number(day if mark else text[:-1])
    if mark and not (_is_number(nth) and 1 <= int(nth) <= 5):
        raise part.wrong(
            text, f"must have a number from 1 to 5 after the #, not {nth or '(nothing)'}"
        )
    return text


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _check(fields: list[str]) -> None:
    """Raise BadTiming for an expression that never matches."""
    text = " ".join(fields)
    try:
        walls = _WallTimes(text)
    except CronSimError:  # the syntax is valid, because ``_fields`` has checked it
        raise BadTiming("cron", "never runs: there is no such day in these months") from None
    if walls.at_or_after(_SOME_DAY, _SOME_DAY.year + YEARS_MAX) is None:
        raise BadTiming("cron", f"never runs: no time matches in {YEARS_MAX} years")


@dataclass(slots=True)
class Undo:
    """The data that undo the changes of a batch to a schedule."""

    before: ScheduleRow
    missed: int = 0
    overlapped: int = 0
    """Number of overlapping occurrences, which is added to the totals when the batch is durable."""
    late_ms: list[int] = field(default_factory=list)
    """Lateness of the fired occurrences in ms."""
    watched_id: int = 0
    """Id of the earlier task if it has not ended, which stays watched until the batch's fate is
    known; otherwise 0."""


@dataclass(slots=True, eq=False)
class LoadedSchedule:
    """A schedule that is loaded into memory."""

    row: ScheduleRow
    table: Timetable
    staged: bool = False
    """Whether a batch that is not durable contains a run of the schedule."""
    cancelling: bool = False
    """Whether the task of the previous run is being looked up in order to cancel it."""
    unfinished: bool = False
    """Whether the task of the newest run has not ended."""
    retry_ms: int = 0
    """The schedule is not checked before this time, because its topic was full."""

    @property
    def name(self) -> str:
        return self.row.schedule.name

    @property
    def next_check_ms(self) -> int | None:
        """The time at which the schedule must be checked next; None if it waits for an event."""
        if self.row.paused or self.staged or self.cancelling:
            return None
        is_queued = self.row.queued_ms is not None and not self.unfinished
        next_ms = self.row.queued_ms if is_queued else self.row.next_ms
        return None if next_ms is None else max(next_ms, self.retry_ms)


class ScheduleHeap:
    """All schedules of an engine, and a heap of those that wait for a time."""

    def __init__(self) -> None:
        self.by_name: dict[str, LoadedSchedule] = {}
        self._due = DueNames()
        self._watched: dict[int, LoadedSchedule] = {}
        """Id of the unfinished task of a schedule's newest run → schedule."""
        self.to_cancel: list[LoadedSchedule] = []
        """Schedules whose unfinished task must be looked up and passed to ``Schedules.replace``."""
        self.blocked_until_ms = 0
        """No schedule fires before this moment, because new tasks were refused."""
        self._retry_ms = 0
        """The latest ``retry_ms`` of the schedules."""
        self.late_ms: list[int] = []
        """Lateness of fired occurrences in ms. The caller that records it replaces the list."""

    # --- times -----------------------------------------------------------------------------

    def arm(self, entry: LoadedSchedule) -> None:
        """Update the heap after a schedule has changed."""
        self._due.set(entry.name, entry.next_check_ms)

    def retry(self, entry: LoadedSchedule, at_ms: int) -> None:
        """Check a schedule again at ``at_ms``, because its topic is full."""
        entry.retry_ms = self._retry_ms = at_ms
        self.arm(entry)

    def limit_waits(self, until_ms: int) -> None:
        """Let no schedule wait beyond ``until_ms`` because new tasks were refused."""
        self.blocked_until_ms = min(self.blocked_until_ms, until_ms)
        if self._retry_ms > until_ms:
            self._retry_ms = until_ms
            for entry in self.by_name.values():
                if entry.retry_ms > until_ms:
                    self.retry(entry, until_ms)

    def forget(self, entry: LoadedSchedule) -> None:
        """Forget a deleted schedule."""
        self.unwatch(entry)
        self._due.set(entry.name, None)
        del self.by_name[entry.name]

    def next_ms(self) -> int | None:
        """Return the time at which the next schedule must be checked, or None."""
        due_ms = self._due.next_ms()
        return None if due_ms is None else max(due_ms, self.blocked_until_ms)

    def pop(self, now_ms: int) -> LoadedSchedule | None:
        """Remove and return the next schedule due by ``now_ms``. The caller ``arm``s it again."""
        name = None if now_ms < self.blocked_until_ms else self._due.pop(now_ms)
        return None if name is None else self.by_name[name]

    # --- durable and refused runs ----------------------------------------------------------

    def landed(self, runs: Mapping[LoadedSchedule, Undo]) -> None:
        """Record that the batch with these runs is durable."""
        for entry, undo in runs.items():
            self.late_ms += undo.late_ms
            self._watched.pop(undo.watched_id, None)
            entry.staged = False
            self.arm(entry)

    def undo(self, runs: Mapping[LoadedSchedule, Undo]) -> None:
        """Restore schedules whose runs were refused with their batch. An unfinished earlier task
        stays watched, because a run on demand does not affect it."""
        for entry, undo in runs.items():
            if entry.row.last_id != undo.before.last_id:  # the newest task is forgotten
                self.unwatch(entry)
            entry.row = undo.before
            if undo.watched_id in self._watched:
                entry.unfinished = True
            entry.staged = False
            self.arm(entry)

    def row(self, name: str) -> ScheduleRow | None:
        """Return the row of a schedule for the store, or None if the schedule has been deleted."""
        entry = self.by_name.get(name)
        return None if entry is None else entry.row

    # --- the task of the newest run --------------------------------------------------------

    def watch(self, entry: LoadedSchedule) -> None:
        """Record that the newest task of the schedule has not ended."""
        self.unwatch(entry)
        entry.unfinished = True
        self._watched[entry.row.last_id] = entry

    def unwatch(self, entry: LoadedSchedule) -> None:
        """Record that the newest task of the schedule has ended or no longer matters."""
        entry.unfinished = False
        self._watched.pop(entry.row.last_id, None)

    def ended(self, ids: Collection[int]) -> None:
        """Record that these tasks have ended, or that only dead letters of them are left."""
        watched = self._watched
        if not watched:
            return
        newest_ids: Iterable[int]
        if len(ids) < len(watched):
            newest_ids = [i for i in ids if i in watched]
        else:
            newest_ids = [i for i in watched if i in ids]
        for task_id in newest_ids:
            entry = watched.pop(task_id)
            if entry.row.last_id == task_id:
                entry.unfinished = False
                self.arm(entry)

    def watched_ids(self) -> list[int]:
        """Return the ids of the watched tasks, which must be looked up after a restart."""
        return list(self._watched)
