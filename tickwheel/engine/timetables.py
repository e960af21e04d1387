"""When the occurrences of a schedule are planned: cron in a time zone, or an interval.

Pure: the time is an argument, and what a time zone's data says is a constant. The fields of a cron
expression are ``cronsim``'s business, which is asked on the wall clock of the zone and never sees
the zone; what happens where that clock jumps is decided here:

* A *fixed time* (neither second, minute nor hour begins with ``*``) that the clock jumps over is
  when the clock has jumped, or never (``gap``). One that comes twice is the first of the two, the
  second, or both (``fold``).
* Anything else is "every n" and goes on by elapsed time: it is whenever the wall clock matches.

A planned time is a whole number of milliseconds; one of cron is a whole second.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tickwheel.model.schedules import Schedule

MACROS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
CRON_LENGTH_MAX = 255
_SECOND = timedelta(seconds=1)
_STRIDE = timedelta(days=7)
"""No zone changes its offset twice within this, but for a few of before 1972."""
_NEAR = timedelta(hours=26)
"""A clock is not set by more than a day."""
_FAR = datetime(9900, 1, 1)  # noqa: DTZ001 (a wall clock, of any zone)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class BadTiming(ValueError):
    """A cron expression, a zone or an interval that cannot be; ``field`` says which."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(why)
        self.field = field


