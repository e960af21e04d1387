"""The plan for a reset: the tasks of a topic, due within a time span, that a group will receive
again, with their bodies and options. It is a file ordered by due time, computed from the history.

A separate process (``python -m tickwheel.history.reset_plan``) computes it, because a history is
long. It reads the history in the order in which it was written, keeps states in the file, and
determines the state of each task when the group was reset (at that reset's ``group_reset`` event
or, if there is none, at the end of the history). Only the history determines the result, so it
survives a crash.

| a task that came due in the span | result |
|---|---|
| the group had finished it, or it had ended for all groups | delivered again |
| the group was created later and was not owed it | delivered, if another group was owed it |
| the group still has it: ready, in flight, waiting, a dead letter | left out |
| cancelled, deleted with its topic, or expired in this group | left out |
| itself a replay of an earlier reset | left out, because the original is delivered |

Tasks that the group's filter excludes are left out. ``Plan`` is the file, to which the daemon adds
tasks that only its store has. Tasks are missing if the history lacks them, so the plan counts the
*gaps* in the span: dropped events, a history that begins later, and epochs without events, whose
history is on another machine.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import IntFlag
from itertools import islice, pairwise
from json import dumps
from pathlib import Path
from typing import Any, NamedTuple, Self

from tickwheel.history.branches import epochs
from tickwheel.history.fold import body_of, options_of
from tickwheel.history.read import Replay, spellings, task_id
from tickwheel.history.segments import HOUR_MS, Event, Tally, find, hour_of
from tickwheel.history.segments import events as segment_events
from tickwheel.model.filters import known_filter
from tickwheel.model.records import TaskOptions, TaskRow
from tickwheel.persistence.codec import decode_extras, encode_extras

FIRST_EPOCH = 1
"""The first epoch of a store."""
CACHED_MAX = 50_000
"""Maximum number of tasks whose states are in memory while the history is read."""
CONTENTS_MAX = 1_000
CONTENTS_BYTES_MAX = 8 << 20
"""Bytes of bodies and options that are written at once."""
PAGE_BYTES = 4_096
GAPS_MAX = 1_000_000
"""Maximum number of gaps that are counted."""
NICENESS = 10


class TaskFlags(IntFlag):
    """Bits of the state of a task."""

    GONE = 1
    """The task was cancelled, deleted, expired in the group, or is itself a replay."""
    DONE = 2
    """The group had finished the task."""
    ENDED = 4
    """The task had ended for all groups."""
    TOUCHED = 8
    """The task was delivered, so a later due time belongs to a retry."""
    HAS_BODY = 16
    """The file contains the task's body and options."""
    STORED = 32
    """The store has the task."""
    BEFORE = 64
    """The task came due before the group began. The rules of ownership decide about it."""
    GIVEN = 128
    """The task will be delivered again, as far as is known."""


@dataclass(frozen=True)
class ResetScope:
    """The topic, group and time span of a reset."""

    topic: str
    group: str
    from_ms: int
    """The first due time of the span."""
    until_ms: int
    """The last due time of the span."""
    bulk: str | None = None
    """The bulk operation named in the ``group_reset`` event; None: use the whole history."""
    since_ms: int = 0
    since_id: int = 0
    """The id at which the group begins."""
    tags: str | None = None
    where: str | None = None
    """The condition of the group's filter."""

    def covers(self, due_ms: int) -> bool:
        return self.from_ms <= due_ms <= self.until_ms


class PlannedTask(NamedTuple):
    """A task of the plan."""

    id: int
    due_ms: int
    flags: TaskFlags
    options: TaskOptions | None
    body: bytes | None
    """The body, or None if only the store can have it."""


@dataclass(frozen=True)
class Count:
    """Counts of a plan."""

    tasks: int = 0
    """Number of tasks that the group would receive again."""
    first_ms: int | None = None
    last_ms: int | None = None
    """Due times of the first and the last of these tasks."""
    lost: int = 0
    """Number of further tasks, whose bodies no longer exist."""
    incomplete: int = 0
    """Number of gaps in the history of the span; tasks in a gap can be missing."""


