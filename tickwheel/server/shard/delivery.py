"""Operations of consumers: subscriptions, broadcasts and pulls."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.api.groups import SET_OTHERWISE, TO_CHANGE, GroupFields
from tickwheel.api.policies import Retry
from tickwheel.engine.firing import Broadcaster
from tickwheel.engine.topics import NOTHING_SET, DeliverySink, Subscriber
from tickwheel.errors import (
    BadRequest,
    Conflict,
    Draining,
    LimitExceeded,
    NotFound,
    Overloaded,
    TickwheelError,
    shown,
)
from tickwheel.model.policies import duration_ms
from tickwheel.model.records import LINE_SETTINGS, GroupSettings
from tickwheel.server import checks
from tickwheel.server.shard.groups import OF_GROUPS, check_filter_room, find_room, make_group
from tickwheel.server.shard.targets import check_no_target
from tickwheel.server.shard.views import effective_order_settings, policy_map

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.engine.topics import Group, Item, Topic
    from tickwheel.limits import Limits
    from tickwheel.model.filters import Filter
    from tickwheel.model.policies import PolicyRef, RetryPolicy
    from tickwheel.server.shard.callers import Caller
    from tickwheel.server.shard.parts import Parts

SUBSCRIPTION_NUMBER_MAX = 2**32 - 1
LOADING_WAIT_S = 1.0
"""How much longer a pull waits for tasks that are being read, in seconds."""
IDLE_NAMED_MAX = 10
"""Maximum number of idle groups that the answer to creating a group names."""
OnCreated = Callable[["dict[str, Any] | None"], None]
"""Receives the description (``api.groups.MadeGroup``) of a group that was created, or None."""
_ACKS = ("manual", "on_delivery")


class Consuming:
    """The operations by which consumers receive tasks."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._core = parts.core
        self._limits = parts.limits
        self._lease_default_ms = duration_ms(parts.settings.lease_default_s)

    def subscribe(
        self,
        caller: Caller,
        request: int,
        number: int,
        topic: object,
        group: object,
        prefetch: int,
        options: dict[str, Any],
        sink: DeliverySink,
        now: Now,
    ) -> None:
        """Subscribe ``sink`` to a topic, with at most ``prefetch`` deliveries in flight. ``number``
        is chosen by the caller and identifies the subscription. ``options`` are ``lease_ms``,
        ``retry``, ``ack`` (manual or on_delivery), ``broadcast``, and the settings of
        ``RequestedSettings``. The answer contains the lease. Raise BadRequest, Conflict,
        LimitExceeded, Overloaded, Refused, Draining."""
        checks.integer(number, "sub", 0, SUBSCRIPTION_NUMBER_MAX)
        checks.integer(prefetch, "prefetch", 0, self._limits.prefetch_max)
        if caller.quota is not None:
            caller.quota.check_subscription()
        if number in caller.subscribers:
            raise Conflict(f"sub {number} is in use on this connection")
        count, subject = len(caller.subscribers), "subscriptions are open on this connection"
        checks.check_limit(LimitExceeded, count, subject, self._limits, "subscriptions_max")
        self._check_room()
        subscription_sink = _Subscription(caller, number, sink)
        if options.get("broadcast", False) is not False:
            subscriber = self._broadcaster(
                caller, subscription_sink, topic, group, prefetch, options
            )
        else:
            subscriber = self._member(
                caller, subscription_sink, topic, group, prefetch, options, now
            )
        subscriber.presence = caller.presence
        caller.subscribers[number] = subscriber
        subscriber.blocked = caller.is_blocked
        self._parts.border.act().subscriptions.subscribe(subscriber)
        answer = {"lease_ms": subscriber.lease_ms, **subscription_sink.answer_fields}
        self._parts.committer.reply(caller.replies, request, answer)

    def _member(
        self,
        caller: Caller,
        sink: _Subscription,
        topic: object,
        group: object,
        prefetch: int,
        options: dict[str, Any],
        now: Now,
    ) -> Subscriber:
        """Return a new subscriber of a group."""
        check_no_target(self._parts, caller, topic, group)
        lease_ms = self._lease_ms(options)
        ack = options.get("ack", "manual")
        if ack not in _ACKS:
            checks.wrong("ack", " or ".join(_ACKS), ack)
        retry = options.get("retry")
        wanted = RequestedSettings.of(options, self._limits)
        if retry is not None:
            retry = checks.policy(retry, "retry", self._core.policies)
            checks.storable_settings(NOTHING_SET._replace(retry=retry))
            wanted = wanted._replace(retry=retry)
        member_of, created = self._group(topic, group, wanted, now)
        if created is not None:
            sink.answer_fields = {"new_group": created}
        if retry is not None and member_of.settings.retry is None:
            after = member_of.settings._replace(retry=retry)
            self._parts.border.act().grouping.set(member_of, after, now.mono_ms)
        at_most_once = ack == "on_delivery"
        return Subscriber(
            sink,
            member_of,
            prefetch,
            lease_ms,
            at_most_once=at_most_once,
            acks_ahead_max=self._parts.core.config.acks_ahead_max,
            label=caller.label,
        )

    def _broadcaster(
        self,
        caller: Caller,
        sink: DeliverySink,
        topic: object,
        group: object,
        prefetch: int,
        options: dict[str, Any],
    ) -> Subscriber:
        """Return a new broadcast subscriber, which is owed no tasks."""
        if options["broadcast"] is not True:
            checks.wrong("broadcast", "true or false", options["broadcast"])
        others = [name for name in ("retry", "ack") if options.get(name) not in (None, "manual")]
        others += [name for name in LINE_SETTINGS if options.get(name) is not None]
        if group not in (None, "") or others:
            fields = ", ".join(["group"] * (group not in (None, "")) + others)
            raise BadRequest(f"a broadcast subscription cannot have {fields}")
        wanted = checks.consumer_filter(_group_fields(options, self._limits))
        self._check_draining()
        found_topic, _ = find_room(self._parts, checks.name(topic, "topic"), None)
        if wanted is not None:
            check_filter_room(self._core, found_topic, wanted)
        return Broadcaster(sink, found_topic, prefetch, caller.label, wanted)

    def set_prefetch(
        self, caller: Caller, request: int, number: object, prefetch: int, *, tell: bool = False
    ) -> None:
        """Set the maximum number of deliveries in flight of a subscription. Raise NotFound,
        BadRequest. The answer is None, or, with ``tell``, the number of its deliveries in flight
        and of tasks that its group could deliver now (``ready``)."""
        subscriber = self._subscriber(caller, number)
        subscriber.prefetch = checks.integer(prefetch, "prefetch", 0, self._limits.prefetch_max)
        self._core.reconsider(subscriber)
        self._parts.wake()
        answer: dict[str, int] | None = None
        if tell:
            group = subscriber.group
            ready = group.ready_count - group.awaiting_turn
            answer = {"in_flight": subscriber.in_flight, "ready": ready}
        self._parts.committer.reply(caller.replies, request, answer)

    def unsubscribe(self, caller: Caller, request: int, number: object) -> None:
        """End a subscription. Its deliveries in flight can still be settled. Raise NotFound."""
        subscriber = self._subscriber(caller, number)
        del caller.subscribers[checks.integer(number, "sub", 0, SUBSCRIPTION_NUMBER_MAX)]
        self._parts.border.act().subscriptions.unsubscribe(subscriber)
        caller.remember(subscriber)
        self._parts.committer.reply(caller.replies, request, None)

    def pull(
        self,
        caller: Caller,
        request: int,
        topic: object,
        group: object,
        count: int,
        wait_ms: int,
        options: dict[str, Any],
        sink: DeliverySink,
        now: Now,
        tell: OnCreated | None = None,
    ) -> None:
        """Deliver up to ``count`` tasks to ``sink`` once, as soon as a task is ready. If there is
        no delivery within ``wait_ms``, the answer is ``(epoch, now_ms, ())``. ``options`` are
        ``lease_ms``, the settings of ``RequestedSettings``, and ``untied``: whether the leases
        outlive the caller, because it pulls for somebody else. ``tell``, if set, is called first,
        with the description of the group if the pull has created it, otherwise with None; the
        answer then ends with the same value. Raise BadRequest, Conflict, LimitExceeded, Overloaded,
        Refused, Draining."""
        checks.integer(count, "max", 1, self._limits.pull_max)
        checks.integer(wait_ms, "wait_ms", 0, self._limits.lease_ms_max)
        lease, wanted = self._lease_ms(options), RequestedSettings.of(options, self._limits)
        if caller.quota is not None:
            caller.quota.check_subscription()
        subject = "pulls wait on this connection"
        checks.check_limit(Overloaded, len(caller.pulls), subject, self._limits, "pulls_max")
        self._check_room()
        check_no_target(self._parts, caller, topic, group)
        existing = self._core.find_group(checks.name(topic, "topic"), checks.group_name(group))
        if existing is not None and existing.is_closed:
            existing = None
        source, created = (existing, None) if existing else self._group(topic, group, wanted, now)
        wanted.check(source, self._core.policies)
        is_tied = not options.get("untied", False)
        pull = _Pull(self._parts, caller, request, source, count, lease, sink, is_tied=is_tied)
        if tell is not None:
            tell(created)
            pull.answer_end = (created,)
        pull.subscriber.asked_mono_ms = now.mono_ms
        if existing is not None:
            pull.start(wait_ms)
            return

        async def start_when_durable() -> None:
            # If a crash lost the new group, deliveries from it could not be acked.
            await self._parts.committer.barrier()
            if not caller.is_open:
                return
            try:
                if source.is_closed:
                    raise NotFound(f"group {source.name} of topic {topic} was deleted")
                self._check_room()
            except TickwheelError as error:
                pull.refuse(error.code, error.message)
            else:
                pull.start(wait_ms)

        self._parts.spawn(start_when_durable())

    def _check_room(self) -> None:
        core, subject = self._core, "subscriptions and pulls are open"
        checks.check_limit(Overloaded, core.subscribers, subject, core.config, "subscribers_max")

    @staticmethod
    def _subscriber(caller: Caller, number: object) -> Subscriber:
        checked = checks.integer(number, "sub", 0, SUBSCRIPTION_NUMBER_MAX)
        subscriber = caller.subscribers.get(checked)
        if subscriber is None:
            raise NotFound(f"this connection has no subscription {checked} (sub)")
        return subscriber

    def _lease_ms(self, options: dict[str, Any]) -> int:
        lease_ms = options.get("lease_ms")
        return self._lease_default_ms if lease_ms is None else checks.lease(lease_ms, self._limits)

    def _group(
        self, topic: object, group: object, wanted: RequestedSettings, now: Now
    ) -> tuple[Group, dict[str, Any] | None]:
        """Return (the group, created if necessary; the description of a new group or None). Raise
        Conflict if an existing group has different settings."""
        topic_name = checks.name(topic, "topic")
        group_name = checks.group_name(group)
        self._check_draining()
        in_topic, existing = find_room(self._parts, topic_name, group_name)
        if existing is not None:
            wanted.check(existing, self._core.policies)
            return existing, None
        settings = wanted.settings
        if wanted.filter is not None:
            check_filter_room(self._core, in_topic, wanted.filter)
        description = _describe_new(in_topic, self._core.targets)
        grouping = self._parts.border.act().grouping
        return make_group(grouping, in_topic, group_name, None, now, settings), description

    def _check_draining(self) -> None:
        if self._parts.draining:
            raise Draining("the daemon is shutting down")


