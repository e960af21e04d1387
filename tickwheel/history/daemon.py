"""The daemon's part of the delivery history. It notes the events that the engine reports, and
appends them to the spool batch by batch. A separate process writes them into files.

``Recorder`` implements ``engine.events.Recorder``. Notes are collected in memory with the open
batch. Once the batch is durable, ``records`` turns them into the records that are appended to the
spool. New tasks are noted once per request.

Invariants of ``History``: it never disturbs the service. A failing disk raises no error, and
nothing waits for a disk longer than one ``write``. Events that cannot be kept are counted, logged
once, and leave a ``dropped`` event. The events of a batch are noted before the store gets the
batch, and appended before its replies are sent, so a SIGKILL loses no event of an answered request.

Each process of the history (writer, lookup, reset, restore) has a pipe from the daemon as its
standard input, and ends with the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Container, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.api.targets import HIDDEN_VALUE, shown_url
from tickwheel.clock import Clock
from tickwheel.engine.events import COMMITTED, PARKED, PUT, ROLLED_BACK
from tickwheel.engine.state import Core
from tickwheel.errors import BadRequest
from tickwheel.history.branches import Reached, Start, find_evidence, start_of
from tickwheel.history.lines import CLOCK_SET_BACK, EventKind
from tickwheel.history.segments import state_folder
from tickwheel.history.spool import BYTES_MAX, Pending, Spool, take_pending
from tickwheel.history.writer import DISK_CLEAN, DISK_WARN, RETENTION_S, WriterOptions
from tickwheel.model.kinds import TARGET
from tickwheel.persistence.contract import Evidence, Opened
from tickwheel.version import __version__
from tickwheel.waiting import cancel_all

if TYPE_CHECKING:
    from tickwheel.engine.topics import Group, Item, Lease, Subscriber, Topic
    from tickwheel.model.kinds import Halves, Kind, Run, ScheduleRow, TargetRow, TransactionRow
    from tickwheel.model.lateness import Causes
    from tickwheel.model.records import GroupSettings, NewTask, TaskRow

Record = list[Any]
Arrival = tuple[int, object, range, "Sequence[NewTask]"]
"""(time in ms, producer, ids, tasks)"""
REPEATS_MAX = 1_000_000
"""Maximum number of noted events of kinds that repeat while a store does not answer: deliveries,
ended leases and retries. The number of tasks bounds all other events. A single event takes about
300 bytes, in addition to a nack's reason."""
REPEATS = frozenset(
    (
        EventKind.DELIVERED,
        EventKind.NACKED,
        EventKind.LEASE_OVER,
        EventKind.RELEASED,
        EventKind.OCCURRENCE,
    )
)
_WITH_AGE = frozenset((COMMITTED, ROLLED_BACK, PARKED))
"""Events that are noted with the transaction's age."""
Times = Callable[[], tuple[int, int]]
"""(wall clock, steady clock) in ms."""


class Notes(NamedTuple):
    """The notes of one batch."""

    arrivals: list[Arrival]
    records: list[Record]
    occurrences: list[Record]
    """Notes about schedules and transactions whose tasks are in ``arrivals``. If their batch is
    refused, they are dropped with their arrivals."""


