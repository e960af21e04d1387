"""The taker: sends the rows of an inbox to the daemon, each exactly once.

A batch is recorded in the database of the inbox, then sent in a session of the daemon under its
recorded number, then confirmed by the record of the next batch. A taker that starts repeats the
last recorded batch in its session, under its number and with the same content, and the daemon
answers with the first outcome. Then it begins a session of its own. So it needs no transaction over
both databases.

Rows are sent in order. Other commands than enqueues are separate batches; after a crash they may be
repeated. A batch of enqueues that the daemon refuses is halved until the invalid rows are found,
which go to the table of refused rows. Temporary refusals, such as a full backlog, delay all rows;
parts of the batch are tried meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tickwheel.api.frames import SESSION_BYTES
from tickwheel.api.times import moment
from tickwheel.client.tasks import FRAME_BYTES, size_of
from tickwheel.client.wire import NumberedClient
from tickwheel.errors import (
    BadRequest,
    Conflict,
    Forbidden,
    FrameTooLarge,
    NotFound,
    Overloaded,
    RequestForgotten,
    TickwheelError,
    TlsFailed,
    Unauthorized,
    shown,
)
from tickwheel.inbox.contract import REFUSED_MAX, Batch, Inbox, InboxTrouble, Row
from tickwheel.model.records import ID_MAX, MOMENT_MS_MAX
from tickwheel.model.values import is_utf8

if TYPE_CHECKING:
    from tickwheel.client.tasks import WireTask
    from tickwheel.limits import Limits

T = TypeVar("T")

LOGGER = logging.getLogger("tickwheel.inbox")
POLL_S: Final = 0.001
POLL_MAX_S: Final = 0.05
"""Seconds between two reads of an empty inbox: at first, and after about half a second."""
POLL_GROWTH: Final = 1.1
STOP_S: Final = 2.0
"""Seconds that a request in progress has to finish when this process stops."""
TIDY_S: Final = 1.0
"""Seconds between two removals of rows, and two attempts to become the only taker."""
CLOCK_S: Final = 10.0
"""Seconds between two comparisons of the clocks."""
AGAIN_S: Final = 0.2
AGAIN_MAX_S: Final = 5.0
"""Minimum and maximum seconds before an attempt is repeated."""
MEMORY_S: Final = 23 * 3600.0
"""Seconds for which the daemon certainly remembers a batch that it has stored."""
ANSWER_S: Final = MEMORY_S
"""Maximum seconds to wait for the answer to a batch. Then its outcome is uncertain."""
REFUSALS: Final = (BadRequest, Conflict, Forbidden, FrameTooLarge, NotFound)
"""Errors for which a row is stored as refused."""
DECISIONS: Final = ("stop", "resend", "skip")
"""What can happen with a batch whose outcome the daemon may have forgotten."""


class Taker:
    """Takes rows from an inbox until ``stop``. Any number of takers can run; one of them works."""

    def __init__(
        self, inbox: Inbox, url: str | None, token: str | None = None, *, uncertain: str = "stop"
    ) -> None:
        """``url`` and ``token`` are those of a client; ``uncertain`` is one of ``DECISIONS``."""
        self._inbox = inbox
        self._url, self._token = url, token
        self._uncertain = uncertain
        self._stopping = asyncio.Event()
        self._offset_ms = 0
        self._next_clock_s = self._next_tidy_s = 0.0
        self._shards = 1
        self._session, self._number = b"", 0
        """The session of this term, and the number of its last batch."""
        self._refusals_left = 0
        """How many more rows can be refused before their table is counted again."""
        self.taken = self.refused = 0
        """Numbers of rows that were sent, and that the daemon refused."""
        self.delay_s = 0.0
        """Seconds from writing the oldest row of the last batch to its confirmation."""
        self.trouble: str | None = None
        """Why rows are not taken now."""
        self.leads = False

    def stop(self) -> None:
        """Stop after the current batch. ``run`` then returns."""
        self._stopping.set()

    async def run(self) -> None:
        """Take rows until ``stop``. Raise Conflict if the outcome of a batch is uncertain, and
        Unauthorized or TlsFailed if the daemon does not accept this process."""
        pause_s = AGAIN_S
        while self._goes_on():
            began_s = time.monotonic()
            try:
                await self._inbox.open()
                while self._goes_on() and not await self._inbox.lead():
                    self._report(None)  # another taker works
                    await self._wait(TIDY_S)
                if not self._stopping.is_set():
                    self.leads = True
                    await self._take()
            except InboxTrouble as error:
                if not self._stopping.is_set():
                    self._report(str(error))
            except TickwheelError as error:
                if isinstance(error, (Conflict, Unauthorized, TlsFailed, BadRequest)):
                    raise
                self._report(_text(error))
            finally:
                self.leads = False
                await self._inbox.close()
            if not self._goes_on():
                return
            if time.monotonic() - began_s > AGAIN_MAX_S:
                pause_s = AGAIN_S
            await self._wait(pause_s)
            pause_s = min(AGAIN_MAX_S, 2 * pause_s)

    def _goes_on(self) -> bool:
        """Return False after ``stop``. Raise CancelledError if this task was cancelled: a driver
        can report the loss of its connection instead of the cancellation."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        return not self._stopping.is_set()

    async def _wait(self, wait_s: float) -> None:
        """Wait for ``stop``, at most ``wait_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._stopping.wait()

    def _report(self, trouble: str | None) -> None:
        if trouble != self.trouble:
            if trouble is not None:
                LOGGER.warning("the inbox waits: %s", trouble)
            else:
                LOGGER.info("the inbox works again")
        self.trouble = trouble

    # --- one term as the only taker --------------------------------------------------------------

    async def _take(self) -> None:
        inbox = self._inbox
        batch = await inbox.take_over()
        if batch is not None:
            await self._repeat(batch)
        self._session, self._number = os.urandom(SESSION_BYTES), 0
        async with self._connected(self._session) as client:
            pause_s = POLL_S
            while self._goes_on():
                rows = await inbox.read()
                if rows:
                    await self._send(client, rows)
                    pause_s = POLL_S
                else:
                    await asyncio.sleep(pause_s)
                    pause_s = min(POLL_MAX_S, pause_s * POLL_GROWTH)
                await self._look_after()
            await inbox.note_idle()

    @asynccontextmanager
    async def _connected(self, session: bytes) -> AsyncIterator[NumberedClient]:
        """Yield a client with this session."""
        client = NumberedClient(self._url, session, token=self._token, name="tickwheel-inbox")
        try:
            await self._until_stopped(client.connect())
            self._shards = await client.count_shards()
            await self._inbox.announce(client.limits)
            await self._compare_clocks()
            self._report(None)
            yield client
        finally:
            await client.close(0.0)  # without BYE, so that the session stays known

    async def _look_after(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_clock_s:
            await self._compare_clocks()
        if now_s >= self._next_tidy_s:
            self._next_tidy_s = now_s + TIDY_S
            await self._inbox.tidy()

    async def _compare_clocks(self) -> None:
        """Measure the offset of the clocks. It is never too small, so no task is early."""
        database_ms = await self._inbox.clock_ms()
        self._offset_ms = time.time_ns() // 1_000_000 + 1 - database_ms
        self._next_clock_s = time.monotonic() + CLOCK_S

    async def _repeat(self, batch: Batch) -> None:
        """Send the batch of an earlier taker again, in its session. If the daemon has stored it, it
        answers so."""
        async with self._connected(batch.session) as client:
            reason = None
            if batch.age_s > MEMORY_S:
                reason = f"they were sent {batch.age_s / 3600:.0f} h ago"
            elif batch.shards != self._shards:
                reason = f"they were sent to {batch.shards} shards, not {self._shards}"
            is_uncertain = reason is not None and batch.rows[0].verb == "enqueue"
            if is_uncertain and self._skips(batch, str(reason)):
                self._inbox.confirm()
            else:
                await self._finish(client, batch)

    def _skips(self, batch: Batch, reason: str) -> bool:
        """Return whether to skip a batch whose outcome is uncertain. Raise Conflict if nobody has
        decided this."""
        ids = [row.id for row in (*batch.rows, *batch.rest)]
        text = (
            f"{self._inbox.label}: rows {min(ids)} to {max(ids)} may have been enqueued: {reason},"
            " so the daemon may have forgotten the outcome"
        )
        if self._uncertain == "stop":
            raise Conflict(
                f"{text}. `tickwheel inbox run --uncertain resend` may repeat their {len(ids)}"
                " tasks, `--uncertain skip` may lose them"
            )
        LOGGER.warning("%s; decision: %s", text, self._uncertain)
        return self._uncertain == "skip"

    # --- batches ---------------------------------------------------------------------------------

    async def _send(self, client: NumberedClient, rows: Sequence[Row]) -> None:
        """Record and send the first of these rows."""
        part = _first_part(client.limits, rows)
        self._number += 1
        batch = Batch(
            self._session, self._number, part, offset_ms=self._offset_ms, shards=self._shards
        )
        await self._inbox.record(batch, len(part))
        await self._finish(client, batch)
        self.taken += len(part)
        if _objection(part[0]) is None:
            self.delay_s = max(0.0, time.time() - (part[0].at_ms + self._offset_ms) / 1000)

    async def _finish(self, client: NumberedClient, batch: Batch) -> None:
        """Send a recorded batch and its rest, and confirm them."""
        while True:
            refused = {row.id: (row, error) for row in batch.rows if (error := _objection(row))}
            for row, error in refused.values():
                await self._refuse(row, error)
            rows = [row for row in batch.rows if row.id not in refused]
            failed: list[Row] = []
            if rows and rows[0].verb == "enqueue":
                failed = await self._enqueue(client, replace(batch, rows=rows))
            elif rows:
                await self._command(client, rows, batch.offset_ms)
            waiting = [*failed, *batch.rest]
            if not waiting:
                break
            count = max(1, len(failed) // 2) if failed else len(waiting)
            batch = replace(
                batch, number=batch.number + 1, rows=waiting[:count], rest=waiting[count:]
            )
            await self._inbox.record(batch)
        self._inbox.confirm()
        if batch.session == self._session:
            self._number = batch.number

    async def _refuse(self, row: Row, error: TickwheelError) -> None:
        while self._refusals_left <= 0:
            self._refusals_left = REFUSED_MAX - await self._inbox.count_refused()
            if self._refusals_left <= 0:
                await self._pause(
                    f"{self._inbox.label}: {REFUSED_MAX} refused rows are stored, which is the"
                    " maximum; examine and delete them",
                    TIDY_S,
                )
        self._report(None)
        LOGGER.warning("row %d was refused: %s: %s", row.id, error.code, error.message)
        await self._inbox.refuse(row, error.code, error.message)
        self._refusals_left -= 1
        self.refused += 1

    async def _enqueue(self, client: NumberedClient, batch: Batch) -> list[Row]:
        """Send tasks. Refuse a sole task that the daemon refuses; of several, return those that it
        has certainly not stored. Raise InboxTrouble if this process stops first."""
        tasks = [_wire(row, batch.offset_ms) for row in batch.rows]
        while True:
            sending = client.put_numbered(batch.number, tasks)
            outcomes = await self._until_stopped(sending, ANSWER_S)
            errors = [
                (row, outcome)
                for row, outcome in zip(batch.rows, outcomes, strict=True)
                # A forgotten request was answered before.
                if isinstance(outcome, TickwheelError) and not isinstance(outcome, RequestForgotten)
            ]
            temporary = next((error for _, error in errors if error.retryable), None)
            if temporary is None:
                for _, error in errors:
                    _check_refusal(error)
                self._report(None)
                if errors and len(tasks) == 1:
                    await self._refuse(*errors[0])
                    return []
                return [row for row, _ in errors]
            await self._pause(_text(temporary))
            is_certain = all(isinstance(error, (Overloaded, *REFUSALS)) for _, error in errors)
            if is_certain and len(tasks) > 1:
                return [row for row, _ in errors]  # there may be room for some of them

    async def _command(self, client: NumberedClient, rows: Sequence[Row], offset_ms: int) -> None:
        """Cancel, reschedule or acknowledge tasks."""
        while rows:
            calls = (_call(client, row, offset_ms) for row in rows)
            ends = await self._until_stopped(asyncio.gather(*calls, return_exceptions=True))
            again, temporary = [], None
            for row, end in zip(rows, ends, strict=True):
                if isinstance(end, TickwheelError) and end.retryable:
                    again.append(row)
                    temporary = end
                elif isinstance(end, NotFound):
                    pass  # there is nothing to change
                elif isinstance(end, TickwheelError):
                    _check_refusal(end)
                    await self._refuse(row, end)
                elif isinstance(end, BaseException):
                    raise end
            rows = again
            if temporary is not None:
                await self._pause(_text(temporary))
        self._report(None)

    async def _pause(self, trouble: str, wait_s: float = AGAIN_S) -> None:
        """Wait before a request is repeated. Raise InboxTrouble if this process stops."""
        self._report(trouble)
        await self._wait(wait_s)
        if self._stopping.is_set():
            raise InboxTrouble("this process stops")

    async def _until_stopped(self, work: Awaitable[T], time_s: float | None = None) -> T:
        """Return the result of ``work``. Raise InboxTrouble if it takes more than ``STOP_S`` after
        ``stop``, or after ``time_s``."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stopping.wait())
        try:
            waiting = asyncio.FIRST_COMPLETED
            await asyncio.wait((task, stop), timeout=time_s, return_when=waiting)
            if not task.done():
                await asyncio.wait((task,), timeout=STOP_S)
            if not task.done():
                reason = "this process stops" if stop.done() else "no answer to the last batch"
                raise InboxTrouble(reason)
            return task.result()
        finally:
            stop.cancel()
            task.cancel()


