"""SUBSCRIBE, PREFETCH, UNSUBSCRIBE and PULL: who gets deliveries."""

from __future__ import annotations

import asyncio
from typing import Any

from tickwheel.clock import Now
from tickwheel.errors import Conflict, Draining, LimitExceeded, NotFound
from tickwheel.protocol.codec import encode
from tickwheel.protocol.frames import FrameType
from tickwheel.server import checks
from tickwheel.server.connection import Connection
from tickwheel.server.shell import Shell
from tickwheel.wheel.groups import Group, Subscriber

SUBSCRIPTION_NUMBER_MAX = 2**32 - 1
LOADING_WAIT_S = 1.0
"""A pull whose tasks are being read waits for them this much longer."""
_DELIVER, _OK = int(FrameType.DELIVER), int(FrameType.OK)


class Subscription:
    """Owner of a subscriber that gets DELIVER frames."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection = connection
        self._number = number

    def deliver(self, epoch: int, now_ms: int, items: list[Any]) -> None:
        self._connection.send(encode((_DELIVER, self._number, epoch, now_ms, items)))

    def closed(self) -> None:
        """Nothing to stop."""


class Pull:
    """Owner of a subscriber that lives until its first delivery or its time is over."""

    def __init__(self, shell: Shell, connection: Connection, request: int) -> None:
        self._shell = shell
        self._connection = connection
        self._request = request
        self._timer: asyncio.TimerHandle | None = None
        self._patience = 1

    def start(self, subscriber: Subscriber, wait_ms: int) -> None:
        self._subscriber = subscriber
        self._later(wait_ms / 1000)

    def _later(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._over)

    def deliver(self, epoch: int, now_ms: int, items: list[Any]) -> None:
        self.closed()
        self._connection.send(encode((_OK, self._request, (epoch, now_ms, items))))

    def _over(self) -> None:
        self._timer = None
        group = self._subscriber.group
        if self._patience and (group.loading or group.ready_count):
            self._patience -= 1
            self._later(LOADING_WAIT_S)
            return
        self._shell.engine.delivery.unsubscribe(self._subscriber)
        self._connection.ok(self._request, (self._shell.epoch, self._shell.clock.read().now_ms, ()))

    def closed(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Consuming:
    """What consumers send to get tasks."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._core = shell.core
        self._limits = shell.limits
        self._lease_default_ms = int(shell.settings.lease_default_s * 1000)

    def subscribe(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        checks.arity(frame, 5, "sub, topic, group, prefetch, options")
        request, number, topic, group, prefetch, options = frame[1:]
        checks.request_number(request)
        checks.integer(number, "sub", 0, SUBSCRIPTION_NUMBER_MAX)
        checks.integer(prefetch, "prefetch", 0, self._limits.prefetch_max)
        lease_ms = self._lease_ms(options)
        if number in peer.subscribers:
            raise Conflict(f"sub {number} is in use on this connection")
        if len(peer.subscribers) >= self._limits.subscriptions_max:
            raise LimitExceeded(
                f"{len(peer.subscribers)} subscriptions are open on this connection; the"
                f" limit is {self._limits.subscriptions_max} (subscriptions_max)"
            )
        found = self._group(topic, group, now.now_ms)
        subscriber = Subscriber(Subscription(peer, number), found, prefetch, lease_ms)
        peer.subscribers[number] = subscriber
        self._shell.engine.delivery.subscribe(subscriber)
        peer.ok(request, {"lease_ms": lease_ms})

    def prefetch(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        checks.arity(frame, 2, "sub, prefetch")
        request = checks.request_number(frame[1])
        subscriber = self._subscriber(peer, frame[2])
        subscriber.prefetch = checks.integer(frame[3], "prefetch", 0, self._limits.prefetch_max)
        self._core.wake(subscriber.group)
        peer.ok(request, None)

    def unsubscribe(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        checks.arity(frame, 1, "sub")
        request = checks.request_number(frame[1])
        subscriber = self._subscriber(peer, frame[2])
        del peer.subscribers[frame[2]]
        self._shell.engine.delivery.unsubscribe(subscriber)
        peer.remember(subscriber)
        peer.ok(request, None)

    def pull(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        checks.arity(frame, 5, "topic, group, max, wait_ms, options")
        request, topic, group, count, wait_ms, options = frame[1:]
        checks.request_number(request)
        checks.integer(count, "max", 1, self._limits.pull_max)
        checks.integer(wait_ms, "wait_ms", 0, self._limits.lease_ms_max)
        lease_ms = self._lease_ms(options)
        known = self._core.find_group(checks.name(topic, "topic"), checks.group_name(group))
        found = known or self._group(topic, group, now.now_ms)
        pull = Pull(self._shell, peer, request)
        subscriber = Subscriber(pull, found, count, lease_ms, once=True)
        if known is not None:
            self._start(peer, pull, subscriber, wait_ms)
            return

        async def start_when_durable() -> None:
            # A delivery to a group that a crash forgets could not be acked after it.
            await self._shell.committer.barrier()
            if peer.open:
                self._start(peer, pull, subscriber, wait_ms)

        self._shell.spawn(start_when_durable())

    def _start(self, peer: Connection, pull: Pull, subscriber: Subscriber, wait_ms: int) -> None:
        self._shell.engine.delivery.subscribe(subscriber)
        peer.remember(subscriber)
        self._shell.poke()
        pull.start(subscriber, wait_ms)

    def _subscriber(self, peer: Connection, number: object) -> Subscriber:
        checks.integer(number, "sub", 0, SUBSCRIPTION_NUMBER_MAX)
        subscriber = peer.subscribers.get(number)  # type: ignore[call-overload]  # an int, checked
        if subscriber is None:
            raise NotFound(f"sub {number} is not subscribed on this connection")
        return subscriber  # type: ignore[no-any-return]  # follows from the line above

    def _lease_ms(self, options: object) -> int:
        found = checks.options(options, ("lease_ms",))
        lease_ms = found.get("lease_ms")
        if lease_ms is None:
            return self._lease_default_ms
        limits = self._limits
        return checks.integer(lease_ms, "lease_ms", limits.lease_ms_min, limits.lease_ms_max)

    def _group(self, topic: object, group: object, now_ms: int) -> Group:
        """The group by its names, made if there is room for another."""
        topic_name = checks.name(topic, "topic")
        group_name = checks.group_name(group)
        if self._shell.draining:
            raise Draining("the daemon is shutting down")
        core, config = self._core, self._core.config
        known = core.topics.get(topic_name)
        if known is None and len(core.topics) >= config.topics_max:
            raise LimitExceeded(
                f"topic {topic_name} is new and there are {len(core.topics)} topics;"
                f" the limit is {config.topics_max} (topics_max)"
            )
        if known is not None and group_name not in known.groups:
            if len(known.groups) >= config.groups_per_topic_max:
                raise LimitExceeded(
                    f"group {group_name} is new and topic {topic_name} has"
                    f" {len(known.groups)} groups; the limit is"
                    f" {config.groups_per_topic_max} (groups_per_topic_max)"
                )
        return core.group(core.topic(topic_name), group_name, now_ms)
