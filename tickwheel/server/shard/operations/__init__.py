"""Every verb of the daemon, on plain values: what a transport calls.

An operation gets who asks, the number to answer with, and checked or unchecked plain values (names,
ids, numbers, maps); it checks them, does what it says, and gives the answer to the caller's
``ReplySink`` when everything that the answer rests on is durable. What is wrong is raised, from the
error table. Deliveries go to the ``DeliverySink`` that the transport gave with its subscription.
Nothing here knows bytes, frames or connections; ``access.RIGHTS`` names the right that each
operation needs.

A transport wraps each request like this: ``begin()``, then the operation; a ``TickwheelError`` is
the answer, any other exception goes to ``contain``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tickwheel.server.shard.groups import Grouping, Lining
from tickwheel.server.shard.operations.bulk import Bulks
from tickwheel.server.shard.operations.consuming import Consuming
from tickwheel.server.shard.operations.controlling import Controlling
from tickwheel.server.shard.operations.listing import Listing
from tickwheel.server.shard.operations.producing import Producing
from tickwheel.server.shard.operations.resetting import Resetting
from tickwheel.server.shard.operations.restoring import Restoring
from tickwheel.server.shard.operations.settling import Settling
from tickwheel.server.shard.operations.transacting import Transacting
from tickwheel.server.shard.operations.watching import Watching
from tickwheel.server.shard.schedules import Scheduling

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.errors import TickwheelError
    from tickwheel.server.shard.callers import Caller
    from tickwheel.server.shard.shard import Shard
    from tickwheel.server.shard.views import ValueBytes


class Operations:
    """The operations of one shard. ``value_bytes`` says what a value takes in an answer."""

    role = "active"

    def __init__(self, shard: Shard, value_bytes: ValueBytes) -> None:
        self.shard = shard
        self.settings = shard.settings
        self.limits = shard.limits
        self.frame_bytes_max = shard.limits.frame_bytes_max
        self.clock = shard.clock
        self.epoch = shard.epoch
        self.begin = shard.border.begin
        self.contain = shard.border.contain
        self.survive = shard.border.survive
        self.fail = shard.fail

        produce = Producing(shard)
        self.enqueue = produce.enqueue
        self.enqueue_once = produce.enqueue_once
        self.enqueue_plain = produce.enqueue_plain
        self.enqueue_columns = produce.enqueue_columns
        self.enqueue_unanswered = produce.enqueue_unanswered
        self.leave = produce.leave
        self.plain_tasks = produce.plain_tasks

        consume = Consuming(shard)
        self.subscribe = consume.subscribe
        self.set_prefetch = consume.set_prefetch
        self.unsubscribe = consume.unsubscribe
        self.pull = consume.pull

        settle = Settling(shard)
        self.ack = settle.ack
        self.nack = settle.nack
        self.reject = settle.reject
        self.extend = settle.extend
        self.release = settle.release
        self.snooze = settle.snooze

        self._on_tasks(Controlling(shard, value_bytes))

        groups = Grouping(shard)
        self.create_group = groups.create_group
        self.delete_group = groups.delete_group
        self.delete_topic = groups.delete_topic
        self.configure = groups.configure

        self._on_schedules(Scheduling(shard, value_bytes, produce.check_door))
        door, tasks = produce.check_door, produce.checked
        show = Listing(shard, value_bytes)
        self._on_transactions(Transacting(shard, show, value_bytes, door, tasks))

        self._on_what_is_there(show, value_bytes)
        self._on_lines(Lining(shard, value_bytes))

    def _on_tasks(self, control: Controlling) -> None:
        self.cancel = control.cancel
        self.reschedule = control.reschedule
        self.run_now = control.run_now
        self.look_up = control.look_up
        self.cancel_key = control.cancel_key
        self.reschedule_key = control.reschedule_key
        self.run_now_key = control.run_now_key
        self.look_up_key = control.look_up_key
        self.requeue_dead = control.requeue_dead
        self.delete_dead = control.delete_dead

    def _on_lines(self, lines: Lining) -> None:
        self.held_keys = lines.held_keys
        self.key_lines = lines.key_lines
        self.release_key = lines.release_key
        self.skip_key = lines.skip_key

    def _on_what_is_there(self, show: Listing, value_bytes: ValueBytes) -> None:
        self._on_bulks(Bulks(self.shard, value_bytes, show))
        reset = Resetting(self.shard, show)
        self.reset_group = reset.reset_group
        self.preview_reset = reset.preview_reset
        watch = Watching(self.shard, show)
        self.overview = watch.overview
        self.group_lag = watch.group_lag
        self.consumers = watch.consumers
        self.task_history = watch.task_history
        self.history_tasks = watch.history_tasks
        self.report = watch.report
        self.list_tasks = show.list_tasks
        self.list_topics = show.list_topics
        self.show_topic = show.show_topic
        self.list_dead = show.list_dead
        self.stats = show.stats
        self.load = show.load
        self.backup = show.backup
        restores = Restoring(self.shard, show)
        self.restore = restores.restore
        self.list_restores = restores.list_restores
        self.show_restore = restores.show_restore
        self.cancel_restore = restores.cancel_restore

    def _on_schedules(self, schedule: Scheduling) -> None:
        self.put_schedule = schedule.put_schedule
        self.list_schedules = schedule.list_schedules
        self.show_schedule = schedule.show_schedule
        self.pause_schedule = schedule.pause_schedule
        self.resume_schedule = schedule.resume_schedule
        self.run_schedule = schedule.run_schedule
        self.backfill_schedule = schedule.backfill_schedule
        self.delete_schedule = schedule.delete_schedule

    def _on_transactions(self, transact: Transacting) -> None:
        self.prepare = transact.prepare
        self.commit_transaction = transact.commit_transaction
        self.rollback_transaction = transact.rollback_transaction
        self.answer_checks = transact.answer_checks
        self.list_transactions = transact.list_transactions
        self.show_transaction = transact.show_transaction

    def _on_bulks(self, bulks: Bulks) -> None:
        self.make_bulk = bulks.make_bulk
        self.preview_bulk = bulks.preview_bulk
        self.list_bulk = bulks.list_bulk
        self.show_bulk = bulks.show_bulk
        self.cancel_bulk = bulks.cancel_bulk

    # --- about the caller itself -----------------------------------------------------------------

    def ping(self, caller: Caller, request: int) -> None:
        """Say that the daemon is there, without waiting for the store."""
        caller.answer(request, None)

    def status(self, caller: Caller, request: int) -> None:
        """Answer what the daemon says of itself, without waiting for the store."""
        caller.answer(request, self.shard.status())

    def opened(self, caller: Caller) -> None:
        """Take note of a caller that has come."""
        caller.since_ms = self.shard.clock.read().now_ms
        self.shard.callers.add(caller)

    def join(self, caller: Caller, session: bytes, now_ms: int) -> None:
        """Remember the caller's enqueues in a session, for resends. Raises TooManySessions."""
        caller.session = self.shard.join_session(session, now_ms)

    def heard(self, caller: Caller) -> None:
        """Take note of a sign of life from the caller."""
        if caller.presence.doubted:
            self.shard.engine.subscriptions.heard(caller.presence, caller.consumers)
            self.shard.wake()

    def blocked(self, caller: Caller) -> None:
        """Stop deliveries to a caller that does not read, until ``unblocked``."""
        caller.is_blocked = True
        for subscriber in (*caller.subscribers.values(), *caller.pulls):
            subscriber.blocked = True

    def unblocked(self, caller: Caller) -> None:
        """Let deliveries go on to a caller that reads again."""
        caller.is_blocked = False
        for subscriber in (*caller.subscribers.values(), *caller.pulls):
            subscriber.blocked = False
            self.shard.core.regained(subscriber)
        for group in self.shard.checkbacks.groups_of(caller):
            self.shard.engine.transactions.came(group)
        self.shard.wake()
        self.shard.begin_listings()

    def finished(self, caller: Caller) -> None:
        """End a caller that asks no more. Unlike one that is gone, it keeps each lease to the
        lease's end: it is somewhere, and may settle as another caller."""
        caller.others.clear()
        if caller.subscribers or caller.pulls:
            self.closed(caller)
            return
        caller.close()
        self.shard.callers.discard(caller)
        session, caller.session = caller.session, None
        if session is not None:
            self.shard.leave_session(session)

    def closed(self, caller: Caller, broke: str = "") -> None:
        """End a caller that is gone: its leases end soon, and its waiting requests are not begun.
        ``broke``: how its connection did, if neither side has ended it."""
        shard = self.shard
        death = caller.death(broke) if broke and not shard.draining else ""
        caller.close()
        shard.callers.discard(caller)
        shard.listings.closed(caller)
        shard.backups.closed(caller)
        shard.lookups.closed(caller)
        shard.resets.previews.closed(caller)
        shard.checkbacks.closed(caller)
        mono_ms = shard.clock.read().mono_ms
        for subscriber in caller.consumers:
            if subscriber.sink is not None:
                subscriber.sink.closed()
            shard.engine.subscriptions.disconnected(subscriber, mono_ms, death)
        caller.subscribers.clear()
        caller.pulls.clear()
        caller.others.clear()
        session, caller.session = caller.session, None
        if session is not None:
            shard.leave_session(session)
        shard.wake()

    # --- about the work of all -------------------------------------------------------------------

    def is_behind(self, caller: Caller) -> bool:
        """Whether so many answers wait for the store that the caller should ask no more for now."""
        return self.shard.committer.is_behind(caller.replies)

    def handled(self) -> None:
        """Commit and deliver what came of requests that were handled together."""
        if not self.shard.core.open.is_empty():
            self.shard.committer.kick()
        if self.shard.core.runnable:
            self.shard.wake()

    def after_all(self, act: Callable[[], None]) -> None:
        """Call ``act`` behind all answers that are owed by now."""
        self.shard.committer.after_all(act)

    def mistake(self, caller: Caller, error: TickwheelError, *, quiet: bool) -> None:
        """Log that a conversation is ended for what its caller did."""
        event = "connection_closed_quietly" if quiet else "connection_closed"
        self.shard.on_event(event, f"{caller.address}: {error}")

    def greeting(self) -> dict[str, Any]:
        """The daemon's part in the cluster, with which a conversation begins."""
        return {"epoch": self.epoch, "role": self.role, "active": None}
