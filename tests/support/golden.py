"""Golden files: what each version wrote. They must decode for ever, so they are never rewritten.

``PYTHONPATH=tests python -m support.golden FOLDER`` writes the files of the current version into an
empty folder; a new version gets a folder of its own beside the old ones in ``tests/golden``.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from support.store_rows import (
    AGAIN,
    BROADCAST_TOPICS,
    DEAD,
    FAILURES,
    FILTERED_GROUPS,
    FORMER_GROUPS,
    FORMER_TASKS,
    FULL_EXTRAS,
    GROUPS,
    HALVES,
    HELD,
    ID_MAX,
    JOBS,
    KNOWN_FAILURES,
    LINED_GROUPS,
    MERGED_SESSION,
    OLD_DEAD,
    OLD_GROUPS,
    OLD_PROGRESS,
    OLD_TASKS,
    ORDERED,
    ORDERED_SCHEDULE,
    PROGRESS,
    RULED_TOPICS,
    SCHEDULES,
    SESSIONS,
    SNOOZED,
    TASKS,
    TRANSACTIONS,
    WINDOWED,
    WINDOWED_SCHEDULE,
    everything,
)
from tickwheel.model.effects import Effects
from tickwheel.model.records import ID_STEP, GroupRow, Outcome, TaskOptions, TaskRow
from tickwheel.model.schedules import ScheduleRow
from tickwheel.model.transactions import TransactionRow, TransactionState, key_of
from tickwheel.persistence import codec
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore, writer

STORED_TRANSACTIONS = [
    row._replace(size_bytes=sum(half.size_bytes for part in HALVES for half in part.halves))
    if isinstance(row, TransactionRow) and row.state is TransactionState.OPEN
    else row
    for row in TRANSACTIONS
]
"""With the sum that ``check`` compares."""
GOLDEN = Path(__file__).parent.parent / "golden"

Case = tuple[Any, Callable[[Any], bytes | None], Callable[[Any], Any]]
_ENDED = {1: Outcome.ACKED, 2**63 - 1: Outcome.CANCELLED, 5: Outcome.EXPIRED, 4: Outcome.DELETED}
SHORT_SESSION = SESSIONS[1]._replace(answers=SESSIONS[1].answers[:3])


def old_cases() -> dict[str, Case]:
    """Name → (value, encode, decode), of what version 1 could hold."""
    found: dict[str, Case] = {
        "extras": (FULL_EXTRAS, codec.encode_extras, codec.decode_extras),
        "extras-empty": (TaskOptions(), codec.encode_extras, codec.decode_extras),
        "failures": (FAILURES, codec.encode_failures, codec.decode_failures),
        "outcomes": (SHORT_SESSION.answers, codec.encode_answers, _answers),
        "outcomes-none": ((), codec.encode_answers, _answers),
        "endings": (_ENDED, codec.encode_endings, lambda data: dict(codec.decode_endings(data))),
        "session": (SHORT_SESSION, codec.encode_session, codec.decode_session),
    }
    for i, task in enumerate(row for row in OLD_TASKS if len(row.body) < 1_000):
        found[f"task-{i}"] = (task, codec.encode_task, codec.decode_task)
    for i, progress in enumerate(OLD_PROGRESS):
        found[f"progress-{i}"] = (progress, codec.encode_progress, codec.decode_progress)
    for i, dead in enumerate(OLD_DEAD):
        found[f"dead-{i}"] = (dead, codec.encode_dead, codec.decode_dead)
    for i, group in enumerate(OLD_GROUPS):
        found[f"group-{i}"] = (group, codec.encode_group, codec.decode_group)
    return found


def former_cases() -> dict[str, Case]:
    """The same of what those of layout 3 could hold."""
    found = old_cases()
    found["failures-known"] = (KNOWN_FAILURES, codec.encode_failures, codec.decode_failures)
    found["progress-known"] = (PROGRESS[-1], codec.encode_progress, codec.decode_progress)
    found["dead-known"] = (DEAD[-1], codec.encode_dead, codec.decode_dead)
    for task in FORMER_TASKS[len(OLD_TASKS) :]:
        name = task.body.decode()
        found[f"task-retry-{name}"] = (task, codec.encode_task, codec.decode_task)
        found[f"extras-retry-{name}"] = (task.options, codec.encode_extras, codec.decode_extras)
    for i, group in enumerate(FORMER_GROUPS[len(OLD_GROUPS) :]):
        found[f"group-settings-{i}"] = (group, codec.encode_group, codec.decode_group)
        found[f"settings-{i}"] = (group.settings, codec.encode_settings, codec.decode_settings)
    return found


def cases() -> dict[str, Case]:
    """The same of what this version can hold."""
    found = former_cases()
    for i, task in enumerate(TASKS[len(FORMER_TASKS) :]):
        found[f"task-placed-{i}"] = (task, codec.encode_task, codec.decode_task)
        found[f"extras-placed-{i}"] = (task.options, codec.encode_extras, codec.decode_extras)
    for i, group in enumerate(GROUPS[len(FORMER_GROUPS) :]):
        found[f"group-placed-{i}"] = (group, codec.encode_group, codec.decode_group)
    return found


def snoozed_cases() -> dict[str, Case]:
    """What came with snoozes: of tasks that were never snoozed nothing is new."""
    return {
        "progress-snoozed": (SNOOZED, codec.encode_progress, codec.decode_progress),
        "attempts-snoozed": (
            (SNOOZED.failures, SNOOZED.snoozes),
            lambda value: codec.encode_attempts(*value),
            codec.decode_attempts,
        ),
    }


def schedule_cases() -> dict[str, Case]:
    """What came with schedules."""
    return {
        f"schedule-{row.schedule.name}": (row, codec.encode_schedule, codec.decode_schedule)
        for row in SCHEDULES
    }


def coalescing_cases() -> dict[str, Case]:
    """What came with rules for pending keys: where there are none nothing is new."""
    found: dict[str, Case] = {
        "session-merged": (MERGED_SESSION, codec.encode_session, codec.decode_session),
        "outcomes-merged": (
            (MERGED_SESSION.answers, MERGED_SESSION.merged),
            lambda value: codec.encode_answers(*value),
            codec.decode_answers,
        ),
    }
    return found | _settings_cases(RULED_TOPICS)


def broadcast_cases() -> dict[str, Case]:
    """What came with topics for broadcasts only."""
    return _settings_cases(BROADCAST_TOPICS)


def filter_cases() -> dict[str, Case]:
    """What came with filters of groups."""
    ended = [(1, Outcome.FILTERED), (ID_MAX, Outcome.ACKED)]
    endings: Case = (ended, lambda value: codec.encode_endings(dict(value)), codec.decode_endings)
    return _settings_cases(FILTERED_GROUPS) | {"endings": endings}


def _settings_cases(rows: Iterable[GroupRow]) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for row in rows:
        found[f"group-{row.topic}"] = (row, codec.encode_group, codec.decode_group)
        found[f"settings-{row.topic}"] = (
            row.settings,
            codec.encode_settings,
            codec.decode_settings,
        )
    return found


def _answers(data: bytes) -> codec.Answers:
    answers, merged = codec.decode_answers(data)
    assert merged == ()
    return answers


def window_cases() -> dict[str, Case]:
    """What came with due windows: of tasks without one nothing is new."""
    return _task_cases(WINDOWED) | _schedule_case(WINDOWED_SCHEDULE)


def order_cases() -> dict[str, Case]:
    """What came with order keys and fair shares: where there are none nothing is new."""
    held: Case = (HELD, codec.encode_progress, codec.decode_progress)
    found = _task_cases(ORDERED) | _schedule_case(ORDERED_SCHEDULE)
    return found | _settings_cases(LINED_GROUPS) | {"held": held}


def reset_cases() -> dict[str, Case]:
    """What came with resets of groups: of tasks that stand for no other nothing is new."""
    return _task_cases(AGAIN)


def _schedule_case(row: ScheduleRow) -> dict[str, Case]:
    return {"schedule": (row, codec.encode_schedule, codec.decode_schedule)}


def _task_cases(tasks: Iterable[TaskRow]) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for task in tasks:
        name = task.body.decode()
        found[f"task-{name}"] = (task, codec.encode_task, codec.decode_task)
        found[f"extras-{name}"] = (task.options, codec.encode_extras, codec.decode_extras)
    return found


def old_content() -> Effects:
    """What the golden databases of layouts 1 and 2 hold: every extreme but the large bodies."""
    effects = content()
    effects.enqueued = {row.id: row for row in OLD_TASKS if len(row.body) < 1_000}
    effects.groups = {(row.topic, row.group): row for row in OLD_GROUPS}
    effects.progress = {(row.id, row.group): row for row in OLD_PROGRESS}
    effects.dead = {(row.id, row.group): row for row in OLD_DEAD}
    return effects


def former_content() -> Effects:
    """What those of layout 3 hold."""
    effects = content()
    effects.enqueued = {row.id: row for row in FORMER_TASKS if len(row.body) < 1_000}
    effects.groups = {(row.topic, row.group): row for row in FORMER_GROUPS}
    return effects


def content() -> Effects:
    """The same of what this version can hold."""
    effects = everything()
    effects.enqueued = {row.id: row for row in TASKS if len(row.body) < 1_000}
    effects.progress = {(row.id, row.group): row for row in PROGRESS}
    effects.sessions = {SHORT_SESSION.session: SHORT_SESSION}
    return effects


def crowd() -> Effects:
    """Tasks in a row, which layout 2 keeps in packs."""
    first = 1 << 40
    options = (None, TaskOptions("k", "t", {"a": 1}, 7, 1000))
    ids = range(first, first + 70 * ID_STEP, ID_STEP)
    rows = [TaskRow(i, n, "ab"[n % 2], bytes([n]) * n, options[n % 2]) for n, i in enumerate(ids)]
    return Effects(enqueued={row.id: row for row in rows}, id_mark=ids[-1])


def ended() -> Effects:
    """Some of the crowd leave, one moves."""
    rows = list(crowd().enqueued.values())
    effects = Effects(id_mark=rows[-1].id)
    effects.ended = {row.id: Outcome.ACKED for row in rows[3:9]}
    effects.updated = {rows[20].id: rows[20]._replace(due_ms=99)}
    return effects


def moved() -> tuple[Effects, Effects]:
    """Some of the crowd get another due time, two of them one more after that."""
    ids = list(crowd().enqueued)
    return Effects(moved={i: 1_000 + i % 7 for i in ids[30:66]}), Effects(
        moved={ids[31]: 5, ids[60]: 2**40, ids[10]: 3}
    )


def load_dump(dump: Path, path: Path) -> None:
    """Make a database from a dump."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.executescript(dump.read_text(encoding="utf-8"))
    connection.close()


