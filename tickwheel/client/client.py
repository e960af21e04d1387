"""``Client``: the door to everything else in this package."""

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
from tickwheel.client.connection import (
    DEFAULT_URL,
    LOGGER,
    Trust,
    connect,
    is_secure,
    parse_url,
)
from tickwheel.client.delivery import Delivery
from tickwheel.client.encodings import UNPACKED_BYTES_MAX, Codec, Compression, body_of
from tickwheel.client.keywords import GroupKeywords, TaskKeywords
from tickwheel.client.link import Link, LinkOptions, Whole
from tickwheel.client.producer import Producer, gather_receipts
from tickwheel.client.reconnector import HEARTBEAT_S
from tickwheel.client.requests import verbs_need_loop
from tickwheel.client.subscription import Subscription, log_new_group, subscribe_options
from tickwheel.client.task_options import Task
from tickwheel.client.tasks import (
    CheckedTask,
    Receipt,
    Receipts,
    frame_slices,
    refuse_unknown,
    spelled_out,
    task_of,
)
from tickwheel.client.verbs import WrittenVerbs
from tickwheel.errors import (
    BadRequest,
    ClientClosed,
    TickwheelError,
    shown,
)
from tickwheel.limits import Limits
from tickwheel.protocol import encode
from tickwheel.version import __version__
from tickwheel.waiting import to_its_end

if TYPE_CHECKING:
    from tickwheel.client.shards import Shards, SpreadProducer
    from tickwheel.client.subscription import Spread

FRAMES_AHEAD = 8
"""Frames of one ``enqueue_many`` that may be on their way at a time."""

T = TypeVar("T")