def _text(error: TickwheelError) -> str:
    return f"{error.code}: {error.message}"


def _check_refusal(error: TickwheelError) -> None:
    """Raise an error that is not about a row, such as a revoked token."""
    if not isinstance(error, REFUSALS):
        raise error


def _objection(row: Row) -> BadRequest | None:
    """Return why no request can be made of a row: in SQLite, an application can write anything."""
    for name in ("at_ms", "delay_ms", "due_ms"):
        value = getattr(row, name)
        if value is not None and (type(value) is not int or not 0 <= value <= MOMENT_MS_MAX):
            return BadRequest(
                f"{name} must be an integer between 0 and {MOMENT_MS_MAX}, not {shown(value)}"
            )
    if not isinstance(row.body, bytes):
        return BadRequest(f"body must be a blob or text, not {shown(row.body)}")
    if row.verb == "enqueue":
        for name in ("shard_by", "order_key", "key"):  # one of them determines the shard
            value = row.options.get(name)
            if value is not None and not (isinstance(value, str) and is_utf8(value)):
                return BadRequest(f"{name} must be text that UTF-8 can encode, not {shown(value)}")
        return None
    task_id, key = row.options.get("id"), row.options.get("key")
    is_by_id = type(task_id) is int and 0 <= task_id <= ID_MAX
    is_by_key = task_id is None and isinstance(row.topic, str) and isinstance(key, str)
    if not is_by_id and (row.verb == "ack" or not is_by_key):
        way = "an id" if row.verb == "ack" else "an id, or a topic and a key"
        return BadRequest(f"{row.verb} needs {way}, not {shown(row.options)}")
    return None


