"""Applies events to the state of a backup. The result is the state at the last event.

Events contain absolute states, so applying events that the backup already includes is harmless: the
newest event of a task and group, or of a schedule, decides. Tasks of the backup are loaded when an
event names them (``needs``), so only unfinished tasks with events are in memory. This module uses
no files or clocks.

``Owners`` applies the engine's rules (``engine/ownership.py``) to the events of groups, and returns
the groups that must receive a task. Deleted groups are restored as being deleted. A daemon that
starts with them releases their tasks and then finishes the deletion.

The history contains no half tasks. So a transaction of the backup is restored in the backup's
state, or as decided later. A transaction that got tasks after the backup cannot be restored, and is
reported.
"""

from __future__ import annotations

import binascii
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from tickwheel.api.targets import shown_url
from tickwheel.engine.ownership import is_closed, moved_before, owing
from tickwheel.history.lines import NAMES, RECORD_EVENTS
from tickwheel.history.read import task_id
from tickwheel.history.segments import Event
from tickwheel.model.kinds import (
    BACKFILLED,
    FIRED,
    RECENT_MAX,
    RECORDED,
    RUN,
    TARGET,
    Half,
    Halves,
    RecordKey,
    Run,
    Schedule,
    ScheduleRow,
    TransactionRow,
    TransactionState,
)
from tickwheel.model.policies import checked_rule, of_history
from tickwheel.model.records import (
    ATTEMPT_MAX,
    ID_STEP,
    NO_PAST,
    REASON_LENGTH_MAX,
    TOPIC_ITSELF,
    DeadRow,
    Failure,
    FormerFilter,
    GroupRow,
    GroupSettings,
    Outcome,
    Past,
    ProgressRow,
    ProgressState,
    Replayed,
    TaskOptions,
    TaskRow,
)


def body_of(event: Event) -> bytes | None:
    """Return the body in an event, or None if the history contains no bodies. Raise ValueError."""
    text = event.get("body")
    if text is None:
        return None
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the body of task {event.get('task_id')}: {error}") from None


_OPTIONS: Final = {
    NAMES.get(name, name): name
    for name in TaskOptions._fields
    if name not in ("order_id", "replayed")
}
"""Field of an event → option of a task."""
_OPTION_FIELDS: Final = frozenset((*_OPTIONS, "replay_of"))


def options_of(event: Event) -> TaskOptions | None:
    if _OPTION_FIELDS.isdisjoint(event):
        return None
    fields: dict[str, Any] = {
        name: event[field] for field, name in _OPTIONS.items() if field in event
    }
    fields["retry"] = of_history(event.get("retry"))
    if (replay_of := event.get("replay_of")) is not None:
        fields["replayed"] = Replayed(int(replay_of), event["replay_to"], fields.pop("key", None))
    options = TaskOptions(**fields)
    return None if options == TaskOptions() else options


def settings_of(recorded: Mapping[str, Any] | None) -> GroupSettings | None:
    """Return the settings in an event, or None if none is set."""
    if not recorded:
        return None
    fields = {name: recorded[name] for name in _SETTINGS if name in recorded}
    if (rule := recorded.get("if_pending")) is not None:
        fields["if_pending"] = checked_rule(rule, "if_pending")
    if "former" in recorded:
        fields["former"] = tuple(
            FormerFilter(tags, where, int(due_ms), int(order))
            for tags, where, due_ms, order in recorded["former"]
        )
    settings = _NOTHING_SET.replaced(fields | {"retry": of_history(recorded.get("retry"))})
    return None if settings == _NOTHING_SET else settings


_NOTHING_SET: Final = GroupSettings()
_SETTINGS: Final = tuple(_NOTHING_SET.flat())


# --- groups --------------------------------------------------------------------------------------


