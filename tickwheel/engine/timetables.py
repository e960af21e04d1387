"""When the occurrences of a schedule are planned, and which schedule is due next.

``Timetable``: cron in a time zone, or an interval. Pure: the time is an argument, and what a time
zone's data says is a constant. The fields of a cron expression are read by ``cronsim``; which wall
times they match is found here, by arithmetic on months, days and times of day, so that a rare one
costs no more than the months it is looked for in. A time zone's clock is looked at from one change
of its offset to the next:

* A *fixed time* (neither second, minute nor hour begins with ``*``) that the clock jumps over is
  when the clock has jumped, or never (``gap``). One that comes twice is the first of the two, the
  second, or both (``fold``).
* Anything else is "every n" and goes on by elapsed time: it is whenever the wall clock matches.

A planned time is a whole number of milliseconds; one of cron is a whole second. No question walks
over planned times one by one; what it costs is counted (``Timetable.steps``).

``ScheduleHeap``: the schedules that an engine remembers, which of them is due next, and which wait
for a task to end. It is state and the few steps that several parts have in common; the rules are
``schedules``'. Invariants:

* A schedule with a run in a batch that is not durable is *staged*: nothing else happens to it until
  the batch has landed, or was refused and the run undone. So an undone run leaves no trace: what
  it changed is as before, what it counted is not counted, and what it left alone is as it is now.
* A schedule that is due and may be looked at has exactly one entry on the heap that counts.
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
"""How many years ahead a time that matches is looked for."""
_DAY_S = 86_400
_HALF_YEAR_S = 183 * _DAY_S
_STRIDE_S = 7 * _DAY_S
"""No zone changes its offset twice within this time, except a few before 1972."""
_NEAR_S = 26 * 3_600
"""No clock change is larger than this."""
_FAR_S = int(datetime(9900, 1, 1, tzinfo=UTC).timestamp())
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 (a wall clock, of any zone)
_EPOCH_UTC = _EPOCH.replace(tzinfo=UTC)


def shown_time(at_ms: int) -> str:
    """Write a time in UTC for a sentence, to the millisecond where it has some."""
    try:
        found = _EPOCH_UTC + timedelta(seconds=at_ms // 1000)
    except OverflowError:
        return f"{at_ms} ms"
    text = found.strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{at_ms % 1000:03d}Z" if at_ms % 1000 else f"{text}Z"


_SOME_DAY = datetime(2024, 1, 1)  # noqa: DTZ001


class BadTiming(ValueError):
    """A cron expression, a zone or an interval that is wrong; ``field`` says which."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(why)
        self.field = field


