"""Enqueueing: calls made in one step of the event loop share a frame; frames are pipelined.

A *parcel* is what one call wants to enqueue, all or nothing. Parcels of one step are put into
one ENQUEUE frame (a *shipment*), within the daemon's limits; at most ``window_max`` shipments
are unanswered. After a reconnect unanswered shipments go out again under their numbers, so
the daemon answers what it answered, or would have, before: nothing is enqueued twice.

What a caller is told: a receipt; the daemon's error; Unreachable when nothing was ever sent;
OutcomeUnknown when it was sent and no answer came in time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from tickwheel.client.link import Link
from tickwheel.client.values import Receipt
from tickwheel.errors import BadRequest, Draining, OutcomeUnknown, Overloaded, TickwheelError
from tickwheel.protocol.codec import encode
from tickwheel.protocol.frames import FrameType

TASK_OVERHEAD_BYTES = 64
SHIPMENT_BYTES_MAX = 512 * 1024
UNANSWERED_BYTES_MAX = 8 * 1024 * 1024
QUEUED_BYTES_MAX = 256 * 1024 * 1024
"""Above it ``enqueue_nowait`` raises Overloaded: nobody awaits what it enqueues."""
RETRY_S = 0.05
"""Before a refused parcel goes out again; doubled each time."""


def task_bytes(task: tuple[Any, ...]) -> int:
    """At least what the task takes in a frame, but for a topic that is long."""
    options = len(encode(task[3])) if len(task) == 4 else 0
    return len(task[1]) + len(task[0]) + TASK_OVERHEAD_BYTES + options


class Parcel:
    """One call's tasks. ``many``: the future gets a list of receipts, else one receipt."""

    __slots__ = ("alone", "deadline_s", "future", "many", "ready_s", "retries", "size", "tasks")

    def __init__(
        self,
        tasks: Sequence[tuple[Any, ...]],
        future: asyncio.Future[Any],
        deadline_s: float,
        retries: int,
        many: bool,
    ) -> None:
        self.tasks = tasks
        self.future = future
        self.deadline_s = deadline_s
        self.retries = retries
        self.many = many
        self.alone = False
        """Shipped by itself, because a frame that it shared was called wrong."""
        self.ready_s = 0.0
        self.size = sum(map(task_bytes, tasks))


class Shipment:
    """One ENQUEUE request that is not answered."""

    __slots__ = ("data", "parcels", "sent", "size")

    def __init__(self, data: bytes, parcels: list[Parcel], size: int) -> None:
        self.data = data
        self.parcels = parcels
        self.size = size
        self.sent = False