class Plan:
    """The file of a plan, used by one thread at a time."""

    def __init__(self, path: str = "", bytes_max: int = 1 << 40) -> None:
        """Without a path the file is temporary. Methods raise sqlite3.Error at ``bytes_max``."""
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        pages = f"max_page_count={max(1, bytes_max // PAGE_BYTES)}"
        sizes = f"page_size={PAGE_BYTES}", pages, "cache_size=-16000"
        for pragma in (*sizes, "journal_mode=OFF", "synchronous=OFF"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.executescript(
            "CREATE TABLE IF NOT EXISTS task (id INTEGER PRIMARY KEY, due_ms INTEGER,"
            " stand INTEGER, place INTEGER);"
            "CREATE TABLE IF NOT EXISTS carried (id INTEGER PRIMARY KEY, options BLOB, body BLOB);"
        )

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- creating it ---------------------------------------------------------------------------

    def known(self, ids: Iterable[int]) -> dict[int, tuple[int, int, int]]:
        """Return id → (due time, state, position) of the tasks in the plan."""
        states = {}
        for id_ in ids:
            row = self._db.execute("SELECT due_ms, stand, place FROM task WHERE id = ?", (id_,))
            if (values := row.fetchone()) is not None:
                states[id_] = values
        return states

    def write(
        self,
        states: Iterable[tuple[int, int, int, int]],
        carried: Iterable[tuple[int, bytes | None, bytes]] = (),
    ) -> None:
        """Write (id, due time, state, position) of tasks, and (id, options, body) of some."""
        self._db.execute("BEGIN")
        self._db.executemany("INSERT OR REPLACE INTO task VALUES (?, ?, ?, ?)", states)
        self._db.executemany("INSERT OR REPLACE INTO carried VALUES (?, ?, ?)", carried)
        self._db.execute("COMMIT")

    def choose(self, reset: ResetScope) -> None:
        """Decide for every task whether it is delivered again. Delete the bodies of other tasks."""
        done = TaskFlags.DONE | TaskFlags.ENDED
        before = "due_ms < :since_ms AND place <= :since_id"
        self._db.execute(
            "UPDATE task SET stand = stand"
            f" | (CASE WHEN stand & {done} = 0 THEN {int(TaskFlags.BEFORE | TaskFlags.GIVEN)}"
            f" ELSE {int(TaskFlags.GIVEN)} END)"
            " WHERE due_ms BETWEEN :from_ms AND :until_ms"
            f" AND stand & {int(TaskFlags.GONE)} = 0 AND (stand & {done} != 0 OR ({before}))",
            {name: value for name, value in asdict(reset).items() if name.endswith(("ms", "id"))},
        )
        self._db.execute(
            "DELETE FROM carried WHERE id NOT IN"
            f" (SELECT id FROM task WHERE stand & {int(TaskFlags.GIVEN)} != 0)"
        )

    def without_body(self) -> set[int]:
        """Return the ids of tasks to redeliver whose bodies and options are not in the file."""
        rows = self._db.execute(
            f"SELECT id FROM task WHERE stand & {int(TaskFlags.GIVEN | TaskFlags.HAS_BODY)}"
            f" = {int(TaskFlags.GIVEN)}"
        )
        return {row[0] for row in rows}

    def exclude(self, ids: Iterable[int]) -> None:
        """Exclude these tasks because of the group's filter."""
        self._db.executemany(
            f"UPDATE task SET stand = stand & ~{int(TaskFlags.GIVEN)} WHERE id = ?",
            [(id_,) for id_ in ids],
        )

    def add_stored(self, reset: ResetScope, stored: Iterable[tuple[TaskRow, bool]]) -> None:
        """Add stored tasks of the topic. Each is paired with a flag: whether the rules permit
        delivering it again. For tasks in the plan, the flag matters only with ``BEFORE``."""
        filter_ = known_filter(reset.tags, reset.where)
        rows = [(row, permitted) for row, permitted in stored if reset.covers(row.due_ms)]
        known_tasks = self.known(row.id for row, _ in rows)
        states = []
        for row, permitted in rows:
            due_ms, flags, place = known_tasks.get(
                row.id, (row.due_ms, int(TaskFlags.GIVEN), row.id)
            )
            if not flags & TaskFlags.GIVEN:
                continue
            if row.id not in known_tasks or flags & TaskFlags.BEFORE:
                flags = flags if permitted else flags & ~TaskFlags.GIVEN
            if not flags & TaskFlags.HAS_BODY and not filter_.passes(row):
                flags &= ~TaskFlags.GIVEN
            if row.id in known_tasks or flags & TaskFlags.GIVEN:
                states.append((row.id, due_ms, flags | TaskFlags.STORED, place))
        self.write(states)

    def save_gap_count(self, count: int) -> None:
        """Save the number of gaps in the history."""
        self._db.execute(f"PRAGMA user_version={min(count, GAPS_MAX)}")

    def finish(self) -> None:
        """Finish the plan, and prepare it for reads in order."""
        self._db.execute(
            "CREATE INDEX IF NOT EXISTS in_order ON task (due_ms, id)"
            f" WHERE stand & {int(TaskFlags.GIVEN)} != 0"
        )

    # --- reading it ----------------------------------------------------------------------------

    def read(self, after: tuple[int, int], limit: int, bytes_max: int) -> list[PlannedTask]:
        """Return the next tasks to deliver after (due time, id), at least one if there are any."""
        given, carried = int(TaskFlags.GIVEN), int(TaskFlags.HAS_BODY)
        rows = self._db.execute(
            "SELECT t.id, t.due_ms, t.stand, c.options, c.body FROM task t LEFT JOIN carried c"
            f" ON c.id = t.id AND t.stand & {carried} != 0 WHERE t.stand & {given} != 0"
            " AND (t.due_ms, t.id) > (?, ?) ORDER BY t.due_ms, t.id LIMIT ?",
            (*after, limit),
        )
        page: list[PlannedTask] = []
        for id_, due_ms, flags, options, body in rows:
            bytes_max -= len(body or b"") + len(options or b"")
            if page and bytes_max < 0:
                break
            page.append(PlannedTask(id_, due_ms, TaskFlags(flags), decode_extras(options), body))
        return page

    def count(self) -> Count:
        """Count the tasks that will be delivered again, and tasks whose bodies are lost."""
        given, has_body = int(TaskFlags.GIVEN), int(TaskFlags.HAS_BODY | TaskFlags.STORED)
        query = f"FROM task WHERE stand & {given} != 0 AND stand & {has_body}"
        tasks, first_ms, last_ms = self._db.execute(
            f"SELECT count(*), min(due_ms), max(due_ms) {query} != 0"
        ).fetchone()
        lost = self._db.execute(f"SELECT count(*) {query} = 0").fetchone()[0]
        incomplete = self._db.execute("PRAGMA user_version").fetchone()[0]
        return Count(tasks, first_ms, last_ms, lost, incomplete)


# --- the history ---------------------------------------------------------------------------------


class _Fold:
    """Applies events to a plan."""

    def __init__(self, plan: Plan, reset: ResetScope) -> None:
        self._plan = plan
        self._reset = reset
        self._cached: dict[int, list[int]] = {}
        """Id → [due time, state, position], not yet written to the plan."""
        self._highest = -1
        """The highest id in the plan."""
        self._bodies: dict[int, tuple[bytes | None, bytes]] = {}
        self._bytes = 0
        self.has_bodies = False
        """Whether any event had a body. If none had, a second pass is useless."""

    def apply(self, event: Event) -> None:
        """Apply an event. Raise KeyError, TypeError or ValueError if it lacks required fields."""
        id_, kind = task_id(event), event["event"]
        if id_ is None or kind.startswith(("occurrence", "transaction")):
            return
        if kind in ("enqueued", "replaced"):
            self._arrived(id_, event)
            return
        state = self._state(id_)
        if kind == "delivered":
            # The event of its enqueue can be missing; it can have moved after an earlier delivery.
            state = state or self._set_state(id_, 0, TaskFlags(0), id_)
            state[0] = int(event["due_ms"])
        elif state is None:
            return
        elif kind == "rescheduled":
            if not state[1] & TaskFlags.TOUCHED:
                state[0] = int(event["due_ms"])
                state[2] = int(event.get("order_id", state[2]))
            return
        state[1] = (state[1] & ~self._flags_cleared_by(event)) | self._flags_set_by(event)

    def _flags_set_by(self, event: Event) -> int:
        kind, group = event["event"], event.get("group")
        flags = TaskFlags.ENDED if event.get("ended") else TaskFlags(0)
        if kind in ("cancelled", "expired", "deleted") and group is None:
            return flags | TaskFlags.GONE
        if group is not None:
            flags |= TaskFlags.TOUCHED
        if group == self._reset.group:
            if kind in ("expired", "cancelled"):
                flags |= TaskFlags.GONE
            elif kind in ("acked", "deleted", "filtered"):
                flags |= TaskFlags.DONE
        return flags

    def _flags_cleared_by(self, event: Event) -> int:
        """Return the bits that the event clears: after a requeue the group has not finished it."""
        is_ours = event.get("group") == self._reset.group
        return TaskFlags.DONE if is_ours and event["event"] == "requeued" else 0

    def _arrived(self, id_: int, event: Event) -> None:
        if event.get("replay_of") is not None:
            self._set_state(id_, 0, TaskFlags.GONE, id_)
            return
        self.has_bodies |= "body" in event
        due_ms, place = int(event["due_ms"]), int(event.get("order_id", id_))
        state = self._set_state(id_, due_ms, TaskFlags(0), place)
        if self._reset.covers(due_ms):
            self._add_body(id_, state, event)
        else:
            self._bodies.pop(id_, None)

    def _add_body(self, id_: int, state: list[int], event: Event) -> None:
        body = body_of(event)
        if body is None:
            state[1] &= ~TaskFlags.HAS_BODY
            self._bodies.pop(id_, None)
            return
        state[1] |= TaskFlags.HAS_BODY
        self._bodies[id_] = encode_extras(options_of(event)), body
        self._bytes += len(body)
        if len(self._bodies) >= CONTENTS_MAX or self._bytes >= CONTENTS_BYTES_MAX:
            self.flush()

    def add_missing_body(self, event: Event) -> None:
        """Add, in a second pass, the body of a task whose due time was moved into the span."""
        id_ = task_id(event)
        state = None if id_ is None else self._state(id_)
        if id_ is not None and state is not None:
            self._add_body(id_, state, event)

    def _state(self, id_: int) -> list[int] | None:
        state = self._cached.get(id_)
        if state is None and id_ <= self._highest:
            row = self._plan.known((id_,)).get(id_)
            state = None if row is None else self._set_state(id_, *row)
        return state

    def _set_state(self, id_: int, due_ms: int, flags: int, place: int) -> list[int]:
        if len(self._cached) >= CACHED_MAX:
            self.forget()
        state = self._cached[id_] = [due_ms, int(flags), place]
        return state

    def forget(self) -> None:
        """Write all states to the plan and empty the cache."""
        self.flush()
        self._cached = {}

    def flush(self) -> None:
        """Write all states and bodies in memory to the plan."""
        states = [(id_, due, flags, place) for id_, (due, flags, place) in self._cached.items()]
        self._plan.write(states, [(id_, *contents) for id_, contents in self._bodies.items()])
        self._highest = max(self._highest, max(self._cached, default=-1))
        self._bodies, self._bytes = {}, 0


def fill(
    plan: Plan, events: Callable[[], Iterator[Event]], reset: ResetScope,
    begins_ms: int | None = None, missing_epochs: int = 0,
) -> None:  # fmt: skip
    """Fill an empty plan from the history, which can be read twice. ``begins_ms`` is the result of
    ``beginning``, and ``missing_epochs`` that of ``missing_epochs``."""
    fold = _Fold(plan, reset)
    gaps = int(begins_ms is not None and 0 < reset.from_ms < begins_ms) + missing_epochs
    for event in _until_reset(events(), reset):
        if event["event"] == "dropped":
            gaps += event["time_ms"] >= reset.from_ms
            continue
        try:
            fold.apply(event)
        except (KeyError, TypeError, ValueError):
            continue  # skip an unusable event, as a restore does
    fold.forget()
    plan.save_gap_count(gaps)
    plan.choose(reset)
    without_body = plan.without_body() if fold.has_bodies else ()
    if without_body:
        for event in _until_reset(events(), reset):
            if event["event"] in ("enqueued", "replaced") and task_id(event) in without_body:
                fold.add_missing_body(event)
        fold.flush()
    _apply_filter(plan, reset)
    plan.finish()


def events_of(folder: Path, shard: int, topic: str) -> Iterator[Event]:
    """Yield the events of a topic, and some others, in the order in which they were written."""
    return Replay([folder], shard, needles=[*spellings(topic), b'"dropped"']).events()


def beginning(folder: Path, shard: int) -> int | None:
    """Return the time at which the history begins, or None if its store's first event is in it."""
    files = find(folder, shard=shard)
    epoch = min((segment.name.epoch for segment in files), default=FIRST_EPOCH)
    oldest = [
        (event["seq"], event["time_ms"])
        for segment in files
        if segment.name.epoch == epoch
        for event in islice(segment_events(segment.path, Tally()), 1)
        if type(event.get("seq")) is int
    ]
    if not oldest or (epoch, min(oldest)[0]) == (FIRST_EPOCH, 1):
        return None
    return int(min(oldest)[1])


def missing_epochs(folder: Path, shard: int, reset: ResetScope) -> int:
    """Return the number of epochs that have no events, lie between epochs that have some, and may
    overlap the span: their daemons wrote elsewhere or failed to start."""
    hours_ms: dict[int, int] = {}
    """Epoch → its first hour in the history."""
    for epoch, hour_ms in epochs(folder, shard):
        hours_ms.setdefault(epoch, hour_of(reset.until_ms) if hour_ms is None else hour_ms)
    return sum(
        later - earlier - 1
        for earlier, later in pairwise(sorted(hours_ms))
        if reset.from_ms < hours_ms[later] + HOUR_MS and hours_ms[later] <= reset.until_ms
    )


def _until_reset(events: Iterator[Event], reset: ResetScope) -> Iterator[Event]:
    for event in events:
        if event.get("topic") != reset.topic and event["event"] != "dropped":
            continue
        if event["event"] == "group_reset" and reset.bulk is not None:
            if (event.get("settings") or {}).get("bulk") == reset.bulk:
                return
        yield event


def _apply_filter(plan: Plan, reset: ResetScope) -> None:
    """Exclude the tasks that the group's filter excludes."""
    filter_ = known_filter(reset.tags, reset.where)
    if filter_.is_open:
        return
    after = (-1, -1)
    while page := plan.read(after, CONTENTS_MAX, CONTENTS_BYTES_MAX):
        after = page[-1].due_ms, page[-1].id
        plan.exclude(
            planned.id
            for planned in page
            if planned.body is not None
            and not filter_.passes(
                TaskRow(planned.id, planned.due_ms, reset.topic, b"", planned.options)
            )
        )


# --- the process ---------------------------------------------------------------------------------


def command() -> list[str]:
    """Return the command that computes a plan. It reads a ``request`` from its standard input, and
    writes a line to its standard output when the plan is finished. It exits at once when its
    standard input ends, as it does when the daemon ends."""
    return [sys.executable, "-m", "tickwheel.history.reset_plan"]


def request(path: str, folder: str, shard: int, bytes_max: int, reset: ResetScope) -> bytes:
    fields = {"path": path, "folder": folder, "shard": shard, "bytes_max": bytes_max}
    return dumps(fields | asdict(reset)).encode() + b"\n"


def main() -> int:
    fields: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_exit_with_daemon, daemon=True).start()
    path, folder, shard = fields.pop("path"), fields.pop("folder"), fields.pop("shard")
    os.nice(NICENESS)
    with Plan(path, fields.pop("bytes_max")) as plan:
        reset = ResetScope(**fields)
        begins_ms = beginning(Path(folder), shard)
        missing = missing_epochs(Path(folder), shard, reset)
        fill(plan, lambda: events_of(Path(folder), shard, reset.topic), reset, begins_ms, missing)
    sys.stdout.write("done\n")
    return 0


def _exit_with_daemon() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