def dump_database(path: Path) -> str:
    """The dump that ``load_dump`` takes."""
    connection = sqlite3.connect(path)
    lines = list(connection.iterdump())
    for pragma in ("application_id", "user_version"):
        (value,) = connection.execute(f"PRAGMA {pragma}").fetchone()
        lines.append(f"PRAGMA {pragma} = {value};")
    connection.close()
    return "\n".join(lines) + "\n"


def transaction_cases() -> dict[str, Case]:
    """What came with transactions."""
    return {
        f"transaction-{'/'.join(map(str, key_of(row)))}": (
            row,
            codec.encode_transaction,
            codec.decode_transaction,
        )
        for row in TRANSACTIONS
    }


def job_cases() -> dict[str, Case]:
    """What came with jobs."""
    return {f"job-{row.job.id}": (row, codec.encode_job, codec.decode_job) for row in JOBS}


def newest() -> Effects:
    """What layout 8 holds beside that."""
    return Effects(jobs={row.job.id: row for row in JOBS})


def of_layout_7() -> Effects:
    """What layout 7 holds beside what came before."""
    return Effects(transactions={key_of(row): row for row in STORED_TRANSACTIONS})


def of_layout_6() -> Effects:
    """What layout 6 holds beside what came before."""
    return Effects(
        progress={(SNOOZED.id, SNOOZED.group): SNOOZED},
        schedules={row.schedule.name: row for row in SCHEDULES},
        id_mark=content().id_mark,
    )