class Owners:
    """The groups of all topics."""

    def __init__(self, rows: Iterable[GroupRow]) -> None:
        self._topics: dict[str, dict[str, GroupRow]] = {}
        """Topic → its groups, oldest first."""
        self._topic_rows: dict[str, GroupRow] = {}
        """Topic → the row of the topic's settings."""
        for row in sorted(rows, key=lambda row: row.since_ms):
            if row.group == TOPIC_ITSELF:
                self._topic_rows[row.topic] = row
            else:
                self._topics.setdefault(row.topic, {})[row.group] = row

    def rows(self) -> list[GroupRow]:
        """Return the rows of all groups and of topics' settings."""
        groups = [row for rows in self._topics.values() for row in rows.values()]
        return [*self._topic_rows.values(), *groups]

    def knows(self, topic: str, group: str) -> bool:
        return group in self._topics.get(topic, ())

    def is_closed(self, topic: str, group: str) -> bool:
        """Return whether the group is deleted or being deleted."""
        row = self._topics.get(topic, {}).get(group)
        return row is not None and is_closed(row)

    def owing(self, row: TaskRow, recorded: Iterable[str]) -> list[str]:
        """Return the groups for which the task is or was meant; see ``owing`` for ``recorded``."""
        groups = self._topics.get(row.topic, {})
        return [group.group for group in owing(groups, row, set(recorded))]

    # --- events ------------------------------------------------------------------------------

    def created(self, event: Event) -> None:
        topic, name = event["topic"], event["group"]
        if self.knows(topic, name) and not self.is_closed(topic, name):
            return  # the backup has the group, with its later changes
        since_ms, since_id = event["since_ms"], int(event["since_id"])
        groups = self._topics.setdefault(topic, {})
        before, before_ms = moved_before(groups.values(), since_ms)
        for row in before:
            self._put(row._replace(since_ms=before_ms))
        groups.pop(name, None)
        self._put(GroupRow(topic, name, since_ms, None, since_id))

    def ensure(self, task: TaskRow, name: str) -> None:
        """Create the group of an event, because its ``group_created`` event is missing."""
        since_ms = task.due_ms if self._topics.get(task.topic) else 0
        self._put(GroupRow(task.topic, name, since_ms))

    def configured(self, event: Event) -> None:
        topic, name = event["topic"], event.get("group", TOPIC_ITSELF)
        settings = settings_of(event.get("settings"))
        if name == TOPIC_ITSELF:
            self._topic_rows[topic] = GroupRow(topic, name, 0, settings)
        elif self.knows(topic, name) and not self.is_closed(topic, name):
            self._put(self._topics[topic][name]._replace(settings=settings))

    def deleted(self, event: Event) -> None:
        topic, name = event["topic"], event["group"]
        if not self.knows(topic, name) or self.is_closed(topic, name):
            return
        row, closing = self._topics[topic][name], event["settings"]
        settings = (row.settings or GroupSettings())._replace(
            closed_ms=closing["closed_ms"], closed_id=int(closing["closed_id"])
        )
        self._put(row._replace(settings=settings))

    def _put(self, row: GroupRow) -> None:
        self._topics.setdefault(row.topic, {})[row.group] = row


# --- schedules -----------------------------------------------------------------------------------


_FIELDS = frozenset(Schedule._fields) - {"name", "topic", "body", "options"}


class Schedules:
    """The state of schedules after events. Call ``apply`` for each event, then store ``rows``."""

    def __init__(self, rows: Iterable[ScheduleRow]) -> None:
        self._rows = {row.schedule.name: row for row in rows}
        self._without_body: set[str] = set()

    def rows(self) -> list[ScheduleRow]:
        """Return the schedules that can be restored."""
        return [row for name, row in self._rows.items() if name not in self._without_body]

    def without_body(self) -> list[str]:
        """Return the names of schedules whose new bodies are not in the history."""
        return sorted(self._without_body)

    def apply(self, event: Event) -> bool:
        """Apply one event. Return False if it is not an event of a schedule."""
        kind, name = event["event"], event.get("schedule")
        if name is None:
            return False
        if kind == "schedule_put":
            self._put(name, event)
        elif kind == "schedule_deleted":
            self._rows.pop(name, None)
            self._without_body.discard(name)
        elif (row := self._rows.get(name)) is not None:
            if kind in ("schedule_paused", "schedule_resumed"):
                row = row._replace(paused=kind == "schedule_paused")
            elif kind.startswith("occurrence_"):
                row = _noted(row, event)
            self._rows[name] = _advanced(row, event)
        return True

    def _put(self, name: str, event: Event) -> None:
        settings = dict(event["settings"])
        before, body = self._rows.get(name), body_of(event)
        has_body = before is not None and name not in self._without_body
        if body is None and has_body and settings.get("same_body"):
            assert before is not None
            body = before.schedule.body
        self._without_body.discard(name)
        if body is None:
            self._without_body.add(name)
        defaults = {"cron": None, "timezone": "UTC", "every_ms": None, "anchor_ms": 0}
        fields = {field: value for field, value in settings.items() if field in _FIELDS}
        task = options_of(settings.get("task") or {})
        schedule = Schedule(name, event["topic"], body or b"", task, **defaults | fields)
        row = ScheduleRow(schedule) if before is None else before._replace(schedule=schedule)
        row = row._replace(paused=bool(settings.get("paused", False)))
        self._rows[name] = _advanced(row, event)