class Timetable:
    """Planned times of one schedule, ascending."""

    def __init__(self, schedule: Schedule) -> None:
        """Raises BadTiming."""
        self._start_ms = schedule.start_ms
        self._end_ms = schedule.end_ms
        self._every_ms, self._anchor_ms = schedule.every_ms, schedule.anchor_ms
        self._cron: _Cron | None = None
        if schedule.cron is not None:
            self._cron = _Cron(schedule.cron, zone_of(schedule.timezone), schedule)

    def after(self, at_ms: int) -> int | None:
        """The first planned time after ``at_ms``; None: there is none any more."""
        if self._start_ms is not None:
            at_ms = max(at_ms, self._start_ms - 1)
        found = self._interval(at_ms) if self._cron is None else self._cron.after(at_ms)
        if found is None or (self._end_ms is not None and found > self._end_ms):
            return None
        return found

    def _interval(self, at_ms: int) -> int:
        assert self._every_ms is not None
        return self._anchor_ms + ((at_ms - self._anchor_ms) // self._every_ms + 1) * self._every_ms

    def newest(self, first_ms: int, until_ms: int) -> int:
        """The last planned time up to ``until_ms``; ``first_ms`` is one, and not later."""
        found, low_ms, high_ms = first_ms, first_ms, until_ms
        while low_ms < high_ms:
            middle_ms = (low_ms + high_ms) // 2
            planned_ms = self.after(middle_ms)
            if planned_ms is not None and planned_ms <= until_ms:
                found = low_ms = planned_ms
            else:
                high_ms = middle_ms
        return found

    def between(self, first_ms: int, until_ms: int) -> Iterator[int]:
        """Planned times from ``first_ms`` up to ``until_ms``, both included."""
        planned_ms = self.after(first_ms - 1)
        while planned_ms is not None and planned_ms <= until_ms:
            yield planned_ms
            planned_ms = self.after(planned_ms)


def zone_of(name: str) -> ZoneInfo:
    """Raises BadTiming for one that is not known."""
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise BadTiming(
            "timezone", "is not known; an IANA name such as Europe/Berlin or UTC is needed"
        ) from None


class _Cron:
    """One expression in one zone."""

    def __init__(self, expression: str, zone: ZoneInfo, schedule: Schedule) -> None:
        fields = _fields(expression)
        self._text = " ".join(fields)
        self._zone = zone
        self._gap, self._fold = schedule.gap, schedule.fold
        self._is_fixed = not any(field.startswith("*") for field in fields[:-3])
        _check(fields)

    def after(self, at_ms: int) -> int | None:
        moment = _EPOCH + timedelta(seconds=at_ms // 1000)
        try:
            found = self._fixed(moment) if self._is_fixed else self._elapsed(moment)
        except (StopIteration, OverflowError):
            return None
        return None if found is None else round((found - _EPOCH).total_seconds()) * 1000

    def _wall(self, moment: datetime) -> datetime:
        return moment.astimezone(self._zone).replace(tzinfo=None)

    def _offset(self, moment: datetime) -> timedelta:
        found = moment.astimezone(self._zone).utcoffset()
        assert found is not None
        return found

    # --- every n ---------------------------------------------------------------------------

    def _elapsed(self, moment: datetime) -> datetime | None:
        """The first moment whose wall clock matches: looked for between changes of the offset."""
        while True:
            wall = self._wall(moment)
            match = _next(self._text, wall)
            found = moment + (match - wall)
            change = self._change(moment, found)
            if change is None:
                return found
            # The second before the change, as the clock after it would show it.
            moment = change
            wall = self._wall(moment)
            if _next(self._text, wall - _SECOND) == wall:
                return moment

    def _change(self, moment: datetime, until: datetime) -> datetime | None:
        """The first moment after ``moment``, and not after ``until``, that has another offset."""
        offset, low = self._offset(moment), moment
        while low < until:
            high = min(low + _STRIDE, until)
            if self._offset(high) != offset:
                return self._bisected(low, high)
            low = high
        return None

    def _bisected(self, low: datetime, high: datetime) -> datetime:
        """The first second at which the offset is that of ``high``; at ``low`` it is another."""
        offset = self._offset(high)
        while high - low > _SECOND:
            seconds = (high - low) // _SECOND // 2
            middle = low + timedelta(seconds=seconds)
            if self._offset(middle) == offset:
                high = middle
            else:
                low = middle
        return high

    # --- fixed times -----------------------------------------------------------------------

    def _fixed(self, moment: datetime) -> datetime | None:
        offsets = [self._offset(moment + near) for near in (-_NEAR, timedelta(), _NEAR)]
        jump = max(offsets) - min(offsets)
        # A clock that is set back shows times again that lie before what it shows now.
        wall = self._wall(moment) - jump
        best: datetime | None = None
        while True:
            try:
                wall = _next(self._text, wall)
            except StopIteration:
                return best
            earliest = wall.replace(tzinfo=self._zone).astimezone(UTC)
            if best is not None and earliest - jump > best:
                return best
            for found in self._moments(wall):
                if found > moment and (best is None or found < best):
                    best = found
            if best is not None and not jump:
                return best

    def _moments(self, wall: datetime) -> list[datetime]:
        """When a fixed time is."""
        first = wall.replace(tzinfo=self._zone, fold=0).astimezone(UTC)
        second = wall.replace(tzinfo=self._zone, fold=1).astimezone(UTC)
        if first == second:
            return [first]
        if self._wall(first) != wall:
            # Jumped over: read by the offset before the jump it lies behind it.
            return [] if self._gap == "skip" else [self._bisected(second, first)]
        return {"first": [first], "second": [second]}.get(self._fold, [first, second])


def _next(text: str, wall: datetime) -> datetime:
    """The first wall time after ``wall`` that matches. Raises StopIteration after 50 years."""
    if wall > _FAR:
        raise OverflowError
    return next(CronSim(text, wall))


def _fields(expression: str) -> list[str]:
    """Five, or six with seconds first. Raises BadTiming."""
    if len(expression) > CRON_LENGTH_MAX:
        why = f"has {len(expression)} characters; the limit is {CRON_LENGTH_MAX}"
        raise BadTiming("cron", why)
    words = MACROS.get(expression.strip().lower(), expression).split()
    if len(words) == 1 and words[0].startswith("@"):
        raise BadTiming("cron", f"is not known; known are {', '.join(MACROS)}")
    if len(words) not in (5, 6):
        raise BadTiming("cron", f"has {len(words)} fields; 5 are needed, or 6 with seconds first")
    return words


def _check(fields: list[str]) -> None:
    """Raises BadTiming for an expression that cannot be read, or never matches."""
    text = " ".join(fields)
    try:
        CronSim(text, datetime(2024, 1, 1))  # noqa: DTZ001
    except CronSimError as error:
        if _is_read([*fields[:-2], "*", fields[-1]]):
            raise BadTiming("cron", "never runs: there is no such day in these months") from None
        raise BadTiming("cron", f"cannot be read: {str(error).lower()}") from None
    except Exception:  # what it does not expect fails it in other ways
        raise BadTiming("cron", "cannot be read") from None
    try:
        _next(text, datetime(2024, 1, 1))  # noqa: DTZ001
    except StopIteration:
        raise BadTiming("cron", "never runs: nothing matches it in 50 years") from None


def _is_read(fields: list[str]) -> bool:
    try:
        CronSim(" ".join(fields), datetime(2024, 1, 1))  # noqa: DTZ001
    except Exception:
        return False
    return True
