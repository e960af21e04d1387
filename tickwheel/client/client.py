"""``Client``: the door to everything else in this package."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from tickwheel.client.acks import Acks
from tickwheel.client.addresses import DEFAULT_URL, parse_url
from tickwheel.client.commands import Commands
from tickwheel.client.delivery import Delivery
from tickwheel.client.enqueuing import Enqueuing
from tickwheel.client.groups import Groups
from tickwheel.client.producer import Producer
from tickwheel.client.reconnector import HEARTBEAT_S, Link
from tickwheel.client.requests import Calls
from tickwheel.client.results import read
from tickwheel.client.retry import Retry
from tickwheel.client.subscription import Subscription, Subscriptions, wish
from tickwheel.client.tasks import TaskChecker
from tickwheel.client.times import Duration, duration_ms, shown
from tickwheel.errors import BadRequest, ClientClosed, TickwheelError
from tickwheel.protocol.frames import SESSION_BYTES, FrameType
from tickwheel.version import __version__


class Client(Enqueuing, Commands, Groups):
    """A connection to a Tickwheel daemon that mends itself; every method may be used at once.

    ``url``: ``tcp://HOST:PORT``, several with commas (default: ``TICKWHEEL_URL``, else
    tcp://127.0.0.1:7355); the one that is active is found and followed. A call takes at most
    ``send_timeout * (1 + retries)`` seconds; refusals that may pass are retried ``retries``
    times. After ``heartbeat`` seconds without a byte from the daemon it is asked whether it is
    there, and after 2.5 times that given up. Errors are ``TickwheelError``s.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        send_timeout: float = 3.0,
        retries: int = 2,
        connect_timeout: float = 3.0,
        heartbeat: float = HEARTBEAT_S,
        name: str = f"tickwheel-python/{__version__}",
    ) -> None:
        self._addresses = parse_url(url or os.environ.get("TICKWHEEL_URL") or DEFAULT_URL)
        self._token = token if token is not None else os.environ.get("TICKWHEEL_TOKEN")
        self._send_timeout_s = _seconds(send_timeout, "send_timeout")
        self._connect_timeout_s = _seconds(connect_timeout, "connect_timeout")
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
        """Connect. Raises Unreachable or NotActive after ``connect_timeout``, or what the daemon
        objects to."""
        if self._state != "new":
            raise ClientClosed(f"this client is {self._state}; make a new one")
        self._state = "open"
        hello = {"session": os.urandom(SESSION_BYTES), "token": self._token, "client": self._name}
        self._link = link = Link(
            self._addresses,
            hello,
            send_timeout_s=self._send_timeout_s,
            connect_timeout_s=self._connect_timeout_s,
            heartbeat_s=self._heartbeat_s,
            deliver=self._deliver,
            ended=self._ended,
            greeted=self._checker.set_limits,
        )
        self._producer = Producer(link, self._total_s, self._retries)
        self._acks = Acks(link, self._total_s)
        self._calls = Calls(link, self._total_s, self._retries)
        self._subscriptions = Subscriptions(link, self._calls, self._acks)
        # In the order of their frames: acks first, they set credit free; then what calls ask.
        link.sources += [self._acks, self._producer, self._calls, self._subscriptions]
        try:
            await link.start()
        except BaseException:
            self._state = "closed"
            await link.stop(ClientClosed("the client did not connect"))
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
            await self._link.stop(ClientClosed("the client was closed"))

    async def _finish(self) -> None:
        subscriptions = self._subscriptions.all()
        await asyncio.gather(*(s.close() for s in subscriptions), return_exceptions=True)
        await self._acks.wait_idle()
        await self._producer.wait_idle()
        if self._link.connection is not None and not self._link.connection.leaving:
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
        asked = wish(
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
        lease_ms, limits = duration_ms(lease, "lease"), self._link.limits
        if not limits.lease_ms_min <= lease_ms <= limits.lease_ms_max:
            raise BadRequest(
                f"lease is {lease_ms} ms; the limits are {limits.lease_ms_min} (lease_ms_min)"
                f" and {limits.lease_ms_max} (lease_ms_max)"
            )
        return lease_ms


def _seconds(value: Any, field: str) -> float:
    if duration_ms(value, field) <= 0:
        raise BadRequest(f"{field} must be more than 0 s, not {shown(value)}")
    return float(value.total_seconds() if isinstance(value, timedelta) else value)
