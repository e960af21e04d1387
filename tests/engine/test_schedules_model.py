"""Schedules against a model that is slow and obvious: every minute is looked at, one by one.

Between the looks there are restarts, batches that are refused or lost half way, pauses, and clocks
that jump, around a change of the clock in one of five zones. What must hold: with ``all`` and
``allow`` every planned time that has come while the schedule was there is one task, neither none
nor two; with the other overlaps at most one task is unfinished, and whether one is, is known at
every moment, whatever was run on demand or refused in between.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, cast
from zoneinfo import ZoneInfo

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.schedule_rig import DAY_MS, ScheduleRig
from engine.test_timetables import ALL, ms
from support.engine_recount import recount
from support.engine_rig import Got

OVERLAPS = ("skip", "queue_one", "cancel_previous")
PLACES = [(name, at) for name, at in ALL if at.year == 2026]
"""Each change of a clock in that year."""
BEFORE = timedelta(minutes=20)
EVERY_MS = 7_000
HOURS = frozenset((0, 1, 2, 3, 4, 23))
QUARTERS, FIXED = "*/15 0-4,23 * * *", "10,40 0-4,23 * * *"
"""One that goes on by elapsed time, and fixed times, which mind the change."""


def minutes(name: str, from_ms: int, until_ms: int) -> list[tuple[datetime, datetime, datetime]]:
    """(moment, wall clock, wall clock of the minute before), each after ``from_ms``."""
    results = []
    at = datetime.fromtimestamp(from_ms // 60_000 * 60, UTC) + timedelta(minutes=1)
    before = wall_of(name, at - timedelta(minutes=1))
    while ms(at) <= until_ms:
        wall = wall_of(name, at)
        results.append((at, wall, before))
        at, before = at + timedelta(minutes=1), wall
    return results


def wall_of(name: str, at: datetime) -> datetime:
    return at.astimezone(ZoneInfo(name)).replace(tzinfo=None)


def quarters(name: str, from_ms: int, until_ms: int) -> list[int]:
    """Every quarter of these hours that the wall clock shows, however often it shows it."""
    return [
        ms(at)
        for at, wall, _ in minutes(name, from_ms, until_ms)
        if wall.minute % 15 == 0 and wall.hour in HOURS
    ]


def fixed(name: str, from_ms: int, until_ms: int) -> list[int]:
    """Minute 10 and 40 of these hours, the first time that the wall clock shows it; what it jumps
    over is when it has jumped, and is one occurrence."""
    results = []
    first_ms = from_ms - 3 * 3_600_000
    shown = {wall for _, wall, _ in minutes(name, first_ms, from_ms)}
    for at, wall, before in minutes(name, from_ms, until_ms):
        passed = [before + timedelta(minutes=n) for n in range(1, max(1, away(wall, before)) + 1)]
        if len(passed) == 1:
            passed = [wall]
        if any(
            item.minute in (10, 40) and item.hour in HOURS and item not in shown for item in passed
        ):
            results.append(ms(at))
        shown.update(passed)
    return results


def away(wall: datetime, before: datetime) -> int:
    return (wall - before) // timedelta(minutes=1)


class SchedulesMachine(RuleBasedStateMachine):
    @initialize(place=st.sampled_from(PLACES))
    def begin(self, place: tuple[str, datetime]) -> None:
        self.zone, at = place
        self.begin_ms = begin_ms = ms(at - BEFORE)
        self.rig = rig = self.new_rig(begin_ms)
        self.latest_ms = begin_ms
        """The clock went so far, and may have gone back."""
        self.held: list[Got] = []
        self.on_demand: set[int] = set()
        """Tasks that no occurrence is behind."""
        keep = {"catch_up": "all", "catch_up_ms": 3_650 * DAY_MS}
        rig.put("every", every_ms=EVERY_MS, **keep)
        rig.put("cron", cron=QUARTERS, timezone=self.zone, **keep)
        rig.put("fixed", cron=FIXED, timezone=self.zone, **keep)
        for overlap in OVERLAPS:
            rig.put(overlap, every_ms=5_000, overlap=overlap, catch_up="last")
        self._served()
        rig.settle()

    def new_rig(self, now_ms: int) -> ScheduleRig:
        return ScheduleRig(now_ms=now_ms)

    def _served(self) -> None:
        for topic in OVERLAPS:
            self.rig.subscribe(topic)
        self.held.clear()

    # --- what happens --------------------------------------------------------------------------

    @rule(seconds=st.integers(0, 40))
    def time_passes(self, seconds: int) -> None:
        self.rig.pass_time(seconds * 1_000)

    @rule(minutes=st.integers(1, 15))
    def much_time_passes(self, minutes: int) -> None:
        self.rig.pass_time(minutes * 60_000)

    @rule()
    def plan(self) -> None:
        self.rig.plan()
        self.latest_ms = max(self.latest_ms, self.rig.now_ms)

    @rule()
    def plan_while_nothing_is_accepted(self) -> None:
        self.rig.plan(accepts=False)

    @rule(end=st.sampled_from(["land", "refuse", "crash before", "crash after"]))
    def a_batch(self, end: str) -> None:
        rig = self.rig
        if rig.core.sealed is None and rig.seal() is None:
            return
        if end == "refuse":
            rig.refuse()
        elif end == "land":
            rig.apply_and_land()
        else:
            if end == "crash after":
                rig.apply()
            rig.crash()
            self._served()

    @rule(back_ms=st.sampled_from([0, 0, 3_000, 600_000]))
    def restart(self, back_ms: int) -> None:
        self.rig.stop_and_start(back_ms=back_ms)
        self._served()

    @rule(ms=st.integers(-600_000, 600_000))
    def the_clock_jumps(self, ms: int) -> None:
        self.rig.now_ms += ms

    @rule(name=st.sampled_from(["every", "cron", "fixed", "skip"]), paused=st.booleans())
    def pause(self, name: str, paused: bool) -> None:
        planned = self.rig.planned(name)
        if not planned.staged:
            self.rig.engine.schedules.pause(planned, paused=paused)

    @rule(name=st.sampled_from(OVERLAPS))
    def run_on_demand(self, name: str) -> None:
        rig, address = self.rig, cast("Any", "operator")
        planned = rig.planned(name)
        if not planned.staged:
            rig.engine.schedules.run(planned, address, 1, rig.now_ms)
            self.on_demand.add(rig.core.ids.last)

    @rule()
    def consume(self) -> None:
        self.held += self.rig.tick()

    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        if self.held:
            index = data.draw(st.integers(0, len(self.held) - 1))
            got = self.held.pop(index)
            if data.draw(st.booleans()):
                self.rig.ack(got)
            elif self.rig.lease(got) is not None:
                self.rig.reject(got)

    # --- what must hold --------------------------------------------------------------------------

    @invariant()
    def nothing_is_doubled(self) -> None:
        for name in ("every", "cron", "fixed"):
            result = self.rig.times_of(name)
            assert len(result) == len(set(result))

    @invariant()
    def one_is_unfinished_at_most(self) -> None:
        rows = self.rig.rows
        over = {task_id for task_id, _ in rows.dead} | self.on_demand
        for name in ("skip", "queue_one"):
            assert sum(row.id not in over for row in self.rig.tasks_of(name)) <= 1

    @invariant()
    def what_is_unfinished_is_known(self) -> None:
        rig = self.rig
        for name in ("skip", "queue_one"):
            planned = rig.planned(name)
            newest = planned.row.last_id
            known = rig.known([newest]).get(newest)
            is_on_its_way = newest > rig.core.landed_id
            assert planned.unfinished == (is_on_its_way or (known is not None and not known.dead))

    @invariant()
    def counts_are_right(self) -> None:
        if self.rig.core.sealed is None:
            recount(self.rig)

    def teardown(self) -> None:
        """Everything goes on; then what came due has become a task, each once."""
        rig = self.rig
        rig.commit()
        for name in ("every", "cron", "fixed", "skip"):
            rig.engine.schedules.pause(rig.planned(name), paused=False)
        rig.plan()
        rig.commit()
        rig.pass_time(max(0, self.latest_ms - rig.now_ms) + 2_000)
        rig.settle()
        last_ms = max([rig.now_ms, *rig.times_of("every")])
        count = (last_ms - self.begin_ms) // EVERY_MS
        expected = [self.begin_ms + n * EVERY_MS for n in range(1, count + 1)]
        assert rig.times_of("every") == expected
        for name, planned in (("cron", quarters), ("fixed", fixed)):
            last_ms = max([rig.now_ms, *rig.times_of(name)])
            assert rig.times_of(name) == planned(self.zone, self.begin_ms, last_ms)
        self.one_is_unfinished_at_most()


TestSchedules = SchedulesMachine.TestCase
TestSchedules.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
