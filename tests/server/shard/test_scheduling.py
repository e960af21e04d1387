"""The operations on schedules: limits, answers that are durable, commands while a run is under
way, and what a daemon does that finds them at its start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.in_process import InProcess
from support.shard_rig import NOW_MS, Peer
from tickwheel.api.frames import FrameType as T
from tickwheel.api.schedules import NEXT_MAX
from tickwheel.engine.timetables import BadTiming, Timetable
from tickwheel.model.records import MOMENT_MS_MAX
from tickwheel.persistence.memory import MemoryStore
from tickwheel.protocol import encode
from tickwheel.server.shard.schedules import BACKFILL_MAX

EVERY: dict[str, Any] = {"topic": "t", "every_ms": 10_000}


class SchedulingRig:
    """One peer of one daemon."""

    def __init__(self, daemon: InProcess) -> None:
        self.daemon = daemon
        self.peer: Peer = daemon.connect()
        self._number = 10

    async def ask(self, kind: T, *fields: Any) -> Any:
        """The result, or (code, message)."""
        number = self.send(kind, *fields)
        await self.daemon.settle()
        return self.answer(number)

    def send(self, kind: T, *fields: Any) -> int:
        self._number += 1
        self.peer.feed(encode((int(kind), self._number, *fields)))
        return self._number

    def answer(self, number: int) -> Any:
        (found,) = [f for f in self.peer.frames() if f[0] in (T.OK, T.ERROR) and f[1] == number]
        return found[2] if found[0] == T.OK else found[2:]

    async def put(self, name: str = "s", **options: Any) -> Any:
        return await self.ask(T.SCHEDULE_PUT, name, EVERY | options)

    async def do(self, name: str, verb: str, options: Any = None) -> Any:
        return await self.ask(T.SCHEDULE, name, verb, options)

    async def tasks(self, topic: str = "t") -> list[dict[str, Any]]:
        answer = await self.ask(T.LIST, {"topic": topic, "limit": 1_000})
        return list(answer["tasks"])

    async def pass_time(self, ms: int) -> None:
        self.daemon.sources.now_ms += ms
        self.daemon.shard.wake()
        await self.daemon.settle()


@pytest.fixture
async def rig(daemon: InProcess) -> SchedulingRig:
    return SchedulingRig(daemon)


async def test_a_schedule_fires_and_shows_its_runs(daemon: InProcess, rig: SchedulingRig) -> None:
    made = await rig.put(body=b"hi", task={"key": "k", "priority": 3, "retry": "rocketmq"})
    assert (made["outcome"], made["next_ms"], made["anchor_ms"]) == (
        "created", NOW_MS + 10_000, NOW_MS,
    )  # fmt: skip
    assert made["task"]["retry"]["name"] == "rocketmq"
    await rig.pass_time(10_000)
    (task,) = await rig.tasks()
    assert (task["body"], task["key"], task["priority"]) == (b"hi", "k", 3)
    assert task["properties"] == {
        "tickwheel.schedule": "s", "tickwheel.planned_ms": NOW_MS + 10_000,
    }  # fmt: skip
    shown = await rig.do("s", "show", {"next": 2})
    assert shown["planned_ms"] == (NOW_MS + 20_000, NOW_MS + 30_000)
    (run,) = shown["recent"]
    assert (run["outcome"], run["id"], run["state"]) == ("fired", task["id"], "ready")
    totals = daemon.shard.core.totals
    assert (totals.schedules_fired, totals.schedules_missed) == (1, 0)
    assert sum(daemon.shard.observed.schedule_late_ms.counts) == 1


async def test_a_command_waits_for_the_run_under_way(daemon: InProcess, rig: SchedulingRig) -> None:
    """Commands during a run that may be refused are done and answered after it."""
    await rig.put()
    daemon.sources.now_ms += 10_000
    daemon.shard.engine.schedules.fire(daemon.sources.now_ms, 1, accepts=True)
    planned = daemon.shard.core.schedule_heap.by_name["s"]
    assert planned.staged
    numbers = [
        rig.send(T.SCHEDULE, "s", "pause", None),
        rig.send(T.SCHEDULE, "s", "run", None),
        rig.send(T.SCHEDULE_PUT, "s", EVERY | {"body": b"new"}),
        rig.send(T.SCHEDULE, "s", "delete", None),
        rig.send(T.SCHEDULE, "s", "resume", None),
    ]
    assert planned.staged and not planned.row.paused
    await daemon.settle()
    frames = {f[1]: f for f in rig.peer.frames() if f[0] in (T.OK, T.ERROR)}
    answers = [frames[number] for number in numbers]
    assert [answer[0] for answer in answers] == [T.OK, T.OK, T.OK, T.OK, T.ERROR]
    assert answers[0][2]["paused"] is True
    assert answers[2][2]["outcome"] == "updated"
    assert answers[4][2] == "not_found"
    assert len(await rig.tasks()) == 2


async def test_schedules_are_limited(tmp_path: Path) -> None:
    async with InProcess(tmp_path, schedules_max=2) as daemon:
        rig = SchedulingRig(daemon)
        for name in ("a", "b"):
            assert (await rig.put(name))["outcome"] == "created"
        code, message = await rig.put("c")
        assert code == "limit_exceeded" and "the limit is 2 (schedules_max)" in message
        assert (await rig.put("a", body=b"x"))["outcome"] == "updated"
        await rig.do("b", "delete")
        assert (await rig.put("c"))["outcome"] == "created"
        assert daemon.shard.core.schedule_heap.by_name.keys() == {"a", "c"}


async def test_bytes_of_a_schedule_are_limited(tmp_path: Path) -> None:
    async with InProcess(tmp_path, schedule_bytes_max=100) as daemon:
        rig = SchedulingRig(daemon)
        assert (await rig.put(body=bytes(100)))["outcome"] == "created"
        code, message = await rig.put("o", body=bytes(101))
        assert code == "limit_exceeded" and "101 bytes" in message
        code, message = await rig.put("o", task={"properties": {str(n): 1 for n in range(63)}})
        assert code == "limit_exceeded"
        assert daemon.shard.core.schedule_heap.by_name.keys() == {"s"}


@pytest.mark.parametrize("count", [BACKFILL_MAX, BACKFILL_MAX + 1])
async def test_catch_up_runs_are_limited(count: int, rig: SchedulingRig) -> None:
    await rig.put(anchor_ms=0)
    span = {"from_ms": 10_000, "to_ms": 10_000 * count + 1}
    answer = await rig.do("s", "backfill", span)
    if count > BACKFILL_MAX:
        assert answer[0] == "limit_exceeded" and "BACKFILL_MAX" in answer[1]
        assert await rig.tasks() == []
    else:
        assert len(answer[1]) == count
        times = [task["properties"]["tickwheel.planned_ms"] for task in await rig.tasks()]
        assert times == [10_000 * n for n in range(1, count + 1)]


@pytest.mark.parametrize(("count", "is_right"), [(NEXT_MAX, True), (NEXT_MAX + 1, False)])
async def test_requested_planned_times_are_limited(
    count: int, is_right: bool, rig: SchedulingRig
) -> None:
    await rig.put()
    answer = await rig.do("s", "show", {"next": count})
    assert len(answer["planned_ms"]) == count if is_right else answer[0] == "bad_request"


async def test_the_minimum_interval_applies_to_cron(tmp_path: Path) -> None:
    async with InProcess(tmp_path, schedule_interval_min_s=60) as daemon:
        rig = SchedulingRig(daemon)
        code, message = await rig.ask(T.SCHEDULE_PUT, "s", {"topic": "t", "cron": "*/30 * * * * *"})
        assert code == "bad_request" and "only 30000 ms apart; the minimum is 60000 ms" in message
        answer = await rig.ask(T.SCHEDULE_PUT, "s", {"topic": "t", "cron": "* * * * *"})
        assert answer["outcome"] == "created"


async def test_cancel_previous_uses_the_stored_tasks(daemon: InProcess, rig: SchedulingRig) -> None:
    await rig.put(overlap="cancel_previous")
    await rig.pass_time(10_000)
    await rig.pass_time(10_000)
    await rig.daemon.settle()
    (task,) = await rig.tasks()
    assert task["properties"]["tickwheel.planned_ms"] == NOW_MS + 20_000
    assert daemon.shard.core.totals.cancelled == 1


async def test_a_restart_pauses_schedules_it_cannot_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    async with InProcess(tmp_path, store=store) as daemon:
        rig = SchedulingRig(daemon)
        await rig.put("good")
        await rig.ask(
            T.SCHEDULE_PUT, "gone", {"topic": "t", "cron": "@daily", "timezone": "Asia/Tokyo"}
        )
    before = Timetable.__init__

    def without_tokyo(self: Timetable, schedule: Any) -> None:
        if schedule.timezone == "Asia/Tokyo":
            raise BadTiming("timezone", "is not known")
        before(self, schedule)

    monkeypatch.setattr(Timetable, "__init__", without_tokyo)
    async with InProcess(tmp_path, store=store, now_ms=NOW_MS + 15_000) as daemon:
        rig = SchedulingRig(daemon)
        await daemon.settle()
        answer = await rig.ask(T.SCHEDULE_LIST, {})
        assert [(entry["name"], entry["paused"]) for entry in answer["schedules"]] == [
            ("gone", True), ("good", False),
        ]  # fmt: skip
        assert len(await rig.tasks()) == 1
        assert any("schedule_paused" in line and "gone" in line for line in daemon.log.lines)


async def test_a_stored_schedule_that_a_put_would_refuse_runs_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = {"topic": "t", "cron": "*/90 * * * * *"}
    async with InProcess(tmp_path) as daemon:
        with monkeypatch.context() as before_it_was_refused:
            before_it_was_refused.setattr(
                "tickwheel.server.shard.schedules.Timetable",
                lambda schedule, *, is_new: Timetable(schedule, is_new=not is_new),
            )
            assert (await SchedulingRig(daemon).ask(T.SCHEDULE_PUT, "old", old))[
                "outcome"
            ] == "created"
        store = daemon.store
    async with InProcess(tmp_path, store=store, now_ms=NOW_MS + 60_000) as daemon:
        rig = SchedulingRig(daemon)
        await daemon.settle()
        (found,) = (await rig.ask(T.SCHEDULE_LIST, {}))["schedules"]
        assert (found["name"], found["paused"]) == ("old", False)
        assert len(await rig.tasks()) == 1
        code, message = await daemon.connect().refused(T.SCHEDULE_PUT, "old", old)
        assert code == "bad_request" and "second */90 has the step 90; the limit is 59" in message


@pytest.mark.parametrize("field", ["start_ms", "end_ms"])
async def test_schedule_times_must_be_calendar_dates(field: str, rig: SchedulingRig) -> None:
    """Whoever shows its times makes dates of them."""
    answer = await rig.put("last", **{field: MOMENT_MS_MAX})
    assert answer["outcome"] == "created"
    code, message = await rig.put("beyond", **{field: MOMENT_MS_MAX + 1})
    assert code == "bad_request"
    assert field in message and str(MOMENT_MS_MAX) in message
