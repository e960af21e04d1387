"""A shard: its engine, committer and reader, the tick that drives them, and its recovery.

A tick fires due tasks, ends expired leases, dispatches ready tasks, gives the deliveries to the
sinks of their subscriptions, and sets one timer for the next due time. Every change that could make
a task due requests a tick; several requests in one step of the loop cause a single tick.

``Recovering.begin`` restores groups, sessions, tasks that were delivered before, and the first
handles in due order. Then the shard can serve. ``load_rest`` loads the other handles and the keys
while deliveries, enqueues and acks continue. Commands on tasks or keys wait until it has finished
(``Shard.loaded``), because they cannot change a task that is not in memory.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from tickwheel import failpoints
from tickwheel.clock import Clock
from tickwheel.engine.engine import Engine
from tickwheel.engine.tasks import RESET
from tickwheel.engine.timetables import BadTiming, Timetable
from tickwheel.model.kinds import SCHEDULE
from tickwheel.model.lateness import LATE_MS, Cause
from tickwheel.model.records import TaskSnapshot
from tickwheel.persistence.contract import Handles, Opened, Store, StoredTask
from tickwheel.server.logs import Log, bind_trace
from tickwheel.server.metrics.observed import Observed
from tickwheel.server.shard.background import Upkeep
from tickwheel.server.shard.backups import Restores
from tickwheel.server.shard.bulk import Runner
from tickwheel.server.shard.callers import Border, OnEvent
from tickwheel.server.shard.committer import Committer
from tickwheel.server.shard.enqueue import Coalescing
from tickwheel.server.shard.following import Following
from tickwheel.server.shard.groups import forget_topics, reserve_topics
from tickwheel.server.shard.new_tasks import NewTasks
from tickwheel.server.shard.overview import Stories
from tickwheel.server.shard.parts import SlowRequests
from tickwheel.server.shard.reads import Commands, Loader, Reader
from tickwheel.server.shard.resets import Resets
from tickwheel.server.shard.transactions import CHECKS_PER_TICK, CheckBacks
from tickwheel.waiting import cancel_all

if TYPE_CHECKING:
    from pathlib import Path

    from tickwheel.clock import Now
    from tickwheel.engine.topics import DeliverySink, Dispatch, Item
    from tickwheel.history.daemon import History
    from tickwheel.model.lateness import Causes
    from tickwheel.persistence.contract import Siblings
    from tickwheel.server.metrics.observed import Lateness
    from tickwheel.server.settings import Settings
    from tickwheel.server.shard.callers import Caller
    from tickwheel.server.shard.parts import Directory, Sender
    from tickwheel.server.tracing import Tracing

NS_PER_MS = 1_000_000
NS_PER_SECOND = 1_000_000_000
AFTER_DUE_NS = 20_000
"""Delay of a tick after the beginning of its millisecond. The timer uses the steady clock: if that
clock is slightly ahead of the wall clock, a tick without this delay would find nothing due."""
FIRE_PER_TICK = 4_096
DISPATCH_PER_TICK = 4_096
EXPIRED_PER_TICK = 1_024
"""Maximum number of leases that one tick ends because they have timed out."""
SCHEDULES_PER_TICK = 64
"""Maximum number of schedules that one tick fires; each can create a hundred tasks."""
SLEEP_MS_MAX = 1_000
"""Maximum time between ticks, within which a jump of the clock is noticed."""
SWEEP_MS = 60_000
TOPICS_PER_SWEEP = 10_000

LISTINGS_AT_A_TIME = 4
"""Maximum number of concurrent listings. A store has few threads for them, and each listing can
read several MiB."""


class Shard:
    """A running shard. Call ``start`` after the recovery. ``stop`` commits the open batch."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        store: Store,
        opened: Opened,
        clock: Clock,
        *,
        owner: str,
        backup_folder: Path,
        on_event: OnEvent,
        may_deliver: Callable[[int], bool] | None = None,
        status: Callable[[], dict[str, Any]] = dict,
        observed: Observed | None = None,
        history: History | None = None,
        tracing: Tracing | None = None,
        siblings: Siblings | None = None,
    ) -> None:
        """``siblings`` are the other shards, whose settings this shard follows, or None."""
        self.settings = settings
        self.limits = settings.limits()
        self.engine = engine
        self.core = engine.core
        self.store = store
        self.clock = clock
        self.epoch = opened.epoch
        self.on_event = on_event
        self.status = status
        self._may_deliver = may_deliver
        """Returns whether the leader's lease is valid at a time of the steady clock; None if no
        other node can lead."""
        self.loaded = asyncio.Event()
        self.reader = Reader(self.core, store, on_event)
        self.border = Border(engine, on_event)
        self.failed = self.border.failed
        """Receives the exception that must stop the daemon."""
        self.observed = observed or Observed()
        self.history = history
        self.outbound: Sender | None = None
        self.directory: Directory | None = None
        self._tracing = tracing
        self.callers: set[Caller] = set()
        self.draining = False
        self.started_mono_ms = self._swept_mono_ms = clock.read().mono_ms
        self._delivering = Delivering(engine, clock, self.observed.lateness, tracing)
        self.committer = self._new_committer(owner, opened)
        if not opened.has_room:
            self.committer.start_full(opened.no_room)
        self.commands = Commands(
            self.reader,
            self.border,
            settings.commands_max,
            settings.command_ids_max,
            self.may_begin_command,
            self.committer.barrier,
        )
        self._loader = Loader(engine, self.reader, clock, self.spawn, self.wake)
        self._add_features(backup_folder)
        self.following: Following | None = None
        if siblings is not None:
            self.following = Following(self, self.upkeep, siblings)
        self.on_landed: Callable[[], None] = lambda: None
        """Called after waiting answers were sent, so that the transport can read more requests."""
        self.is_woken = self._stopped = self._paused = False
        self._alarm: Alarm | None = None
        self.next_tick_mono_ms = 0
        """Time of the next tick, unless one is requested earlier."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._begin_ledger(opened)

    def _add_features(self, backup_folder: Path) -> None:
        """Create the objects that use this shard's parts."""
        self.listings = SlowRequests(
            self, "listings_max", "listings_all_max", at_a_time=LISTINGS_AT_A_TIME
        )
        self.backups = SlowRequests(self, "backups_max")
        self.lookups = SlowRequests(self, "history_lookups_max")
        """The queue of look-ups in the history."""
        previews = SlowRequests(self, "resets_max")
        self.request_queues = self.listings, self.backups, self.lookups, previews
        self.stories = Stories(self.settings.history_dir)
        self.backup_folder = backup_folder
        self.restores = Restores(self, backup_folder)
        reserve = partial(reserve_topics, self)
        self.new_tasks = NewTasks(self.core, self.limits, reserve, self.settings.delay_levels_ms)
        self.coalescing = Coalescing(self)
        self.upkeep = Upkeep(self, backup_folder)
        self.bulks = Runner(self)
        self.resets = self.bulks.kinds[RESET] = Resets(self.bulks, previews)
        self.checkbacks = CheckBacks()

    def _begin_ledger(self, opened: Opened) -> None:
        """Start to record the causes that delay the whole daemon."""
        self._jumps, self._held = self.clock.jumps, self.clock.held
        self._forbidden_since_ms: int | None = None
        """Wall time since which deliveries are forbidden, because the leader's lease may have
        expired; None while they are allowed."""
        if not opened.created:
            self.core.ledger.begin(opened.position_ms, self.clock.read().now_ms)
        self.observed.loop_busy = self._record_busy_loop

    def _new_committer(self, owner: str, opened: Opened) -> Committer:
        settings = self.settings
        return Committer(
            self.engine,
            self.store,
            self.reader,
            self.clock,
            owner=owner,
            epoch=opened.epoch,
            last_batch=opened.last_batch,
            outcome_timeout_s=settings.outcome_timeout_s,
            landed=self._landed,
            replies_bytes_max=settings.replies_bytes_max,
            replies_all_bytes_max=settings.replies_all_bytes_max,
            gather_s=settings.ack_gather_ms / 1000,
            on_event=self.on_event,
            write_acked=self._delivering.write_acked,
            observed=self.observed,
            history=self.history,
            tracing=self._tracing,
        )

    # --- lifecycle ---------------------------------------------------------------------------

    def start(self, load_rest: Coroutine[Any, Any, None]) -> None:
        """Begin to serve. ``load_rest`` loads the tasks that are not in memory. Call this after
        ``following`` has caught up."""
        self._committing = self.spawn(self.committer.run())
        self.loading = self.spawn(self._load(load_rest))
        self.spawn(self.committer.watch_room())
        self.spawn(self.upkeep.measure_disk_forever())
        if self.following is not None:
            self.spawn(self.following.run())
        self.wake()

    async def _load(self, load_rest: Coroutine[Any, Any, None]) -> None:
        await load_rest
        self.loaded.set()
        self.upkeep.start()
        self.bulks.start()
        self.wake()
        self.spawn(self.coalescing.run())
        await self.commands.run()

    async def stop(self) -> None:
        """Commit the open batch with the deliveries in flight. Raise the error of the committer."""
        self._stopped = True
        await self.stories.stop()
        self._close_alarm()
        try:
            await self.committer.stop(self._committing)
        finally:
            await cancel_all(self._tasks)

    def pause(self) -> None:
        """Stop deliveries; commands still run."""
        self._paused = True

    async def kill(self) -> None:
        """Stop without another commit."""
        self._stopped = True
        await self.stories.stop()
        self._close_alarm()
        await cancel_all(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Stop the daemon after an error that leaves its state unreliable."""
        self.border.fail(error)

    @property
    def _is_over(self) -> bool:
        """Whether deliveries have ended."""
        return self._stopped or self._paused or self.failed.done()

    def _landed(self, now: Now, wait_ms: int) -> None:
        """Continue after a batch has landed and its replies were sent. ``wait_ms`` is the time
        until the batch's earliest task is due. A tick is requested only if it is needed, because an
        idle tick costs as much as one that delivers."""
        timer_ms = self.next_tick_mono_ms - now.mono_ms
        needs_tick = wait_ms <= timer_ms or timer_ms <= 0 or self.clock.jumps != self._jumps
        if needs_tick or self.engine.ownership.replays:
            self.wake()
        elif not self._is_over:
            self.core.wheel.catch_up(now.now_ms)
            self.committer.begin()
        self.begin_slow_requests()
        self.on_landed()

    def begin_slow_requests(self) -> None:
        """Begin queued slow requests whose callers can receive answers again."""
        for queue in self.request_queues:
            queue.begin_waiting()

    def can_receive(self, caller: Caller) -> bool:
        return not (caller.is_blocked or self.committer.is_behind(caller.replies))

    def may_begin_command(self, caller: Caller) -> bool:
        core = self.core
        changed_bytes = core.open.updated_bytes
        if core.sealed is not None:
            changed_bytes += core.sealed.updated_bytes
        if changed_bytes >= self.settings.staged_bytes_max:
            return False
        return not self.committer.is_behind(caller.replies)

    # --- the tick -----------------------------------------------------------------------------

    def wake(self) -> None:
        """Request a tick in this step of the loop."""
        if not self.is_woken and not self._is_over:
            self.is_woken = True
            asyncio.get_running_loop().call_soon(self.tick)

    def tick(self) -> None:
        """Fire and dispatch due work now, and set the alarm for the next tick."""
        self.is_woken = False
        if self._is_over:
            return
        try:
            now = self.clock.read()
            if self.clock.jumps != self._jumps:
                self._report_jump(now)
            if self.history is not None:
                self.history.note_clock(now.now_ms, self.core.wheel.position_ms)
            if self._may_deliver is not None and self._is_forbidden(now, self._may_deliver):
                return  # the renewal of the lease requests a tick
            more = self.engine.firing.fire(now.now_ms, FIRE_PER_TICK)
            more |= self._fire_schedules(now)
            more |= self._check_transactions(now)
            more |= self.engine.firing.request_lapsed(now.now_ms, FIRE_PER_TICK)
            more |= self.engine.settlement.expire(*now, EXPIRED_PER_TICK)
            dispatches, unfinished = self.engine.delivery.dispatch(*now, DISPATCH_PER_TICK)
            for dispatch in dispatches:
                self._delivering.write(dispatch, now.now_ms)
            if dispatches:
                failpoints.hit("deliver.before_checkpoint")
            self._delivering.report_ended()
            self._report_faults()
            self._loader.load()
            if self.engine.ownership.replays:
                self.upkeep.replay()
            self.committer.begin()
            self._sweep(now)
        except Exception as error:
            self.fail(error)
            return
        if self.clock.held != self._held:
            self._held = self.clock.held
            if not self._held:
                self.on_event("clock_released", "the clock is trusted again")
        if more or unfinished:
            self.wake()
        else:
            self._sleep(now)

    def _fire_schedules(self, now: Now) -> bool:
        schedules = self.engine.schedules
        more = schedules.fire(now.now_ms, SCHEDULES_PER_TICK, accepts=self.accepts_tasks())
        schedule_heap = self.core.schedule_heap
        if schedule_heap.late_ms:
            self.observed.note_late_schedules(schedule_heap.late_ms)
            schedule_heap.late_ms = []
        if schedule_heap.to_cancel:
            self.upkeep.cancel_previous()
        return more

    def accepts_tasks(self) -> bool:
        return not (
            self.committer.full
            or self.committer.stalled
            or self.draining
            or self.engine.intake.inflight_bytes >= self.settings.staged_bytes_max
        )

    def _check_transactions(self, now: Now) -> bool:
        """Send due check-backs of transactions. Return True if more are due."""
        wait_ms = self.core.transaction_registry.wait_ms(now.mono_ms)
        if wait_ms is None or wait_ms > 0:
            return False
        checkbacks, totals = self.checkbacks, self.core.totals
        parked = totals.transactions_parked
        more = self.engine.transactions.check(*now, CHECKS_PER_TICK, checkbacks.ask)
        checkbacks.flush(lambda error: self.border.report("a check-back of a transaction", error))
        if totals.transactions_parked > parked:
            count = totals.transactions_parked - parked
            self.on_event("transactions_parked", f"{count} parked; see tickwheel transactions list")
        return more

    def _sweep(self, now: Now) -> None:
        """Forget expired state every ``SWEEP_MS``."""
        if now.mono_ms - self._swept_mono_ms < SWEEP_MS:
            return
        self._swept_mono_ms = now.mono_ms
        self.engine.sweep(now.mono_ms)
        forget_topics(self, TOPICS_PER_SWEEP)
        self.committer.mark_time(now.mono_ms)

    def _report_faults(self) -> None:
        """Report the tasks whose processing failed. Most have become dead letters."""
        faults, self.core.faults = self.core.faults, []
        for operation, error, trace in faults:
            with bind_trace(trace):
                self.border.report(operation, error)

    def _is_forbidden(self, now: Now, may_deliver: Callable[[int], bool]) -> bool:
        """Return whether deliveries are forbidden because the leader's lease may have expired."""
        if not may_deliver(now.mono_ms):
            if self._forbidden_since_ms is None:
                self._forbidden_since_ms = now.now_ms
            return True
        if self._forbidden_since_ms is not None:
            self.core.ledger.daemon.add(Cause.STORE, self._forbidden_since_ms, now.now_ms)
            self._forbidden_since_ms = None
        return False

    def _record_busy_loop(self, busy_ms: int) -> None:
        """Record that the event loop was busy for ``busy_ms``."""
        now_ms = self.clock.read().now_ms
        self.core.ledger.daemon.add(Cause.LOOP_BUSY, now_ms - busy_ms, now_ms)

    def _report_jump(self, now: Now) -> None:
        self._jumps, jump_ms = self.clock.jumps, self.clock.last_jump_ms
        if jump_ms > 0 and not self.clock.held:
            self.core.ledger.daemon.add(Cause.CLOCK, now.now_ms - jump_ms, now.now_ms)
        held = "; held: nothing fires until it is correct again" if self.clock.held else ""
        self.on_event("clock_jumped", f"by {self.clock.last_jump_ms} ms{held}")

    def _sleep(self, now: Now) -> None:
        if self.clock.is_standing:
            # The owner of a manual clock requests the ticks.
            self.next_tick_mono_ms = now.mono_ms + SLEEP_MS_MAX
            return
        wake_ms, into_ns = SLEEP_MS_MAX, 0
        checkpoint_mono_ms = self.engine.next_checkpoint_mono_ms()
        is_late = checkpoint_mono_ms is not None and checkpoint_mono_ms <= now.mono_ms
        # A late checkpoint goes into the next batch and needs no timer, which would fire
        # continuously while the store does not answer.
        is_late = is_late and self.committer.will_seal
        other_ms = self.engine.wake_in_ms(*now, has_checkpoints=not is_late)
        if other_ms is not None:
            wake_ms = min(wake_ms, other_ms)
        due_ms = self.core.wheel.next_due_ms(now.now_ms)
        if due_ms is not None and due_ms - now.now_ms <= wake_ms and not self._loader.is_full:
            wake_ms = due_ms - now.now_ms
            into_ns = self.clock.ns_within_ms() - AFTER_DUE_NS
        # With a late checkpoint, ``_landed`` requests the tick that sets the next one's time.
        self.next_tick_mono_ms = now.mono_ms + (0 if is_late else wake_ms)
        if self._alarm is None:
            self._alarm = Alarm(self.on_timer)
        self._alarm.set(wake_ms * NS_PER_MS - into_ns)

    def _close_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.close()

    def on_timer(self) -> None:
        """Run a tick, and commit a checkpoint that is due."""
        checkpoint_mono_ms = self.engine.next_checkpoint_mono_ms()
        if checkpoint_mono_ms is not None and checkpoint_mono_ms <= self.clock.read().mono_ms:
            self.committer.kick()
        if not self.is_woken:
            # Tick now, so that due tasks do not wait for another turn of the loop.
            self.is_woken = True
            self.tick()


class Delivering:
    """Writes deliveries and records their lateness. An early delivery is counted as an error."""

    def __init__(
        self, engine: Engine, clock: Clock, lateness: Lateness, tracing: Tracing | None = None
    ) -> None:
        self._core = engine.core
        self._settlement = engine.settlement
        self._clock = clock
        self._lateness = lateness
        self._tracing = tracing

    def write(self, dispatch: Dispatch, now_ms: int) -> None:
        subscriber, items, taken_ms, _ = dispatch
        # The tasks were due when they were leased; the clock may have been set back since then.
        now_ms = max(now_ms, taken_ms)
        late_ms = [now_ms - row[1] for row, attempt, _ in items if attempt == 1 or row[1] > now_ms]
        if late_ms and min(late_ms) < 0:
            self._core.totals.early += sum(late < 0 for late in late_ms)
            late_ms = [late for late in late_ms if late >= 0]
        causes = self._record_lateness(dispatch, late_ms, now_ms) if late_ms else None
        sink = subscriber.sink
        assert sink is not None
        try:
            sink.deliver(self._core.epoch, now_ms, items)
        except Exception:
            sendable = [item for item in items if self._check_item(sink, dispatch, item, now_ms)]
            if len(sendable) == len(items):
                raise  # no single delivery causes the error
            if sendable or subscriber.once:
                sink.deliver(self._core.epoch, now_ms, sendable)
        else:
            if self._tracing is not None:
                self._tracing.note_deliveries(dispatch, now_ms, causes)

    def _record_lateness(
        self, dispatch: Dispatch, late_ms: list[int], now_ms: int
    ) -> Causes | None:
        """Record the lateness of first deliveries. Return the causes if any is late."""
        subscriber, items, _, causes = dispatch
        group, lateness = subscriber.group, self._lateness
        low, high = lateness.note(group.topic.name, late_ms)
        if high <= LATE_MS:
            return None
        if causes is None:
            all_late = low > LATE_MS and len(late_ms) == len(items)
            causes = self._core.ledger.causes(group, items, now_ms, all_late=all_late)
        if isinstance(causes, Cause):
            lateness.by_cause[causes].observe_all(late_ms, low, high)
        elif causes is not None:
            lateness.note_causes(items, causes, now_ms)
        return causes

    def _check_item(self, sink: DeliverySink, dispatch: Dispatch, item: Item, now_ms: int) -> bool:
        """Return whether the delivery can be written. If it cannot, make its task a dead letter,
        unless it was acked on delivery and has thus ended. The other deliveries of the
        frame are still sent, and the daemon keeps running."""
        row, attempt, _ = item
        try:
            sink.check(item)
        except Exception as error:
            group = dispatch.subscriber.group
            trace = None if row.options is None else row.options.trace
            lease = self._settlement.current(group, row.id, self._core.epoch, attempt)
            if lease is not None:
                self._settlement.unfit(lease, error, now_ms, trace)
            else:
                self._core.faults.append((f"task {row.id}, delivered once", error, trace))
            return False
        return True

    def write_acked(self, dispatches: list[Dispatch]) -> None:
        """Write at-most-once deliveries after their acks are durable."""
        now_ms = self._clock.read().now_ms
        for dispatch in dispatches:
            if dispatch.subscriber.gone_mono_ms is not None:
                self._core.totals.dropped_once += len(dispatch.items)
            else:
                self.write(dispatch, now_ms)

    def report_ended(self) -> None:
        """Tell the sinks about subscriptions that the engine has ended."""
        ended, self._core.cut = self._core.cut, []
        for subscriber, code, message in ended:
            if subscriber.sink is not None:
                subscriber.sink.ended(code, message)


# --- recovery ------------------------------------------------------------------------------------

IDS_PER_READ = 1_000
FIRST_CHUNK = 10_000
OCCURRENCE_READ_BYTES = 16 << 20
_NO_TIMING: dict[str, Any] = {"cron": "@yearly", "timezone": "UTC", "every_ms": None}


class Recovering:
    """Recovers one engine from its store."""

    def __init__(
        self, store: Store, engine: Engine, opened: Opened, clock: Clock, grace_ms: int
    ) -> None:
        self._store = store
        self._engine = engine
        self._opened = opened
        self._clock = clock
        self._grace_ms = grace_ms
        self._ids_with_records: set[int] = set()
        self._chunks: AsyncIterator[Handles] | None = None
        self.loaded = 0
        """Number of loaded handles."""
        self.rows_missing = 0
        """Number of tasks that have progress or dead letters but no row, which means a damaged
        store."""
        self.schedules_paused: list[str] = []
        """Schedules that were paused because this machine cannot compute their times, with
        reasons."""

    async def begin(self) -> None:
        """Load everything that serving requires. ``load_rest`` loads the remainder. Raise
        StoreError."""
        recovery = self._engine.recovery
        self._engine.core.keys.begin_loading()
        recovery.stopped_ms = self._opened.position_ms
        small = await self._store.recover_small()
        now = self._clock.read()
        self._engine.ownership.started_ms = max(recovery.stopped_ms, now.now_ms)
        recovery.records(small.of_kind, *now)
        recovery.outcomes(small.outcomes)
        schedules = self._engine.schedules
        for row in small.of_kind(SCHEDULE):
            try:
                schedules.restore(row, Timetable(row.schedule))
            except BadTiming as error:
                # This machine does not know the schedule's time zone, which an operator has to
                # install.
                self.schedules_paused.append(f"{row.schedule.name}: {error.field} {error}")
                stopped = row._replace(paused=True)
                schedules.restore(stopped, Timetable(row.schedule._replace(**_NO_TIMING)))
        self._ids_with_records = {row.id for row in small.progress} | {row[0] for row in small.dead}
        # After a crash, consumers may be gone. After a clean stop, they have received GOODBYE and
        # wait.
        grace_ms = None if self._opened.clean else self._grace_ms
        ids = sorted(self._ids_with_records)
        for start in range(0, len(ids), IDS_PER_READ):
            # Keep only the ids that have a row; ``rows_missing`` counts the others (damage).
            self._ids_with_records -= set(ids[start : start + IDS_PER_READ])
            for task in (await self._store.read(ids[start : start + IDS_PER_READ])).values():
                self._ids_with_records.add(task.row.id)
                recovery.with_history(_snapshot(task), *self._clock.read(), grace_ms)
        self.rows_missing = len(ids) - len(self._ids_with_records)
        recovery.make_arrivals_ready(self._clock.read().now_ms)
        await self._check_newest_occurrences()
        self._chunks = aiter(self._store.recover_handles(FIRST_CHUNK))
        async for chunk in self._chunks:
            self._add(chunk)
            if not self.begin_loaded_all:
                break
        if self.begin_loaded_all:
            await self._load()

    async def _check_newest_occurrences(self) -> None:
        """Find out whether the newest tasks of schedules have ended."""
        unread: Sequence[int] = self._engine.core.schedule_heap.watched_ids()
        while unread:
            ids = unread
            tasks, unread = await self._store.read_some(ids, OCCURRENCE_READ_BYTES)
            read_ids = ids[: len(ids) - len(unread)]
            snapshots = {task_id: _snapshot(task) for task_id, task in tasks.items()}
            self._engine.schedules.unwatch_ended(read_ids, snapshots)

    def log_summary(self, log: Log, store: str, elapsed_s: float) -> None:
        """Log the result of ``begin``: recovered state, missing rows and paused schedules."""
        if self.rows_missing:
            log.error("rows_missing", store=store, tasks=self.rows_missing, see="tickwheel check")
        for name in self.schedules_paused:
            log.error("schedule_paused", schedule=name)
        core, is_clean = self._engine.core, self._opened.clean
        groups = [group for topic in core.topics.values() for group in topic.groups.values()]
        (log.info if is_clean else log.warning)(
            "recovered" if is_clean else "recovered_after_unclean_stop",
            store=store,
            epoch=self._opened.epoch,
            scheduled=core.scheduled,
            leases_kept=self._engine.recovery.leases_kept,
            ready=sum(group.ready_count for group in groups),
            dead=core.dead,
            seconds=round(elapsed_s, 3),
        )

    @property
    def begin_loaded_all(self) -> bool:
        """Whether ``begin`` has loaded all tasks."""
        return self.loaded < FIRST_CHUNK

    @property
    def is_empty(self) -> bool:
        """Whether the store contains no task, not even a dead letter."""
        return self.begin_loaded_all and not self.loaded and not self._ids_with_records

    async def load_rest(self) -> None:
        """Load the tasks that ``begin`` did not load. Raise StoreError."""
        if not self.begin_loaded_all:
            await self._load()

    async def _load(self) -> None:
        assert self._chunks is not None
        async for chunk in self._chunks:
            self._add(chunk)
            await asyncio.sleep(0)
        self._engine.recovery.handles_loaded(None)
        async for ids, hashes, expected in self._store.recover_keys():
            self._add_keys(ids, hashes, expected)
            await asyncio.sleep(0)
        self._engine.core.keys.loaded()

    def _add_keys(self, ids: Sequence[int], hashes: Sequence[int], expected: int) -> None:
        mark = self._opened.id_mark
        if ids and max(ids) > mark:
            # Tasks with ids above the mark were enqueued since this recovery began and are already
            # indexed.
            kept = [index for index, task_id in enumerate(ids) if task_id <= mark]
            ids, hashes = [ids[index] for index in kept], [hashes[index] for index in kept]
        self._engine.recovery.keys(ids, hashes, self._ids_with_records, expected)

    def _add(self, chunk: Handles) -> None:
        ids, dues_ms, topics = chunk.ids, chunk.dues_ms, chunk.topics
        mark = self._opened.id_mark
        if ids and max(ids) > mark:
            # Tasks with ids above the mark were enqueued since this recovery began and are on the
            # wheel.
            kept = [index for index, task_id in enumerate(ids) if task_id <= mark]
            ids = [ids[index] for index in kept]
            dues_ms = [dues_ms[index] for index in kept]
            topics = [topics[index] for index in kept]
        self._engine.recovery.handles(ids, dues_ms, topics, self._ids_with_records)
        if chunk.dues_ms:
            self._engine.recovery.handles_loaded(chunk.dues_ms[-1])
        self.loaded += len(ids)


def _snapshot(task: StoredTask) -> TaskSnapshot:
    """Return the task with its progress and dead letters by group."""
    progress, dead = {p.group: p for p in task.progress}, {d.group: d for d in task.dead}
    return TaskSnapshot(task.row, progress, dead)


# --- the timer of the tick ------------------------------------------------------------------------


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    """``struct itimerspec``; with an ``interval`` of zero the timer does not repeat."""

    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class Alarm:
    """Calls ``ring`` once after a delay in nanoseconds. Call ``close`` when it is no longer needed.
    Timers of an event loop count whole milliseconds of the steady clock, while a task is due at the
    beginning of a millisecond of the wall clock. With such a timer, a delivery was half a
    millisecond late on average and two at most. A timerfd becomes readable with microsecond
    precision (timerfd_create(2)), and the event loop waits for it as for a socket. Where no timerfd
    can be created (not Linux, no free descriptor, a loop that cannot watch files), the loop's timer
    is used. Each ``set`` causes at most one call."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._fd: int | None = None
        self._spec = _TimerSpec()
        self._set_time: Callable[..., int] = int
        with suppress(OSError, AttributeError, NotImplementedError):
            self._open()

    def _open(self) -> None:
        """Create a timerfd and watch it. Raise OSError if that fails."""
        libc = _libc()
        make, self._set_time = libc.timerfd_create, libc.timerfd_settime
        # Both flags have the values of open(2).
        fd = make(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        try:
            self._loop.add_reader(fd, self._on_readable)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def set(self, after_ns: int) -> None:
        """Ring after ``after_ns``. This replaces the earlier setting."""
        if self._fd is None:
            if self._handle is not None:
                self._handle.cancel()
            self._handle = self._loop.call_later(max(0, after_ns) / NS_PER_SECOND, self._ring)
            return
        value = self._spec.value
        # A value of zero would disarm the timer.
        value.seconds, value.nanoseconds = divmod(max(1, after_ns), NS_PER_SECOND)
        self._set_time(self._fd, 0, ctypes.byref(self._spec), None)

    def _on_readable(self) -> None:
        assert self._fd is not None, "only an open timerfd is watched"
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # the alarm was set again in this turn of the loop
        self._ring()

    def close(self) -> None:
        """Cancel the alarm permanently. A second call does nothing."""
        if self._handle is not None:
            self._handle.cancel()
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None
        self._ring = _nothing


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _nothing() -> None:
    """Replace ``ring`` of a closed alarm."""
