"""The protocol of the daemon's verbs: what a transport calls.

Written by scripts/generate from the verbs of tickwheel/api: change that, and run it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tickwheel.api.bulk import BulkName, BulkPage, BulkTrial, NewBulk
from tickwheel.api.daemon import (
    BackupName,
    ConsumersPage,
    HistoryPage,
    LoadSpans,
    NewRestore,
    Nothing,
    OfTask,
    RestoreId,
)
from tickwheel.api.groups import (
    Deletion,
    GroupDeletion,
    HeldTasks,
    KeysPage,
    NewGroup,
    OfGroup,
    OfTopic,
    OneKey,
    Reset,
    ResetTrial,
    Settings,
)
from tickwheel.api.nodes import DrainNode, MoveShard
from tickwheel.api.schedules import (
    Backfill,
    ClaimName,
    NamesPage,
    NewSchedule,
    ScheduleLook,
    ScheduleName,
)
from tickwheel.api.targets import (
    OfTargets,
    PushLogPage,
    Resend,
    SetForward,
    SetPush,
    SettleCallback,
    TestPush,
)
from tickwheel.api.tasks import (
    DeadPage,
    Letters,
    LookUp,
    Move,
    PeekPage,
    Requeue,
    Selection,
    Spread,
    TasksPage,
    TaskToExplain,
)
from tickwheel.api.transactions import TransactionName, TransactionsPage
from tickwheel.clock import Now
from tickwheel.engine.topics import DeliverySink
from tickwheel.errors import TickwheelError
from tickwheel.model.records import NewTask
from tickwheel.server.shard.callers import Ask, Caller, TopicFilter
from tickwheel.server.shard.delivery import Tell
from tickwheel.server.shard.enqueue import PlainTasks
from tickwheel.server.shard.transactions import CheckSink


class Verbs(Protocol):
    """Every verb as an operation, as one principal has it."""

    plain_tasks: PlainTasks
    """What the tasks of ``enqueue_plain`` may be."""
    unreadable: Callable[[Caller, str, TickwheelError], None]
    """Takes note of a request whose values are not what the verb takes."""

    def enqueue(
        self, caller: Caller, request: int, floor: object, tasks: Sequence[Any], now: Now,
    ) -> None: ...  # fmt: skip
    def enqueue_once(
        self, caller: Caller, key: bytes, fingerprint: int, tasks: Sequence[Any], now: Now, *,
        is_part: bool = False,
    ) -> None: ...  # fmt: skip
    def enqueue_plain(
        self, caller: Caller, requests: list[int], floor: int, new_tasks: list[NewTask],
        size_bytes: int, now_ms: int, *, keyed: bool = False,
    ) -> int: ...  # fmt: skip
    def enqueue_columns(
        self, caller: Caller, request: int, floor: object, topic: object, bodies: object,
        delays_ms: object, now: Now,
    ) -> None: ...  # fmt: skip
    def enqueue_unanswered(self, caller: Caller, tasks: Sequence[Any], now: Now) -> None: ...
    def subscribe(
        self, caller: Caller, request: int, number: int, topic: object, group: object,
        prefetch: int, options: dict[str, Any], sink: DeliverySink, now: Now,
    ) -> None: ...  # fmt: skip
    def set_prefetch(
        self, caller: Caller, request: int, number: object, prefetch: int, *, tell: bool = False,
    ) -> None: ...  # fmt: skip
    def unsubscribe(self, caller: Caller, request: int, number: object) -> None: ...
    def pull(
        self, caller: Caller, request: int, topic: object, group: object, count: int, wait_ms: int,
        options: dict[str, Any], sink: DeliverySink, now: Now, tell: Tell | None = None,
    ) -> None: ...  # fmt: skip
    def ack(
        self, caller: Caller, request: int, topic: object, group: object, epoch: int,
        ids: Sequence[int], attempts: Sequence[int], *, may_gather: bool = False,
    ) -> None: ...  # fmt: skip
    def nack(
        self, caller: Caller, request: int, topic: object, group: object, items: object, now: Now,
    ) -> None: ...  # fmt: skip
    def reject(
        self, caller: Caller, request: int, topic: object, group: object, items: object, now: Now,
    ) -> None: ...  # fmt: skip
    def extend(
        self, caller: Caller, request: int, topic: object, group: object, epoch: int,
        ids: Sequence[int], attempts: Sequence[int], lease_ms: int, now: Now,
    ) -> None: ...  # fmt: skip
    def snooze(
        self, caller: Caller, request: int, topic: object, group: object, items: object, now: Now,
    ) -> None: ...  # fmt: skip
    def release(
        self, caller: Caller, request: int, topic: object, group: object, epoch: int,
        ids: Sequence[int], attempts: Sequence[int], now: Now,
    ) -> None: ...  # fmt: skip
    def leave(self, caller: Caller, request: int, now: Now) -> None: ...

    cancel: Callable[[Ask[Selection]], None]
    reschedule: Callable[[Ask[Move]], None]
    spread: Callable[[Ask[Spread]], None]
    run_now: Callable[[Ask[Selection]], None]
    look_up: Callable[[Ask[LookUp]], None]
    explain: Callable[[Ask[TaskToExplain]], None]
    list_tasks: Callable[[Ask[TasksPage]], None]
    peek: Callable[[Ask[PeekPage]], None]
    list_dead: Callable[[Ask[DeadPage]], None]
    requeue_dead: Callable[[Ask[Requeue]], None]
    delete_dead: Callable[[Ask[Letters]], None]
    create_group: Callable[[Ask[NewGroup]], None]
    configure: Callable[[Ask[Settings]], None]
    delete_group: Callable[[Ask[GroupDeletion]], None]
    delete_topic: Callable[[Ask[Deletion]], None]
    reset_group: Callable[[Ask[Reset]], None]
    preview_reset: Callable[[Ask[ResetTrial]], None]
    held_keys: Callable[[Ask[KeysPage]], None]
    key_lines: Callable[[Ask[KeysPage]], None]
    release_key: Callable[[Ask[HeldTasks]], None]
    skip_key: Callable[[Ask[HeldTasks]], None]
    pause_key: Callable[[Ask[OneKey]], None]
    resume_key: Callable[[Ask[OneKey]], None]
    put_schedule: Callable[[Ask[NewSchedule]], None]
    claim_schedule: Callable[[Ask[ClaimName]], None]
    list_schedules: Callable[[Ask[NamesPage]], None]
    show_schedule: Callable[[Ask[ScheduleLook]], None]
    pause_schedule: Callable[[Ask[ScheduleName]], None]
    resume_schedule: Callable[[Ask[ScheduleName]], None]
    run_schedule: Callable[[Ask[ScheduleName]], None]
    backfill_schedule: Callable[[Ask[Backfill]], None]
    delete_schedule: Callable[[Ask[ScheduleName]], None]

    def prepare(
        self, caller: Caller, request: int, transaction: object, group: object, part: object,
        tasks: Sequence[Any], options: dict[str, Any], now: Now,
    ) -> None: ...  # fmt: skip

    claim_transaction: Callable[[Ask[ClaimName]], None]
    commit_transaction: Callable[[Ask[TransactionName]], None]
    rollback_transaction: Callable[[Ask[TransactionName]], None]

    def answer_checks(
        self, caller: Caller, request: int, groups: object, sink: CheckSink, *,
        only: TopicFilter | None = None,
    ) -> None: ...  # fmt: skip

    list_transactions: Callable[[Ask[TransactionsPage]], None]
    show_transaction: Callable[[Ask[TransactionName]], None]
    make_bulk: Callable[[Ask[NewBulk]], None]
    preview_bulk: Callable[[Ask[BulkTrial]], None]
    list_bulk: Callable[[Ask[BulkPage]], None]
    show_bulk: Callable[[Ask[BulkName]], None]
    cancel_bulk: Callable[[Ask[BulkName]], None]
    set_push: Callable[[Ask[SetPush]], None]
    set_forward: Callable[[Ask[SetForward]], None]
    remove_target: Callable[[Ask[OfGroup]], None]
    targets: Callable[[Ask[OfTargets]], None]
    test_push: Callable[[Ask[TestPush]], None]
    push_log: Callable[[Ask[PushLogPage]], None]
    resend: Callable[[Ask[Resend]], None]
    settle_callback: Callable[[Ask[SettleCallback]], None]
    nodes: Callable[[Ask[Nothing]], None]
    move_shard: Callable[[Ask[MoveShard]], None]
    drain_node: Callable[[Ask[DrainNode]], None]
    ping: Callable[[Ask[Nothing]], None]
    status: Callable[[Ask[Nothing]], None]
    stats: Callable[[Ask[Nothing]], None]
    load: Callable[[Ask[LoadSpans]], None]
    list_topics: Callable[[Ask[NamesPage]], None]
    show_topic: Callable[[Ask[OfTopic]], None]
    consumers: Callable[[Ask[ConsumersPage]], None]
    overview: Callable[[Ask[Nothing]], None]
    group_lag: Callable[[Ask[OfGroup]], None]
    task_history: Callable[[Ask[OfTask]], None]
    history_tasks: Callable[[Ask[HistoryPage]], None]
    report: Callable[[Ask[Nothing]], None]
    backup: Callable[[Ask[BackupName]], None]
    restore: Callable[[Ask[NewRestore]], None]
    list_restores: Callable[[Ask[Nothing]], None]
    show_restore: Callable[[Ask[RestoreId]], None]
    cancel_restore: Callable[[Ask[RestoreId]], None]