@verbs_need_loop
class Client(WrittenVerbs):
    """A connection to a Tickwheel daemon that mends itself; every method may be used at once. Where
    the daemon is one of several shards, there is one to each (docs/sharded-clients.md).

    It connects with its first call, or ``connect``; ``close``, or ``async with``, ends it.

    ``url``: ``tcp://HOST:PORT``, several with commas (default: ``TICKWHEEL_URL``, else
    tcp://127.0.0.1:7355); the one that is active is found and followed. A call takes at most
    ``send_timeout * (1 + retries)`` seconds; refusals that may pass are retried ``retries``
    times, and as long as the call has time when the store takes nothing now (``refused``). After
    ``heartbeat`` seconds without a byte from the daemon it is asked whether it is there, and after
    2.5 times that given up. The daemon asks too, and gives up a client whose event loop stands
    still for its ``heartbeat_timeout_s`` (30 s): long synchronous work belongs
    into a thread. Errors are ``TickwheelError``s.

    ``tls://HOST:PORT`` is TCP with TLS. ``ca``: a file with whom to trust instead of the system's;
    ``client_cert``, ``client_key``: files to show to a daemon that asks (defaults:
    ``TICKWHEEL_CA``, ``TICKWHEEL_CLIENT_CERT``, ``TICKWHEEL_CLIENT_KEY``).

    ``compress`` ("zlib", or "zstd" by the extra ``zstd``), ``compress_over``: bodies of more bytes
    (4096) are compressed if that makes them smaller. ``keys``: 32 bytes each by name, of which the
    first, or ``encrypt_with``, encrypts bodies and all decrypt them (extra ``encryption``);
    ``keys_file``: the same as a file (``TICKWHEEL_KEYS_FILE``). ``unpacked_bytes_max``: what
    delivered bodies may have when they are unpacked. More of it is in docs/typed.md.

    Every call takes ``timeout``: seconds (or a timedelta) for this call instead, connected or
    not. What is over then ends as it would otherwise: Unreachable (or what the daemon refused it
    with) when nothing of it was done; OutcomeUnknown for an enqueue that was sent, SendTimeout or
    ConnectionLost for any other call: it may be done, or be done yet.
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
            raise BadRequest(f"retries must be an integer of 0 to 1000, not {shown(retries)}")
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
        self._link = Link(options, whole=Whole(self._spread, self._undo, self._parts))
        """The link to the shard that it has begun with."""
        self._shards: Shards | None = None

    def _use(self, codec: Codec) -> None:
        """Pack and unpack bodies by this codec from now on; what has come keeps its own."""
        self._options.codec = codec
        self._checker.codec = codec if codec.packs else None

    @property
    def _codec(self) -> Codec:
        return self._options.codec

    @property
    def _state(self) -> str:
        return self._link.state

    # --- life -----------------------------------------------------------------------------------

    async def connect(self) -> Self:
        """Connect now rather than with the first call; harmless when it is connected. Raises
        Unreachable after ``connect_timeout``, NotActive after
        ``active_timeout`` (daemons answer, and none leads yet), or what the daemon objects to;
        then it may be called again."""
        if self._state == "closed":
            raise ClientClosed("this client is closed; make a new one")
        if self._state == "new":
            self._begin()
            await self._link.connecting
        else:
            await self._link.connect()
        return self

    def _ready(self) -> None:
        if self._state == "new":
            self._begin()
        else:
            self._link.ready()

    def _begin(self) -> None:
        self._link.begin()
        self._producer: Producer | SpreadProducer = self._link.producer

    async def close(self, timeout: float | None = None) -> None:
        """Flush acks and enqueues, give back what was not handed out, and say goodbye.

        Takes at most ``timeout`` seconds (default: ``send_timeout``). Harmless when closed.
        """
        limit_s = self._options.send_timeout_s if timeout is None else timeout
        await self._link.close(limit_s, [link for link in self._links if link is not self._link])

    async def __aenter__(self) -> Self:
        try:
            return await self.connect()
        except asyncio.CancelledError:
            await to_its_end(
                self.close(0.0)
            )  # of one that had begun with a call, nobody would do it
            raise

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- shards ---------------------------------------------------------------------------------

    def _spread(self, urls: Sequence[str], place: tuple[int, int]) -> None:
        """Have a link to each shard, of which that of this connection is there; enqueues that wait
        go where they belong."""
        from tickwheel.client.shards import Shards  # for whoever has several

        self._shards = shards = Shards(self._link, urls, place)
        waiting = self._link.producer.withdraw()
        self._producer = shards.producer
        shards.producer.take_over(waiting)
        shards.answer_checks()

    async def _undo(self) -> None:
        shards, self._shards = self._shards, None
        if shards is not None:
            await shards.close()

    async def _know_shards(self, until_s: float | None = None) -> Shards | None:
        self._ready()
        link = self._link
        if link.place is None:
            now_s = link.reconnector.loop.time()
            time_s = self._options.total_s if until_s is None else max(until_s - now_s, 0.0)
            await asyncio.wait((link.connecting,), timeout=time_s)
            if not link.connecting.done() and not link.reconnector.info:
                raise link.reconnector.unreachable(round(time_s, 1))
        return self._shards

    async def _parts(self, front: Subscription) -> Spread | None:
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
        """Store a task durably; due after ``delay`` (seconds, a timedelta, or text such as
        "5m"), or ``at`` (an aware datetime), else at once.

        ``options`` are those of TaskKeywords. Concurrent calls share frames. Raises BadRequest when
        something is wrong with it; Refused (or a kind of it) or Unreachable when it was certainly
        not stored; OutcomeUnknown when nobody knows: it was sent, and not answered in time
        (``timeout``, else the client's).
        """
        checked = self._check("Client.enqueue", topic, body, delay, at, options)
        is_ruled = bool(options) and options.get("if_pending") is not None
        if is_ruled or timeout is not None:
            return await self._enqueue_apart(checked, timeout, is_ruled=is_ruled)
        future = self._producer.join(checked)
        if future is None:
            await self._producer.wait_room()
            future = self._producer.add(checked)
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

        Raises at once what is wrong with the task, and Overloaded when too many wait; what goes
        wrong later is the future's. One that nobody looks at is only logged.
        """
        checked = self._check("Client.enqueue_nowait", topic, body, delay, at, options)
        is_ruled = bool(options) and options.get("if_pending") is not None
        if not is_ruled and timeout is None:
            return self._producer.add(checked)
        task, size = checked
        time_s = None if timeout is None else seconds(timeout, "timeout")
        return self._producer.put([task], 0, size, time_s, is_ruled=is_ruled)

    async def _enqueue_apart(
        self, checked: CheckedTask, timeout: Duration | None, *, is_ruled: bool
    ) -> Receipt:
        """``enqueue`` for a task with a rule for a pending key, or for a caller with a time of its
        own."""
        time_s = None if timeout is None else seconds(timeout, "timeout")
        if self._producer.is_full:
            began_s = self._reconnector.loop.time()
            await self._producer.wait_room(time_s)
            if time_s is not None:
                time_s -= self._reconnector.loop.time() - began_s
        task, size = checked
        receipt: Receipt = await self._producer.put([task], 0, size, time_s, is_ruled=is_ruled)
        return receipt

    async def enqueue_many(
        self, tasks: Iterable[Task], *, timeout: Duration | None = None
    ) -> list[Receipt]:
        """Store tasks; their receipts in order. All are checked before the first is sent.

        What fits one frame (``limits.tasks_per_frame_max`` tasks and ``frame_bytes_max`` bytes)
        is stored as a whole or not at all. More goes out in several; when some of them were
        stored and others not, Partly says which. With tasks that have ``if_pending`` a frame has
        ``limits.coalesced_tasks_max`` tasks. Over several shards that is so for each shard's
        tasks of a frame; those without a key go together.
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
            return self._producer.put(part, end - start, size, time_s, is_ruled=is_ruled)

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
        """Store tasks that differ in body and delay only: the fastest way for very many.

        All are due after ``delay``, or each after its own of ``delays``, else at once. Otherwise
        as ``enqueue_many``.
        """
        until_s = self._until(timeout)
        columns = self._checker.check_columns(topic, bodies, delay, delays)
        codec = self._checker.codec
        if codec is not None and not codec.leaves(columns.bodies):
            # Their encodings differ: columns have none.
            pairs = zip(columns.bodies, columns.delays_ms, strict=True)
            tasks = [Task(columns.topic, body, delay=ms / 1000) for body, ms in pairs]
            made = await self.enqueue_many(tasks, timeout=timeout)
            return Receipts([one.id for one in made], [one.due_ms for one in made])
        limits = self._reconnector.limits
        slices = list(frame_slices(columns.sizes, limits, limits.tasks_per_frame_max))

        def add(start: int, end: int) -> asyncio.Future[Receipts]:
            return self._producer.add_columns(columns.part(start, end), self._left_s(until_s))

        frames = (partial(add, a, b) for a, b in slices)
        futures, trouble = await self._send_frames(frames, until_s)
        found = await gather_receipts(futures, [b - a for a, b in slices], trouble)
        return found if isinstance(found, Receipts) else Receipts((), ())

    async def _send_frames(
        self, frames: Iterable[Callable[[], asyncio.Future[Any]]], until_s: float | None
    ) -> tuple[list[asyncio.Future[Any]], TickwheelError | None]:
        """The futures of the frames that were sent, and the error that kept the next one back."""
        futures: list[asyncio.Future[Any]] = []
        for send in frames:
            if len(futures) >= FRAMES_AHEAD:
                # When one has failed the rest is not even begun.
                await asyncio.wait((futures[-FRAMES_AHEAD],))
                if futures[-FRAMES_AHEAD].exception() is not None:
                    break
            try:
                if self._producer.is_full:
                    await self._producer.wait_room(self._left_s(until_s))
                futures.append(send())
            except TickwheelError as error:
                return futures, error
        return futures, None

    def _left_s(self, until_s: float | None) -> float | None:
        """The seconds that a call's own time has left; an instant when it is over."""
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
        """Send a task and forget it: no answer, no retry, no promise that it is stored.

        Raises what is wrong with it, and Unreachable when there is no connection to send it on.
        """
        checked = self._check("Client.oneway", topic, body, delay, at, options)
        time_s = self._options.send_timeout_s if timeout is None else seconds(timeout, "timeout")
        reconnector = self._reconnector
        if self._link.place is None:
            await reconnector.wait_up(time_s)
        if self._shards is not None:
            reconnector = self._shards.home_of(checked[0]).reconnector
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
        """Deliveries as they come due, to one of the group's members each.

        At most ``prefetch`` of them are unsettled here (default: 256, of each shard where there
        are several; one that is named goes to the shards with work). ``lease``: how long one may
        take before it is delivered again (default: the daemon's). ``retry``: the policy of a group
        that has none of its own; where it has another one, the subscription ends with Conflict.

        ``ack="on_delivery"``: at most once. The task is over before it is sent; a crash here
        loses it, and ``close`` what was not read. ``broadcast``: everything that comes due while
        connected, for this subscriber alone; no group, no retry. For both, every verb answers
        "done", without the daemon. ``auto_ack``: a delivery is acked when the next one is asked
        for, and when the ``with`` ends; nacked when an exception leaves the ``with``. More of it
        is in ``AutoAck``.

        ``settings`` are those of GroupKeywords: of the group, when it is made by this; where it
        has others, the subscription ends with Conflict. A broadcast has the filter alone: what it
        gets.
        """
        refuse_unknown(settings, GroupKeywords, "Client.subscribe")
        self._ready()
        self._checker.name(topic, "topic")
        if not broadcast or group:
            self._checker.name(group, "group")
        asked = subscribe_options(
            topic, group, lease_ms=self._lease_ms(lease), retry=retry, ack=ack,
            auto_ack=auto_ack, broadcast=broadcast, settings=settings,
        )  # fmt: skip
        return self._link.subscriptions.make(asked, prefetch)

    @spelled_out(GroupKeywords)
    async def pull(
        self,
        topic: str,
        *,
        group: str = "default",
        max: int = 32,  # noqa: A002  # the name of the published surface
        wait: Duration = 0.0,
        lease: Duration | None = None,
        timeout: Duration | None = None,
        **settings: Unpack[GroupKeywords],
    ) -> list[Delivery]:
        """Up to ``max`` deliveries; none after ``wait`` seconds without any. ``timeout`` is for
        all of it, ``wait`` included; ``settings`` are as in ``subscribe``. A pull that makes the
        group logs so (``tickwheel.client``)."""
        refuse_unknown(settings, GroupKeywords, "Client.pull")
        until_s = self._until(timeout)
        lease_ms, wait_ms = self._lease_ms(lease), duration_ms(wait, "wait")
        options: dict[str, Any] = {} if lease_ms is None else {"lease_ms": lease_ms}
        options |= GroupFields.of_keywords(settings)
        names = (self._checker.name(topic, "topic"), self._checker.name(group, "group"))
        whole = await self._know_shards(until_s) or self._link
        made: list[MadeGroup] = []
        found = await whole.pull(names, max, wait_ms, options, until_s, made.append)
        new = MadeGroup.joined(made)
        if new is not None:
            log_new_group(LOGGER, new, topic, group)
        return found

    def _lease_ms(self, lease: Duration | None) -> int | None:
        if lease is None:
            return None
        lease_ms, limits = duration_ms(lease, "lease"), self._reconnector.limits
        if not limits.lease_ms_min <= lease_ms <= limits.lease_ms_max:
            raise BadRequest(
                f"lease is {lease_ms} ms; it must be {limits.lease_ms_min} ms or more, and"
                f" {limits.lease_ms_max} ms (the daemon's lease_max_s) or less"
            )
        return lease_ms

    def body_of(self, task: TaskInfo | ScheduleInfo) -> bytes | None:
        """The body of a task that was looked up or listed, or of a schedule's tasks, unpacked;
        None: it has ended, and has none. Raises Undecodable, as ``Delivery.body`` does."""
        return body_of(self._codec, task)

    # --- the daemon -----------------------------------------------------------------------------

    async def _flush_acks(self) -> None:
        """Wait until every ack that was given up to now has its answer."""
        begun = [link for link in self._links if link.is_begun]
        await asyncio.gather(*(link.acks.wait_answered() for link in begun))

    async def ping(self, *, timeout: Duration | None = None) -> float:
        """How long the daemon takes to answer, in seconds."""
        until_s = self._until(timeout)
        began_s = self._reconnector.loop.time()
        await self._link.ask(FrameType.PING, until_s=until_s)
        return self._reconnector.loop.time() - began_s

    @property
    def server_info(self) -> Mapping[str, Any]:
        """What the daemon said last in answer to HELLO: v, epoch, node, role, now_ms, limits."""
        return {} if self._state == "new" else self._reconnector.info

    @property
    def limits(self) -> Limits:
        """What the daemon accepts; before it is known, what daemons accept by default."""
        return self._checker.limits

    @property
    def connected(self) -> bool:
        """Whether a connection stands right now; calls wait for the next one anyway."""
        return self._link.connected