def _advanced(row: ScheduleRow, event: Event) -> ScheduleRow:
    return row._replace(
        next_ms=event.get("next_ms"), runs=int(event["runs"]), queued_ms=event.get("queued_ms")
    )


def _noted(row: ScheduleRow, event: Event) -> ScheduleRow:
    outcome = str(event.get("reason", FIRED))
    if event["event"] == "occurrence_queued" or outcome == BACKFILLED:
        return row
    id_ = task_id(event) or 0
    run = Run(event["planned_ms"], event["time_ms"], outcome, id_, event.get("count", 1))
    if run not in row.recent:
        row = row._replace(recent=(*row.recent, run)[-RECENT_MAX:])
    return row if outcome == RUN or not id_ else row._replace(last_id=id_)


# --- other records -------------------------------------------------------------------------------


class Records:
    """The records of the RECORDED kinds after events. Call ``apply`` for each event."""

    def __init__(self, records: Mapping[RecordKey, Any]) -> None:
        """``records``: those of the backup, of all kinds."""
        kinds = RECORDED.values()
        self.records = {key: row for key, row in records.items() if key[0] in kinds}
        self._copied = {key: row for key, row in records.items() if key[0] is TARGET}
        self._without_secrets: dict[RecordKey, str] = {}
        """Target whose secrets are unknown → its group, as "topic group"."""

    def targets_lost(self) -> list[str]:
        """Return, as "topic group", the groups whose targets cannot be restored, because they got
        new secrets, or a URL with new hidden values, after the backup."""
        return sorted(self._without_secrets.values())

    def apply(self, event: Event) -> bool:
        """Apply one event. Return False if it is not an event of a record."""
        if event["event"] not in RECORD_EVENTS.values():
            return False
        settings = dict(event["settings"])
        kind = RECORDED[settings.pop("record")]
        if event["event"] == RECORD_EVENTS["dropped"]:
            self._forget((kind, tuple(settings["key"])))
            return True
        is_whole = kind is not TARGET or self._add_secrets(settings)
        row_type: Any = kind.builds[-1]
        known = {name: settings[name] for name in row_type._fields if name in settings}
        if "options" in known:
            known["options"] = tuple(map(tuple, known["options"]))
        row = row_type(**known)
        key = (kind, kind.key(row))
        self._forget(key)
        if is_whole:
            self.records[key] = row
        else:
            self._without_secrets[key] = f"{row.topic} {row.group}"
        return True

    def _add_secrets(self, settings: dict[str, Any]) -> bool:
        """Add what the event of a target lacks. Return False if it is unknown."""
        count, settings["secrets"] = settings["secrets"], ()
        key = (TARGET, (settings["topic"], settings["group"]))
        before = self.records.get(key) if settings["same_secrets"] else None
        copied = self._copied.get(key)
        if copied is not None and copied.since_ms == settings["since_ms"]:
            before = copied  # the backup already contains the target of this event
        if before is not None and count:
            settings["secrets"] = before.secrets
            if shown_url(before.url) == settings["url"]:
                settings["url"] = before.url
        return before is not None or not count

    def _forget(self, key: RecordKey) -> None:
        self.records.pop(key, None)
        self._without_secrets.pop(key, None)


# --- transactions --------------------------------------------------------------------------------


