"""The daemon's end of the delivery history: what the engine reports is noted, and goes to the spool
batch by batch; a process of its own makes files of it.

``Recorder`` is the other side of ``engine.events``. Notes gather in memory with the open batch;
``records`` makes of them what is appended to the spool once that batch is durable: whole columns.
Tasks that arrive are noted a request at a time, and become columns only then.

Invariants of ``History``: service comes first. A failing disk raises nothing here, and nothing
waits for a disk longer than one ``write``; what cannot be kept is counted, logged once, and leaves
a ``dropped`` event. A batch is appended before its replies leave, and noted before the store has
it. So SIGKILL loses nothing that a client got as an answer, from this daemon or from the next one.

Each process of the history (writer, lookup, reset, restore) ends with the daemon, however that
ends: its standard input is a pipe from here.
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

from tickwheel.clock import Clock
from tickwheel.engine.events import COMMITTED, PARKED, PUT, ROLLED_BACK
from tickwheel.engine.state import Core
from tickwheel.errors import BadRequest
from tickwheel.history.branches import Reached, Start, known, start_of
from tickwheel.history.lines import EventKind
from tickwheel.history.segments import state_folder
from tickwheel.history.spool import BYTES_MAX, Pending, Spool, take_pending
from tickwheel.history.writer import DISK_CLEAN, DISK_WARN, RETENTION_S, WriterOptions
from tickwheel.persistence.contract import Known, Opened
from tickwheel.version import __version__

if TYPE_CHECKING:
    from tickwheel.engine.topics import Group, Item, Lease, Subscriber, Topic
    from tickwheel.model.kinds import Halves, Run, ScheduleRow, TransactionRow
    from tickwheel.model.lateness import Causes
    from tickwheel.model.records import GroupSettings, NewTask, TaskRow

Record = list[Any]
Arrival = tuple[int, object, range, "Sequence[NewTask]"]
"""(time in ms, producer, ids, tasks)"""
REPEATS_MAX = 1_000_000
"""Events that may wait for a batch and come again and again while a store is away: deliveries,
leases that end, retries. All else is bounded by the tasks there are. One that is noted alone takes
about 300 bytes, and a nack's reason."""
REPEATS = frozenset(
    (
        EventKind.DELIVERED,
        EventKind.NACKED,
        EventKind.LEASE_OVER,
        EventKind.RELEASED,
        EventKind.OCCURRENCE,
    )
)
_ENDS = frozenset((COMMITTED, ROLLED_BACK, PARKED))
"""Ends of a transaction, which are noted with its age."""
Times = Callable[[], tuple[int, int]]
"""(wall clock, steady clock) in ms."""


class Notes(NamedTuple):
    """The notes of one batch."""

    arrivals: list[Arrival]
    records: list[Record]
    occurrences: list[Record]
    """Notes about schedules and transactions with tasks among the arrivals: forgotten with them."""


