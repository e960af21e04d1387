"""The committer gives the store one batch at a time, and releases replies once their batch is
durable.

Changes that arrive during a commit form the next batch, which begins as soon as that commit ends.
While the store is idle, the first change begins a batch. The only changes that wait are acks whose
callers do not wait for an answer (``gather``): they do not begin a batch but join the next one,
which begins at most ``gather_s`` later. Invariants:

* Only gathered acks wait for a timer: a batch with any other change begins at once.
* A reply is released when the newest batch that its command could see is durable.
* After ``CommitRefused`` the enqueues of the batch are answered with ``refused`` and forgotten. Its
  other changes join the next batch under the same number.
* After ``CommitUnknown`` the batch is sent again under the same number before any later batch.
  Producers wait at most ``outcome_timeout_s``.
* Any other failure stops the daemon, which never continues from memory alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sized
from typing import TYPE_CHECKING, Any, Protocol

from tickwheel import failpoints
from tickwheel.clock import Clock
from tickwheel.engine.engine import Engine
from tickwheel.engine.sessions import ReplySink, StoredAnswer
from tickwheel.engine.state import Batch, Staged
from tickwheel.engine.topics import Dispatch
from tickwheel.errors import OutcomeUnknown, Refused, StoreFull, TickwheelError
from tickwheel.model.lateness import SLOW_MS, Cause
from tickwheel.model.records import ID_STEP
from tickwheel.persistence.contract import CommitRefused, CommitUnknown, Store, WorksAhead
from tickwheel.server.metrics.observed import Observed
from tickwheel.server.shard.callers import NullSink
from tickwheel.server.shard.reads import Reader

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.server.shard.callers import Call
    from tickwheel.server.tracing import Tracing

UNKNOWN_RETRY_S = REFUSED_RETRY_S = 0.2
MARK_TIME_MS = 3_600_000
"""Maximum age, in ms, of the newest time in the store while the shard is idle."""
ROOM_PROBE_S = 0.5
REPLY_BYTES = 150
"""Overhead of a waiting answer in bytes."""
GATHERED_MAX = 256
"""Maximum number of gathered changes in a batch. More would hardly lower the cost of each."""
STALLED = "the store does not answer; nothing was stored"


class HistorySink(Protocol):
    """Records the history of batches."""

    def prepare(self, number: int, notes: object) -> None:
        """Prepare the notes of a batch that is about to be committed."""

    def keep(self, number: int, notes: object) -> None:
        """Record the notes of a durable batch."""

    def note_clock(self, now_ms: int, position_ms: int) -> None:
        """Record that the clock was set back, if it is behind the wheel's position."""