class Timetable:
    """The planned times of one schedule, ascending."""

    def __init__(self, schedule: Schedule, *, is_new: bool = False) -> None:
        """Raises BadTiming for a cron expression or zone that is wrong. ``is_new``: also for what
        a store may hold from before it was refused."""
        self._start_ms = schedule.start_ms
        self._end_ms = schedule.end_ms
        self._every_ms, self._anchor_ms = schedule.every_ms, schedule.anchor_ms
        self._asked = 0
        self._cron: _Cron | None = None
        if schedule.cron is not None:
            zone = zone_of(schedule.timezone, is_new=is_new)
            self._cron = _Cron(_fields(schedule.cron, is_new=is_new), zone, schedule)

    @property
    def steps(self) -> int:
        """How much work all questions so far were: planned times, months and weeks looked at."""
        return self._asked + (0 if self._cron is None else self._cron.steps)

    def after(self, at_ms: int) -> int | None:
        """The first planned time after ``at_ms``; None: there is none any more."""
        self._asked += 1
        if self._start_ms is not None:
            at_ms = max(at_ms, self._start_ms - 1)
        if self._cron is not None:
            found = self._cron.after(at_ms)
        else:
            assert self._every_ms is not None
            passed = (at_ms - self._anchor_ms) // self._every_ms
            found = self._anchor_ms + (passed + 1) * self._every_ms
        if found is None or (self._end_ms is not None and found > self._end_ms):
            return None
        return found

    def newest(self, first_ms: int, until_ms: int) -> int:
        """The last planned time up to ``until_ms``; ``first_ms`` is one, and not later. It is
        looked for from the end, in steps that double, and then between the last two of them."""
        found = low_ms = first_ms
        high_ms, back_ms = until_ms, 1_000
        while high_ms > first_ms:
            at_ms = max(first_ms, until_ms - back_ms)
            planned_ms = self.after(at_ms)
            if planned_ms is not None and planned_ms <= until_ms:
                found = low_ms = planned_ms
                break
            high_ms, back_ms = at_ms, back_ms * 2
        while low_ms < high_ms:
            middle_ms = (low_ms + high_ms) // 2
            planned_ms = self.after(middle_ms)
            if planned_ms is not None and planned_ms <= until_ms:
                found = low_ms = planned_ms
            else:
                high_ms = middle_ms
        return found

    def count(self, first_ms: int, until_ms: int, most: int) -> int:
        """How many planned times there are from ``first_ms`` up to ``until_ms``, both included; at
        most so many are counted, and those of ``YEARS_MAX`` years."""
        first_ms = max(first_ms, self._start_ms or 0)
        if self._end_ms is not None:
            until_ms = min(until_ms, self._end_ms)
        if first_ms > until_ms:
            return 0
        self._asked += 1
        if self._cron is not None:
            return min(most, self._cron.count(-(-first_ms // 1000), until_ms // 1000, most))
        assert self._every_ms is not None
        before = (first_ms - 1 - self._anchor_ms) // self._every_ms
        return min(most, (until_ms - self._anchor_ms) // self._every_ms - before)

    def between(self, first_ms: int, until_ms: int) -> Iterator[int]:
        """Planned times from ``first_ms`` up to ``until_ms``, both included."""
        planned_ms = self.after(first_ms - 1)
        while planned_ms is not None and planned_ms <= until_ms:
            yield planned_ms
            planned_ms = self.after(planned_ms)


def zone_of(name: str, *, is_new: bool = False) -> ZoneInfo:
    """The time zone of this name. Raises BadTiming if it is not known; ``is_new``: also if the
    name is not an IANA name, such as that of another file among those of the zones."""
    try:
        zone = ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        zone = None
    if zone is None or (is_new and name != "UTC" and name not in _iana_names()):
        raise BadTiming(
            "timezone", "is not known; an IANA name such as Europe/Berlin or UTC is needed"
        )
    return zone


@cache
def _iana_names() -> frozenset[str]:
    """The names of zones. They are listed once: every file of the zones is opened for that."""
    return frozenset(available_timezones() - {"Factory", "localtime"})


class _Cron:
    """One cron expression in one zone. Moments are seconds since 1970."""

    def __init__(self, fields: list[str], zone: ZoneInfo, schedule: Schedule) -> None:
        _check(fields)
        self._walls = _Walls(" ".join(fields))
        self._zone = zone
        is_fixed = not any(field.startswith("*") for field in fields[:-3])
        self._fires_after_gap = is_fixed and schedule.gap == "after"
        self._fold = schedule.fold if is_fixed else "both"
        self._steps = 0
        self._even = 0, -1, 0
        """(first, last, offset) of a span of constant offset: the last one looked at, because the
        next question is mostly about it, too."""

    @property
    def steps(self) -> int:
        return self._steps + self._walls.steps

    def after(self, at_ms: int) -> int | None:
        at = at_ms // 1000 + 1
        if at > _FAR_S:
            return None
        found = self._from(at)
        return None if found is None else found * 1000

    def _offset(self, at: int) -> int:
        first, last, offset = self._even
        if first <= at <= last:
            return offset
        moment = _EPOCH_UTC + timedelta(seconds=at)
        found = moment.astimezone(self._zone).utcoffset()
        assert found is not None
        return found.days * _DAY_S + found.seconds

    def _from(self, at: int) -> int | None:
        """The first planned moment that is ``at`` or later."""
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
            found = at + _seconds(match - wall)
            change = self._change(at, min(found, at + 2 * _NEAR_S))
            if change is not None:
                if self._fires_after_gap and found < change + self._offset(change) - offset:
                    return change  # the clock jumps over it
                at = change
            elif found - at > 2 * _NEAR_S:
                # Until then the clock shows nothing but what is later than now, and no match.
                at = found - _NEAR_S
            else:
                skips_to = self._behind_others(found, match)
                if skips_to is None:
                    return found
                at = skips_to

    def _behind_others(self, at: int, wall: datetime) -> int | None:
        """The end of the time that the clock shows twice, of which ``at`` is in the half that does
        not count; None: it counts. ``wall`` is what the clock shows."""
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
        """The first moment after ``at``, and not after ``until``, that has another offset."""
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
        """The first second at which the offset is that of ``high``; at ``low`` it is another."""
        offset = self._offset(high)
        while high - low > 1:
            middle = (low + high) // 2
            if self._offset(middle) == offset:
                high = middle
            else:
                low = middle
        return high

    def count(self, at: int, until: int, most: int) -> int:
        """How many planned moments there are from ``at`` up to ``until``: at least ``most``, or
        all of them, of ``YEARS_MAX`` years."""
        total, until = 0, min(until, at + YEARS_MAX * 366 * _DAY_S, _FAR_S)
        while at <= until and total < most:
            end = min(until, at + _HALF_YEAR_S)
            change = self._change(at, end)
            total += self._count_even(at, end if change is None else change - 1, most)
            at = end + 1 if change is None else change
        return total

    def _count_even(self, at: int, end: int, most: int) -> int:
        """How many planned moments there are in a span of constant offset."""
        offset = self._offset(at)
        if self._fold == "first":
            at = self._behind_others(at, _wall(at + offset)) or at
        elif self._fold == "second":
            change = self._behind_others(end, _wall(end + offset))
            if change is not None:
                end = change - 1 - (offset - self._offset(change))
        if at > end:
            return 0
        found = self._walls.count(_wall(at + offset), _wall(end + offset), most)
        if self._fires_after_gap and self._jumps_over(at):
            found += not self._walls.matches(_wall(at + offset))
        return found

    def _jumps_over(self, at: int) -> bool:
        """Whether the clock is put forward at that moment, and skips a match."""
        before, offset = self._offset(at - 1), self._offset(at)
        if offset <= before:
            return False
        match = self._walls.at_or_after(_wall(at + before), _wall(at).year + 1)
        return match is not None and match < _wall(at + offset)


class _Walls:
    """The wall times that match an expression, ascending."""

    def __init__(self, text: str) -> None:
        found = CronSim(text, _SOME_DAY)
        self._text = text
        self._seconds, self._minutes = _bits(found.seconds), _bits(found.minutes)
        self._hours, self._months = _bits(found.hours), _bits(found.months)
        self._first = _lowest(self._hours), _lowest(self._minutes), _lowest(self._seconds)
        self._days: dict[tuple[int, int], int] = {}
        """(weekday of the first day, length of the month) → bits of the days that match."""
        self.steps = 0

    def at_or_after(self, wall: datetime, until_year: int) -> datetime | None:
        """The first wall time that is ``wall`` or later; None: none up to that year."""
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
        """How many wall times match from ``first`` to ``last``: at least ``most``, or all."""
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
        """How many wall times match on the same day before ``wall``."""
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
        """The first matching time of a day that is this or later; None: there is none."""
        _, first_minute, first_second = self._first
        if self._hours >> hour & 1:
            if self._minutes >> minute & 1:
                found = _next_bit(self._seconds, second)
                if found >= 0:
                    return hour, minute, found
            found = _next_bit(self._minutes, minute + 1)
            if found >= 0:
                return hour, found, first_second
        found = _next_bit(self._hours, hour + 1)
        return None if found < 0 else (found, first_minute, first_second)

    def _days_of(self, year: int, month: int) -> int:
        """Bits of the days of that month that match."""
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
    """The lowest set bit that is ``start`` or higher; -1: there is none."""
    return _lowest(bits >> start << start)


def _count_below(bits: int, end: int) -> int:
    return (bits & ((1 << end) - 1)).bit_count()


class _Part(NamedTuple):
    """What one field of an expression may hold."""

    called: str
    low: int
    high: int
    names: tuple[str, ...] = ()
    """Names of the values, from ``low`` on."""
    special: tuple[str, ...] = ()

    def number(self, text: str) -> int:
        """The value of a number or a name. Raises BadTiming."""
        if text in self.names:
            return self.low + self.names.index(text)
        if not _is_number(text) or not self.low <= int(text) <= self.high:
            raise self.wrong(text, f"is not {self.values}")
        return int(text)

    @property
    def values(self) -> str:
        found = f"a number from {self.low} to {self.high}"
        if self.names:
            found += f" or a name from {self.names[0]} to {self.names[-1]}"
        return " or ".join([found, *self.special])

    def wrong(self, text: str, why: str) -> BadTiming:
        return BadTiming("cron", f"cannot be read: {self.called} {text or '(nothing)'} {why}")


_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_WEEKDAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_SUNDAY = 7
"""Sunday as the end of a range; as its beginning it is 0."""
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
    """The five fields of a cron expression, or six with seconds first, as ``cronsim`` reads them
    right. Raises BadTiming, which names the field and the value."""
    if len(expression) > CRON_LENGTH_MAX:
        why = f"has {len(expression)} characters; the limit is {CRON_LENGTH_MAX}"
        raise BadTiming("cron", why)
    words = _words(expression, is_new=is_new)
    if words and words[0] == "@EVERY":
        raise BadTiming(
            "cron", "is an interval; give it as every instead (--every 1h, every_ms), without cron"
        )
    if words and words[0].startswith("@"):
        raise BadTiming("cron", f"is not known; known are {', '.join(MACROS)}")
    if len(words) not in (5, 6):
        raise BadTiming("cron", f"has {len(words)} fields; 5 are needed, or 6 with seconds first")
    return [
        ",".join(_term(part, term, is_new=is_new) for term in word.split(","))
        for part, word in zip(_PARTS[-len(words) :], words, strict=True)
    ]


def _words(expression: str, *, is_new: bool) -> list[str]:
    """The fields of an expression, or of what a macro stands for, in capitals. crontab knows the
    blanks and letters of ASCII only: no other blank parts fields, no other letter is one of a
    name."""
    if not is_new:
        return MACROS.get(expression.strip().lower(), expression).upper().split()
    text = expression.strip(_BLANKS)
    if text.isascii():
        text = MACROS.get(text.lower(), text)
    in_capitals = re.sub("[a-z]+", lambda letters: letters[0].upper(), text)
    return re.split(f"[{_BLANKS}]+", in_capitals) if text else []


def _term(part: _Part, text: str, *, is_new: bool) -> str:
    """One of the terms between the commas of a field. Raises BadTiming."""
    if "?" in text:
        raise part.wrong(text, "has a ?, which is not known; write * for any value")
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
        raise part.wrong(text, f"has the step {step or '(nothing)'}; a number from 1 is needed")
    if is_new and span in part.special:
        raise part.wrong(text, f"has a step; {span} is one day and takes none")
    if is_new and int(step) > part.high:
        raise part.wrong(text, f"has the step {step}; the limit is {part.high}")
    # crontab(5): a step goes through its range. cronsim goes on beyond a range of one value.
    return low if is_single else f"{span}/{step}"


def _nth_weekday(part: _Part, text: str) -> str:
    """``5L``, the last Friday of a month, or ``FRI#2``, its second. Raises BadTiming."""
    day, mark, nth = text.partition("#")
    part.number(day if mark else text[:-1])
    if mark and not (_is_number(nth) and 1 <= int(nth) <= 5):
        raise part.wrong(
            text, f"has {nth or 'nothing'} after the #; a number from 1 to 5 is needed"
        )
    return text


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _check(fields: list[str]) -> None:
    """Raises BadTiming for an expression that never matches."""
    text = " ".join(fields)
    try:
        walls = _Walls(text)
    except CronSimError:  # it can be read, as ``_fields`` has seen
        raise BadTiming("cron", "never runs: there is no such day in these months") from None
    if walls.at_or_after(_SOME_DAY, _SOME_DAY.year + YEARS_MAX) is None:
        raise BadTiming("cron", f"never runs: nothing matches it in {YEARS_MAX} years")


@dataclass(slots=True)
class Undo:
    """What a batch with tasks of a schedule has changed about the schedule."""

    before: ScheduleRow
    missed: int = 0
    overlapped: int = 0
    """Occurrences that overlapped in the same step; counted when the batch is durable."""
    late_ms: list[int] = field(default_factory=list)
    """How late the occurrences have fired, in ms."""


@dataclass(slots=True, eq=False)
class Planned:
    """One schedule in memory: its row, its timetable, and what holds it up at the moment."""

    row: ScheduleRow
    table: Timetable
    staged: bool = False
    """Whether a run of the schedule is in a batch that is not durable."""
    cancelling: bool = False
    """Whether the task of the previous run is being looked up, to be cancelled."""
    unfinished: bool = False
    """Whether the task of the newest run has not ended."""

    @property
    def name(self) -> str:
        return self.row.schedule.name

    @property
    def wanted_ms(self) -> int | None:
        """When the schedule has to be looked at; None: not before something happens."""
        if self.row.paused or self.staged or self.cancelling:
            return None
        if self.row.queued_ms is not None and not self.unfinished:
            return self.row.queued_ms
        return self.row.next_ms


class ScheduleHeap:
    """All schedules of one engine, with a heap of those that wait for a moment."""

    def __init__(self) -> None:
        self.known: dict[str, Planned] = {}
        self._due = DueNames()
        self._watched: dict[int, Planned] = {}
        """Id of an unfinished task → the schedule that it is the newest run of."""
        self.wants_cancel: list[Planned] = []
        """The schedules whose unfinished task is to be looked up, for ``Schedules.replace``."""
        self.held_until_ms = 0
        """No schedule fires before this moment, because tasks are not accepted just now."""
        self.late_ms: list[int] = []
        """How late occurrences have fired; whoever counts them takes the list away."""

    # --- when ------------------------------------------------------------------------------

    def arm(self, planned: Planned) -> None:
        """A schedule has changed: from now on the heap has it at the moment that it wants."""
        self._due.set(planned.name, planned.wanted_ms)

    def forget(self, planned: Planned) -> None:
        """A schedule is deleted."""
        self.unwatch(planned)
        self._due.set(planned.name, None)
        del self.known[planned.name]

    def next_ms(self) -> int | None:
        """When the next schedule wants to be looked at; None: none waits for a moment."""
        due_ms = self._due.next_ms()
        return None if due_ms is None else max(due_ms, self.held_until_ms)

    def pop(self, now_ms: int) -> Planned | None:
        """The next schedule that is due by ``now_ms``; whoever gets it arms it again."""
        name = None if now_ms < self.held_until_ms else self._due.pop(now_ms)
        return None if name is None else self.known[name]

    # --- the fate of runs ------------------------------------------------------------------

    def landed(self, runs: Mapping[Planned, Undo]) -> None:
        """The batch with these runs is durable: their schedules are free again."""
        for planned, undo in runs.items():
            self.late_ms += undo.late_ms
            planned.staged = False
            self.arm(planned)

    def undo(self, runs: Mapping[Planned, Undo]) -> None:
        """The batch with these runs was refused: each schedule is as it was before. A task that
        was unfinished then, and has not ended meanwhile, is so still; a run on demand does not
        touch it."""
        for planned, undo in runs.items():
            if planned.row.last_id != undo.before.last_id:
                # The newest task is forgotten. It was made because none before it was unfinished.
                self.unwatch(planned)
            planned.row = undo.before
            planned.staged = False
            self.arm(planned)

    def row(self, name: str) -> ScheduleRow | None:
        """The schedule of this name as a store shall have it; None: it is deleted."""
        planned = self.known.get(name)
        return None if planned is None else planned.row

    # --- the task of the newest run --------------------------------------------------------

    def watch(self, planned: Planned) -> None:
        """Note that the newest task of the schedule has not ended."""
        self.unwatch(planned)
        planned.unfinished = True
        self._watched[planned.row.last_id] = planned

    def unwatch(self, planned: Planned) -> None:
        """The newest task of the schedule has ended, or is not waited for any more."""
        planned.unfinished = False
        self._watched.pop(planned.row.last_id, None)

    def ended(self, ids: Collection[int]) -> None:
        """These tasks have ended, or only their dead letters are left."""
        watched = self._watched
        if not watched:
            return
        found: Iterable[int]
        if len(ids) < len(watched):
            found = [i for i in ids if i in watched]
        else:
            found = [i for i in watched if i in ids]
        for task_id in found:
            planned = watched.pop(task_id)
            planned.unfinished = False
            self.arm(planned)

    def watched_ids(self) -> list[int]:
        """The ids of the unfinished tasks of schedules, which a restart has to look up."""
        return list(self._watched)
