"""The committer: one batch at a time to the store, and every reply behind its batch.

Whatever arrives while a batch is being committed forms the next one; there are no timers.
Invariants:

* A reply is released when the newest batch that its command could see is durable.
* ``CommitRefused``: the enqueues of that batch are answered ``refused`` and forgotten; the
  rest joins the next batch under the same number.
* ``CommitUnknown``: the same number is tried again before anything later is sent.
* Any other failure stops the daemon: it never goes on in memory only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from tickwheel import failpoints
from tickwheel.clock import Clock
from tickwheel.errors import OutcomeUnknown, Refused, StoreFull, TickwheelError
from tickwheel.persistence.store import CommitRefused, CommitUnknown, Store
from tickwheel.protocol.codec import encode, encode_all
from tickwheel.protocol.frames import FrameType
from tickwheel.server.reader import Reader
from tickwheel.wheel.batch import Batch
from tickwheel.wheel.engine import Engine
from tickwheel.wheel.records import ID_STEP

UNKNOWN_RETRY_S = 0.2
REFUSED_RETRY_S = 0.2
ROOM_PROBE_S = 0.5
_OK = int(FrameType.OK)


class Peer(Protocol):
    """Where a reply goes; a closed one swallows it."""

    def send(self, data: bytes) -> None: ...


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
        landed: Callable[[], None],
        noticed: Callable[[str, str], None],
    ) -> None:
        self._engine = engine
        self._core = engine.core
        self._store = store
        self._reader = reader
        self._clock = clock
        self._owner = owner
        self._epoch = epoch
        self._outcome_timeout_s = outcome_timeout_s
        self._landed = landed
        self._noticed = noticed
        self._wake = asyncio.Event()
        self._stopping = False
        self._refusals = 0
        self.last_batch = last_batch
        self.full = False
        """The store has no room: enqueues are refused at the door."""
        self.trouble: str | None = None
        """Why commits do not go through at the moment."""

    def start_full(self) -> None:
        """The store was opened without room for enqueues."""
        self.full = True
        self.trouble = "the store was opened without room"
        self._noticed("store_full", self.trouble)

    # --- used by sessions --------------------------------------------------------------------

    def kick(self) -> None:
        """There is something to commit."""
        self._wake.set()

    def reply(self, peer: Peer, data: bytes) -> None:
        """Send ``data`` once everything the command saw or changed is durable."""
        core = self._core
        if not core.open.is_empty():
            core.open.replies.append((peer, data))
            self._wake.set()
        elif core.sealed is not None:
            core.sealed.replies.append((peer, data))
        else:
            peer.send(data)

    async def barrier(self) -> None:
        """Wait until everything accepted so far is durable."""
        done = asyncio.get_running_loop().create_future()
        self.reply(_Barrier(done), b"")
        await done

    # --- life --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Commit until ``stop``; raises what must stop the daemon."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch = self._seal()
            storing: Awaitable[None] | None = self._store_batch(batch) if batch else None
            while batch is not None and storing is not None:
                batch, storing = await self._commit(batch, storing)
            if self._stopping:
                return

    async def stop(self, task: asyncio.Task[None]) -> None:
        """Commit what is there, deliveries in flight included, and end ``run``."""
        self._stopping = True
        self._wake.set()
        await task

    def _seal(self) -> Batch | None:
        now = self._clock.read()
        batch = self._engine.seal(*now, checkpoint_all=self._stopping)
        if batch is not None:
            failpoints.hit("commit.before")
        return batch

    async def _commit(
        self, batch: Batch, storing: Awaitable[None]
    ) -> tuple[Batch | None, Awaitable[None] | None]:
        """See ``batch`` through; the next one, which is with the store already, if there is one.

        What a durable batch means in memory is worked out, and its replies are written, while
        the store has the next.
        """
        try:
            await storing
        except CommitRefused as error:
            await self._refused(batch, error)
            return None, None
        failpoints.hit("commit.after")
        self.last_batch += 1
        self._refusals = 0
        if self.trouble is not None and not self.full:
            self.trouble = None
            self._noticed("store_works_again", "commits go through")
        self._reader.landed(batch.effects)
        self._engine.intake.durable(batch)
        following, next_storing = self._seal(), None
        if following is not None:
            next_storing = asyncio.ensure_future(self._store_batch(following))
            await asyncio.sleep(0)
        self._engine.intake.landed(batch, self._clock.read().now_ms)
        self._release(batch)
        self._landed()
        return following, next_storing

    async def _store_batch(self, batch: Batch) -> None:
        """Until the fate of the batch is known."""
        loop = asyncio.get_running_loop()
        patience = loop.time() + self._outcome_timeout_s
        number = self.last_batch + 1
        while True:
            try:
                await self._store.commit(self._epoch, self._owner, number, batch.effects)
                return
            except CommitUnknown as error:
                self._set_trouble(error)
                if loop.time() >= patience:
                    self._give_up_waiting(batch)
                await asyncio.sleep(UNKNOWN_RETRY_S)

    def _give_up_waiting(self, batch: Batch) -> None:
        """Producers are told that nobody knows; the session keeps the outcome for a resend."""
        error = OutcomeUnknown("the store has not answered in time; resend to find out")
        for index, (address, session, outcome) in enumerate(batch.staged):
            if address is not None:
                _send_error(address, outcome[0], error)
                batch.staged[index] = (None, session, outcome)

    async def _refused(self, batch: Batch, error: CommitRefused) -> None:
        self._set_trouble(error)
        self._engine.intake.refused(batch)
        kind = StoreFull if error.full else Refused
        told = kind(f"the store did not take it: {error.message}")
        for address, _, outcome in batch.staged:
            if address is not None:
                _send_error(address, outcome[0], told)
        batch.staged = []
        if error.full and not self.full:
            self.full = True
            self._noticed("store_full", error.message)
        if self._refusals:
            # The first time the acks may go through alone; after that no hurry helps.
            await asyncio.sleep(REFUSED_RETRY_S)
        self._refusals += 1
        self._wake.set()

    def _set_trouble(self, error: TickwheelError) -> None:
        if self.trouble is None:
            self._noticed("store_trouble", error.message)
        self.trouble = error.message

    async def watch_room(self) -> None:
        """While the store is full, look for room now and then."""
        while True:
            await asyncio.sleep(ROOM_PROBE_S)
            if self.full and await self._store.probe_room():
                self.full, self.trouble = False, None
                self._noticed("store_has_room", "enqueues are accepted again")
                self._wake.set()

    def _release(self, batch: Batch) -> None:
        confirmed: dict[object, list[tuple[Any, ...]]] = {}
        for address, _, (request, first, count, accepted_ms) in batch.staged:
            ids = (first,) if count == 1 else _ids(first, count)
            frame = (_OK, request, (accepted_ms, ids))
            if address in confirmed:
                confirmed[address].append(frame)
            else:
                confirmed[address] = [frame]
        confirmed.pop(None, None)
        chunks = {peer: [encode_all(frames)] for peer, frames in confirmed.items()}
        for peer, data in batch.replies:
            chunks.setdefault(peer, []).append(data)
        for peer, parts in chunks.items():
            peer.send(b"".join(parts))  # type: ignore[attr-defined]  # every address is a Peer


class _Barrier:
    """A peer whose reply is a wake-up."""

    def __init__(self, done: asyncio.Future[None]) -> None:
        self._done = done

    def send(self, data: bytes) -> None:
        if not self._done.done():
            self._done.set_result(None)


def enqueue_reply(request: int, first: int, count: int, accepted_ms: int) -> bytes:
    """The OK frame of an ENQUEUE."""
    return encode((_OK, request, (accepted_ms, _ids(first, count))))


def _ids(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count * ID_STEP, ID_STEP))


def _send_error(peer: object, request: int, error: TickwheelError) -> None:
    data = encode((FrameType.ERROR, request, error.code, error.message))
    peer.send(data)  # type: ignore[attr-defined]  # every address is a Peer
