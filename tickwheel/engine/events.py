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
        """The notes of the batch that is being sealed; later notes belong to the next batch."""

    def rejoin(self, notes: object, accepted: Container[int]) -> None:
        """The batch with these notes was refused: its arrivals but those of ``accepted`` tasks are
        forgotten, the rest comes before what has been noted since."""

    def forget_arrivals(self, accepted: Container[int]) -> None:
        """The tasks staged in the open batch were withdrawn, runs of schedules among them, but
        those that are ``accepted``."""

    # --- tasks -------------------------------------------------------------------------------

    def arrived(
        self, source: object, ids: range, new_tasks: Sequence[NewTask], now_ms: int
    ) -> None:
        """Tasks were staged for ``source``, the shard's producer."""

    def replaced(self, source: object, row: TaskRow, now_ms: int) -> None:
        """A pending task was replaced: it has another body, other options, another due time."""

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
        """Tasks were handed out to a subscriber; a broadcast has a group without a name.
        ``causes``: why those of them are late that are; None: none is."""

    def acked(self, group: Group, leases: Sequence[Lease], kept: AbstractSet[int]) -> None:
        """Tasks were finished by their consumer. Tasks in ``kept`` other groups still have."""

    def acked_idle(self, group: Group, task_id: int, attempt: int, *, ended: bool) -> None:
        """A task was finished by the receipt of an earlier delivery."""

    def nacked(self, lease: Lease, reason: str, next_ms: int, now_ms: int) -> None:
        """An attempt failed; the next one comes at ``next_ms``."""

    def lease_over(
        self, lease: Lease, reason: str, now_ms: int, until_ms: int | None = None
    ) -> None:
        """A lease is over without an answer, and its task comes back; ``until_ms``: then, because
        its consumer died."""

    def released(self, lease: Lease, until_ms: int | None, now_ms: int) -> None:
        """A task was given back, and nothing is counted; ``until_ms``: it is postponed until
        then."""

    def died(self, lease: Lease, reason: str, now_ms: int) -> None:
        """A task has become a dead letter of its group."""

    def ended(self, topic: str, group: str | None, how: str, task_id: int, *, last: bool) -> None:
        """A task was CANCELLED, EXPIRED, DELETED or FILTERED, in one group or (None) altogether;
        ``last``: that ended the task."""

    def ended_many(self, topic: str, how: str, ids: Sequence[int]) -> None:
        """``ended`` for many tasks, each in all of its groups."""

    def rescheduled(self, row: TaskRow, due_ms: int) -> None:
        """A task was moved: its next delivery is at ``due_ms``."""

    def rescheduled_many(self, topic: str, ids: Sequence[int], dues_ms: Sequence[int]) -> None:
        """``rescheduled`` for many tasks that keep their places in the order."""

    def requeued(self, topic: str, group: str, task_id: int) -> None:
        """A task has come back from the dead letters of its group."""

    # --- groups ------------------------------------------------------------------------------

    def group_created(self, group: Group) -> None:
        """A group was made."""

    def group_reset(self, group: Group, bulk: str, from_ms: int, until_ms: int) -> None:
        """A group is to be given again what came due in that time."""

    def group_closed(self, group: Group) -> None:
        """A group is being deleted: it is owed nothing more, and what it holds is let go of."""

    def configured(self, topic: Topic, group: Group | None) -> None:
        """Settings of a group, or of the topic itself, were changed."""

    # --- schedules ---------------------------------------------------------------------------

    def schedule_changed(self, row: ScheduleRow, what: str, *, same_body: bool = False) -> None:
        """A schedule was PUT, PAUSED, RESUMED or DELETED; ``same_body``: the put did not change the
        body."""

    def occurred(self, row: ScheduleRow, runs: Sequence[Run], now_ms: int, *, staged: bool) -> None:
        """The fate of a schedule's occurrences was decided; ``row`` is the schedule afterwards.
        ``staged``: their tasks are in the open batch, and all of it is forgotten if that is
        refused."""

    # --- transactions ------------------------------------------------------------------------

    def transacted(
        self,
        source: object,
        row: TransactionRow,
        what: str,
        now_ms: int,
        added: Halves | None = None,
    ) -> None:
        """A transaction was PREPARED (with what was ``added``), COMMITTED, ROLLED_BACK, CHECKED or
        PARKED, and is as ``row`` says now. The note is forgotten if the open batch is refused."""
