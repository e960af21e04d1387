"""The second half, last part: every way in which a delivery ends, and dead letters.

| end | the credit is back | what becomes of the task in its group |
|---|---|---|
| ack | ahead of the commit | done; it ends with the last group that owes it an end |
| nack | ahead of the commit | waits for its next attempt; without one, a dead letter |
| reject, unfit to be written | ahead of the commit | a dead letter |
| release | ahead of the commit | ready, in front of the others; nothing is counted |
| snooze | ahead of the commit | waits for the time its consumer said; no failure is counted |
| lease over | at once, in doubt | ready, behind the others; or a dead letter |
| consumer died | at once | waits, and is alone with its next one; or a dead letter |
| group deleted | at once | the group lets go of it: see ``groups`` |

A task that a newer one with its key has replaced meanwhile (``Past.replaced_by``) has no other
attempt and becomes no dead letter: in every case but the first and the last it is cancelled.

"Ahead of the commit": for ``acks_ahead_max`` ends of a subscription that are not durable yet, for
further ones with the commit (``topics.Subscriber``).

``Settlement.end`` is the only way out of ``Group.flight``. Invariants: an ack takes effect in
memory at once, so a lease cannot end while its ack is being committed; acks are never undone.

Dead letters (``DeadLetters``) are tasks that a group has given up on, until an operator says what
becomes of them. The body of a dead letter stays in the task's row, so a task is there as long as
one group keeps it as a dead letter or owes it an end. What a dead letter consists of is in the
store; memory has numbers only (``Group.dead``, ``Core.dead``), and every change of them is made
here. Which groups still owe a task an end is the business of ``ownership``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
"""How much later leases may end, in ms, so that a crowd of deadlines costs few scans."""
EXPIRY_SCAN_LEASES_PER_MS = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class LeaseEnd:
    """Why a lease ends, and what follows from that alone: one of those below."""

    why: str
    is_confirmed: bool = True
    """Whether credit waits until the end is durable. False: the consumer did not ask for it."""
    raises_doubt: bool = False
    """Whether the consumer of the lease may be dead."""


ACKED = LeaseEnd("acked")
NACKED = LeaseEnd("nacked or rejected: the attempt failed")
RELEASED = LeaseEnd("given back unstarted")
SNOOZED = LeaseEnd("postponed by its consumer")
UNFIT = LeaseEnd("cannot be written to any subscriber")
LAPSED = LeaseEnd("over by time, or connection lost", is_confirmed=False, raises_doubt=True)
DIED = LeaseEnd("its consumer died", is_confirmed=False)
GROUP_CLOSED = LeaseEnd("its group is being deleted", is_confirmed=False)


class Verdict(NamedTuple):
    """What follows from an attempt that failed."""

    failure: Failure
    wait_ms: int | None
    """How long until the next attempt; None: there is none, and the task becomes a dead letter."""
    holds_key: bool = False
    """Whether the order key waits for an operator, instead of the task becoming a dead letter."""


class Snooze(NamedTuple):
    """What follows from a delivery that was postponed."""

    until_ms: int


class Settlement:
    """The verbs that end deliveries, or extend them, and the end of leases by time."""

    def __init__(self, core: Core, ownership: Ownership, dead_letters: DeadLetters) -> None:
        self._core = core
        self._ownership = ownership
        self._dead_letters = dead_letters

    def ack(
        self, group: Group, epoch: int, ids: Sequence[int], attempts: Sequence[int]
    ) -> list[int]:
        """Ack what is in flight; the indexes of the receipts that need the store's word."""
        flight = group.flight
        unresolved: list[int] = []
        leases = _current(flight, epoch, ids, attempts)
        if leases:
            self.end(ACKED, group, leases)
            return unresolved
        for index, task_id in enumerate(ids):
            lease, attempt = flight.get(task_id), attempts[index]
            # Both begin at 1: a receipt below that, or above the lease's, was not given out.
            if (
                lease is None
                or not 0 < epoch <= lease.epoch
                or attempt < 1
                or (attempt > lease.attempt and epoch == lease.epoch)
                or (lease.order and (epoch, attempt) != (lease.epoch, lease.attempt))
                or task_id in leases
            ):
                unresolved.append(index)
                continue
            leases[task_id] = lease
        if leases:
            self.end(ACKED, group, leases)
        return unresolved

    def ack_idle(
        self, group: Group, epoch: int, task_id: int, attempt: int, known: TaskSnapshot
    ) -> str:
        """Ack a task that ``ack`` could not finish, and that has not ended.

        The receipt is an earlier one, or one that a crash made this memory forget.
        """
        core, row = self._core, known.row
        if row.topic != group.topic.name or epoch < 1 or not 0 < attempt <= ATTEMPT_MAX:
            return "stale"
        lease = group.flight.get(task_id)
        if lease is not None:
            if epoch >= core.epoch or lease.order:
                return "stale"
            # Delivered before a crash that forgot this delivery, not the ones before it.
            self.ack(group, lease.epoch, [task_id], [lease.attempt])
            return "acked"
        if is_done(known, group):
            return "done"
        attempts = group.delivery_attempts.get(task_id)
        newest = (core.epoch, group.numbers.get(task_id, 0))
        if attempts is not None:
            newest = attempts.epoch or core.epoch, attempts.attempt
        # What was delivered before a crash may be forgotten; such a receipt is believed.
        if epoch >= core.epoch and (epoch, attempt) > newest:
            return "stale"
        # With an order key it is not: there may have been another one since. Nor does any answer
        # count to what was given back, or begins anew.
        is_sure = (
            attempts is not None and attempts.epoch >= core.epoch and (epoch, attempt) == newest
        )
        if (has_order(row) and not is_sure) or not self._ownership.is_owed(group, task_id):
            return "stale"
        if attempts is None and core.is_scheduled(row):
            if epoch >= core.epoch or len(group.topic.groups) > 1:
                return "stale"
            # Delivered before a crash that forgot the delivery; not fired again yet.
            core.unschedule(row)
        else:
            core.leave(group, row)
        attempt = max(attempt, newest[1])
        ended = self._ownership.finish(group, row)
        if not ended:
            core.note_done(task_id, group, attempt, epoch)
        core.recorder.acked_idle(group, task_id, attempt, ended=ended)
        self._count(ACKED, group, 1)
        return "acked"

    def current(self, group: Group, task_id: int, epoch: int, attempt: int) -> Lease | None:
        """The lease that this receipt belongs to, if it is the current one; else None."""
        lease = group.flight.get(task_id)
        if lease is None or lease.attempt != attempt or lease.epoch != epoch:
            return None
        return lease

    def is_newest(self, group: Group, task_id: int, epoch: int, attempt: int) -> bool:
        """Whether nothing is known of a later delivery of the task than this one."""
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
        """The attempt failed: wait for the next, or go to the dead letters."""
        verdict = self._judge(lease, delay_ms, _said(reason, "nack"), now_ms)
        self._end_one(NACKED, lease, now_ms, verdict)
        if lease.past.replaced_by:
            return "cancelled"
        if verdict.holds_key:
            return "held"
        return "dead" if verdict.wait_ms is None else "retrying"

    def _judge(self, lease: Lease, delay_ms: int | None, reason: str, now_ms: int) -> Verdict:
        """The verdict on a failed attempt. It changes nothing, so that a bad policy fails its task
        only."""
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
        """Make the task a dead letter at once, or hold its key, as its group says."""
        failure = self._core.failure(lease, _said(reason, "rejected"), now_ms)
        rules = OrderRules.of(lease.group.settings.order)
        holds_key = bool(lease.order) and rules.failure == ORDER_HOLD
        self._end_one(NACKED, lease, now_ms, Verdict(failure, None, holds_key))
        if lease.past.replaced_by:
            return "cancelled"
        return "held" if holds_key else "dead"

    def unfit(self, lease: Lease, error: Exception, now_ms: int, trace: str | None = None) -> None:
        """Make a task that cannot be written to any subscriber a dead letter, with the error.
        ``trace``: the task's."""
        failure = self._core.fault(lease, "delivery", error, now_ms, trace)
        self._end_one(UNFIT, lease, now_ms, Verdict(failure, None))

    def release(self, lease: Lease, now_ms: int) -> str:
        """Give a task back unstarted: it is ready at once, and nothing is counted."""
        self._end_one(RELEASED, lease, now_ms)
        return "cancelled" if lease.past.replaced_by else "released"

    def release_all(self, subscribers: Iterable[Subscriber], now_ms: int) -> None:
        """Release every delivery that these subscribers have in hand."""
        held: dict[Group, list[Lease]] = {}
        for subscriber in dict.fromkeys(subscribers):
            if subscriber.held:
                held.setdefault(subscriber.group, []).extend(subscriber.held.values())
        for group, leases in held.items():
            leases.sort(key=attrgetter("since_mono_ms"))
            # Last first: each goes to the front of the line, so the first is first again.
            self.end(RELEASED, group, {one.id: one for one in reversed(leases)}, now_ms)

    def snooze(self, lease: Lease, delay_ms: int, now_ms: int) -> str:
        """Postpone a task by ``delay_ms`` without counting a failure. After too many times the
        delivery stays with its consumer."""
        if lease.past.snoozes >= self._core.config.snoozes_max:
            return "too_often"
        lease.past = lease.past._replace(snoozes=lease.past.snoozes + 1)
        self._end_one(SNOOZED, lease, now_ms, Snooze(now_ms + delay_ms))
        return "cancelled" if lease.past.replaced_by else "snoozed"

    def group_closed(self, lease: Lease) -> None:
        """End a lease of a group that is being deleted; the group's share ends elsewhere."""
        self._end_one(GROUP_CLOSED, lease)

    def extend(self, lease: Lease, lease_ms: int, mono_ms: int) -> None:
        """Let the lease end ``lease_ms`` from now; the consumer is taken to be there."""
        lease.deadline_mono_ms = mono_ms + lease_ms
        if lease.checkpointed:  # else it waits for its checkpoint already
            lease.checkpointed = False
            self._core.unsaved.append(lease)
        if lease.subscriber.gone_mono_ms is not None:
            del lease.subscriber.held[lease.id]
            lease.subscriber = lease.group.detached
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
        """Every lease ends here, and nowhere else.

        ``leases`` are some of ``group``, by the id of their task. A ``verdict`` says that the
        attempt failed or was postponed, and what follows.
        """
        core, flight = self._core, group.flight
        is_confirmed = why.is_confirmed
        ended: dict[Subscriber, int] = {}
        for task_id, lease in leases.items():
            del flight[task_id]
            lease.live = False  # whatever no batch holds of it need not be written any more
            subscriber = lease.subscriber
            subscriber.held.pop(task_id, None)  # one of before a restart is with nobody
            if is_confirmed:
                ended[subscriber] = ended.get(subscriber, 0) + 1
                continue
            core.settled(subscriber.presence, 1)
            if why.raises_doubt:
                # Else one that is dead and holds its connection would burn every attempt there is.
                subscriber.presence.doubt(lease)
            core.give_back(subscriber, 1)
        if group.is_ordered:
            core.orderings.of[group].returned(leases.values(), done=why is ACKED)
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
        """The tasks of these leases are done for the group."""
        core = self._core
        kept: set[int] = set()
        if self._ownership.may_share(group):
            for task_id, lease in leases.items():
                if not self._ownership.finish(group, lease):
                    core.note_done(task_id, group, lease.attempt, lease.epoch)
                    kept.add(task_id)
        else:
            # The only group that was owed them: nothing else of them is in memory but their keys.
            keys = {i: one.traits.key for i, one in leases.items() if one.traits.key is not None}
            core.end_plain(leases, Outcome.ACKED, group.topic.name, keys)
        if core.is_recorded:
            core.recorder.acked(group, list(leases.values()), kept)

    def _go_on(
        self, why: LeaseEnd, lease: Lease, now_ms: int, verdict: Verdict | Snooze | None
    ) -> None:
        """The task of the lease is not done: its group gets it again, or a dead letter more."""
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
                self._core.orderings.of[lease.group].died(lease)
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
        """A newer task has replaced that of the lease: its group is done with it."""
        group = lease.group
        if group.is_ordered:
            self._core.orderings.of[group].died(lease)
        after = verdict.failure.summary if isinstance(verdict, Verdict) else why.why
        by = lease.past.replaced_by
        self._ownership.give_way(group, lease, lease.attempt, by, after)

    def _wait(self, lease: Lease, until_ms: int) -> None:
        self._core.wait(lease.group, lease.id, until_ms)
        if lease.group.is_ordered:
            self._core.orderings.of[lease.group].waits(lease)

    def _hold_key(self, lease: Lease, failure: Failure, now_ms: int) -> None:
        """Keep the task, and let its order key wait for an operator."""
        core = self._core
        self._keep_attempts(lease)
        core.hold_key(lease.group, lease.id, lease.group.delivery_attempts[lease.id], now_ms)
        core.orderings.of[lease.group].hold(lease, now_ms)
        core.recorder.nacked(lease, failure.reason, now_ms, now_ms)

    def _ready_again(self, lease: Lease, now_ms: int, *, front: bool) -> None:
        """Make a task ready again; ``front``: it was given back unstarted."""
        core, group, task_id = self._core, lease.group, lease.id
        self._keep_attempts(lease, counts=not front)
        if task_id in group.delivery_attempts:
            core.note_attempts(group, task_id, ProgressState.RELEASED, now_ms)
        else:
            core.open.effects.progress[task_id, group.name] = None
        if group.is_ordered:
            core.orderings.of[group].again(lease, now_ms, front=front)
        elif front:
            group.ready.push_front(task_id, lease.traits.priority)
        else:
            group.ready.push(task_id, lease.traits.priority, now_ms)
        core.wake(group)

    def _keep_attempts(self, lease: Lease, *, counts: bool = True) -> None:
        """Keep what the lease counted of attempts, now that it is over; ``counts``: this delivery
        does. Where none counts, only the delivery's number is kept."""
        core, traits = self._core, lease.traits
        if traits.ttl_end_ms is not None:
            core.lifetimes.add(lease.id, traits.ttl_end_ms)
        if lease.past == NO_PAST:
            core.begins_anew(lease.group, lease.id, lease.attempt)
            return
        # With an order key no answer to an earlier delivery counts, if this one was given back.
        epoch = lease.epoch if counts or not lease.order else 0
        lease.group.delivery_attempts[lease.id] = DeliveryAttempts(
            lease.attempt, epoch, traits.priority, lease.past
        )

    # --- leases that end by time -----------------------------------------------------------

    def expire(self, now_ms: int, mono_ms: int) -> int:
        """Take back deliveries whose lease is over; returns how many."""
        core = self._core
        if core.expiry_mono_ms is None or core.expiry_mono_ms > mono_ms:
            return 0
        core.expiry_mono_ms = None
        taken = 0
        for group in list(core.leased):
            if group.expiry_mono_ms is not None and group.expiry_mono_ms <= mono_ms:
                taken += self._expire_group(group, now_ms, mono_ms)
            if group.expiry_mono_ms is None:
                del core.leased[group]
            else:
                core.expires(group, group.expiry_mono_ms)
        return taken

    def _expire_group(self, group: Group, now_ms: int, mono_ms: int) -> int:
        earliest: int | None = None
        over: list[Lease] = []
        for lease in group.flight.values():
            end_ms = lease.deadline_mono_ms
            gone_ms = lease.subscriber.gone_mono_ms
            if gone_ms is not None and gone_ms < end_ms:
                end_ms = gone_ms
            if end_ms <= mono_ms:
                over.append(lease)
            elif earliest is None or end_ms < earliest:
                earliest = end_ms
        if earliest is not None:
            gap_ms = EXPIRY_SCAN_GAP_MS_MIN + len(group.flight) // EXPIRY_SCAN_LEASES_PER_MS
            earliest = max(earliest, mono_ms + gap_ms)
        group.expiry_mono_ms = earliest
        for lease in over:
            if lease.subscriber.death:
                self._end_one(DIED, lease, now_ms, self._judge_death(lease, now_ms))
                continue
            gone = lease.subscriber.gone_mono_ms is not None
            # Ready at once: only whether there is another attempt matters.
            verdict = self._judge(lease, 0, "connection lost" if gone else "lease over", now_ms)
            self._end_one(LAPSED, lease, now_ms, verdict)
        return len(over)

    def _judge_death(self, lease: Lease, now_ms: int) -> Verdict:
        """The verdict when a consumer died: no failure of the task, unless it happens too often."""
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


