"""All ways in which a delivery ends, and dead letters.

| end | credit returns | state of the task in its group |
|---|---|---|
| ack | ahead of the commit | finished; it ends when the last group has finished it |
| nack | ahead of the commit | waits for its next attempt, or a dead letter without one |
| reject, cannot be sent | ahead of the commit | a dead letter |
| release | ahead of the commit | ready, before other tasks; nothing is counted |
| snooze | ahead of the commit | waits as long as its consumer wants; no failure is counted |
| lease over | at once, in doubt | ready, after other tasks; or a dead letter |
| consumer died | at once | waits, and might be isolated at its next attempt; or a dead letter |
| group deleted | at once | leaves the group; see ``groups`` |

If a newer task with the same key has replaced the task (``Past.replaced_by``), the task gets no
further attempt and does not become a dead letter: unless it is acked or its group is deleted, it is
cancelled.

"Ahead of the commit" applies to ``acks_ahead_max`` ends of a subscription that are not durable;
further credit returns with the commit (``topics.Subscriber``).

Invariants: only ``Settlement.end`` removes leases from ``Group.flight``. An ack takes effect in
memory at once, so a lease cannot end while its ack is being committed. Acks are never undone.

Dead letters (``DeadLetters``) are tasks on which a group has given up; an operator can requeue or
delete them. The body stays in the task's row, which exists as long as a group keeps the task as a
dead letter or has not finished it. Memory contains only counts of dead letters (``Group.dead``,
``Core.dead``), which only this module changes. See also ``ownership``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from tickwheel.engine.events import DELETED
from tickwheel.engine.ownership import Ownership, is_done
from tickwheel.engine.state import Core
from tickwheel.engine.topics import (
    DeliveryAttempts,
    Group,
    Lease,
    Subscriber,
    has_order,
    ttl_end_ms,
)
from tickwheel.model.records import (
    ATTEMPT_MAX,
    CONSUMER_DIED,
    NO_PAST,
    ORDER_HOLD,
    ORDER_RETRY,
    DeadRow,
    Failure,
    OrderRules,
    Outcome,
    ProgressState,
    TaskOptions,
    TaskRow,
    TaskSnapshot,
)

EXPIRY_SCAN_GAP_MS_MIN = 20
"""Minimum time between scans for ended leases, so that many deadlines cost few scans."""
EXPIRY_SCAN_LEASES_PER_MS = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class LeaseEnd:
    """The reason for the end of a lease, and its direct effects: one of the constants below."""

    why: str
    is_confirmed: bool = True
    """Whether credit waits until the end is durable: only if the consumer requested the end."""
    raises_doubt: bool = False
    """Whether the consumer of the lease might be dead."""


ACKED = LeaseEnd("acked")
NACKED = LeaseEnd("nacked or rejected: the attempt failed")
RELEASED = LeaseEnd("returned unstarted")
SNOOZED = LeaseEnd("postponed by its consumer")
UNFIT = LeaseEnd("cannot be sent to any subscriber")
LAPSED = LeaseEnd("over by time, or connection lost", is_confirmed=False, raises_doubt=True)
DIED = LeaseEnd("its consumer died", is_confirmed=False)
GROUP_CLOSED = LeaseEnd("its group is being deleted", is_confirmed=False)


class Verdict(NamedTuple):
    """The consequences of a failed attempt."""

    failure: Failure
    wait_ms: int | None
    """Time until the next attempt; None if there is none."""
    holds_key: bool = False
    """Whether the order key is held, instead of making the task a dead letter."""


class Snooze(NamedTuple):
    """The postponement of a delivery."""

    until_ms: int


class Settlement:
    """The verbs that end or extend deliveries, and the timeout of leases."""

    def __init__(self, core: Core, ownership: Ownership, dead_letters: DeadLetters) -> None:
        self._core = core
        self._ownership = ownership
        self._dead_letters = dead_letters
        self._over: deque[Lease] = deque()
        """Leases that had timed out when a search found them and that must be ended."""

    def ack(
        self, group: Group, epoch: int, ids: Sequence[int], attempts: Sequence[int]
    ) -> list[int]:
        """Ack tasks in flight. Return the indexes of receipts that need the stored records."""
        flight = group.flight
        unresolved: list[int] = []
        leases = _current(flight, epoch, ids, attempts)
        if leases:
            self.end(ACKED, group, leases)
            return unresolved
        for index, task_id in enumerate(ids):
            lease, attempt = flight.get(task_id), attempts[index]
            # Attempts begin at 1. A receipt with a lower number was never issued.
            if (
                lease is None
                or epoch != lease.epoch
                or not 0 < attempt <= lease.attempt
                or (lease.order and attempt != lease.attempt)
                or task_id in leases
            ):
                unresolved.append(index)
                continue
            leases[task_id] = lease
        if leases:
            self.end(ACKED, group, leases)
        return unresolved

    def ack_idle(
        self, group: Group, epoch: int, task_id: int, attempt: int, snapshot: TaskSnapshot
    ) -> str:
        """Ack an unfinished task for which ``ack`` could not judge the receipt, because the receipt
        is not the newest or a crash has lost the delivery. Return the outcome word."""
        core, row = self._core, snapshot.row
        if row.topic != group.topic.name or epoch < 1 or not 0 < attempt <= ATTEMPT_MAX:
            return "stale"
        # Its body might be newer than a delivery that a crash has lost.
        is_placed = row.options is not None and row.options.order_id is not None
        lease = group.flight.get(task_id)
        if lease is not None:
            if epoch >= core.epoch or lease.order or is_placed:
                return "stale"
            # A crash lost this delivery, but not earlier ones.
            self.ack(group, lease.epoch, [task_id], [lease.attempt])
            return "acked"
        if is_done(snapshot, group):
            return "done"
        attempts = group.delivery_attempts.get(task_id)
        newest = (core.epoch, group.numbers.get(task_id, 0))
        if attempts is not None:
            newest = attempts.epoch or core.epoch, attempts.attempt
        # A crash can lose deliveries, so receipts of earlier epochs are accepted for the same body.
        if (epoch >= core.epoch and (epoch, attempt) > newest) or (is_placed and epoch < newest[0]):
            return "stale"
        # With an order key they are refused, because there may have been a later delivery. No
        # receipt is valid for a task that was returned unstarted or reset.
        is_sure = (
            attempts is not None and attempts.epoch >= core.epoch and (epoch, attempt) == newest
        )
        if (has_order(row) and not is_sure) or not self._ownership.is_owed(group, task_id):
            return "stale"
        if attempts is None and core.is_scheduled(row):
            if epoch >= core.epoch or len(group.topic.groups) > 1:
                return "stale"
            # A crash lost the delivery, and the task has not fired again yet.
            core.unschedule(row)
        else:
            core.leave(group, row)
        attempt = max(attempt, newest[1])
        ended = self._ownership.finish(group, row)
        if not ended:
            core.note_done(task_id, group, attempt, epoch)
        core.recorder.acked_without_lease(group, task_id, attempt, ended=ended)
        self._count(ACKED, group, 1)
        return "acked"

    def current(self, group: Group, task_id: int, epoch: int, attempt: int) -> Lease | None:
        """Return the lease of the receipt if the receipt is current, otherwise None."""
        lease = group.flight.get(task_id)
        if lease is None or lease.attempt != attempt or lease.epoch != epoch:
            return None
        return lease

    def is_newest(self, group: Group, task_id: int, epoch: int, attempt: int) -> bool:
        """Return whether no later delivery of the task is known."""
        lease = group.flight.get(task_id)
        if lease is not None:
            return (lease.epoch, lease.attempt) == (epoch, attempt)
        attempts = group.delivery_attempts.get(task_id)
        if attempts is not None:
            return (epoch, attempt) >= (attempts.epoch or self._core.epoch, attempts.attempt)
        return (epoch, attempt) >= (self._core.epoch, group.numbers.get(task_id, 0)) or (
            epoch < self._core.epoch and task_id not in group.numbers
        )

    def nack(self, lease: Lease, delay_ms: int | None, reason: str | None, now_ms: int) -> str:
        """Record a failed attempt: the task waits for the next one, becomes a dead letter, or its
        key is held. Return the outcome word."""
        verdict = self._judge(lease, delay_ms, _reason(reason, "nack"), now_ms)
        self._end_one(NACKED, lease, now_ms, verdict)
        if lease.past.replaced_by:
            return "cancelled"
        if verdict.holds_key:
            return "held"
        return "dead" if verdict.wait_ms is None else "retrying"

    def _judge(self, lease: Lease, delay_ms: int | None, reason: str, now_ms: int) -> Verdict:
        """Return the verdict on a failed attempt without changing anything, so that an invalid
        policy affects only its task."""
        if lease.order:
            return _judge_ordered(lease, delay_ms, self._core.failure(lease, reason, now_ms))
        try:
            policy = self._core.policy(lease.traits.retry, lease.group)
            failed = lease.past.failed + 1
            if not policy.allows(failed):
                delay_ms = None
            elif delay_ms is None:
                delay_ms = policy.delay_ms(failed, lease.id)
        except Exception as error:
            return Verdict(self._core.fault(lease, reason, error, now_ms), None)
        return Verdict(self._core.failure(lease, reason, now_ms), delay_ms)

    def reject(self, lease: Lease, reason: str | None, now_ms: int) -> str:
        """Make the task a dead letter or hold its key, as its group says. Return the outcome."""
        failure = self._core.failure(lease, _reason(reason, "rejected"), now_ms)
        rules = OrderRules.of(lease.group.settings.order)
        holds_key = bool(lease.order) and rules.failure == ORDER_HOLD
        self._end_one(NACKED, lease, now_ms, Verdict(failure, None, holds_key))
        if lease.past.replaced_by:
            return "cancelled"
        return "held" if holds_key else "dead"

    def unfit(self, lease: Lease, error: Exception, now_ms: int, trace: str | None = None) -> None:
        """Make a task that cannot be sent to any subscriber a dead letter, with the error as its
        reason. ``trace`` is the task's trace context."""
        failure = self._core.fault(lease, "delivery", error, now_ms, trace)
        self._end_one(UNFIT, lease, now_ms, Verdict(failure, None))

    def release(self, lease: Lease, now_ms: int) -> str:
        """Make an unstarted task ready at once. No attempt is counted. Return the outcome word."""
        self._end_one(RELEASED, lease, now_ms)
        return "cancelled" if lease.past.replaced_by else "released"

    def leases_of(self, subscribers: Iterable[Subscriber]) -> Iterator[Lease]:
        """Yield the leases of these subscribers, group by group, in the order for ``release_all``:
        the newest first, because each task goes to the front of the queue. Leases can end
        meanwhile."""
        held: dict[Group, list[list[Lease]]] = {}
        for subscriber in dict.fromkeys(subscribers):
            if subscriber.held:
                newest_first = [*reversed(subscriber.held.values())]
                held.setdefault(subscriber.group, []).append(newest_first)
        for lists in held.values():
            yield from merge(*reversed(lists), key=attrgetter("since_mono_ms"), reverse=True)

    def release_all(self, leases: Iterable[Lease], now_ms: int) -> None:
        """Release the deliveries of those leases that have not ended, in this order."""
        live = (lease for lease in leases if lease.live)
        for group, part in groupby(live, key=attrgetter("group")):
            self.end(RELEASED, group, {lease.id: lease for lease in part}, now_ms)

    def snooze(self, lease: Lease, delay_ms: int, now_ms: int) -> str:
        """Postpone a task by ``delay_ms`` without counting a failure. Once ``snoozes_max`` is
        reached, the lease does not end. Return the outcome word."""
        if lease.past.snoozes >= self._core.config.snoozes_max:
            return "too_often"
        lease.past = lease.past._replace(snoozes=lease.past.snoozes + 1)
        self._end_one(SNOOZED, lease, now_ms, Snooze(now_ms + delay_ms))
        return "cancelled" if lease.past.replaced_by else "snoozed"

    def group_closed(self, lease: Lease) -> None:
        """End a lease of a group that is being deleted. The caller must finish the task."""
        self._end_one(GROUP_CLOSED, lease)

    def extend(
        self, lease: Lease, lease_ms: int, mono_ms: int, by: Subscriber | None = None
    ) -> None:
        """Set the end of the lease to ``lease_ms`` from now, which proves its consumer alive. A
        lease whose connection is gone then belongs to ``by``, the subscriber that extends it."""
        lease.deadline_mono_ms = mono_ms + lease_ms
        if lease.checkpointed:  # otherwise the lease is already in ``unsaved``
            lease.checkpointed = False
            self._core.unsaved.append(lease)
        detached = lease.group.detached
        if lease.subscriber is detached or lease.subscriber.gone_mono_ms is not None:
            lease.subscriber.held.pop(lease.id, None)
            lease.subscriber = by or detached
            if by is not None:
                by.held[lease.id] = lease
                by.outstanding += 1
                by.presence.unsettled += 1
        self._core.expires(lease.group, lease.deadline_mono_ms)

    # --- the end of a lease ----------------------------------------------------------------

    def end(
        self,
        why: LeaseEnd,
        group: Group,
        leases: Mapping[int, Lease],
        now_ms: int = 0,
        verdict: Verdict | Snooze | None = None,
    ) -> None:
        """End leases of ``group``, by task id. No other code ends leases. ``verdict`` contains the
        consequences of a failed or postponed attempt."""
        core, flight = self._core, group.flight
        is_confirmed = why.is_confirmed
        ended: dict[Subscriber, int] = {}
        for task_id, lease in leases.items():
            del flight[task_id]
            lease.live = False  # an unrecorded delivery no longer needs to be written
            subscriber = lease.subscriber
            subscriber.held.pop(task_id, None)  # absent after a restart
            if is_confirmed:
                ended[subscriber] = ended.get(subscriber, 0) + 1
                continue
            core.settled(subscriber.presence, 1)
            if why.raises_doubt:
                # Otherwise a dead consumer with an open connection would use up all attempts.
                subscriber.presence.doubt(lease)
            core.give_back(subscriber, 1)
        if group.is_ordered:
            core.orderings.by_group[group].leases_ended(leases.values(), done=why is ACKED)
        for subscriber, count in ended.items():
            core.unconfirmed(subscriber, count)
            core.settled(subscriber.presence, count)
        core.in_flight -= len(leases)
        self._count(why, group, len(leases))
        if why is ACKED:
            self._finish(group, leases)
        elif why is not GROUP_CLOSED:
            for lease in leases.values():
                self._go_on(why, lease, now_ms, verdict)

    def _end_one(
        self,
        why: LeaseEnd,
        lease: Lease,
        now_ms: int = 0,
        verdict: Verdict | Snooze | None = None,
    ) -> None:
        self.end(why, lease.group, {lease.id: lease}, now_ms, verdict)

    def _count(self, why: LeaseEnd, group: Group, count: int) -> None:
        totals = self._core.totals
        if why is ACKED:
            group.acked += count
            group.topic.acked += count
            totals.acked += count
        elif why is NACKED:
            group.nacked += count
            totals.nacked += count
        elif why is SNOOZED:
            group.snoozed += count
            totals.snoozed += count
        elif why is LAPSED:
            totals.leases_over += count
        elif why is DIED:
            group.deaths += count
            totals.deaths += count

    def _finish(self, group: Group, leases: Mapping[int, Lease]) -> None:
        """Finish the tasks of these leases for the group."""
        core = self._core
        kept: set[int] = set()
        if self._ownership.may_share(group):
            for task_id, lease in leases.items():
                if not self._ownership.finish(group, lease):
                    core.note_done(task_id, group, lease.attempt, lease.epoch)
                    kept.add(task_id)
        else:
            # No other group was owed these tasks, so memory contains only their keys.
            keys = {i: key for i, lease in leases.items() if (key := lease.traits.key) is not None}
            core.end_plain(leases, Outcome.ACKED, group.topic.name, keys)
        if core.is_recorded:
            core.recorder.acked(group, list(leases.values()), kept)

    def _go_on(
        self, why: LeaseEnd, lease: Lease, now_ms: int, verdict: Verdict | Snooze | None
    ) -> None:
        """Make the unfinished task of an ended lease ready or waiting again, or a dead letter."""
        recorder = self._core.recorder
        if lease.past.replaced_by:
            self._give_way(why, lease, verdict)
            return
        if verdict is None:
            self._ready_again(lease, now_ms, front=True)
            recorder.released(lease, None, now_ms)
            return
        if isinstance(verdict, Snooze):
            self._keep_attempts(lease, counts=False)
            self._wait(lease, verdict.until_ms)
            recorder.released(lease, verdict.until_ms, now_ms)
            return
        failure, wait_ms, holds_key = verdict
        lease.past = lease.past.with_failure(failure.brief())
        if wait_ms is None:
            if holds_key:
                self._hold_key(lease, failure, now_ms)
                return
            if lease.group.is_ordered:
                self._core.orderings.by_group[lease.group].end_dead(lease)
            self._dead_letters.to_dead_letters(lease, failure, now_ms)
            return
        if why is NACKED or why is DIED:
            until_ms = now_ms + wait_ms
            self._keep_attempts(lease)
            self._wait(lease, until_ms)
            if why is NACKED:
                recorder.nacked(lease, failure.reason, until_ms, now_ms)
            else:
                recorder.lease_over(lease, failure.reason, now_ms, until_ms)
            return
        self._ready_again(lease, now_ms, front=False)
        recorder.lease_over(lease, failure.reason, now_ms)

    def _give_way(self, why: LeaseEnd, lease: Lease, verdict: Verdict | Snooze | None) -> None:
        """Finish a task that a newer task has replaced."""
        group = lease.group
        if group.is_ordered:
            self._core.orderings.by_group[group].end_dead(lease)
        after = verdict.failure.summary if isinstance(verdict, Verdict) else why.why
        by = lease.past.replaced_by
        self._ownership.give_way(group, lease, lease.attempt, by, after)

    def _wait(self, lease: Lease, until_ms: int) -> None:
        self._core.wait(lease.group, lease.id, until_ms)
        if lease.group.is_ordered:
            self._core.orderings.by_group[lease.group].note_wait(lease)

    def _hold_key(self, lease: Lease, failure: Failure, now_ms: int) -> None:
        """Hold the task's order key until an operator acts."""
        core = self._core
        self._keep_attempts(lease)
        core.hold_key(lease.group, lease.id, lease.group.delivery_attempts[lease.id], now_ms)
        core.orderings.by_group[lease.group].hold(lease, now_ms)
        core.recorder.nacked(lease, failure.reason, None, now_ms)

    def _ready_again(self, lease: Lease, now_ms: int, *, front: bool) -> None:
        """Make a task ready again. ``front`` means that it was returned unstarted."""
        core, group, task_id = self._core, lease.group, lease.id
        self._keep_attempts(lease, counts=not front)
        if task_id in group.delivery_attempts:
            core.note_attempts(group, task_id, ProgressState.RELEASED, now_ms)
        else:
            core.open.effects.progress[task_id, group.name] = None
        if group.is_ordered:
            core.orderings.by_group[group].make_ready_again(lease, now_ms, front=front)
        elif front:
            group.ready.push_front(task_id, lease.traits.priority)
        else:
            group.ready.push(task_id, lease.traits.priority, now_ms)
        core.wake(group)

    def _keep_attempts(self, lease: Lease, *, counts: bool = True) -> None:
        """Keep the attempts of an ended lease. ``counts`` means that this delivery counts as an
        attempt. If no delivery of the task counts, only the delivery's number is kept."""
        core, traits = self._core, lease.traits
        if traits.ttl_end_ms is not None:
            core.lifetimes.add(lease.id, traits.ttl_end_ms)
        if lease.past == NO_PAST:
            core.forget_deliveries(lease.group, lease.id, lease.attempt)
            return
        # With an order key, no earlier receipt is valid after a delivery was returned unstarted.
        epoch = lease.epoch if counts or not lease.order else 0
        lease.group.delivery_attempts[lease.id] = DeliveryAttempts(
            lease.attempt, epoch, traits.priority, lease.past
        )

    # --- leases that time out --------------------------------------------------------------

    @property
    def is_expiring(self) -> bool:
        """Whether leases have timed out and must still be ended by ``expire``."""
        return bool(self._over)

    def expire(self, now_ms: int, mono_ms: int, limit: int) -> bool:
        """End up to ``limit`` leases that have timed out. Return whether to repeat this at once."""
        core, over = self._core, self._over
        if not over and core.expiry_mono_ms is not None and core.expiry_mono_ms <= mono_ms:
            self._search_over(mono_ms)
        for _ in range(min(limit, len(over))):
            lease = over.popleft()
            gone_ms = lease.subscriber.gone_mono_ms
            is_over = lease.deadline_mono_ms <= mono_ms
            if lease.live and (is_over or (gone_ms is not None and gone_ms <= mono_ms)):
                self._expire_one(lease, now_ms)
        return bool(over)

    def _search_over(self, mono_ms: int) -> None:
        """Add the leases that have timed out to ``_over``."""
        core = self._core
        core.expiry_mono_ms = None
        for group in list(core.leased):
            if group.expiry_mono_ms is not None and group.expiry_mono_ms <= mono_ms:
                self._search_group(group, mono_ms)
            if group.expiry_mono_ms is None:
                del core.leased[group]
            else:
                core.expires(group, group.expiry_mono_ms)

    def _search_group(self, group: Group, mono_ms: int) -> None:
        earliest: int | None = None
        for lease in group.flight.values():
            end_ms = lease.deadline_mono_ms
            gone_ms = lease.subscriber.gone_mono_ms
            if gone_ms is not None and gone_ms < end_ms:
                end_ms = gone_ms
            if end_ms <= mono_ms:
                self._over.append(lease)
            elif earliest is None or end_ms < earliest:
                earliest = end_ms
        if earliest is not None:
            gap_ms = EXPIRY_SCAN_GAP_MS_MIN + len(group.flight) // EXPIRY_SCAN_LEASES_PER_MS
            earliest = max(earliest, mono_ms + gap_ms)
        group.expiry_mono_ms = earliest

    def _expire_one(self, lease: Lease, now_ms: int) -> None:
        if lease.subscriber.death:
            self._end_one(DIED, lease, now_ms, self._judge_death(lease, now_ms))
            return
        is_gone = lease.subscriber.gone_mono_ms is not None
        # The task is ready at once, so the verdict only decides whether there is another attempt.
        verdict = self._judge(lease, 0, "connection lost" if is_gone else "lease over", now_ms)
        self._end_one(LAPSED, lease, now_ms, verdict)

    def _judge_death(self, lease: Lease, now_ms: int) -> Verdict:
        """Return the verdict on the death of a consumer. Deaths count as a failure of the task only
        if they happen too often."""
        config, deaths = self._core.config, lease.past.deaths + 1
        reason = f"{CONSUMER_DIED}: {lease.subscriber.death}"
        failure = self._core.failure(lease, reason, now_ms)
        rules = OrderRules.of(lease.group.settings.order)
        is_endless = bool(lease.order) and rules.failure == ORDER_RETRY
        if deaths >= config.deaths_max and not is_endless:
            return Verdict(failure, None, bool(lease.order) and rules.failure == ORDER_HOLD)
        steps = min(deaths - 1, 32)
        wait_ms = min(config.death_retry_cap_ms, config.death_retry_base_ms << steps)
        return Verdict(failure, wait_ms)