class Recorder:
    """Collects the notes of one tenure; see ``engine.events.Recorder``."""

    def __init__(
        self, epoch: int, clock: Times, label: Callable[[Any], str], *, bodies: bool = False
    ) -> None:
        """``label`` returns the name of a producer. With ``bodies``, notes contain task bodies."""
        self._epoch = epoch
        self._clock = clock
        self._label = label
        self._bodies = bodies
        self._arrivals: list[Arrival] = []
        self._records: list[Record] = []
        self._occurrences: list[Record] = []
        self.repeats_max = REPEATS_MAX
        self._repeats = 0
        """Number of noted events that count towards ``REPEATS_MAX``."""
        self.lost = 0
        """Number of events that exceeded ``repeats_max`` since the tenure began."""

    # --- batches -----------------------------------------------------------------------------

    def cut(self) -> Notes | None:
        if not (self._arrivals or self._records or self._occurrences):
            return None
        notes = Notes(self._arrivals, self._records, self._occurrences)
        self._arrivals, self._records, self._occurrences = [], [], []
        self._repeats = 0
        return notes

    def rejoin(self, notes: object, accepted: Container[int] = ()) -> None:
        if isinstance(notes, Notes):
            self._arrivals[:0] = _arrivals_of(notes.arrivals, accepted)
            self._records[:0] = notes.records
            # Repeated refusals by the store must not reset the count.
            repeated = (record for record in notes.records if record[0] in REPEATS)
            self._repeats += sum(map(_events_of, repeated))

    def forget_arrivals(self, accepted: Container[int] = ()) -> None:
        self._arrivals, self._occurrences = _arrivals_of(self._arrivals, accepted), []

    def records(self, notes: Notes) -> list[Record]:
        """Return the records for the spool. Arrivals come first, because no other event of their
        tasks can precede them. Runs of schedules and transactions come last, because schedules and
        transactions do not change again until these notes are durable."""
        arrived = [self._enqueued(*arrival) for arrival in notes.arrivals]
        return arrived + notes.records + notes.occurrences

    def _enqueued(
        self, time_ms: int, source: object, ids: range, new_tasks: Sequence[NewTask]
    ) -> Record:
        producer = self._named(source)
        topics: Any = [new_task[0] for new_task in new_tasks]
        if topics.count(topics[0]) == len(topics):
            topics = topics[0]
        options = {
            i: new_task[3] for i, new_task in enumerate(new_tasks) if new_task[3] is not None
        }
        bodies = [new_task[2] for new_task in new_tasks] if self._bodies else None
        dues = [new_task[1] for new_task in new_tasks]
        return [EventKind.ENQUEUED, time_ms, producer, list(ids), dues, topics, options, bodies]

    def _note(self, kind: EventKind, time_ms: int, *fields: Any) -> None:
        self._records.append([kind, time_ms, *fields])

    def _repeat(self, events: int, kind: EventKind, time_ms: int, *fields: Any) -> None:
        if self._repeats + events > self.repeats_max:
            self.lost += events
            return
        self._repeats += events
        self._records.append([kind, time_ms, *fields])

    # --- producers ---------------------------------------------------------------------------

    def arrived(
        self, source: object, ids: range, new_tasks: Sequence[NewTask], now_ms: int
    ) -> None:
        self._arrivals.append((now_ms, source, ids, new_tasks))

    def replaced(self, source: object, row: TaskRow, now_ms: int) -> None:
        options = {} if row.options is None else {0: row.options}
        bodies = [row.body] if self._bodies else None
        order_id = row.options.order_id if row.options is not None else None
        orders = None if order_id is None else [order_id]
        self._note(
            EventKind.REPLACED, now_ms, self._named(source), [row.id], [row.due_ms], row.topic,
            options,
            bodies, orders,
        )  # fmt: skip

    def not_stored(self, source: object, topic: str, what: str, task_id: int, now_ms: int) -> None:
        self._note(EventKind.MERGED, now_ms, self._named(source), topic, what, [task_id])

    def overtaken(self, lease: Lease) -> None:
        topic, group, _, ids, attempts = _lease_fields(lease)
        newer_id = lease.past.replaced_by
        self._note(EventKind.OVERTAKEN, self._clock()[0], topic, group, ids, attempts, newer_id)

    def _named(self, source: object) -> str:
        return self._label(source) if source is not None else ""

    def rescheduled(self, row: TaskRow, due_ms: int) -> None:
        order_id = row.options.order_id if row.options is not None else None
        orders = () if order_id is None else ([order_id],)
        self._note(EventKind.RESCHEDULED, self._clock()[0], row.topic, [row.id], [due_ms], *orders)

    def rescheduled_many(self, topic: str, ids: Sequence[int], dues_ms: Sequence[int]) -> None:
        self._note(EventKind.RESCHEDULED, self._clock()[0], topic, list(ids), list(dues_ms))

    # --- consumers ---------------------------------------------------------------------------

    def delivered(
        self,
        group: Group,
        subscriber: Subscriber,
        items: Sequence[Item],
        now_ms: int,
        causes: Causes | None = None,
    ) -> None:
        cause_fields = () if causes is None else (_one_cause_or_each(causes),)
        self._repeat(
            len(items),
            EventKind.DELIVERED,
            now_ms,
            group.topic.name,
            group.name or None,
            subscriber.label,
            [row[0] for row, _, _ in items],
            _one_or_each([attempt for _, attempt, _ in items]),
            [row[1] for row, _, _ in items],
            *cause_fields,
        )

    def acked(self, group: Group, leases: Sequence[Lease], kept: AbstractSet[int]) -> None:
        now_ms, mono_ms = self._clock()
        to_wall_ms = now_ms - mono_ms
        for label, part in groupby(leases, lambda lease: lease.subscriber.label):
            share = list(part)
            # The time of a delivery that was made in an earlier epoch is unknown.
            delivered = [
                lease.since_mono_ms + to_wall_ms if lease.epoch == self._epoch else 0
                for lease in share
            ]
            self._note(
                EventKind.ACKED,
                now_ms,
                group.topic.name,
                group.name,
                label,
                self._epoch,
                [lease.id for lease in share],
                _one_or_each([lease.attempt for lease in share]),
                delivered,
                [lease.id not in kept for lease in share] if kept else True,
            )

    def acked_without_lease(self, group: Group, task_id: int, attempt: int, *, ended: bool) -> None:
        now_ms, names = self._clock()[0], (group.topic.name, group.name)
        self._note(EventKind.ACKED, now_ms, *names, "", self._epoch, [task_id], attempt, 0, ended)

    def nacked(self, lease: Lease, reason: str, next_ms: int | None, now_ms: int) -> None:
        self._repeat(1, EventKind.NACKED, now_ms, *_lease_fields(lease), [next_ms], reason)

    def lease_over(
        self, lease: Lease, reason: str, now_ms: int, until_ms: int | None = None
    ) -> None:
        dues = () if until_ms is None else ([until_ms],)
        self._repeat(1, EventKind.LEASE_OVER, now_ms, *_lease_fields(lease), reason, *dues)

    def released(self, lease: Lease, until_ms: int | None, now_ms: int) -> None:
        dues = () if until_ms is None else ([until_ms],)
        self._repeat(1, EventKind.RELEASED, now_ms, *_lease_fields(lease), *dues)

    def dead_lettered(self, lease: Lease, reason: str, now_ms: int) -> None:
        topic, group, _, ids, attempt = _lease_fields(lease)
        self._note(EventKind.DEAD, now_ms, topic, group, ids, attempt, reason)

    def ended(
        self,
        topic: str,
        group: str | None,
        how: str,
        task_id: int,
        *,
        last: bool,
        reason: str | None = None,
    ) -> None:
        is_last, reason_fields = last if group else None, () if reason is None else (reason,)
        fields = topic, group or None, how, [task_id], is_last, *reason_fields
        self._note(EventKind.ENDED, self._clock()[0], *fields)

    def ended_many(self, topic: str, how: str, ids: Sequence[int]) -> None:
        self._note(EventKind.ENDED, self._clock()[0], topic, None, how, list(ids), None)

    def requeued(self, topic: str, group: str, task_id: int, ttl_ms: int | None = None) -> None:
        ttl_fields = () if ttl_ms is None else (ttl_ms,)
        self._note(EventKind.REQUEUED, self._clock()[0], topic, group, [task_id], *ttl_fields)

    # --- groups ------------------------------------------------------------------------------

    def group_created(self, group: Group) -> None:
        # Ids are text, because they exceed the integers that many JSON readers represent exactly.
        since = {"since_ms": group.since_ms, "since_id": str(group.since_id)}
        self._group(group.topic, group, "created", since)

    def group_reset(self, group: Group, bulk: str, from_ms: int, until_ms: int) -> None:
        details = {"bulk": bulk, "from_ms": from_ms, "until_ms": until_ms}
        self._group(group.topic, group, "reset", details)

    def group_closed(self, group: Group) -> None:
        settings = group.settings
        closed = {"closed_ms": settings.closed_ms, "closed_id": str(settings.closed_id)}
        self._group(group.topic, group, "deleted", closed)

    def configured(self, topic: Topic, group: Group | None) -> None:
        settings = topic.settings if group is None else group.settings
        self._group(topic, group, "configured", settings_map(settings))

    def _group(self, topic: Topic, group: Group | None, kind: str, details: dict[str, Any]) -> None:
        name = group.name if group is not None else None
        self._note(EventKind.GROUP, self._clock()[0], topic.name, name, kind, details)

    # --- records -----------------------------------------------------------------------------

    def record_put(self, kind: Kind[Any], row: Any, before: Any = None) -> None:
        fields = row._asdict()
        if kind is TARGET:
            fields |= _without_secrets(row, before)
        self._record(kind, row, "put", fields)

    def record_dropped(self, kind: Kind[Any], row: Any) -> None:
        self._record(kind, row, "dropped", {"key": kind.key(row)})

    def _record(self, kind: Kind[Any], row: Any, event: str, fields: dict[str, Any]) -> None:
        place = row.topic or None, getattr(row, "group", None)
        self._note(EventKind.RECORD, self._clock()[0], *place, kind.name, event, fields)

    # --- schedules ---------------------------------------------------------------------------

    def schedule_changed(self, row: ScheduleRow, event: str, *, same_body: bool = False) -> None:
        schedule, state, body = row.schedule, _state_of(row), None
        if event == PUT:
            state["settings"] = schedule_map(row) | ({"same_body": True} if same_body else {})
            body = schedule.body if self._bodies else None
        now_ms = self._clock()[0]
        self._note(EventKind.SCHEDULE, now_ms, schedule.topic, schedule.name, event, state, body)

    def occurred(self, row: ScheduleRow, runs: Sequence[Run], now_ms: int, *, staged: bool) -> None:
        topic, name = row.schedule.topic, row.schedule.name
        columns = [[run.planned_ms, run.outcome, run.id, run.occurrences] for run in runs]
        if staged:
            record = [EventKind.OCCURRENCE, now_ms, topic, name, columns, _state_of(row)]
            self._occurrences.append(record)
        else:
            self._repeat(
                len(runs), EventKind.OCCURRENCE, now_ms, topic, name, columns, _state_of(row)
            )

    # --- transactions ------------------------------------------------------------------------

    def transacted(
        self,
        source: object,
        row: TransactionRow,
        event: str,
        now_ms: int,
        added: Halves | None = None,
    ) -> None:
        details: dict[str, Any] = {"group": row.group, "bytes": row.size_bytes}
        tasks = row.tasks
        if added is not None:
            details["part"], tasks = added.part, len(added.halves)
        if event in _WITH_AGE:
            details["age_ms"] = max(0, now_ms - row.began_ms)
        if row.state.is_decided:  # who may see it after a restore
            details |= {"topics": row.topics, "owner": row.owner}
        if row.checks:
            details |= {"checks": row.checks, "asked": row.asked}
        record = [
            EventKind.TRANSACTION, now_ms, self._named(source), row.id, event, tasks, row.first_id,
            details,
        ]  # fmt: skip
        self._occurrences.append(record)


