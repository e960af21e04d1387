"""What an engine promises, written as slowly and plainly as possible.

Every task has a standing for each group it is owed to; every command is a loop over all of
them. States move along ``TRANSITIONS`` only. What a store holds is a copy of the whole content
made when a batch was sealed. Nothing here looks at the engine.
"""

from __future__ import annotations

from copy import deepcopy

from engine_model_content import ACTIVE, Content, Staged, Standing, Task

from tickwheel.wheel.retry import RetryPolicy
from tickwheel.wheel.states import Event, State

CHECKPOINT_MS = 100
SCAN_MS = 21
"""Leases end up to this much late."""

Receipt = tuple[int, str, int, int]
"""(id, group, epoch, attempt)"""


class Model:
    """``now`` is the present; ``durable`` what a crash would leave."""

    def __init__(self, retry: RetryPolicy) -> None:
        self.retry = retry
        self.now = Content()
        self.durable = Content()
        self.open = Staged()
        self.sealed: Staged | None = None
        self.snapshot = Content()
        self.epoch = 1

    # --- batches and restarts ----------------------------------------------------------------

    def enqueue(self, task: Task, request: int) -> None:
        self.open.tasks[task.id] = task
        if request:
            self.open.requests[request] = task.id

    def answered(self, request: int) -> int | None:
        for known in (self.now, self.sealed, self.open):
            if known is not None and request in known.requests:
                return known.requests[request]
        return None

    def seal(self, mono_ms: int, *, everything: bool = False) -> None:
        limit_ms = mono_ms if everything else mono_ms - CHECKPOINT_MS
        for task in self.now.tasks.values():
            for standing in (task.standings or {}).values():
                if standing.state is State.IN_FLIGHT and standing.since_mono_ms <= limit_ms:
                    standing.row = "IN_FLIGHT", standing.attempt
        self.snapshot = deepcopy(self.now)
        self.open.merge_into(self.snapshot)
        self.sealed, self.open = self.open, Staged()

    def apply(self) -> None:
        self.durable = self.snapshot

    def land(self) -> None:
        assert self.sealed is not None
        self.sealed.merge_into(self.now)
        self.sealed = None

    def refuse(self) -> None:
        self.sealed = None

    def restart(self, ends_mono_ms: dict[tuple[int, str], int]) -> None:
        """Go on from what is durable; ``ends_mono_ms`` says when the leases kept end."""
        self.now = deepcopy(self.durable)
        self.open, self.sealed = Staged(), None
        self.epoch += 1
        for task in self.now.tasks.values():
            standings = task.standings or {}
            dead = [s for s in standings.values() if s.state is State.DEAD]
            if not dead and all(s.row is None for s in standings.values()):
                task.standings = None
                continue
            for group in self.now.owed_groups(task):
                standings.setdefault(group, Standing())
            for group, standing in standings.items():
                self._restore(standing, ends_mono_ms.get((task.id, group), 0))

    @staticmethod
    def _restore(standing: Standing, end_mono_ms: int) -> None:
        if standing.state not in ACTIVE:
            return
        word, standing.attempt = standing.row or ("", 0)
        waits, flies = word == "WAITING", word == "IN_FLIGHT"
        standing.state = State.WAITING if waits else State.IN_FLIGHT if flies else State.READY
        standing.end_mono_ms = end_mono_ms

    # --- time ----------------------------------------------------------------------------------

    def due(self, task: Task) -> None:
        """Its time has come: it is owed to the groups there are."""
        if task.standings is None:
            task.standings = {}
            for group in self.now.owed_groups(task):
                task.standings[group] = scheduled = Standing(State.SCHEDULED)
                scheduled.move(Event.DUE)

    def add_group(self, topic: str, group: str, now_ms: int) -> None:
        groups = self.now.groups.setdefault(topic, {})
        if group in groups:
            return
        groups[group] = now_ms if groups else 0
        for task in self.now.tasks.values():
            if task.topic == topic and task.standings is not None and len(groups) == 1:
                task.standings[group] = Standing()

    def deliver(self, task: Task, group: str, mono_ms: int, lease_ms: int) -> int:
        """Returns the attempt."""
        standing = self.standing(task.id, group)
        standing.move(Event.DELIVER)
        standing.attempt += 1
        standing.epoch = self.epoch
        standing.since_mono_ms, standing.end_mono_ms = mono_ms, mono_ms + lease_ms
        return standing.attempt

    def hold(self, task: Task, group: str) -> None:
        """The clock went back before it was delivered."""
        standing = self.standing(task.id, group)
        standing.move(Event.HOLD)
        standing.at_ms = task.due_ms
        if standing.attempt:
            standing.row = "WAITING", standing.attempt

    def expire(self, task: Task, group: str) -> None:
        self._finish(task, group, Event.EXPIRE)

    def lease_over(self, standing: Standing) -> None:
        if standing.attempt > self.retry.retries_max:
            standing.move(Event.GIVE_UP)
            standing.row = None
        else:
            standing.move(Event.LEASE_OVER)
            standing.row = "RELEASED", standing.attempt

    # --- what consumers send ---------------------------------------------------------------------

    def standing(self, task_id: int, group: str) -> Standing:
        task = self.now.tasks.get(task_id)
        assert task is not None, f"{task_id} has ended"
        assert task.standings is not None and group in task.standings, f"not owed to {group}"
        return task.standings[group]

    def ack(self, receipt: Receipt) -> str:
        task_id, group, epoch, attempt = receipt
        task = self.now.tasks.get(task_id)
        if task is None:
            word = self.now.ended[task_id]
            return "done" if word == "acked" else word
        groups = self.now.groups.get(task.topic, {})
        if group not in groups:
            return "stale"
        if task.standings is None:
            if epoch >= self.epoch or len(groups) > 1:
                return "stale"
            task.standings = {group: Standing(State.SCHEDULED)}
        standing = task.standings.get(group)
        if standing is None:
            return "stale"
        if standing.state is State.DEAD:
            return "dead"
        if standing.state not in (*ACTIVE, State.SCHEDULED):
            return "done"
        if epoch >= self.epoch and (epoch, attempt) > (standing.epoch, standing.attempt):
            return "stale"
        if standing.state is not State.IN_FLIGHT:
            standing.attempt = max(standing.attempt, attempt)
        self._finish(task, group, Event.ACK)
        return "acked"

    def _finish(self, task: Task, group: str, event: Event) -> None:
        standing = self.standing(task.id, group)
        standing.move(event)
        standing.row = "DONE", standing.attempt
        assert task.standings is not None
        if not task.active() and all(s.state is not State.DEAD for s in task.standings.values()):
            self._end(task, standing.state.value)

    def _end(self, task: Task, word: str) -> None:
        del self.now.tasks[task.id]
        self.now.ended[task.id] = word

    def held(self, receipt: Receipt) -> Standing | None:
        """The standing that this receipt is the current one of."""
        task_id, group, epoch, attempt = receipt
        task = self.now.tasks.get(task_id)
        standing = (task.standings or {}).get(group) if task is not None else None
        if standing is None or standing.state is not State.IN_FLIGHT:
            return None
        return standing if (standing.epoch, standing.attempt) == (epoch, attempt) else None

    def nack(self, standing: Standing, at_ms: int) -> str:
        if standing.attempt > self.retry.retries_max:
            standing.move(Event.GIVE_UP)
            standing.row = None
            return "dead"
        standing.move(Event.NACK)
        standing.at_ms = at_ms
        standing.row = "WAITING", standing.attempt
        return "retrying"

    def reject(self, standing: Standing) -> None:
        standing.move(Event.REJECT)
        standing.row = None

    def release(self, standing: Standing) -> None:
        standing.move(Event.RELEASE)
        standing.attempt -= 1
        standing.row = ("RELEASED", standing.attempt) if standing.attempt else None

    # --- commands by id ------------------------------------------------------------------------

    def word(self, task_id: int) -> str:
        task = self.now.tasks.get(task_id)
        if task is not None:
            return task.state.value
        return self.now.ended.get(task_id, "unknown")

    def cancel(self, task_id: int) -> str:
        word = self.word(task_id)
        if word not in (State.SCHEDULED, State.READY, State.WAITING):
            return "already_cancelled" if word == "cancelled" else word
        task = self.now.tasks[task_id]
        task.move_all(Event.CANCEL)
        self._end(task, "cancelled")
        return "cancelled"

    def reschedule(self, task_id: int, due_ms: int) -> str:
        word = self.word(task_id)
        if word not in (State.SCHEDULED, State.READY, State.WAITING):
            return "already_cancelled" if word == "cancelled" else word
        task = self.now.tasks[task_id]
        standings = list((task.standings or {}).values())
        if all(s.state in (State.READY, State.WAITING) and s.row is None for s in standings):
            task.move_all(Event.RESCHEDULE)
            task.due_ms, task.standings = due_ms, None
            return "scheduled"
        for standing in task.active().values():
            standing.move(Event.POSTPONE)
            standing.at_ms = due_ms
            standing.row = "WAITING", standing.attempt
        return "scheduled"

    def requeue(self, task_id: int, group: str) -> None:
        standing = self.standing(task_id, group)
        standing.move(Event.REQUEUE)
        standing.attempt = standing.epoch = 0

    def delete_dead(self, task_id: int, group: str) -> None:
        task, standing = self.now.tasks[task_id], self.standing(task_id, group)
        standing.move(Event.DELETE)
        standing.row = "DONE", standing.attempt
        standings = (task.standings or {}).values()
        if not task.active() and all(s.state is not State.DEAD for s in standings):
            self._end(task, "deleted")