def _describe_new(topic: Topic, targets: Container[tuple[str, str]]) -> dict[str, Any]:
    """Describe a group that is about to be created (``api.groups.MadeGroup``). Groups with targets
    never count as idle."""
    backlog, idle = topic.default_backlog, {}
    for group in topic.live_groups:
        is_used = group.subscribers or group.acked or group.nacked or group.snoozed or group.dead
        has_target = (topic.name, group.name) in targets
        if group.holds_any and not is_used and not has_target:
            idle[group.name] = group.ready_count + len(group.flight) + len(group.waiting)
            if len(idle) >= IDLE_NAMED_MAX:
                break
    return {"adopted": 0 if backlog is None else backlog.ready_count, "idle": idle}


class RequestedSettings(NamedTuple):
    """The settings that a consumer requests for its group. An existing group must have them."""

    filter: Filter | None
    """The filter of ``tags`` and ``where``; None if the consumer requests none."""
    lines: dict[str, Any]
    """The settings among ``LINE_SETTINGS`` that the consumer requests."""
    retry: PolicyRef | None = None
    """The retry policy that the consumer requests; a group without a policy gets it."""

    @classmethod
    def of(cls, options: dict[str, Any], limits: Limits) -> RequestedSettings:
        """Return the settings in the options. Raise BadRequest, LimitExceeded."""
        fields = _group_fields(options, limits)
        if not fields:
            return _ANY
        wanted = cls(checks.consumer_filter(fields), checks.consumer_line_settings(fields))
        checks.storable_settings(wanted.settings)
        return wanted

    @property
    def settings(self) -> GroupSettings:
        """The settings of a group that is created for the consumer."""
        settings = checks.with_line_settings(self.lines, NOTHING_SET)
        if self.filter is None:
            return settings
        return settings._replace(tags=self.filter.tags, where=self.filter.where)

    def check(self, group: Group, policies: Mapping[str, RetryPolicy]) -> None:
        """Raise Conflict if the group has different settings. The error names the differences and
        the commands that change the group."""
        settings = group.settings
        differs: list[str] = []
        options: list[str] = []
        commands: list[str] = []
        if self.filter is not None:
            own = checks.filter_of(settings.tags, settings.where)
            if own != self.filter:
                differs.append(f"the filter {own}, not {self.filter}")
                options += _filter_options(own, self.filter)
        lines = effective_order_settings(settings) if self.lines else self.lines
        for name, wanted in self.lines.items():
            if lines[name] != wanted:
                differs.append(f"{name} {shown(lines[name])}, not {shown(wanted)}")
                options += _line_option(name, wanted)
        names = shlex.join((group.topic.name, group.name))
        if options:
            commands.append(f"tickwheel groups set {names} {shlex.join(options)}")
        if self.retry is not None and settings.retry is not None:
            other = _policy_differs(settings.retry, self.retry, policies)
            differs += other
            if other:
                topic, name = map(shlex.quote, (group.topic.name, group.name))
                spec = shlex.quote(_retry(self.retry).spec())
                commands.append(f"tickwheel policy set {topic} {spec} --group {name}")
        if differs:
            raise Conflict(
                f"group {group.name} of topic {group.topic.name}{SET_OTHERWISE}"
                f"{'; '.join(differs)}{TO_CHANGE}{' && '.join(commands)}"
            )