def _said(reason: str | None, by_default: str) -> str:
    """The reason that a consumer gives, or the default. It may not claim that a consumer died: else
    a task could fail for ever at no cost."""
    if reason is not None and reason.startswith(CONSUMER_DIED):
        return f"{by_default}: {reason}"
    return reason or by_default


def _current(
    flight: Mapping[int, Lease], epoch: int, ids: Sequence[int], attempts: Sequence[int]
) -> dict[int, Lease]:
    """The leases of these receipts, if all are current and of different tasks; else none."""
    leases: list[Any] = list(map(flight.get, ids))
    if not all(leases) or [lease.attempt for lease in leases] != list(attempts):
        return {}
    found = dict(zip(ids, leases, strict=True))
    epochs = {lease.epoch for lease in leases}
    return found if epochs == {epoch} and len(found) == len(ids) else {}


def _judge_ordered(lease: Lease, delay_ms: int | None, failure: Failure) -> Verdict:
    """The verdict of the group's rules for order keys, which take the place of a retry policy."""
    rules = OrderRules.of(lease.group.settings.order)
    if rules.attempts is not None and lease.past.failed + 1 >= rules.attempts:
        return Verdict(failure, None, rules.failure == ORDER_HOLD)
    return Verdict(failure, rules.retry_ms if delay_ms is None else delay_ms)


