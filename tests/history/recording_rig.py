"""The engine rig with a history: records of what the engine does, kept as batches become durable.

It writes records at the places where a daemon has to, so that the model test of the restore does
not rest on hand-written events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine_rig import Rig

from tickwheel.history.records import Kind, policy_map
from tickwheel.wheel.batch import Batch
from tickwheel.wheel.control import Known
from tickwheel.wheel.core import EngineConfig
from tickwheel.wheel.groups import Group, Lease, Subscriber, Topic
from tickwheel.wheel.leases import Item
from tickwheel.wheel.records import Failure, GroupSettings, TaskRow
from tickwheel.wheel.retry import RetryPolicy

Record = list[Any]


class RecordingRig(Rig):
    """``history`` holds (epoch, record) of everything that is durable, in order."""

    def __init__(self, config: EngineConfig) -> None:
        self.history: list[tuple[int, Record]] = []
        self.pending: list[Record] = []
        self.sealed_records: list[Record] = []
        super().__init__(config)

    def _start(self, *, clean: bool) -> None:
        super()._start(clean=clean)
        self.pending, self.sealed_records = [], []
        for task_id in self.core.open.effects.ended:
            # Nobody can tell any more that somebody owed it.
            self.note_ended("deleted", self.rows.tasks[task_id].topic, None, task_id)
        self._attach()

    # --- batches -----------------------------------------------------------------------------

    def seal(self, *, checkpoint_all: bool = False) -> Batch | None:
        batch = super().seal(checkpoint_all=checkpoint_all)
        if batch is not None:
            self.sealed_records = [*self._enqueued(batch), *self.pending]
            self.pending = []
        return batch

    def apply(self) -> None:
        super().apply()
        self.history += [(self.epoch, record) for record in self.sealed_records]
        self.sealed_records = []

    def refuse(self) -> list[object]:
        told = super().refuse()
        kept = [record for record in self.sealed_records if record[0] != Kind.ENQUEUED]
        self.pending[:0] = kept
        self.sealed_records = []
        return told

    def _enqueued(self, batch: Batch) -> list[Record]:
        rows = list(batch.effects.enqueued.values())
        if not rows:
            return []
        extras = {i: list(row.extras) for i, row in enumerate(rows) if row.extras is not None}
        for fields in extras.values():
            fields[5] = told_policy(fields[5])
        return [
            [Kind.ENQUEUED, self.now_ms, "p", [r.id for r in rows], [r.due_ms for r in rows],
             [r.topic for r in rows], extras, [r.body for r in rows]]
        ]  # fmt: skip

    # --- notes -------------------------------------------------------------------------------

    def note(self, kind: Kind, *fields: Any) -> None:
        self.pending.append([kind, self.now_ms, *fields])

    def note_ended(self, how: str, topic: str, group: str | None, task_id: int) -> None:
        ended = self.has_ended(task_id)
        self.note(Kind.ENDED, topic, group or None, how, [task_id], ended if group else None)

    def has_ended(self, task_id: int) -> bool:
        return task_id in self.core.open.effects.ended

    def _wrap(self, owner: Any, name: str, after: Callable[..., None]) -> None:
        """``after(result, number of notes before, *arguments)`` follows each call."""
        real = getattr(owner, name)

        def wrapped(*arguments: Any, **named: Any) -> Any:
            before = len(self.pending)
            result = real(*arguments, **named)
            after(result, before, *arguments)
            return result

        setattr(owner, name, wrapped)

    def _attach(self) -> None:
        engine = self.engine
        for owner, after in (
            (engine.settlement, self._ack),
            (engine.settlement, self._ack_idle),
            (engine.settlement, self._nack),
            (engine.settlement, self._bury),
            (engine.settlement, self._release),
            (engine.settlement, self._lease_over),
            (engine.delivery, self._lease_all),
            (engine.delivery, self._expire),
            (engine.delivery, self._owners),
            (engine.control, self._cancel),
            (engine.control, self._reschedule),
            (engine.control, self._requeue),
            (engine.control, self._delete_dead),
            (engine.closing, self._forget),
            (engine.closing, self._close),
            (engine.grouping, self._create),
            (engine.grouping, self._set),
            (engine.grouping, self._set_topic),
        ):
            name = after.__name__.removeprefix("_")
            self._wrap(owner, name if hasattr(owner, name) else f"_{name}", after)

    # --- consumers ---------------------------------------------------------------------------

    def _lease_all(
        self, result: tuple[list[Item], int], before: int, group: Group,
        subscriber: Subscriber, *rest: Any,
    ) -> None:  # fmt: skip
        items = result[0]
        if items:
            self.note(
                Kind.DELIVERED, group.topic.name, group.name, subscriber.label,
                [row.id for row, _ in items], [attempt for _, attempt in items],
                [row.due_ms for row, _ in items],
            )  # fmt: skip

    def _ack(
        self, unresolved: list[int], before: int, group: Group, epoch: int,
        ids: Sequence[int], attempts: Sequence[int],
    ) -> None:  # fmt: skip
        done = [i for i in range(len(ids)) if i not in unresolved]
        if done:
            self.note(
                Kind.ACKED, group.topic.name, group.name, "", epoch, [ids[i] for i in done],
                [attempts[i] for i in done], None, [self.has_ended(ids[i]) for i in done],
            )  # fmt: skip

    def _ack_idle(
        self, word: str, before: int, group: Group, epoch: int, task_id: int, attempt: int,
        known: Known,
    ) -> None:  # fmt: skip
        if word == "acked" and len(self.pending) == before:
            self.note(
                Kind.ACKED, group.topic.name, group.name, "", epoch, [task_id], [attempt], None,
                self.has_ended(task_id),
            )  # fmt: skip

    def _nack(
        self, word: str, before: int, lease: Lease, delay_ms: int | None, reason: str | None,
        now_ms: int,
    ) -> None:  # fmt: skip
        if word == "retrying":
            group = lease.group
            self.note(
                Kind.NACKED, group.topic.name, group.name, "", [lease.id], [lease.attempt],
                [group.waiting[lease.id]], reason or "nack",
            )  # fmt: skip

    def _bury(self, result: None, before: int, lease: Lease, failure: Failure, now_ms: int) -> None:
        group = lease.group
        self.note(
            Kind.DEAD, group.topic.name, group.name, [lease.id], [lease.attempt], failure.reason
        )

    def _release(self, result: None, before: int, lease: Lease, now_ms: int) -> None:
        group = lease.group
        self.note(Kind.RELEASED, group.topic.name, group.name, "", [lease.id], [lease.attempt])

    def _lease_over(self, result: None, before: int, lease: Lease, now_ms: int) -> None:
        if len(self.pending) == before:
            group = lease.group
            reason = group.tries[lease.id].failures[-1].reason
            self.note(
                Kind.LEASE_OVER, group.topic.name, group.name, "", [lease.id], [lease.attempt],
                reason,
            )  # fmt: skip

    # --- ends, commands, groups ----------------------------------------------------------------

    def _expire(self, result: None, before: int, group: Group, task_id: int) -> None:
        self.note_ended("expired", group.topic.name, group.name, task_id)

    def _owners(
        self, groups: list[Group], before: int, topic: Topic, live: list[Group], row: TaskRow
    ) -> None:
        if not groups:
            self.note_ended("deleted", topic.name, None, row.id)

    def _cancel(self, word: str, before: int, task_id: int, known: Known | None) -> None:
        if word == "cancelled" and known is not None:
            self.note_ended("cancelled", known.row.topic, None, task_id)

    def _reschedule(
        self, told: tuple[str, int | None], before: int, task_id: int, due_ms: int,
        known: Known | None, now_ms: int,
    ) -> None:  # fmt: skip
        if told[0] == "scheduled" and known is not None:
            self.note(Kind.RESCHEDULED, known.row.topic, [task_id], [told[1]])

    def _requeue(
        self, word: str, before: int, task_id: int, name: str, known: Known | None, now_ms: int
    ) -> None:
        if word == "requeued" and known is not None:
            self.note(Kind.REQUEUED, known.row.topic, name, [task_id])

    def _delete_dead(
        self, word: str, before: int, task_id: int, name: str, known: Known | None
    ) -> None:
        if word == "deleted" and known is not None:
            self.note_ended("deleted", known.row.topic, name, task_id)

    def _forget(self, result: None, before: int, group: Group, task_id: int) -> None:
        self.note_ended("deleted", group.topic.name, group.name, task_id)

    def _close(self, result: None, before: int, group: Group, now_ms: int) -> None:
        closed = {"closed_ms": group.settings.closed_ms, "closed_id": str(group.settings.closed_id)}
        self.note(Kind.GROUP, group.topic.name, group.name, "deleted", closed)

    def _create(self, made: Group, before: int, topic: Topic, name: str, since_ms: int) -> None:
        self.note(Kind.GROUP, topic.name, name, "created", {"since_ms": made.since_ms})

    def _set(
        self, result: None, before: int, group: Group, settings: GroupSettings, mono_ms: int
    ) -> None:
        self.note(Kind.GROUP, group.topic.name, group.name, "configured", told_settings(settings))

    def _set_topic(
        self, result: None, before: int, topic: Topic, settings: GroupSettings, mono_ms: int
    ) -> None:
        self.note(Kind.GROUP, topic.name, None, "configured", told_settings(settings))


def told_policy(policy: Any) -> Any:
    return policy_map(policy) if isinstance(policy, RetryPolicy) else policy


def told_settings(settings: GroupSettings) -> dict[str, Any]:
    fields = {name: getattr(settings, name) for name in ("paused", "rate", "burst")}
    return fields | {"retry": told_policy(settings.retry)}
