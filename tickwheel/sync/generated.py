"""The verbs of the synchronous client, as the asynchronous one has them.

Written by scripts/generate from the signatures of tickwheel.client: change that, and run it.
"""

# ruff: noqa: A002
from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from datetime import datetime
from typing import Unpack, overload

from tickwheel.api.bulk import BulkInfo, BulkPreview
from tickwheel.api.daemon import Backup, ConsumerInfo, Load, Stats, Status
from tickwheel.api.groups import (
    GroupHeld,
    GroupSettings,
    HeldKey,
    KeyLine,
    KeyPause,
    PausedKey,
    ResetPreview,
    TopicHeld,
)
from tickwheel.api.nodes import NodeDrained, Nodes, ShardPlaced
from tickwheel.api.schedules import ScheduleInfo
from tickwheel.api.targets import PushSent, TargetInfo, TargetRemoved
from tickwheel.api.tasks import DeadLetter, TaskInfo, TaskOutcome, Value
from tickwheel.api.times import Duration
from tickwheel.api.transactions import TransactionInfo
from tickwheel.api.words import (
    AckWord,
    BulkState,
    CancelWord,
    CatchUp,
    DeleteWord,
    ExtendWord,
    Fold,
    Gap,
    NackWord,
    Overlap,
    PushFormat,
    RejectWord,
    ReleaseKeyWord,
    ReleaseWord,
    RequeueWord,
    SkipKeyWord,
    SnoozeWord,
    TaskState,
    TransactionState,
)
from tickwheel.client import Client as AsyncClient
from tickwheel.client import Delivery as AsyncDelivery
from tickwheel.client import Transaction as AsyncTransaction
from tickwheel.client.keywords import (
    AnyMoveKeywords,
    AnySelectionKeywords,
    DeadSelectionKeywords,
    NewGroupKeywords,
    ScheduledTaskKeywords,
    SettingsKeywords,
    TaskKeywords,
    TaskSelectionKeywords,
)
from tickwheel.client.new_task import Task
from tickwheel.client.tasks import Receipt, Receipts, refuse_unknown, spelled_out
from tickwheel.sync.runtime import Blocking


