"""What events mean for tasks: from the state of a backup to the state at the last event.

Events say absolute states, so it does no harm that some had happened before the backup was made:
the newest event of a task and group counts. Tasks of the backup are brought in when an event names
them (``needs``), so memory holds what is unfinished and was touched. Pure: no file, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from tickwheel.history.read import task_id
from tickwheel.history.restore.event_values import body_of, options_of
from tickwheel.history.restore.owners import Owners
from tickwheel.history.restore.schedules import Schedules
from tickwheel.history.restore.transactions import Transactions
from tickwheel.history.segments import Event
from tickwheel.model.records import (
    ATTEMPT_MAX,
    NO_PAST,
    REASON_LENGTH_MAX,
    DeadRow,
    Failure,
    Outcome,
    Past,
    ProgressRow,
    ProgressState,
    TaskOptions,
    TaskRow,
)
from tickwheel.model.schedules import ScheduleRow
from tickwheel.model.transactions import Halves, TransactionRow

ENDINGS_MAX = 100_000  # so many of the newest ends are remembered, as a store does


class Fold:
    """The state of tasks after events: ``put`` the tasks that events ``need``, then ``apply``."""

    def __init__(
        self,
        owners: Owners,
        id_mark: int,
        epoch: int,
        schedules: Iterable[ScheduleRow] = (),
        transactions: Iterable[TransactionRow | Halves] = (),
    ) -> None:
        self.owners = owners
        self.schedules = Schedules(schedules)
        self.transactions = Transactions(transactions)
        self.tasks: dict[int, Task] = {}
        self.gone: set[int] = set()
        """Ids of tasks of the backup that have ended since."""
        self.outcomes: dict[int, Outcome] = {}
        """Id → outcome of the newest ended tasks, oldest first."""
        self.ended = 0
        self.id_mark = self._backup_mark = id_mark
        self.epoch = epoch
        self.unusable = 0
        """Events that lack what they must have."""
        self._verbs: dict[str, Callable[[Task, Event], None]] = {
            "replaced": self._replaced,
            "rescheduled": self._rescheduled,
            "cancelled": self._cancelled,
            "delivered": self._delivered,
            "acked": self._acked,
            "nacked": self._nacked,
            "lease_over": self._lease_over,
            "released": self._released,
            "dead": self._dead,
            "requeued": self._requeued,
            "expired": self._expired,
            "deleted": self._deleted,
            "filtered": self._filtered,
        }

    def needs(self, events: Collection[Event]) -> list[int]:
        """The ids of tasks that the backup may hold, and that have to be ``put`` before."""
        found = {task_id(event) for event in events}
        return sorted(
            i
            for i in found
            if i is not None
            and i <= self._backup_mark
            and i not in self.tasks
            and i not in self.gone
        )

    def put(self, task: Task) -> None:
        """Take in a task as the backup has it."""
        self.tasks[task.row.id] = task

    def apply(self, event: Event, *, is_old: bool = False) -> None:
        """Apply one event. ``is_old``: it had happened when the backup was made. What became of
        groups and schedules by then the backup knows best, also of those that were deleted."""
        try:
            self._apply(event, is_old)
        except (KeyError, TypeError, ValueError):
            self.unusable += 1

    def _apply(self, event: Event, is_old: bool) -> None:
        self.epoch = max(self.epoch, event["epoch"])
        kind = event["event"]
        named = task_id(event)
        if not is_old and self.schedules.apply(event):
            self.id_mark = max(self.id_mark, named or 0)
            return
        if not is_old and self.transactions.apply(event, self.tasks):
            return
        if named is None:
            if not is_old:
                self._of_group(kind, event)
            return
        self.id_mark = max(self.id_mark, named)
        if kind == "enqueued":
            self._enqueued(named, event)
            return
        verb, task = self._verbs.get(kind), self.tasks.get(named)
        if verb is not None and task is not None:
            group = event.get("group")
            if group is not None and not self.owners.knows(task.row.topic, group):
                if is_old:
                    return
                self.owners.ensure(task.row, group)
            verb(task, event)

    def _of_group(self, kind: str, event: Event) -> None:
        if kind == "group_created":
            self.owners.created(event)
        elif kind == "group_configured":
            self.owners.configured(event)
        elif kind == "group_deleted":
            self.owners.deleted(event)

    # --- producers ---------------------------------------------------------------------------

    def _enqueued(self, named: int, event: Event) -> None:
        if named in self.tasks or named in self.gone:
            return
        body = body_of(event)
        row = TaskRow(named, int(event["due_ms"]), event["topic"], body or b"", options_of(event))
        self.tasks[named] = Task(row, has_body=body is not None, is_new=True)

    def _replaced(self, task: Task, event: Event) -> None:
        """Replace a task that nobody has had."""
        body, options = body_of(event), options_of(event)
        if (place := event.get("order_id")) is not None:
            options = (options or TaskOptions())._replace(order_id=int(place))
            self.id_mark = max(self.id_mark, int(place))
        row = task.row._replace(due_ms=int(event["due_ms"]), body=body or b"", options=options)
        task.row, task.has_body = row, body is not None
        task.progress.clear()

    def _rescheduled(self, task: Task, event: Event) -> None:
        due_ms = int(event["due_ms"])
        if not has_history(task):
            task.row = task.row._replace(due_ms=due_ms)
            if (place := event.get("order_id")) is not None:
                options = task.row.options or TaskOptions()
                task.row = task.row._replace(options=options._replace(order_id=int(place)))
                self.id_mark = max(self.id_mark, int(place))
            task.progress.clear()
            return
        for group in self._owing(task):
            known = task.progress.get(group)
            attempt, epoch = (known.attempt, known.epoch) if known else (0, 0)
            past = past_of(task, group)
            self._stand(task, group, ProgressState.WAITING, attempt, due_ms, epoch, past)

    def _cancelled(self, task: Task, event: Event) -> None:
        self._end(task, Outcome.CANCELLED)

    # --- consumers ---------------------------------------------------------------------------

    def _delivered(self, task: Task, event: Event) -> None:
        group = event.get("group")
        if group is None:
            return  # a broadcast, which owns nothing
        task.holders[group] = str(event.get("subscriber", ""))
        past = past_of(task, group, until=(event["time_ms"], ATTEMPT_MAX))
        self._set(task, event, ProgressState.IN_FLIGHT, past)

    def _acked(self, task: Task, event: Event) -> None:
        self._finish(task, event, Outcome.ACKED)

    def _nacked(self, task: Task, event: Event) -> None:
        past = self._failed(task, event)
        self._set(task, event, ProgressState.WAITING, past, event["due_ms"])

    def _lease_over(self, task: Task, event: Event) -> None:
        past = self._failed(task, event)
        if "due_ms" in event:  # its consumer died
            self._set(task, event, ProgressState.WAITING, past, event["due_ms"])
        else:
            self._set(task, event, ProgressState.RELEASED, past)

    def _released(self, task: Task, event: Event) -> None:
        group = event["group"]
        past = past_of(task, group, until=(event["time_ms"], ATTEMPT_MAX))
        if "due_ms" in event:
            self._set(task, event, ProgressState.WAITING, past, event["due_ms"])
        elif past != NO_PAST:
            self._set(task, event, ProgressState.RELEASED, past)
        else:
            task.progress.pop(group, None)
            task.dead.pop(group, None)

    def _dead(self, task: Task, event: Event) -> None:
        group = event["group"]
        past = self._failed(task, event)
        reason = str(event.get("reason", ""))[:REASON_LENGTH_MAX]
        if trace := str(event.get("trace", "")):
            *earlier, last = past.failures
            last = last._replace(reason=f"{last.reason}\n{trace}")
            past = past._replace(failures=(*earlier, last))
        task.progress.pop(group, None)
        task.dead[group] = DeadRow(
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

    def _requeued(self, task: Task, event: Event) -> None:
        task.progress.pop(event["group"], None)
        task.dead.pop(event["group"], None)

    def _expired(self, task: Task, event: Event) -> None:
        self._finish(task, event, Outcome.EXPIRED)

    def _deleted(self, task: Task, event: Event) -> None:
        group = event.get("group")
        if group is None or not self.owners.is_closed(task.row.topic, group):
            self._finish(task, event, Outcome.DELETED)
            return
        task.progress.pop(group, None)
        task.dead.pop(group, None)
        task.let_go.add(group)
        self._end_if_last(task, event, Outcome.DELETED)

    def _filtered(self, task: Task, event: Event) -> None:
        """Apply that a group's filter left the task out: it matters only if that ended the task."""
        if event.get("ended"):
            self._end(task, Outcome.FILTERED)

    # --- steps of several --------------------------------------------------------------------

    def _failed(self, task: Task, event: Event) -> Past:
        """The past of a delivery, with this failure."""
        group, time_ms, attempt = event["group"], event["time_ms"], event["attempt"]
        reason = str(event.get("reason", ""))[:REASON_LENGTH_MAX]
        who = str(event.get("subscriber") or task.holders.get(group, ""))
        before = past_of(task, group, until=(time_ms, attempt - 1))
        return before.with_failure(Failure(attempt, time_ms, reason, who))

    def _set(
        self,
        task: Task,
        event: Event,
        state: ProgressState,
        past: Past,
        at_ms: int | None = None,
    ) -> None:
        at_ms = event["time_ms"] if at_ms is None else int(at_ms)
        self._stand(task, event["group"], state, event["attempt"], at_ms, event["epoch"], past)

    @staticmethod
    def _stand(
        task: Task,
        group: str,
        state: ProgressState,
        attempt: int,
        at_ms: int,
        epoch: int,
        past: Past = NO_PAST,
    ) -> None:
        task.dead.pop(group, None)
        row = ProgressRow(task.row.id, group, state, int(attempt), at_ms, epoch, *past)
        task.progress[group] = row

    def _finish(self, task: Task, event: Event, outcome: Outcome) -> None:
        """End the task for one group, or for all."""
        group = event.get("group")
        if group is None:
            self._end(task, outcome)
            return
        known = task.progress.get(group) or task.dead.get(group)
        # An ack may be of an earlier delivery.
        attempt = max(event.get("attempt", 0), known.attempt if known is not None else 0)
        epoch = event["epoch"] if outcome is Outcome.ACKED else 0
        is_expired = outcome is Outcome.EXPIRED
        state = ProgressState.EXPIRED if is_expired else ProgressState.DONE
        self._stand(task, group, state, attempt, 0, epoch)
        self._end_if_last(task, event, outcome)

    def _end_if_last(self, task: Task, event: Event, outcome: Outcome) -> None:
        """End the task if the event says that no other group has it."""
        if event["ended"]:
            self._end(task, outcome)

    def _owing(self, task: Task) -> list[str]:
        """The groups that have not finished the task."""
        recorded = task.progress.keys() | task.dead.keys()
        return [
            group
            for group in self.owners.owing(task.row, recorded)
            if group not in task.dead
            and group not in task.let_go
            and not is_done(task.progress.get(group))
        ]

    def _end(self, task: Task, outcome: Outcome) -> None:
        named = task.row.id
        del self.tasks[named]
        if named <= self._backup_mark:
            self.gone.add(named)
        self.ended += 1
        self.outcomes.pop(named, None)
        self.outcomes[named] = outcome
        if len(self.outcomes) > ENDINGS_MAX:
            del self.outcomes[next(iter(self.outcomes))]


