"""An engine with a store of dictionaries and a clock that a test moves: a shard without a loop.

It does what the shard and its operations do, in the same order: it reads for the engine what the
engine asks for, and lays what is not durable over it. Their rules it calls.
"""

from __future__ import annotations

from typing import Any

from support.engine_rig_base import CONFIG, GRACE_MS, LEASE_MS, NOW_MS, RETRY, Got, RigBase
from tickwheel.engine.enqueue import Request
from tickwheel.engine.topics import Group, Lease, Subscriber
from tickwheel.model.policies import Coalescing
from tickwheel.model.records import ID_STEP, TaskOptions, TaskSnapshot
from tickwheel.server.shard.groups import begin_group
from tickwheel.server.shard.settlement import ack_by_record

__all__ = ["CONFIG", "GRACE_MS", "LEASE_MS", "NOW_MS", "RETRY", "Got", "Rig"]


class Rig(RigBase):
    """Add what consumers send, and commands by id."""

    # --- what consumers send -------------------------------------------------------------------

    def ack(self, got: Got) -> str:
        return self.ack_receipt(got.group, got.epoch, got.id, got.attempt)

    def ack_receipt(self, group: Group, epoch: int, task_id: int, attempt: int) -> str:
        settlement = self.engine.settlement
        result = self.core.find_group(group.topic.name, group.name)
        if result is not None and not settlement.ack(result, epoch, [task_id], [attempt]):
            return "acked"
        known = self.known([task_id]).get(task_id)
        return ack_by_record(self.engine, result, epoch, task_id, attempt, known)

    def lease(self, got: Got) -> Lease | None:
        group = self.core.find_group(got.group.topic.name, got.group.name)
        if group is None:
            return None
        return self.engine.settlement.current(group, got.id, got.epoch, got.attempt)

    def held(self, got: Got) -> Lease:
        """Return the lease of a delivery, which must be the current one."""
        lease = self.lease(got)
        assert lease is not None
        return lease

    def nack(self, got: Got, delay_ms: int | None = None, reason: str | None = None) -> str:
        return self.engine.settlement.nack(self.held(got), delay_ms, reason, self.now_ms)

    def reject(self, got: Got, reason: str | None = None) -> None:
        self.engine.settlement.reject(self.held(got), reason, self.now_ms)

    def release(self, got: Got) -> None:
        self.engine.settlement.release(self.held(got), self.now_ms)

    def snooze(self, got: Got, delay_ms: int) -> str:
        return self.engine.settlement.snooze(self.held(got), delay_ms, self.now_ms)

    def extend(self, got: Got, lease_ms: int, by: Subscriber | None = None) -> None:
        self.engine.settlement.extend(self.held(got), lease_ms, self.mono_ms, by)

    # --- commands by id ------------------------------------------------------------------------

    def find(self, task_id: int) -> TaskSnapshot | None:
        return self.known([task_id]).get(task_id)

    def state(self, task_id: int) -> str:
        control, known = self.engine.control, self.find(task_id)
        return control.absent(task_id) if known is None else control.state(known).value

    def views(self, task_id: int) -> dict[str, tuple[str, int]]:
        """Return (word, attempt) for each group that is owed the task."""
        known = self.find(task_id)
        assert known is not None
        views = self.engine.control.view(known, self.now_ms - self.mono_ms)
        return {group: (view.state, view.attempt) for group, view in views.items()}

    def cancel(self, task_id: int) -> str:
        for topic, found in self._as_columns(task_id).items():
            if task_id in self.engine.control.cancel_many(topic, found, {}):
                return "cancelled"
        return self.engine.control.cancel(task_id, self.find(task_id))

    def _as_columns(self, task_id: int) -> dict[str, dict[int, int]]:
        """Topic → id → due_ms of a task of which nothing else is recorded; of every other id, so
        that both ways of a command are taken."""
        known = self.find(task_id)
        if known is None or known.row.options or known.progress or known.dead:
            return {}
        for batch in (self.core.open, self.core.sealed):
            if batch is not None and task_id in batch.effects.updated:
                return {}
        row = known.row
        return {row.topic: {task_id: row.due_ms}} if task_id // ID_STEP % 2 else {}

    def reschedule(self, task_id: int, delay_ms: int) -> str:
        due_ms = self.now_ms + delay_ms
        for topic, found in self._as_columns(task_id).items():
            moved = self.engine.control.reschedule_many(
                topic, found, lambda far: dict.fromkeys(far, due_ms)
            )
            if moved:
                assert moved == {task_id: due_ms}
                return "scheduled"
        word, answered_ms = self.engine.control.reschedule(
            task_id, due_ms, self.find(task_id), self.now_ms
        )
        assert answered_ms == (due_ms if word == "scheduled" else None)
        return word

    def requeue(self, task_id: int, group: str = "default", ttl_ms: int | None = None) -> str:
        return self._settle_dead("requeue", task_id, group, ttl_ms)

    def delete_dead(self, task_id: int, group: str = "default") -> str:
        return self._settle_dead("delete", task_id, group)

    def _settle_dead(self, kind: str, task_id: int, group: str, ttl_ms: int | None = None) -> str:
        control, known = self.engine.control, self.find(task_id)
        return control.settle_dead(kind, task_id, group, known, self.now_ms, ttl_ms)

    def group(self, topic: str = "t", name: str = "default") -> Group:
        result = self.core.find_group(topic, name)
        assert result is not None
        return result

    def coalesce(self, by: Coalescing, delay_ms: int, body: bytes = b"", **options: Any) -> int:
        """Enqueue a task of the key k with a rule. Return the id of the answer."""
        coalescer = self.engine.coalescer
        task = "t", self.now_ms + delay_ms, body, TaskOptions("k", **options)
        needed = coalescer.needed_records([task], [by], self.now_ms, 1_000)
        request = Request(None, None, 0, [task], [by])
        answer = coalescer.decide(request, needed, lambda ids: self.known(list(ids)), self.now_ms)
        assert answer is not None
        return answer.merged[0][1]

    # --- groups and their settings -------------------------------------------------------------

    def configure(self, topic: str = "t", group: str | None = None, **changes: Any) -> None:
        """Configure a group, or the topic if no group is named."""
        core, grouping = self.core, self.engine.grouping
        if group is None:
            result = core.topic(topic)
            grouping.set_topic(result, result.settings.replaced(changes), self.mono_ms)
        else:
            one = self.group(topic, group)
            grouping.set(one, one.settings.replaced(changes), self.mono_ms)

    def create_group(
        self, topic: str, name: str, since_ms: int | None = None, *, replays: bool = True
    ) -> Group:
        """Create a group. `replays` says whether it gets earlier tasks."""
        grouping, found = self.engine.grouping, self.core.topic(topic)
        group = begin_group(grouping, found, name, since_ms, self.now_ms)
        while replays and self.replay(group):
            pass
        return group

    def replay(self, group: Group, limit: int = 100) -> bool:
        """Replay a page of earlier tasks to the group. Return whether more are left."""
        core, topic = self.core, group.topic
        replay = topic.replays.get(group)
        if replay is None:
            return False
        rows = self.rows.tasks.values()
        ids = sorted(row.id for row in rows if row.topic == topic.name and row.id > replay.reached)
        page, following = ids[:limit], ids[limit - 1] if len(ids) >= limit else None
        known = self.known([i for i in page if i <= core.landed_id])
        looked_at = [known[i] for i in page if i in known]
        self.engine.ownership.examine_page(replay, looked_at, following, self.now_ms)
        return True

    def close_group(self, topic: str, name: str) -> Group:
        """Start the deletion of a group; ``drain`` completes it."""
        group = self.group(topic, name)
        self.engine.closing.close(group)
        self.core.cut = []
        return group

    def drain(self, group: Group, limit: int = 100) -> bool:
        """Do one step of a deletion. Return whether the group is gone."""
        closing = self.engine.closing
        if closing.is_drained(group):
            closing.finish(group)
            return True
        ids = closing.take_some_tasks(group, limit)
        if not ids:
            dead = self.rows.dead | self.core.open.effects.dead
            ids = [i for (i, name), row in dead.items() if row is not None and name == group.name]
        closing.drop(group, ids, self.known(ids))
        return False

    def delete_group(self, topic: str, name: str) -> None:
        """Delete a group completely."""
        group = self.close_group(topic, name)
        self.commit()
        while not self.drain(group):
            self.commit()
        self.commit()