class Client(Blocking):
    """The verbs of a client, each returning when it is answered."""

    __slots__ = ()

    @spelled_out(TaskKeywords)
    def enqueue(
        self,
        topic: str,
        body: bytes,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        timeout: Duration | None = None,
        **options: Unpack[TaskKeywords],
    ) -> Receipt:
        """Store a task durably; due after ``delay`` (seconds, or a timedelta), or ``at`` (an aware
        datetime), else at once.

        ``options`` are those of TaskKeywords. Concurrent calls share frames. Raises BadRequest when
        something is wrong with it; Refused (or a kind of it) or Unreachable when it was certainly
        not stored; OutcomeUnknown when nobody knows: it was sent, and not answered in time
        (``timeout``, else the client's)."""
        refuse_unknown(options, TaskKeywords, "Client.enqueue")
        return self._call(
            AsyncClient.enqueue, topic, body, delay=delay, at=at, timeout=timeout, **options
        )

    @spelled_out(TaskKeywords)
    def enqueue_nowait(
        self,
        topic: str,
        body: bytes,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        timeout: Duration | None = None,
        **options: Unpack[TaskKeywords],
    ) -> Future[Receipt]:
        """Store a task durably; due after ``delay`` (seconds, or a timedelta), or ``at`` (an aware
        datetime), else at once.

        ``options`` are those of TaskKeywords. Concurrent calls share frames. Raises BadRequest when
        something is wrong with it; Refused (or a kind of it) or Unreachable when it was certainly
        not stored; OutcomeUnknown when nobody knows: it was sent, and not answered in time
        (``timeout``, else the client's)."""
        refuse_unknown(options, TaskKeywords, "Client.enqueue_nowait")
        return self._submit(
            AsyncClient.enqueue, topic, body, delay=delay, at=at, timeout=timeout, **options
        )

    def enqueue_many(
        self, tasks: Iterable[Task], *, timeout: Duration | None = None
    ) -> list[Receipt]:
        """Store tasks; their receipts in order. All are checked before the first is sent.

        What fits one frame (``limits.tasks_per_frame_max`` tasks and ``frame_bytes_max`` bytes)
        is stored as a whole or not at all. More goes out in several; when some of them were
        stored and others not, Partly says which. With tasks that have ``if_pending`` a frame has
        ``limits.coalesced_tasks_max`` tasks. Over several shards that is so for each shard's
        tasks of a frame; those without a key go together."""
        return self._call(AsyncClient.enqueue_many, tasks, timeout=timeout)

    def enqueue_columns(
        self,
        topic: str,
        bodies: Iterable[bytes],
        *,
        delay: Duration | None = None,
        delays: Iterable[Duration] | None = None,
        timeout: Duration | None = None,
    ) -> Receipts:
        """Store tasks that differ in body and delay only: the fastest way for very many.

        All are due after ``delay``, or each after its own of ``delays``, else at once. Otherwise
        as ``enqueue_many``."""
        return self._call(
            AsyncClient.enqueue_columns, topic, bodies, delay=delay, delays=delays, timeout=timeout
        )

    @spelled_out(TaskKeywords)
    def oneway(
        self,
        topic: str,
        body: bytes,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        timeout: Duration | None = None,
        **options: Unpack[TaskKeywords],
    ) -> None:
        """Send a task and forget it: no answer, no retry, no promise that it is stored.

        Raises what is wrong with it, and Unreachable when there is no connection to send it on."""
        refuse_unknown(options, TaskKeywords, "Client.oneway")
        self._call(AsyncClient.oneway, topic, body, delay=delay, at=at, timeout=timeout, **options)

    def ping(self, *, timeout: Duration | None = None) -> float:
        """How long the daemon takes to answer, in seconds."""
        return self._call(AsyncClient.ping, timeout=timeout)

    @overload
    def lookup(self, task_id: int, *, timeout: Duration | None = None) -> TaskInfo: ...
    @overload
    def lookup(
        self,
        *,
        topic: str,
        key: str,
        newest: bool = False,
        not_after: datetime | None = None,
        timeout: Duration | None = None,
    ) -> list[TaskInfo]: ...
    def lookup(
        self,
        task_id: int | None = None,
        *,
        topic: str | None = None,
        key: str | None = None,
        newest: bool = False,
        not_after: datetime | None = None,
        timeout: Duration | None = None,
    ) -> TaskInfo | list[TaskInfo]:
        """Where a task stands. By topic and key: every unfinished task with that key, the newest
        first (``newest``: only that one; ``not_after``: only what was enqueued then or earlier);
        when there is none, the one that finished last, as far as the daemon remembers."""
        return self._call(
            AsyncClient.lookup,
            task_id,
            topic=topic,
            key=key,
            newest=newest,
            not_after=not_after,
            timeout=timeout,
        )

    def lookup_many(self, ids: Iterable[int], *, timeout: Duration | None = None) -> list[TaskInfo]:
        """``lookup`` of each, in order."""
        return self._call(AsyncClient.lookup_many, ids, timeout=timeout)

    def find(
        self,
        key: str,
        *,
        topic: str | None = None,
        not_after: datetime | None = None,
        timeout: Duration | None = None,
    ) -> TaskInfo | None:
        """The newest task with that key that is stored (not finished; dead letters are), enqueued
        at ``not_after`` or before. With ``topic`` the index of keys says it; else the newest tasks
        are looked at first, and None, when no task has it, is known when all were."""
        return self._call(AsyncClient.find, key, topic=topic, not_after=not_after, timeout=timeout)

    def pause(
        self, topic: str, group: str | None = None, *, timeout: Duration | None = None
    ) -> GroupSettings:
        """Deliver nothing until ``resume``; it outlasts restarts of the daemon."""
        return self._call(AsyncClient.pause, topic, group, timeout=timeout)

    def resume(
        self, topic: str, group: str | None = None, *, timeout: Duration | None = None
    ) -> GroupSettings:
        """Deliver again."""
        return self._call(AsyncClient.resume, topic, group, timeout=timeout)

    @spelled_out(AnyMoveKeywords)
    def preview_bulk(
        self,
        kind: str,
        topic: str,
        filter: AnySelectionKeywords,
        *,
        timeout: Duration | None = None,
        **moves: Unpack[AnyMoveKeywords],
    ) -> BulkPreview:
        """What a bulk operation of this ``kind`` ("cancel", "requeue", …: those of BulkInfo) would
        do now: nothing is changed. A large topic is looked through in parts (``timeout``: of
        each). ``moves`` are those of AnyMoveKeywords, for a kind that moves tasks."""
        refuse_unknown(moves, AnyMoveKeywords, "Client.preview_bulk")
        return self._call(AsyncClient.preview_bulk, kind, topic, filter, timeout=timeout, **moves)

    def wait_bulk(self, bulk: str, *, timeout: Duration | None = None) -> BulkInfo:
        """The bulk operation when it is over. Raises NotFound, and SendTimeout if it is not after
        ``timeout``."""
        return self._call(AsyncClient.wait_bulk, bulk, timeout=timeout)

    @spelled_out(ScheduledTaskKeywords)
    def put_schedule(
        self,
        name: str,
        *,
        topic: str,
        body: bytes = b"",
        cron: str | None = None,
        timezone: str | None = None,
        every: Duration | None = None,
        anchor: datetime | None = None,
        jitter: Duration | None = None,
        start: datetime | None = None,
        end: datetime | None = None,
        runs_max: int | None = None,
        gap: Gap | None = None,
        fold: Fold | None = None,
        catch_up: CatchUp | None = None,
        catch_up_window: Duration | None = None,
        overlap: Overlap | None = None,
        timeout: Duration | None = None,
        **options: Unpack[ScheduledTaskKeywords],
    ) -> ScheduleInfo:
        """Make a schedule, or make the one of that name so; its ``outcome`` says which. Putting
        the same again changes nothing.

        ``cron`` (five fields, six with seconds first, ``@daily``, …) in ``timezone`` (IANA; UTC),
        or ``every`` so long, counted from ``anchor``. ``jitter``: up to so much later, the same
        for the same occurrence. ``gap`` ("after", "skip") and ``fold`` ("first", "second", "both"):
        fixed times that a clock jumps over, or that come twice. ``catch_up`` ("last", "skip",
        "all") of what was missed in the last ``catch_up_window`` (a day). ``overlap`` ("allow",
        "skip", "queue_one", "cancel_previous"): while the task before is unfinished. ``options``
        are those of ScheduledTaskKeywords, for its tasks. Raises BadRequest, LimitExceeded."""
        refuse_unknown(options, ScheduledTaskKeywords, "Client.put_schedule")
        return self._call(
            AsyncClient.put_schedule,
            name,
            topic=topic,
            body=body,
            cron=cron,
            timezone=timezone,
            every=every,
            anchor=anchor,
            jitter=jitter,
            start=start,
            end=end,
            runs_max=runs_max,
            gap=gap,
            fold=fold,
            catch_up=catch_up,
            catch_up_window=catch_up_window,
            overlap=overlap,
            timeout=timeout,
            **options,
        )

    def run_schedule(self, name: str, *, timeout: Duration | None = None) -> int:
        """A task of it at once, whatever is planned; its id. Raises NotFound, and ConnectionLost
        when nobody knows whether it was made: it is not asked for twice."""
        return self._call(AsyncClient.run_schedule, name, timeout=timeout)

    def backfill_schedule(
        self, name: str, start: datetime, end: datetime, *, timeout: Duration | None = None
    ) -> list[int]:
        """A task for each occurrence from ``start`` up to, and without, ``end``; their ids. Raises
        as ``run_schedule``."""
        return self._call(AsyncClient.backfill_schedule, name, start, end, timeout=timeout)

    def commit_transaction(self, transaction: str, *, timeout: Duration | None = None) -> list[int]:
        """Decide one by its name: its half tasks are tasks; their ids. Once more gives the same.
        Raises UnknownTransaction, TransactionRolledBack."""
        return self._call(AsyncClient.commit_transaction, transaction, timeout=timeout)

    def rollback_transaction(self, transaction: str, *, timeout: Duration | None = None) -> None:
        """Decide one by its name: none of its tasks ever was. Once more is harmless. Raises
        UnknownTransaction, TransactionCommitted."""
        self._call(AsyncClient.rollback_transaction, transaction, timeout=timeout)

    @overload
    def cancel(self, task_id: int, *, timeout: Duration | None = None) -> CancelWord: ...
    @overload
    def cancel(
        self, *, topic: str, key: str, timeout: Duration | None = None
    ) -> list[TaskOutcome]: ...
    @overload
    def cancel(
        self,
        *,
        topic: str,
        filter: TaskSelectionKeywords,
        rate: float | None = None,
        id: str | None = None,
        timeout: Duration | None = None,
    ) -> BulkInfo: ...
    def cancel(
        self,
        task_id: int | None = None,
        *,
        topic: str | None = None,
        key: str | None = None,
        filter: TaskSelectionKeywords | None = None,
        rate: float | None = None,
        id: str | None = None,
        timeout: Duration | None = None,
    ) -> CancelWord | list[TaskOutcome] | BulkInfo:
        """Cancel tasks that are not being worked on: "cancelled", "already_cancelled", or what is
        too late for that: "in_flight", "acked", "expired", "dead", "gone", "unknown", … By topic
        and key: every unfinished task with that key, oldest first, each with its own outcome. When
        there is none, the one that finished last, as far as the daemon remembers; else one
        "unknown" without an id.

        By topic and ``filter``, a dict of TaskSelectionKeywords (an empty one means all of the
        topic): a bulk operation, durable when it returns, done in the background (``wait_bulk``);
        what is enqueued, or dies, later is none of its business. ``rate``: changes a second at
        most. ``id``: yours, as in ``reset_group``. Raises NotFound for a topic that is not there,
        Overloaded when too many bulk operations are running."""
        return self._call(
            AsyncClient.cancel,
            task_id,
            topic=topic,
            key=key,
            filter=filter,
            rate=rate,
            id=id,
            timeout=timeout,
        )

    def cancel_many(
        self, ids: Iterable[int], *, timeout: Duration | None = None
    ) -> list[CancelWord]:
        """``cancel`` of each, in order."""
        return self._call(AsyncClient.cancel_many, ids, timeout=timeout)

    @overload
    def reschedule(
        self,
        task_id: int,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        shift: Duration | None = None,
        timeout: Duration | None = None,
    ) -> TaskOutcome: ...
    @overload
    def reschedule(
        self,
        *,
        topic: str,
        key: str,
        delay: Duration | None = None,
        at: datetime | None = None,
        shift: Duration | None = None,
        timeout: Duration | None = None,
    ) -> list[TaskOutcome]: ...
    @overload
    def reschedule(
        self,
        *,
        topic: str,
        filter: TaskSelectionKeywords,
        rate: float | None = None,
        id: str | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        shift: Duration | None = None,
        timeout: Duration | None = None,
    ) -> BulkInfo: ...
    def reschedule(
        self,
        task_id: int | None = None,
        *,
        topic: str | None = None,
        key: str | None = None,
        filter: TaskSelectionKeywords | None = None,
        rate: float | None = None,
        id: str | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        shift: Duration | None = None,
        timeout: Duration | None = None,
    ) -> TaskOutcome | list[TaskOutcome] | BulkInfo:
        """Give tasks another due time, by one of ``delay`` (by the daemon's clock), ``at`` and
        ``shift``. By topic and key: every unfinished task with that key, oldest first, each with
        its own outcome. When there is none, the one that finished last, as far as the daemon
        remembers; else one "unknown" without an id.

        By topic and ``filter``, a dict of TaskSelectionKeywords (an empty one means all of the
        topic): a bulk operation, durable when it returns, done in the background (``wait_bulk``);
        what is enqueued, or dies, later is none of its business. ``rate``: changes a second at
        most. ``id``: yours, as in ``reset_group``. Raises NotFound for a topic that is not there,
        Overloaded when too many bulk operations are running.

        ``delay``: from now, ``at``: or at this time, ``shift``: or each so much later than it is,
        which may be negative."""
        return self._call(
            AsyncClient.reschedule,
            task_id,
            topic=topic,
            key=key,
            filter=filter,
            rate=rate,
            id=id,
            delay=delay,
            at=at,
            shift=shift,
            timeout=timeout,
        )

    def reschedule_many(
        self,
        ids: Iterable[int],
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        shift: Duration | None = None,
        timeout: Duration | None = None,
    ) -> list[TaskOutcome]:
        """``reschedule`` of each, in order."""
        return self._call(
            AsyncClient.reschedule_many, ids, delay=delay, at=at, shift=shift, timeout=timeout
        )

    @overload
    def spread(
        self,
        task_id: int,
        *,
        start: datetime | None = None,
        within: Duration | None = None,
        end: datetime | None = None,
        timeout: Duration | None = None,
    ) -> TaskOutcome: ...
    @overload
    def spread(
        self,
        *,
        topic: str,
        key: str,
        start: datetime | None = None,
        within: Duration | None = None,
        end: datetime | None = None,
        timeout: Duration | None = None,
    ) -> list[TaskOutcome]: ...
    @overload
    def spread(
        self,
        *,
        topic: str,
        filter: TaskSelectionKeywords,
        rate: float | None = None,
        id: str | None = None,
        start: datetime | None = None,
        within: Duration | None = None,
        end: datetime | None = None,
        timeout: Duration | None = None,
    ) -> BulkInfo: ...
    def spread(
        self,
        task_id: int | None = None,
        *,
        topic: str | None = None,
        key: str | None = None,
        filter: TaskSelectionKeywords | None = None,
        rate: float | None = None,
        id: str | None = None,
        start: datetime | None = None,
        within: Duration | None = None,
        end: datetime | None = None,
        timeout: Duration | None = None,
    ) -> TaskOutcome | list[TaskOutcome] | BulkInfo:
        """Give scheduled tasks a due window: each is moved to one of its emptiest ticks, which
        replaces its due time. What is not scheduled stays, with its state for an outcome. By topic
        and key: every unfinished task with that key, oldest first, each with its own outcome. When
        there is none, the one that finished last, as far as the daemon remembers; else one
        "unknown" without an id.

        By topic and ``filter``, a dict of TaskSelectionKeywords (an empty one means all of the
        topic): a bulk operation, durable when it returns, done in the background (``wait_bulk``);
        what is enqueued, or dies, later is none of its business. ``rate``: changes a second at
        most. ``id``: yours, as in ``reset_group``. Raises NotFound for a topic that is not there,
        Overloaded when too many bulk operations are running.

        ``start``: its first moment; by default each task's own due time. ``within``: its length,
        ``end``: or the first moment behind it."""
        return self._call(
            AsyncClient.spread,
            task_id,
            topic=topic,
            key=key,
            filter=filter,
            rate=rate,
            id=id,
            start=start,
            within=within,
            end=end,
            timeout=timeout,
        )

    def spread_many(
        self,
        ids: Iterable[int],
        *,
        start: datetime | None = None,
        within: Duration | None = None,
        end: datetime | None = None,
        timeout: Duration | None = None,
    ) -> list[TaskOutcome]:
        """``spread`` of each, in order."""
        return self._call(
            AsyncClient.spread_many, ids, start=start, within=within, end=end, timeout=timeout
        )

    @overload
    def run_now(self, task_id: int, *, timeout: Duration | None = None) -> TaskOutcome: ...
    @overload
    def run_now(
        self, *, topic: str, key: str, timeout: Duration | None = None
    ) -> list[TaskOutcome]: ...
    @overload
    def run_now(
        self,
        *,
        topic: str,
        filter: TaskSelectionKeywords,
        rate: float | None = None,
        id: str | None = None,
        timeout: Duration | None = None,
    ) -> BulkInfo: ...
    def run_now(
        self,
        task_id: int | None = None,
        *,
        topic: str | None = None,
        key: str | None = None,
        filter: TaskSelectionKeywords | None = None,
        rate: float | None = None,
        id: str | None = None,
        timeout: Duration | None = None,
    ) -> TaskOutcome | list[TaskOutcome] | BulkInfo:
        """Make tasks due at once. By topic and key: every unfinished task with that key, oldest
        first, each with its own outcome. When there is none, the one that finished last, as far as
        the daemon remembers; else one "unknown" without an id.

        By topic and ``filter``, a dict of TaskSelectionKeywords (an empty one means all of the
        topic): a bulk operation, durable when it returns, done in the background (``wait_bulk``);
        what is enqueued, or dies, later is none of its business. ``rate``: changes a second at
        most. ``id``: yours, as in ``reset_group``. Raises NotFound for a topic that is not there,
        Overloaded when too many bulk operations are running."""
        return self._call(
            AsyncClient.run_now,
            task_id,
            topic=topic,
            key=key,
            filter=filter,
            rate=rate,
            id=id,
            timeout=timeout,
        )

    def run_now_many(
        self, ids: Iterable[int], *, timeout: Duration | None = None
    ) -> list[TaskOutcome]:
        """``run_now`` of each, in order."""
        return self._call(AsyncClient.run_now_many, ids, timeout=timeout)

    def list_tasks(
        self,
        *,
        topic: str | None = None,
        state: TaskState | None = None,
        key: str | None = None,
        key_prefix: str | None = None,
        tag: str | None = None,
        property: str | None = None,
        not_after: datetime | None = None,
        newest_first: bool = False,
        limit: int | None = None,
        timeout: Duration | None = None,
    ) -> Iterator[TaskInfo]:
        """Stored tasks in the order of their ids (``newest_first``: the other way round). A key
        without its topic has no index: the tasks are looked through. Read page by page, at most
        ``limit``; ``timeout`` is for each page.

        ``topic``: of this topic. ``state``: in this state. ``key``: with this key. ``key_prefix``:
        whose key begins so. ``tag``: with this tag. ``property``: with this property: NAME=VALUE.
        ``not_after``: enqueued then or earlier. ``newest_first``: in the order of ids,
        backwards."""
        return self._iterate(
            AsyncClient.list_tasks,
            topic=topic,
            state=state,
            key=key,
            key_prefix=key_prefix,
            tag=tag,
            property=property,
            not_after=not_after,
            newest_first=newest_first,
            limit=limit,
            timeout=timeout,
        )

    def dead_list(
        self,
        *,
        topic: str | None = None,
        group: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        reason: str | None = None,
        limit: int | None = None,
        timeout: Duration | None = None,
    ) -> Iterator[DeadLetter]:
        """Dead letters in the order of their ids. Read page by page, at most ``limit``; ``timeout``
        is for each page.

        ``topic``: of this topic. ``group``: of this group. ``since``: that died then or later.
        ``until``: that died before then. ``reason``: somewhere in the text of the last failure, in
        whatever case."""
        return self._iterate(
            AsyncClient.dead_list,
            topic=topic,
            group=group,
            since=since,
            until=until,
            reason=reason,
            limit=limit,
            timeout=timeout,
        )

    @overload
    def dead_requeue(
        self, pairs: Iterable[tuple[int, str]], *, timeout: Duration | None = None
    ) -> list[RequeueWord]: ...
    @overload
    def dead_requeue(
        self,
        *,
        topic: str,
        filter: DeadSelectionKeywords,
        rate: float | None = None,
        id: str | None = None,
        timeout: Duration | None = None,
    ) -> BulkInfo: ...
    def dead_requeue(
        self,
        pairs: Iterable[tuple[int, str]] | None = None,
        *,
        topic: str | None = None,
        filter: DeadSelectionKeywords | None = None,
        rate: float | None = None,
        id: str | None = None,
        timeout: Duration | None = None,
    ) -> list[RequeueWord] | BulkInfo:
        """Deliver dead letters again, failures counted anew: "requeued" or "unknown". Of pairs (id,
        group), each.

        By topic and ``filter``, a dict of DeadSelectionKeywords (an empty one means all of the
        topic): a bulk operation, durable when it returns, done in the background (``wait_bulk``);
        what is enqueued, or dies, later is none of its business. ``rate``: changes a second at
        most. ``id``: yours, as in ``reset_group``. Raises NotFound for a topic that is not there,
        Overloaded when too many bulk operations are running."""
        return self._call(
            AsyncClient.dead_requeue,
            pairs,
            topic=topic,
            filter=filter,
            rate=rate,
            id=id,
            timeout=timeout,
        )

    @overload
    def dead_delete(
        self, pairs: Iterable[tuple[int, str]], *, timeout: Duration | None = None
    ) -> list[DeleteWord]: ...
    @overload
    def dead_delete(
        self,
        *,
        topic: str,
        filter: DeadSelectionKeywords,
        rate: float | None = None,
        id: str | None = None,
        timeout: Duration | None = None,
    ) -> BulkInfo: ...
    def dead_delete(
        self,
        pairs: Iterable[tuple[int, str]] | None = None,
        *,
        topic: str | None = None,
        filter: DeadSelectionKeywords | None = None,
        rate: float | None = None,
        id: str | None = None,
        timeout: Duration | None = None,
    ) -> list[DeleteWord] | BulkInfo:
        """Delete dead letters for good: "deleted" or "unknown". Of pairs (id, group), each.

        By topic and ``filter``, a dict of DeadSelectionKeywords (an empty one means all of the
        topic): a bulk operation, durable when it returns, done in the background (``wait_bulk``);
        what is enqueued, or dies, later is none of its business. ``rate``: changes a second at
        most. ``id``: yours, as in ``reset_group``. Raises NotFound for a topic that is not there,
        Overloaded when too many bulk operations are running."""
        return self._call(
            AsyncClient.dead_delete,
            pairs,
            topic=topic,
            filter=filter,
            rate=rate,
            id=id,
            timeout=timeout,
        )

    @spelled_out(NewGroupKeywords)
    def create_group(
        self,
        topic: str,
        group: str,
        *,
        start: datetime | str = "now",
        timeout: Duration | None = None,
        **settings: Unpack[NewGroupKeywords],
    ) -> GroupSettings:
        """Make a group before its first subscriber comes; one that exists stays as it is
        (``created`` of the answer says which).

        ``start``: it is owed what comes due from "now" on, from the "first" task that is still
        there, or from a moment. ``settings`` are those of NewGroupKeywords."""
        refuse_unknown(settings, NewGroupKeywords, "Client.create_group")
        return self._call(
            AsyncClient.create_group, topic, group, start=start, timeout=timeout, **settings
        )

    @spelled_out(SettingsKeywords)
    def configure(
        self,
        topic: str,
        group: str | None = None,
        *,
        timeout: Duration | None = None,
        **settings: Unpack[SettingsKeywords],
    ) -> GroupSettings:
        """Change settings of a group, or of the topic itself. What is not named stays; None takes a
        setting away. By a filter is judged what comes due from now on. Durable when it returns.
        Raises NotFound for a group, Conflict for ``broadcast_only`` of a topic with groups.

        ``settings`` are those of SettingsKeywords."""
        refuse_unknown(settings, SettingsKeywords, "Client.configure")
        return self._call(AsyncClient.configure, topic, group, timeout=timeout, **settings)

    def delete_group(
        self, topic: str, group: str, *, force: bool = False, timeout: Duration | None = None
    ) -> GroupHeld:
        """Delete a group; what it held. Raises Conflict when it holds anything, unless ``force``:
        then that is gone for it.

        ``force``: though it holds tasks, or has subscribers."""
        return self._call(AsyncClient.delete_group, topic, group, force=force, timeout=timeout)

    def delete_topic(
        self, topic: str, *, force: bool = False, timeout: Duration | None = None
    ) -> TopicHeld:
        """Delete a topic with its groups, settings and dead letters; what it held. Durable when it
        returns; its tasks end as deleted in the background, and until then the topic takes no new
        ones (Refused). Raises Conflict when it holds tasks or has subscribers, unless ``force``,
        and always when a schedule enqueues to it; NotFound.

        ``force``: though it holds tasks, or has subscribers."""
        return self._call(AsyncClient.delete_topic, topic, force=force, timeout=timeout)

    def reset_group(
        self,
        topic: str,
        group: str,
        *,
        to: datetime | str,
        rate: float | None = None,
        id: str | None = None,
        timeout: Duration | None = None,
    ) -> BulkInfo:
        """Give the group again what came due since ``to`` and that it has finished, or was never
        owed. A bulk operation: durable when it returns, done in the background (``wait_bulk``).
        Each task comes as one of its own, of which ``Delivery.replay_of`` is the former's id. Other
        groups notice nothing. Raises NotFound, Conflict when the group is being reset already,
        Overloaded.

        ``to``: a moment, or "first": all that is known. ``rate``: tasks a second at most. ``id``:
        yours: the same request again is the same bulk operation, and another one with it is a
        Conflict; by default a random one."""
        return self._call(
            AsyncClient.reset_group, topic, group, to=to, rate=rate, id=id, timeout=timeout
        )

    def preview_reset(
        self, topic: str, group: str, *, to: datetime | str, timeout: Duration | None = None
    ) -> ResetPreview:
        """What a reset to that moment would give now; nothing is given. The whole history is looked
        through. Raises NotFound, Overloaded.

        ``to``: a moment, or "first": all that is known."""
        return self._call(AsyncClient.preview_reset, topic, group, to=to, timeout=timeout)

    def held_keys(
        self, topic: str, group: str | None, *, limit: int = 100, timeout: Duration | None = None
    ) -> list[HeldKey]:
        """Order keys that are held until an operator acts, the oldest first. Raises NotFound.

        ``limit``: how many at most."""
        return self._call(AsyncClient.held_keys, topic, group, limit=limit, timeout=timeout)

    def paused_keys(
        self, topic: str, group: str | None, *, limit: int = 100, timeout: Duration | None = None
    ) -> list[PausedKey]:
        """Keys that operators have paused, order keys and values of ``fair_by``, the oldest first.
        Raises NotFound.

        ``limit``: how many at most."""
        return self._call(AsyncClient.paused_keys, topic, group, limit=limit, timeout=timeout)

    def key_lines(
        self, topic: str, group: str | None, *, limit: int = 100, timeout: Duration | None = None
    ) -> list[KeyLine]:
        """Order keys, and values that share the group, for whose turn most tasks wait. Raises
        NotFound.

        ``limit``: how many at most."""
        return self._call(AsyncClient.key_lines, topic, group, limit=limit, timeout=timeout)

    def release_key(
        self,
        topic: str,
        group: str | None,
        task_id: int | None = None,
        *,
        key: str | None = None,
        timeout: Duration | None = None,
    ) -> ReleaseKeyWord:
        """The task of a held key, by its id or the key, is tried again at once, its failures
        counted anew: "released", or "not_held". Raises NotFound for a group.

        ``key``: or the order key."""
        return self._call(AsyncClient.release_key, topic, group, task_id, key=key, timeout=timeout)

    def skip_key(
        self,
        topic: str,
        group: str | None,
        task_id: int | None = None,
        *,
        key: str | None = None,
        timeout: Duration | None = None,
    ) -> SkipKeyWord:
        """The task of a held key goes to the dead letters, and its key goes on: "skipped", or
        "not_held". Raises NotFound for a group.

        ``key``: or the order key."""
        return self._call(AsyncClient.skip_key, topic, group, task_id, key=key, timeout=timeout)

    def pause_key(
        self,
        topic: str,
        group: str | None,
        *,
        key: str | None = None,
        value: Value | None = None,
        timeout: Duration | None = None,
    ) -> KeyPause:
        """Hand out no task of one key of the group, an order key or a value of ``fair_by``, until
        ``resume_key``: its tasks become due and wait, other keys go on, what is in flight can be
        acked. Durable when it returns. One that is paused stays as it is. Raises NotFound for a
        group, Conflict for a value of a group without ``fair_by``, LimitExceeded.

        ``key``: the order key, ``value``: or the value of fair_by."""
        return self._call(
            AsyncClient.pause_key, topic, group, key=key, value=value, timeout=timeout
        )

    def resume_key(
        self,
        topic: str,
        group: str | None,
        *,
        key: str | None = None,
        value: Value | None = None,
        timeout: Duration | None = None,
    ) -> KeyPause:
        """Hand out the tasks of a paused key again; ``changed`` is false if it was not paused.
        Raises as ``pause_key``.

        ``key``: the order key, ``value``: or the value of fair_by."""
        return self._call(
            AsyncClient.resume_key, topic, group, key=key, value=value, timeout=timeout
        )

    def list_schedules(
        self, *, limit: int | None = None, timeout: Duration | None = None
    ) -> Iterator[ScheduleInfo]:
        """All schedules, by name. Read page by page, at most ``limit``; ``timeout`` is for each
        page."""
        return self._iterate(AsyncClient.list_schedules, limit=limit, timeout=timeout)

    def show_schedule(
        self, name: str, *, planned: int = 5, timeout: Duration | None = None
    ) -> ScheduleInfo:
        """One, with its next ``planned`` times and its newest runs. Raises NotFound.

        ``planned``: how many planned times."""
        return self._call(AsyncClient.show_schedule, name, planned=planned, timeout=timeout)

    def pause_schedule(self, name: str, *, timeout: Duration | None = None) -> ScheduleInfo:
        """Nothing of it fires until it is resumed. Raises NotFound."""
        return self._call(AsyncClient.pause_schedule, name, timeout=timeout)

    def resume_schedule(self, name: str, *, timeout: Duration | None = None) -> ScheduleInfo:
        """What was missed meanwhile is for its catch-up. Raises NotFound."""
        return self._call(AsyncClient.resume_schedule, name, timeout=timeout)

    def delete_schedule(self, name: str, *, timeout: Duration | None = None) -> ScheduleInfo:
        """It, as it was; its tasks stay. Raises NotFound."""
        return self._call(AsyncClient.delete_schedule, name, timeout=timeout)

    def list_transactions(
        self,
        *,
        group: str | None = None,
        state: TransactionState | None = None,
        limit: int | None = None,
        timeout: Duration | None = None,
    ) -> Iterator[TransactionInfo]:
        """Those that are not decided, or those in ``state``, by name. Read page by page, at most
        ``limit``; ``timeout`` is for each page.

        ``group``: of this producer group. ``state``: in this state."""
        return self._iterate(
            AsyncClient.list_transactions, group=group, state=state, limit=limit, timeout=timeout
        )

    def show_transaction(
        self, transaction: str, *, timeout: Duration | None = None
    ) -> TransactionInfo:
        """One, with its half tasks. Raises UnknownTransaction."""
        return self._call(AsyncClient.show_transaction, transaction, timeout=timeout)

    def list_bulk(
        self,
        *,
        topic: str | None = None,
        state: BulkState | None = None,
        limit: int | None = None,
        timeout: Duration | None = None,
    ) -> Iterator[BulkInfo]:
        """Bulk operations, the newest first. Read page by page, at most ``limit``; ``timeout`` is
        for each page.

        ``topic``: on this topic. ``state``: in this state."""
        return self._iterate(
            AsyncClient.list_bulk, topic=topic, state=state, limit=limit, timeout=timeout
        )

    def show_bulk(self, bulk: str, *, timeout: Duration | None = None) -> BulkInfo:
        """One bulk operation, and how far it is. Raises NotFound."""
        return self._call(AsyncClient.show_bulk, bulk, timeout=timeout)

    def cancel_bulk(self, bulk: str, *, timeout: Duration | None = None) -> BulkInfo:
        """It changes nothing more; what it has changed stays. Once more is harmless. Raises
        NotFound."""
        return self._call(AsyncClient.cancel_bulk, bulk, timeout=timeout)

    def set_push(
        self,
        topic: str,
        group: str,
        url: str,
        *,
        secrets: Iterable[str] | None = None,
        format: PushFormat = "plain",
        concurrency: int = 32,
        request_timeout: Duration | None = None,
        connect_timeout: Duration | None = None,
        callback_lease: Duration | None = None,
        timeout: Duration | None = None,
    ) -> TargetInfo:
        """Send the tasks of a group to a URL, signed as Standard Webhooks says; a group that is not
        there is made. In the place of the target that was there. Raises BadRequest for an address
        that may not be asked (push_allow), Conflict while somebody is subscribed.

        ``secrets``: what requests are signed with; several, while receivers change to the first of
        them. Left out: those of the push that is there. ``format``: "plain": the body is the
        task's; "cloudevents": a CloudEvent in JSON. ``concurrency``: requests at a time, at most.
        ``request_timeout``: for a whole request with its answer; by default 30 s.
        ``connect_timeout``: for a connection to the host; by default 5 s. ``callback_lease``: after
        202 the task waits so long for a callback that settles it; without this 202 acks."""
        return self._call(
            AsyncClient.set_push,
            topic,
            group,
            url,
            secrets=secrets,
            format=format,
            concurrency=concurrency,
            request_timeout=request_timeout,
            connect_timeout=connect_timeout,
            callback_lease=callback_lease,
            timeout=timeout,
        )

    def set_forward(
        self,
        topic: str,
        group: str,
        url: str,
        *,
        secret: str | None = None,
        batch: int = 512,
        concurrency: int = 1,
        timeout: Duration | None = None,
    ) -> TargetInfo:
        """Send the tasks of a group to another broker; a group that is not there is made. In the
        place of the target that was there. Raises as ``set_push``.

        ``secret``: its password; the user stands in the URL. ``batch``: tasks that are sent
        together, at most. ``concurrency``: batches at a time, at most."""
        return self._call(
            AsyncClient.set_forward,
            topic,
            group,
            url,
            secret=secret,
            batch=batch,
            concurrency=concurrency,
            timeout=timeout,
        )

    def remove_target(
        self, topic: str, group: str, *, timeout: Duration | None = None
    ) -> TargetRemoved:
        """Take the target of a group away, and its secrets; the group goes on with what it holds,
        and takes subscribers again. Raises NotFound."""
        return self._call(AsyncClient.remove_target, topic, group, timeout=timeout)

    def targets(
        self, *, topic: str | None = None, timeout: Duration | None = None
    ) -> list[TargetInfo]:
        """The targets of all groups, or of those of a topic, and how they go.

        ``topic``: of this topic; none: of all."""
        return self._call(AsyncClient.targets, topic=topic, timeout=timeout)

    def test_push(
        self,
        url: str,
        *,
        secrets: Iterable[str] | None = None,
        format: PushFormat = "plain",
        timeout: Duration | None = None,
    ) -> PushSent:
        """Send one request to a URL as a push would, and say what came of it. Raises BadRequest for
        an address that may not be asked, Conflict where no process sends.

        ``secrets``: what it is signed with; none: it is not signed. ``format``: as of a push."""
        return self._call(
            AsyncClient.test_push, url, secrets=secrets, format=format, timeout=timeout
        )

    def push_log(
        self, topic: str, group: str, *, limit: int = 50, timeout: Duration | None = None
    ) -> list[PushSent]:
        """The last requests of a group's push, the newest first; they are in memory only. Raises
        NotFound, Conflict where no process sends.

        ``limit``: how many at most."""
        return self._call(AsyncClient.push_log, topic, group, limit=limit, timeout=timeout)

    def resend(
        self, topic: str, group: str, number: int, *, timeout: Duration | None = None
    ) -> PushSent:
        """Send one of the last requests of a push once more; nothing becomes of its task. Raises
        NotFound, Conflict."""
        return self._call(AsyncClient.resend, topic, group, number, timeout=timeout)

    def nodes(self, *, timeout: Duration | None = None) -> Nodes:
        """All nodes that serve shards of this store, and who leads which shard since when. Raises
        Conflict for a daemon that is no node (``?shards=N``)."""
        return self._call(AsyncClient.nodes, timeout=timeout)

    def move_shard(
        self, shard: int, node: str | None = None, *, timeout: Duration | None = None
    ) -> ShardPlaced:
        """Say that a shard shall be on a node, or, without ``node``, wherever it belongs. The
        answer comes once that is noted; the shard moves as soon as its new node stands by. While
        the node is not there, or drains, the shard is elsewhere. Raises NotFound for a node that is
        not there, Conflict for a daemon that is no node."""
        return self._call(AsyncClient.move_shard, shard, node, timeout=timeout)

    def drain_node(
        self, node: str, *, draining: bool = True, timeout: Duration | None = None
    ) -> NodeDrained:
        """Say that a node shall have no shards, also after it was started again, until it is said
        with ``draining=False`` that it shall. The answer comes once that is noted; its shards move
        one after the other. Raises NotFound for a node that is not there, Conflict for a daemon
        that is no node.

        ``draining``: false: it shall have shards again."""
        return self._call(AsyncClient.drain_node, node, draining=draining, timeout=timeout)

    def status(self, *, timeout: Duration | None = None) -> Status:
        """How the daemon is: its role and state, and since when. For one that is not active see
        ``status_at``."""
        return self._call(AsyncClient.status, timeout=timeout)

    def stats(self, *, timeout: Duration | None = None) -> Stats:
        """The daemon's counts at this moment."""
        return self._call(AsyncClient.stats, timeout=timeout)

    def load(
        self,
        *,
        since: datetime | None = None,
        step: Duration | None = None,
        steps: int | None = None,
        timeout: Duration | None = None,
    ) -> Load:
        """How many tasks the wheel has for each of ``steps`` spans of ``step``, from ``since`` on,
        which is rounded down to a whole ``step``. Raises BadRequest.

        ``since``: the first moment; default: now. ``step``: how long a span is; default: a minute.
        ``steps``: how many spans; default 60."""
        return self._call(AsyncClient.load, since=since, step=step, steps=steps, timeout=timeout)

    def list_consumers(
        self,
        *,
        topic: str | None = None,
        group: str | None = None,
        limit: int | None = None,
        timeout: Duration | None = None,
    ) -> Iterator[ConsumerInfo]:
        """Who is connected and takes tasks: each subscription, and each pull that waits, in the
        order in which their connections came; of a topic, of a group. Read page by page, at most
        ``limit``; ``timeout`` is for each page.

        ``topic``: of this topic. ``group``: of this group."""
        return self._iterate(
            AsyncClient.list_consumers, topic=topic, group=group, limit=limit, timeout=timeout
        )

    def backup(self, name: str, *, timeout: Duration | None = None) -> Backup:
        """Copy the store to a new file ``name`` in the daemon's backup folder, while it works."""
        return self._call(AsyncClient.backup, name, timeout=timeout)


