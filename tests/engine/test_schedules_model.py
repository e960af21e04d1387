"""Schedules against a model that is slow and obvious: every planned time is looked at one by one.

Between the looks there are restarts, batches that are refused or lost half way, pauses, and clocks
that jump. What must hold: with ``all`` and ``allow`` every planned time that has come while the
schedule was there is one task, neither none nor two; with the other overlaps at most one task is
unfinished.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.schedule_rig import DAY_MS, ScheduleRig
from support.engine_recount import recount
from support.engine_rig import Got

ZONE = ZoneInfo("Europe/Berlin")
BEGIN_MS = round(datetime(2026, 3, 29, 0, 40, tzinfo=UTC).timestamp() * 1000)
"""Twenty minutes before the clocks go forward."""
EVERY_MS = 7_000


def quarters(from_ms: int, until_ms: int) -> list[int]:
    """Every quarter of an hour from 1:00 to 4:59 by the wall clock, as ``*/15 1-4 * * *``."""
    found = []
    at = datetime.fromtimestamp(from_ms // 1000, UTC) + timedelta(seconds=1)
    while (ms := round(at.timestamp() * 1000)) <= until_ms:
        wall = at.astimezone(ZONE)
        if wall.second == 0 and wall.minute % 15 == 0 and 1 <= wall.hour <= 4:
            found.append(ms)
            at += timedelta(minutes=15)
        else:
            at += timedelta(seconds=1)
    return found


class SchedulesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rig = rig = ScheduleRig(now_ms=BEGIN_MS)
        self.latest_ms = BEGIN_MS
        """The clock went so far, and may have gone back."""
        self.held: list[Got] = []
        keep = {"catch_up": "all", "catch_up_ms": 3_650 * DAY_MS}
        rig.put("every", every_ms=EVERY_MS, **keep)
        rig.put("cron", cron="*/15 1-4 * * *", timezone="Europe/Berlin", **keep)
        for overlap in ("skip", "queue_one", "cancel_previous"):
            rig.put(overlap, every_ms=5_000, overlap=overlap, catch_up="last")
        self._served()
        rig.settle()

    def _served(self) -> None:
        for topic in ("skip", "queue_one", "cancel_previous"):
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

    @rule(name=st.sampled_from(["every", "cron", "skip"]), paused=st.booleans())
    def pause(self, name: str, paused: bool) -> None:
        planned = self.rig.planned(name)
        if not planned.staged:
            self.rig.engine.schedules.pause(planned, paused=paused)

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
        for name in ("every", "cron"):
            found = self.rig.times_of(name)
            assert len(found) == len(set(found))

    @invariant()
    def one_is_unfinished_at_most(self) -> None:
        rows = self.rig.rows
        dead = {task_id for task_id, _ in rows.dead}
        for name in ("skip", "queue_one"):
            assert sum(row.id not in dead for row in self.rig.tasks_of(name)) <= 1

    @invariant()
    def counts_are_right(self) -> None:
        if self.rig.core.sealed is None:
            recount(self.rig)

    def teardown(self) -> None:
        """Everything goes on; then what came due has become a task, each once."""
        rig = self.rig
        rig.commit()
        for name in ("every", "cron", "skip"):
            rig.engine.schedules.pause(rig.planned(name), paused=False)
        rig.pass_time(max(0, self.latest_ms - rig.now_ms) + 2_000)
        rig.settle()
        last_ms = max([rig.now_ms, *rig.times_of("every")])
        count = (last_ms - BEGIN_MS) // EVERY_MS
        assert rig.times_of("every") == [BEGIN_MS + n * EVERY_MS for n in range(1, count + 1)]
        last_ms = max([rig.now_ms, *rig.times_of("cron")])
        assert rig.times_of("cron") == quarters(BEGIN_MS, last_ms)
        self.one_is_unfinished_at_most()


TestSchedules = SchedulesMachine.TestCase
TestSchedules.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
