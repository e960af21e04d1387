"""A rig whose schedules fire, as the shard has them do it."""

from __future__ import annotations

from typing import Any

from support.engine_rig import Rig
from tickwheel.engine.timetables import LoadedSchedule, Timetable
from tickwheel.model.kinds import NAME_PROPERTY, PLANNED_PROPERTY, Schedule
from tickwheel.model.records import TaskRow

DAY_MS = 86_400_000


class ScheduleRig(Rig):
    """``put`` a schedule, ``plan`` what is due."""

    def put(self, name: str = "s", **fields: Any) -> str:
        given: dict[str, Any] = {
            "cron": None, "timezone": "UTC", "every_ms": None, "anchor_ms": self.now_ms,
        }  # fmt: skip
        if fields.get("cron") is None:
            given["every_ms"] = 10_000
        given |= {"topic": name, "body": b"", "options": None} | fields
        schedule = Schedule(name, **given)
        return self.engine.schedules.put(schedule, Timetable(schedule), self.now_ms)

    def planned(self, name: str = "s") -> LoadedSchedule:
        return self.core.schedule_heap.by_name[name]

    def plan(self, *, accepts: bool = True) -> None:
        """One look at what is due, uncommitted; what has to be cancelled before is."""
        schedules, schedule_heap = self.engine.schedules, self.core.schedule_heap
        schedules.fire(self.now_ms, 100, accepts=accepts)
        wanted, schedule_heap.to_cancel = schedule_heap.to_cancel, []
        for planned in wanted:
            task_id = planned.row.last_id
            schedules.replace(planned, task_id, self.known([task_id]).get(task_id))
        if wanted:
            schedules.fire(self.now_ms, 100, accepts=accepts)

    def settle(self) -> None:
        """Until nothing is due, all of it durable."""
        self.commit()
        for _ in range(1_000):
            next_ms = self.core.schedule_heap.next_ms()
            if next_ms is None or next_ms > self.now_ms:
                return
            self.plan()
            self.commit()
        raise AssertionError("something is always due")

    def tasks_of(self, name: str = "s") -> list[TaskRow]:
        """Return the stored tasks of a schedule, by id."""
        return [row for _, row in sorted(self.rows.tasks.items()) if _of(row)[0] == name]

    def times_of(self, name: str = "s") -> list[int]:
        """Their planned times."""
        return [_of(row)[1] for row in self.tasks_of(name)]

    def outcomes(self, name: str = "s") -> list[tuple[str, int]]:
        """Return the outcome and the number of occurrences of recent runs."""
        return [(run.outcome, run.occurrences) for run in self.planned(name).row.recent]


def _of(row: TaskRow) -> tuple[str, int]:
    properties = row.options.properties if row.options is not None else None
    assert properties is not None
    name, planned_ms = properties[NAME_PROPERTY], properties[PLANNED_PROPERTY]
    assert isinstance(name, str) and isinstance(planned_ms, int)
    return name, planned_ms
