"""Enqueues: calls of one step of the loop become one ENQUEUE frame, and each is stored once.

Implements the session's rules (floor, window, resend) without a transport. Invariants:

* A frame keeps its number until its outcome is known. On every new connection it is sent again
  under the same number, in order, before any newer frame.
* Only a frame that was certainly refused gets a new number. A frame that was also sent on an
  earlier connection keeps its number even then, because the older copy may still arrive.
* At most ``window_max`` frames are numbered from the floor up, answered or not.
* A caller gets ``unreachable`` or ``refused`` only if none of its tasks was stored; if that is not
  certain, it gets ``outcome_unknown``.

``Batch`` is a frame with the callers that wait for it; ``Partly`` is the outcome of an
``enqueue_many`` of several frames.
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import chain, repeat
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from tickwheel.api.frames import FrameType
from tickwheel.client.connection import LOGGER, Connection, Signal, fail
from tickwheel.client.reconnector import Source
from tickwheel.client.requests import Pauses, Resendable, check_frame, is_final
from tickwheel.client.tasks import (
    FRAME_BYTES,
    CheckedTask,
    Columns,
    Receipt,
    Receipts,
    WireTask,
    merged_receipts,
    receipts,
)
from tickwheel.errors import (
    Draining,
    FrameTooLarge,
    NotActive,
    OutcomeUnknown,
    Overloaded,
    ProtocolError,
    Refused,
    RequestForgotten,
    TickwheelError,
    UnknownType,
    Unreachable,
)
from tickwheel.protocol import encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tickwheel.client.reconnector import Reconnector

QUEUE_TASKS_MAX = 1_000_000
QUEUE_BYTES_MAX = 256 * 1024 * 1024
MERGE_BYTES_MAX = 512 * 1024
"""Maximum bytes of a frame that callers share: a larger frame would only delay the first caller."""
SHARED_TIME = 0.01
"""Maximum share of a caller's timeout after which another caller with the same timeout can still
join its frame and deadline."""

_ENQUEUE, _COLUMNS = int(FrameType.ENQUEUE), int(FrameType.ENQUEUE_COLUMNS)


class Producer(Source):
    """All enqueues of one client."""

    def __init__(self, reconnector: Reconnector, total_s: float, retries: int) -> None:
        self.reconnector = reconnector
        self.tasks_max = QUEUE_TASKS_MAX
        self.bytes_max = QUEUE_BYTES_MAX
        self.create_future = reconnector.loop.create_future
        self._total_s = total_s
        self._retries = retries
        self._open: Batch | None = None
        """The batch of the calls in this step of the loop."""
        self._timed: Batch | None = None
        """The batch of calls with a timeout. At most one of ``_open`` and ``_timed`` is set."""
        self._queue: deque[Batch] = deque()
        """Complete batches without a number."""
        self._window: deque[Batch] = deque()
        """Numbered batches, from the floor up; a finished batch waits here for older ones."""
        self._again: deque[Batch] = deque()
        """Batches of the window to send again, in order."""
        self._pauses: Pauses[Batch] = Pauses(reconnector, self._resume)
        self._unfinished: set[Batch] = set()
        self._tasks = 0
        self._bytes = 0
        self._changed = Signal()
        self._stopped: TickwheelError | None = None

    # --- for callers ----------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether callers that can wait should: the window or half of the queue is in use."""
        tasks, size_bytes = self._tasks, self._bytes
        batch = self._open or self._timed
        if batch is not None:
            tasks, size_bytes = tasks + batch.count, size_bytes + batch.bytes
        return (
            len(self._queue) + len(self._window) >= self.reconnector.limits.window_max
            or tasks * 2 >= self.tasks_max
            or size_bytes * 2 >= self.bytes_max
        )

    @property
    def tasks(self) -> int:
        """The number of tasks without an outcome."""
        return self._tasks + (self._open.count if self._open is not None else 0)

    @property
    def has_open(self) -> bool:
        """Whether a frame is being filled."""
        return self._open is not None or self._timed is not None

    def add(self, checked: CheckedTask) -> asyncio.Future[Any]:
        """Add one task. Return the future of its Receipt. Raise Overloaded."""
        batch = self._open
        future = None if batch is None else batch.add(*checked)
        if future is None:
            size = checked[1]
            self._check_room(1, size)
            future = self._new_batch().put([checked[0]], 0, size)
        return future

    def join(self, checked: CheckedTask) -> asyncio.Future[Any] | None:
        """``add`` for a caller that can wait. Return None if it should wait (``is_full``). A task
        that fits the open frame need not wait: the frame had room for it when it was opened."""
        batch = self._open
        future = None if batch is None else batch.add(*checked)
        if future is None and not self.is_full:
            future = self.add(checked)
        return future

    def put(
        self,
        tasks: list[WireTask],
        count: int,
        size: int,
        time_s: float | None = None,
        *,
        is_ruled: bool = False,
    ) -> asyncio.Future[Any]:
        """Add one caller's tasks, which fit a frame, all or nothing. Return the future of their
        Receipts, or of a single Receipt if ``count`` is 0.

        ``time_s``: maximum seconds that the caller waits. ``is_ruled``: some tasks have
        ``if_pending``. They get a separate frame, which keeps within the daemon's limit for them.
        """
        if is_ruled:
            return self._put_apart(tasks, count, size, time_s)
        batch, now_s = self._open, self.reconnector.loop.time()
        if time_s is not None:
            batch = self._timed
            if batch is not None and not (
                now_s + (1 - SHARED_TIME) * time_s <= batch.deadline_s <= now_s + time_s
            ):
                batch = None
        if batch is None or not batch.fits(len(tasks), size):
            self._check_room(len(tasks), size)
            if time_s is None:
                batch = self._new_batch()
            else:
                batch = self._timed = self._make_batch(time_s)
                self._time(batch)
        return batch.put(tasks, count, size)

    def _put_apart(
        self, tasks: list[WireTask], count: int, size: int, time_s: float | None
    ) -> asyncio.Future[Any]:
        self._check_room(len(tasks), size)
        began_s = self.reconnector.loop.time()
        deadline_s = began_s + (self._total_s if time_s is None else time_s)
        batch = Batch(self, FRAME_BYTES, began_s, deadline_s)
        future = batch.put(tasks, count, size)
        self.adopt(batch, is_timed=time_s is not None)
        return future

    def put_numbered(
        self, tasks: Sequence[WireTask], size: int, number: int
    ) -> asyncio.Future[Any]:
        """Add tasks as a frame with this number, higher than all before it in the session. Return
        the future of their Receipts, which gets every refusal; the frame is sent on each new
        connection until it has an outcome. Raise ClientClosed."""
        if self._stopped is not None:
            raise self._stopped.with_traceback(None)
        batch = NumberedBatch(self, number)
        future = batch.put(tasks, len(tasks), size)
        self._tasks += batch.count
        self._bytes += batch.bytes
        self._unfinished.add(batch)
        self._window.append(batch)
        self._again.append(batch)
        self.reconnector.wake()
        return future

    def add_columns(
        self, columns: Columns, time_s: float | None = None
    ) -> asyncio.Future[Receipts]:
        """Add tasks that fill a separate frame. Return the future of their Receipts."""
        size = sum(columns.sizes)
        self._check_room(len(columns.bodies), size)
        began_s = self.reconnector.loop.time()
        future: asyncio.Future[Receipts] = self.reconnector.loop.create_future()
        deadline_s = began_s + (self._total_s if time_s is None else time_s)
        batch = ColumnBatch(self, columns, size, future, began_s, deadline_s)
        self.adopt(batch, is_timed=time_s is not None)
        return future

    async def wait_room(self, time_s: float | None = None) -> None:
        """Wait until there is room. Raise Overloaded or Unreachable after ``time_s``."""
        limit_s = self._total_s if time_s is None else time_s
        try:
            async with asyncio.timeout(limit_s):
                while self.is_full and self._stopped is None:
                    await self._changed.wait()
        except TimeoutError:
            if self.reconnector.connection is None:
                raise self.reconnector.unreachable(limit_s) from None
            raise Overloaded(
                f"{len(self._window)} frames wait for an answer, and none was answered within"
                f" {limit_s:g} s; the limit is {self.reconnector.limits.window_max} (window_max)"
            ) from None

    def withdraw(self) -> list[Batch]:
        """Remove and return all unsent batches, split by caller, to be sent elsewhere."""
        self._close_open()
        batches: list[Batch] = []
        waiting, self._queue = self._queue, deque()
        for batch in waiting:
            batches += (batch,) if isinstance(batch, ColumnBatch) else split(batch, FRAME_BYTES)
            self.finish(batch)
            batch.done = False
        return batches

    def adopt(self, batch: Batch, *, is_timed: bool = True) -> None:
        """Send a complete batch, perhaps of another producer. ``is_timed``: it ends at its
        deadline, not at the next sweep."""
        batch.producer = self
        self._wait_for(batch)
        if is_timed:
            self._time(batch)
        self.reconnector.wake()

    @property
    def is_idle(self) -> bool:
        """Whether every enqueue has an outcome."""
        return not (self._unfinished or self.has_open)

    async def wait_idle(self) -> None:
        """Wait until every enqueue has an outcome."""
        while not self.is_idle:
            await self._changed.wait()

    def _new_batch(self) -> Batch:
        """Open a batch with room for more tasks than its first."""
        batch = self._open = self._make_batch(self._total_s)
        return batch

    def _make_batch(self, time_s: float) -> Batch:
        limits, began_s = self.reconnector.limits, self.reconnector.loop.time()
        batch = Batch(self, FRAME_BYTES, began_s, began_s + time_s)
        batch.tasks_max = min(limits.tasks_per_frame_max, self.tasks_max - self._tasks)
        room_bytes = self.bytes_max - self._bytes + FRAME_BYTES
        batch.bytes_max = min(MERGE_BYTES_MAX, limits.frame_bytes_max, room_bytes)
        self.reconnector.wake()
        return batch

    def _check_room(self, count: int, size: int) -> None:
        """Close the open batches. Raise Overloaded if there is no room for this many tasks."""
        if self._stopped is not None:
            raise self._stopped.with_traceback(None)
        self._close_open()
        if self._tasks + count > self.tasks_max and self._tasks:
            raise Overloaded(
                f"{self._tasks} tasks wait to be sent or answered; the limit is {self.tasks_max}"
                " (the client's tasks_max): await some enqueues"
            )
        if self._bytes + size > self.bytes_max and self._bytes:
            raise Overloaded(
                f"{self._bytes} bytes wait to be sent or answered; the limit is {self.bytes_max}"
                " (the client's bytes_max): await some enqueues"
            )

    def _close_open(self) -> None:
        batch = self._open or self._timed
        if batch is not None:
            self._open = self._timed = None
            self._wait_for(batch)

    def _time(self, batch: Batch) -> None:
        """Set a timer for a batch with a timeout, which cannot wait for the next sweep."""
        batch.timer = self.reconnector.loop.call_at(batch.deadline_s, self._time_over, batch)

    def _time_over(self, batch: Batch) -> None:
        self._close_open()
        self._expire((batch,))

    def _wait_for(self, batch: Batch) -> None:
        """Queue and count a complete batch."""
        self._tasks += batch.count
        self._bytes += batch.bytes
        self._queue.append(batch)
        self._unfinished.add(batch)

    # --- a source of the reconnector ------------------------------------------------------------

    def up(self) -> None:
        """Send all numbered batches without an outcome again."""
        self._again = deque(b for b in self._window if not b.done and b not in self._pauses)

    def collect(self, connection: Connection) -> None:
        self._close_open()
        while self._again and connection.has_room:
            batch = self._again.popleft()
            if not batch.done:
                self._send(connection, batch)
        if not self._again and not connection.leaving:
            self._collect_new(connection)
        if not connection.has_room and not connection.paused:
            self.reconnector.wake()  # the transport accepts more after this flush

    def _collect_new(self, connection: Connection) -> None:
        window_max = self.reconnector.limits.window_max
        while self._queue and connection.has_room and len(self._window) < window_max:
            batch = self._queue.popleft()
            if batch.done or batch.unwanted():
                self.finish(batch)
                continue
            batch.number = self.reconnector.next_number()
            self._window.append(batch)
            self._send(connection, batch)

    def _send(self, connection: Connection, batch: Batch) -> None:
        batch.sent += 1
        batch.refusal = None
        floor = self._window[0].number
        try:
            data = encode(batch.frame(floor))
            check_frame(data, "enqueue", self.reconnector.limits)
        except TickwheelError as error:  # only if the limits were unknown, or have changed
            batch.failed(error)
            return
        connection.ask(batch.number, batch, data)

    def sweep(self, now_s: float) -> None:
        self._close_open()  # ``collect`` is not called without a connection
        expired = [batch for batch in self._unfinished if batch.deadline_s <= now_s]
        if expired:
            self._expire(expired)

    def _expire(self, batches: Sequence[Batch]) -> None:
        connection = self.reconnector.connection
        for batch in sorted(batches, key=attrgetter("number")):
            if connection is not None:
                connection.requests.pop(batch.number, None)
            batch.expired()
        self._queue = deque(batch for batch in self._queue if not batch.done)

    def stop(self, error: TickwheelError) -> None:
        self._stopped = error
        self._close_open()
        for batch in list(self._unfinished):
            certain = not batch.sent or batch.refusal is not None
            reason = (
                error
                if certain
                else OutcomeUnknown(
                    f"{error.message} before the answer; the tasks may have been stored"
                )
            )
            self.give_up(batch, reason)
        self._changed.notify()

    # --- outcomes -------------------------------------------------------------------------------

    def refused(self, batch: Batch, error: TickwheelError) -> None:
        """Handle the daemon's error for a batch."""
        if isinstance(error, Refused):
            self._certainly_refused(batch, error)
        elif error.retryable:
            self._pauses.begin(batch)  # the outcome is unknown: ask again under the same number
        elif len(batch.futures) > 1:
            self._send_separately(batch)
        else:
            self.give_up(batch, error)

    def _certainly_refused(self, batch: Batch, error: TickwheelError) -> None:
        batch.refusal = error
        connection = self.reconnector.connection
        if isinstance(error, Draining) and connection is not None:
            connection.leave(error)
            if batch.sent == 1:
                self._renumber(batch)
            return  # the next connection sends it, with or without a number
        if is_final(batch, error, self._retries, batch.deadline_s):
            self.give_up(batch, error)
            return
        self._pauses.begin(batch)

    def _resume(self, batch: Batch) -> None:
        if batch.refusal is not None and batch.sent == 1:
            self._renumber(batch)
        else:
            self._again.append(batch)
        self.reconnector.wake()

    def send_again(self, batch: Batch) -> None:
        """Send a batch again under the same number, on this connection."""
        self._again.append(batch)
        self.reconnector.wake()

    def _renumber(self, batch: Batch) -> None:
        """Move a batch from the window to the front of the queue: it becomes a new request."""
        self._window.remove(batch)
        self._trim()
        batch.number = batch.sent = 0
        self._queue.appendleft(batch)

    def _trim(self) -> None:
        """Raise the floor to the oldest batch without an outcome."""
        while self._window and self._window[0].done:
            self._window.popleft()

    def _send_separately(self, batch: Batch) -> None:
        """Send each caller's tasks of a refused batch separately, to find the invalid ones."""
        for part in reversed(split(batch, FRAME_BYTES)):
            self._unfinished.add(part)
            self._queue.appendleft(part)
            if batch.timer is not None:
                self._time(part)
            self._tasks += len(part.tasks)
            self._bytes += part.size - FRAME_BYTES
        self.finish(batch)

    def give_up(self, batch: Batch, error: TickwheelError) -> None:
        """Fail every call of a batch."""
        failed = sum(fail(future, error) for future in batch.futures)
        if failed:
            LOGGER.warning("%d enqueue calls failed: %s: %s", failed, error.code, error.message)
        self.finish(batch)

    def finish(self, batch: Batch) -> None:
        """Record that a batch has an outcome."""
        if batch.done:
            return
        batch.done = True
        if batch.timer is not None:
            batch.timer.cancel()
        self._tasks -= batch.count
        self._bytes -= batch.bytes
        self._unfinished.discard(batch)
        self._pauses.forget(batch)
        self._trim()
        if self._queue:
            self.reconnector.wake()
        self._changed.notify()


