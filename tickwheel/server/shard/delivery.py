"""Subscriptions and pulls: who gets deliveries."""

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
from tickwheel.model.records import LINE_SETTINGS, GroupSettings
from tickwheel.server import checks
from tickwheel.server.shard.groups import OF_GROUPS, check_filter_room, find_room
from tickwheel.server.shard.targets import check_no_target
from tickwheel.server.shard.views import applied_lines, policy_map

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
"""How much longer, in seconds, a pull waits for tasks that are being read."""
IDLE_TOLD_MAX = 10
"""How many idle groups are named at most where a new one is made."""
Tell = Callable[["dict[str, Any] | None"], None]
"""Is told whether a group was made, and what there is to say of it."""
_ACKS = ("manual", "on_delivery")


class Consuming:
    """The operations by which consumers get tasks."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._core = parts.core
        self._limits = parts.limits
        self._lease_default_ms = int(parts.settings.lease_default_s * 1000)

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
        """Deliveries of a topic go to ``sink`` from now on, ``prefetch`` of them at a time.

        ``number`` is the caller's name for the subscription. ``options``: ``lease_ms``, ``retry``,
        ``ack`` (manual or on_delivery), ``broadcast``, and what ``Wanted`` says of the group. The
        answer has the lease that is given. Raises BadRequest, Conflict, LimitExceeded, Overloaded,
        Refused, Draining.
        """
        checks.integer(number, "sub", 0, SUBSCRIPTION_NUMBER_MAX)
        checks.integer(prefetch, "prefetch", 0, self._limits.prefetch_max)
        if caller.quota is not None:
            caller.quota.check_subscription()
        if number in caller.subscribers:
            raise Conflict(f"sub {number} is in use on this connection")
        said = "subscriptions are open on this connection"
        checks.room(LimitExceeded, len(caller.subscribers), said, self._limits, "subscriptions_max")
        self._check_room()
        owned = _Subscription(caller, number, sink)
        if options.get("broadcast", False) is not False:
            subscriber = self._broadcaster(caller, owned, topic, group, prefetch, options)
        else:
            subscriber = self._member(caller, owned, topic, group, prefetch, options, now)
        subscriber.presence = caller.presence
        caller.subscribers[number] = subscriber
        subscriber.blocked = caller.is_blocked
        self._parts.border.act().subscriptions.subscribe(subscriber)
        answer = {"lease_ms": subscriber.lease_ms, **owned.told}
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
        """A new subscriber of a group."""
        check_no_target(self._parts, caller, topic, group)
        lease_ms = self._lease_ms(options)
        ack = options.get("ack", "manual")
        if ack not in _ACKS:
            checks.wrong("ack", " or ".join(_ACKS), ack)
        retry = options.get("retry")
        wanted = Wanted.of(options, self._limits)
        if retry is not None:
            retry = checks.policy(retry, "retry", self._core.policies)
            checks.storable_settings(NOTHING_SET._replace(retry=retry))
            wanted = wanted._replace(retry=retry)
        found, made = self._group(topic, group, wanted, now)
        if made is not None:
            sink.told = {"new_group": made}
        if retry is not None and found.settings.retry is None:
            after = found.settings._replace(retry=retry)
            self._parts.border.act().grouping.set(found, after, now.mono_ms)
        at_most_once = ack == "on_delivery"
        return Subscriber(
            sink,
            found,
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
        """A new broadcast subscriber, which owns no tasks."""
        if options["broadcast"] is not True:
            checks.wrong("broadcast", "true or false", options["broadcast"])
        others = [name for name in ("retry", "ack") if options.get(name) not in (None, "manual")]
        others += [name for name in LINE_SETTINGS if options.get(name) is not None]
        if group not in (None, "") or others:
            found = ", ".join(["group"] * (group not in (None, "")) + others)
            raise BadRequest(
                f"a broadcast has no acks, no retries and no group, but {found} is given"
            )
        wanted = checks.asked_filter(_said(options, self._limits))
        self._check_draining()
        found_topic, _ = find_room(self._parts, checks.name(topic, "topic"), None)
        if wanted is not None:
            check_filter_room(self._core, found_topic, wanted)
        return Broadcaster(sink, found_topic, prefetch, caller.label, wanted)

    def set_prefetch(
        self, caller: Caller, request: int, number: object, prefetch: int, *, tell: bool = False
    ) -> None:
        """Set how many deliveries a subscription may have at once. The answer is None, or, if it is
        to ``tell``, how many it has (``in_flight``), and how many more its group could hand out at
        this moment (``ready``). Raises NotFound, BadRequest."""
        subscriber = self._subscriber(caller, number)
        subscriber.prefetch = checks.integer(prefetch, "prefetch", 0, self._limits.prefetch_max)
        self._core.regained(subscriber)
        self._parts.wake()
        told: dict[str, int] | None = None
        if tell:
            group = subscriber.group
            ready = group.ready_count - group.in_key_queues
            told = {"in_flight": subscriber.in_flight, "ready": ready}
        self._parts.committer.reply(caller.replies, request, told)

    def unsubscribe(self, caller: Caller, request: int, number: object) -> None:
        """End a subscription; its deliveries in flight may still be settled. Raises NotFound."""
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
        tell: Tell | None = None,
    ) -> None:
        """Up to ``count`` deliveries once, as soon as there is one: they go to ``sink``, which is
        the answer. When ``wait_ms`` are over without any the result is ``(epoch, now_ms, ())``.
        ``options``: ``lease_ms``, and what ``Wanted`` says of the group. ``tell`` is told first
        whether the pull has made the group; the result has that as its last element then.

        Raises BadRequest, Conflict, LimitExceeded, Overloaded, Refused, Draining.
        """
        checks.integer(count, "max", 1, self._limits.pull_max)
        checks.integer(wait_ms, "wait_ms", 0, self._limits.lease_ms_max)
        lease, wanted = self._lease_ms(options), Wanted.of(options, self._limits)
        if caller.quota is not None:
            caller.quota.check_subscription()
        said = "pulls wait on this connection"
        checks.room(Overloaded, len(caller.pulls), said, self._limits, "pulls_max")
        self._check_room()
        check_no_target(self._parts, caller, topic, group)
        known = self._core.find_group(checks.name(topic, "topic"), checks.group_name(group))
        if known is not None and known.is_closed:
            known = None
        found, made = (known, None) if known else self._group(topic, group, wanted, now)
        wanted.check(found, self._core.policies)
        pull = _Pull(self._parts, caller, request, found, count, lease, sink)
        if tell is not None:
            tell(made)
            pull.told = (made,)
        pull.subscriber.asked_mono_ms = now.mono_ms
        if known is not None:
            pull.start(wait_ms)
            return

        async def start_when_durable() -> None:
            # A delivery to a group that a crash forgets could not be acked after it.
            await self._parts.committer.barrier()
            if not caller.is_open:
                return
            try:
                if found.is_closed:
                    raise NotFound(f"group {found.name} of topic {topic} was deleted")
                self._check_room()
            except TickwheelError as error:
                pull.refuse(error.code, error.message)
            else:
                pull.start(wait_ms)

        self._parts.spawn(start_when_durable())

    def _check_room(self) -> None:
        core, said = self._core, "subscriptions and pulls are open"
        checks.room(Overloaded, core.subscribers, said, core.config, "subscribers_max")

    @staticmethod
    def _subscriber(caller: Caller, number: object) -> Subscriber:
        checked = checks.integer(number, "sub", 0, SUBSCRIPTION_NUMBER_MAX)
        subscriber = caller.subscribers.get(checked)
        if subscriber is None:
            raise NotFound(f"sub {checked} is not subscribed on this connection")
        return subscriber

    def _lease_ms(self, options: dict[str, Any]) -> int:
        lease_ms = options.get("lease_ms")
        if lease_ms is None:
            return self._lease_default_ms
        limits = self._limits
        return checks.integer(lease_ms, "lease_ms", limits.lease_ms_min, limits.lease_ms_max)

    def _group(
        self, topic: object, group: object, wanted: Wanted, now: Now
    ) -> tuple[Group, dict[str, Any] | None]:
        """The group, made if there is room for another, with what there is to say of a new one.
        Raises Conflict if it is set otherwise than is wanted."""
        topic_name = checks.name(topic, "topic")
        group_name = checks.group_name(group)
        self._check_draining()
        found, known = find_room(self._parts, topic_name, group_name)
        if known is not None:
            wanted.check(known, self._core.policies)
            return known, None
        settings = wanted.settings
        if wanted.filter is not None:
            check_filter_room(self._core, found, wanted.filter)
        told = _told_of_new(found, self._core.targets)
        grouping = self._parts.border.act().grouping
        made = grouping.create(found, group_name, now.now_ms, settings)
        if settings != made.settings:
            grouping.set(made, settings, now.mono_ms)
        return made, told

    def _check_draining(self) -> None:
        if self._parts.draining:
            raise Draining("the daemon is shutting down")


def _told_of_new(topic: Topic, targets: Container[tuple[str, str]]) -> dict[str, Any]:
    """What there is to say of a group that is about to be made: ``api.groups.MadeGroup``. Groups
    that have a target are used, whoever is connected."""
    backlog, idle = topic.default_backlog, {}
    for group in topic.live_groups:
        is_used = group.subscribers or group.acked or group.nacked or group.snoozed or group.dead
        has_target = (topic.name, group.name) in targets
        if group.holds_any and not is_used and not has_target:
            idle[group.name] = group.ready_count + len(group.flight) + len(group.waiting)
            if len(idle) >= IDLE_TOLD_MAX:
                break
    return {"adopted": 0 if backlog is None else backlog.ready_count, "idle": idle}


class Wanted(NamedTuple):
    """The settings that a consumer wants of its group: a new group gets them, others must fit."""

    filter: Filter | None
    """The filter of ``tags`` and ``where``; None: the consumer names none."""
    lines: dict[str, Any]
    """The settings among ``LINE_SETTINGS`` that the consumer names."""
    retry: PolicyRef | None = None
    """The policy that the consumer names; a group without one gets it."""

    @classmethod
    def of(cls, options: dict[str, Any], limits: Limits) -> Wanted:
        """The settings that the options want. Raises BadRequest, LimitExceeded."""
        said = _said(options, limits)
        if not said:
            return _ANY
        wanted = cls(checks.asked_filter(said), checks.asked_lines(said))
        checks.storable_settings(wanted.settings)
        return wanted

    @property
    def settings(self) -> GroupSettings:
        """The settings of a group that is made for the consumer."""
        found = checks.lines(self.lines, NOTHING_SET)
        if self.filter is None:
            return found
        return found._replace(tags=self.filter.tags, where=self.filter.where)

    def check(self, group: Group, known: Mapping[str, RetryPolicy]) -> None:
        """Raise Conflict if the group is set otherwise: what differs, and the commands by which the
        group gets what is wanted."""
        settings = group.settings
        differs: list[str] = []
        options: list[str] = []
        commands: list[str] = []
        if self.filter is not None:
            own = checks.filter_of(settings.tags, settings.where)
            if own != self.filter:
                differs.append(f"the filter {own}, not {self.filter}")
                options += _filter_options(own, self.filter)
        lines = applied_lines(settings) if self.lines else self.lines
        for name, wanted in self.lines.items():
            if lines[name] != wanted:
                differs.append(f"{name} {shown(lines[name])}, not {shown(wanted)}")
                options += _line_option(name, wanted)
        of = shlex.join((group.topic.name, group.name))
        if options:
            commands.append(f"tickwheel groups set {of} {shlex.join(options)}")
        if self.retry is not None and settings.retry is not None:
            other = _policy_differs(settings.retry, self.retry, known)
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


_ANY = Wanted(None, {})


def _said(options: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """What the options say of the group, each checked by its kind. Raises BadRequest,
    LimitExceeded."""
    said = {name: options[name] for name in OF_GROUPS if options.get(name) is not None}
    return GroupFields.checked(said, limits).said() if said else said


class _Subscription:
    """The sink of a subscription, until the shard ends that."""

    def __init__(self, caller: Caller, number: int, sink: DeliverySink) -> None:
        self._caller = caller
        self._number = number
        self._sink = sink
        self.told: dict[str, Any] = {}
        """What else the answer says."""
        self.deliver = sink.deliver
        self.check = sink.check
        self.closed = sink.closed

    def ended(self, code: str, message: str) -> None:
        self._caller.subscribers.pop(self._number, None)
        self._sink.ended(code, message)


class _Pull:
    """A pull: a subscriber that lives until its first delivery, or until its time is over."""

    def __init__(
        self,
        parts: Parts,
        caller: Caller,
        request: int,
        group: Group,
        count: int,
        lease_ms: int,
        sink: DeliverySink,
    ) -> None:
        self._parts = parts
        self._caller = caller
        self._request = request
        self._sink = sink
        self._timer: asyncio.TimerHandle | None = None
        self._patience = 1
        self.told: tuple[dict[str, Any] | None, ...] = ()
        """What else the answer says, if nothing comes."""
        self.check = sink.check
        self.subscriber = Subscriber(self, group, count, lease_ms, once=True, label=caller.label)
        self.subscriber.presence = caller.presence
        # From now on it counts as one that waits.
        caller.pulls[self.subscriber] = None

    def start(self, wait_ms: int) -> None:
        """Wait for deliveries for ``wait_ms``."""
        self.subscriber.blocked = self._caller.is_blocked
        self._parts.border.act().subscriptions.subscribe(self.subscriber)
        self._parts.wake()
        self._later(wait_ms / 1000)

    def _later(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._over)

    def deliver(self, epoch: int, now_ms: int, items: Sequence[Item]) -> None:
        self._leave()
        self._caller.remember(self.subscriber)
        self._sink.deliver(epoch, now_ms, items)

    def _over(self) -> None:
        self._timer = None
        parts, group = self._parts, self.subscriber.group
        waits = group.is_held or group in parts.core.throttled
        comes = group.loading or group.ready_count > group.in_key_queues
        if self._patience and comes and not waits:
            self._patience -= 1
            self._later(LOADING_WAIT_S)
            return
        parts.engine.subscriptions.unsubscribe(self.subscriber)
        self._leave()
        nothing = (parts.epoch, parts.clock.read().now_ms, (), *self.told)
        parts.committer.reply(self._caller.replies, self._request, nothing)

    def ended(self, code: str, message: str) -> None:
        """Refuse the pull: its group was deleted."""
        self.refuse(code, message)

    def refuse(self, code: str, message: str) -> None:
        self._leave()
        self._caller.replies.error(self._request, code, message)
        self._caller.replies.flush()

    def _leave(self) -> None:
        """Forget the pull, which is answered."""
        self.closed()
        self._caller.pulls.pop(self.subscriber, None)

    def closed(self) -> None:
        # They hold each other, and the connection: a cycle would keep it when it is gone.
        self.subscriber.sink = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _filter_options(own: Filter, wanted: Filter) -> list[str]:
    """The options of ``tickwheel groups set`` that turn one filter into the other."""
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
    """The option of ``tickwheel groups set`` that sets this."""
    bare = name.removesuffix("_ms")
    return [f"--{bare.replace('_', '-')}", f"{value}{'ms' * (bare != name)}"]


def _policy_differs(
    own: PolicyRef, wanted: PolicyRef, known: Mapping[str, RetryPolicy]
) -> list[str]:
    """The fields in which two policies differ; the whole of both where they differ in kind."""
    found, other = policy_map(own, known) or {}, policy_map(wanted, known) or {}
    if found.get("kind") != other.get("kind"):
        return [f"retry {_retry(own).spec()}, not {_retry(wanted).spec()}"]
    return [
        f"retry.{name} {shown(found.get(name))}, not {shown(other.get(name))}"
        for name in dict.fromkeys((*found, *other))
        if found.get(name) != other.get(name)
    ]


def _retry(ref: PolicyRef) -> Retry:
    return Retry.of(ref if isinstance(ref, str) else ref.to_map())