TTL_OVER = "ttl_over"
"""The word for a dead letter that stays, because it would expire at once."""


class DeadLetters:
    """The dead letters of all groups. ``requeue`` and ``delete`` answer with protocol words."""

    def __init__(self, core: Core, ownership: Ownership) -> None:
        self._core = core
        self._ownership = ownership

    # --- they come -------------------------------------------------------------------------

    def to_dead_letters(self, lease: Lease, failure: Failure, now_ms: int) -> None:
        """Make the task of an ended delivery a dead letter. Its past counts ``failure``, without
        the trace."""
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
        core.recorder.died(lease, failure.reason, now_ms)

    def restore(self, known: TaskSnapshot) -> None:
        """Count a task's dead letters after a restart, for each group that still exists."""
        for group in self._ownership.keepers(known):
            self._count(group, 1)

    # --- they go ---------------------------------------------------------------------------

    def is_over(self, known: TaskSnapshot, ttl_ms: int | None, now_ms: int) -> bool:
        """Whether the task, requeued with a new ``ttl_ms`` or with its own, would expire at
        once."""
        end_ms = ttl_end_ms(known.row.due_ms, self._options(known.row))
        return ttl_ms is None and end_ms is not None and now_ms >= end_ms

    def requeue(self, known: TaskSnapshot, name: str, now_ms: int, ttl_ms: int | None) -> str:
        """Make a dead letter ready in its group at once, with failures counted anew, and with a new
        time to live if there is a ``ttl_ms``. One whose time to live is over stays."""
        core, row, group = self._core, known.row, self._keeper(known, name)
        if group is None:
            return "unknown"
        if self.is_over(known, ttl_ms, now_ms):
            return TTL_OVER
        new_ms = None
        if ttl_ms is not None:
            new_ms = max(0, now_ms - row.due_ms) + ttl_ms  # an option counts from the due time
            row = self._live_on(known, new_ms)
        self._take_out(group, row.id, owes_it=True)
        core.begins_anew(group, row.id, known.dead[name].attempt)
        core.come(group, row, now_ms)
        core.lifetimes.begin(row)
        core.wake(group)
        core.recorder.requeued(row.topic, name, row.id, new_ms)
        return "requeued"

    def _live_on(self, known: TaskSnapshot, ttl_ms: int) -> TaskRow:
        """The row of the task with another time to live, in all groups that have it."""
        core, former = self._core, known.row._replace(options=self._options(known.row))
        options = (former.options or TaskOptions())._replace(ttl_ms=ttl_ms)
        row, end_ms = former._replace(options=options), ttl_end_ms(former.due_ms, options)
        for group in self._ownership.groups_of(known):
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
        """The options of the task; another dead letter of it may just have changed them."""
        return self._core.open.effects.updated.get(row.id, row).options

    def delete(self, known: TaskSnapshot, name: str) -> str:
        """Delete a dead letter; the task ends when no group keeps or owes it."""
        core, row, group = self._core, known.row, self._keeper(known, name)
        if group is None:
            return "unknown"
        self._take_out(group, row.id, owes_it=False)
        last = self._ownership.finish(group, row, Outcome.DELETED)
        if not last:
            core.note_done(row.id, group, known.dead[name].attempt, 0)
        core.recorder.ended(row.topic, name, DELETED, row.id, last=last)
        return "deleted"

    def drop(self, group: Group, task_id: int) -> None:
        """Drop a dead letter of a closing group; the caller ends the group's share of the task."""
        self._take_out(group, task_id, owes_it=False)

    def task_ends(self, known: TaskSnapshot) -> None:
        """The task ends, and all of its dead letters with it."""
        for group in self._ownership.keepers(known):
            self._count(group, -1)

    # --- what these have in common -----------------------------------------------------------

    def _keeper(self, known: TaskSnapshot, name: str) -> Group | None:
        """The group of that name, if it keeps the task as a dead letter; else None."""
        if name not in known.dead:
            return None
        return self._core.topic(known.row.topic).groups.get(name)

    def _take_out(self, group: Group, task_id: int, *, owes_it: bool) -> None:
        self._core.open.effects.dead[task_id, group.name] = None
        self._count(group, -1)
        self._ownership.from_dead_letters(group, task_id, owes_it=owes_it)

    def _count(self, group: Group, change: int) -> None:
        group.dead += change
        self._core.dead += change