class Batch(Resendable):
    """Tasks that are sent as one frame. Sizes are upper bounds of bytes on the wire. ``number`` is
    0 until the batch is numbered; ``sent`` counts only frames with that number."""

    __slots__ = ("bytes_max", "counts", "done", "futures", "number", "producer", "size", "tasks",
                 "tasks_max", "timer")  # fmt: skip

    def __init__(self, producer: Producer, size: int, began_s: float, deadline_s: float) -> None:
        super().__init__(began_s, deadline_s)
        self.producer = producer
        self.tasks: list[WireTask] = []
        self.futures: list[asyncio.Future[Any]] = []
        """One future for each caller."""
        self.counts: list[int] = []
        """The number of each caller's tasks; 0: a single task, not a list."""
        self.size = size
        self.tasks_max = self.bytes_max = 0
        """Maximum tasks and bytes of the batch while it is open."""
        self.number = 0
        self.done = False
        self.timer: asyncio.TimerHandle | None = None
        """Ends the batch for callers with a timeout."""

    def add(self, task: WireTask, size: int) -> asyncio.Future[Any] | None:
        """Add a single task if it fits: a fast path for most tasks."""
        tasks, all_bytes = self.tasks, self.size + size
        if all_bytes > self.bytes_max or len(tasks) >= self.tasks_max:
            return None
        future = self.producer.create_future()
        tasks.append(task)
        self.futures.append(future)
        self.counts.append(0)
        self.size = all_bytes
        return future

    def fits(self, count: int, size: int) -> bool:
        return len(self.tasks) + count <= self.tasks_max and self.size + size <= self.bytes_max

    def put(self, tasks: Sequence[WireTask], count: int, size: int) -> asyncio.Future[Any]:
        """Add a caller's tasks. Return the future of the caller's result."""
        future = self.producer.create_future()
        self.tasks += tasks
        self.futures.append(future)
        self.counts.append(count)
        self.size += size
        return future

    @property
    def count(self) -> int:
        """The number of tasks."""
        return len(self.tasks)

    @property
    def bytes(self) -> int:
        """Maximum bytes of the tasks in a frame."""
        return self.size - FRAME_BYTES

    def frame(self, floor: int) -> tuple[Any, ...]:
        return (_ENQUEUE, self.number, floor, self.tasks)

    def unwanted(self) -> bool:
        """Return whether every caller has cancelled."""
        return all(future.cancelled() for future in self.futures)

    def answered(self, result: Any) -> None:
        accepted_ms, ids, *more = result
        if type(accepted_ms) is not int or len(ids) != len(self.tasks):
            raise ValueError(f"got {len(ids)} ids for {len(self.tasks)} tasks")
        outcomes = more[0].get("outcomes") if more else None
        if outcomes is not None:
            all_receipts = merged_receipts(ids, outcomes)
        else:
            levels_ms = self.producer.reconnector.delay_levels_ms
            chosen_ms = more[0].get("dues_ms", ()) if more else ()
            all_receipts = receipts(self.tasks, ids, accepted_ms, levels_ms, chosen_ms)
        shares = self._shares(all_receipts) if any(self.counts) else all_receipts
        for future, share in zip(self.futures, shares, strict=True):
            if not future.done():
                future.set_result(share)
        self.producer.finish(self)

    def _shares(self, all_receipts: list[Receipt]) -> Iterator[Receipt | list[Receipt]]:
        start = 0
        for count in self.counts:
            end = start + (count or 1)
            yield all_receipts[start:end] if count else all_receipts[start]
            start = end

    def failed(self, error: TickwheelError) -> None:
        if self.done:
            return
        if isinstance(error, (RequestForgotten, ProtocolError)) and self.sent:
            # The answer was given, but is no longer available.
            unknown = OutcomeUnknown(f"the tasks may have been stored: {error.message}")
            self.producer.give_up(self, unknown)
            return
        if error.closes_connection:
            return  # the next connection sends it again
        if isinstance(error, NotActive):
            # As above. An earlier daemon may have stored it without this one knowing.
            self.refusal = error if self.sent == 1 else None
            return
        self.producer.refused(self, error)

    def lost(self) -> None:
        """Do nothing: the batch stays in the window, and the next connection sends it again."""

    def expired(self) -> None:
        if self.done:
            return
        reconnector = self.producer.reconnector
        waited_s = round(reconnector.loop.time() - self.began_s, 1)
        if not self.sent or isinstance(self.refusal, NotActive):
            error = reconnector.unreachable(waited_s)
        elif self.refusal is not None:
            error = self.refusal
        else:
            error = OutcomeUnknown(
                f"the enqueue was sent and not answered within {waited_s:g} s; the tasks may have"
                " been stored"
            )
        self.producer.give_up(self, error)