class Recorder:
    """The notes of one tenure. ``engine.events.Recorder`` says what each call means."""

    def __init__(
        self, epoch: int, clock: Times, label: Callable[[Any], str], *, bodies: bool = False
    ) -> None:
        """``label`` names a producer; ``bodies``: keep the bodies of tasks, too."""
        self._epoch = epoch
        self._clock = clock
        self._label = label
        self._bodies = bodies
        self._arrivals: list[Arrival] = []
        self._records: list[Record] = []
        self._occurrences: list[Record] = []
        self.repeats_max = REPEATS_MAX
        self._repeats = 0
        """Events among the records that ``REPEATS_MAX`` bounds."""
        self.lost = 0
        """Events that were not noted since the tenure began, because too many waited."""

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
            self._arrivals[:0] = _only(notes.arrivals, accepted)
            self._records[:0] = notes.records
            # They wait again: a store that refuses over and over must not begin the count anew.
            self._repeats += sum(_events_of(one) for one in notes.records if one[0] in REPEATS)

    def forget_arrivals(self, accepted: Container[int] = ()) -> None:
        self._arrivals, self._occurrences = _only(self._arrivals, accepted), []

    def records(self, notes: Notes) -> list[Record]:
        """The spool's records, arrivals first: nothing else can have happened to them yet; and
        last the runs of schedules and what became of transactions, to which nothing else happens
        until they are durable."""
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

    def merged(self, source: object, topic: str, what: str, task_id: int, now_ms: int) -> None:
        self._note(EventKind.MERGED, now_ms, self._named(source), topic, what, [task_id])

    def overtaken(self, lease: Lease) -> None:
        topic, group, _, ids, attempts = _whose(lease)
        by = lease.past.replaced_by
        self._note(EventKind.OVERTAKEN, self._clock()[0], topic, group, ids, attempts, by)

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
        more = () if causes is None else (_one_cause_or_each(causes),)
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
            *more,
        )

    def acked(self, group: Group, leases: Sequence[Lease], kept: AbstractSet[int]) -> None:
        now_ms, mono_ms = self._clock()
        to_wall_ms = now_ms - mono_ms
        for label, some in groupby(leases, lambda lease: lease.subscriber.label):
            share = list(some)
            # The time of a delivery from before this start is not known.
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

    def acked_idle(self, group: Group, task_id: int, attempt: int, *, ended: bool) -> None:
        now_ms, names = self._clock()[0], (group.topic.name, group.name)
        self._note(EventKind.ACKED, now_ms, *names, "", self._epoch, [task_id], attempt, 0, ended)

    def nacked(self, lease: Lease, reason: str, next_ms: int, now_ms: int) -> None:
        self._repeat(1, EventKind.NACKED, now_ms, *_whose(lease), [next_ms], reason)

    def lease_over(
        self, lease: Lease, reason: str, now_ms: int, until_ms: int | None = None
    ) -> None:
        dues = () if until_ms is None else ([until_ms],)
        self._repeat(1, EventKind.LEASE_OVER, now_ms, *_whose(lease), reason, *dues)

    def released(self, lease: Lease, until_ms: int | None, now_ms: int) -> None:
        dues = () if until_ms is None else ([until_ms],)
        self._repeat(1, EventKind.RELEASED, now_ms, *_whose(lease), *dues)

    def died(self, lease: Lease, reason: str, now_ms: int) -> None:
        topic, group, _, ids, attempt = _whose(lease)
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
        is_last, why = last if group else None, () if reason is None else (reason,)
        fields = topic, group or None, how, [task_id], is_last, *why
        self._note(EventKind.ENDED, self._clock()[0], *fields)

    def ended_many(self, topic: str, how: str, ids: Sequence[int]) -> None:
        self._note(EventKind.ENDED, self._clock()[0], topic, None, how, list(ids), None)

    def requeued(self, topic: str, group: str, task_id: int, ttl_ms: int | None = None) -> None:
        new = () if ttl_ms is None else (ttl_ms,)
        self._note(EventKind.REQUEUED, self._clock()[0], topic, group, [task_id], *new)

    # --- groups ------------------------------------------------------------------------------

    def group_created(self, group: Group) -> None:
        # Ids as text: they are above what many readers of JSON can count to.
        since = {"since_ms": group.since_ms, "since_id": str(group.since_id)}
        self._group(group.topic, group, "created", since)

    def group_reset(self, group: Group, bulk: str, from_ms: int, until_ms: int) -> None:
        what = {"bulk": bulk, "from_ms": from_ms, "until_ms": until_ms}
        self._group(group.topic, group, "reset", what)

    def group_closed(self, group: Group) -> None:
        settings = group.settings
        closed = {"closed_ms": settings.closed_ms, "closed_id": str(settings.closed_id)}
        self._group(group.topic, group, "deleted", closed)

    def configured(self, topic: Topic, group: Group | None) -> None:
        settings = topic.settings if group is None else group.settings
        self._group(topic, group, "configured", settings_map(settings))

    def _group(self, topic: Topic, group: Group | None, what: str, details: dict[str, Any]) -> None:
        name = group.name if group is not None else None
        self._note(EventKind.GROUP, self._clock()[0], topic.name, name, what, details)

    # --- schedules ---------------------------------------------------------------------------

    def schedule_changed(self, row: ScheduleRow, what: str, *, same_body: bool = False) -> None:
        schedule, state, body = row.schedule, _state_of(row), None
        if what == PUT:
            state["settings"] = schedule_map(row) | ({"same_body": True} if same_body else {})
            body = schedule.body if self._bodies else None
        now_ms = self._clock()[0]
        self._note(EventKind.SCHEDULE, now_ms, schedule.topic, schedule.name, what, state, body)

    def occurred(self, row: ScheduleRow, runs: Sequence[Run], now_ms: int, *, staged: bool) -> None:
        topic, name = row.schedule.topic, row.schedule.name
        found = [[run.planned_ms, run.outcome, run.id, run.occurrences] for run in runs]
        if staged:
            record = [EventKind.OCCURRENCE, now_ms, topic, name, found, _state_of(row)]
            self._occurrences.append(record)
        else:
            self._repeat(
                len(runs), EventKind.OCCURRENCE, now_ms, topic, name, found, _state_of(row)
            )

    # --- transactions ------------------------------------------------------------------------

    def transacted(
        self,
        source: object,
        row: TransactionRow,
        what: str,
        now_ms: int,
        added: Halves | None = None,
    ) -> None:
        details: dict[str, Any] = {"group": row.group, "bytes": row.size_bytes}
        tasks = row.tasks
        if added is not None:
            details["part"], tasks = added.part, len(added.halves)
        if what in _ENDS:
            details["age_ms"] = max(0, now_ms - row.began_ms)
        if row.checks:
            details |= {"checks": row.checks, "asked": row.asked}
        record = [
            EventKind.TRANSACTION, now_ms, self._named(source), row.id, what, tasks, row.first_id,
            details,
        ]  # fmt: skip
        self._occurrences.append(record)