async def _write_database(folder: Path) -> None:
    path = folder / "store.db"
    store = SqliteStore(str(path), SqliteOptions(reserve_bytes=0))
    opened = await store.open("golden", 1_700_000_000_000)
    beside, after = moved()
    for n, effects in enumerate((content(), crowd(), ended(), beside), 1):
        writer.MOVES_MAX = 0  # what moves is written beside its packs
        await store.commit(opened.epoch, "golden", n, effects)
    writer.MOVES_MAX = 1_000
    await store.commit(opened.epoch, "golden", 5, after)
    await store.commit(opened.epoch, "golden", 6, of_layout_6())
    await store.commit(opened.epoch, "golden", 7, of_layout_7())
    await store.commit(opened.epoch, "golden", 8, newest())
    await store.close(clean=True)
    (folder / "sqlite.sql").write_text(dump_database(path), encoding="utf-8")
    for rest in folder.glob("store.db*"):
        rest.unlink()


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    write_records(folder / "records.json", job_cases())
    asyncio.run(_write_database(folder))


def write_records(path: Path, cases: dict[str, Case]) -> None:
    """A golden file of records alone."""
    encoded = {}
    for name, (value, encode, _) in cases.items():
        data = encode(value)
        encoded[name] = None if data is None else data.hex()
    path.write_text(json.dumps(encoded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