class NumberedBatch(Batch):
    """A frame whose number its caller has chosen and stored, so that a later process can repeat it.
    It has no deadline, and its caller decides what follows a refusal."""

    __slots__ = ()

    def __init__(self, producer: Producer, number: int) -> None:
        super().__init__(producer, FRAME_BYTES, producer.reconnector.loop.time(), inf)
        self.number = number

    def failed(self, error: TickwheelError) -> None:
        is_sent_again = error.closes_connection and not isinstance(error, FrameTooLarge)
        if not self.done and not is_sent_again and not isinstance(error, NotActive):
            for future in self.futures:
                fail(future, error)
            self.producer.finish(self)


class ColumnBatch(Batch):
    """One caller's tasks that differ only in body and delay."""

    __slots__ = ("columns", "is_supported")

    def __init__(
        self,
        producer: Producer,
        columns: Columns,
        size: int,
        future: asyncio.Future[Receipts],
        began_s: float,
        deadline_s: float,
    ) -> None:
        super().__init__(producer, size + FRAME_BYTES, began_s, deadline_s)
        self.columns = columns
        self.futures, self.counts = [future], [len(columns.bodies)]
        self.is_supported = True
        """Whether the daemon supports frames of columns, as far as the client knows."""

    @property
    def count(self) -> int:
        return len(self.columns.bodies)

    def frame(self, floor: int) -> tuple[Any, ...]:
        topic, bodies, delays_ms, _ = self.columns
        if not self.is_supported:
            tasks = list(zip(repeat(topic), bodies, delays_ms))
            return (_ENQUEUE, self.number, floor, tasks)
        first_ms = delays_ms[0]
        is_uniform = delays_ms.count(first_ms) == len(delays_ms)
        return (_COLUMNS, self.number, floor, topic, bodies, first_ms if is_uniform else delays_ms)

    def answered(self, result: Any) -> None:
        accepted_ms, ids = result
        if type(accepted_ms) is not int or len(ids) != self.count:
            raise ValueError(f"got {len(ids)} ids for {self.count} tasks")
        (future,) = self.futures
        if not future.done():
            dues_ms = [accepted_ms + delay_ms for delay_ms in self.columns.delays_ms]
            future.set_result(Receipts(ids, dues_ms))
        self.producer.finish(self)

    def failed(self, error: TickwheelError) -> None:
        if isinstance(error, UnknownType) and self.is_supported and not self.done:
            self.is_supported = False
            self.producer.send_again(self)
        else:
            super().failed(error)


