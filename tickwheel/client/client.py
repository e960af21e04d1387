"""``Client``: the entry point of this package."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from tickwheel import environment
from tickwheel.api.frames import AckMode, FrameType
from tickwheel.api.groups import GroupFields, MadeGroup
from tickwheel.api.policies import Retry
from tickwheel.api.schedules import ScheduleInfo
from tickwheel.api.tasks import TaskInfo
from tickwheel.api.times import Duration, duration_ms, seconds
from tickwheel.client.connection import DEFAULT_URL, LOGGER, Trust, connect, is_secure, parse_url
from tickwheel.client.delivery import Delivery
from tickwheel.client.encodings import UNPACKED_BYTES_MAX, Codec, Compression, body_of
from tickwheel.client.keywords import GroupKeywords, TaskKeywords
from tickwheel.client.link import ClientCallbacks, Link, LinkOptions, closing_s
from tickwheel.client.producer import Producer, gather_receipts
from tickwheel.client.reconnector import HEARTBEAT_S
from tickwheel.client.requests import verbs_need_loop
from tickwheel.client.subscription import Subscription, log_new_group, subscribe_options
from tickwheel.client.task_options import Task
from tickwheel.client.tasks import (
    CheckedTask,
    Receipt,
    Receipts,
    WireTask,
    frame_slices,
    refuse_unknown,
    spelled_out,
    task_of,
)
from tickwheel.client.verbs import HandwrittenVerbs
from tickwheel.errors import BadRequest, SendTimeout, TickwheelError, shown
from tickwheel.limits import Limits
from tickwheel.protocol import encode
from tickwheel.version import __version__
from tickwheel.waiting import finish_despite_cancellation

if TYPE_CHECKING:
    from tickwheel.client.shards import Shards
    from tickwheel.client.subscription import SpreadSubscription

FRAMES_AHEAD = 8
"""Maximum frames in flight of one ``enqueue_many``."""

T = TypeVar("T")


@verbs_need_loop
class Client(HandwrittenVerbs):
    """A connection to a Tickwheel daemon that reconnects by itself; calls can overlap freely. If
    the daemon is one of several shards, the client connects to each (docs/sharded-clients.md).

    The first call, ``connect`` or ``async with`` connects; ``close`` or the end of ``async with``
    disconnects.

    ``url``: ``tcp://HOST:PORT``, or several separated by commas (default: ``TICKWHEEL_URL``, else
    tcp://127.0.0.1:7355); the client finds the active daemon and follows it. A call takes at most
    ``send_timeout * (1 + retries)`` seconds. A temporary refusal is retried ``retries`` times;
    while the store accepts no writes (``refused``), the call retries until its time is over. After
    ``heartbeat`` seconds without a byte from the daemon the client pings it, and after 2.5 times
    this time it closes the connection. The daemon pings as well, and drops a client whose event
    loop is blocked for its ``heartbeat_timeout_s`` (30 s): run long synchronous work in a thread.
    All errors are ``TickwheelError``s.

    ``tls://HOST:PORT`` is TCP with TLS. ``ca``: a file of certificates to trust instead of the
    system's; ``client_cert``, ``client_key``: files for a daemon that requires a client certificate
    (defaults: ``TICKWHEEL_CA``, ``TICKWHEEL_CLIENT_CERT``, ``TICKWHEEL_CLIENT_KEY``).

    ``compress`` ("zlib", or "zstd" with the extra ``zstd``) compresses bodies of more than
    ``compress_over`` bytes (4096) if that makes them smaller. ``keys``: keys of 32 bytes by name.
    The first, or ``encrypt_with``, encrypts bodies, and all of them decrypt (extra ``encryption``);
    ``keys_file`` reads them from a file (``TICKWHEEL_KEYS_FILE``). ``unpacked_bytes_max``: maximum
    size of a delivered body after unpacking. See docs/typed.md.

    Every call accepts ``timeout``: seconds (or a timedelta) for this call, connected or not. A call
    that runs out of time raises Unreachable (or the daemon's refusal) if it certainly had no
    effect. Otherwise an enqueue raises OutcomeUnknown, and any other call SendTimeout or
    ConnectionLost: the daemon may have processed it, or may still do so.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        send_timeout: float = 3.0,
        retries: int = 2,
        connect_timeout: float = 10.0,
        active_timeout: float = 10.0,
        heartbeat: float = HEARTBEAT_S,
        ca: str | None = None,
        client_cert: str | None = None,
        client_key: str | None = None,
        compress: Compression | None = None,
        compress_over: int | None = None,
        keys: Mapping[str, bytes] | None = None,
        keys_file: str | os.PathLike[str] | None = None,
        encrypt_with: str | None = None,
        unpacked_bytes_max: int = UNPACKED_BYTES_MAX,
        name: str = f"tickwheel-python/{__version__}",
    ) -> None:
        url = url or environment.value("TICKWHEEL_URL") or DEFAULT_URL
        if type(retries) is not int or not 0 <= retries <= 1000:
            raise BadRequest(f"retries must be an integer between 0 and 1000, not {shown(retries)}")
        self._options = options = LinkOptions(
            addresses=parse_url(url),
            open_to=connect,
            tls=Trust(ca, client_cert, client_key).context() if is_secure(url) else None,
            token=token if token is not None else environment.value("TICKWHEEL_TOKEN"),
            name=name,
            retries=retries,
            send_timeout_s=seconds(send_timeout, "send_timeout"),
            connect_timeout_s=seconds(connect_timeout, "connect_timeout"),
            active_timeout_s=seconds(active_timeout, "active_timeout"),
            heartbeat_s=seconds(heartbeat, "heartbeat"),
            codec=Codec.of_client(
                compress=compress, compress_over=compress_over, keys=keys, keys_file=keys_file,
                encrypt_with=encrypt_with, unpacked_bytes_max=unpacked_bytes_max,
            ),
        )  # fmt: skip
        self._checker, self._checks = options.checker, options.checks
        self._use(options.codec)
        callbacks = ClientCallbacks(self._spread, self._forget_shards, self._parts)
        self._link = Link(options, callbacks=callbacks)
        """The link to the first shard."""
        self._shards: Shards | None = None

    def _use(self, codec: Codec) -> None:
        """Use this codec for bodies from now on; deliveries that were received keep their codec."""
        self._options.codec = codec
        self._checker.codec = codec if codec.packs else None

    @property
    def codec(self) -> Codec:
        """How this client packs and unpacks bodies."""
        return self._options.codec

    @property
    def _state(self) -> str:
        return self._link.state

    # --- life -----------------------------------------------------------------------------------

    async def connect(self) -> Self:
        """Connect now instead of with the first call. Does nothing when connected. Raise
        Unreachable after ``connect_timeout``, NotActive after ``active_timeout`` (daemons answer,
        but none is active), or the daemon's refusal; the caller can try again afterwards."""
        self._ready()
        try:
            await self._link.connect()
        except asyncio.CancelledError:
            await self._link.abandon()
            raise
        return self

    def _ready(self) -> None:
        if self._state == "new":
            self._begin()
        else:
            self._link.ready()

    def _begin(self) -> None:
        self._link.begin()

    async def close(self, timeout: float | None = None) -> None:
        """Flush acks and enqueues, release deliveries that the program has not received, and
        disconnect.

        Takes at most ``timeout`` seconds (default: ``send_timeout``). Does nothing when closed.
        """
        limit_s = closing_s(self, timeout)
        await self._link.close(limit_s, [link for link in self._links if link is not self._link])

    async def __aenter__(self) -> Self:
        try:
            return await self.connect()
        except asyncio.CancelledError:
            # A call may have begun to connect, and nothing else would close that connection.
            await finish_despite_cancellation(self.close(0.0))
            raise

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- shards ---------------------------------------------------------------------------------

    def _spread(self, urls: Sequence[str], shard_and_count: tuple[int, int]) -> None:
        """Link to every shard, reusing the current connection for its shard; route waiting enqueues
        to their shards."""
        from tickwheel.client.shards import Shards  # imported only with several shards

        self._shards = shards = Shards(self._link, urls, shard_and_count)
        shards.take_over(self._link.producer.withdraw())
        shards.connect_for_checks()

    async def _forget_shards(self) -> None:
        shards, self._shards = self._shards, None
        if shards is not None:
            await shards.close()

    async def _know_shards(self, until_s: float | None = None) -> Shards | None:
        self._ready()
        link = self._link
        if link.shard_and_count is None:
            now_s = link.reconnector.loop.time()
            time_s = self._options.total_s if until_s is None else max(until_s - now_s, 0.0)
            connecting = await link.wait_connecting(time_s)
            if not connecting.done() and not link.reconnector.info:
                raise link.reconnector.unreachable(round(time_s, 1))
        return self._shards

    async def _parts(self, front: Subscription) -> SpreadSubscription | None:
        shards = await self._know_shards()
        return None if shards is None else shards.parts(front)

    # --- enqueue --------------------------------------------------------------------------------

    @spelled_out(TaskKeywords)
    async def enqueue(
        self,
        topic: str,
        body: bytes,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        timeout: Duration | None = None,
        **options: Unpack[TaskKeywords],
    ) -> Receipt:
        """Store a task durably. It is due after ``delay`` (seconds, a timedelta, or text such as
        "5m"), or ``at`` (an aware datetime), or at once.

        ``options``: see TaskKeywords. Concurrent calls share frames. Raise BadRequest for an
        invalid task; Refused (or a subclass) or Unreachable when the task was certainly not stored;
        OutcomeUnknown when the task was sent but not answered within ``timeout`` (default: the
        client's).
        """
        checked = self._check("Client.enqueue", topic, body, delay, at, options)
        is_ruled = bool(options) and options.get("if_pending") is not None
        if is_ruled or timeout is not None:
            return await self._enqueue_apart(checked, timeout, is_ruled=is_ruled)
        producer = self._link.producer if self._shards is None else self._home(checked[0])
        future = producer.join(checked)
        if future is None:
            await producer.wait_room()
            future = self._home(checked[0]).add(checked)
        receipt: Receipt = await future
        return receipt

    @spelled_out(TaskKeywords)
    def enqueue_nowait(
        self,
        topic: str,
        body: bytes,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        timeout: Duration | None = None,
        **options: Unpack[TaskKeywords],
    ) -> asyncio.Future[Receipt]:
        """``enqueue`` as a future.

        Raise BadRequest for an invalid task, and Overloaded when too many tasks wait. Later errors
        are set on the future; an error that nobody retrieves is only logged.
        """
        checked = self._check("Client.enqueue_nowait", topic, body, delay, at, options)
        is_ruled = bool(options) and options.get("if_pending") is not None
        producer = self._link.producer if self._shards is None else self._home(checked[0])
        if not is_ruled and timeout is None:
            return producer.add(checked)
        task, size = checked
        time_s = None if timeout is None else seconds(timeout, "timeout")
        return producer.put([task], 0, size, time_s, is_ruled=is_ruled)

    async def _enqueue_apart(
        self, checked: CheckedTask, timeout: Duration | None, *, is_ruled: bool
    ) -> Receipt:
        """``enqueue`` for a task with a rule for pending keys, or a call with a timeout."""
        time_s = None if timeout is None else seconds(timeout, "timeout")
        task, size = checked
        producer = self._home(task)
        if producer.is_full:
            began_s = self._reconnector.loop.time()
            await producer.wait_room(time_s)
            if time_s is not None:
                time_s -= self._reconnector.loop.time() - began_s
            producer = self._home(task)  # by now there may be several shards
        receipt: Receipt = await producer.put([task], 0, size, time_s, is_ruled=is_ruled)
        return receipt

    def _home(self, task: WireTask) -> Producer:
        """Return the producer of the task's shard. Raise BadRequest."""
        return self._link.producer if self._shards is None else self._shards.home(task)

    @property
    def _frames(self) -> Producer | Shards:
        """The producer of whole frames."""
        return self._shards or self._link.producer

    async def enqueue_many(
        self, tasks: Iterable[Task], *, timeout: Duration | None = None
    ) -> list[Receipt]:
        """Store tasks and return their receipts in order. Checks all tasks before sending any.

        The tasks of one frame (``limits.tasks_per_frame_max`` tasks and ``frame_bytes_max`` bytes)
        are stored together or not at all. More tasks are sent in several frames; if only some
        frames were stored, Partly lists the stored tasks. If any task has ``if_pending``, a frame
        has at most ``limits.coalesced_tasks_max`` tasks. With several shards this holds for each
        shard's part of a frame; tasks without a key go to one shard together.
        """
        until_s = self._until(timeout)
        wires, sizes = self._checker.check_all(tasks)
        limits = self._reconnector.limits
        count_max = limits.tasks_per_frame_max
        is_ruled = any(len(wire) == 4 and "if_pending" in wire[3] for wire in wires)
        if is_ruled:
            count_max = min(count_max, limits.coalesced_tasks_max)
        slices = list(frame_slices(sizes, limits, count_max))

        def add(start: int, end: int) -> asyncio.Future[list[Receipt]]:
            part, size, time_s = wires[start:end], sum(sizes[start:end]), self._left_s(until_s)
            return self._frames.put(part, end - start, size, time_s, is_ruled=is_ruled)

        frames = (partial(add, a, b) for a, b in slices)
        futures, trouble = await self._send_frames(frames, until_s)
        return list(await gather_receipts(futures, [b - a for a, b in slices], trouble))

    async def enqueue_columns(
        self,
        topic: str,
        bodies: Iterable[bytes],
        *,
        delay: Duration | None = None,
        delays: Iterable[Duration] | None = None,
        timeout: Duration | None = None,
    ) -> Receipts:
        """Store tasks that differ only in body and delay: the fastest way to enqueue many.

        ``delay`` applies to all tasks, ``delays`` gives one for each; without either, tasks are due
        at once. Otherwise like ``enqueue_many``.
        """
        until_s = self._until(timeout)
        columns = self._checker.check_columns(topic, bodies, delay, delays)
        codec = self._checker.codec
        if codec is not None and not codec.leaves_unchanged(columns.bodies):
            # Columns cannot express encodings, which the codec adds.
            pairs = zip(columns.bodies, columns.delays_ms, strict=True)
            tasks = [Task(columns.topic, body, delay=ms / 1000) for body, ms in pairs]
            receipts = await self.enqueue_many(tasks, timeout=timeout)
            return Receipts([r.id for r in receipts], [r.due_ms for r in receipts])
        limits = self._reconnector.limits
        slices = list(frame_slices(columns.sizes, limits, limits.tasks_per_frame_max))

        def add(start: int, end: int) -> asyncio.Future[Receipts]:
            return self._frames.add_columns(columns.part(start, end), self._left_s(until_s))

        frames = (partial(add, a, b) for a, b in slices)
        futures, trouble = await self._send_frames(frames, until_s)
        stored = await gather_receipts(futures, [b - a for a, b in slices], trouble)
        return stored if isinstance(stored, Receipts) else Receipts((), ())

    async def _send_frames(
        self, frames: Iterable[Callable[[], asyncio.Future[Any]]], until_s: float | None
    ) -> tuple[list[asyncio.Future[Any]], TickwheelError | None]:
        """Return the futures of the frames that were sent, and the error that prevented the
        next."""
        futures: list[asyncio.Future[Any]] = []
        for send in frames:
            if len(futures) >= FRAMES_AHEAD:
                # Send no further frame after a failure.
                await asyncio.wait((futures[-FRAMES_AHEAD],))
                if futures[-FRAMES_AHEAD].exception() is not None:
                    break
            try:
                if self._frames.is_full:
                    await self._frames.wait_room(self._left_s(until_s))
                futures.append(send())
            except TickwheelError as error:
                return futures, error
        return futures, None

    def _left_s(self, until_s: float | None) -> float | None:
        """Return the seconds left until ``until_s``, at least a millisecond. None: no limit."""
        return None if until_s is None else max(until_s - self._reconnector.loop.time(), 0.001)

    @spelled_out(TaskKeywords)
    async def oneway(
        self,
        topic: str,
        body: bytes,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        timeout: Duration | None = None,
        **options: Unpack[TaskKeywords],
    ) -> None:
        """Send a task without waiting for an answer, without retries, and without a promise that it
        is stored.

        Raise BadRequest for an invalid task, and Unreachable without a connection.
        """
        checked = self._check("Client.oneway", topic, body, delay, at, options)
        time_s = self._options.send_timeout_s if timeout is None else seconds(timeout, "timeout")
        if self._link.shard_and_count is None:
            await self._know_shards(self._until(time_s))
        reconnector = self._home(checked[0]).reconnector
        connection = await reconnector.wait_up(time_s)
        if not connection.has_room:
            await connection.wait_room(time_s)
        connection.put(encode((int(FrameType.ONEWAY), 0, (checked[0],))))
        reconnector.wake()

    def _check(
        self,
        method: str,
        topic: str,
        body: bytes,
        delay: Duration | None,
        at: datetime | None,
        options: TaskKeywords,
    ) -> CheckedTask:
        if self._link.state != "open":
            self._ready()
        is_plain = at is None
        if options:
            for value in options.values():
                if value is not None:
                    is_plain = False
                    break
            else:
                refuse_unknown(options, TaskKeywords, method)
        if is_plain:
            checked = self._checker.plain(topic, body, delay)
            if checked is not None:
                return checked
        return self._checker.check(task_of(method, topic, body, delay, at, options))

    # --- consume --------------------------------------------------------------------------------

    @spelled_out(GroupKeywords)
    def subscribe(
        self,
        topic: str,
        *,
        group: str = "default",
        prefetch: int | None = None,
        lease: Duration | None = None,
        retry: Retry | None = None,
        ack: AckMode = "manual",
        auto_ack: bool = False,
        broadcast: bool = False,
        **settings: Unpack[GroupKeywords],
    ) -> Subscription:
        """Receive the group's deliveries as they come due; each goes to one member of the group.

        At most ``prefetch`` of them are unsettled here (default: 256 per shard; with several
        shards, a given number is divided among the shards with work). ``lease``: the time after
        which an unsettled delivery goes to another member (default: the daemon's). ``retry``: the
        policy of a group that has none; if the group has a different one, the subscription ends
        with Conflict.

        ``ack="on_delivery"``: at most once. The task is finished before it is sent; a crash here
        loses it, and ``close`` loses the deliveries not yet read. ``broadcast``: every task that
        comes due while connected, for this subscriber alone, without a group or retries. In both
        cases every verb returns "done" without asking the daemon. ``auto_ack``: a delivery is acked
        when the next is requested and when the ``with`` block ends, and nacked when an exception
        leaves the block. See ``AutoAck``.

        ``settings``: see GroupKeywords. They apply when this call creates the group; if an existing
        group's settings differ, the subscription ends with Conflict. A broadcast accepts only the
        filter.
        """
        refuse_unknown(settings, GroupKeywords, "Client.subscribe")
        self._ready()
        self._checker.name(topic, "topic")
        if not broadcast or group:
            self._checker.name(group, "group")
        requested = subscribe_options(
            topic, group, lease_ms=self._lease_ms(lease), retry=retry, ack=ack,
            auto_ack=auto_ack, broadcast=broadcast, settings=settings,
        )  # fmt: skip
        return self._link.subscriptions.make(requested, prefetch)

    @spelled_out(GroupKeywords)
    async def pull(
        self,
        topic: str,
        *,
        group: str = "default",
        max: int = 32,  # noqa: A002  # the name in the public API
        wait: Duration = 0.0,
        lease: Duration | None = None,
        timeout: Duration | None = None,
        **settings: Unpack[GroupKeywords],
    ) -> list[Delivery]:
        """Return up to ``max`` deliveries, or an empty list after ``wait`` seconds without any.
        ``timeout`` limits the whole call, ``wait`` included; ``settings`` are those of
        ``subscribe``. Logs to ``tickwheel.client`` when the pull creates the group."""
        refuse_unknown(settings, GroupKeywords, "Client.pull")
        until_s = self._until(timeout)
        lease_ms, wait_ms = self._lease_ms(lease), duration_ms(wait, "wait")
        options: dict[str, Any] = {} if lease_ms is None else {"lease_ms": lease_ms}
        options |= GroupFields.of_keywords(settings)
        names = (self._checker.name(topic, "topic"), self._checker.name(group, "group"))
        target = await self._know_shards(until_s) or self._link
        left_s = self._left_s(until_s)
        if left_s is not None:  # the daemon should wait no longer than the caller
            wait_ms = min(wait_ms, int(left_s * 1000))
        made: list[MadeGroup] = []
        deliveries = await target.pull(names, max, wait_ms, options, until_s, made.append)
        new = MadeGroup.joined(made)
        if new is not None:
            log_new_group(LOGGER, new, topic, group)
        return deliveries

    def _lease_ms(self, lease: Duration | None) -> int | None:
        if lease is None:
            return None
        lease_ms, limits = duration_ms(lease, "lease"), self._reconnector.limits
        if not limits.lease_ms_min <= lease_ms <= limits.lease_ms_max:
            raise BadRequest(
                f"lease must be between {limits.lease_ms_min} ms and {limits.lease_ms_max} ms"
                f" (the daemon's lease_max_s), not {lease_ms} ms"
            )
        return lease_ms

    def body_of(self, task: TaskInfo | ScheduleInfo) -> bytes | None:
        """Return the unpacked body of a task that was looked up or listed, or of a schedule's
        tasks. None: the task has ended, and its body is gone. Raise Undecodable like
        ``Delivery.body``."""
        return body_of(self.codec, task)

    # --- the daemon -----------------------------------------------------------------------------

    async def flush_acks(self, *, timeout: Duration | None = None) -> None:
        """Wait until every ack up to now, such as those of ``ack_nowait`` and ``ack_unwatched``, is
        answered or given up. Raise SendTimeout after ``timeout``; the acks are still being sent."""
        time_s = None if timeout is None else seconds(timeout, "timeout")
        started = [link for link in self._links if link.is_started]
        try:
            async with asyncio.timeout(time_s):
                await asyncio.gather(*(link.acks.wait_answered() for link in started))
        except TimeoutError:
            raise SendTimeout(
                f"not all acks were answered within {time_s:g} s; they are still being sent"
            ) from None

    async def ping(self, *, timeout: Duration | None = None) -> float:
        """Return the seconds that the daemon takes to answer."""
        until_s = self._until(timeout)
        began_s = self._reconnector.loop.time()
        await self._link.ask(FrameType.PING, until_s=until_s)
        return self._reconnector.loop.time() - began_s

    @property
    def server_info(self) -> Mapping[str, Any]:
        """The daemon's last answer to HELLO: v, epoch, node, role, now_ms, limits."""
        return {} if self._state == "new" else self._reconnector.info

    @property
    def limits(self) -> Limits:
        """The daemon's limits; before the first connection, the default limits."""
        return self._checker.limits

    @property
    def connected(self) -> bool:
        """Whether a connection is open now; a call waits for the next connection anyway."""
        return self._link.connected