_ANY = RequestedSettings(None, {})


def _group_fields(options: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """Check and return the options that are group settings. Raise BadRequest, LimitExceeded."""
    fields = {name: options[name] for name in OF_GROUPS if options.get(name) is not None}
    return GroupFields.checked(fields, limits).values() if fields else fields


class _Subscription:
    """The sink of a subscription. It removes the subscription if the shard ends it."""

    def __init__(self, caller: Caller, number: int, sink: DeliverySink) -> None:
        self._caller = caller
        self._number = number
        self._sink = sink
        self.answer_fields: dict[str, Any] = {}
        """Additional fields of the answer."""
        self.deliver = sink.deliver
        self.check = sink.check
        self.closed = sink.closed

    def ended(self, code: str, message: str) -> None:
        self._caller.subscribers.pop(self._number, None)
        self._sink.ended(code, message)


class _Pull:
    """A subscriber that ends with its first delivery or when its waiting time is over."""

    def __init__(
        self,
        parts: Parts,
        caller: Caller,
        request: int,
        group: Group,
        count: int,
        lease_ms: int,
        sink: DeliverySink,
        *,
        is_tied: bool,
    ) -> None:
        """``is_tied``: whether the consumer is gone when the caller is."""
        self._parts = parts
        self._caller = caller
        self._request = request
        self._sink = sink
        self._timer: asyncio.TimerHandle | None = None
        self._extensions_left = 1
        self.answer_end: tuple[dict[str, Any] | None, ...] = ()
        """Additional elements of an answer without deliveries."""
        self._is_tied = is_tied
        self.check = sink.check
        self.subscriber = Subscriber(self, group, count, lease_ms, once=True, label=caller.label)
        if is_tied:
            self.subscriber.presence = caller.presence
        # Count the pull as waiting from now on.
        caller.pulls[self.subscriber] = None

    def start(self, wait_ms: int) -> None:
        """Wait for deliveries for ``wait_ms``."""
        self.subscriber.blocked = self._caller.is_blocked
        self._parts.border.act().subscriptions.subscribe(self.subscriber)
        self._parts.wake()
        self._start_timer(wait_ms / 1000)

    def _start_timer(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._timed_out)

    def deliver(self, epoch: int, now_ms: int, items: Sequence[Item]) -> None:
        self._leave()
        if self._is_tied:
            self._caller.remember(self.subscriber)
        self._sink.deliver(epoch, now_ms, items)

    def _timed_out(self) -> None:
        self._timer = None
        parts, group = self._parts, self.subscriber.group
        is_blocked = group.is_held or group in parts.core.throttled
        is_loading = group.loading or group.ready_count > group.awaiting_turn
        if self._extensions_left and is_loading and not is_blocked:
            self._extensions_left -= 1
            self._start_timer(LOADING_WAIT_S)
            return
        parts.engine.subscriptions.unsubscribe(self.subscriber)
        self._leave()
        nothing = (parts.epoch, parts.clock.read().now_ms, (), *self.answer_end)
        parts.committer.reply(self._caller.replies, self._request, nothing)

    def ended(self, code: str, message: str) -> None:
        """Refuse the pull because its group was deleted."""
        self.refuse(code, message)

    def refuse(self, code: str, message: str) -> None:
        self._leave()
        self._caller.replies.error(self._request, code, message)
        self._caller.replies.flush()

    def _leave(self) -> None:
        """Forget the pull after its answer."""
        self.closed()
        self._caller.pulls.pop(self.subscriber, None)

    def closed(self) -> None:
        # Break the reference cycle, because it would keep a closed connection in memory.
        self.subscriber.sink = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _filter_options(own: Filter, wanted: Filter) -> list[str]:
    """Return the options of ``tickwheel groups set`` that change the filter ``own`` into
    ``wanted``."""
    if wanted == checks.NO_FILTER:
        return ["--all"]
    options = []
    for name in ("tags", "where"):
        text = getattr(wanted, name)
        if text is not None:
            options += [f"--{name}", text]
        elif getattr(own, name) is not None:
            options.append(f"--no-{name}")
    return options


def _line_option(name: str, value: Any) -> list[str]:
    """Return the option of ``tickwheel groups set`` that sets this setting."""
    bare = name.removesuffix("_ms")
    return [f"--{bare.replace('_', '-')}", f"{value}{'ms' * (bare != name)}"]


def _policy_differs(
    own: PolicyRef, wanted: PolicyRef, policies: Mapping[str, RetryPolicy]
) -> list[str]:
    """Describe the fields in which two policies differ, or both policies if their kinds differ."""
    own_fields = policy_map(own, policies) or {}
    wanted_fields = policy_map(wanted, policies) or {}
    if own_fields.get("kind") != wanted_fields.get("kind"):
        return [f"retry {_retry(own).spec()}, not {_retry(wanted).spec()}"]
    return [
        f"retry.{name} {shown(own_fields.get(name))}, not {shown(wanted_fields.get(name))}"
        for name in dict.fromkeys((*own_fields, *wanted_fields))
        if own_fields.get(name) != wanted_fields.get(name)
    ]


def _retry(ref: PolicyRef) -> Retry:
    return Retry.of(ref if isinstance(ref, str) else ref.to_map())