def split(batch: Batch, frame_bytes: int) -> list[Batch]:
    """Return a batch for each caller of ``batch``, without numbers, with the same deadline."""
    parts: list[Batch] = []
    start = 0
    for future, caller_count in zip(batch.futures, batch.counts, strict=True):
        count = caller_count or 1
        share = (batch.size - frame_bytes) * count // len(batch.tasks)
        part = Batch(batch.producer, frame_bytes + share, batch.began_s, batch.deadline_s)
        part.tasks = batch.tasks[start : start + count]
        part.futures, part.counts = [future], [caller_count]
        parts.append(part)
        start += count
    return parts


class Partly(OutcomeUnknown):
    """Some tasks of an ``enqueue_many`` were stored; others were not, or may have been.

    ``receipts`` has one entry for each task, in order: its Receipt, or the error of its frame. A
    task with ``refused``, ``unreachable`` or an error that is not ``retryable`` was not stored;
    with any other error it may have been.
    """

    def __init__(self, message: str, receipts: list[Receipt | TickwheelError]) -> None:
        super().__init__(message)
        self.receipts = receipts


def is_certain(error: TickwheelError) -> bool:
    """Return whether an enqueue with this error was certainly not stored."""
    return isinstance(error, (Refused, Unreachable)) or not error.retryable