class Delivery(Blocking):
    """The verbs of a delivery."""

    __slots__ = ()

    def ack(self, *, timeout: Duration | None = None) -> AckWord:
        """Finish the task. "acked" when that is durable, or what else became of the task."""
        return self._call(AsyncDelivery.ack, timeout=timeout)

    def nack(
        self,
        delay: Duration | None = None,
        reason: str | None = None,
        *,
        timeout: Duration | None = None,
    ) -> NackWord:
        """It failed: again after ``delay`` (default: the daemon's retry policy), or, when its
        retries are used up, to the dead letters. "retrying", "dead", or "held": its order
        key waits for an operator."""
        return self._call(AsyncDelivery.nack, delay, reason, timeout=timeout)

    def reject(self, reason: str | None = None, *, timeout: Duration | None = None) -> RejectWord:
        """It can never succeed: to the dead letters at once: "dead"; or "held": its order
        key waits for an operator."""
        return self._call(AsyncDelivery.reject, reason, timeout=timeout)

    def extend(self, seconds: Duration, *, timeout: Duration | None = None) -> ExtendWord:
        """Let the lease end ``seconds`` from now. "extended", or why there is none."""
        return self._call(AsyncDelivery.extend, seconds, timeout=timeout)

    def release(self, *, timeout: Duration | None = None) -> ReleaseWord:
        """Give the task back unstarted: it is ready at once, without a failure. "released"."""
        return self._call(AsyncDelivery.release, timeout=timeout)

    def snooze(self, delay: Duration, *, timeout: Duration | None = None) -> SnoozeWord:
        """Not now: again after ``delay``, and it counts as no failure. "snoozed"; "too_often"
        when the group has postponed the task as often as the daemon allows (``snoozes_max``): then
        the delivery is still yours to settle."""
        return self._call(AsyncDelivery.snooze, delay, timeout=timeout)


