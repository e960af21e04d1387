"""The committer: one batch at a time to the store, and every reply behind its batch.

Whatever arrives while a batch is being committed forms the next one, which begins at once; an empty
store begins with the first that comes. One thing waits: acks for which nobody waits (``gather``)
begin no batch of their own, but go with the next one, ``gather_s`` later at most.
Invariants:

* Nothing but such acks ever waits for a timer: a batch with anything else in it begins at once.
* A reply is released when the newest batch that its command could see is durable.
* ``CommitRefused``: the enqueues of that batch are answered ``refused`` and forgotten; the
  rest joins the next batch under the same number.
* ``CommitUnknown``: the same number is tried again before anything later is sent; producers wait
  ``outcome_timeout_s`` at most.
* Any other failure stops the daemon: it never goes on in memory only.
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
from tickwheel.server.shard.callers import Nobody
from tickwheel.server.shard.reads import Reader

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.server.shard.callers import Ask
    from tickwheel.server.tracing import Tracing

UNKNOWN_RETRY_S = REFUSED_RETRY_S = 0.2
MARK_TIME_MS = 3_600_000
"""How old, in ms, the time that the store knows may get while nothing happens."""
ROOM_PROBE_S = 0.5
REPLY_BYTES = 150
"""Bytes that a waiting answer takes beside its own."""
GATHERED_MAX = 256
"""Changes that gather: a batch of so many costs hardly less for each when it waits for more."""
STALLED = "the store does not answer; nothing was kept"


class HistorySink(Protocol):
    """Keeps a history of what the batches did."""

    def prepare(self, number: int, notes: object) -> None:
        """Get ready for a batch that the store is about to get."""

    def keep(self, number: int, notes: object) -> None:
        """Keep the notes of a batch that is durable now."""


class Committer:
    """Owns the open and the sealed batch; ``run`` is its life."""

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
        hand_over: Callable[[list[Dispatch]], None] | None = None,
        observed: Observed | None = None,
        history: HistorySink | None = None,
        tracing: Tracing | None = None,
        replies_bytes_max: int = 4 << 20,
        replies_all_bytes_max: int = 128 << 20,
        gather_s: float = 0.0,
    ) -> None:
        self._gather_s = gather_s
        """How long acks may gather for which nobody waits; 0: not at all."""
        self._gathering: asyncio.TimerHandle | None = None
        """Ends the waiting of the open batch; None: it does not wait."""
        self._gathered: tuple[int, ...] = ()
        """What the open batch had when the last ack joined that may wait."""
        self._replies_bytes_max = replies_bytes_max
        self._replies_all_bytes_max = replies_all_bytes_max
        self.replies_bytes = 0
        """The bytes of all answers that wait for the store."""
        self._replies_of: dict[ReplySink, int] = {}
        """The bytes of the waiting answers of each caller."""
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
        self._hand_over = hand_over
        self._observed = observed or Observed()
        self._history = history
        self._tracing = tracing
        self._wake = asyncio.Event()
        self._stopping = False
        self._refusals = 0
        self.last_batch = last_batch
        self._marked = (-1, 0)
        """The newest batch that ``mark_time`` saw, and when it saw it first."""
        self.full = False
        """Whether the store has no room, so that enqueues are refused."""
        self.stalled = False
        """Whether a batch's fate has been unknown for too long, so that enqueues are refused."""
        self.trouble: str | None = None
        """Why commits do not go through at the moment; None: they do."""

    def start_full(self, why: str) -> None:
        """Begin with a store that was opened without room for enqueues."""
        self.full, self.trouble = True, why
        self._on_event("store_full", why)

    # --- used by sessions --------------------------------------------------------------------

    def kick(self) -> None:
        """Wake the committer: there is something to commit."""
        if self._works_ahead is not None and self._core.sealed is not None:
            self._works_ahead.ahead(self._core.open.effects)
        self._wake.set()

    @property
    def is_asked(self) -> bool:
        """Whether a batch will be sealed as soon as the store can be given one."""
        return self._wake.is_set()

    def gather(self, sink: ReplySink, request: int) -> None:
        """``reply`` to acks whose caller does not wait for the answer: nothing that is in the open
        batch begins it, but what comes next does, or the time. Acks that let something go on begin
        it at once."""
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
        return not self._is_waited_for(batch)

    def _is_waited_for(self, batch: Batch) -> bool:
        """Whether an order key, a delivery, a producer, a group or a consumer goes on behind it."""
        if batch.ended or batch.handed or batch.staged or self._core.held_back:
            return True
        return any(subscriber.credit <= 0 for subscriber in batch.credits)

    def begin(self) -> None:
        """Commit what is open, unless all of it gathers. Deliveries since then may have used up
        what was left to give, and wait for it now."""
        batch = self._core.open
        if self._gathering is not None and _measure(batch) == self._gathered:
            if not self._is_waited_for(batch):
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

    def answer(self, ask: Ask[Any], value: object) -> None:
        """``reply`` to a request, and to its witness first."""
        if ask.witness is not None:
            self.reply(ask.witness, ask.number, value)
        self.reply(ask.caller.replies, ask.number, value)

    def _put(self, batch: Batch, sink: ReplySink, answer: Sized) -> None:
        size_bytes = len(answer) + REPLY_BYTES
        batch.replies.append((sink, answer))
        self.replies_bytes += size_bytes
        self._replies_of[sink] = self._replies_of.get(sink, 0) + size_bytes

    def is_behind(self, sink: ReplySink) -> bool:
        """Whether so many answers wait, for this caller or in all, that it should ask no more."""
        if not self.replies_bytes:
            return False
        if self.replies_bytes >= self._replies_all_bytes_max:
            return True
        return self._replies_of.get(sink, 0) >= self._replies_bytes_max

    def _left(self, batch: Batch) -> None:
        """Count the replies of ``batch``, which wait no longer."""
        waiting = self._replies_of
        for sink, answer in batch.replies:
            size_bytes = len(answer) + REPLY_BYTES
            self.replies_bytes -= size_bytes
            if waiting[sink] > size_bytes:
                waiting[sink] -= size_bytes
            else:
                del waiting[sink]

    def mark_time(self, mono_ms: int) -> None:
        """Commit an empty batch now and then, so that the store knows the time though nothing
        happens: the clock of the next start is compared with it."""
        number, since_mono_ms = self._marked
        if self.last_batch != number:
            self._marked = (self.last_batch, mono_ms)
        elif mono_ms - since_mono_ms >= MARK_TIME_MS and self._core.sealed is None:
            self._put(self._core.open, _Turn(lambda: None), ())
            self._wake.set()

    def after_all(self, act: Callable[[], None]) -> None:
        """Call ``act`` behind all answers that are owed by now."""
        self.reply(_Turn(act), 0, None)

    async def barrier(self) -> None:
        """Wait until everything accepted so far is durable."""
        done = asyncio.Event()
        self.after_all(done.set)
        await done.wait()

    # --- life --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Commit until ``stop``; raises what must stop the daemon."""
        while True:
            await self._wake.wait()
            batch, landing = self._seal(), None
            while batch is not None:
                batch, landing = await self._commit(batch, landing)
            if self._stopping:
                return

    async def stop(self, task: asyncio.Task[None]) -> None:
        """Commit what is left, deliveries in flight included, and end ``run``."""
        self._stopping = True
        self._wake.set()
        await task

    def _seal(self) -> Batch | None:
        self._wake.clear()
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        now = self._clock.read()
        batch = self._engine.seal(*now, checkpoint_all=self._stopping)
        if batch is not None:
            failpoints.hit("commit.before")
        return batch

    async def _commit(
        self, batch: Batch, landing: asyncio.Task[None] | None
    ) -> tuple[Batch | None, asyncio.Task[None] | None]:
        """See ``batch`` through, ``landing`` of the one before first; the next and its landing.

        What a durable batch means in memory is worked out, and its replies are written, while
        the store has the next: in a task of its own. Were the store's part the task, the answer
        would reach this one only after another round of reading from everybody.
        """
        refused: CommitRefused | None = None
        try:
            await self._store_batch(batch)
        except CommitRefused as error:
            refused = error
        finally:
            if landing is not None:
                await landing
        if refused is not None:
            await self._refused(batch, refused)
            return None, None
        failpoints.hit("commit.after")
        self.last_batch += 1
        self._refusals = 0
        if self.trouble is not None and not self.full:
            self.trouble = None
            self._on_event("store_works_again", "commits go through")
        self._reader.landed(batch.effects)
        self._engine.intake.durable(batch)
        following = self._seal() if self._wake.is_set() or self._stopping else None
        if following is None:
            await self._land(batch, self.last_batch)
            return None, None
        return following, asyncio.create_task(self._land(batch, self.last_batch))

    async def _land(self, batch: Batch, number: int) -> None:
        now = self._clock.read()
        wait_ms = self._engine.intake.landed(batch, now.now_ms)
        if self._history is not None:
            self._history.keep(number, batch.notes)
        if batch.handed and self._hand_over is not None:
            self._hand_over(batch.handed)
        self._left(batch)
        release(batch)
        self._landed(now, wait_ms)

    async def _store_batch(self, batch: Batch) -> None:
        """Give the batch to the store until its fate is known."""
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
                    self._committed(batch, time.monotonic() - began_s)
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

    def _committed(self, batch: Batch, elapsed_s: float) -> None:
        self._observed.committed(batch.effects, elapsed_s)
        if self._tracing is not None:
            self._tracing.committed(batch.effects, self.last_batch + 1, elapsed_s)
        elapsed_ms = round(elapsed_s * 1000)
        if elapsed_ms >= SLOW_MS:
            now_ms = self._clock.read().now_ms
            self._core.ledger.daemon.add(Cause.STORE, now_ms - elapsed_ms, now_ms)

    def _give_up_waiting(self, batch: Batch) -> None:
        """Answer the producers while a batch hangs. Those of the batch that the store has get
        ``OutcomeUnknown`` (the session keeps the outcome for a resend); those of the open batch get
        ``Refused``: it was not kept. Acks wait on."""
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

    async def _refused(self, batch: Batch, error: CommitRefused) -> None:
        self._set_trouble(error)
        self._engine.intake.refused(batch)
        kind = StoreFull if error.full else Refused
        refusal = kind(f"the store did not take it: {error.message}")
        self._refuse_staged(batch.staged, refusal)
        batch.staged = []
        if error.full and not self.full:
            self.full = True
            self._on_event("store_full", error.message)
        if self._refusals:
            # The first time the acks may go through alone; after that no hurry helps.
            await asyncio.sleep(REFUSED_RETRY_S)
        self._refusals += 1
        self._wake.set()

    def _set_trouble(self, error: CommitRefused | CommitUnknown) -> None:
        self._observed.store_error(error)
        if self.trouble is None:
            self._on_event("store_trouble", error.message)
        self.trouble = error.message

    async def watch_room(self) -> None:
        """Look for room now and then while the store is full."""
        while True:
            await asyncio.sleep(ROOM_PROBE_S)
            if self.full and await self._store.probe_room():
                self.full, self.trouble = False, None
                self._on_event("store_has_room", "enqueues are accepted again")
                self._wake.set()


def _measure(batch: Batch) -> tuple[int, ...]:
    """How much there is in a batch: it differs once something was added."""
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
    """Give every answer that rests on the batch, in one piece for each sink."""
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
    """Answer requests with due windows with the chosen times; returns the other requests."""
    for one in batch.staged:
        sink, _, (request, first, count, accepted_ms) = one
        dues_ms = batch.chosen.get(first)
        if sink is None or dues_ms is None:
            yield one
            continue
        ids = tuple(range(first, first + count * ID_STEP, ID_STEP))
        sink.give(sink.answer_to(request, (accepted_ms, ids, {"dues_ms": dues_ms})))
        accepted.setdefault(sink, [])


def refuse(sink: ReplySink, request: int, error: TickwheelError) -> None:
    """Answer with an error at once."""
    sink.error(request, error.code, error.message)
    sink.flush()


class _Turn(Nobody):
    """A sink that gets no answer: ``act`` is called when its turn to get one has come."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def flush(self) -> None:
        self._act()