class Transactions:
    """The state of transactions after events. Call ``apply`` for each event."""

    def __init__(self, rows: Iterable[TransactionRow | Halves]) -> None:
        self._heads: dict[str, TransactionRow] = {}
        self._parts: dict[str, dict[int, Halves]] = {}
        self._lost: dict[str, None] = {}
        for row in rows:
            if isinstance(row, Halves):
                self._parts.setdefault(row.transaction, {})[row.part] = row
            else:
                self._heads[row.id] = row

    def rows(self) -> list[TransactionRow | Halves]:
        """Return the transactions that can be restored."""
        parts = [part for of_one in self._parts.values() for part in of_one.values()]
        return [*self._heads.values(), *parts]

    def lost(self) -> list[str]:
        """Return the names of undecided transactions that cannot be restored."""
        return sorted(self._lost)

    def apply(self, event: Event, tasks: Mapping[int, Any]) -> bool:
        """Apply one event. Return False if it is not an event of a transaction. The ``tasks`` of a
        commit get the bodies of their half tasks."""
        kind, name = event["event"], event.get("transaction")
        if name is None:
            return False
        if kind == "transaction_prepared":
            if event["details"]["part"] not in self._parts.get(name, {}):
                self._drop(name)
                self._lost[name] = None
        elif kind == "transaction_committed":
            first = int(event["task_id"])
            self._fill(name, first, event["count"], tasks)
            self._decide(event, TransactionState.COMMITTED, first)
        elif kind == "transaction_rolled_back":
            self._decide(event, TransactionState.ROLLED_BACK, 0)
        elif kind == "transaction_parked" and name in self._heads:
            self._heads[name] = self._heads[name]._replace(state=TransactionState.PARKED)
        return True

    def _drop(self, name: str) -> None:
        self._heads.pop(name, None)
        self._parts.pop(name, None)

    def _decide(self, event: Event, state: TransactionState, first_id: int) -> None:
        name, at_ms, details = event["transaction"], event["time_ms"], event["details"]
        began_ms = at_ms - details.get("age_ms", 0)
        before = self._heads.get(name) or TransactionRow(
            name, details["group"], state, began_ms, at_ms
        )
        self._drop(name)
        self._lost.pop(name, None)
        self._heads[name] = before._replace(
            state=state, tasks=event["count"], size_bytes=details["bytes"], decided_ms=at_ms,
            topics=tuple(details.get("topics", before.topics)), first_id=first_id,
            checks=details.get("checks", before.checks), asked=details.get("asked", before.asked),
            owner=details.get("owner", before.owner),
        )  # fmt: skip

    def _fill(self, name: str, first: int, count: int, tasks: Mapping[int, Task | TaskRow]) -> None:
        """Give new tasks the bodies of the backup's half tasks, which the history lacks."""
        parts = self._parts.get(name, {})
        halves: list[Half] = [half for part in sorted(parts) for half in parts[part].halves]
        if len(halves) != count:
            return
        for index, half in enumerate(halves):
            task = tasks.get(first + index * ID_STEP)
            if isinstance(task, Task) and not task.has_body:
                task.row, task.has_body = task.row._replace(body=half.body), True


# --- tasks ---------------------------------------------------------------------------------------


_FINISHED_STATES = {
    Outcome.EXPIRED: ProgressState.EXPIRED,
    Outcome.CANCELLED: ProgressState.REPLACED,
}
"""Outcome → state of a task that a group has finished without an ack. The default is DONE."""
ENDINGS_MAX = 100_000
"""Maximum number of outcomes that are kept. The newest are kept, as in a store."""