def _only(arrivals: list[Arrival], accepted: Container[int]) -> list[Arrival]:
    """The arrivals that are left when all tasks but the ``accepted`` ones are forgotten. The tasks
    of a request are accepted together."""
    return [arrival for arrival in arrivals if arrival[2][0] in accepted]


def events_in(notes: Notes) -> int:
    """How many events the notes would become."""
    noted = (*notes.records, *notes.occurrences)
    return sum(len(arrival[2]) for arrival in notes.arrivals) + sum(map(_events_of, noted))


def _events_of(record: Record) -> int:
    return next((len(field) for field in record if type(field) is list), 1)


def settings_map(settings: GroupSettings) -> dict[str, Any]:
    """The settings of a group or topic that are set; ``closed_ms``: the topic is being deleted."""
    rule = settings.if_pending
    found = settings.flat() | {
        "if_pending": None if rule is None else rule.to_map(),
        "broadcast_only": settings.broadcast_only or None,
        # Ids as text, here too.
        "former": [[*one[:3], str(one.id)] for one in settings.former] or None,
        "closed_id": None,
    }
    return {name: value for name, value in found.items() if value is not None}


def schedule_map(row: ScheduleRow) -> dict[str, Any]:
    """The settings of a schedule that are set, without its body."""
    found = row.schedule._asdict() | {"paused": row.paused or None}
    found["task"] = found.pop("options")
    for name in ("name", "topic", "body"):
        del found[name]
    return {name: value for name, value in found.items() if value is not None}


def _state_of(row: ScheduleRow) -> dict[str, Any]:
    """How far a schedule has come."""
    found = {"next_ms": row.next_ms, "runs": row.runs, "queued_ms": row.queued_ms}
    return {name: value for name, value in found.items() if value is not None}


def _whose(lease: Lease) -> tuple[str, str, str, list[int], int]:
    """(topic, group, subscriber, ids, attempt) of a lease."""
    group = lease.group
    return group.topic.name, group.name, lease.subscriber.label, [lease.id], lease.attempt


def _one_cause_or_each(causes: Causes) -> str | list[str | None] | None:
    """The causes as text, in a form that the spool can pack: one for all, or each."""
    if not isinstance(causes, list):
        return causes.value
    words = [None if cause is None else cause.value for cause in causes]
    return words[0] if words.count(words[0]) == len(words) else words


def _one_or_each(column: list[int]) -> int | list[int]:
    """The column, or 1 if all are 1: most columns of attempts are."""
    return 1 if column.count(1) == len(column) else column