def _first_part(limits: Limits, rows: Sequence[Row]) -> list[Row]:
    """Return the first rows that can be sent together: enqueues that fit a frame, or commands of
    one kind that affect different tasks."""
    verb, count_max = rows[0].verb, limits.tasks_per_frame_max
    bytes_left = limits.frame_bytes_max - FRAME_BYTES
    part: list[Row] = []
    targets = set[Any]()
    for row in rows:
        if row.verb != verb:
            break
        is_fitting = len(part) < count_max
        if verb == "enqueue":
            if "if_pending" in row.options:
                count_max = min(count_max, limits.coalesced_tasks_max)
            bytes_left -= _size(row)
            is_fitting = len(part) < count_max and bytes_left >= 0
        elif _objection(row) is None:
            task_id = row.options.get("id")
            target = (row.topic, row.options.get("key")) if task_id is None else task_id
            is_fitting = len(part) < count_max and target not in targets
            targets.add(target)
        if part and not is_fitting:
            break
        part.append(row)
    return part


def _size(row: Row) -> int:
    """Return the maximum bytes of a task in a frame; 0 for a task that cannot be sent."""
    try:
        return size_of([_wire(row, 0)])
    except (BadRequest, TypeError):
        return 0


def _wire(row: Row, offset_ms: int) -> WireTask:
    """Return a task in wire form. Its content depends on the row and the offset only."""
    options, delay_ms = dict(row.options), None
    if row.due_ms is not None:
        options["due_ms"] = row.due_ms
    elif row.delay_ms:
        options["due_ms"] = row.at_ms + row.delay_ms + offset_ms
    elif "delay_level" not in options:
        delay_ms = 0
    task = row.topic or "", row.body, delay_ms
    return (*task, options) if options else task


async def _call(client: NumberedClient, row: Row, offset_ms: int) -> None:
    """Execute a command on tasks."""
    if row.verb == "ack":
        names = ("group", "epoch", "id", "attempt")
        await client.ack(row.topic, *(row.options.get(name) for name in names))
        return
    task_id, key = row.options.get("id"), row.options.get("key")
    selection: dict[str, Any] = {"topic": row.topic, "key": key}
    if task_id is not None:
        selection = {"task_id": task_id}
    if row.verb == "cancel":
        await client.cancel(**selection)
        return
    due_ms = row.due_ms
    if due_ms is None:
        due_ms = row.at_ms + (row.delay_ms or 0) + offset_ms
    await client.reschedule(**selection, at=moment(due_ms))
