"""What the engine reports of every change of a task's state, when a history is kept.

The engine calls these methods where it makes the change; a recorder only takes notes. Notes belong
to the open batch: ``seal`` takes them along, and they are kept once that batch is durable. Without
a recorder this costs one check whether there is one.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tickwheel.engine.hold_intervals import Causes
    from tickwheel.engine.sinks import Item
    from tickwheel.engine.topics import Group, Lease, Subscriber, Topic
    from tickwheel.model.records import NewTask, TaskRow
    from tickwheel.model.schedules import Run, ScheduleRow
    from tickwheel.model.transactions import Halves, TransactionRow

CANCELLED, EXPIRED, DELETED = "cancelled", "expired", "deleted"
FILTERED = "filtered"
PUT, PAUSED, RESUMED = "put", "paused", "resumed"
PREPARED, COMMITTED, ROLLED_BACK = "prepared", "committed", "rolled_back"
CHECKED, PARKED = "checked", "parked"


class Recorder(Protocol):
    """Whoever keeps the history. Every call is a change that has just been made."""

    # --- batches -----------------------------------------------------------------------------

    def cut(self) -> object:
        """The notes of the batch that is being sealed; later ones belong to the next."""

    def rejoin(self, notes: object, accepted: Container[int]) -> None:
        """That batch was refused: its arrivals but those of ``accepted`` tasks are forgotten, the
        rest comes before what has been noted since."""

    def forget_arrivals(self, accepted: Container[int]) -> None:
        """The tasks staged in the open batch were withdrawn, runs of schedules among them, but
        those that are ``accepted``."""

    # --- tasks -------------------------------------------------------------------------------

    def arrived(
        self, source: object, ids: range, new_tasks: Sequence[NewTask], now_ms: int
    ) -> None:
        """Tasks were staged for ``source``, the shard's producer."""

    def replaced(self, source: object, row: TaskRow, now_ms: int) -> None:
        """It has another body, other options and another due time."""

    def merged(self, source: object, topic: str, what: str, task_id: int, now_ms: int) -> None:
        """A task of ``source`` was not stored, because this one was pending: "kept" or
        "rejected"."""

    def delivered(
        self,
        group: Group,
        subscriber: Subscriber,
        items: Sequence[Item],
        now_ms: int,
        causes: Causes | None = None,
    ) -> None:
        """Handed out; a broadcast has a group without a name. ``causes``: of those that are
        late; None: none is."""

    def acked(self, group: Group, leases: Sequence[Lease], kept: AbstractSet[int]) -> None:
        """Finished by their consumer. Tasks in ``kept`` other groups still have."""

    def acked_idle(self, group: Group, task_id: int, attempt: int, *, ended: bool) -> None:
        """Finished by an earlier receipt."""

    def nacked(self, lease: Lease, reason: str, next_ms: int, now_ms: int) -> None:
        """The attempt failed, the next comes at ``next_ms``."""

    def lease_over(
        self, lease: Lease, reason: str, now_ms: int, until_ms: int | None = None
    ) -> None:
        """It comes back; ``until_ms``: then, because its consumer died."""

    def released(self, lease: Lease, until_ms: int | None, now_ms: int) -> None:
        """Given back, and nothing is counted; ``until_ms``: postponed until then."""

    def died(self, lease: Lease, reason: str, now_ms: int) -> None:
        """A dead letter of its group."""

    def ended(self, topic: str, group: str | None, how: str, task_id: int, *, last: bool) -> None:
        """CANCELLED, EXPIRED, DELETED or FILTERED, in one group or (None) altogether;
        ``last``: that ended the task."""

    def ended_many(self, topic: str, how: str, ids: Sequence[int]) -> None:
        """``ended`` for many tasks, altogether."""

    def rescheduled(self, row: TaskRow, due_ms: int) -> None:
        """Its next delivery is at ``due_ms``."""

    def rescheduled_many(self, topic: str, ids: Sequence[int], dues_ms: Sequence[int]) -> None:
        """``rescheduled`` for many tasks that keep their places in the order."""

    def requeued(self, topic: str, group: str, task_id: int) -> None:
        """Back from the dead letters."""

    # --- groups ------------------------------------------------------------------------------

    def group_created(self, group: Group) -> None:
        """It is there now."""

    def group_reset(self, group: Group, bulk: str, from_ms: int, until_ms: int) -> None:
        """It is to be given again what came due in that time."""

    def group_closed(self, group: Group) -> None:
        """It is owed nothing more, and what it holds will be let go of."""

    def configured(self, topic: Topic, group: Group | None) -> None:
        """Settings of a group, or of the topic itself, were changed."""

    # --- schedules ---------------------------------------------------------------------------

    def schedule_changed(self, row: ScheduleRow, what: str, *, same_body: bool = False) -> None:
        """PUT, PAUSED, RESUMED or DELETED; ``same_body``: a put that left the body as it was."""

    def occurred(self, row: ScheduleRow, runs: Sequence[Run], now_ms: int, *, staged: bool) -> None:
        """Decided of occurrences; the schedule is as ``row`` says now. ``staged``: their tasks
        are in the open batch, and it all is forgotten when these are."""

    # --- transactions ------------------------------------------------------------------------

    def transacted(
        self,
        source: object,
        row: TransactionRow,
        what: str,
        now_ms: int,
        added: Halves | None = None,
    ) -> None:
        """PREPARED (with what was ``added``), COMMITTED, ROLLED_BACK, CHECKED or PARKED; the
        transaction is as ``row`` says now. It is forgotten with what is staged in the open
        batch."""