def _arrivals_of(arrivals: list[Arrival], accepted: Container[int]) -> list[Arrival]:
    """Return the arrivals of ``accepted`` tasks. The tasks of a request are accepted together."""
    return [arrival for arrival in arrivals if arrival[2][0] in accepted]


def events_in(notes: Notes) -> int:
    """Return the number of events in the notes."""
    noted = (*notes.records, *notes.occurrences)
    return sum(len(arrival[2]) for arrival in notes.arrivals) + sum(map(_events_of, noted))


def _events_of(record: Record) -> int:
    return next((len(field) for field in record if type(field) is list), 1)


def settings_map(settings: GroupSettings) -> dict[str, Any]:
    """Return the settings of a group or topic that have values. ``closed_ms`` means that the topic
    is being deleted."""
    rule = settings.if_pending
    fields = settings.flat() | {
        "if_pending": None if rule is None else rule.to_map(),
        "broadcast_only": settings.broadcast_only or None,
        "former": [[*owner[:3], str(owner.id)] for owner in settings.former] or None,  # ids as text
        "closed_id": None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _without_secrets(row: TargetRow, before: TargetRow | None) -> dict[str, Any]:
    """Return the fields of a target that differ in its event: the URL as answers show it, the
    number of secrets, which include a URL with hidden values, and whether ``before`` had them."""
    shown = shown_url(row.url)
    hides = HIDDEN_VALUE in shown
    return {
        "url": shown if hides else row.url,
        "secrets": len(row.secrets) + hides,
        "same_secrets": before is not None
        and before.secrets == row.secrets
        and (before.url == row.url or not hides),
    }


def schedule_map(row: ScheduleRow) -> dict[str, Any]:
    """Return the settings of a schedule that have values, without its body."""
    fields = row.schedule._asdict() | {"paused": row.paused or None}
    fields["task"] = fields.pop("options")
    for name in ("name", "topic", "body"):
        del fields[name]
    return {name: value for name, value in fields.items() if value is not None}


def _state_of(row: ScheduleRow) -> dict[str, Any]:
    """Return the progress of a schedule."""
    fields = {"next_ms": row.next_ms, "runs": row.runs, "queued_ms": row.queued_ms}
    return {name: value for name, value in fields.items() if value is not None}


def _lease_fields(lease: Lease) -> tuple[str, str, str, list[int], int]:
    """Return (topic, group, subscriber, ids, attempt) of a lease."""
    group = lease.group
    return group.topic.name, group.name, lease.subscriber.label, [lease.id], lease.attempt


def _one_cause_or_each(causes: Causes) -> str | list[str | None] | None:
    """Return the causes as text: one text if all tasks have the same cause, else a list."""
    if not isinstance(causes, list):
        return causes.value
    names = [None if cause is None else cause.value for cause in causes]
    return names[0] if names.count(names[0]) == len(names) else names


def _one_or_each(column: list[int]) -> int | list[int]:
    """Return the column, or 1 if all values are 1, which is usual for attempts."""
    return 1 if column.count(1) == len(column) else column


# --- processes -----------------------------------------------------------------------------------


LINE_BYTES_MAX = 64 * 1024


async def start_process(
    command: Sequence[str], *, answers: bool = False, line_bytes_max: int = LINE_BYTES_MAX
) -> Process:
    """Start a process that answers on standard output (``answers``) or writes to standard error."""
    stdout, stderr = (PIPE, DEVNULL) if answers else (DEVNULL, PIPE)
    return await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=stdout, stderr=stderr, limit=line_bytes_max
    )