def _reason(reason: str | None, by_default: str) -> str:
    """Return the consumer's reason, or the default. A reason must not claim that a consumer died,
    because a task could then fail without limit."""
    if reason is not None and reason.startswith(CONSUMER_DIED):
        return f"{by_default}: {reason}"
    return reason or by_default


def _current(
    flight: Mapping[int, Lease], epoch: int, ids: Sequence[int], attempts: Sequence[int]
) -> dict[int, Lease]:
    """Return the leases of these receipts if all receipts are current and for different tasks,
    otherwise an empty map."""
    leases: list[Any] = list(map(flight.get, ids))
    if not all(leases) or [lease.attempt for lease in leases] != list(attempts):
        return {}
    by_id = dict(zip(ids, leases, strict=True))
    epochs = {lease.epoch for lease in leases}
    return by_id if epochs == {epoch} and len(by_id) == len(ids) else {}


def _judge_ordered(lease: Lease, delay_ms: int | None, failure: Failure) -> Verdict:
    """Return the verdict by the group's rules for order keys, which replace a retry policy."""
    rules = OrderRules.of(lease.group.settings.order)
    if rules.attempts is not None and lease.past.failed + 1 >= rules.attempts:
        return Verdict(failure, None, rules.failure == ORDER_HOLD)
    return Verdict(failure, rules.retry_ms if delay_ms is None else delay_ms)


