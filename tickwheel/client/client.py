"""``Client``: the door to everything else in this package."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from tickwheel.client.acks import Acks
from tickwheel.client.addresses import DEFAULT_URL, parse_url
from tickwheel.client.delivery import Delivery
from tickwheel.client.producer import Producer, gather_receipts
from tickwheel.client.reconnector import HEARTBEAT_S, Reconnector
from tickwheel.client.requests import Calls
from tickwheel.client.results import (
    KEEP,
    Backup,
    DeadLetter,
    GroupSettings,
    Keep,
    KeyOutcome,
    Rescheduled,
    Stats,
    Status,
    TaskInfo,
    read,
)
from tickwheel.client.retry import Retry, policy_wire
from tickwheel.client.schedules import ScheduleInfo, put_options, task_options
from tickwheel.client.subscription import Subscription, Subscriptions, subscribe_options
from tickwheel.client.tasks import (
    FRAME_BYTES,
    CheckedTask,
    Receipt,
    Receipts,
    Task,
    TaskChecker,
    Value,
)
from tickwheel.client.times import Duration, duration_ms, moment_ms
from tickwheel.errors import (
    BadRequest,
    ClientClosed,
    LimitExceeded,
    ProtocolError,
    TickwheelError,
    UnknownType,
    shown,
)
from tickwheel.limits import ID_MAX, Limits
from tickwheel.protocol.codec import encode
from tickwheel.protocol.frames import SESSION_BYTES, FrameType
from tickwheel.version import __version__

FRAMES_AHEAD = 8
"""Frames of one ``enqueue_many`` that may be on their way at a time."""
LOOKUP_IDS = 256
"""Ids of one LOOKUP: their bodies have to fit one answer."""
PAGE = 1000
BACKUP_S = 600.0
"""How much longer than other answers that of a backup may take."""

T = TypeVar("T")

STARTS = ("now", "first")
HELD = ("ready", "in_flight", "waiting", "dead")


class Client:
    """A connection to a Tickwheel daemon that mends itself; every method may be used at once.

    ``url``: ``tcp://HOST:PORT``, several with commas (default: ``TICKWHEEL_URL``, else
    tcp://127.0.0.1:7355); the one that is active is found and followed. A call takes at most
    ``send_timeout * (1 + retries)`` seconds; refusals that may pass are retried ``retries``
    times. After ``heartbeat`` seconds without a byte from the daemon it is asked whether it is
    there, and after 2.5 times that given up. The daemon asks too, and gives up a client whose
    event loop stands still for its ``heartbeat_timeout_s`` (30 s): long synchronous work belongs
    into a thread. Errors are ``TickwheelError``s.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        send_timeout: float = 3.0,
        retries: int = 2,
        connect_timeout: float = 3.0,
        active_timeout: float = 10.0,
        heartbeat: float = HEARTBEAT_S,
        name: str = f"tickwheel-python/{__version__}",
    ) -> None:
        self._addresses = parse_url(url or os.environ.get("TICKWHEEL_URL") or DEFAULT_URL)
        self._token = token if token is not None else os.environ.get("TICKWHEEL_TOKEN")
        self._send_timeout_s = _seconds(send_timeout, "send_timeout")
        self._connect_timeout_s = _seconds(connect_timeout, "connect_timeout")
        self._active_timeout_s = _seconds(active_timeout, "active_timeout")
        self._heartbeat_s = _seconds(heartbeat, "heartbeat")
        if type(retries) is not int or not 0 <= retries <= 1000:
            raise BadRequest(f"retries must be an integer of 0 to 1000, not {shown(retries)}")
        self._retries = retries
        self._total_s = self._send_timeout_s * (1 + retries)
        self._name = name
        self._checker = TaskChecker()
        self._state = "new"

    # --- life -----------------------------------------------------------------------------------

    async def connect(self) -> Self:
        """Connect. Raises Unreachable after ``connect_timeout``, NotActive after
        ``active_timeout`` (daemons answer, and none leads yet), or what the daemon objects to."""
        if self._state != "new":
            raise ClientClosed(f"this client is {self._state}; make a new one")
        self._state = "open"
        hello = {"session": os.urandom(SESSION_BYTES), "token": self._token, "client": self._name}
        self._reconnector = reconnector = Reconnector(
            self._addresses,
            hello,
            send_timeout_s=self._send_timeout_s,
            connect_timeout_s=self._connect_timeout_s,
            active_timeout_s=self._active_timeout_s,
            heartbeat_s=self._heartbeat_s,
            deliver=self._deliver,
            ended=self._ended,
            greeted=self._checker.set_limits,
        )
        self._producer = Producer(reconnector, self._total_s, self._retries)
        self._acks = Acks(reconnector, self._total_s)
        self._calls = Calls(reconnector, self._total_s, self._retries)
        self._subscriptions = Subscriptions(reconnector, self._calls, self._acks)
        # In the order of their frames: acks first, they set credit free; then what calls ask.
        reconnector.sources += [self._acks, self._producer, self._calls, self._subscriptions]
        try:
            await reconnector.start()
        except BaseException:
            self._state = "closed"
            await reconnector.stop(ClientClosed("the client did not connect"))
            raise
        return self

    async def close(self, timeout: float | None = None) -> None:
        """Flush acks and enqueues, give back what was not handed out, and say goodbye.

        Takes at most ``timeout`` seconds (default: ``send_timeout``). Harmless when closed.
        """
        if self._state != "open":
            self._state = "closed"
            return
        self._state = "closed"
        limit_s = self._send_timeout_s if timeout is None else timeout
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._finish()
        finally:
            await self._reconnector.stop(ClientClosed("the client was closed"))

    async def _finish(self) -> None:
        subscriptions = self._subscriptions.all()
        await asyncio.gather(*(s.close() for s in subscriptions), return_exceptions=True)
        await self._acks.wait_idle()
        await self._producer.wait_idle()
        if self._reconnector.connection is not None and not self._reconnector.connection.leaving:
            with suppress(TickwheelError):
                await self._calls.call(FrameType.BYE, repeat=False)

    def _deliver(self, sub: int, epoch: int, delivered_ms: int, items: tuple[Any, ...]) -> None:
        self._subscriptions.deliver(sub, epoch, delivered_ms, items)

    def _ended(self, sub: int, error: TickwheelError) -> None:
        self._subscriptions.ended(sub, error)

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _ready(self) -> None:
        if self._state != "open":
            hint = ": use async with, or connect()" if self._state == "new" else ""
            raise ClientClosed(f"the client is {self._state}{hint}")

    # --- enqueue --------------------------------------------------------------------------------

    async def enqueue(
        self,
        topic: str,
        body: bytes,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        key: str | None = None,
        tag: str | None = None,
        properties: Mapping[str, Value] | None = None,
        priority: int = 0,
        ttl: Duration | None = None,
        retry: Retry | None = None,
        delay_level: int | None = None,
    ) -> Receipt:
        """Store a task durably; due after ``delay``, or ``at``, else at once.

        ``delay_level``: instead, a number from 1 on of the daemon's table of delays; over the
        highest it is the highest.
        ``retry``: its own policy, which wins over its group's and topic's. Concurrent calls
        share frames. Raises BadRequest when it is wrong; Refused (or a kind of
        it) or Unreachable when it was certainly not stored; OutcomeUnknown when nobody knows.
        """
        checked = self._check(
            topic, body, delay, at, key, tag, properties, priority, ttl, retry, delay_level
        )
        future = self._producer.join(checked)
        if future is None:
            await self._producer.wait_room()
            future = self._producer.add(checked)
        receipt: Receipt = await future
        return receipt

    def enqueue_nowait(
        self,
        topic: str,
        body: bytes,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        key: str | None = None,
        tag: str | None = None,
        properties: Mapping[str, Value] | None = None,
        priority: int = 0,
        ttl: Duration | None = None,
        retry: Retry | None = None,
        delay_level: int | None = None,
    ) -> asyncio.Future[Receipt]:
        """``enqueue`` as a future.

        Raises at once what is wrong with the task, and Overloaded when too many wait; what goes
        wrong later is the future's. One that nobody looks at is only logged.
        """
        checked = self._check(
            topic, body, delay, at, key, tag, properties, priority, ttl, retry, delay_level
        )
        return self._producer.add(checked)

    async def enqueue_many(self, tasks: Iterable[Task]) -> list[Receipt]:
        """Store tasks; their receipts in order. All are checked before the first is sent.

        What fits one frame (``limits.tasks_per_frame_max`` tasks and ``frame_bytes_max`` bytes)
        is stored as a whole or not at all. More goes out in several; when some of them were
        stored and others not, Partly says which.
        """
        self._ready()
        wires, sizes = self._checker.check_all(tasks)
        slices = list(_slices(sizes, self._reconnector.limits))
        add = self._producer.add_many
        frames = (partial(add, wires[a:b], sum(sizes[a:b])) for a, b in slices)
        futures, trouble = await self._send_frames(frames)
        return list(await gather_receipts(futures, [b - a for a, b in slices], trouble))

    async def enqueue_columns(
        self,
        topic: str,
        bodies: Iterable[bytes],
        *,
        delay: Duration | None = None,
        delays: Iterable[Duration] | None = None,
    ) -> Receipts:
        """Store tasks that differ in body and delay only: the fastest way for very many.

        All are due after ``delay``, or each after its own of ``delays``, else at once. Otherwise
        as ``enqueue_many``.
        """
        self._ready()
        columns = self._checker.check_columns(topic, bodies, delay, delays)
        slices = list(_slices(columns.sizes, self._reconnector.limits))
        frames = (partial(self._producer.add_columns, columns.part(a, b)) for a, b in slices)
        futures, trouble = await self._send_frames(frames)
        found = await gather_receipts(futures, [b - a for a, b in slices], trouble)
        return found if isinstance(found, Receipts) else Receipts((), ())

    async def _send_frames(
        self, frames: Iterable[Callable[[], asyncio.Future[Any]]]
    ) -> tuple[list[asyncio.Future[Any]], TickwheelError | None]:
        """Those that were begun, and what kept the next one from it."""
        futures: list[asyncio.Future[Any]] = []
        for send in frames:
            if len(futures) >= FRAMES_AHEAD:
                # When one has failed the rest is not even begun.
                await asyncio.wait((futures[-FRAMES_AHEAD],))
                if futures[-FRAMES_AHEAD].exception() is not None:
                    break
            try:
                if self._producer.is_full:
                    await self._producer.wait_room()
                futures.append(send())
            except TickwheelError as error:
                return futures, error
        return futures, None

    async def oneway(
        self,
        topic: str,
        body: bytes,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        key: str | None = None,
        tag: str | None = None,
        properties: Mapping[str, Value] | None = None,
        priority: int = 0,
        ttl: Duration | None = None,
        retry: Retry | None = None,
        delay_level: int | None = None,
    ) -> None:
        """Send a task and forget it: no answer, no retry, no promise that it is stored.

        Raises what is wrong with it, and Unreachable when there is no connection to send it on.
        """
        checked = self._check(
            topic, body, delay, at, key, tag, properties, priority, ttl, retry, delay_level
        )
        connection = await self._reconnector.wait_up(self._send_timeout_s)
        if not connection.has_room:
            await connection.wait_room(self._send_timeout_s)
        connection.put(encode((int(FrameType.ONEWAY), 0, (checked[0],))))
        self._reconnector.wake()

    def _check(
        self,
        topic: str,
        body: bytes,
        delay: Duration | None,
        at: datetime | None,
        key: str | None,
        tag: str | None,
        properties: Mapping[str, Value] | None,
        priority: int,
        ttl: Duration | None,
        retry: Retry | None,
        delay_level: int | None,
    ) -> CheckedTask:
        if self._state != "open":
            self._ready()
        is_plain = (
            priority == 0
            and at is None
            and key is None
            and tag is None
            and properties is None
            and ttl is None
            and retry is None
            and delay_level is None
        )
        if is_plain:
            checked = self._checker.plain(topic, body, delay)
            if checked is not None:
                return checked
        task = Task(
            topic, body, delay=delay, at=at, key=key, tag=tag, properties=properties,
            priority=priority, ttl=ttl, retry=retry, delay_level=delay_level,
        )  # fmt: skip
        return self._checker.check(task)

    # --- consume --------------------------------------------------------------------------------

    def subscribe(
        self,
        topic: str,
        *,
        group: str = "default",
        prefetch: int = 256,
        lease: Duration | None = None,
        retry: Retry | None = None,
        ack: str = "manual",
        auto_ack: bool = False,
        broadcast: bool = False,
    ) -> Subscription:
        """Deliveries as they come due, to one of the group's members each.

        At most ``prefetch`` of them are unsettled here; ``lease``: how long one may take before
        it is delivered again (default: the daemon's). ``retry``: the policy of a group that has
        none of its own; where it has another one, the subscription ends with Conflict.

        ``ack="on_delivery"``: at most once. The task is over before it is sent; a crash here
        loses it, and ``close`` what was not read. ``broadcast``: everything that comes due while
        connected, for this subscriber alone; no group, no retry. For both, every verb answers
        "done", without the daemon. ``auto_ack``: a delivery is acked when the loop comes back for
        the next one; ``autoack.py`` says what can be known about how its body ended.
        """
        self._ready()
        self._checker.name(topic, "topic")
        if not broadcast or group:
            self._checker.name(group, "group")
        asked = subscribe_options(
            topic, group, lease_ms=self._lease_ms(lease), retry=retry, ack=ack,
            auto_ack=auto_ack, broadcast=broadcast,
        )  # fmt: skip
        return self._subscriptions.make(asked, prefetch)

    async def pull(
        self,
        topic: str,
        *,
        group: str = "default",
        max: int = 32,  # noqa: A002  # the name of the published surface
        wait: Duration = 0.0,
        lease: Duration | None = None,
    ) -> list[Delivery]:
        """Up to ``max`` deliveries; none after ``wait`` seconds without any."""
        self._ready()
        lease_ms, wait_ms = self._lease_ms(lease), duration_ms(wait, "wait")
        options = {} if lease_ms is None else {"lease_ms": lease_ms}
        names = (self._checker.name(topic, "topic"), self._checker.name(group, "group"))
        answer = await self._calls.call(
            FrameType.PULL,
            *names,
            max,
            wait_ms,
            options,
            extra_s=wait_ms / 1000,
            prompt=False,
            orphaned=lambda raw: self._subscriptions.give_back(*names, raw),
        )
        return read(lambda raw: self._subscriptions.pulled(*names, raw), answer)

    def _lease_ms(self, lease: Duration | None) -> int | None:
        if lease is None:
            return None
        lease_ms, limits = duration_ms(lease, "lease"), self._reconnector.limits
        if not limits.lease_ms_min <= lease_ms <= limits.lease_ms_max:
            raise BadRequest(
                f"lease is {lease_ms} ms; the limits are {limits.lease_ms_min} (lease_ms_min)"
                f" and {limits.lease_ms_max} (lease_ms_max)"
            )
        return lease_ms

    # --- tasks by id ----------------------------------------------------------------------------

    @overload
    async def cancel(self, task_id: int) -> str: ...

    @overload
    async def cancel(self, *, topic: str, key: str) -> list[KeyOutcome]: ...

    async def cancel(
        self, task_id: int | None = None, *, topic: str | None = None, key: str | None = None
    ) -> str | list[KeyOutcome]:
        """Cancel a task that is not being worked on: "cancelled", "already_cancelled", or what
        is too late for that: "in_flight", "acked", "expired", "dead", "gone", "unknown", …

        By topic and key: every unfinished task with that key, oldest first, each with its own
        status. When there is none, the one that finished last, as far as the daemon remembers;
        else one "unknown" without an id."""
        if task_id is None:
            return await self._of_key(FrameType.CANCEL_KEY, topic, key)
        _only_id(topic, key)
        return (await self.cancel_many([task_id]))[0]

    async def cancel_many(self, ids: Iterable[int]) -> list[str]:
        """``cancel`` of each, in order."""
        return await self._each(FrameType.CANCEL, _ids(ids), str)

    @overload
    async def reschedule(
        self, task_id: int, *, delay: Duration | None = None, at: datetime | None = None
    ) -> Rescheduled: ...

    @overload
    async def reschedule(
        self, *, topic: str, key: str, delay: Duration | None = None, at: datetime | None = None
    ) -> list[KeyOutcome]: ...

    async def reschedule(
        self,
        task_id: int | None = None,
        *,
        topic: str | None = None,
        key: str | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
    ) -> Rescheduled | list[KeyOutcome]:
        """Another due time: ``delay`` from now (by the daemon's clock), or ``at``. By topic and
        key as ``cancel``."""
        if (delay is None) == (at is None):
            raise BadRequest("reschedule needs delay or at, one of them")
        delay_ms = None if delay is None else duration_ms(delay, "delay")
        due_ms = None if at is None else moment_ms(at, "at")
        if task_id is None:
            return await self._of_key(FrameType.RESCHEDULE_KEY, topic, key, delay_ms, due_ms)
        _only_id(topic, key)
        item = (_id(task_id), delay_ms, due_ms)
        return (await self._each(FrameType.RESCHEDULE, [item], Rescheduled.of))[0]

    @overload
    async def run_now(self, task_id: int) -> Rescheduled: ...

    @overload
    async def run_now(self, *, topic: str, key: str) -> list[KeyOutcome]: ...

    async def run_now(
        self, task_id: int | None = None, *, topic: str | None = None, key: str | None = None
    ) -> Rescheduled | list[KeyOutcome]:
        """Due at once. By topic and key as ``cancel``."""
        if task_id is None:
            return await self._of_key(FrameType.RUN_NOW_KEY, topic, key)
        _only_id(topic, key)
        return (await self.run_now_many([task_id]))[0]

    async def run_now_many(self, ids: Iterable[int]) -> list[Rescheduled]:
        """``run_now`` of each, in order."""
        return await self._each(FrameType.RUN_NOW, _ids(ids), Rescheduled.of)

    @overload
    async def lookup(self, task_id: int) -> TaskInfo: ...

    @overload
    async def lookup(
        self, *, topic: str, key: str, newest: bool = False, not_after: datetime | None = None
    ) -> list[TaskInfo]: ...

    async def lookup(
        self,
        task_id: int | None = None,
        *,
        topic: str | None = None,
        key: str | None = None,
        newest: bool = False,
        not_after: datetime | None = None,
    ) -> TaskInfo | list[TaskInfo]:
        """Where a task stands. By topic and key: every unfinished task with that key, the newest
        first (``newest``: only that one; ``not_after``: only what was enqueued then or earlier);
        when there is none, the one that finished last, as far as the daemon remembers."""
        if task_id is not None:
            _only_id(topic, key)
            return (await self.lookup_many([task_id]))[0]
        named = _topic_and_key(topic, key)
        until_ms = None if not_after is None else moment_ms(not_after, "not_after")
        options = {"newest": newest} | ({} if until_ms is None else {"until_ms": until_ms})
        self._ready()
        answer = await self._calls.call(FrameType.LOOKUP_KEY, *named, options)
        return read(lambda maps: [TaskInfo.of(one) for one in maps], answer)

    async def lookup_many(self, ids: Iterable[int]) -> list[TaskInfo]:
        """``lookup`` of each, in order."""
        self._ready()
        wanted, found = _ids(ids), list[TaskInfo]()
        for start in range(0, len(wanted), LOOKUP_IDS):
            found += await self._lookup(wanted[start : start + LOOKUP_IDS])
        return found

    async def _lookup(self, ids: list[int]) -> list[TaskInfo]:
        try:
            answer = await self._calls.call(FrameType.LOOKUP, ids)
        except LimitExceeded:
            # Their bodies are too large for one answer.
            if len(ids) == 1:
                raise
            half = len(ids) // 2
            return await self._lookup(ids[:half]) + await self._lookup(ids[half:])
        return _list(answer, len(ids), TaskInfo.of)

    async def list_tasks(
        self,
        *,
        topic: str | None = None,
        state: str | None = None,
        key: str | None = None,
        not_after: datetime | None = None,
        newest_first: bool = False,
        limit: int | None = None,
    ) -> AsyncIterator[TaskInfo]:
        """Stored tasks in the order of their ids (``newest_first``: the other way round), at most
        ``limit``, read page by page: those with that ``key``, enqueued at ``not_after`` or before.
        A key has no index: the tasks are looked through."""
        options = {
            "topic": topic,
            "state": state,
            "key": key,
            "until_ms": None if not_after is None else moment_ms(not_after, "not_after"),
            "newest": newest_first or None,
        }
        async for task in self._pages(FrameType.LIST, options, "tasks", limit):
            yield read(TaskInfo.of, task)

    async def find(
        self, key: str, *, topic: str | None = None, not_after: datetime | None = None
    ) -> TaskInfo | None:
        """The newest task with that key that is stored (not finished; dead letters are), enqueued
        at ``not_after`` or before. With ``topic`` the index of keys says it; else the newest tasks
        are looked at first, and None, when no task has it, is known when all were."""
        found = None
        if topic is not None:
            # An older daemon, or one with very many of them, looks through all tasks.
            with suppress(UnknownType, LimitExceeded):
                tasks = await self.lookup(topic=topic, key=key, newest=True, not_after=not_after)
                return next((task for task in tasks if task.topic is not None), None)
        async for task in self.list_tasks(
            topic=topic, key=key, not_after=not_after, newest_first=True, limit=1
        ):
            found = task
        return found

    # --- dead letters ---------------------------------------------------------------------------

    async def dead_list(
        self,
        *,
        topic: str | None = None,
        group: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        reason: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[DeadLetter]:
        """Dead letters in the order of their ids, at most ``limit``, read page by page: those
        that died at ``since`` or later and before ``until``, with ``reason`` somewhere in the
        text of the last failure (in whatever case)."""
        options = {
            "topic": topic,
            "group": group,
            "since_ms": None if since is None else moment_ms(since, "since"),
            "until_ms": None if until is None else moment_ms(until, "until"),
            "reason": reason,
        }
        async for letter in self._pages(FrameType.DEAD_LIST, options, "dead", limit):
            yield read(DeadLetter.of, letter)

    async def dead_requeue(self, pairs: Iterable[tuple[int, str]]) -> list[str]:
        """Deliver dead letters, given as (id, group), again: "requeued" or "unknown" for each."""
        return await self._each(FrameType.DEAD_REQUEUE, _pairs(pairs), str)

    async def dead_delete(self, pairs: Iterable[tuple[int, str]]) -> list[str]:
        """Delete dead letters, given as (id, group): "deleted" or "unknown" for each."""
        return await self._each(FrameType.DEAD_DELETE, _pairs(pairs), str)

    # --- the daemon -----------------------------------------------------------------------------

    async def stats(self) -> Stats:
        """Counts of now."""
        self._ready()
        return read(Stats.of, await self._calls.call(FrameType.STATS))

    async def status(self) -> Status:
        """How the daemon is: its role and state, and since when. For one that is not active see
        ``status_at``."""
        self._ready()
        return read(Status.of, await self._calls.call(FrameType.STATUS))

    async def put_schedule(
        self,
        name: str,
        *,
        topic: str,
        body: bytes = b"",
        cron: str | None = None,
        timezone: str | None = None,
        every: Duration | None = None,
        anchor: datetime | None = None,
        jitter: Duration | None = None,
        start: datetime | None = None,
        end: datetime | None = None,
        runs_max: int | None = None,
        gap: str | None = None,
        fold: str | None = None,
        catch_up: str | None = None,
        catch_up_window: Duration | None = None,
        overlap: str | None = None,
        key: str | None = None,
        tag: str | None = None,
        properties: Mapping[str, Value] | None = None,
        priority: int = 0,
        ttl: Duration | None = None,
        retry: Retry | None = None,
    ) -> ScheduleInfo:
        """Make a schedule, or make the one of that name so; its ``outcome`` says which. Putting
        the same again changes nothing.

        ``cron`` (five fields, six with seconds first, ``@daily``, …) in ``timezone`` (IANA; UTC),
        or ``every`` so long, counted from ``anchor``. ``jitter``: up to so much later, the same
        for the same occurrence. ``gap`` ("after", "skip") and ``fold`` ("first", "second", "both"):
        fixed times that a clock jumps over, or that come twice. ``catch_up`` ("last", "skip",
        "all") of what was missed in the last ``catch_up_window`` (a day). ``overlap`` ("allow",
        "skip", "queue_one", "cancel_previous"): while the task before is unfinished. The rest is
        of its tasks, as ``enqueue`` has it. Raises BadRequest, LimitExceeded.
        """
        self._ready()
        task = task_options(key, tag, properties, priority, ttl, retry)
        options = put_options(
            topic, body, task, cron=cron, timezone=timezone, every=every, anchor=anchor,
            jitter=jitter, start=start, end=end, runs_max=runs_max, gap=gap, fold=fold,
            catch_up=catch_up, catch_up_window=catch_up_window, overlap=overlap,
        )  # fmt: skip
        answer = await self._calls.call(FrameType.SCHEDULE_PUT, name, options)
        return read(ScheduleInfo.of, answer)

    async def list_schedules(self) -> AsyncIterator[ScheduleInfo]:
        """All schedules, by name; page by page."""
        self._ready()
        after: str | None = None
        while True:
            options: dict[str, Any] = {"limit": PAGE}
            if after is not None:
                options["after"] = after
            page = await self._calls.call(FrameType.SCHEDULE_LIST, options)
            for one in page["schedules"]:
                yield read(ScheduleInfo.of, one)
            after = page["next"]
            if after is None:
                return

    async def show_schedule(self, name: str, *, planned: int = 5) -> ScheduleInfo:
        """One, with its next ``planned`` times and its newest runs. Raises NotFound."""
        return await self._schedule(name, "show", {"next": planned})

    async def pause_schedule(self, name: str) -> ScheduleInfo:
        """Nothing of it fires until it is resumed. Raises NotFound."""
        return await self._schedule(name, "pause")

    async def resume_schedule(self, name: str) -> ScheduleInfo:
        """What was missed meanwhile is for its catch-up. Raises NotFound."""
        return await self._schedule(name, "resume")

    async def delete_schedule(self, name: str) -> ScheduleInfo:
        """It, as it was; its tasks stay. Raises NotFound."""
        return await self._schedule(name, "delete", repeat=False)

    async def run_schedule(self, name: str) -> int:
        """A task of it at once, whatever is planned; its id. Raises NotFound, and ConnectionLost
        when nobody knows whether it was made: it is not asked for twice."""
        _, ids = await self._ask_schedule(name, "run", None, repeat=False)
        return int(ids[0])

    async def backfill_schedule(self, name: str, start: datetime, end: datetime) -> list[int]:
        """A task for each occurrence from ``start`` up to, and without, ``end``; their ids. Raises
        as ``run_schedule``."""
        options = {"from_ms": moment_ms(start, "start"), "to_ms": moment_ms(end, "end")}
        _, ids = await self._ask_schedule(name, "backfill", options, repeat=False)
        return list(ids)

    async def _schedule(
        self, name: str, verb: str, options: Any = None, *, repeat: bool = True
    ) -> ScheduleInfo:
        answer = await self._ask_schedule(name, verb, options, repeat=repeat)
        return read(ScheduleInfo.of, answer)

    async def _ask_schedule(self, name: str, verb: str, options: Any, *, repeat: bool) -> Any:
        self._ready()
        return await self._calls.call(FrameType.SCHEDULE, name, verb, options, repeat=repeat)

    async def backup(self, name: str) -> Backup:
        """Copy the store to a new file ``name`` in the daemon's backup folder, while it works."""
        self._ready()
        if not isinstance(name, str):
            raise BadRequest(f"name must be a file name, not {shown(name)}")
        answer = await self._calls.call(
            FrameType.BACKUP, name, extra_s=BACKUP_S, prompt=False, repeat=False
        )
        return read(lambda raw: Backup(path=raw["path"], bytes=raw["bytes"]), answer)

    async def ping(self) -> float:
        """How long the daemon takes to answer, in seconds."""
        self._ready()
        began_s = self._reconnector.loop.time()
        await self._calls.call(FrameType.PING)
        return self._reconnector.loop.time() - began_s

    @property
    def server_info(self) -> Mapping[str, Any]:
        """What the daemon said last in answer to HELLO: v, epoch, node, role, now_ms, limits."""
        return self._reconnector.info

    @property
    def limits(self) -> Limits:
        """What the daemon accepts."""
        return self._reconnector.limits

    @property
    def connected(self) -> bool:
        """Whether a connection stands right now; calls wait for the next one anyway."""
        return self._reconnector.connection is not None

    # --- what they share ------------------------------------------------------------------------

    async def _of_key(
        self, kind: FrameType, topic: str | None, key: str | None, *more: Any
    ) -> list[KeyOutcome]:
        self._ready()
        answer = await self._calls.call(kind, *_topic_and_key(topic, key), *more)
        return read(lambda outcomes: [KeyOutcome.of(one) for one in outcomes], answer)

    async def _each(
        self, kind: FrameType, items: Sequence[Any], parse: Callable[[Any], T]
    ) -> list[T]:
        self._ready()
        found: list[T] = []
        step = self._reconnector.limits.ids_per_frame_max
        for start in range(0, len(items), step):
            some = items[start : start + step]
            found += _list(await self._calls.call(kind, some), len(some), parse)
        return found

    async def _pages(
        self, kind: FrameType, options: Mapping[str, Any], field: str, limit: int | None
    ) -> AsyncIterator[Any]:
        self._ready()
        if limit is not None and (type(limit) is not int or limit < 1):
            raise BadRequest(f"limit must be an integer of 1 or more, not {shown(limit)}")
        asked = {name: value for name, value in options.items() if value is not None}
        left = limit
        while left is None or left > 0:
            asked["limit"] = PAGE if left is None else min(left, PAGE)
            answer = await self._calls.call(kind, asked, prompt=False)
            items, following = read(lambda raw: (tuple(raw[field]), raw["next"]), answer)
            for item in items:
                yield item
            if following is None:
                return
            if left is not None:
                left -= len(items)
            asked["after"] = following

    # --- groups ---------------------------------------------------------------------------------

    async def create_group(
        self,
        topic: str,
        group: str,
        *,
        start: str | datetime = "now",
        retry: Retry | None = None,
        rate: float | None = None,
        burst: int | None = None,
        paused: bool = False,
    ) -> GroupSettings:
        """Make a group before its first subscriber comes; one that exists stays as it is
        (``created`` of the answer says which).

        ``start``: it is owed what comes due from "now" on, from the "first" task that is still
        there, or from a moment.
        """
        names = self._names(topic, group, group_needed=True)
        options: dict[str, Any] = {"since": _since(start)}
        if retry is not None:
            options["retry"] = policy_wire(retry, "retry")
        if rate is not None:
            options["rate"] = _rate(rate)
        if burst is not None:
            options["burst"] = _burst(burst)
        if _bool(paused, "paused"):
            options["paused"] = True
        answer = await self._calls.call(FrameType.GROUP_CREATE, *names, options)
        return read(GroupSettings.of, answer)

    async def delete_group(self, topic: str, group: str, *, force: bool = False) -> dict[str, int]:
        """Delete a group; how many it held: ready, in_flight, waiting, dead.

        Raises Conflict when it holds anything, unless ``force``: then that is gone for it.
        """
        names = self._names(topic, group, group_needed=True)
        answer = await self._calls.call(
            FrameType.GROUP_DELETE, *names, _bool(force, "force"), repeat=False
        )
        return read(lambda raw: {name: int(raw[name]) for name in HELD}, answer)

    async def configure(
        self,
        topic: str,
        group: str | None = None,
        *,
        paused: bool | Keep = KEEP,
        rate: float | Keep | None = KEEP,
        burst: int | Keep | None = KEEP,
        retry: Retry | Keep | None = KEEP,
    ) -> GroupSettings:
        """Change settings of a group, or of the topic itself; what is not named stays. None
        lifts a rate or a policy. Durable when it returns. Raises NotFound for a group."""
        names = self._names(topic, group)
        changed: dict[str, Any] = {}
        if paused is not KEEP:
            changed["paused"] = _bool(paused, "paused")
        if rate is not KEEP:
            changed["rate"] = None if rate is None else _rate(rate)
        if burst is not KEEP:
            changed["burst"] = None if burst is None else _burst(burst)
        if retry is not KEEP:
            changed["retry"] = None if retry is None else policy_wire(retry, "retry")
        answer = await self._calls.call(FrameType.CONFIGURE, *names, changed)
        return read(GroupSettings.of, answer)

    async def pause(self, topic: str, group: str | None = None) -> GroupSettings:
        """Deliver nothing until ``resume``; it outlasts restarts of the daemon."""
        return await self.configure(topic, group, paused=True)

    async def resume(self, topic: str, group: str | None = None) -> GroupSettings:
        """Deliver again."""
        return await self.configure(topic, group, paused=False)

    def _names(
        self, topic: str, group: str | None, *, group_needed: bool = False
    ) -> tuple[str, str | None]:
        self._ready()
        topic = self._checker.name(topic, "topic")
        if group is None and not group_needed:
            return topic, None
        return topic, self._checker.name(group, "group")


def _slices(sizes: Sequence[int], limits: Limits) -> Iterable[tuple[int, int]]:
    """(start, end) of tasks that fit a frame each."""
    bytes_max, count_max = limits.frame_bytes_max - FRAME_BYTES, limits.tasks_per_frame_max
    if 0 < len(sizes) <= count_max and sum(sizes) <= bytes_max:
        yield 0, len(sizes)
        return
    start = size = 0
    for index, one in enumerate(sizes):
        size += one
        if size > bytes_max or index - start >= count_max:
            yield start, index
            start, size = index, one
    if start < len(sizes):
        yield start, len(sizes)


def _list(answer: Any, count: int, parse: Callable[[Any], T]) -> list[T]:
    if not isinstance(answer, tuple) or len(answer) != count:
        raise ProtocolError(f"the daemon's answer is no list of {count}: {answer!r:.100}")
    return [read(parse, item) for item in answer]


def _topic_and_key(topic: str | None, key: str | None) -> tuple[str, str]:
    if not isinstance(topic, str) or not isinstance(key, str):
        raise BadRequest(
            "name a task by its id, or by topic and key, two strings,"
            f" not topic {shown(topic)} and key {shown(key)}"
        )
    return topic, key


def _only_id(topic: str | None, key: str | None) -> None:
    if topic is not None or key is not None:
        raise BadRequest("name a task by its id, or by topic and key, not by both")


def _id(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= ID_MAX:
        raise BadRequest(f"id must be an integer of 0 to {ID_MAX}, not {shown(value)}")
    return value


def _ids(values: Iterable[int]) -> list[int]:
    return [_id(value) for value in values]


def _pairs(values: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    return [_pair(value) for value in values]


def _pair(value: Any) -> tuple[int, str]:
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not isinstance(value[1], str):
        raise BadRequest(f"a dead letter is (id, group), not {shown(value)}")
    return _id(value[0]), value[1]


def _since(start: Any) -> str | int:
    if isinstance(start, datetime):
        return moment_ms(start, "start")
    if start not in STARTS:
        raise BadRequest(f"start must be 'now', 'first' or a datetime, not {shown(start)}")
    return str(start)


def _rate(value: Any) -> float:
    wrong = isinstance(value, bool) or not isinstance(value, (int, float))
    if wrong or not math.isfinite(value) or value <= 0:
        raise BadRequest(f"rate must be a number above 0 (deliveries a second), not {shown(value)}")
    return float(value)


def _burst(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise BadRequest(f"burst must be an integer of 1 or more, not {shown(value)}")
    return value


def _bool(value: Any, field_name: str) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"{field_name} must be True or False, not {shown(value)}")
    return value


def _seconds(value: Any, field: str) -> float:
    if duration_ms(value, field) <= 0:
        raise BadRequest(f"{field} must be more than 0 s, not {shown(value)}")
    return float(value.total_seconds() if isinstance(value, timedelta) else value)