# --- processes -----------------------------------------------------------------------------------


LINE_BYTES_MAX = 64 * 1024


async def start_process(
    command: Sequence[str], *, answers: bool = False, line_bytes_max: int = LINE_BYTES_MAX
) -> Process:
    """Start a process that ``answers`` on its standard output, or reports on its standard error.
    Raises OSError."""
    stdout, stderr = (PIPE, DEVNULL) if answers else (DEVNULL, PIPE)
    return await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=stdout, stderr=stderr, limit=line_bytes_max
    )


def dismiss(process: Process) -> None:
    """Let a process end when it has done its current work."""
    if process.stdin is not None:
        process.stdin.close()


def kill(process: Process | None) -> None:
    """Kill a process at once, if it has not ended."""
    if process is not None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


# --- from notes to the spool ---------------------------------------------------------------------


FLUSH_S = 1.0
"""How often, in seconds, events that no batch carries (broadcasts) are kept."""
RESTART_S = 2.0
FINISH_S = 10.0
"""How long a stop waits for the writing process to end in order; it goes on by itself."""


@dataclass(frozen=True, slots=True)
class HistoryOptions(WriterOptions):
    """Where one shard's history goes, and how much of it is kept."""

    retention_s: float | None = RETENTION_S
    disk_warn: float = DISK_WARN
    disk_clean: float = DISK_CLEAN
    bodies: bool = False
    spool_bytes_max: int = BYTES_MAX


