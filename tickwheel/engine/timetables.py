"""Planned times of schedules, and the heap of schedules that are due next.

``Timetable`` computes planned times, for cron in a time zone or for an interval. It is pure: the
time is an argument, and the data of time zones is constant. ``cronsim`` parses the fields of a cron
expression. This module finds matching wall times by arithmetic on months, days and times of day, so
that a rare match costs one step per month. It follows a time zone's clock from one change of its
offset to the next:

* A *fixed time* (no ``*`` at the start of second, minute and hour) that the clock skips is planned
  at the end of the gap or not at all (``gap``). A repeated fixed time is planned at its first or
  second occurrence, or at both (``fold``).
* Any other time means "every n". It is planned whenever the wall clock matches.

A planned time is a whole number of milliseconds, or of seconds with cron. No method iterates over
planned times, and ``Timetable.steps`` counts the work.

``ScheduleHeap`` has the schedules of an engine, which of them is due next, and which wait for the
end of a task. It has state and shared steps; ``schedules`` has the rules. Invariants:

* A schedule with a run in a batch that is not durable is *staged*, and does not change until the
  batch has landed, or was refused and the run was undone. So undoing a run restores the schedule
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
"""Maximum years ahead for which a match is searched."""
_DAY_S = 86_400
_HALF_YEAR_S = 183 * _DAY_S
_STRIDE_S = 7 * _DAY_S
"""Minimum time between two changes of a zone's offset, except in a few zones before 1972."""
_NEAR_S = 26 * 3_600
"""Upper bound of a change of a zone's offset."""
_FAR_S = int(datetime(9900, 1, 1, tzinfo=UTC).timestamp())
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 (a wall clock, of any zone)
_EPOCH_UTC = _EPOCH.replace(tzinfo=UTC)


