"""The second half, last part: every way in which a delivery ends.

Invariants: an ack takes effect in memory at once, so a lease cannot end while its ack is being
committed; credit comes back when the commit that ends the delivery is durable; acks are never
undone.
"""

from __future__ import annotations

from collections.abc import Sequence

from tickwheel.engine.dead_letters import DeadLetters
from tickwheel.engine.ownership import Ownership, is_done
from tickwheel.engine.state import Core, failure_of
from tickwheel.engine.topics import Group, Lease, Tries
from tickwheel.model.records import (
    ATTEMPT_MAX,
    FAILURES_MAX,
    Ending,
    Failure,
    Known,
    ProgressRow,
    ProgressState,
)

EXPIRY_SCAN_GAP_MS_MIN = 20
"""Leases end up to this much late, so that a crowd of deadlines costs few scans."""
EXPIRY_SCAN_LEASES_PER_MS = 10_000


class Settlement:
    """Ack, nack, reject, release, extend, and leases that end by time."""

    def __init__(self, core: Core, ownership: Ownership, dead_letters: DeadLetters) -> None:
        self._core = core
        self._ownership = ownership
        self._dead_letters = dead_letters

    def ack(
        self, group: Group, epoch: int, ids: Sequence[int], attempts: Sequence[int]
    ) -> list[int]:
        """Finish what is known here; the indexes of receipts that need the store's word."""
        core = self._core
        flight = group.flight
        credits = core.open.credits
        ended, endings = core.open.effects.ended, core.endings
        is_shared, finish = self._ownership.may_share(group), self._ownership.finish
        unresolved: list[int] = []
        finished: list[Lease] = []
        kept: set[int] = set()
        asked_core = 0
        for index, task_id in enumerate(ids):
            lease, attempt = flight.get(task_id), attempts[index]
            # Both begin at 1: a receipt below that, or above the lease's, was not given out.
            if (
                lease is None
                or not 0 < epoch <= lease.epoch
                or attempt < 1
                or (attempt > lease.attempt and epoch == lease.epoch)
            ):
                unresolved.append(index)
                continue
            del flight[task_id]
            lease.live = False
            subscriber = lease.subscriber
            credits[subscriber] = credits.get(subscriber, 0) + 1
            finished.append(lease)
            if not is_shared:
                ended[task_id] = Ending.ACKED
                endings.add(task_id, Ending.ACKED)
                continue
            asked_core += 1
            if not finish(group, lease):
                core.note_done(task_id, group, lease.attempt, lease.epoch)
                kept.add(task_id)
        core.in_flight -= len(finished)
        core.tasks -= len(finished) - asked_core
        self._count_acked(group, len(finished))
        if finished and core.recorder is not None:
            core.recorder.acked(group, finished, kept)
        return unresolved

    def ack_idle(self, group: Group, epoch: int, task_id: int, attempt: int, known: Known) -> str:
        """Ack of a task that ``ack`` could not finish, and that has not ended.

        The receipt is an earlier one, or one that a crash made this memory forget.
        """
        core, row = self._core, known.row
        if row.topic != group.topic.name or epoch < 1 or not 0 < attempt <= ATTEMPT_MAX:
            return "stale"
        lease = group.flight.get(task_id)
        if lease is not None:
            if epoch >= core.epoch:
                return "stale"
            # Delivered before a crash that forgot this delivery, not the ones before it.
            self.ack(group, lease.epoch, [task_id], [lease.attempt])
            return "acked"
        if is_done(known, group):
            return "done"
        tries = group.tries.get(task_id)
        newest = (tries.epoch, tries.attempt) if tries is not None else (0, 0)
        # What was delivered before a crash may be forgotten; such a receipt is believed.
        if epoch >= core.epoch and (epoch, attempt) > newest:
            return "stale"
        if not self._ownership.is_owed(group, task_id):
            return "stale"
        if tries is None and core.is_scheduled(row):
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
        if core.recorder is not None:
            core.recorder.acked_idle(group, task_id, attempt, ended=ended)
        self._count_acked(group, 1)
        return "acked"

    def _count_acked(self, group: Group, count: int) -> None:
        group.acked += count
        group.topic.acked += count
        self._core.totals.acked += count

    def current(self, group: Group, task_id: int, epoch: int, attempt: int) -> Lease | None:
        """The lease that this receipt is of, if it is the current one."""
        lease = group.flight.get(task_id)
        if lease is None or lease.attempt != attempt or lease.epoch != epoch:
            return None
        return lease

    def nack(self, lease: Lease, delay_ms: int | None, reason: str | None, now_ms: int) -> str:
        """The attempt failed: wait for the next, or go to the dead letters."""
        core, group = self._core, lease.group
        failure, delay_ms = self._judge(lease, delay_ms, reason or "nack", now_ms)
        self._close(lease)
        core.totals.nacked += 1
        group.nacked += 1
        if delay_ms is None:
            self._dead_letters.to_dead_letters(lease, failure, now_ms)
            return "dead"
        failures = (*lease.failures, failure)[-FAILURES_MAX:]
        group.tries[lease.id] = Tries(lease.attempt, lease.epoch, lease.traits.priority, failures)
        if lease.traits.ttl_end_ms is not None:
            core.lifetimes.add(lease.id, lease.traits.ttl_end_ms)
        core.wait(group, lease.id, now_ms + delay_ms)
        if core.recorder is not None:
            core.recorder.nacked(lease, failure.reason, now_ms + delay_ms, now_ms)
        return "retrying"

    def _judge(
        self, lease: Lease, delay_ms: int | None, reason: str, now_ms: int
    ) -> tuple[Failure, int | None]:
        """The failed attempt, and how long until the next one; None: there is none. Changes
        nothing yet, so a policy that cannot be computed ends its task and not the daemon."""
        try:
            policy = self._core.policy(lease.traits.retry, lease.group)
            if not policy.allows(lease.attempt):
                delay_ms = None
            elif delay_ms is None:
                delay_ms = policy.delay_ms(lease.attempt, lease.id)
        except Exception as error:
            return self._core.fault(lease, reason, error, now_ms), None
        return failure_of(lease, reason, now_ms), delay_ms

    def reject(self, lease: Lease, reason: str | None, now_ms: int) -> None:
        """Straight to the dead letters."""
        self._close(lease)
        self._core.totals.nacked += 1
        lease.group.nacked += 1
        failure = failure_of(lease, reason or "rejected", now_ms)
        self._dead_letters.to_dead_letters(lease, failure, now_ms)

    def release(self, lease: Lease, now_ms: int) -> None:
        """Given back unstarted: ready at once, and the attempt does not count."""
        self._close(lease)
        self._back(lease, lease.attempt - 1, lease.failures, now_ms, front=True)
        if self._core.recorder is not None:
            self._core.recorder.released(lease, now_ms)

    def extend(self, lease: Lease, lease_ms: int, mono_ms: int) -> None:
        """The lease ends ``lease_ms`` from now; the consumer is there, whatever its past."""
        lease.deadline_mono_ms = mono_ms + lease_ms
        if lease.checkpointed:  # else it waits for its checkpoint already
            lease.checkpointed = False
            self._core.unsaved.append(lease)
        if lease.subscriber.gone_mono_ms is not None:
            lease.subscriber = lease.group.detached
        self._core.expires(lease.group, lease.deadline_mono_ms)

    def _close(self, lease: Lease) -> None:
        """The delivery is over without an ack; its credit returns with the commit."""
        lease.live = False
        del lease.group.flight[lease.id]
        self._core.in_flight -= 1
        credits = self._core.open.credits
        credits[lease.subscriber] = credits.get(lease.subscriber, 0) + 1

    def _back(
        self,
        lease: Lease,
        attempt: int,
        failures: tuple[Failure, ...],
        now_ms: int,
        *,
        front: bool,
    ) -> None:
        core, group, task_id = self._core, lease.group, lease.id
        key, priority = (task_id, group.name), lease.traits.priority
        if lease.traits.ttl_end_ms is not None:
            core.lifetimes.add(task_id, lease.traits.ttl_end_ms)
        if attempt > 0:
            group.tries[task_id] = Tries(attempt, lease.epoch, priority, failures)
            core.open.effects.progress[key] = ProgressRow(
                task_id,
                group.name,
                ProgressState.RELEASED,
                attempt,
                now_ms,
                lease.epoch,
                failures,
            )
        else:
            core.open.effects.progress[key] = None
        if front:
            group.ready.push_front(task_id, priority)
        else:
            group.ready.push(task_id, priority, now_ms)
        core.wake(group)

    def unfit(self, lease: Lease, error: Exception, now_ms: int) -> None:
        """It cannot be written to any subscriber: to the dead letters, with what went wrong."""
        self._close(lease)
        self._dead_letters.to_dead_letters(
            lease, self._core.fault(lease, "delivery", error, now_ms), now_ms
        )

    # --- leases that end by time -----------------------------------------------------------

    def expire(self, now_ms: int, mono_ms: int) -> int:
        """Take back deliveries whose lease is over; how many."""
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
            self._lease_over(lease, now_ms)
        return len(over)

    def _lease_over(self, lease: Lease, now_ms: int) -> None:
        core = self._core
        gone = lease.subscriber.gone_mono_ms is not None
        reason = "connection lost" if gone else "lease over"
        # Ready at once: only whether there is another attempt matters.
        failure, wait_ms = self._judge(lease, 0, reason, now_ms)
        core.totals.leases_over += 1
        lease.live = False
        del lease.group.flight[lease.id]
        core.in_flight -= 1
        # Else one that is dead and holds its connection would burn every attempt there is.
        lease.subscriber.presence.doubt(lease)
        core.give_back(lease.subscriber, 1)
        if wait_ms is None:
            self._dead_letters.to_dead_letters(lease, failure, now_ms)
            return
        failures = (*lease.failures, failure)[-FAILURES_MAX:]
        self._back(lease, lease.attempt, failures, now_ms, front=False)
        if core.recorder is not None:
            core.recorder.lease_over(lease, failure.reason, now_ms)
