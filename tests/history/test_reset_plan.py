"""What a group may be given again, out of a history: by the process that a daemon starts."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.history_rig import (
    HOUR_MS,
    NOW_MS,
    Record,
    acked,
    delivered,
    enqueued,
    fill,
    make_id,
    write,
)
from tickwheel.history.lines import EventKind
from tickwheel.history.reset_plan import (
    Count,
    Plan,
    ResetScope,
    beginning,
    command,
    events_of,
    missing_epochs,
    request,
)
from tickwheel.history.reset_plan import fill as fill_plan
from tickwheel.history.segments import SegmentName, hour_folder, hour_of, write_last_backup
from tickwheel.model.records import TaskOptions, TaskRow

A, B, C, D = (make_id(i) for i in range(4))
DUE = NOW_MS + 1_000
WANTED = ResetScope("t", "g", 0, NOW_MS + 60_000)
DAY_MS = 86_400_000


def plan_of(
    folder: Path, *records: Record, wanted: ResetScope = WANTED, size: int = 1 << 30
) -> Plan:
    fill(folder, [[record] for record in records])
    path = folder / "plan"  # the process does the same: server/shard/test_resets.py
    with Plan(str(path), size) as plan:
        missing = missing_epochs(folder, 0, wanted)
        begins_ms = beginning(folder, 0)
        fill_plan(plan, lambda: events_of(folder, 0, wanted.topic), wanted, begins_ms, missing)
    return Plan(str(path))


def planner(
    folder: Path, wanted: ResetScope = WANTED, size: int = 1 << 30
) -> subprocess.Popen[bytes]:
    """The process that computes a plan; closing its input stands for the end of the daemon."""
    process = subprocess.Popen(
        command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(request(str(folder / "plan"), str(folder), 0, size, wanted))
    process.stdin.flush()
    return process


def test_a_planner_ends_with_its_daemon(tmp_path: Path) -> None:
    segment = tmp_path / hour_folder(hour_of(NOW_MS)) / str(SegmentName("n", 0, 1, 1, sealed=False))
    segment.parent.mkdir(parents=True)
    os.mkfifo(segment)  # it is never read to its end
    with planner(tmp_path) as process, segment.open("wb"):
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 1


def ids(plan: Plan) -> list[int]:
    return [kept.id for kept in plan.read((-1, -1), 100, 1 << 20)]


def ended(how: str, group: str | None, *some: int, last: bool | None = None) -> Record:
    return [EventKind.ENDED, NOW_MS + 7, "t", group, how, list(some), last]


def put(*some: int, due_ms: int = DUE, **options: Any) -> Record:
    row = tuple(TaskOptions(**options)) if options else None
    given = {i: list(row) for i in range(len(some))} if row is not None else None
    return enqueued(list(some), due_ms, options=given, bodies=[f"{i}".encode() for i in some])


def ack(*some: int, group: str = "g", last: bool = True) -> Record:
    return acked(list(some), group=group, ended=last)


def test_acked_tasks_are_planned_with_all_fields(tmp_path: Path) -> None:
    given = {"key": "k", "tag": "eu", "properties": {"n": 1}, "priority": 3, "order_key": "c"}
    plan = plan_of(tmp_path, put(A, B, **given), delivered([A], due_ms=DUE), ack(A, last=False))
    (kept,) = plan.read((-1, -1), 100, 1 << 20)
    assert (kept.id, kept.due_ms, kept.body) == (A, DUE, str(A).encode())
    assert kept.options == TaskOptions(**given)
    assert plan.count() == Count(1, DUE, DUE, 0)


@pytest.mark.parametrize(
    ("records", "given"),
    [
        ([ack(A, group="other", last=False)], False),
        ([ack(A, group="other", last=True)], True),
        ([delivered([A])], False),
        ([[EventKind.DEAD, NOW_MS + 3, "t", "g", [A], 1, "no"]], False),
        ([[EventKind.DEAD, NOW_MS + 3, "t", "g", [A], 1, "no"], ended("deleted", "g", A)], True),
        ([ended("filtered", "g", A, last=False)], True),
        ([ended("expired", "g", A, last=True)], False),
        ([ended("expired", "other", A, last=True)], True),
        ([ended("cancelled", None, A)], False),
        ([ack(A, last=False), ended("cancelled", None, A)], False),
        ([ended("deleted", None, A)], False),
        ([ack(A), [EventKind.REQUEUED, NOW_MS + 9, "t", "other", [A]]], True),
    ],
)
def test_the_state_in_the_history_decides_the_plan(
    tmp_path: Path, records: list[Record], given: bool
) -> None:
    assert ids(plan_of(tmp_path, put(A), *records)) == ([A] if given else [])


def test_only_tasks_due_in_the_period_are_planned_in_order(tmp_path: Path) -> None:
    wanted = ResetScope("t", "g", DUE, DUE + 10)
    dues = {A: DUE + 10, B: DUE, C: DUE - 1, D: DUE + 11}
    records = [put(one, due_ms=due_ms) for one, due_ms in dues.items()]
    plan = plan_of(tmp_path, *records, ack(A, B, C, D), wanted=wanted)
    assert ids(plan) == [B, A]
    assert plan.read((DUE, B), 100, 1 << 20)[0].id == A
    assert plan.count() == Count(2, DUE, DUE + 10, 0)


def test_rescheduled_tasks_count_by_their_last_due_time(tmp_path: Path) -> None:
    wanted = ResetScope("t", "g", DUE, DUE + 10)
    moved_in = [EventKind.RESCHEDULED, NOW_MS, "t", [A], [DUE]]
    moved_out = [EventKind.RESCHEDULED, NOW_MS, "t", [B], [DUE - 1]]
    retried = [EventKind.RESCHEDULED, NOW_MS, "t", [C], [DUE + DAY_MS]]
    released = [EventKind.RELEASED, NOW_MS, "t", "g", "w@1", [D], 1]
    moved_later = [EventKind.RESCHEDULED, NOW_MS, "t", [D], [DUE + 3]]
    plan = plan_of(
        tmp_path, put(A, due_ms=DUE + DAY_MS), put(B, C), put(D, due_ms=DUE - 1), moved_in,
        moved_out, delivered([C], due_ms=DUE), retried, delivered([D], due_ms=DUE - 1), released,
        moved_later, delivered([D], 2, due_ms=DUE + 3), ack(A, B, C, D), wanted=wanted,
    )  # fmt: skip
    (first, second, third) = plan.read((-1, -1), 100, 1 << 20)
    assert (first.id, first.body, second.id, third.id) == (A, str(A).encode(), C, D)


def test_a_replaced_task_is_planned_with_its_last_content(tmp_path: Path) -> None:
    replaced = [EventKind.REPLACED, NOW_MS, "p", [A], [DUE + 5], "t", {}, [b"new"], None]
    (kept,) = plan_of(tmp_path, put(A), replaced, ack(A)).read((-1, -1), 100, 1 << 20)
    assert (kept.due_ms, kept.body) == (DUE + 5, b"new")


def test_the_plan_ends_at_the_mark(tmp_path: Path) -> None:
    mark = [EventKind.GROUP, NOW_MS, "t", "g", "reset", {"bulk": "reset-1"}]
    other = [EventKind.GROUP, NOW_MS, "t", "g", "reset", {"bulk": "reset-0"}]
    wanted = ResetScope("t", "g", 0, NOW_MS + 60_000, "reset-1")
    plan = plan_of(tmp_path, put(A, B), other, ack(A), mark, ack(B), wanted=wanted)
    assert ids(plan) == [A]


def test_replayed_tasks_are_not_planned(tmp_path: Path) -> None:
    again = enqueued([B], DUE, options={0: [*[None] * 10, [A, "g", None]]}, bodies=[b"x"])
    assert ids(plan_of(tmp_path, put(A), ack(A), again, delivered([B]), ack(B))) == [A]


def test_tasks_of_other_topics_are_not_planned(tmp_path: Path) -> None:
    there = enqueued([B], DUE, "else", bodies=[b"x"])
    assert ids(plan_of(tmp_path, put(A), there, ack(A), acked([B], topic="else"))) == [A]


def test_a_task_without_a_body_is_lost_unless_stored(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, enqueued([A, B, C], DUE), ack(A, B, last=False))
    assert plan.count() == Count(0, None, None, 2)
    assert [kept.body for kept in plan.read((-1, -1), 100, 1 << 20)] == [None, None]
    plan.add_stored(WANTED, [(TaskRow(A, DUE, "t", b""), True), (TaskRow(C, DUE, "t", b""), True)])
    assert plan.count() == Count(1, DUE, DUE, 1)


def test_stored_tasks_missing_in_the_history_are_planned(tmp_path: Path) -> None:
    plan, late = plan_of(tmp_path), TaskRow(D, NOW_MS + DAY_MS, "t", b"")
    stored = [(TaskRow(A, DUE, "t", b""), True), (TaskRow(B, DUE, "t", b""), False), (late, True)]
    plan.add_stored(WANTED, stored)
    assert ids(plan) == [A]


def test_a_task_without_its_enqueue_event_is_counted_as_lost(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, delivered([A], due_ms=DUE), ack(A))
    assert plan.count() == Count(0, None, None, 1)


def test_stored_tasks_before_the_group_are_planned(tmp_path: Path) -> None:
    wanted = ResetScope("t", "g", 0, NOW_MS + 60_000, since_ms=DUE + 1, since_id=B)
    plan = plan_of(tmp_path, put(A, B, C), wanted=wanted)
    assert ids(plan) == [A, B]
    plan.add_stored(wanted, [(TaskRow(item, DUE, "t", b""), item == A) for item in (A, B, C)])
    assert ids(plan) == [A]


def test_the_plan_respects_the_groups_filter(tmp_path: Path) -> None:
    wanted = ResetScope("t", "g", 0, NOW_MS + 60_000, where="n > 1 AND key LIKE 'k%'")
    tasks = [put(A, key="k", properties={"n": 2}), put(B, key="k", properties={"n": 1}), put(C)]
    plan = plan_of(tmp_path, *tasks, ack(A, B, C), wanted=wanted)
    assert ids(plan) == [A]
    fits = TaskRow(D, DUE, "t", b"", TaskOptions("k7", properties={"n": 5}))
    plan.add_stored(wanted, [(fits, True), (fits._replace(id=D + 1, options=None), True)])
    assert ids(plan) == [A, D]


def test_a_page_ends_at_its_bytes(tmp_path: Path) -> None:
    bodies = [b"x" * 1_000] * 3
    plan = plan_of(tmp_path, enqueued([A, B, C], DUE, bodies=bodies), ack(A, B, C))
    assert [kept.id for kept in plan.read((-1, -1), 100, 2_000)] == [A, B]
    assert [kept.id for kept in plan.read((-1, -1), 100, 10)] == [A]
    assert [kept.id for kept in plan.read((-1, -1), 2, 1 << 20)] == [A, B]


def test_a_plan_over_its_limit_fails(tmp_path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError, match="full"):
        plan_of(tmp_path, enqueued([A], DUE, bodies=[b"x" * 100_000]), ack(A), size=40_960)


def test_many_tasks_take_little_memory_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tickwheel.history import reset_plan

    monkeypatch.setattr(reset_plan, "CACHED_MAX", 7)
    monkeypatch.setattr(reset_plan, "CONTENTS_MAX", 3)
    some = [make_id(i) for i in range(50)]
    fill(tmp_path, [[put(*some)], [delivered(some[::-1])], [ack(*some[::2])], [ack(*some[1::4])]])
    with reset_plan.Plan() as plan:
        reset_plan.fill(plan, lambda: reset_plan.events_of(tmp_path, 0, "t"), WANTED)
        assert ids(plan) == sorted({*some[::2], *some[1::4]})
        assert all(kept.body for kept in plan.read((-1, -1), 100, 1 << 20))


DROPPED = "the spool is full"


def dropped(at_ms: int, count: int | None = 5) -> Record:
    return [EventKind.DROPPED, at_ms, count, DROPPED]


@pytest.mark.parametrize(("at_ms", "gaps"), [(NOW_MS - 1, 0), (NOW_MS, 1), (DUE + 60_000, 1)])
def test_dropped_events_in_the_period_are_a_gap(tmp_path: Path, at_ms: int, gaps: int) -> None:
    wanted = replace(WANTED, from_ms=NOW_MS)
    with plan_of(tmp_path, put(A), dropped(at_ms), ack(A), wanted=wanted) as plan:
        assert (plan.count().tasks, plan.count().incomplete) == (1, gaps)


def test_a_gap_after_the_mark_is_ignored(tmp_path: Path) -> None:
    wanted = replace(WANTED, bulk="j")
    reset: Record = [EventKind.GROUP, DUE + 9, "t", "g", "reset", {"bulk": "j"}]
    with plan_of(tmp_path, put(A), reset, dropped(DUE + 10), wanted=wanted) as plan:
        assert plan.count().incomplete == 0


@pytest.mark.parametrize(("after_ms", "gaps"), [(-HOUR_MS, 0), (0, 2), (HOUR_MS, 0)])
def test_missing_epochs_are_gaps(tmp_path: Path, after_ms: int, gaps: int) -> None:
    """Another machine had the shard, before the last epoch that is there, and wrote elsewhere."""
    late: Record = [EventKind.DAEMON, NOW_MS + after_ms, "started", {"clean": True}]
    write(tmp_path, [[put(A)], [ack(A)]], epoch=1)
    write(tmp_path, [[late]], epoch=4)
    write_last_backup(tmp_path, 0, NOW_MS, "copy.db")
    wanted = replace(WANTED, from_ms=NOW_MS)
    with plan_of(tmp_path, wanted=wanted) as plan:
        assert (plan.count().tasks, plan.count().incomplete) == (1, gaps)


@pytest.mark.parametrize("first_seq", [1, 2])
@pytest.mark.parametrize("epoch", [1, 2])
@pytest.mark.parametrize("before_ms", [-1, 0, 1])
def test_a_history_starting_after_the_period_has_a_gap(
    tmp_path: Path, first_seq: int, epoch: int, before_ms: int
) -> None:
    """Unless it begins with the store."""
    path = tmp_path / hour_folder(hour_of(NOW_MS)) / str(SegmentName("n", 0, epoch, 1, False))
    path.parent.mkdir(parents=True)
    event = {"time_ms": NOW_MS, "event": "started", "seq": first_seq, "epoch": epoch}
    path.write_text(json.dumps(event) + "\n")
    is_whole = (first_seq, epoch) == (1, 1)
    begins_ms = beginning(tmp_path, 0)
    assert begins_ms == (None if is_whole else NOW_MS)
    assert beginning(tmp_path, 1) is None, "another shard"
    for from_ms in (NOW_MS - before_ms, 0):
        with Plan() as plan:
            fill_plan(plan, lambda: iter(()), replace(WANTED, from_ms=from_ms), begins_ms)
            expected = int(not is_whole and before_ms > 0 and from_ms > 0)
            assert plan.count().incomplete == expected, "all that is known has no gap"