async def gather_receipts(
    futures: Sequence[asyncio.Future[Any]], counts: Sequence[int], trouble: TickwheelError | None
) -> Sequence[Receipt]:
    """Return the receipts of all frames. ``counts``: tasks of each frame; frames without a future
    were not sent, because of ``trouble`` or an earlier failure. Raise the error of a failed
    enqueue."""
    if futures:
        await asyncio.wait(futures)
    errors = [error for error in map(_error_of, futures) if error is not None]
    if trouble is not None:
        errors.append(trouble)
    if not errors:
        return _joined([future.result() for future in futures])
    outcomes: list[Receipt | TickwheelError] = []
    for index, count in enumerate(counts):
        if index >= len(futures):
            outcomes += [Unreachable(f"not sent: {errors[-1].message}")] * count
            continue
        outcomes += outcomes_of(futures[index], count)
    raise failure(outcomes, errors)


def outcomes_of(future: asyncio.Future[Any], count: int) -> Sequence[Receipt | TickwheelError]:
    """Return the receipt or the error of each of the ``count`` tasks of a finished frame."""
    error = _error_of(future)
    if isinstance(error, Partly):
        return error.receipts
    if error is not None:
        return [error] * count
    receipts: Sequence[Receipt] = future.result()
    return receipts


def failure(
    outcomes: list[Receipt | TickwheelError], errors: Sequence[TickwheelError]
) -> TickwheelError:
    """Return the error for tasks of which some or all were not stored."""
    stored = sum(isinstance(item, Receipt) for item in outcomes)
    if not stored:
        # Choose the error that is least certain.
        return next((error for error in errors if not is_certain(error)), errors[0])
    return Partly(
        f"{stored} of {len(outcomes)} tasks were stored; the first error: {errors[0].code}:"
        f" {errors[0].message}",
        outcomes,
    )


def _joined(parts: list[Sequence[Receipt]]) -> Sequence[Receipt]:
    if len(parts) == 1:
        return parts[0]
    columns = [part for part in parts if isinstance(part, Receipts)]
    if columns and len(columns) == len(parts):
        ids = list(chain.from_iterable(part.ids for part in columns))
        return Receipts(ids, list(chain.from_iterable(part.dues_ms for part in columns)))
    return list(chain.from_iterable(parts))


def _error_of(future: asyncio.Future[Any]) -> TickwheelError | None:
    if future.cancelled():
        return OutcomeUnknown("the call was cancelled")
    error = future.exception()
    assert error is None or isinstance(error, TickwheelError)
    return error