class Fold:
    """The state of tasks after events. Before ``apply``, ``put`` the tasks that ``needs`` names."""

    def __init__(
        self,
        owners: Owners,
        id_mark: int,
        epoch: int,
        schedules: Iterable[ScheduleRow] = (),
        transactions: Iterable[TransactionRow | Halves] = (),
        records: Mapping[RecordKey, Any] = MappingProxyType({}),
    ) -> None:
        self.owners = owners
        self.schedules = Schedules(schedules)
        self.records = Records(records)
        self.transactions = Transactions(transactions)
        self.tasks: dict[int, Task | TaskRow] = {}
        """The unfinished tasks that have events. A new task with no event but its enqueue, and with
        its body, is only its row, which takes two thirds of the memory."""
        self.removed_ids: set[int] = set()
        """Ids of the backup's tasks that ended after it."""
        self.outcomes: OrderedDict[int, Outcome] = OrderedDict()
        """Id → outcome of the newest ended tasks, oldest first."""
        self.ended = 0
        self.id_mark = self._backup_mark = id_mark
        self.epoch = epoch
        self.unusable = 0
        """Number of events that lack required fields."""
        self._is_old = False
        """Whether the current event precedes the backup."""
        self._task_handlers: dict[str, Callable[[Task, Event], None]] = {
            "replaced": self._replaced,
            "overtaken": self._overtaken,
            "rescheduled": self._rescheduled,
            "cancelled": partial(self._finish, Outcome.CANCELLED),
            "delivered": self._delivered,
            "acked": partial(self._finish, Outcome.ACKED),
            "nacked": self._nacked,
            "lease_over": self._lease_over,
            "released": self._released,
            "dead": self._dead,
            "requeued": self._requeued,
            "expired": partial(self._finish, Outcome.EXPIRED),
            "deleted": self._deleted,
            "filtered": self._filtered,
        }
        self._group_handlers: dict[str, Callable[[Event], None]] = {
            "group_created": owners.created,
            "group_configured": owners.configured,
            "group_deleted": owners.deleted,
        }

    def needs(self, events: Collection[Event]) -> list[int]:
        """Return the ids of tasks that the backup may have. ``put`` the tasks before ``apply``."""
        if not self._backup_mark:
            return []
        ids = {task_id(event) for event in events}
        return sorted(
            i
            for i in ids
            if i is not None
            and i <= self._backup_mark
            and i not in self.tasks
            and i not in self.removed_ids
        )

    def put(self, task: Task) -> None:
        """Add a task of the backup."""
        self.tasks[task.row.id] = task

    def apply(
        self, events: Iterable[Event], is_old: Callable[[Event], bool] = lambda event: False
    ) -> None:
        """Apply events. ``is_old`` is called for each in order, and returns whether it precedes the
        backup, so that the groups, schedules and bodies of the backup take precedence, even if the
        groups and schedules were deleted."""
        for event in events:
            self._is_old = is_old(event)
            try:
                self._apply(event)
            except (KeyError, TypeError, ValueError):
                self.unusable += 1

    def _apply(self, event: Event) -> None:
        kind = event["event"]
        if (epoch := event["epoch"]) > self.epoch:
            self.epoch = epoch
        id_ = task_id(event)
        if id_ is not None and id_ > self.id_mark:
            self.id_mark = id_
        if kind == "enqueued":
            if id_ is not None:
                self._enqueued(id_, event)
            return
        handler = self._task_handlers.get(kind)
        if handler is None:
            self._apply_other(kind, event)
        elif (held := self.tasks.get(id_ or 0)) is not None:
            task = held if isinstance(held, Task) else Task(held, is_new=True)
            if task is not held:
                self.tasks[task.row.id] = task
            group = event.get("group")
            if group is not None and not self.owners.knows(task.row.topic, group):
                if self._is_old:
                    return
                self.owners.ensure(task.row, group)
            handler(task, event)

    def _apply_other(self, kind: str, event: Event) -> None:
        """Apply an event that is not about a task."""
        if not self._is_old and not self.schedules.apply(event):
            is_applied = self.transactions.apply(event, self.tasks) or self.records.apply(event)
            if not is_applied and (of_group := self._group_handlers.get(kind)) is not None:
                of_group(event)

    # --- producers ---------------------------------------------------------------------------

    def _enqueued(self, id_: int, event: Event) -> None:
        if id_ in self.tasks or id_ in self.removed_ids:
            return
        body = body_of(event)
        topic = sys.intern(event["topic"])
        row = TaskRow(id_, int(event["due_ms"]), topic, body or b"", options_of(event))
        self.tasks[id_] = Task(row, has_body=False, is_new=True) if body is None else row

    def _replaced(self, task: Task, event: Event) -> None:
        """Replace a task that was not delivered."""
        body, options = body_of(event), self._placed(options_of(event), event)
        if body is None and self._is_old and not task.is_new:
            body = task.row.body
        row = task.row._replace(due_ms=int(event["due_ms"]), body=body or b"", options=options)
        task.row, task.has_body, task.progress = row, body is not None, _EMPTY

    def _rescheduled(self, task: Task, event: Event) -> None:
        due_ms = int(event["due_ms"])
        if not (task.dead or task.progress):
            options = self._placed(task.row.options, event)
            task.row = task.row._replace(due_ms=due_ms, options=options)
            return
        for group in self._owing(task):
            progress = task.progress.get(group)
            attempt, epoch = (progress.attempt, progress.epoch) if progress else (0, 0)
            past = past_of(task, group)
            self._put_progress(task, group, ProgressState.WAITING, attempt, due_ms, epoch, past)

    def _placed(self, options: TaskOptions | None, event: Event) -> TaskOptions | None:
        """Return the options with the position in the order of ids from the event, if any."""
        if (place := event.get("order_id")) is None:
            return options
        self.id_mark = max(self.id_mark, int(place))
        return (options or TaskOptions())._replace(order_id=int(place))

    def _overtaken(self, task: Task, event: Event) -> None:
        """Record that a newer task replaces one whose delivery is in progress."""
        group, newer_id = event["group"], int(event["details"]["by"])
        if (progress := task.progress.get(group)) is not None:
            task.progress = {**task.progress, group: progress._replace(replaced_by=newer_id)}
        else:
            self._set(task, event, ProgressState.IN_FLIGHT, NO_PAST._replace(replaced_by=newer_id))

    # --- consumers ---------------------------------------------------------------------------

    def _delivered(self, task: Task, event: Event) -> None:
        group = event.get("group")
        if group is None:
            return  # a broadcast has no group
        task.holders = {**task.holders, group: str(event.get("subscriber", ""))}
        past = past_of(task, group, before=event["attempt"])
        before = task.progress.get(group)
        delivery = event["attempt"], event["epoch"]
        if before is not None and (before.attempt, before.epoch) == delivery:
            past = past._replace(replaced_by=before.replaced_by)  # from the backup
        self._set(task, event, ProgressState.IN_FLIGHT, past)

    def _nacked(self, task: Task, event: Event) -> None:
        past, next_ms = self._failed(task, event), event.get("due_ms")
        state = ProgressState.HELD if next_ms is None else ProgressState.WAITING
        self._set(task, event, state, past, next_ms)

    def _lease_over(self, task: Task, event: Event) -> None:
        past = self._failed(task, event)
        if "due_ms" in event:  # the consumer died
            self._set(task, event, ProgressState.WAITING, past, event["due_ms"])
        else:
            self._set(task, event, ProgressState.RELEASED, past)

    def _released(self, task: Task, event: Event) -> None:
        group = event["group"]
        past = past_of(task, group, before=event["attempt"])
        if "due_ms" in event:
            self._set(task, event, ProgressState.WAITING, past, event["due_ms"])
        elif past != NO_PAST:
            self._set(task, event, ProgressState.RELEASED, past)
        else:
            task.forget(group)

    def _dead(self, task: Task, event: Event) -> None:
        group = event["group"]
        letter, row = task.dead.get(group), task.progress.get(group)
        if letter is not None and letter[3:5] == (event["time_ms"], event["attempt"]):
            return  # the backup contains it, with all its failures
        past = self._failed(task, event)
        if row is not None and row.state is ProgressState.HELD:  # an operator has skipped its key
            past = row.past.with_failure(past.failures[-1]._replace(subscriber=""))
        reason = str(event.get("reason", ""))[:REASON_LENGTH_MAX]
        if trace := str(event.get("trace", "")):
            *earlier, last = past.failures
            last = last._replace(reason=f"{last.reason}\n{trace}")
            past = past._replace(failures=(*earlier, last))
        task.forget(group)
        letter = DeadRow(
            task.row.id,
            group,
            task.row.topic,
            event["time_ms"],
            event["attempt"],
            reason,
            past.failures,
            past.failed,
            deaths=past.deaths,
        )
        task.dead = {**task.dead, group: letter}

    def _requeued(self, task: Task, event: Event) -> None:
        task.forget(event["group"])
        if (ttl_ms := event.get("ttl_ms")) is not None:
            options = (task.row.options or TaskOptions())._replace(ttl_ms=int(ttl_ms))
            task.row = task.row._replace(options=options)

    def _deleted(self, task: Task, event: Event) -> None:
        group = event.get("group")
        if group is None or not self.owners.is_closed(task.row.topic, group):
            self._finish(Outcome.DELETED, task, event)
            return
        task.forget(group)
        task.let_go |= {group}
        self._end_if_last(task, event, Outcome.DELETED)

    def _filtered(self, task: Task, event: Event) -> None:
        """Note that a group's filter excluded the task, which matters only if the task ended."""
        if event.get("ended"):
            self._end(task, Outcome.FILTERED)

    # --- shared steps ------------------------------------------------------------------------

    def _failed(self, task: Task, event: Event) -> Past:
        """Return the failures of a task, including the failure in this event."""
        group, time_ms, attempt = event["group"], event["time_ms"], event["attempt"]
        reason = str(event.get("reason", ""))[:REASON_LENGTH_MAX]
        subscriber = str(event.get("subscriber") or task.holders.get(group, ""))
        before = past_of(task, group, before=attempt)
        return before.with_failure(Failure(attempt, time_ms, reason, subscriber))

    def _set(
        self, task: Task, event: Event, state: ProgressState, past: Past, at_ms: int | None = None
    ) -> None:
        at_ms = event["time_ms"] if at_ms is None else int(at_ms)
        self._put_progress(
            task, event["group"], state, event["attempt"], at_ms, event["epoch"], past
        )

    @staticmethod
    def _put_progress(
        task: Task,
        group: str,
        state: ProgressState,
        attempt: int,
        at_ms: int,
        epoch: int,
        past: Past = NO_PAST,
    ) -> None:
        row = ProgressRow(task.row.id, group, state, int(attempt), at_ms, epoch, *past)
        task.forget(group)
        task.progress = {**task.progress, group: row}

    def _finish(self, outcome: Outcome, task: Task, event: Event) -> None:
        """End the task for one group, or for all groups."""
        group = event.get("group")
        if group is None:
            self._end(task, outcome)
            return
        row = task.progress.get(group) or task.dead.get(group)
        # The ack may settle an earlier delivery.
        attempt = max(event.get("attempt", 0), row.attempt if row is not None else 0)
        epoch = event["epoch"] if outcome is Outcome.ACKED else 0
        state = _FINISHED_STATES.get(outcome, ProgressState.DONE)
        self._put_progress(task, group, state, attempt, 0, epoch)
        self._end_if_last(task, event, outcome)

    def _end_if_last(self, task: Task, event: Event, outcome: Outcome) -> None:
        """End the task if, according to the event, no other group must still receive it."""
        if event["ended"]:
            self._end(task, outcome)

    def _owing(self, task: Task) -> list[str]:
        """Return the groups that have not finished the task."""
        recorded = task.progress.keys() | task.dead.keys()
        return [
            group
            for group in self.owners.owing(task.row, recorded)
            if group not in task.dead
            and group not in task.let_go
            and not is_done(task.progress.get(group))
        ]

    def _end(self, task: Task, outcome: Outcome) -> None:
        id_ = task.row.id
        del self.tasks[id_]
        if id_ <= self._backup_mark:
            self.removed_ids.add(id_)
        self.ended += 1
        self.outcomes.pop(id_, None)
        self.outcomes[id_] = outcome
        if len(self.outcomes) > ENDINGS_MAX:
            self.outcomes.popitem(last=False)