def shown_time(at_ms: int) -> str:
    """Return a time in UTC for a sentence, with milliseconds if it has any."""
    try:
        moment = _EPOCH_UTC + timedelta(seconds=at_ms // 1000)
    except OverflowError:
        return f"{at_ms} ms"
    text = moment.strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{at_ms % 1000:03d}Z" if at_ms % 1000 else f"{text}Z"


_SOME_DAY = datetime(2024, 1, 1)  # noqa: DTZ001


class BadTiming(ValueError):
    """A cron expression, a zone or an interval is not valid. ``field`` names it."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(why)
        self.field = field


class Timetable:
    """The planned times of one schedule, ascending."""

    def __init__(self, schedule: Schedule, *, is_new: bool = False) -> None:
        """Raise BadTiming for an invalid cron expression or zone. With ``is_new``, also refuse
        values that earlier versions accepted and that a store can have."""
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
        """Return the last planned time up to ``until_ms``. ``first_ms`` must be a planned time that
        is not later. The search goes back in doubling steps, and then bisects the last step."""
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

    def count(self, first_ms: int, until_ms: int, most: int) -> int:
        """Return the number of planned times from ``first_ms`` to ``until_ms``, both inclusive, at
        most ``most``, within ``YEARS_MAX`` years."""
        first_ms = max(first_ms, self._start_ms or 0)
        if self._end_ms is not None:
            until_ms = min(until_ms, self._end_ms)
        if first_ms > until_ms:
            return 0
        self._calls += 1
        if self._cron is not None:
            return min(most, self._cron.count(-(-first_ms // 1000), until_ms // 1000, most))
        assert self._every_ms is not None
        before = (first_ms - 1 - self._anchor_ms) // self._every_ms
        return min(most, (until_ms - self._anchor_ms) // self._every_ms - before)

    def between(self, first_ms: int, until_ms: int) -> Iterator[int]:
        """Yield the planned times from ``first_ms`` to ``until_ms``, both inclusive."""
        planned_ms = self.after(first_ms - 1)
        while planned_ms is not None and planned_ms <= until_ms:
            yield planned_ms
            planned_ms = self.after(planned_ms)


def zone_of(name: str, *, is_new: bool = False) -> ZoneInfo:
    """Return the time zone with this name. Raise BadTiming if it is unknown. With ``is_new``, also
    refuse other files in the folder of the zones, whose names are not IANA names."""
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
        self._walls = _Walls(" ".join(fields))
        self._zone = zone
        is_fixed = not any(field.startswith("*") for field in fields[:-3])
        self._fires_after_gap = is_fixed and schedule.gap == "after"
        self._fold = schedule.fold if is_fixed else "both"
        self._steps = 0
        self._even = 0, -1, 0
        """(first, last, offset) of the last examined span of constant offset, as a cache."""

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
        first, last, offset = self._even
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
            change = self._change(at, min(candidate, at + 2 * _NEAR_S))
            if change is not None:
                if self._fires_after_gap and candidate < change + self._offset(change) - offset:
                    return change  # the clock skips the match
                at = change
            elif candidate - at > 2 * _NEAR_S:
                # No wall time before the match can match, even if the offset changes once.
                at = candidate - _NEAR_S
            else:
                skips_to = self._end_of_repeat(candidate, match)
                if skips_to is None:
                    return candidate
                at = skips_to

    def _end_of_repeat(self, at: int, wall: datetime) -> int | None:
        """Return where to continue if ``at`` is in the half of a repeated time that does not count;
        None if it counts. ``wall`` is the wall time at ``at``."""
        if self._fold == "both" or self._is_even(at - _NEAR_S, at + _NEAR_S):
            return None
        first = int(wall.replace(tzinfo=self._zone, fold=0).timestamp())
        second = int(wall.replace(tzinfo=self._zone, fold=1).timestamp())
        if first == second or at == (first if self._fold == "first" else second):
            return None
        change = self._change(first, second)
        assert change is not None
        return change if at == first else change + second - first

    def _change(self, at: int, until: int) -> int | None:
        """Return the first moment after ``at`` and up to ``until`` with another offset, or None."""
        if self._is_even(at, until):
            return None
        offset, low = self._offset(at), at
        while low < until:
            self._steps += 1
            high = low + _STRIDE_S
            if self._offset(high) != offset:
                change = self._bisected(low, high)
                self._even = low, change - 1, offset
                return change if change <= until else None
            self._even = at, high, offset
            low = high
        return None

    def _is_even(self, at: int, until: int) -> bool:
        first, last, _ = self._even
        return first <= at and until <= last

    def _bisected(self, low: int, high: int) -> int:
        """Return the first second with the offset of ``high``, which differs at ``low``."""
        offset = self._offset(high)
        while high - low > 1:
            middle = (low + high) // 2
            if self._offset(middle) == offset:
                high = middle
            else:
                low = middle
        return high

    def count(self, at: int, until: int, most: int) -> int:
        """Return the number of planned moments from ``at`` to ``until``, within ``YEARS_MAX``
        years. The count can stop once it reaches ``most``."""
        total, until = 0, min(until, at + YEARS_MAX * 366 * _DAY_S, _FAR_S)
        while at <= until and total < most:
            end = min(until, at + _HALF_YEAR_S)
            change = self._change(at, end)
            total += self._count_even(at, end if change is None else change - 1, most)
            at = end + 1 if change is None else change
        return total

    def _count_even(self, at: int, end: int, most: int) -> int:
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
        count = self._walls.count(_wall(at + offset), _wall(end + offset), most)
        if self._fires_after_gap and self._jumps_over(at):
            count += not self._walls.matches(_wall(at + offset))
        return count

    def _jumps_over(self, at: int) -> bool:
        """Return whether the clock goes forward at that moment and skips a match."""
        before, offset = self._offset(at - 1), self._offset(at)
        if offset <= before:
            return False
        match = self._walls.at_or_after(_wall(at + before), _wall(at).year + 1)
        return match is not None and match < _wall(at + offset)


class _Walls:
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
        """Return the first matching wall time from ``wall`` on, or None if there is none up to
        ``until_year``."""
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

    def count(self, first: datetime, last: datetime, most: int) -> int:
        """Return the number of matching wall times from ``first`` to ``last``. The count can stop
        once it reaches ``most``."""
        total = self._before(last + timedelta(seconds=1)) - self._before(first)
        times = self._hours.bit_count() * self._minutes.bit_count() * self._seconds.bit_count()
        year, month, day = first.year, first.month, first.day
        last += timedelta(seconds=1)
        while total < most + times and (year, month) <= (last.year, last.month):
            days = self._days_of(year, month) >> day << day
            if (year, month) == (last.year, last.month):
                days &= (1 << last.day) - 1
            total += times * days.bit_count()
            year, month, day = (year, month + 1, 1) if month < 12 else (year + 1, 1, 1)
        return total

    def _before(self, wall: datetime) -> int:
        """Return the number of matching wall times on the same day before ``wall``."""
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
        """Return bits of the matching days of a month."""
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
    """The allowed values of a field of an expression."""

    called: str
    low: int
    high: int
    names: tuple[str, ...] = ()
    """Names of the values, beginning with ``low``."""
    special: tuple[str, ...] = ()

    def number(self, text: str) -> int:
        """Return the value of a number or a name. Raise BadTiming if it is neither."""
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

    def wrong(self, text: str, why: str) -> BadTiming:
        return BadTiming("cron", f"cannot be read: {self.called} {text or '(nothing)'} {why}")


_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_WEEKDAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_SUNDAY = 7
"""Sunday at the end of a range. At the beginning Sunday is 0."""
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
        why = f"has {len(expression)} characters; the limit is {CRON_LENGTH_MAX}"
        raise BadTiming("cron", why)
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
    separate fields, and only ASCII letters form names."""
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
    if part.called == _WEEKDAY and (is_last or "#" in text):
        return _nth_weekday(part, text)
    span, slash, step = text.partition("/")
    low, dash, high = span.partition("-")
    is_single = False
    if dash:
        first, last = part.number(low), part.number(high)
        if part.called == _WEEKDAY and high == _WEEKDAYS[0] and first:
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
    # crontab(5): a step applies within its range. cronsim leaves a range of one value.
    return low if is_single else f"{span}/{step}"


def _nth_weekday(part: _Part, text: str) -> str:
    """Check ``5L``, the last Friday of a month, or ``FRI#2``, its second. Raise BadTiming if it is
    not valid."""
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
        walls = _Walls(text)
    except CronSimError:  # the syntax is valid, because ``_fields`` has checked it
        raise BadTiming("cron", "never runs: there is no such day in these months") from None
    if walls.at_or_after(_SOME_DAY, _SOME_DAY.year + YEARS_MAX) is None:
        raise BadTiming("cron", f"never runs: no time matches in {YEARS_MAX} years")


@dataclass(slots=True)
class Undo:
    """The changes of a schedule by a batch with its tasks."""

    before: ScheduleRow
    missed: int = 0
    overlapped: int = 0
    """Number of overlapping occurrences, which is added to the totals when the batch is durable."""
    late_ms: list[int] = field(default_factory=list)
    """Lateness of the fired occurrences in ms."""


@dataclass(slots=True, eq=False)
class Planned:
    """A schedule in memory."""

    row: ScheduleRow
    table: Timetable
    staged: bool = False
    """Whether a batch that is not durable has a run of the schedule."""
    cancelling: bool = False
    """Whether the task of the previous run is being looked up, to be cancelled."""
    unfinished: bool = False
    """Whether the task of the newest run has not ended."""

    @property
    def name(self) -> str:
        return self.row.schedule.name

    @property
    def wanted_ms(self) -> int | None:
        """When the schedule must be checked next; None if it waits for an event."""
        if self.row.paused or self.staged or self.cancelling:
            return None
        if self.row.queued_ms is not None and not self.unfinished:
            return self.row.queued_ms
        return self.row.next_ms


class ScheduleHeap:
    """All schedules of an engine, with a heap of the schedules that wait for a time."""

    def __init__(self) -> None:
        self.known: dict[str, Planned] = {}
        self._due = DueNames()
        self._watched: dict[int, Planned] = {}
        """Id of the unfinished task of a schedule's newest run → schedule."""
        self.wants_cancel: list[Planned] = []
        """Schedules whose unfinished task must be looked up for ``Schedules.replace``."""
        self.held_until_ms = 0
        """No schedule fires before this moment, because tasks are not accepted."""
        self.late_ms: list[int] = []
        """Lateness of fired occurrences. The caller that counts them replaces the list."""

    # --- times -----------------------------------------------------------------------------

    def arm(self, planned: Planned) -> None:
        """Update the heap after a change of a schedule."""
        self._due.set(planned.name, planned.wanted_ms)

    def forget(self, planned: Planned) -> None:
        """Forget a deleted schedule."""
        self.unwatch(planned)
        self._due.set(planned.name, None)
        del self.known[planned.name]

    def next_ms(self) -> int | None:
        """Return when the next schedule must be checked, or None."""
        due_ms = self._due.next_ms()
        return None if due_ms is None else max(due_ms, self.held_until_ms)

    def pop(self, now_ms: int) -> Planned | None:
        """Remove and return the next schedule that is due by ``now_ms``. The caller must ``arm`` it
        again."""
        name = None if now_ms < self.held_until_ms else self._due.pop(now_ms)
        return None if name is None else self.known[name]

    # --- durable and refused runs ----------------------------------------------------------

    def landed(self, runs: Mapping[Planned, Undo]) -> None:
        """Note that the batch with these runs is durable."""
        for planned, undo in runs.items():
            self.late_ms += undo.late_ms
            planned.staged = False
            self.arm(planned)

    def undo(self, runs: Mapping[Planned, Undo]) -> None:
        """Restore schedules whose runs were refused with their batch. An unfinished earlier task
        stays watched, because a run on demand does not affect it."""
        for planned, undo in runs.items():
            if planned.row.last_id != undo.before.last_id:
                # The newest task is forgotten. It was made when no earlier task was unfinished.
                self.unwatch(planned)
            planned.row = undo.before
            planned.staged = False
            self.arm(planned)

    def row(self, name: str) -> ScheduleRow | None:
        """Return the row of the schedule for the store, or None if it is deleted."""
        planned = self.known.get(name)
        return None if planned is None else planned.row

    # --- the task of the newest run --------------------------------------------------------

    def watch(self, planned: Planned) -> None:
        """Note that the newest task of the schedule has not ended."""
        self.unwatch(planned)
        planned.unfinished = True
        self._watched[planned.row.last_id] = planned

    def unwatch(self, planned: Planned) -> None:
        """Note that the newest task of the schedule has ended or no longer matters."""
        planned.unfinished = False
        self._watched.pop(planned.row.last_id, None)

    def ended(self, ids: Collection[int]) -> None:
        """Note that these tasks have ended, or have only dead letters left."""
        watched = self._watched
        if not watched:
            return
        newest_ids: Iterable[int]
        if len(ids) < len(watched):
            newest_ids = [i for i in ids if i in watched]
        else:
            newest_ids = [i for i in watched if i in ids]
        for task_id in newest_ids:
            planned = watched.pop(task_id)
            planned.unfinished = False
            self.arm(planned)

    def watched_ids(self) -> list[int]:
        """Return the ids of unfinished tasks of schedules, which a restart must look up."""
        return list(self._watched)