class Producer:
    """Hooks into a link; ``put`` parcels."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._queue: deque[Parcel] = deque()
        self._queued_bytes = 0
        self._unanswered: dict[int, Shipment] = {}
        self._unanswered_bytes = 0
        self._flushing = False
        self._idle = asyncio.Event()
        self._idle.set()
        link.on_connected.append(self._resend)
        link.on_drained.append(self._flush_soon)
        link.on_sweep.append(self._sweep)
        link.on_lost.append(self._fail_if_over)

    def put(self, parcel: Parcel) -> None:
        """Ship a parcel in this step of the loop. Raises Overloaded when too much waits."""
        if self._queued_bytes > QUEUED_BYTES_MAX:
            raise Overloaded(
                f"{self._queued_bytes} bytes wait to be sent; the limit is {QUEUED_BYTES_MAX}:"
                " await some of the futures"
            )
        self._queue.append(parcel)
        self._queued_bytes += parcel.size
        self._idle.clear()
        self._flush_soon()

    async def drained(self) -> None:
        """Until nothing waits for an answer."""
        await self._idle.wait()

    # --- out -------------------------------------------------------------------------------

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        link, queue = self._link, self._queue
        window = min(link.limits.window_max, 1024)
        while (
            queue
            and link.writable
            and len(self._unanswered) < window
            and self._unanswered_bytes < UNANSWERED_BYTES_MAX
        ):
            parcels, size = self._load()
            if not parcels:
                return
            self._ship(parcels, size)

    def _load(self) -> tuple[list[Parcel], int]:
        """Parcels for one frame, from the front of the queue."""
        queue = self._queue
        parcels: list[Parcel] = []
        tasks_left = self._link.limits.tasks_per_frame_max
        size, size_max = 0, min(SHIPMENT_BYTES_MAX, self._link.limits.frame_bytes_max // 2)
        while queue:
            parcel = queue[0]
            if parcel.ready_s and parcel.ready_s > asyncio.get_running_loop().time():
                # It was refused; those behind it wait with it, so order is kept.
                break
            if parcels and (
                size + parcel.size > size_max or len(parcel.tasks) > tasks_left or parcel.alone
            ):
                break
            queue.popleft()
            parcels.append(parcel)
            size += parcel.size
            tasks_left -= len(parcel.tasks)
            if parcel.alone:
                break
        self._queued_bytes -= size
        return parcels, size

    def _ship(self, parcels: list[Parcel], size: int) -> None:
        number = self._link.next_request()
        floor = next(iter(self._unanswered), number)
        tasks = (
            parcels[0].tasks
            if len(parcels) == 1
            else [t for parcel in parcels for t in parcel.tasks]
        )
        try:
            data = encode((int(FrameType.ENQUEUE), number, floor, tasks))
        except BadRequest as error:
            self._refuse(parcels, error)
            return
        shipment = self._unanswered[number] = Shipment(data, parcels, size)
        self._unanswered_bytes += size
        self._link.expect(number, lambda result, error: self._answered(number, result, error))
        self._send(shipment)

    def _send(self, shipment: Shipment) -> None:
        shipment.sent = True
        self._link.send(shipment.data)

    def _resend(self) -> None:
        """A new connection: everything unanswered again, in order, then what waits."""
        for shipment in self._unanswered.values():
            self._send(shipment)
        self._flush_soon()

    # --- in --------------------------------------------------------------------------------

    def _answered(self, number: int, result: Any, error: TickwheelError | None) -> None:
        shipment = self._unanswered.pop(number, None)
        if shipment is None:
            return
        self._unanswered_bytes -= shipment.size
        if error is None:
            self._confirm(shipment.parcels, result)
        elif self._link.failed is not None:
            for parcel in shipment.parcels:
                fail(parcel.future, OutcomeUnknown(f"{error}; {UNKNOWN}"))
        else:
            self._refuse(shipment.parcels, error)
        self._settle()
        if self._queue:
            self._flush_soon()

    @staticmethod
    def _confirm(parcels: list[Parcel], result: Any) -> None:
        accepted_ms, ids = result
        position = 0
        for parcel in parcels:
            receipts = []
            for task in parcel.tasks:
                delay_ms = task[2]
                if delay_ms is None:
                    due_ms = max(task[3]["due_ms"], accepted_ms)
                else:
                    due_ms = accepted_ms + delay_ms
                receipts.append(Receipt(ids[position], due_ms))
                position += 1
            if not parcel.future.done():
                parcel.future.set_result(receipts if parcel.many else receipts[0])

    def _refuse(self, parcels: list[Parcel], error: TickwheelError) -> None:
        """Again what may succeed; alone what was called wrong in company."""
        again: list[Parcel] = []
        now_s = asyncio.get_running_loop().time()
        for parcel in parcels:
            if isinstance(error, OutcomeUnknown) or parcel.future.done():
                fail(parcel.future, error)
            elif isinstance(error, Draining):
                # Another daemon, or this one started anew, will take it.
                parcel.ready_s = now_s + RETRY_S
                again.append(parcel)
            elif error.retryable and parcel.retries > 0:
                parcel.retries -= 1
                parcel.ready_s = now_s + RETRY_S * 2 ** max(0, 3 - parcel.retries)
                again.append(parcel)
            elif not error.retryable and len(parcels) > 1:
                parcel.alone = True
                again.append(parcel)
            else:
                fail(parcel.future, error)
        self._queue.extendleft(reversed(again))
        self._queued_bytes += sum(parcel.size for parcel in again)
        if again:
            asyncio.get_running_loop().call_later(RETRY_S, self._flush_soon)

    # --- ends ------------------------------------------------------------------------------

    def _sweep(self, now_s: float) -> None:
        # Deadlines ascend along the queue: what goes out again goes to its front.
        while self._queue and self._queue[0].deadline_s <= now_s:
            parcel = self._queue.popleft()
            self._queued_bytes -= parcel.size
            fail(parcel.future, self._link.timed_out(sent=False))
        for number, shipment in list(self._unanswered.items()):
            if all(parcel.deadline_s <= now_s for parcel in shipment.parcels):
                self._forget(number, OutcomeUnknown(UNKNOWN))
        if self._queue:
            self._flush_soon()
        self._settle()

    def _forget(self, number: int, error: TickwheelError) -> None:
        shipment = self._unanswered.pop(number)
        self._unanswered_bytes -= shipment.size
        self._link.pending.pop(number, None)
        for parcel in shipment.parcels:
            fail(parcel.future, error)

    def _fail_if_over(self) -> None:
        """The connection is gone; when the link is gone too, nothing will be answered."""
        error = self._link.failed
        if error is None:
            return
        for number in list(self._unanswered):
            self._forget(number, OutcomeUnknown(f"{error}; {UNKNOWN}"))
        for parcel in self._queue:
            fail(parcel.future, error)
        self._queue.clear()
        self._queued_bytes = 0
        self._settle()

    def _settle(self) -> None:
        if not self._queue and not self._unanswered:
            self._idle.set()


UNKNOWN = "the request was sent and not answered in time; whether it was taken is not known"


def fail(future: asyncio.Future[Any], error: TickwheelError) -> None:
    """End a future that perhaps nobody looks at: asyncio shall not complain about that."""
    if not future.done():
        future.set_exception(type(error)(error.message))
        future.exception()
