"""What an engine promises, written as slowly and plainly as possible.

Every task has a standing for each group it is owed to; every command is a loop over all of
them. States move along ``TRANSITIONS`` only. What a store holds is a copy of the whole content
made when a batch was sealed. Nothing here looks at the engine.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field

from support.engine_model_content import ACTIVE, FINISHED, Content, Staged, Standing, Start, Task
from tickwheel.model.policies import RetryPolicy
from tickwheel.model.records import BY_DUE_ALONE, Event, State

CHECKPOINT_MS = 100
DEATHS_MAX = 2
SCAN_MS = 21
"""Maximum milliseconds between the end of a lease and its scan."""

Receipt = tuple[int, str, int, int]
"""(id, group, epoch, attempt)"""


@dataclass
class Rate:
    """A rate limit, and the times of deliveries since it was set."""

    rate: float
    burst: float
    since_mono_ms: int
    sent_mono_ms: list[int] = field(default_factory=list)

    def tokens(self, mono_ms: int) -> float:
        """Return the tokens left, simulated from the beginning."""
        tokens, at_ms = float(self.burst), self.since_mono_ms
        for moment_ms in (*self.sent_mono_ms, mono_ms):
            tokens = min(float(self.burst), tokens + (moment_ms - at_ms) * self.rate / 1000) - 1
            at_ms = moment_ms
        return tokens + 1


class Model:
    """``now`` is the current content; ``durable`` is what a crash leaves."""

    def __init__(self, retry: RetryPolicy) -> None:
        self.retry = retry
        self.now = Content()
        self.durable = Content()
        self.open = Staged()
        self.sealed: Staged | None = None
        self.snapshot = Content()
        self.epoch = 1
        self.newest: dict[tuple[int, str], tuple[int, int]] = {}
        """(epoch, attempt) of the newest delivery since the start, also of a task that has been
        scheduled anew."""
        self.once: set[tuple[int, str]] = set()
        """What at-most-once consumers were sent."""
        self.rates: dict[tuple[str, str], Rate] = {}
        """The limits there are, with what they let through; for (topic, group) and (topic, "")."""

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
                    standing.row = standing.noted("IN_FLIGHT")
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

    def restart(self, ends_mono_ms: dict[tuple[int, str], int], now_ms: int, id_mark: int) -> None:
        """Continue from the durable content. `ends_mono_ms` are the ends of the kept leases."""
        self.now = deepcopy(self.durable)
        self._begin_again(now_ms, id_mark)
        self.now.restored = {
            key for key, settings in self.now.settings.items() if settings.closed_ms is not None
        }
        self.open, self.sealed = Staged(), None
        self.newest.clear()
        self.epoch += 1
        for task in self.now.tasks.values():
            standings = task.standings or {}
            dead = [s for s in standings.values() if s.state is State.DEAD]
            if not dead and all(s.row is None for s in standings.values()):
                task.standings = None
                continue
            owed = self.now.ever_owed(task)
            for group in [g for g, s in standings.items() if s.row is None and g not in owed]:
                # Its share was not recorded, and nothing says any more that it had one.
                if standings[group].state in ACTIVE:
                    del standings[group]
            for group in owed:
                standings.setdefault(group, Standing()).coming = False
            for group, standing in standings.items():
                self._restore(standing, ends_mono_ms.get((task.id, group), 0))
        for task in list(self.now.tasks.values()):
            if task.standings and not task.holds():
                self._end(task, "deleted")

    def _begin_again(self, now_ms: int, id_mark: int) -> None:
        """Give groups with a reached future start their place."""
        for topic, groups in self.now.groups.items():
            for name in self.now.live(topic):
                if groups[name].id == BY_DUE_ALONE and groups[name].ms <= now_ms:
                    groups[name] = groups[name]._replace(id=id_mark)

    @staticmethod
    def _restore(standing: Standing, end_mono_ms: int) -> None:
        if standing.state not in ACTIVE:
            return
        word, *counts = standing.row or ("", 0, 0, 0)
        standing.attempt, standing.failed, standing.deaths = counts
        waits, flies = word == "WAITING", word == "IN_FLIGHT"
        standing.state = State.WAITING if waits else State.IN_FLIGHT if flies else State.READY
        standing.end_mono_ms = end_mono_ms

    # --- time ----------------------------------------------------------------------------------

    def due(self, task: Task) -> None:
        """Make a task owed to the current groups."""
        if task.standings is None:
            if self.was_closed(task):
                self._end(task, "deleted")
                return
            task.standings = {}
            for group in self.now.owed_groups(task):
                task.standings[group] = scheduled = Standing(State.SCHEDULED)
                scheduled.epoch, scheduled.attempt = self.newest.get((task.id, group), (0, 0))
                scheduled.move(Event.DUE)

    def was_closed(self, task: Task) -> bool:
        """Return whether only groups whose deletion a restart resumes were owed the task."""
        now, topic = self.now, task.topic
        owed = now.ever_owed(task)
        return bool(owed) and all((topic, name) in now.restored for name in owed)

    def add_group(self, topic: str, group: str, start: Start) -> None:
        """Add a group with the start that the engine chose for it."""
        groups = self.now.groups.setdefault(topic, {})
        if group in groups:
            return
        was_empty, live = not groups, self.now.live(topic)
        closed_ms = [self.now.set(topic, name).closed_ms or 0 for name in groups]
        assert live or start.ms == (0 if was_empty else 1 + max(closed_ms))
        for name in self.now.earliest(topic):
            if groups[name].ms > start.ms:
                groups[name] = groups[name]._replace(ms=max(0, start.ms - 1))
        groups[group] = start
        for task in self.now.tasks.values():
            if task.topic != topic or task.standings is None or group in task.standings:
                continue
            if was_empty:
                task.standings[group] = Standing()
            elif live and self.now.begins_by(task, group):
                task.standings[group] = Standing(coming=True)

    def see_coming(self, places: dict[tuple[int, str], str]) -> None:
        """Let a replay reach a task, and drop what no other group holds."""
        for task_id, group in self.now.coming():
            task = self.now.tasks[task_id]
            assert task.standings is not None
            others = {s.state for g, s in task.standings.items() if g != group and not s.coming}
            if places.get((task_id, group)) == "ready":
                task.standings[group].coming = False
            else:
                assert others - set(FINISHED), f"{task_id} is nobody's, and owed to {group}"

    # --- groups that are deleted ---------------------------------------------------------------

    def close_group(self, topic: str, group: str) -> None:
        """Begin the deletion of a group. It gets no further tasks, and its replay ends."""
        for task in self.now.tasks.values():
            standing = (task.standings or {}).get(group) if task.topic == topic else None
            if standing is not None and standing.coming:
                assert task.standings is not None
                del task.standings[group]

    def drop_share(self, task: Task, group: str) -> None:
        """Remove a group's standing of a task."""
        assert task.standings is not None
        del task.standings[group]
        if not task.holds():
            self._end(task, "deleted")

    def remove_group(self, topic: str, group: str) -> None:
        """Complete the deletion of a group."""
        del self.now.groups[topic][group]
        self.now.settings.pop((topic, group))
        self.now.restored.discard((topic, group))
        for task in self.now.tasks.values():
            if task.topic == topic:
                self.newest.pop((task.id, group), None)
                standing = (task.standings or {}).get(group)
                assert standing is None or standing.state in FINISHED, "it still holds a task"

    def deliver(self, task: Task, group: str, mono_ms: int, lease_ms: int) -> int:
        """Deliver a task. Return its attempt, which is unique within the group."""
        standing = self.standing(task.id, group)
        standing.move(Event.DELIVER)
        standing.attempt += 1
        standing.epoch = self.epoch
        self.newest[task.id, group] = self.epoch, standing.attempt
        standing.since_mono_ms, standing.end_mono_ms = mono_ms, mono_ms + lease_ms
        return standing.attempt

    def hold(self, task: Task, group: str) -> None:
        """Hold a task back, because the clock was set back before its delivery."""
        standing = self.standing(task.id, group)
        standing.move(Event.HOLD)
        standing.at_ms = task.due_ms
        if standing.row is not None:
            standing.row = standing.noted("WAITING")

    def expire(self, task: Task, group: str) -> None:
        self._finish(task, group, Event.EXPIRE)

    def set_rate(
        self, key: tuple[str, str], rate: float | None, burst: int | None, mono_ms: int
    ) -> None:
        """Set a limit; it starts no fuller than the previous one."""
        before = self.rates.pop(key, None)
        if rate is not None:
            size = burst if burst is not None else max(1.0, rate)
            fresh = self.rates[key] = Rate(rate, size, mono_ms)
            if before is not None:
                left = int(before.tokens(mono_ms) + 1e-6)
                fresh.sent_mono_ms += [mono_ms] * max(0, int(size) - left)

    def expire_without_group(self, task: Task) -> None:
        """Expire a task that no group could have taken."""
        self._end(task, "expired")

    def policy(self, task: Task, group: str) -> RetryPolicy:
        own = task.retry
        for found in (self.now.set(task.topic, group).retry, self.now.set(task.topic, "").retry):
            own = own or (found if isinstance(found, RetryPolicy) else None)
        return own or self.retry

    def lease_over(self, task: Task, group: str) -> None:
        standing = self.standing(task.id, group)
        standing.failed += 1
        if standing.failed > self.policy(task, group).retries_max:
            standing.move(Event.GIVE_UP)
            standing.row = None
        else:
            standing.move(Event.LEASE_OVER)
            standing.row = standing.noted("RELEASED")

    def died(self, task: Task, group: str, now_ms: int) -> None:
        """End an attempt because its consumer died, without counting a failure."""
        standing = self.standing(task.id, group)
        standing.deaths += 1
        if standing.deaths >= DEATHS_MAX:
            standing.move(Event.GIVE_UP)
            standing.row = None
            return
        standing.move(Event.CONSUMER_DIED)
        standing.at_ms = now_ms + 1_000 * 2 ** (standing.deaths - 1)
        standing.row = standing.noted("WAITING")

    def written_once(self, task_id: int, group: str) -> None:
        """End an at-most-once delivery durably."""
        assert (task_id, group) not in self.once, "sent twice, though at most once was promised"
        self.once.add((task_id, group))
        task = self.durable.tasks.get(task_id)
        if task is not None:
            assert task.standings is not None
            assert task.standings[group].state in FINISHED, "sent before its end was durable"

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
        if standing is None or standing.coming:
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
        word = "EXPIRED" if event is Event.EXPIRE else "DONE"
        standing.row = word, standing.attempt, 0, 0
        assert task.standings is not None
        if not task.holds():
            self._end(task, standing.state.value)

    def _end(self, task: Task, word: str) -> None:
        del self.now.tasks[task.id]
        self.now.ended[task.id] = word

    def held(self, receipt: Receipt) -> Standing | None:
        """Return the standing whose current receipt this is."""
        task_id, group, epoch, attempt = receipt
        task = self.now.tasks.get(task_id)
        standing = (task.standings or {}).get(group) if task is not None else None
        if standing is None or standing.state is not State.IN_FLIGHT:
            return None
        return standing if (standing.epoch, standing.attempt) == (epoch, attempt) else None

    def nack(self, task: Task, group: str, at_ms: int) -> str:
        standing = self.standing(task.id, group)
        standing.failed += 1
        if standing.failed > self.policy(task, group).retries_max:
            standing.move(Event.GIVE_UP)
            standing.row = None
            return "dead"
        standing.move(Event.NACK)
        standing.at_ms = at_ms
        standing.row = standing.noted("WAITING")
        return "retrying"

    def reject(self, standing: Standing) -> None:
        standing.move(Event.REJECT)
        standing.row = None

    def release(self, standing: Standing) -> None:
        """End a delivery without counting it.

        A standing with no counted attempt starts again, except for its next attempt number."""
        standing.move(Event.RELEASE)
        has_past = standing.failed or standing.deaths
        standing.row = standing.noted("RELEASED") if has_past else None

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
            standing.coming = False
            standing.at_ms = due_ms
            standing.row = standing.noted("WAITING")
        return "scheduled"

    def requeue(self, task_id: int, group: str) -> None:
        standing = self.standing(task_id, group)
        standing.move(Event.REQUEUE)
        standing.failed = standing.deaths = 0
        self.newest[task_id, group] = standing.epoch, standing.attempt

    def delete_dead(self, task_id: int, group: str) -> None:
        task, standing = self.now.tasks[task_id], self.standing(task_id, group)
        standing.move(Event.DELETE)
        standing.row = "DONE", standing.attempt, 0, 0
        if not task.holds():
            self._end(task, "deleted")
