"""``Client``: the door to everything else in this package."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from tickwheel import environment
from tickwheel.api.frames import SESSION_BYTES, AckMode, FrameType
from tickwheel.api.groups import GroupFields, MadeGroup
from tickwheel.api.policies import Retry
from tickwheel.api.schedules import ScheduleInfo
from tickwheel.api.tasks import TaskInfo
from tickwheel.api.times import Duration, duration_ms, seconds
from tickwheel.client.connection import (
    DEFAULT_URL,
    Open,
    Trust,
    connect,
    is_secure,
    parse_url,
)
from tickwheel.client.delivery import Acks, Delivery, seen
from tickwheel.client.encodings import UNPACKED_BYTES_MAX, Codec, Compression, body_of
from tickwheel.client.keywords import GroupKeywords, TaskKeywords
from tickwheel.client.producer import Producer, gather_receipts
from tickwheel.client.reconnector import HEARTBEAT_S, Reconnector
from tickwheel.client.requests import Calls, read, verbs_need_loop
from tickwheel.client.subscription import Subscription, Subscriptions, subscribe_options
from tickwheel.client.task_options import Task
from tickwheel.client.tasks import (
    CheckedTask,
    Receipt,
    Receipts,
    TaskChecker,
    frame_slices,
    refuse_unknown,
    spelled_out,
    task_of,
)
from tickwheel.client.transactions import Checks
from tickwheel.client.verbs import WrittenVerbs
from tickwheel.errors import (
    BadRequest,
    ClientClosed,
    ConnectionLost,
    TickwheelError,
    shown,
)
from tickwheel.limits import Limits
from tickwheel.protocol import encode
from tickwheel.version import __version__
from tickwheel.waiting import to_its_end

if TYPE_CHECKING:
    from tickwheel.client.search import Route
    from tickwheel.client.shards import Shards, SpreadAcks, SpreadProducer

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

    _open_to: Open = staticmethod(connect)
    """Opens a connection to an address; to a daemon in this process it is another way."""

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
        self._addresses = parse_url(url)
        self._tls = Trust(ca, client_cert, client_key).context() if is_secure(url) else None
        self._token = token if token is not None else environment.value("TICKWHEEL_TOKEN")
        self._send_timeout_s = seconds(send_timeout, "send_timeout")
        self._connect_timeout_s = seconds(connect_timeout, "connect_timeout")
        self._active_timeout_s = seconds(active_timeout, "active_timeout")
        self._heartbeat_s = seconds(heartbeat, "heartbeat")
        if type(retries) is not int or not 0 <= retries <= 1000:
            raise BadRequest(f"retries must be an integer of 0 to 1000, not {shown(retries)}")
        self._retries = retries
        self._total_s = self._send_timeout_s * (1 + retries)
        self._name = name
        self._checker = TaskChecker()
        packing = Codec.of_client(
            compress=compress, compress_over=compress_over, keys=keys, keys_file=keys_file,
            encrypt_with=encrypt_with, unpacked_bytes_max=unpacked_bytes_max,
        )  # fmt: skip
        self._use(packing)
        self._checks = Checks(self)
        self._state = "new"
        self._shards: Shards | None = None
        self._place: tuple[int, int] | None = None
        """Which shard is connected to, and how many there are; None: no daemon has said it."""
        self._route: Route | None = None
        """Where that shard is looked for, if it is one of several."""

    def _use(self, codec: Codec) -> None:
        """Pack and unpack bodies by this codec from now on; what has come keeps its own."""
        self._codec = codec
        self._checker.codec = codec if codec.packs else None

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
            await self._connecting
        else:
            await asyncio.shield(self._connecting)
        return self

    def _ready(self) -> None:
        if self._state == "closed":
            raise ClientClosed("the client is closed; make a new one")
        if self._state == "new":
            self._begin()

    def _begin(self) -> None:
        """Open the client: requests are sent when the connection stands, or fail with the reason
        why there is none."""
        self._state = "open"
        hello: dict[str, Any] = {"session": os.urandom(SESSION_BYTES), "token": self._token}
        hello |= {
            "client": self._name,
            "host": socket.gethostname()[:255],
            "pid": os.getpid(),
            "version": __version__,
        }
        self._reconnector = reconnector = Reconnector(
            self._addresses,
            hello,
            send_timeout_s=self._send_timeout_s,
            connect_timeout_s=self._connect_timeout_s,
            active_timeout_s=self._active_timeout_s,
            heartbeat_s=self._heartbeat_s,
            deliver=self._deliver,
            ended=self._ended,
            asked=self._checks.asked,
            greeted=self._greeted,
            tls=self._tls,
            open_to=self._open_to,
            route=self._route,
        )
        producer = Producer(reconnector, self._total_s, self._retries)
        self._producer: Producer | SpreadProducer = producer
        acks = Acks(reconnector, self._total_s)
        self._acks: Acks | SpreadAcks = acks
        self._calls = Calls(reconnector, self._total_s, self._retries)
        self._subscriptions = Subscriptions(
            reconnector, self._calls, acks, self._codec, self._know_shards
        )
        # In the order of their frames: acks first, they set credit free; then what calls ask.
        reconnector.sources += [acks, producer, self._calls, self._subscriptions]
        reconnector.sources.append(self._checks)
        self._connecting = reconnector.loop.create_task(self._connect(reconnector))
        self._connecting.add_done_callback(seen)

    async def _connect(self, reconnector: Reconnector) -> None:
        try:
            await reconnector.start()
        except BaseException as error:
            if self._state == "open":
                self._state = "new"
            told = (
                error if isinstance(error, TickwheelError) else ClientClosed("it did not connect")
            )
            await reconnector.stop(told)
            if self._shards is not None:
                await self._shards.close(0.0)
                self._shards = self._place = self._route = None
            raise

    # --- shards ---------------------------------------------------------------------------------

    def _greeted(self, limits: Limits) -> None:
        """Take what a daemon says of itself in HELLO. Raises ConnectionLost for one that is not
        the shard that this client has begun with."""
        self._checker.set_limits(limits)
        urls: Sequence[str] = self._reconnector.info.get("shards") or ("",)
        place = (self._reconnector.info.get("shard", 0), len(urls))
        if self._place is None and len(urls) > 1:
            self._spread(urls, place)
        elif self._place not in (None, place):
            raise ConnectionLost(
                "shard {} of {} answers here; this client has begun with shard {} of {}".format(
                    *place, *self._place
                )
            )
        self._place = place

    def _spread(self, urls: Iterable[str], place: tuple[int, int]) -> None:
        """Have a client for each shard, of which the one of this connection is itself; enqueues
        that wait go where they belong."""
        from tickwheel.client.shards import Place, Places, Shards  # for whoever has several

        places = Places(place[1], self._addresses, secure=self._tls is not None)
        places.learn(self._reconnector.info)
        self._place, self._route = place, Place(places, place[0])
        self._reconnector.follow(self._route)
        members = [
            copy(self)
            if shard == place[0]
            else self._sibling(url, (shard, place[1]), Place(places, shard))
            for shard, url in enumerate(urls)
        ]
        self._shards = shards = Shards(members, place[0], self._reconnector)
        assert isinstance(self._producer, Producer), "not spread yet"
        waiting = self._producer.withdraw()
        self._producer, self._acks = shards.producer, shards.acks
        shards.producer.take_over(waiting)
        shards.answer_checks()

    def _sibling(self, url: str, place: tuple[int, int], route: Route) -> Client:
        """A client of another shard alone, with the same options; ``url`` is "" while nobody serves
        that one. Raises ConnectionLost where it would speak with TLS and this one does not, or the
        other way round."""
        if url and is_secure(url) != (self._tls is not None):
            raise ConnectionLost(f"shard {place[0]} is at {url:.200}: all or none must have TLS")
        made = copy(self)
        made._route, made._place, made._state = route, place, "new"
        made._checks = Checks(made)
        made._checks.handlers = self._checks.handlers
        made._checks.under_way = self._checks.under_way
        return made

    async def _know_shards(self, until_s: float | None = None) -> Shards | None:
        self._ready()
        if self._place is None:
            now_s = self._reconnector.loop.time()
            time_s = self._total_s if until_s is None else max(until_s - now_s, 0.0)
            await asyncio.wait((self._connecting,), timeout=time_s)
            if not self._connecting.done() and not self._reconnector.info:
                raise self._reconnector.unreachable(round(time_s, 1))
        return self._shards

    # --- the end --------------------------------------------------------------------------------

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
            if self._shards is not None:
                await self._shards.close(0.0)
            self._connecting.cancel()
            await asyncio.wait((self._connecting,))
            await self._reconnector.stop(ClientClosed("the client was closed"))

    async def _finish(self) -> None:
        subscriptions = self._subscriptions.all()
        await asyncio.gather(*(s.close() for s in subscriptions), return_exceptions=True)
        await self._acks.wait_idle()
        await self._producer.wait_idle()
        if self._shards is not None:
            await self._shards.close(self._send_timeout_s)
        if self._reconnector.connection is not None and not self._reconnector.connection.leaving:
            with suppress(TickwheelError):
                await self._calls.call(FrameType.BYE, repeat=False)

    def _deliver(self, sub: int, epoch: int, delivered_ms: int, items: tuple[Any, ...]) -> None:
        self._subscriptions.deliver(sub, epoch, delivered_ms, items)

    def _ended(self, sub: int, error: TickwheelError) -> None:
        self._subscriptions.ended(sub, error)

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
        time_s = self._send_timeout_s if timeout is None else seconds(timeout, "timeout")
        reconnector = self._reconnector
        if self._place is None:
            await reconnector.wait_up(time_s)
        if self._shards is not None:
            reconnector = self._shards.home_of(checked[0])._reconnector
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
        if self._state != "open":
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
        return self._subscriptions.make(asked, prefetch)

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
        all of it, ``wait`` included; ``settings`` are as in ``subscribe``."""
        refuse_unknown(settings, GroupKeywords, "Client.pull")
        until_s = self._until(timeout)
        lease_ms, wait_ms = self._lease_ms(lease), duration_ms(wait, "wait")
        options: dict[str, Any] = {} if lease_ms is None else {"lease_ms": lease_ms}
        options |= GroupFields.of_keywords(settings)
        names = (self._checker.name(topic, "topic"), self._checker.name(group, "group"))
        shards = await self._know_shards(until_s)
        if shards is not None:
            return await shards.pull(names, max, wait_ms, options, until_s)
        return await self._pull(names, max, wait_ms, options, until_s)

    async def _pull(
        self,
        names: tuple[str, str],
        count: int,
        wait_ms: int,
        options: dict[str, Any],
        until_s: float | None,
        told: Callable[[MadeGroup], None] | None = None,
    ) -> list[Delivery]:
        """Up to ``count`` deliveries of the topic and group ``names``, of one shard; ``told``: of
        the group, where the pull has made it."""
        if told is not None:
            options = {**options, "tell": True}
        answer = await self._calls.call(
            FrameType.PULL,
            *names,
            count,
            wait_ms,
            options,
            extra_s=wait_ms / 1000,
            until_s=until_s,
            prompt=False,
            orphaned=lambda raw: self._subscriptions.give_back(*names, raw),
        )
        if told is not None and answer[3] is not None:
            told(MadeGroup.of(answer[3]))
        return read(lambda raw: self._subscriptions.pulled(*names, raw), answer)

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

    async def ping(self, *, timeout: Duration | None = None) -> float:
        """How long the daemon takes to answer, in seconds."""
        until_s = self._until(timeout)
        began_s = self._reconnector.loop.time()
        await self._calls.call(FrameType.PING, until_s=until_s)
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
        return self._state != "new" and self._reconnector.connection is not None
