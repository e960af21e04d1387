"""A lost store again: from a backup and hand-written history, case by case."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from support.history_rig import (
    HOUR_MS,
    NOW_MS,
    Record,
    acked,
    delivered,
    drain,
    enqueued,
    fill,
    make_id,
    spool_of,
    write,
)
from support.restore_rig import (
    LATER_MS,
    STARTED,
    group,
    held,
    make_backup,
    restored,
    run,
    stopped,
    url,
)
from tickwheel.engine.ownership import owes
from tickwheel.errors import BadRequest, Conflict, NotFound
from tickwheel.history import segments
from tickwheel.history.lines import EventKind
from tickwheel.history.restore import Plan, restore
from tickwheel.model.kinds import PAUSED_KEY, SESSION, PausedKey, keyed
from tickwheel.model.policies import BUILT_IN, RetryPolicy
from tickwheel.model.records import (
    BY_DUE_ALONE,
    ID_STEP,
    DeadRow,
    Failure,
    FormerFilter,
    GroupRow,
    GroupSettings,
    Outcome,
    ProgressRow,
    ProgressState,
    SessionRow,
    TaskOptions,
    TaskRow,
)
from tickwheel.persistence import filling
from tickwheel.persistence.contract import StoreUnusable

A, B, C, D = (make_id(n) for n in range(4))
DUE = NOW_MS + 5
OLD = TaskRow(A, DUE, "t", b"old")


BODIES = [b"\x00\xff", b"c", b""]


def t(after_ms: int) -> int:
    return NOW_MS + after_ms


def failed(kind: EventKind, task: int, attempt: int, at_ms: int, *rest: Any) -> list[Any]:
    return [kind, at_ms, "t", "g", "w@1", [task], [attempt], *rest]


def created(topic: str, name: str, since_ms: int, since_id: int) -> list[Any]:
    since = {"since_ms": since_ms, "since_id": str(since_id)}
    return [EventKind.GROUP, t(3), topic, name, "created", since]


async def test_a_restore_without_events_equals_the_backup(tmp_path: Path) -> None:
    session = SessionRow(b"s" * 16, 3, NOW_MS, ((3, A, 1, NOW_MS),))
    paused = PausedKey("t", "g", None, "k", NOW_MS, "ops")
    records = keyed(SESSION, [session]) | keyed(PAUSED_KEY, [paused])
    backup = await make_backup(tmp_path, [OLD], records=records, ended={D: Outcome.CANCELLED})
    report, found = await restored(tmp_path, backup, history=())
    assert found.rows == {A: OLD}
    assert found.small.of_kind(SESSION) == [session]
    assert found.small.of_kind(PAUSED_KEY) == [paused]
    assert found.outcomes == {D: Outcome.CANCELLED}
    assert found.groups == {("t", "g"): GroupRow("t", "g", 0)}
    assert (report.restored, report.from_backup, report.exact) == (1, 1, False)


async def test_tasks_enqueued_since_are_restored_with_all_fields(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, [OLD])
    options = TaskOptions(
        "k", "", {"n": 1.5, "b": True}, 7, 60_000, RetryPolicy(5, 1.0, 0, 3, 0.0, "fixed")
    )
    given = [options, TaskOptions(retry="rocketmq")]
    write(
        tmp_path,
        [[STARTED, group()],
         [enqueued([B, C, D], DUE, options=dict(enumerate(given)), bodies=BODIES)],
         [stopped()]],
    )  # fmt: skip
    report, found = await restored(tmp_path, backup)
    assert found.rows == {
        A: OLD,
        B: TaskRow(B, DUE, "t", b"\x00\xff", options),
        C: TaskRow(C, DUE, "t", b"c", TaskOptions(retry="rocketmq")),
        D: TaskRow(D, DUE, "t", b""),
    }
    assert (report.restored, report.from_backup, report.from_history) == (4, 1, 3)
    assert report.exact and report.gaps == []


async def test_a_due_window_is_restored_with_its_chosen_time(tmp_path: Path) -> None:
    options = TaskOptions(within_ms=600_000, asked_ms=DUE - 7)
    given = {0: [None, None, None, 0, None, None, None, 600_000, DUE - 7]}
    write(tmp_path, [[STARTED, group()], [enqueued([B], DUE, options=given, bodies=[b"x"])],
                     [stopped()]])  # fmt: skip
    await run(tmp_path, await make_backup(tmp_path, [OLD]))
    assert (await held(url(tmp_path))).rows[B] == TaskRow(B, DUE, "t", b"x", options)


async def test_order_keys_and_ordering_settings_are_restored(tmp_path: Path) -> None:
    given = {0: [None, None, None, 0, None, None, None, None, None, "customer 7"]}
    settings = {
        "order_retry_ms": 50, "order_attempts": 3, "order_failure": "hold", "fair_by": "tenant",
        "limit_each": 5, "rate_each": 0.5,
    }  # fmt: skip
    configured = [EventKind.GROUP, t(3), "t", "g", "configured", settings]
    write(tmp_path, [[STARTED, group(), configured],
                     [enqueued([B], DUE, options=given, bodies=[b"x"])], [stopped()]])  # fmt: skip
    _, found = await restored(tmp_path, await make_backup(tmp_path, [OLD]))
    options = TaskOptions(order_key="customer 7")
    assert found.rows[B] == TaskRow(B, DUE, "t", b"x", options)
    assert found.groups["t", "g"].settings == GroupSettings().replaced(settings)


async def test_ended_tasks_are_not_restored(tmp_path: Path) -> None:
    rows = [TaskRow(i, DUE, "t", b"x") for i in (A, B, C, D)]
    backup = await make_backup(tmp_path, rows)
    write(
        tmp_path,
        [[STARTED], [delivered([A], time_ms=t(6)), acked([A], time_ms=t(7))],
         [[EventKind.ENDED, t(8), "t", None, "cancelled", [B], None]],
         [[EventKind.ENDED, t(9), "t", "g", "expired", [C], True]], [stopped()]],
    )  # fmt: skip
    report, found = await restored(tmp_path, backup)
    assert list(found.rows) == [D]
    assert found.outcomes == {A: Outcome.ACKED, B: Outcome.CANCELLED, C: Outcome.EXPIRED}
    assert report.ended_since == 3


async def test_a_task_replaced_in_one_group_stays_in_the_other(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, [TaskRow(A, DUE, "t", b"x")])
    gave_way = [EventKind.ENDED, t(8), "t", "g", "cancelled", [A], False, "replaced by 7; no"]
    write(tmp_path, [[STARTED], [delivered([A], time_ms=t(6)), gave_way], [stopped()]])
    _, found = await restored(tmp_path, backup)
    assert list(found.rows) == [A]
    assert found.progress[A, "g"].state is ProgressState.REPLACED


async def test_a_task_replaced_in_flight_has_no_further_attempt(tmp_path: Path) -> None:
    """Also where the backup alone knows it: an event of its delivery from before takes it back
    no more."""
    known = ProgressRow(C, "g", ProgressState.IN_FLIGHT, 1, t(40), 1, replaced_by=D)
    rows = [TaskRow(i, DUE, "t", b"x", TaskOptions("k")) for i in (A, C)]
    backup = await make_backup(tmp_path, rows, progress=[known])
    overtaken = [EventKind.OVERTAKEN, t(7), "t", "g", [A], 1, B]
    write(tmp_path, [[STARTED], [delivered([A, C], time_ms=t(6)), overtaken], [stopped()]])
    _, found = await restored(tmp_path, backup)
    assert {i: found.progress[i, "g"].replaced_by for i in (A, C)} == {A: B, C: D}


async def test_events_from_before_the_backup_are_ignored(tmp_path: Path) -> None:
    """Ended before it, enqueued before it, failed before it: the backup knows it already."""
    failure = Failure(1, t(-40), "no", "w@1")
    waiting = ProgressRow(A, "g", ProgressState.WAITING, 1, t(100), 1, (failure,), 1)
    old = OLD._replace(due_ms=t(-50))
    backup = await make_backup(tmp_path, [old, TaskRow(C, DUE, "t", b"c")], progress=[waiting])
    write(
        tmp_path,
        [[STARTED, group()], [enqueued([A, B], t(-50), time_ms=t(-60), bodies=[b"?", b"?"])],
         [delivered([A, B], time_ms=t(-49), due_ms=t(-50))],
         [failed(EventKind.NACKED, A, 1, t(-40), [t(100)], ["no"]), acked([B], time_ms=t(-40))],
         [stopped()]],
    )  # fmt: skip
    report, found = await restored(tmp_path, backup)
    assert found.rows == {A: old, C: TaskRow(C, DUE, "t", b"c")}
    assert found.progress == {(A, "g"): waiting}
    assert report.exact


async def test_attempts_failures_and_due_times_are_restored(tmp_path: Path) -> None:
    rows = [TaskRow(i, DUE, "t", b"x") for i in (A, B, C, D)]
    backup = await make_backup(tmp_path, rows)
    write(
        tmp_path,
        [[STARTED], [delivered([A, B, C], time_ms=t(6))],
         [failed(EventKind.NACKED, A, 1, t(10), [t(HOUR_MS * 9)], ["no"])],
         [failed(EventKind.LEASE_OVER, B, 1, t(20), ["lease over"])],
         [failed(EventKind.RELEASED, C, 1, t(21))],
         [delivered([B], 2, time_ms=t(30))],
         [[EventKind.RESCHEDULED, t(31), "t", [D], [t(500)]]],
         [stopped()]],
    )  # fmt: skip
    report, found = await restored(tmp_path, backup)
    released, waiting = ProgressState.RELEASED, ProgressState.WAITING
    over = Failure(1, t(20), "lease over", "w@1")
    assert found.progress == {
        (A, "g"): ProgressRow(
            A, "g", waiting, 1, t(HOUR_MS * 9), 1, (Failure(1, t(10), "no", "w@1"),), 1
        ),
        (B, "g"): ProgressRow(B, "g", released, 2, t(30), 1, (over,), 1),
    }
    assert {i: row.due_ms for i, row in found.rows.items()} == {A: DUE, B: DUE, C: DUE, D: t(500)}
    assert report.waiting == 1


async def test_failures_are_kept_when_the_clock_is_set_back_between_them(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, [TaskRow(i, DUE, "t", b"x") for i in (A, B)])
    write(
        tmp_path,
        [[STARTED], [delivered([A, B], time_ms=t(6))],
         [failed(EventKind.NACKED, i, 1, t(900), [t(901)], ["no"]) for i in (A, B)],
         [delivered([A, B], 2, time_ms=t(20))],
         [[EventKind.DEAD, t(30), "t", "g", [A], [2], ["never"]]], [stopped()]],
    )  # fmt: skip
    _, found = await restored(tmp_path, backup)
    first, second = Failure(1, t(900), "no", "w@1"), Failure(2, t(30), "never", "w@1")
    assert (found.dead[A, "g"].failures, found.dead[A, "g"].failed) == ((first, second), 2)
    assert (found.progress[B, "g"].failures, found.progress[B, "g"].failed) == ((first,), 1)


@pytest.mark.parametrize("overdue", [True, False])
async def test_a_held_order_key_is_restored_as_held(tmp_path: Path, overdue: bool) -> None:
    keyed_options = TaskOptions(order_key="k")
    held_before = ProgressRow(B, "g", ProgressState.HELD, 1, t(-9), 1)
    rows = [TaskRow(i, t(-50), "t", b"x", keyed_options) for i in (A, B)]
    backup = await make_backup(tmp_path, rows, progress=[held_before])
    write(
        tmp_path,
        [[STARTED], [delivered([A], time_ms=t(6))],
         [failed(EventKind.NACKED, A, 1, t(10), [None], ["no"])], [stopped()]],
    )  # fmt: skip
    report, found = await restored(tmp_path, backup, include_overdue=overdue)
    states = {(row.id, row.state, row.at_ms) for row in found.progress.values()}
    assert states == {(A, ProgressState.HELD, t(10)), (B, ProgressState.HELD, t(-9))}
    assert report.overdue == 0


@pytest.mark.parametrize("backed_up", [False, True])
async def test_the_task_of_a_skipped_key_keeps_all_failures(
    tmp_path: Path, backed_up: bool
) -> None:
    row = TaskRow(A, t(-50), "t", b"x", TaskOptions(order_key="k"))
    failures = Failure(1, t(10), "no", "w@1"), Failure(1, t(20), "skipped", "")
    letter = DeadRow(A, "g", "t", t(20), 1, "skipped", failures, 2)
    backup = await make_backup(tmp_path, [row], dead=[letter] if backed_up else ())
    write(
        tmp_path,
        [[STARTED], [] if backed_up else [delivered([A], time_ms=t(6))],
         [] if backed_up else [failed(EventKind.NACKED, A, 1, t(10), [None], ["no"])],
         [[EventKind.DEAD, t(20), "t", "g", [A], [1], ["skipped"]]], [stopped()]],
    )  # fmt: skip
    _, found = await restored(tmp_path, backup)
    assert found.dead == {(A, "g"): letter}
    assert found.progress == {}


async def test_a_snoozed_task_waits_for_its_time(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, [OLD])
    write(
        tmp_path,
        [[STARTED], [delivered([A], time_ms=t(6))],
         [[EventKind.RELEASED, t(10), "t", "g", "w", [A], [1], [t(900)]]], [stopped()]],
    )  # fmt: skip
    await run(tmp_path, backup)
    row = (await held(url(tmp_path))).progress[A, "g"]
    assert (row.state, row.at_ms, row.attempt) == (ProgressState.WAITING, t(900), 1)


async def test_rescheduled_after_a_failure_only_the_retry_moves(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, [OLD])
    write(
        tmp_path,
        [[STARTED], [delivered([A], time_ms=t(6))],
         [failed(EventKind.NACKED, A, 1, t(10), [t(900)], ["no"])],
         [[EventKind.RESCHEDULED, t(31), "t", [A], [t(7_777)]]], [stopped()]],
    )  # fmt: skip
    _, found = await restored(tmp_path, backup)
    assert found.rows == {A: OLD}
    row = found.progress[A, "g"]
    assert (row.state, row.at_ms, row.attempt) == (ProgressState.WAITING, t(7_777), 1)
    assert len(row.failures) == 1


async def test_dead_letters_are_made_deleted_and_requeued(tmp_path: Path) -> None:
    rows = [TaskRow(i, DUE, "t", b"x") for i in (A, B, C, D)]
    letters = [DeadRow(i, "g", "t", t(-9), 3, "why") for i in (B, C, D)]
    backup = await make_backup(tmp_path, rows, dead=letters)
    dead = [EventKind.DEAD, t(9), "t", "g", [A], [1], ["w" * 300]]
    write(
        tmp_path,
        [[STARTED], [delivered([A], time_ms=t(6)), dead],
         [[EventKind.ENDED, t(10), "t", "g", "deleted", [C], True]],
         [[EventKind.REQUEUED, t(11), "t", "g", [D]],
          [EventKind.REQUEUED, t(11), "t", "g", [B], 77]],
         [stopped()]],
    )  # fmt: skip
    report, found = await restored(tmp_path, backup)
    assert found.rows == {
        A: rows[0],
        B: rows[1]._replace(options=TaskOptions(ttl_ms=77)),
        D: rows[3],
    }
    failure = Failure(1, t(9), "w" * 200, "w@1")
    assert found.dead == {(A, "g"): DeadRow(A, "g", "t", t(9), 1, "w" * 200, (failure,), failed=1)}
    assert found.progress == {}
    assert report.dead_letters == 1


async def test_a_replaced_task_has_its_new_content(tmp_path: Path) -> None:
    """One whose new body the history does not hold is not given the old one."""
    backup = await make_backup(tmp_path, [TaskRow(i, DUE, "t", b"old") for i in (A, B, C)])
    whole = [
        EventKind.REPLACED,
        t(6),
        "p",
        [A],
        [DUE + 1],
        "t",
        {0: ["k", None, None, 3]},
        [b"new"],
        None,
    ]
    placed = [EventKind.REPLACED, t(6), "p", [B], [DUE + 2], "t", {}, [b"newer"], [D]]
    bodiless = [EventKind.REPLACED, t(6), "p", [C], [DUE + 3], "t", {}, None, None]
    kept = [EventKind.MERGED, t(7), "p", "t", "kept", [A]]
    write(tmp_path, [[STARTED], [whole, placed, bodiless, kept], [stopped()]])
    report, found = await restored(tmp_path, backup, allow_missing_bodies=True)
    assert found.rows[A] == TaskRow(A, DUE + 1, "t", b"new", TaskOptions("k", priority=3))
    assert found.rows[B] == TaskRow(B, DUE + 2, "t", b"newer", TaskOptions(order_id=D))
    assert C not in found.rows and report.without_body.count == 1


async def test_a_task_replaced_before_the_backup_has_the_body_of_the_backup(tmp_path: Path) -> None:
    """Also if the history, which has no bodies, is read from a moment before the backup."""
    backup = await make_backup(tmp_path, [OLD])
    replaced = [[EventKind.REPLACED, t(at), "p", [A], [DUE], "t", {}, None, None]
                for at in (-900, -5)]  # fmt: skip
    write(tmp_path, [[STARTED], replaced, [stopped()]])
    report, found = await restored(tmp_path, backup)
    assert found.rows == {A: OLD}
    assert report.exact and report.without_body.count == 0


async def test_each_group_owes_its_own_end(tmp_path: Path) -> None:
    groups = [GroupRow("t", "g", 0), GroupRow("t", "h", 0), GroupRow("t", "late", t(7))]
    rows = [TaskRow(i, DUE, "t", b"x") for i in (A, B, C)]
    backup = await make_backup(tmp_path, rows, groups=groups)
    both = [delivered([A, B, C], group=name, time_ms=t(6)) for name in ("g", "h")]
    write(
        tmp_path,
        [[STARTED], both, [acked([A, B], group="g", ended=False), acked([A], group="h")],
         [[EventKind.DEAD, t(9), "t", "h", [C], [1], ["no"]], acked([C], group="g", ended=False)],
         [stopped()]],
    )  # fmt: skip
    _, found = await restored(tmp_path, backup)
    assert set(found.rows) == {B, C}
    done, released = ProgressState.DONE, ProgressState.RELEASED
    assert {key: row.state for key, row in found.progress.items()} == {
        (B, "g"): done, (B, "h"): released, (C, "g"): done
    }  # fmt: skip
    assert set(found.dead) == {(C, "h")}
    assert set(found.groups) == {("t", name) for name in ("g", "h", "late")}


async def test_groups_of_the_history_are_restored(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, [OLD, TaskRow(B, DUE, "t", b"b")])
    settings = {"rate": 2.5, "retry": {"kind": "none"}}
    closed = {"closed_ms": t(8), "closed_id": str(B)}
    write(
        tmp_path,
        [[STARTED], [created("t", "h", t(3), A)],
         [[EventKind.GROUP, t(3), "t", "h", "configured", settings]],
         [created("u", "first", 0, B)], [created("u", "second", t(4), B)],
         [[EventKind.GROUP, t(5), "t", None, "configured", {"paused": True}]],
         [[EventKind.GROUP, t(5), "u", None, "configured", {"rate": 5, "closed_ms": t(5)}]],
         [[EventKind.GROUP, t(5), "v", None, "configured", {"broadcast_only": True}]],
         [delivered([A, B], group=name, time_ms=t(6)) for name in ("g", "h")],
         [[EventKind.GROUP, t(8), "t", "g", "deleted", closed],
          [EventKind.ENDED, t(9), "t", "g", "deleted", [A, B], False]],
         [acked([A], group="h")], [stopped()]],
    )  # fmt: skip
    report, found = await restored(tmp_path, backup)
    # A daemon that starts on it goes on with the deletion, and finds nothing left to do.
    deleted = GroupSettings(closed_ms=t(8), closed_id=B)
    assert found.groups == {
        ("t", ""): GroupRow("t", "", 0, GroupSettings(paused=True)),
        ("v", ""): GroupRow("v", "", 0, GroupSettings(broadcast_only=True)),
        ("u", ""): GroupRow("u", "", 0, GroupSettings(rate=5, closed_ms=t(5))),
        ("t", "g"): GroupRow("t", "g", 0, deleted),
        ("t", "h"): GroupRow("t", "h", t(3), GroupSettings(rate=2.5, retry=BUILT_IN["none"]), A),
        ("u", "first"): GroupRow("u", "first", 0, None, B),
        ("u", "second"): GroupRow("u", "second", t(4), None, B),
    }
    assert set(found.rows) == {B}
    assert set(found.progress) == {(B, "h")}
    assert report.groups == 3


async def test_filters_of_the_history_are_restored(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, [OLD, TaskRow(B, DUE, "t", b"b")])
    former = [["eu", None, DUE, str(B)], [None, "n > 1", t(5), str(2**60)]]
    settings = {"tags": "us", "where": "n > 2", "former": former}
    write(
        tmp_path,
        [[STARTED], [[EventKind.GROUP, t(3), "t", "h", "configured", settings]],
         [created("t", "h", t(3), A)],
         [[EventKind.GROUP, t(4), "t", "h", "configured", settings]],
         [[EventKind.ENDED, t(9), "t", "h", "filtered", [A, B], False]],
         [[EventKind.ENDED, t(9), "t", "h", "filtered", [B], True]], [stopped()]],
    )  # fmt: skip
    report, found = await restored(tmp_path, backup)
    filters = (FormerFilter("eu", None, DUE, B), FormerFilter(None, "n > 1", t(5), 2**60))
    assert found.groups["t", "h"].settings == GroupSettings(
        tags="us", where="n > 2", former=filters
    )
    assert set(found.rows) == {A}
    assert not found.progress
    assert report.restored == 1


async def test_groups_and_moved_tasks_keep_their_places(tmp_path: Path) -> None:
    """What a group is owed after a clock was set back is the same in the restored store."""
    backup = await make_backup(tmp_path, [OLD, TaskRow(B, DUE, "t", b"b")])
    since = {"since_ms": t(30), "since_id": str(B)}
    place = B + 5 * ID_STEP
    write(
        tmp_path,
        [[STARTED], [[EventKind.GROUP, t(3), "t", "h", "created", since]],
         [[EventKind.RESCHEDULED, t(4), "t", [B], [t(20)], [place]]],
         [[EventKind.RESCHEDULED, t(5), "t", [A], [t(20)]]], [stopped()]],
    )  # fmt: skip
    _, found = await restored(tmp_path, backup)
    assert found.groups["t", "h"] == GroupRow("t", "h", t(30), None, B)
    assert found.rows[B] == TaskRow(B, t(20), "t", b"b", TaskOptions(order_id=place))
    assert found.rows[A] == OLD._replace(due_ms=t(20))
    assert found.opened.id_mark >= place, "a place is given once"
    owed = [owes(found.groups["t", "h"], row) for row in (found.rows[A], found.rows[B])]
    assert owed == [False, True]


async def test_expiry_without_groups_and_broadcasts_are_restored(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, [OLD, TaskRow(B, DUE, "t", b"b")], groups=[])
    write(
        tmp_path,
        [[STARTED], [delivered([A, B], group=None, time_ms=t(6))],  # type: ignore[arg-type]  # as for broadcasts
         [[EventKind.ENDED, t(9), "t", None, "expired", [B], None]], [stopped()]],
    )  # fmt: skip
    _, found = await restored(tmp_path, backup)
    assert found.rows == {A: OLD}
    assert found.progress == {} and found.groups == {}


# --- what is asked for -------------------------------------------------------------------------


async def test_a_single_task_can_be_restored(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, [OLD, TaskRow(B, DUE, "t", b"b")])
    write(tmp_path, [[STARTED], [enqueued([C], DUE, bodies=[b"c"])], [stopped()]])
    report, found = await restored(tmp_path, backup, ids=frozenset((B, D)))
    assert set(found.rows) == {B}
    assert (report.not_found.count, report.not_found.ids) == (1, [str(D)])
    os.unlink(tmp_path / "new.db")
    await run(tmp_path, backup, ids=frozenset((C,)))
    assert set((await held(url(tmp_path))).rows) == {C}


async def test_overdue_tasks_can_be_skipped(tmp_path: Path) -> None:
    later = LATER_MS + 1
    rows = [
        OLD,
        TaskRow(B, later, "t", b"b"),
        TaskRow(C, DUE, "t", b"c"),
        TaskRow(D, DUE, "t", b""),
    ]
    waiting = ProgressRow(C, "g", ProgressState.WAITING, 1, later, 1)
    backup = await make_backup(
        tmp_path, rows, progress=[waiting], dead=[DeadRow(D, "g", "t", DUE, 1, "no")]
    )
    write(tmp_path, [[STARTED], [stopped()]])
    report = await run(tmp_path, backup)
    assert (report.restored, report.overdue) == (4, 1)
    os.unlink(tmp_path / "new.db")
    report, found = await restored(tmp_path, backup, include_overdue=False)
    assert set(found.rows) == {B, C, D}  # in the future, waiting, a dead letter
    assert (report.restored, report.skipped_overdue.ids) == (3, [str(A)])


async def test_a_dry_run_writes_no_file(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, [OLD])
    write(tmp_path, [[STARTED], [stopped()]])
    before = sorted(os.listdir(tmp_path))
    report = await run(tmp_path, backup, dry_run=True)
    assert (report.restored, report.dry_run) == (1, True)
    assert sorted(os.listdir(tmp_path)) == before


async def test_a_restore_without_bodies_must_be_requested(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, [OLD])
    write(tmp_path, [[STARTED], [enqueued([B, C], DUE)], [delivered([C]), acked([C])], [stopped()]])
    report = await run(tmp_path, backup)
    assert report.refused and report.without_body.ids == [str(B)]
    assert not (tmp_path / "new.db").exists()
    report = await run(tmp_path, backup, allow_missing_bodies=True)
    assert not report.refused and report.without_body.count == 1
    assert report.clean_stop and not report.gaps and not report.exact
    assert set((await held(url(tmp_path))).rows) == {A}


async def test_history_alone_can_be_restored(tmp_path: Path) -> None:
    write(
        tmp_path,
        [[STARTED, group()], [enqueued([A, B], DUE, bodies=[b"a", b"b"])],
         [delivered([A]), acked([A])], [stopped()]],
    )  # fmt: skip
    report, found = await restored(tmp_path, None)
    assert found.rows == {B: TaskRow(B, DUE, "t", b"b")}
    assert set(found.groups) == {("t", "g")}
    assert report.exact


# --- marks -------------------------------------------------------------------------------------


async def test_epoch_and_id_mark_are_above_everything_seen(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, [OLD], opens=5)
    far = make_id(0, LATER_MS + 10 * HOUR_MS)
    write(tmp_path, [[STARTED], [enqueued([far], LATER_MS, bodies=[b""])], [stopped()]], epoch=8)
    report, found = await restored(tmp_path, backup)
    assert report.epoch == 9
    assert found.opened.epoch == 10  # raised by this look at it
    assert found.opened.id_mark == int(report.id_mark) == far
    assert found.opened.clean


async def test_ids_lost_with_the_tail_are_not_reused(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, [OLD])
    fill(tmp_path, [[STARTED], [enqueued([B], DUE, bodies=[b""])]])
    report = await run(tmp_path, backup)
    assert int(report.id_mark) >= make_id(0, LATER_MS)
    assert report.epoch > 2


# --- how exact ---------------------------------------------------------------------------------


async def test_unconverted_spools_are_read(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, [OLD])
    fill(tmp_path, [[STARTED], [enqueued([B], DUE, bodies=[b"b"])]])
    drain(tmp_path)
    fill(tmp_path, [[delivered([A]), acked([A])], [enqueued([C], DUE, bodies=[b"c"])]])
    report = await run(tmp_path, backup)
    assert set((await held(url(tmp_path))).rows) == {B, C}
    assert (report.events, report.spool_events, report.missing_events) == (5, 3, 0)
    assert not report.clean_stop and not report.exact
    assert report.tail_ms is not None


async def test_a_torn_spool_is_reported(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, [OLD])
    fill(tmp_path, [[STARTED], [enqueued([B], DUE, bodies=[b"b"])]])
    (path,) = tmp_path.glob("_state/*/spool-1-*")
    path.write_bytes(path.read_bytes()[:-3])
    report = await run(tmp_path, backup)
    assert set((await held(url(tmp_path))).rows) == {A}
    assert report.lost_bytes > 0 and "torn" in report.gaps[0]


async def test_missing_and_dropped_events_are_reported(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, [OLD])
    write(
        tmp_path,
        [
            [STARTED],
            [[EventKind.DROPPED, t(1), 12]],
            [enqueued([B], t(HOUR_MS * 2), time_ms=t(2), bodies=[b""])],
        ],
    )
    fill(
        tmp_path,
        [[enqueued([C], DUE, time_ms=t(HOUR_MS), bodies=[b""])], [stopped(t(HOUR_MS * 2))]],
    )
    drain(tmp_path)
    gone = [segment for segment in segments.find(tmp_path) if segment.hour_ms == NOW_MS + HOUR_MS]
    gone[0].path.unlink()
    report = await run(tmp_path, backup, now_ms=t(HOUR_MS * 3))
    assert (report.missing_events, report.drops, report.dropped_events) == (1, 1, 12)
    assert report.clean_stop and not report.exact
    assert len(report.gaps) == 2


async def test_a_crash_since_the_backup_is_reported(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, [OLD])
    write(tmp_path, [[[EventKind.DAEMON, t(-9), "started", {"clean": False}]]])
    write(tmp_path, [[[EventKind.DAEMON, t(5), "started", {"clean": False}]], [stopped()]], epoch=2)
    report = await run(tmp_path, backup)
    assert report.crashes == 1 and report.clean_stop and not report.exact


async def test_a_concurrent_writer_loses_no_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes up the spool, seals it and removes it between the first look and the reading."""
    backup = await make_backup(tmp_path, [OLD])
    write(tmp_path, [[STARTED]])
    fill(tmp_path, [[enqueued([B], DUE, bodies=[b"b"])]])
    real = segments.find

    def find(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(segments, "find", real)
        drain(tmp_path)
        return real(*arguments, **options)

    monkeypatch.setattr(segments, "find", find)
    report = await run(tmp_path, backup)
    assert (report.events, report.missing_events, report.lost_bytes) == (2, 0, 0)
    assert set((await held(url(tmp_path))).rows) == {A, B}


async def test_a_history_that_begins_after_the_backup_is_reported(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, [OLD], position_ms=t(-5 * HOUR_MS))
    write(tmp_path, [[group()], [stopped()]])
    report = await run(tmp_path, backup)
    assert not report.reaches_back and not report.exact
    assert "begins after" in report.gaps[0]


async def test_events_that_lack_fields_are_counted(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, [OLD])
    write(
        tmp_path,
        [[STARTED], [[EventKind.NACKED, t(1), "t", None, "", [A], [1], [t(2)], [""]]], [stopped()]],
    )
    report = await run(tmp_path, backup)
    assert report.unusable_events == 1 and not report.exact


async def test_several_folders_are_read_as_one_history(tmp_path: Path) -> None:
    """The daemons of a pair, each with its own disk."""
    backup = await make_backup(tmp_path, [OLD])
    left, right = tmp_path / "left", tmp_path / "right"
    write(left, [[STARTED], [delivered([A])]], epoch=1)
    write(right, [[enqueued([B], DUE, bodies=[b""])], [acked([A])], [stopped()]], epoch=2)
    report = await run(tmp_path, backup, history=(str(right), str(left)))
    assert set((await held(url(tmp_path))).rows) == {B}
    assert report.events == 5 and report.exact


MOVED = [
    ("host-a", 1, [[STARTED, group()], [enqueued([B, C, D], DUE, bodies=BODIES)]]),
    ("host-b", 2, [[STARTED], [delivered([A, B])], [acked([A, B])]]),
    ("host-a", 3, [[STARTED], [delivered([C]), acked([C])], [stopped()]]),
]
"""A shard on host-a, on host-b, and on host-a again: node, epoch, batches."""


def moved(folder: Path) -> list[str]:
    """The history of each machine, with what no writer has taken up yet in the last epoch."""
    for node, epoch, batches in MOVED:
        if epoch == 3:
            fill(folder / node, batches, epoch, node=node)
        else:
            write(folder / node, batches, epoch, node=node)
    return [str(folder / "host-b"), str(folder / "host-a")]


async def test_a_moved_shard_is_restored_from_several_folders(tmp_path: Path) -> None:
    """Named one by one, also where one is a copy of another, or copied into one folder."""
    backup = await make_backup(tmp_path, [OLD])
    folders = moved(tmp_path)
    whole = tmp_path / "whole"
    for folder in folders:
        shutil.copytree(folder, whole, dirs_exist_ok=True)
    for named in (folders, [str(whole)], [*folders, str(whole)]):
        report, found = await restored(tmp_path, backup, history=tuple(named))
        assert set(found.rows) == {D}
        assert (report.exact, report.gaps, report.events) == (True, [], 14)
        (tmp_path / "new.db").unlink()


async def test_a_missing_machines_folder_is_a_gap(tmp_path: Path) -> None:
    """What it had acked comes again, so the store is not as it was."""
    backup = await make_backup(tmp_path, [OLD])
    report, found = await restored(tmp_path, backup, history=(moved(tmp_path)[1],))
    assert set(found.rows) == {A, B, D}
    assert (report.exact, report.missing_epochs) == (False, 1)
    assert ["1 epochs between others have no events" in gap for gap in report.gaps] == [True]


# --- what cannot be done -----------------------------------------------------------------------


async def test_an_existing_restore_target_is_refused(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, [OLD])
    (tmp_path / "new.db").write_bytes(b"mine")
    with pytest.raises(Conflict, match="already exists"):
        await run(tmp_path, backup)
    assert (tmp_path / "new.db").read_bytes() == b"mine"


async def test_invalid_restore_options_are_refused(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, [OLD])
    with pytest.raises(NotFound, match="no such file"):
        await run(tmp_path, str(tmp_path / "none.db"))
    with pytest.raises(BadRequest, match="no such folder"):
        await run(tmp_path, backup, history=(str(tmp_path / "none"),))
    with pytest.raises(BadRequest, match="memory"):
        await run(tmp_path, backup, into="memory:")
    with pytest.raises(BadRequest, match="name a backup, a history"):
        await run(tmp_path, None, history=())
    with pytest.raises(BadRequest, match="different shards"):
        await run(tmp_path, backup, shard=9)
    (tmp_path / "text").write_text("no database, but long enough to be looked at\n" * 100)
    with pytest.raises(StoreUnusable, match="not a SQLite database"):
        await run(tmp_path, str(tmp_path / "text"))
    assert not [name for name in os.listdir(tmp_path) if name.startswith((".tick", "new.db"))]


async def test_a_backup_is_not_changed(tmp_path: Path) -> None:
    backup = await make_backup(tmp_path, [OLD])
    before = Path(backup).read_bytes()
    await run(tmp_path, backup, history=())
    assert Path(backup).read_bytes() == before
    assert not [name for name in os.listdir(tmp_path) if name.startswith("backup.db-")]


async def test_the_shard_of_a_history_alone(tmp_path: Path) -> None:
    for shard in (3, 5):
        spool = spool_of(tmp_path, shard=shard)
        spool.append(1, [enqueued([make_id(1) + shard], DUE, bodies=[b""])])
        spool.close()
    with pytest.raises(BadRequest, match="shards 3, 5"):
        await run(tmp_path, None)
    await run(tmp_path, None, shard=5)
    assert set((await held(url(tmp_path))).rows) == {make_id(1) + 5}


async def test_many_tasks_are_restored_in_many_batches(tmp_path: Path) -> None:
    rows = [TaskRow(make_id(n), DUE, "t", b"x" * 10_000) for n in range(1_500)]
    backup = await make_backup(tmp_path, rows)
    more = [make_id(n) for n in range(2_000, 4_500)]
    write(tmp_path, [[STARTED], [enqueued(more, DUE, bodies=[b"y"] * 2_500)], [stopped()]])
    report = await restore(Plan(url(tmp_path), backup, (str(tmp_path),)), LATER_MS)
    result = await held(url(tmp_path))
    assert len(result.rows) == report.restored == 4_000
    assert result.rows[rows[-1].id] == rows[-1]


# --- beginning at the backup ---------------------------------------------------------------------


BEGUN: Record = [EventKind.DAEMON, NOW_MS - HOUR_MS, "started", {"clean": True}]
NEW: dict[str, Any] = {"due_ms": DUE + HOUR_MS, "bodies": [b"x"]}


def pieces(folder: Path, *batches: list[Any], epoch: int = 1) -> list[Path]:
    """A sealed segment of each batch, in their order."""
    for batch in batches:
        fill(folder, [[record] for record in batch], epoch)
        drain(folder)
    return sorted(path for path in folder.glob("dt=*/hour=*/*") if f"-e{epoch}-" in path.name)


def minutes_of_enqueues(first: int, begin_ms: int, minutes: int) -> list[list[Any]]:
    return [
        [enqueued([make_id(first + n)], **NEW, time_ms=begin_ms + n * 60_000)]
        for n in range(minutes)
    ]


@pytest.mark.parametrize("hours", [0, 3])
async def test_a_restore_begins_at_the_backup(tmp_path: Path, hours: int) -> None:
    """Nothing that is certainly in the backup is applied, nothing since is left out."""
    position_ms = t(hours * HOUR_MS)
    before = minutes_of_enqueues(10, position_ms - 30 * 60_000, 30)
    rows = [TaskRow(make_id(10 + n), DUE + HOUR_MS, "t", b"x") for n in range(30)]
    backup = await make_backup(tmp_path, rows, position_ms=position_ms)
    since = (
        [acked([rows[0].id], time_ms=position_ms + 1)],
        *minutes_of_enqueues(50, position_ms + 2, 3),
    )
    pieces(tmp_path, [BEGUN], *before, *since, [stopped(position_ms + HOUR_MS)])
    report, new = await restored(tmp_path, backup, now_ms=position_ms + 2 * HOUR_MS)
    assert report.exact and report.events == 5
    assert new.rows.keys() == {row.id for row in rows[1:]} | {make_id(50 + n) for n in range(3)}


async def test_a_gap_after_the_backup_is_never_exact(tmp_path: Path) -> None:
    """The report says so of every file that may count: from the last one before the backup on."""
    rows = [TaskRow(make_id(10 + n), DUE + HOUR_MS, "t", b"x") for n in range(5)]
    backup = await make_backup(tmp_path, rows, position_ms=NOW_MS)
    before = minutes_of_enqueues(10, NOW_MS - 5 * 60_000, 5)
    since = minutes_of_enqueues(50, NOW_MS + 60_000, 3)
    files = pieces(tmp_path, [BEGUN], *before, *since, [stopped()])
    results = []
    for file in files:
        lost = file.rename(tmp_path / "lost")
        report = await run(tmp_path, backup, dry_run=True)
        results.append(report.exact)
        lost.rename(file)
    assert results == [True] * 5 + [False] * 5


@pytest.mark.parametrize(
    ("left", "keeps_position"),
    [(0.5, True), (0.5, False), (0.02, True), (0.02, False), (None, True)],
    ids=["cut", "cut, no position", "no head", "no head, no position", "absent"],
)
async def test_a_damaged_end_of_an_earlier_epoch_is_never_exact(
    tmp_path: Path, left: float | None, keeps_position: bool
) -> None:
    """No later number of the epoch shows it: the writer's position and the file itself do."""
    backup = await make_backup(tmp_path)
    since = [enqueued([make_id(n)], **NEW, time_ms=t(n)) for n in range(1, 300)]
    last = pieces(tmp_path, [BEGUN], since)[-1]
    pieces(tmp_path, [[EventKind.DAEMON, t(300), "started", {"clean": True}], stopped()], epoch=2)
    assert (await run(tmp_path, backup, dry_run=True)).exact
    data = last.read_bytes()
    last.unlink()
    if left is not None:
        last.write_bytes(data[: int(len(data) * left)])
    if not keeps_position:
        (position,) = tmp_path.glob("_state/*/position.json")
        position.unlink()
    report = await run(tmp_path, backup, dry_run=True)
    assert report.clean_stop and not report.exact
    assert (report.missing_events > 0, report.unreadable_segments) == (
        keeps_position,
        left is not None,
    )
    assert len(report.gaps) == keeps_position + (left is not None)


@pytest.mark.parametrize("since_at", ["behind a segment", "in it", "a later epoch"])
async def test_a_clock_set_back_after_the_backup_hides_no_event(
    tmp_path: Path, since_at: str
) -> None:
    rows = [TaskRow(make_id(10 + n), DUE + HOUR_MS, "t", b"x") for n in range(5)]
    backup = await make_backup(tmp_path, rows, position_ms=NOW_MS)
    before = minutes_of_enqueues(10, NOW_MS - 5 * 60_000, 5)
    back_ms = NOW_MS - 30 * 60_000
    made = {"since_ms": back_ms, "since_id": str(BY_DUE_ALONE)}
    since: list[list[Any]] = [
        [acked([rows[0].id], time_ms=back_ms)],
        [
            [EventKind.GROUP, back_ms, "t", "late", "created", made],
            [EventKind.GROUP, back_ms, "t", "g", "configured", {"paused": True}],
            enqueued([make_id(50)], **NEW, time_ms=back_ms + 1),
        ],
        [acked([rows[1].id], time_ms=back_ms + 2), stopped(back_ms + 3)],
    ]
    if since_at == "a later epoch":
        pieces(tmp_path, [BEGUN], *before)
        crashed: Record = [EventKind.DAEMON, back_ms - 1, "started", {"clean": False}]
        pieces(tmp_path, [crashed], *since, epoch=2)
    elif since_at == "behind a segment":
        pieces(tmp_path, [BEGUN], *before, *since)
    else:
        pieces(tmp_path, [BEGUN, *(item for some in (*before, *since) for item in some)])
    report, new = await restored(tmp_path, backup)
    assert new.rows.keys() == {row.id for row in rows[2:]} | {make_id(50)}
    groups = {row.group: row.settings for row in new.groups.values()}
    assert groups.keys() == {"g", "late"} and groups["g"] == GroupSettings(paused=True)
    crashes = int(since_at == "a later epoch")
    assert (report.events, report.crashes) == (6 + crashes, crashes)
    assert report.exact == (not crashes)


@pytest.mark.parametrize(
    ("idle_ms", "how"),
    [(40 * 60_000, "running"), (40 * 60_000, "at a start"), (500, "running"), (500, "not noted")],
)
async def test_a_clock_set_back_before_the_backup_hides_no_event(
    tmp_path: Path, idle_ms: int, how: str
) -> None:
    """The last batch before the backup has the wheel's position, which the clock does not reach
    again."""
    position_ms = NOW_MS + 58 * 60_000
    back_ms, epoch = position_ms - 20 * 60_000, 2 if how == "at a start" else 1
    rows = [TaskRow(make_id(10 + n), DUE + HOUR_MS, "t", b"x") for n in range(5)]
    backup = await make_backup(tmp_path, rows, position_ms=position_ms, opens=epoch)
    begun: Record = [EventKind.DAEMON, NOW_MS, "started", {"clean": True}]
    before = minutes_of_enqueues(10, position_ms - idle_ms - 4 * 60_000, 5)
    made = {"since_ms": back_ms, "since_id": str(BY_DUE_ALONE)}
    since: list[list[Any]] = [
        [[EventKind.DAEMON, back_ms, "clock_set_back", {"position_ms": position_ms}],
         acked([rows[0].id], time_ms=back_ms + 1)],
        [[EventKind.GROUP, back_ms + 2, "t", "late", "created", made],
         [EventKind.GROUP, back_ms + 3, "t", "g", "configured", {"paused": True}]],
        [acked([rows[1].id], time_ms=back_ms + 4),
         enqueued([make_id(50)], **NEW, time_ms=back_ms + 5), stopped(back_ms + 6)],
    ]  # fmt: skip
    first = [begun, *(record for piece in before for record in piece)]
    if how == "at a start":
        pieces(tmp_path, first)
        first = [[EventKind.DAEMON, back_ms, "started", {"clean": True}]]
    if how == "not noted":
        files = pieces(tmp_path, [*first, *since[0][1:], *since[1], *since[2]])
    else:
        files = pieces(tmp_path, [*first, *since[0]], *since[1:], epoch=epoch)
    report, new = await restored(tmp_path, backup)
    assert new.rows.keys() == {row.id for row in rows[2:]} | {make_id(50)}
    groups = {row.group: row.settings for row in new.groups.values()}
    assert groups.keys() == {"g", "late"} and groups["g"] == GroupSettings(paused=True)
    assert report.exact
    if how != "not noted":
        files[0].unlink()
        other = f"sqlite:///{tmp_path / 'other.db'}"
        assert not (await run(tmp_path, backup, into=other, dry_run=True)).reaches_back


async def test_copying_a_backup_equals_writing_its_rows(tmp_path: Path) -> None:
    """Both ways to fill a new SQLite store give the same, whatever the events have changed."""
    ids = [make_id(n) for n in range(40)]
    rows = [TaskRow(one, DUE + n, "t", b"%d" % n) for n, one in enumerate(ids)]
    progress = [ProgressRow(ids[n], "g", ProgressState.IN_FLIGHT, 1, DUE, 1) for n in range(10, 16)]
    dead = [DeadRow(ids[20], "g", "t", DUE, 3, "why"), DeadRow(ids[21], "g", "t", DUE, 3, "why")]
    backup = await make_backup(tmp_path, rows, progress=progress, dead=dead)
    at = NOW_MS + 60_000
    pieces(
        tmp_path,
        [BEGUN, group()],
        [
            acked([ids[0], ids[10], ids[39]], time_ms=at),
            [EventKind.NACKED, at, "t", "g", "w@1", [ids[11]], [1], [at + 9], ["no"]],
            [EventKind.RESCHEDULED, at, "t", [ids[1], ids[2]], [DUE + HOUR_MS] * 2],
            [EventKind.REQUEUED, at, "t", "g", [ids[20]]],
            [EventKind.ENDED, at, "t", None, "cancelled", [ids[3]], None],
            enqueued([make_id(90)], **NEW, time_ms=at),
            stopped(),
        ],
    )
    report, copied = await restored(tmp_path, backup)
    assert report.exact
    other = tmp_path / "other"
    other.mkdir()
    every = frozenset([*ids, make_id(90)])
    written, by_row = await restored(other, backup, history=(str(tmp_path),), ids=every)
    for name in ("rows", "progress", "dead", "groups", "outcomes"):
        assert getattr(copied, name) == getattr(by_row, name), name
    assert copied.opened.id_mark == by_row.opened.id_mark
    assert copied.opened.epoch == by_row.opened.epoch
    same = ("restored", "overdue", "waiting", "dead_letters", "from_backup", "from_history")
    assert [getattr(report, name) for name in same] == [getattr(written, name) for name in same]


async def test_a_restore_onto_a_full_disk_fails_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: str, meta: dict[str, Any]) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    backup = await make_backup(tmp_path, [OLD])
    monkeypatch.setattr(filling, "write_meta", full)
    with pytest.raises(StoreUnusable, match="disk is full"):
        await run(tmp_path, backup, history=())
    assert not list(tmp_path.glob("new.db*"))