class Committer:
    """Owns the open and the sealed batch. ``run`` commits them."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        reader: Reader,
        clock: Clock,
        *,
        owner: str,
        epoch: int,
        last_batch: int,
        outcome_timeout_s: float,
        landed: Callable[[Now, int], None],
        on_event: Callable[[str, str], None],
        write_acked: Callable[[list[Dispatch]], None] | None = None,
        observed: Observed | None = None,
        history: HistorySink | None = None,
        tracing: Tracing | None = None,
        replies_bytes_max: int = 4 << 20,
        replies_all_bytes_max: int = 128 << 20,
        gather_s: float = 0.0,
    ) -> None:
        self._gather_s = gather_s
        """Maximum seconds that acks gather; 0 disables gathering."""
        self._gathering: asyncio.TimerHandle | None = None
        """The timer that commits the open batch; None while no acks gather."""
        self._gathered: tuple[int, ...] = ()
        """The sizes (``_measure``) of the open batch when the newest gathered ack joined."""
        self._replies_bytes_max = replies_bytes_max
        self._replies_all_bytes_max = replies_all_bytes_max
        self.replies_bytes = 0
        """Bytes of all answers that wait for the store."""
        self._bytes_by_sink: dict[ReplySink, int] = {}
        """Sink of a caller → bytes of its waiting answers."""
        self._engine = engine
        self._core = engine.core
        self._store = store
        self._works_ahead = store if isinstance(store, WorksAhead) else None
        self._reader = reader
        self._clock = clock
        self._owner = owner
        self._epoch = epoch
        self._outcome_timeout_s = outcome_timeout_s
        self._landed = landed
        self._on_event = on_event
        self._write_acked = write_acked
        self._observed = observed or Observed()
        self._history = history
        self._tracing = tracing
        self._wake = asyncio.Event()
        self._stopping = False
        self._refusals = 0
        self.last_batch = last_batch
        self._marked = (-1, 0)
        """The newest batch when ``mark_time`` last saw a new one, and the steady time of that
        call."""
        self.full = False
        """Whether enqueues are refused because the store has no room."""
        self.stalled = False
        """Whether enqueues are refused because a batch's outcome has been unknown for too long."""
        self.trouble: str | None = None
        """The reason why commits currently fail; None while they succeed."""

    def start_full(self, why: str) -> None:
        """Start with a store that had no room for enqueues when it was opened."""
        self.full, self.trouble = True, why
        self._on_event("store_full", why)

    # --- used by operations ------------------------------------------------------------------

    def kick(self) -> None:
        """Wake the committer to commit the open batch."""
        if self._works_ahead is not None and self._core.sealed is not None:
            self._works_ahead.ahead(self._core.open.effects)
        self._wake.set()

    @property
    def will_seal(self) -> bool:
        """Whether the open batch will be sealed as soon as the store is free."""
        return self._wake.is_set()

    def gather(self, sink: ReplySink, request: int) -> None:
        """``reply`` to acks whose caller does not wait for the answer. The open batch is committed
        with the next other change or after ``gather_s``, or at once if these acks unblock a
        delivery, a producer or another operation."""
        open_batch = self._core.open
        if not self._may_gather(open_batch):
            self.reply(sink, request, None)
            return
        self._put(open_batch, sink, sink.answer_to(request, None))
        self._gathered = _measure(open_batch)
        if self._gathering is None:
            loop = asyncio.get_running_loop()
            self._gathering = loop.call_later(self._gather_s, self.kick)

    def _may_gather(self, batch: Batch) -> bool:
        if not self._gather_s or self._stopping or self._wake.is_set() or batch.is_empty():
            return False
        effects = batch.effects
        if len(effects.ended) + len(effects.progress) >= GATHERED_MAX:
            return False
        return not self._has_waiters(batch)

    def _has_waiters(self, batch: Batch) -> bool:
        """Return whether a key, delivery, producer, group or consumer waits for the batch."""
        if batch.ended or batch.handed or batch.staged or self._core.held_back:
            return True
        return any(subscriber.credit <= 0 for subscriber in batch.credits)

    def begin(self) -> None:
        """Commit the open batch, unless it consists of gathered acks for which nothing waits.
        Deliveries since the acks joined may have used up a consumer's credit, which only this batch
        returns."""
        batch = self._core.open
        if self._gathering is not None and _measure(batch) == self._gathered:
            if not self._has_waiters(batch):
                return
        if not batch.is_empty():
            self.kick()

    def reply(self, sink: ReplySink, request: int, value: object) -> None:
        """Give ``sink`` the answer once everything that the command saw or changed is durable."""
        core = self._core
        answer = sink.answer_to(request, value)
        if not core.open.is_empty():
            self._put(core.open, sink, answer)
            self._wake.set()
        elif core.sealed is not None:
            self._put(core.sealed, sink, answer)
        else:
            sink.give(answer)
            sink.flush()

    def answer(self, call: Call[Any], value: object) -> None:
        """Reply to the request's witness, if any, and then to its caller."""
        if call.witness is not None:
            self.reply(call.witness, call.number, value)
        self.reply(call.caller.replies, call.number, value)

    def _put(self, batch: Batch, sink: ReplySink, answer: Sized) -> None:
        size_bytes = len(answer) + REPLY_BYTES
        batch.replies.append((sink, answer))
        self.replies_bytes += size_bytes
        self._bytes_by_sink[sink] = self._bytes_by_sink.get(sink, 0) + size_bytes

    def is_behind(self, sink: ReplySink) -> bool:
        """Return whether the waiting answers of this caller, or of all, have reached a limit."""
        if not self.replies_bytes:
            return False
        if self.replies_bytes >= self._replies_all_bytes_max:
            return True
        return self._bytes_by_sink.get(sink, 0) >= self._replies_bytes_max

    def _uncount_replies(self, batch: Batch) -> None:
        """Subtract the replies of ``batch`` from the waiting bytes."""
        waiting = self._bytes_by_sink
        for sink, answer in batch.replies:
            size_bytes = len(answer) + REPLY_BYTES
            self.replies_bytes -= size_bytes
            if waiting[sink] > size_bytes:
                waiting[sink] -= size_bytes
            else:
                del waiting[sink]

    def mark_time(self, mono_ms: int) -> None:
        """Commit an empty batch every ``MARK_TIME_MS`` while the shard is idle. The next start
        compares its clock with the newest time in the store."""
        number, since_mono_ms = self._marked
        if self.last_batch != number:
            self._marked = (self.last_batch, mono_ms)
        elif mono_ms - since_mono_ms >= MARK_TIME_MS and self._core.sealed is None:
            self._put(self._core.open, _CallbackSink(lambda: None), ())
            self._wake.set()

    def after_all(self, act: Callable[[], None]) -> None:
        """Call ``act`` once all answers that are waiting now have been sent."""
        self.reply(_CallbackSink(act), 0, None)

    async def barrier(self, *, is_timed: bool = False) -> None:
        """Wait until everything accepted so far is durable. ``is_timed``: commit a batch with the
        current time as the wheel's position, even if nothing has changed."""
        done = asyncio.Event()
        if is_timed:
            self._core.wheel.catch_up(self._clock.read().now_ms)
            self._put(self._core.open, _CallbackSink(lambda: None), ())
        self.after_all(done.set)
        await done.wait()

    # --- lifecycle ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Commit until ``stop``. Raise the error that must stop the daemon."""
        while True:
            await self._wake.wait()
            batch, landing = self._seal(), None
            while batch is not None:
                batch, landing = await self._commit(batch, landing)
            if self._stopping:
                return

    async def stop(self, task: asyncio.Task[None]) -> None:
        """Commit the open batch with the deliveries in flight, and end ``run``."""
        self._stopping = True
        if self._core.in_flight:  # with the time, even if nothing else has changed
            self._put(self._core.open, _CallbackSink(lambda: None), ())
        self._wake.set()
        await task

    def _seal(self) -> Batch | None:
        self._wake.clear()
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        now = self._clock.read()
        if self._history is not None:
            self._history.note_clock(now.now_ms, self._core.wheel.position_ms)
        batch = self._engine.seal(*now, checkpoint_all=self._stopping)
        if batch is not None:
            failpoints.hit("commit.before")
        return batch

    async def _commit(
        self, batch: Batch, landing: asyncio.Task[None] | None
    ) -> tuple[Batch | None, asyncio.Task[None] | None]:
        """Commit ``batch`` after the previous ``landing``. Return (the next batch, the landing of
        this one). A separate asyncio task updates memory and writes replies (the landing) while the
        store commits the next batch. If the store's commit were the separate task, its result would
        arrive only after the loop had read from all connections again."""
        refused: CommitRefused | None = None
        try:
            await self._store_batch(batch)
        except CommitRefused as error:
            refused = error
        finally:
            if landing is not None:
                await landing
        if refused is not None:
            await self._handle_refusal(batch, refused)
            return None, None
        failpoints.hit("commit.after")
        self.last_batch += 1
        self._refusals = 0
        if self.trouble is not None and not self.full:
            self.trouble = None
            self._on_event("store_works_again", "commits go through")
        self._reader.landed(batch.effects)
        self._engine.intake.mark_durable(batch)
        following = self._seal() if self._wake.is_set() or self._stopping else None
        if following is None:
            await self._land(batch, self.last_batch)
            return None, None
        return following, asyncio.create_task(self._land(batch, self.last_batch))

    async def _land(self, batch: Batch, number: int) -> None:
        now = self._clock.read()
        wait_ms = self._engine.intake.land(batch, now.now_ms)
        if self._history is not None:
            self._history.keep(number, batch.notes)
        if batch.handed and self._write_acked is not None:
            self._write_acked(batch.handed)
        self._uncount_replies(batch)
        release(batch)
        self._landed(now, wait_ms)

    async def _store_batch(self, batch: Batch) -> None:
        """Commit the batch, repeating the commit until its outcome is known."""
        loop = asyncio.get_running_loop()
        patience = loop.time() + self._outcome_timeout_s
        number, began_s = self.last_batch + 1, time.monotonic()
        timer: asyncio.TimerHandle | None = None
        if self._history is not None:
            self._history.prepare(number, batch.notes)
        try:
            while True:
                try:
                    await self._store.commit(self._epoch, self._owner, number, batch.effects)
                    self._record_commit(batch, time.monotonic() - began_s)
                    return
                except CommitUnknown as error:
                    self._set_trouble(error)
                    if timer is None:
                        timer = loop.call_at(patience, self._give_up_waiting, batch)
                    await asyncio.sleep(UNKNOWN_RETRY_S)
        finally:
            self.stalled = False
            if timer is not None:
                timer.cancel()

    def _record_commit(self, batch: Batch, elapsed_s: float) -> None:
        self._observed.note_commit(batch.effects, elapsed_s)
        if self._tracing is not None:
            self._tracing.note_commit(batch.effects, self.last_batch + 1, elapsed_s)
        elapsed_ms = round(elapsed_s * 1000)
        if elapsed_ms >= SLOW_MS:
            now_ms = self._clock.read().now_ms
            self._core.ledger.daemon.add(Cause.STORE, now_ms - elapsed_ms, now_ms)

    def _give_up_waiting(self, batch: Batch) -> None:
        """Answer producers although the outcome of ``batch`` is unknown. Acks keep waiting.
        Producers of ``batch`` receive ``OutcomeUnknown``; their session keeps the outcome for a
        resend. Producers of the open batch receive ``Refused``, and their tasks are dropped."""
        self.stalled = True
        error = OutcomeUnknown("the store has not answered in time; resend to find out")
        for index, (address, session, answer) in enumerate(batch.staged):
            if address is not None:
                refuse(address, answer[0], error)
                batch.staged[index] = (None, session, answer)
        self._refuse_staged(self._engine.intake.withdraw(), Refused(f"{STALLED}: {self.trouble}"))

    @staticmethod
    def _refuse_staged(staged: Iterable[Staged], error: TickwheelError) -> None:
        for address, _, answer in staged:
            if address is not None:
                refuse(address, answer[0], error)

    async def _handle_refusal(self, batch: Batch, error: CommitRefused) -> None:
        self._set_trouble(error)
        self._engine.intake.refuse(batch)
        kind = StoreFull if error.full else Refused
        refusal = kind(f"the store refused the batch: {error.message}")
        self._refuse_staged(batch.staged, refusal)
        batch.staged = []
        if error.full and not self.full:
            self.full = True
            self._on_event("store_full", error.message)
        if self._refusals:
            # Retry at once only after the first refusal, because the acks alone may succeed.
            await asyncio.sleep(REFUSED_RETRY_S)
        self._refusals += 1
        self._wake.set()

    def _set_trouble(self, error: CommitRefused | CommitUnknown) -> None:
        self._observed.note_store_error(error)
        if self.trouble is None:
            self._on_event("store_trouble", error.message)
        self.trouble = error.message

    async def watch_room(self) -> None:
        """Probe for room every ``ROOM_PROBE_S`` while the store is full."""
        while True:
            await asyncio.sleep(ROOM_PROBE_S)
            if self.full and await self._store.probe_room():
                self.full, self.trouble = False, None
                self._on_event("store_has_room", "enqueues are accepted again")
                self._wake.set()


