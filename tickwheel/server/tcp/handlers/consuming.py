"""SUBSCRIBE, PREFETCH, UNSUBSCRIBE and PULL: who gets deliveries."""

from __future__ import annotations

import asyncio
from typing import Any

from tickwheel.clock import Now
from tickwheel.engine.delivery import Broadcaster
from tickwheel.engine.topics import Group, Subscriber
from tickwheel.errors import (
    BadRequest,
    Conflict,
    Draining,
    LimitExceeded,
    NotFound,
    Overloaded,
    TickwheelError,
)
from tickwheel.protocol.codec import encode
from tickwheel.protocol.frames import FrameType
from tickwheel.server import policies
from tickwheel.server.shard.shard import Shell
from tickwheel.server.tcp import decode as checks
from tickwheel.server.tcp.connection import Connection
from tickwheel.server.tcp.handlers.grouping import find_room

SUBSCRIPTION_NUMBER_MAX = 2**32 - 1
LOADING_WAIT_S = 1.0
"""A pull whose tasks are being read waits for them this much longer."""
_DELIVER, _OK, _ENDED = int(FrameType.DELIVER), int(FrameType.OK), int(FrameType.ENDED)
_OPTIONS = ("lease_ms", "retry", "ack", "broadcast")
_ACKS = ("manual", "on_delivery")