class Transaction(Blocking):
    """The verbs of a transaction."""

    __slots__ = ()

    @spelled_out(TaskKeywords)
    def enqueue(
        self,
        topic: str,
        body: bytes,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        timeout: Duration | None = None,
        **options: Unpack[TaskKeywords],
    ) -> None:
        """Keep a half task: durable, and nobody sees it before the commit. Arguments and errors as
        of ``Client.enqueue``; ``if_pending`` is refused. Its delay counts from now, or from the
        commit, as the transaction was asked for; what is due before the commit is due with it."""
        refuse_unknown(options, TaskKeywords, "Transaction.enqueue")
        self._call(
            AsyncTransaction.enqueue, topic, body, delay=delay, at=at, timeout=timeout, **options
        )

    def enqueue_many(self, tasks: Iterable[Task], *, timeout: Duration | None = None) -> None:
        """Half tasks, in as few frames as they fit. All are checked before the first is sent."""
        self._call(AsyncTransaction.enqueue_many, tasks, timeout=timeout)

    def commit(self, *, timeout: Duration | None = None) -> list[Receipt]:
        """Its half tasks are tasks; their receipts. Once more gives the same.

        Raises TransactionRolledBack when somebody else has decided so, Conflict when an enqueue
        failed without an answer; SendTimeout or ConnectionLost when nobody knows: call it again, or
        leave it to whoever is asked."""
        return self._call(AsyncTransaction.commit, timeout=timeout)

    def rollback(self, *, timeout: Duration | None = None) -> None:
        """None of its tasks ever was. Once more is harmless. Raises TransactionCommitted when
        somebody else has decided so."""
        self._call(AsyncTransaction.rollback, timeout=timeout)