class History:
    """The history of one shard: ``start``, ``stop`` once; ``begin``, ``end`` with each tenure."""

    def __init__(
        self, options: HistoryOptions, clock: Clock, on_event: Callable[[str, str], None]
    ) -> None:
        """Raises BadRequest when there can be no files."""
        self._options = options
        self._clock = clock
        self._on_event = on_event
        self._folder = state_folder(options.folder, options.node, options.shard)
        try:
            # Not its parents: of a volume that is not mounted nothing is there.
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
        """Number of a batch that is with the store → its packed records."""
        self._epoch = self._number = 0
        self._missing = 0
        """Events dropped since the last batch that was kept."""
        self._reason = ""
        """The reason of the events dropped last."""
        self._lost = 0
        """How many of the events that the recorder lost are counted."""
        self._recent = 0
        """Events appended since the spool was looked at."""
        self._writing: asyncio.Task[None] | None = None
        self._process: Process | None = None
        self._stopping = asyncio.Event()
        self.dropped = 0
        """Events that were not kept since the process began."""
        self.writer_restarts = 0

    @property
    def spool_bytes(self) -> int:
        """The bytes that wait for the writing process."""
        return self._spool.measure() if self._spool is not None else 0

    # --- a tenure ----------------------------------------------------------------------------

    def begin(self, opened: Opened) -> Recorder:
        """The recorder of this epoch, to which the engine reports its changes."""
        options = self._options
        self._spool = Spool(self._folder, opened.epoch, options.spool_bytes_max)
        self._number = opened.last_batch
        self._recorder = recorder = Recorder(
            opened.epoch, self._clock.read, attrgetter("label"), bodies=options.bodies
        )
        self._lost = 0
        self._start = start_of(opened)
        self._take_over(opened)
        said = {k: v for k, v in self._start._asdict().items() if v and k != "epoch"}
        self._append([self._daemon("started", clean=opened.clean, version=__version__, **said)], 1)
        return recorder

    def known(self) -> list[Known]:
        """What the history knows of the store, before a tenure begins."""
        return known(Path(self._options.folder), self._options.shard)

    def _take_over(self, opened: Opened) -> None:
        """Append what the daemon before had no time for, though its batch was durable."""
        assert self._spool is not None
        folder, shard = Path(self._options.folder), self._options.shard
        if not opened.is_branch:  # whose batches have numbers of their own
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
        """Note the records of a batch that the store is about to get."""
        spool, pending, recorder = self._spool, self._pending, self._recorder
        if isinstance(notes, Notes) and spool is not None and pending and recorder is not None:
            data = spool.pack(number, recorder.records(notes))
            if data is not None:
                self._prepared[number] = data
                pending.note(number, data)

    def keep(self, number: int, notes: object) -> None:
        """Append the records of a batch that is durable now."""
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
            pending.kept(number)

    async def flush_for_ever(self, core: Core) -> None:
        """Keep events that would wait for a batch that may never come."""
        while True:
            await asyncio.sleep(FLUSH_S)
            if self._recorder is None:
                continue
            self._look_after()
            self._count_lost(self._recorder)
            if core.sealed is None and core.open.is_empty():
                self.keep(self._number, self._recorder.cut())

    def end(self, clean: bool) -> None:
        """End the tenure; ``clean``: everything noted is durable."""
        spool, recorder = self._spool, self._recorder
        if spool is None or recorder is None:
            return
        if clean:
            self._look_after()
            self.keep(self._number, recorder.cut())
            self._append([self._daemon("stopped", clean=True)], 1)
        self._spool = self._recorder = None
        self._prepared.clear()
        if self._pending is not None:
            self._pending.close(clean)
        if self._reached is not None:
            self._reached.close()
        spool.close(clean)

    def _daemon(self, what: str, **details: Any) -> list[Any]:
        return [EventKind.DAEMON, self._clock.read().now_ms, what, details]

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
        """Append what was packed, if it could be; whether that is kept."""
        assert self._spool is not None
        if data is None or not self._spool.append_packed(data):
            self._drop(events, self._spool.trouble or "unknown")
            return False
        self._recent += events
        return True

    def _look_after(self) -> None:
        """Begin a new spool if its file was removed: writes to that would succeed all the same."""
        recent, self._recent = self._recent, 0
        if self._spool is None or not self._spool.is_lost():
            return
        reason, was_missing = "the folder of the spool was removed or moved", self._missing
        self._renew_pending()
        # How many nobody knows: of what is older, some stands in files, and those may be gone too.
        self.dropped += max(1, recent)
        self._append([[EventKind.DROPPED, self._clock.read().now_ms, None, reason]], 1)
        if not was_missing and not self._missing:  # else this trouble has its line already
            self._on_event("history_dropped", f"{reason}; it begins anew")

    def _count_lost(self, recorder: Recorder) -> None:
        lost, self._lost = recorder.lost - self._lost, recorder.lost
        if lost:
            most = recorder.repeats_max
            self._drop(lost, f"{most} deliveries and retries wait for the store already")

    def _drop(self, events: int, reason: str) -> None:
        if not self._missing:
            self._on_event("history_dropped", f"{reason}; service goes on without it")
        self._missing += events
        self.dropped += events
        self._reason = reason

    # --- the writing process -------------------------------------------------------------------

    def start(self) -> None:
        """Start the writing process, which works also on what an earlier daemon has left."""
        self._writing = asyncio.create_task(self._write_for_ever())

    async def stop(self) -> None:
        """Stop, after ``end``: what is in the spool becomes files, as far as time allows."""
        self._stopping.set()
        writing, self._writing = self._writing, None
        if writing is None:
            return
        if self._process is not None:
            dismiss(self._process)
        done, _ = await asyncio.wait((writing,), timeout=FINISH_S)
        if not done:
            self._on_event("history_unfinished", "the next start goes on with what is in the spool")
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write_for_ever(self) -> None:
        while True:
            is_last = self._stopping.is_set()
            try:
                code = await self._write()
                ended = f"exit code {code}"
            except OSError as error:
                code, ended = 1, f"cannot be started: {error.strerror}"
            if self._stopping.is_set():
                # It failed before it could be asked to stop: one more is started.
                if is_last or code == 0:
                    return
                continue
            self.writer_restarts += 1
            self._on_event("history_writer_ended", f"{ended}; starting it again")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESTART_S):
                    await self._stopping.wait()

    async def _write(self) -> int:
        """Run the writing process once; its exit code. Raises OSError."""
        self._process = process = await start_process(self._options.command())
        assert process.stderr is not None
        if self._stopping.is_set():
            dismiss(process)
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:  # a line without an end; the process must not wait for its reader
                continue
            if not line:
                break
            text = line.decode("utf-8", "replace").strip()
            self._on_event("history_writer", text.removeprefix("history writer: "))
        return await process.wait()