def _measure(batch: Batch) -> tuple[int, ...]:
    """Return the sizes of the batch's parts. Every addition to the batch changes the result."""
    effects = batch.effects
    return (
        len(effects.ended),
        len(effects.progress),
        len(effects.updated),
        len(effects.moved),
        len(effects.dead),
        len(effects.records),
        len(batch.staged),
        len(batch.handed),
        len(batch.ended),
        len(batch.replies),
    )


def release(batch: Batch) -> None:
    """Send every answer of the batch, in one piece per sink."""
    accepted: dict[ReplySink, list[StoredAnswer]] = {}
    staged = _without_chosen(batch, accepted) if batch.chosen else batch.staged
    for sink, _, stored in staged:
        if sink is None:
            continue
        if sink in accepted:
            accepted[sink].append(stored)
        else:
            accepted[sink] = [stored]
    for sink, answers in accepted.items():
        sink.accepted(answers)
    sinks: dict[ReplySink, None] = dict.fromkeys(accepted)
    for sink, answer in batch.replies:
        sink.give(answer)
        sinks[sink] = None
    for sink in sinks:
        sink.flush()


def _without_chosen(
    batch: Batch, accepted: dict[ReplySink, list[StoredAnswer]]
) -> Iterable[Staged]:
    """Answer requests that have due windows, with the chosen times. Yield the other requests."""
    for staged in batch.staged:
        sink, _, (request, first, count, accepted_ms) = staged
        dues_ms = batch.chosen.get(first)
        if sink is None or dues_ms is None:
            yield staged
            continue
        ids = tuple(range(first, first + count * ID_STEP, ID_STEP))
        sink.give(sink.answer_to(request, (accepted_ms, ids, {"dues_ms": dues_ms})))
        accepted.setdefault(sink, [])


def refuse(sink: ReplySink, request: int, error: TickwheelError) -> None:
    """Send an error without waiting for a batch."""
    sink.error(request, error.code, error.message)
    sink.flush()


class _CallbackSink(NullSink):
    """A sink that sends no answer, but calls ``act`` when the answer would be sent."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def flush(self) -> None:
        self._act()