def dismiss(process: Process) -> None:
    """Close the standard input of a process, which then ends after its current work."""
    if process.stdin is not None:
        process.stdin.close()


def kill(process: Process | None) -> None:
    """Kill a process unless it has ended."""
    if process is not None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


# --- from notes to the spool ---------------------------------------------------------------------


FLUSH_S = 1.0
"""Seconds between two appends of events that belong to no batch (broadcasts)."""
RESTART_S = 2.0
"""Seconds between the end of the writing process and its restart."""
FINISH_S = 10.0
"""Maximum seconds that ``stop`` waits for the writing process, which then continues by itself."""


@dataclass(frozen=True, slots=True)
class HistoryOptions(WriterOptions):
    """The location of one shard's history, and its limits."""

    retention_s: float | None = RETENTION_S
    disk_warn: float = DISK_WARN
    disk_clean: float = DISK_CLEAN
    bodies: bool = False
    spool_bytes_max: int = BYTES_MAX


class History:
    """The history of a shard. ``start`` and ``stop`` it once, ``begin`` and ``end`` each tenure."""

    def __init__(
        self, options: HistoryOptions, clock: Clock, on_event: Callable[[str, str], None]
    ) -> None:
        """Raise BadRequest if the folder cannot be created."""
        self._options = options
        self._clock = clock
        self._on_event = on_event
        self._folder = state_folder(options.folder, options.node, options.shard)
        try:
            # Do not create parents, so that a missing mount is noticed.
            Path(options.folder).mkdir(exist_ok=True)
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadRequest(
                f"setting history_dir: cannot make {self._folder}: {error.strerror}"
            ) from None
        self._spool: Spool | None = None
        self._recorder: Recorder | None = None
        self._pending: Pending | None = None
        self._reached: Reached | None = None
        self._start = Start(0, "")
        self._prepared: dict[int, bytes] = {}
        """Number of a batch that is being committed → its packed records."""
        self._epoch = self._number = 0
        self._missing = 0
        """Number of events dropped since the last successful append."""
        self._reason = ""
        """Why events were last dropped."""
        self._lost = 0
        """The part of ``Recorder.lost`` that has been counted."""
        self._set_back_ms = 0
        """The wheel's position at the last appended step back of the clock."""
        self._recent = 0
        """Number of events appended since the last check of the spool."""
        self._writing: asyncio.Task[None] | None = None
        self._process: Process | None = None
        self._stopping = asyncio.Event()
        self.dropped = 0
        """Number of events dropped since the process began."""
        self.writer_restarts = 0

    @property
    def spool_bytes(self) -> int:
        """Bytes in the spool that wait for the writing process."""
        return self._spool.measure() if self._spool is not None else 0

    # --- a tenure ----------------------------------------------------------------------------

    def begin(self, opened: Opened) -> Recorder:
        """Begin a tenure. Return the recorder to which the engine reports its events."""
        options = self._options
        self._spool = Spool(self._folder, opened.epoch, options.spool_bytes_max)
        self._number = opened.last_batch
        self._recorder = recorder = Recorder(
            opened.epoch, self._clock.read, attrgetter("label"), bodies=options.bodies
        )
        self._lost = 0
        self._start = start_of(opened)
        self._take_over(opened)
        start = {k: v for k, v in self._start._asdict().items() if v and k != "epoch"}
        self._append([self._daemon("started", clean=opened.clean, version=__version__, **start)], 1)
        self._set_back_ms = 0
        self.note_clock(self._clock.read().now_ms, opened.position_ms)
        return recorder

    def note_clock(self, now_ms: int, position_ms: int) -> None:
        """Append that the clock was set back, if it is behind the wheel, whose position the store
        has as its time. Call this before the events of ``now_ms`` are appended: a restore must not
        take them for earlier ones. If it cannot be appended, the next call does it."""
        if self._spool is None or now_ms >= position_ms or position_ms <= self._set_back_ms:
            return
        record = self._daemon(CLOCK_SET_BACK, position_ms=position_ms)
        if self._spool.append(self._number, [record]):
            self._set_back_ms, self._recent = position_ms, self._recent + 1

    def evidence(self) -> list[Evidence]:
        """Return the store's epochs that are in the history, before a tenure begins."""
        return find_evidence(Path(self._options.folder), self._options.shard)

    def _take_over(self, opened: Opened) -> None:
        """Append the events of durable batches that the previous daemon did not append."""
        assert self._spool is not None
        folder, shard = Path(self._options.folder), self._options.shard
        if not opened.is_branch:  # the batch numbers of a new branch are different
            for _, data in take_pending(folder, shard, opened.epoch, opened.last_batch):
                self._append_packed(data, 1)
        self._epoch = opened.epoch
        self._renew_pending()

    def _renew_pending(self) -> None:
        for former in (self._pending, self._reached):
            if former is not None:
                former.close()
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
        self._pending = Pending(self._folder, self._epoch)
        self._reached = Reached(self._folder, self._start, self._number)

    def prepare(self, number: int, notes: object) -> None:
        """Save the records of a batch before the store gets it."""
        spool, pending, recorder = self._spool, self._pending, self._recorder
        if isinstance(notes, Notes) and spool is not None and pending and recorder is not None:
            data = spool.pack(number, recorder.records(notes))
            if data is not None:
                self._prepared[number] = data
                pending.note(number, data)

    def keep(self, number: int, notes: object) -> None:
        """Append the records of a batch that has become durable."""
        self._number = number
        if self._reached is not None:
            self._reached.note(number)
        data, pending = self._prepared.pop(number, None), self._pending
        if isinstance(notes, Notes) and self._recorder is not None:
            self._count_lost(self._recorder)
            if pending is not None and pending.is_taken(number):
                return
            if data is not None and not self._missing:
                self._append_packed(data, events_in(notes))
            else:
                self._append(self._recorder.records(notes), events_in(notes))
        if pending is not None:
            pending.discard(number)

    async def flush_for_ever(self, core: Core) -> None:
        """Append events that belong to no batch, once every ``FLUSH_S`` seconds."""
        while True:
            await asyncio.sleep(FLUSH_S)
            if self._recorder is None:
                continue
            self._check_spool()
            self._count_lost(self._recorder)
            if core.sealed is None and core.open.is_empty():
                self.keep(self._number, self._recorder.cut())

    def end(self, clean: bool) -> None:
        """End the tenure. ``clean`` means that all noted changes are durable."""
        spool, recorder = self._spool, self._recorder
        if spool is None or recorder is None:
            return
        if clean:
            self._check_spool()
            self.keep(self._number, recorder.cut())
            self._append([self._daemon("stopped", clean=True)], 1)
        self._spool = self._recorder = None
        self._prepared.clear()
        if self._pending is not None:
            self._pending.close(clean)
        if self._reached is not None:
            self._reached.close()
        spool.close(clean)

    def _daemon(self, event: str, **details: Any) -> list[Any]:
        return [EventKind.DAEMON, self._clock.read().now_ms, event, details]

    def _append(self, records: list[list[Any]], events: int) -> None:
        spool = self._spool
        if spool is None:
            return
        if self._missing:
            now_ms = self._clock.read().now_ms
            records = [[EventKind.DROPPED, now_ms, self._missing, self._reason], *records]
        if self._append_packed(spool.pack(self._number, records), events) and self._missing:
            self._on_event("history_kept_again", f"{self._missing} events are missing")
            self._missing = 0

    def _append_packed(self, data: bytes | None, events: int) -> bool:
        """Append packed records, or count them as dropped if they could not be packed (None).
        Return whether they were appended."""
        assert self._spool is not None
        if data is None or not self._spool.append_packed(data):
            self._drop(events, self._spool.trouble or "unknown")
            return False
        self._recent += events
        return True

    def _check_spool(self) -> None:
        """Begin a new spool if its file was removed, because writes to it would still succeed."""
        recent, self._recent = self._recent, 0
        if self._spool is None or not self._spool.is_lost():
            return
        reason, was_missing = "the folder of the spool was removed or moved", self._missing
        self._renew_pending()
        self._set_back_ms = 0
        # The number of lost events is unknown. Older events can also be lost, with their files.
        self.dropped += max(1, recent)
        self._append([[EventKind.DROPPED, self._clock.read().now_ms, None, reason]], 1)
        if not was_missing and not self._missing:  # otherwise, the loss has already been logged
            self._on_event("history_dropped", f"{reason}; a new one was created")

    def _count_lost(self, recorder: Recorder) -> None:
        lost, self._lost = recorder.lost - self._lost, recorder.lost
        if lost:
            repeats_max = recorder.repeats_max
            self._drop(lost, f"{repeats_max} deliveries and retries already wait for the store")

    def _drop(self, events: int, reason: str) -> None:
        if not self._missing:
            self._on_event("history_dropped", f"{reason}; the service continues without history")
        self._missing += events
        self.dropped += events
        self._reason = reason

    # --- the writing process -------------------------------------------------------------------

    def start(self) -> None:
        """Start the writing process, which also writes events that earlier daemons left."""
        self._writing = asyncio.create_task(self._write_for_ever())

    async def stop(self) -> None:
        """Stop the writing process. Call this after ``end``. Wait at most ``FINISH_S`` until the
        whole spool has been written into files."""
        self._stopping.set()
        writing, self._writing = self._writing, None
        if writing is None:
            return
        if self._process is not None:
            dismiss(self._process)
        ended, _ = await asyncio.wait((writing,), timeout=FINISH_S)
        if not ended:
            self._on_event("history_unfinished", "the next start writes the rest of the spool")
            await cancel_all([writing])

    async def _write_for_ever(self) -> None:
        while True:
            is_last = self._stopping.is_set()
            try:
                code = await self._write()
                ended = f"exit code {code}"
            except Exception as error:
                reason = error.strerror if isinstance(error, OSError) else repr(error)
                code, ended = 1, f"cannot be started: {reason}"
            if self._stopping.is_set():
                # The process failed before it was told to stop, so start it once more.
                if is_last or code == 0:
                    return
                continue
            self.writer_restarts += 1
            self._on_event("history_writer_ended", f"{ended}; starting it again")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESTART_S):
                    await self._stopping.wait()

    async def _write(self) -> int:
        """Run the writing process once. Return its exit code. Raise OSError."""
        self._process = process = await start_process(self._options.command())
        assert process.stderr is not None
        if self._stopping.is_set():
            dismiss(process)
        while True:
            try:
                line = await process.stderr.readline()
            except (
                ValueError
            ):  # the line is too long; keep reading, because otherwise the process would block
                continue
            if not line:
                break
            text = line.decode("utf-8", "replace").strip()
            self._on_event("history_writer", text.removeprefix("history writer: "))
        return await process.wait()