# --- one task --------------------------------------------------------------------------------


class Task:
    """A task that some event has named."""

    __slots__ = ("dead", "has_body", "holders", "is_new", "let_go", "progress", "row")

    def __init__(
        self,
        row: TaskRow,
        progress: Iterable[ProgressRow] = (),
        dead: Iterable[DeadRow] = (),
        *,
        has_body: bool = True,
        is_new: bool = False,
    ) -> None:
        self.row = row
        self.is_new = is_new
        """Whether the backup lacks the task."""
        self.progress = {one.group: one for one in progress}
        self.dead = {one.group: one for one in dead}
        self.holders: dict[str, str] = {}
        """Group → the consumer that had the task last."""
        self.let_go: set[str] = set()
        """Groups that had the task and were deleted."""
        self.has_body = has_body


def is_done(row: ProgressRow | None) -> bool:
    return row is not None and row.state.is_over


def has_history(task: Task) -> bool:
    """Whether some group has deliveries, an ack or a dead letter to remember."""
    return bool(task.dead or task.progress)


def past_of(task: Task, group: str, until: tuple[int, int] | None = None) -> Past:
    """What counts of the deliveries to the group that had failed ``until`` (time, attempt). Of an
    event from before the backup that is less than what the backup knows. How often it was postponed
    is not known."""
    known = task.progress.get(group) or task.dead.get(group)
    if known is None:
        return NO_PAST
    failures = known.failures
    if until is not None:
        failures = tuple(one for one in failures if (one.at_ms, one.attempt) <= until)
    later = [one.is_death for one in known.failures[len(failures) :]]
    failed = max(0, known.failed - later.count(False))
    return Past(failures, failed, deaths=max(0, known.deaths - later.count(True)))