class Subscription:
    """Owner of a subscriber that gets DELIVER frames."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection = connection
        self._number = number
        self.label = label(connection)

    def deliver(self, epoch: int, now_ms: int, items: list[Any]) -> None:
        self._connection.send(encode((_DELIVER, self._number, epoch, now_ms, items)))

    def cut(self, code: str, message: str) -> None:
        """The engine ended it."""
        self._connection.subscribers.pop(self._number, None)
        self._connection.send(encode((_ENDED, self._number, code, message)))

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

    def accept(self, subscriber: Subscriber) -> None:
        """From now on it counts as one that waits."""
        self._subscriber = subscriber
        self._connection.pulls[subscriber] = None

    def start(self, wait_ms: int) -> None:
        self._later(wait_ms / 1000)

    def _later(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._over)

    def deliver(self, epoch: int, now_ms: int, items: list[Any]) -> None:
        self._leave()
        self._connection.remember(self._subscriber)
        self._connection.send(encode((_OK, self._request, (epoch, now_ms, items))))

    def _over(self) -> None:
        self._timer = None
        group = self._subscriber.group
        waits = group.is_held or group in self._shell.core.throttled
        if self._patience and (group.loading or group.ready_count) and not waits:
            self._patience -= 1
            self._later(LOADING_WAIT_S)
            return
        self._shell.engine.delivery.unsubscribe(self._subscriber)
        self._leave()
        self._connection.ok(self._request, (self._shell.epoch, self._shell.clock.read().now_ms, ()))

    def cut(self, code: str, message: str) -> None:
        """The engine ended it: its group was deleted."""
        self.refuse(NotFound(message))

    def refuse(self, error: TickwheelError) -> None:
        self._leave()
        self._connection.refuse(self._request, error)

    def _leave(self) -> None:
        """It is answered."""
        self.closed()
        self._connection.pulls.pop(self._subscriber, None)

    def closed(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def label(connection: Connection) -> str:
    """Who a failed attempt is put down to."""
    return f"{connection.name} {connection.peer}".strip()


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
        if number in peer.subscribers:
            raise Conflict(f"sub {number} is in use on this connection")
        if len(peer.subscribers) >= self._limits.subscriptions_max:
            raise LimitExceeded(
                f"{len(peer.subscribers)} subscriptions are open on this connection; the"
                f" limit is {self._limits.subscriptions_max} (subscriptions_max)"
            )
        self._check_room()
        wanted = checks.options(options, _OPTIONS)
        owner = Subscription(peer, number)
        if wanted.get("broadcast", False) is not False:
            subscriber = self._broadcaster(owner, topic, group, prefetch, wanted)
        else:
            subscriber = self._member(owner, topic, group, prefetch, wanted, now)
        subscriber.presence = peer.presence
        peer.subscribers[number] = subscriber
        subscriber.blocked = peer.paused
        self._shell.act().delivery.subscribe(subscriber)
        peer.ok(request, {"lease_ms": subscriber.lease_ms})

    def _member(
        self,
        owner: Subscription,
        topic: object,
        group: object,
        prefetch: int,
        wanted: dict[str, Any],
        now: Now,
    ) -> Subscriber:
        """A subscriber of a group."""
        lease_ms = self._lease_ms(wanted)
        ack = wanted.get("ack", "manual")
        if ack not in _ACKS:
            checks.wrong("ack", " or ".join(_ACKS), ack)
        retry, known = wanted.get("retry"), self._core.policies
        if retry is not None:
            retry = policies.policy(retry, "retry", known)
        found = self._group(topic, group, now.now_ms)
        if retry is not None:
            own = found.settings.retry
            if own is None:
                after = found.settings._replace(retry=retry)
                self._shell.act().grouping.set(found, after, now.mono_ms)
            elif not policies.equal(own, retry, known):
                raise Conflict(
                    f"group {found.name} of topic {found.topic.name} has the retry policy"
                    f" {policies.told(own)}, not {policies.told(retry)}; CONFIGURE changes it"
                )
        at_most_once = ack == "on_delivery"
        return Subscriber(
            owner, found, prefetch, lease_ms, at_most_once=at_most_once, label=owner.label
        )

    def _broadcaster(
        self,
        owner: Subscription,
        topic: object,
        group: object,
        prefetch: int,
        wanted: dict[str, Any],
    ) -> Subscriber:
        """A subscriber that owns nothing."""
        if wanted["broadcast"] is not True:
            checks.wrong("broadcast", "true or false", wanted["broadcast"])
        others = [name for name in ("retry", "ack") if wanted.get(name) not in (None, "manual")]
        if group not in (None, "") or others:
            found = ", ".join(["group"] * (group not in (None, "")) + others)
            raise BadRequest(
                f"a broadcast has no acks, no retries and no group, but {found} is given"
            )
        self._check_draining()
        found_topic, _ = find_room(self._shell, checks.name(topic, "topic"), None)
        return Broadcaster(owner, found_topic, prefetch, owner.label)

    def prefetch(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        checks.arity(frame, 2, "sub, prefetch")
        request = checks.request_number(frame[1])
        subscriber = self._subscriber(peer, frame[2])
        subscriber.prefetch = checks.integer(frame[3], "prefetch", 0, self._limits.prefetch_max)
        self._core.regained(subscriber)
        self._shell.poke()
        peer.ok(request, None)

    def unsubscribe(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        checks.arity(frame, 1, "sub")
        request = checks.request_number(frame[1])
        subscriber = self._subscriber(peer, frame[2])
        del peer.subscribers[frame[2]]
        self._shell.act().delivery.unsubscribe(subscriber)
        peer.remember(subscriber)
        peer.ok(request, None)

    def pull(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        checks.arity(frame, 5, "topic, group, max, wait_ms, options")
        request, topic, group, count, wait_ms, options = frame[1:]
        checks.request_number(request)
        checks.integer(count, "max", 1, self._limits.pull_max)
        checks.integer(wait_ms, "wait_ms", 0, self._limits.lease_ms_max)
        lease_ms = self._lease_ms(checks.options(options, ("lease_ms",)))
        if len(peer.pulls) >= self._limits.pulls_max:
            raise Overloaded(
                f"{len(peer.pulls)} PULLs wait on this connection; the limit is"
                f" {self._limits.pulls_max} (pulls_max)"
            )
        self._check_room()
        known = self._core.find_group(checks.name(topic, "topic"), checks.group_name(group))
        if known is not None and known.is_closed:
            known = None
        found = known or self._group(topic, group, now.now_ms)
        pull = Pull(self._shell, peer, request)
        subscriber = Subscriber(pull, found, count, lease_ms, once=True, label=label(peer))
        subscriber.presence, subscriber.asked_mono_ms = peer.presence, now.mono_ms
        pull.accept(subscriber)
        if known is not None:
            self._start(peer, pull, subscriber, wait_ms)
            return

        async def start_when_durable() -> None:
            # A delivery to a group that a crash forgets could not be acked after it.
            await self._shell.committer.barrier()
            if not peer.open:
                return
            try:
                if found.is_closed:
                    raise NotFound(f"group {found.name} of topic {topic} was deleted")
                self._check_room()
            except TickwheelError as error:
                pull.refuse(error)
            else:
                self._start(peer, pull, subscriber, wait_ms)

        self._shell.spawn(start_when_durable())

    def _start(self, peer: Connection, pull: Pull, subscriber: Subscriber, wait_ms: int) -> None:
        subscriber.blocked = peer.paused
        self._shell.act().delivery.subscribe(subscriber)
        self._shell.poke()
        pull.start(wait_ms)

    def _check_room(self) -> None:
        core = self._core
        if core.subscribers >= core.config.subscribers_max:
            raise Overloaded(
                f"{core.subscribers} subscriptions and PULLs are open; the limit is"
                f" {core.config.subscribers_max} (subscribers_max)"
            )

    def _subscriber(self, peer: Connection, number: object) -> Subscriber:
        checks.integer(number, "sub", 0, SUBSCRIPTION_NUMBER_MAX)
        subscriber = peer.subscribers.get(number)  # type: ignore[call-overload]  # an int, checked
        if subscriber is None:
            raise NotFound(f"sub {number} is not subscribed on this connection")
        return subscriber  # type: ignore[no-any-return]  # follows from the line above

    def _lease_ms(self, options: dict[str, Any]) -> int:
        lease_ms = options.get("lease_ms")
        if lease_ms is None:
            return self._lease_default_ms
        limits = self._limits
        return checks.integer(lease_ms, "lease_ms", limits.lease_ms_min, limits.lease_ms_max)

    def _group(self, topic: object, group: object, now_ms: int) -> Group:
        """The group by its names, made if there is room for another."""
        topic_name = checks.name(topic, "topic")
        group_name = checks.group_name(group)
        self._check_draining()
        found, known = find_room(self._shell, topic_name, group_name)
        return known or self._shell.act().grouping.create(found, group_name, now_ms)

    def _check_draining(self) -> None:
        if self._shell.draining:
            raise Draining("the daemon is shutting down")
