"""The judge of a torture run: reads the clients' records and nothing else.

What "after a confirmation" means, soundly, with frames of several connections in flight: a
delivery was written after a confirmation was written if one of these holds.

* Both came on one connection, the delivery later.
* The delivery carries a higher epoch than the daemon that confirmed: that daemon was dead
  before the delivery's daemon began.
* The daemon stamped the delivery (before it decided on it) later than the moment at which the
  client had the confirmation in hand; both clocks are the same machine's, or it is known what
  the daemon's showed when (``clocks``).

Deliveries that were merely on their way when the confirmation came satisfy none of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from crash.clocks import Clocks
from crash.owed import PendingGroups, Task
from crash.records import (
    Accepted,
    Cast,
    Delivered,
    Finished,
    GroupLife,
    Journal,
    Looked,
    Moved,
    Retry,
)
from tickwheel.model.records import ID_STEP

SHOWN_MAX = 20
Key = tuple[int, str]


@dataclass(slots=True)
class Verdict:
    """The result of a check; a run is correct if ``violations`` is empty."""

    violations: list[str] = field(default_factory=list)
    tasks: int = 0
    refused: int = 0
    deliveries: int = 0
    duplicates: int = 0
    """Deliveries of a task to a group beyond the first: allowed, and worth knowing."""
    resent: int = 0
    placed: int = 0
    """Tasks with a due window whose moment is later than what they asked for."""
    acked: int = 0
    cancelled: int = 0
    expired: int = 0
    dropped: int = 0
    """At most once: taken, and never seen. A crash and a broken connection may do that."""
    owed_to_lives: int = 0
    """Pairs of a task and a group of the nemesis that were judged."""
    cast: int = 0
    """Deliveries of broadcasts."""

    def text(self) -> str:
        lines = [
            f"tasks {self.tasks} ({self.placed} placed in windows), refused {self.refused},"
            f" requests resent {self.resent},"
            f" deliveries {self.deliveries} ({self.duplicates} of them repeated),"
            f" acked {self.acked}, cancelled {self.cancelled}, expired {self.expired},"
            f" at most once and lost {self.dropped}, broadcast {self.cast},"
            f" owed to groups of the nemesis {self.owed_to_lives},"
            f" violations {len(self.violations)}"
        ]
        lines += [f"VIOLATION {text}" for text in self.violations[:SHOWN_MAX]]
        if len(self.violations) > SHOWN_MAX:
            lines.append(f"… and {len(self.violations) - SHOWN_MAX} more")
        return "\n".join(lines)


def check(
    journals: Sequence[Journal],
    groups: Mapping[str, Sequence[str]],
    *,
    once: Container[str] = (),
    clocks: Clocks | None = None,
    unbroken: bool = False,
) -> Verdict:
    """``groups`` says which groups of a topic must get its tasks; ``once`` are topics whose
    groups take them at most once; ``unbroken``: no daemon and no connection was broken."""
    return _Check(journals, groups, once, clocks or Clocks(), unbroken).run()


class _Check:
    def __init__(
        self,
        journals: Sequence[Journal],
        groups: Mapping[str, Sequence[str]],
        once: Container[str],
        clocks: Clocks,
        unbroken: bool,
    ) -> None:
        self._journals = journals
        self._groups = groups
        self._once = once
        self._clocks = clocks
        self._shown: dict[int, int] = {}
        """When a clock can have shown a time first."""
        self._unbroken = unbroken
        self._verdict = Verdict()
        self._wrong = self._verdict.violations
        self._tasks: dict[int, Task] = {}
        """By id: every acknowledged task."""
        self._id_of: dict[str, int] = {}
        self._deliveries: dict[Key, list[Delivered]] = defaultdict(list)
        self._ends: dict[Key, list[Finished]] = defaultdict(list)
        self._cancels: dict[int, list[Finished]] = defaultdict(list)
        self._moves: dict[int, list[Moved]] = defaultdict(list)
        self._requeued: dict[Key, int] = {}
        self._looked: dict[int, str] = {}
        self._lives: list[GroupLife] = []
        self._lives_of: dict[str, list[GroupLife]] = defaultdict(list)
        """By name, of all topics."""
        self._casts: list[Cast] = []

    def run(self) -> Verdict:
        for journal in self._journals:
            self._read(journal)
        for journal in self._journals:
            for looked in journal.looked:
                self._look(looked)
        self._one_id_for_a_request()
        self._nothing_refused_comes()
        for key, deliveries in self._deliveries.items():
            for delivery in deliveries:
                self._not_early(delivery)
                self._as_it_was_sent(delivery)
                self._not_after_its_end(key, delivery)
            self._not_twice(key, deliveries)
        for journal in self._journals:
            for retry in journal.retries:
                self._delay_of_nack_kept(retry)
        self._ended_as_it_may()
        self._none_lost()
        self._owed_to_lives()
        for cast in self._casts:
            self._cast_whole(cast)
        self._count()
        return self._verdict

    def _is_after(self, confirmed: Finished | Retry, delivery: Delivered) -> bool:
        """Whether ``delivery`` was certainly written after ``confirmed`` was: see the module."""
        if delivery.connection == confirmed.connection >= 0 and delivery.order > confirmed.order:
            return True
        if delivery.epoch > confirmed.epoch:
            return True
        return self._stamped(delivery) > confirmed.got_ms

    def _stamped(self, delivery: Delivered) -> int:
        """The machine's earliest moment at which that can have been."""
        stamp_ms = delivery.delivered_ms
        if stamp_ms not in self._shown:
            self._shown[stamp_ms] = self._clocks.first_shown(stamp_ms)
        return self._shown[stamp_ms]

    def _read(self, journal: Journal) -> None:
        self._wrong += [f"{journal.client}: {text}" for text in journal.odd]
        self._verdict.resent += journal.resent
        self._verdict.placed += journal.placed
        for accepted in journal.accepted:
            self._accept(journal.client, accepted)
        for delivery in journal.delivered:
            self._deliveries[delivery.id, delivery.group].append(delivery)
        for end in journal.finished:
            if end.group is None:
                self._cancels[end.id].append(end)
            else:
                self._ends[end.id, end.group].append(end)
        for move in journal.moved:
            self._moves[move.id].append(move)
        for again in journal.requeued:
            key = again.id, again.group
            self._requeued[key] = min(again.sent_ms, self._requeued.get(key, again.sent_ms))
        self._lives += journal.groups
        for life in journal.groups:
            self._lives_of[life.group].append(life)
        self._casts += journal.casts

    def _accept(self, client: str, accepted: Accepted) -> None:
        if len(accepted.ids) != len(accepted.tokens):
            self._wrong.append(f"{client}: {len(accepted.tokens)} tasks got {accepted.ids}")
            return
        for token, task_id, due_ms in zip(
            accepted.tokens, accepted.ids, accepted.dues_ms, strict=True
        ):
            fresh = Task(
                task_id,
                accepted.topic,
                token,
                due_ms,
                accepted.ttl_ms,
                accepted.priority,
                accepted.sent,
                accepted.order,
                accepted.within_ms,
            )
            if self._id_of.setdefault(token, task_id) != task_id:
                self._wrong.append(
                    f"duplicate: {token} was answered with id {self._id_of[token]} and {task_id}"
                )
            if self._tasks.setdefault(task_id, fresh)[:4] != fresh[:4]:
                self._wrong.append(
                    f"duplicate: id {task_id} was given as {self._tasks[task_id]} and {fresh}"
                )

    def _one_id_for_a_request(self) -> None:
        result: dict[str, set[int]] = defaultdict(set)
        for deliveries in self._deliveries.values():
            for delivery in deliveries:
                result[delivery.token].add(delivery.id)
        for token, task_id in self._id_of.items():
            result[token].add(task_id)
        self._wrong += [
            f"duplicate: {token} is several tasks: {sorted(ids)}"
            for token, ids in result.items()
            if len(ids) > 1
        ]

    def _nothing_refused_comes(self) -> None:
        came = {d.token for ds in self._deliveries.values() for d in ds} | self._id_of.keys()
        for journal in self._journals:
            for refused in journal.refused:
                self._verdict.refused += len(refused.tokens)
                self._wrong += [
                    f"{journal.client}: {token} was refused ({refused.code}) and is there"
                    for token in refused.tokens
                    if token in came
                ]

    def _not_early(self, delivery: Delivered) -> None:
        shown = f"{delivery.token} (id {delivery.id}, group {delivery.group})"
        if delivery.delivered_ms < delivery.due_ms:
            self._wrong.append(f"early: {shown}: {delivery}")
        elif not self._clocks.may_have_shown(
            delivery.delivered_ms, delivery.since_ms, delivery.got_ms
        ):
            self._wrong.append(f"early: {shown}: no clock has shown its stamp: {delivery}")
        task = self._tasks.get(delivery.id)
        if task is None:
            return  # its answer was lost and its client gave up: nobody was promised anything
        moves = self._moves[delivery.id]
        allowed = [task.due_ms, *(move.due_ms for move in moves)]
        # One that arrived after its own due time counted from its arrival.
        late = any(m.got_ms is None and m.due_ms <= delivery.due_ms for m in moves)
        is_placed = task.due_ms <= delivery.due_ms <= task.due_ms + task.within_ms
        if delivery.due_ms not in allowed and not late and not is_placed:
            self._wrong.append(f"due: {shown} came with a due time it never had: {delivery}")
        if moves:
            stamped_ms = self._stamped(delivery)
            settled = [
                index
                for index, move in enumerate(moves, 1)
                if move.got_ms is not None and move.got_ms < stamped_ms
            ]
            since = settled[-1] if settled else 0
            if delivery.delivered_ms < min(allowed[since:]):
                self._wrong.append(f"early: {shown}, due {allowed} (rescheduled): {delivery}")

    def _as_it_was_sent(self, delivery: Delivered) -> None:
        task = self._tasks.get(delivery.id)
        if task is None:
            return
        if delivery.priority != task.priority:
            self._wrong.append(f"priority: {task.token} had {task.priority}: {delivery}")
        again_ms = self._requeued.get((delivery.id, delivery.group))
        if again_ms is not None and delivery.got_ms >= again_ms:
            return  # a requeue may give it a new time to live
        if task.ttl_ms is not None and delivery.delivered_ms > delivery.due_ms + task.ttl_ms:
            self._wrong.append(f"late: {task.token} had expired ({task.ttl_ms} ms): {delivery}")

    def _not_twice(self, key: Key, deliveries: Sequence[Delivered]) -> None:
        if len(deliveries) > 1 and any(delivery.once for delivery in deliveries):
            self._wrong.append(f"twice: at most once, and came {len(deliveries)} times: {key}")

    def _not_after_its_end(self, key: Key, delivery: Delivered) -> None:
        for end in (*self._ends[key], *self._cancels[key[0]]):
            if not self._is_after(end, delivery):
                continue
            again_ms = self._requeued.get(key)
            if end.group is not None and self._made_anew(end, delivery):
                continue
            if end.how == "dead" and again_ms is not None and delivery.got_ms >= again_ms:
                continue
            self._wrong.append(f"again: {delivery.token} came after {end}: {delivery}")

    def _made_anew(self, end: Finished | Retry, delivery: Delivered) -> bool:
        """A group of that name was made in between: it owes the task by itself."""
        return any(
            end.order < life.confirmed and life.sent < delivery.order
            for life in self._lives_of.get(end.group or "", ())
        )

    def _delay_of_nack_kept(self, retry: Retry) -> None:
        if self._moves[retry.id]:
            return
        for delivery in self._deliveries[retry.id, retry.group]:
            if self._made_anew(retry, delivery):
                continue
            # A clock may have been there once, and been set back since.
            reached_ms = delivery.delivered_ms
            if not self._clocks.are_true:
                meanwhile = min(retry.got_ms, delivery.got_ms), delivery.got_ms
                reached_ms = max(reached_ms, self._clocks.high(*meanwhile))
            if self._is_after(retry, delivery) and reached_ms < retry.not_before_ms:
                self._wrong.append(f"early: after {retry}: {delivery}")

    def _look(self, looked: Looked) -> None:
        self._looked[looked.id] = looked.state
        task = self._tasks.get(looked.id)
        if looked.state != "expired" or task is None:
            return
        over_ms = task.due_ms + (task.ttl_ms or 0)
        if task.ttl_ms is None:
            self._wrong.append(f"expired: {task.token} has no ttl")
        elif self._clocks.high(0, looked.got_ms) < over_ms:
            self._wrong.append(f"expired: {task.token} before {over_ms}, its end: {looked}")

    def _ended_as_it_may(self) -> None:
        lived_through = {life.topic for life in self._lives}
        for task_id, state in self._looked.items():
            task = self._tasks[task_id]
            if task.topic in lived_through and state == "deleted":
                continue  # all groups that owed it were deleted; who still owes it is judged
            if state not in ("acked", "expired", "cancelled"):
                self._wrong.append(f"lost: {task.token} (id {task_id}) is {state!r} at the end")

    def _none_lost(self) -> None:
        for task_id, task in self._tasks.items():
            if self._cancels[task_id] or self._looked.get(task_id) == "expired":
                continue
            for group in self._groups.get(task.topic, ()):
                if task.topic in self._once:
                    self._may_be_dropped(task, group)
                else:
                    self._delivered_and_acked(task, group, 0, "")

    def _may_be_dropped(self, task: Task, group: str) -> None:
        if self._deliveries[task.id, group]:
            return
        self._verdict.dropped += 1
        if self._unbroken:
            self._wrong.append(f"lost: {task.token} (id {task.id}), at most once, nothing broke")
        elif self._looked.get(task.id) != "acked":
            self._wrong.append(f"lost: {task.token} (id {task.id}) never came to {group}")

    def _delivered_and_acked(self, task: Task, group: str, since: int, why: str) -> None:
        """Only events received after the place `since` count."""
        key = task.id, group
        if not any(d.order > since or d.order == 0 for d in self._deliveries[key]):
            self._wrong.append(f"lost: {task.token} (id {task.id}) never came to {group}{why}")
        elif not _acked(e for e in self._ends[key] if e.order > since or e.order == 0):
            self._wrong.append(
                f"lost: {task.token} (id {task.id}) came to {group} and its ack was never"
                f" confirmed{why}"
            )

    def _owed_to_lives(self) -> None:
        """What each group of the nemesis is owed: see ``crash.owed``."""
        owed = PendingGroups(self._lives, self._deliveries, by_time=self._clocks.are_true)
        topics = {life.topic for life in self._lives}
        tasks = [task for task in self._tasks.values() if task.topic in topics]
        for task in tasks:
            if self._cancels[task.id] or self._looked.get(task.id) == "expired":
                continue
            for life, why in owed.of(task):
                self._verdict.owed_to_lives += 1
                why = f"{why}; it is {self._looked.get(task.id)} in the end"
                self._delivered_and_acked(task, life.group, life.sent, f" ({why}): {life}")

    def _cast_whole(self, cast: Cast) -> None:
        """A broadcast: nothing twice while nothing moves, nothing left out while it stands."""
        counted = Counter(delivery.id for delivery in cast.delivered)
        self._verdict.cast += len(cast.delivered)
        for delivery in cast.delivered:
            self._not_early(delivery)
            self._as_it_was_sent(delivery)
        if self._clocks.are_true:
            self._wrong += [
                f"twice: id {task_id} was broadcast {count} times on one connection"
                for task_id, count in counted.items()
                if count > 1 and not self._moves[task_id]
            ]
        if not cast.lost:
            self._wrong += [
                f"lost: {task.token} (id {task.id}) was not broadcast"
                for task in self._tasks.values()
                if task.topic == cast.topic and task.sent > cast.confirmed
                if cast.shard in (None, task.id % ID_STEP)
                if task.id not in counted and not self._cancels[task.id]
            ]

    def _count(self) -> None:
        verdict = self._verdict
        verdict.tasks = len(self._tasks)
        verdict.cancelled = sum(1 for ends in self._cancels.values() if ends)
        verdict.acked = sum(1 for ends in self._ends.values() if _acked(ends))
        verdict.expired = sum(1 for state in self._looked.values() if state == "expired")
        for deliveries in self._deliveries.values():
            verdict.deliveries += len(deliveries)
            verdict.duplicates += max(0, len(deliveries) - 1)


def _acked(ends: Iterable[Finished]) -> bool:
    return any(end.how == "acked" for end in ends)