TTL_OVER = "ttl_over"
"""The outcome for a dead letter that is not requeued because it would expire at once."""


class DeadLetters:
    """The dead letters of all groups. ``requeue`` and ``delete`` return words of the protocol."""

    def __init__(self, core: Core, ownership: Ownership) -> None:
        self._core = core
        self._ownership = ownership

    # --- adding ----------------------------------------------------------------------------

    def to_dead_letters(self, lease: Lease, failure: Failure, now_ms: int) -> None:
        """Make an ended delivery's task a dead letter, with ``failure`` as its last attempt."""
        core, group, key = self._core, lease.group, (lease.id, lease.group.name)
        core.open.effects.dead[key] = DeadRow(
            lease.id,
            group.name,
            group.topic.name,
            now_ms,
            lease.attempt,
            failure.summary,
            (*lease.past.failures[:-1], failure),
            lease.past.failed,
            core.ids.last,
            lease.past.deaths,
        )
        core.open.effects.progress[key] = None
        self._count(group, 1)
        group.dead_lettered += 1
        core.totals.dead += 1
        self._ownership.to_dead_letters(group, lease.id)
        core.recorder.dead_lettered(lease, failure.reason, now_ms)

    def restore(self, snapshot: TaskSnapshot) -> None:
        """Count a task's dead letters of existing groups after a restart."""
        for group in self._ownership.keepers(snapshot):
            self._count(group, 1)

    # --- removing --------------------------------------------------------------------------

    def would_expire(self, snapshot: TaskSnapshot, ttl_ms: int | None, now_ms: int) -> bool:
        """Return whether the task, requeued with ``ttl_ms`` or its own, would expire at once."""
        end_ms = ttl_end_ms(snapshot.row.due_ms, self._options(snapshot.row))
        return ttl_ms is None and end_ms is not None and now_ms >= end_ms

    def requeue(self, snapshot: TaskSnapshot, name: str, now_ms: int, ttl_ms: int | None) -> str:
        """Make a dead letter ready in its group and reset its failures. ``ttl_ms`` is a new time to
        live. A dead letter that would expire at once is not requeued. Return the outcome word."""
        core, row, group = self._core, snapshot.row, self._keeper(snapshot, name)
        if group is None:
            return "unknown"
        if self.would_expire(snapshot, ttl_ms, now_ms):
            return TTL_OVER
        new_ms = None
        if ttl_ms is not None:
            new_ms = max(0, now_ms - row.due_ms) + ttl_ms  # the option counts from the due time
            row = self._live_on(snapshot, new_ms)
        self._take_out(group, row.id, is_owed=True)
        core.forget_deliveries(group, row.id, snapshot.dead[name].attempt)
        core.add_due(group, row, now_ms)
        core.lifetimes.begin(row)
        core.wake(group)
        core.recorder.requeued(row.topic, name, row.id, new_ms)
        return "requeued"

    def _live_on(self, snapshot: TaskSnapshot, ttl_ms: int) -> TaskRow:
        """Set a new time to live of a task in all of its groups, and return its new row."""
        core, former = self._core, snapshot.row._replace(options=self._options(snapshot.row))
        options = (former.options or TaskOptions())._replace(ttl_ms=ttl_ms)
        row, end_ms = former._replace(options=options), ttl_end_ms(former.due_ms, options)
        for group in self._ownership.groups_of(snapshot):
            lease = group.flight.get(row.id)
            if lease is None:
                core.lifetimes.end(former)
                core.lifetimes.begin(row)
            else:
                lease.traits = lease.traits._replace(ttl_end_ms=end_ms)
        resident = core.resident_rows.get(row.id)
        if resident is not None:
            core.keep(resident._replace(options=options))
        core.write(row, is_moved=False)
        return row

    def _options(self, row: TaskRow) -> TaskOptions | None:
        """Return the options of the task. Requeuing another dead letter of the task can have
        changed them in the open batch."""
        return self._core.open.effects.updated.get(row.id, row).options

    def delete(self, snapshot: TaskSnapshot, name: str) -> str:
        """Delete a dead letter. The task ends with its last group. Return the outcome word."""
        core, row, group = self._core, snapshot.row, self._keeper(snapshot, name)
        if group is None:
            return "unknown"
        self._take_out(group, row.id, is_owed=False)
        last = self._ownership.finish(group, row, Outcome.DELETED)
        if not last:
            core.note_done(row.id, group, snapshot.dead[name].attempt, 0)
        core.recorder.ended(row.topic, name, DELETED, row.id, last=last)
        return "deleted"

    def drop(self, group: Group, task_id: int) -> None:
        """Drop a dead letter of a group that is being deleted. The caller must finish the task."""
        self._take_out(group, task_id, is_owed=False)

    def task_ends(self, snapshot: TaskSnapshot) -> None:
        """Uncount the dead letters of a task that ends."""
        for group in self._ownership.keepers(snapshot):
            self._count(group, -1)

    # --- common steps ------------------------------------------------------------------------

    def _keeper(self, snapshot: TaskSnapshot, name: str) -> Group | None:
        """Return the group of that name if it keeps the task as a dead letter, otherwise None."""
        if name not in snapshot.dead:
            return None
        return self._core.topic(snapshot.row.topic).groups.get(name)

    def _take_out(self, group: Group, task_id: int, *, is_owed: bool) -> None:
        self._core.open.effects.dead[task_id, group.name] = None
        self._count(group, -1)
        self._ownership.from_dead_letters(group, task_id, is_owed=is_owed)

    def _count(self, group: Group, change: int) -> None:
        group.dead += change
        self._core.dead += change