# --- one task --------------------------------------------------------------------------------


_EMPTY: Final[dict[str, Any]] = {}
"""The maps of all tasks without progress, letters or consumers, which are most tasks."""


@dataclass(slots=True, eq=False)
class Task:
    """The state of a task that has events. Its maps are replaced, never changed."""

    row: TaskRow
    progress: Mapping[str, ProgressRow] = field(default_factory=lambda: _EMPTY)
    """Group → progress of the task in the group."""
    dead: Mapping[str, DeadRow] = field(default_factory=lambda: _EMPTY)
    """Group → the task's dead letter."""
    has_body: bool = True
    is_new: bool = False
    """Whether the backup lacks the task."""
    holders: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    """Group → the last consumer of the task."""
    let_go: frozenset[str] = frozenset()
    """Deleted groups that have released the task."""

    def forget(self, group: str) -> None:
        """Remove the progress and the dead letter of the group."""
        if group in self.progress:
            self.progress = {name: row for name, row in self.progress.items() if name != group}
        if group in self.dead:
            self.dead = {name: row for name, row in self.dead.items() if name != group}


def is_done(row: ProgressRow | None) -> bool:
    return row is not None and row.state.is_over


def past_of(task: Task, group: str, before: int = ATTEMPT_MAX + 1) -> Past:
    """Return the failures of the task's attempts in the group whose numbers are less than
    ``before``. For an event from before the backup, these are fewer than those in the backup. Their
    times say nothing, because clocks are set back. The number of postponements is unknown."""
    row = task.progress.get(group) or task.dead.get(group)
    if row is None:
        return NO_PAST
    failures = tuple(failure for failure in row.failures if failure.attempt < before)
    later = [failure.is_death for failure in row.failures[len(failures) :]]
    failed = max(0, row.failed - later.count(False))
    return Past(failures, failed, deaths=max(0, row.deaths - later.count(True)))
