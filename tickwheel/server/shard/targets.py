"""Operations on targets of groups: set, remove, list, test, log and resend.

A group has either a target or subscribers. Forbidden addresses are refused here if their host can
be resolved; the outbound process (``server/outbound.py``) checks addresses again at every
connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sized
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from tickwheel.api.targets import (
    OfTargets,
    PushLogPage,
    Resend,
    SetForward,
    SetPush,
    SettleCallback,
    hosts_of,
    shown_url,
)
from tickwheel.errors import (
    BadRequest,
    Conflict,
    LimitExceeded,
    NotFound,
    Overloaded,
    TickwheelError,
    lacks_extra,
)
from tickwheel.model.kinds import TargetRow
from tickwheel.server import checks
from tickwheel.server.shard.callers import OUTBOUND, Caller
from tickwheel.server.shard.groups import begin_group, find_group, find_room, targets_changed
from tickwheel.webhooks import (
    NEEDS_EXTRA,
    PRIVATE,
    Callback,
    ForbiddenAddress,
    Guard,
    literal_of,
    read_token,
)

if TYPE_CHECKING:
    from tickwheel.api.groups import OfGroup
    from tickwheel.api.targets import TestPush
    from tickwheel.engine.sessions import ReplySink
    from tickwheel.engine.topics import Group
    from tickwheel.server.shard.callers import Call
    from tickwheel.server.shard.parts import Parts, Sender
    from tickwheel.server.shard.settlement import Settling

PUSH, FORWARD = "push", "forward"
RESOLVE_S_MAX: Final = 3.0
"""Maximum seconds to resolve the hosts of a target when it is set; they are resolved again
later."""
LOOK_UPS_MAX: Final = 64
"""Maximum number of targets whose hosts are being resolved, one host after the other, and of hosts
that are being resolved, including those that nobody waits for."""
PORTS: Final = {"http": 80, "https": 443}
PUSH_OPTIONS: Final = (
    "format", "concurrency", "request_timeout_ms", "connect_timeout_ms", "callback_lease_ms",
)  # fmt: skip
FORWARD_OPTIONS: Final = ("batch", "concurrency")
NO_SENDER: Final = "this daemon runs inside a program and has no outbound process"


class Targeting:
    """The operations on targets."""

    def __init__(self, parts: Parts, settling: Settling) -> None:
        self._parts = parts
        self._settling = settling
        self._core = parts.core
        self._guard = Guard.from_texts(parts.settings.push_networks)
        self._resolving = 0
        """Number of requests whose hosts are being resolved."""

    # --- set and remove --------------------------------------------------------------------------

    def set_push(self, call: Call[SetPush]) -> None:
        """Push the tasks of a group to a URL. Raise BadRequest, Conflict, LimitExceeded."""
        request = call.request
        if find_spec("aiohttp") is None:
            raise lacks_extra("push", "push", "aiohttp")
        secrets = request.secrets or self._present_secrets(request.topic, request.group)
        is_private = any(secret.startswith(PRIVATE) for secret in secrets)
        if is_private and find_spec("cryptography") is None:
            raise lacks_extra(*NEEDS_EXTRA, "cryptography")
        sender = self._parts.outbound
        if request.callback_lease_ms is not None and sender is not None and not sender.callback_url:
            raise BadRequest("callback_lease_ms needs a daemon that serves HTTP (setting http)")
        if request.callback_lease_ms is not None:
            limits = self._parts.limits
            checks.integer(request.callback_lease_ms, "callback_lease_ms", 0, limits.lease_ms_max)
        self._set(call, PUSH, tuple(secrets), PUSH_OPTIONS)

    def _present_secrets(self, topic: str, group: str) -> tuple[str, ...]:
        row = self._core.targets.get((topic, group))
        if row is None or row.kind != PUSH:
            raise BadRequest("secrets must contain at least one secret to sign requests with")
        return row.secrets

    def set_forward(self, call: Call[SetForward]) -> None:
        """Forward the tasks of a group to another broker. Raise BadRequest, Conflict,
        LimitExceeded."""
        secret = call.request.secret
        self._set(call, FORWARD, () if secret is None else (secret,), FORWARD_OPTIONS)

    def _set(
        self, call: Call[Any], kind: str, secrets: tuple[str, ...], names: tuple[str, ...]
    ) -> None:
        request = call.request
        self._check_room(request.topic, request.group)
        options = ((name, getattr(request, name)) for name in names)
        row = TargetRow(
            request.topic,
            request.group,
            kind,
            request.url,
            secrets,
            tuple((name, value) for name, value in options if value is not None),
            call.now.now_ms,
            call.caller.principal.name or call.caller.label,
        )
        is_asked = kind == FORWARD and self._parts.outbound is not None
        check = partial(self._check_forward, row) if is_asked else None
        self._after_guard(call, request.url, partial(self._put, call, row), check)

    async def _check_forward(self, row: TargetRow) -> TickwheelError | None:
        """Return the outbound process's error for the address of a forwarder, or None."""
        try:
            await self._sender().ask("check", url=row.url, secrets=row.secrets)
        except BadRequest as error:
            return error
        except TickwheelError:
            pass  # the process reports the error when it starts the target
        return None

    def _after_guard(
        self,
        call: Call[Any],
        url: str,
        act: Callable[[], None],
        also: Callable[[], Coroutine[Any, Any, TickwheelError | None]] | None = None,
    ) -> None:
        """Call ``act`` once the host of a URL was resolved and is allowed. ``also`` performs
        another check and returns its error, or None."""
        parts = self._parts
        busy = max(self._resolving, self._guard.look_ups.count)
        if busy >= LOOK_UPS_MAX:
            raise Overloaded(
                f"the hosts of {busy} targets are being resolved; the limit is"
                f" {LOOK_UPS_MAX} (LOOK_UPS_MAX)"
            )
        self._resolving += 1

        async def check() -> None:
            problem: TickwheelError | None = None
            try:
                try:
                    forbidden = await why_forbidden(self._guard, url)
                finally:
                    self._resolving -= 1
                if forbidden is not None:
                    problem = BadRequest(f"url: {forbidden}")
                elif also is not None:
                    problem = await also()
            except Exception as error:
                problem = parts.border.survive(f"a target of {call.caller.address}", error)
            if problem is not None:
                call.refuse(problem)
                return
            if not call.caller.is_open:
                return
            parts.border.run(f"a target of {call.caller.address}", act, call.refuse)
            parts.committer.begin()

        parts.spawn(check())

    def _put(self, call: Call[Any], row: TargetRow) -> None:
        self._check_room(row.topic, row.group)
        if row.kind == PUSH and call.request.secrets is None:
            # During the look-up, another operator may have changed them or removed the push.
            row = row._replace(secrets=self._present_secrets(row.topic, row.group))
        topic, group = find_room(self._parts, row.topic, row.group)
        grouping = self._parts.border.act().grouping
        if group is None:
            begin_group(grouping, topic, row.group, None, call.now.now_ms)
        created = (row.topic, row.group) not in self._core.targets
        grouping.set_target(row)
        targets_changed(self._parts)
        answer = target_map(row, self._state(row)) | {"created": created}
        self._parts.committer.answer(call, answer)
        self._parts.wake()

    def _check_room(self, topic: str, name: str) -> None:
        """Raise Conflict if the group has subscribers, LimitExceeded if the limit of targets is
        reached."""
        core = self._core
        if (topic, name) not in core.targets and len(core.targets) >= TARGETS_MAX:
            raise LimitExceeded(
                f"there are {len(core.targets)} targets; the limit is {TARGETS_MAX} (TARGETS_MAX)"
            )
        group = core.find_group(topic, name)
        others = 0 if group is None else len(self._other_subscribers(group))
        if others:
            raise Conflict(
                f"group {name} of topic {topic} has {others} subscribers; a group has a target or"
                " subscribers, not both"
            )

    def _other_subscribers(self, group: Group) -> set[Any]:
        """Return the subscribers of a group except the outbound process."""
        ours = {
            subscriber
            for caller in self._parts.callers
            if caller.principal == OUTBOUND
            for subscriber in caller.consumers
        }
        return set(group.subscribers) - ours

    def remove_target(self, call: Call[OfGroup]) -> None:
        """Remove the target of a group. Raise NotFound."""
        row = self._row(call.request.topic, call.request.group)
        self._parts.border.act().grouping.drop_target(row.topic, row.group)
        targets_changed(self._parts)
        self._parts.committer.answer(call, {"kind": row.kind, "url": shown_url(row.url)})

    def end(self, topic: str, group: str, reason: str, since_ms: int) -> None:
        """End a push whose endpoint answered 410, unless it was set again since ``since_ms``."""
        row = self._core.targets.get((topic, group))
        if row is None or row.ended_ms is not None or row.since_ms != since_ms:
            return
        parts = self._parts
        now_ms = parts.clock.read().now_ms
        parts.border.begin()
        ended = row._replace(ended_ms=now_ms, reason=reason)
        parts.border.act().grouping.set_target(ended)
        parts.committer.begin()
        parts.on_event(
            "push_ended",
            f"group {group} of topic {topic}: {reason}; nothing is sent until the push is set"
            " again",
        )

    # --- reads -----------------------------------------------------------------------------------

    def targets(self, call: Call[OfTargets]) -> None:
        """Answer with the targets of a topic, or of all topics."""
        topic, topic_filter = call.request.topic, call.topic_filter
        rows = [
            row
            for _, row in sorted(self._core.targets.items())
            if topic in (None, row.topic) and (topic_filter is None or topic_filter(row.topic))
        ]
        targets = [target_map(row, self._state(row)) for row in rows]
        self._parts.committer.answer(call, {"targets": targets})

    def _state(self, row: TargetRow) -> Mapping[str, Any]:
        sender = self._parts.outbound
        return {} if sender is None else sender.state(row.topic, row.group)

    def _row(self, topic: str, group: str) -> TargetRow:
        find_group(self._core, topic, group)
        row = self._core.targets.get((topic, group))
        if row is None:
            raise NotFound(f"group {group} of topic {topic} has no target")
        return row

    # --- requests to the outbound process --------------------------------------------------------

    def test_push(self, call: Call[TestPush]) -> None:
        """Send a test request to a URL, and answer with its result. Raise BadRequest, Conflict."""
        request, sender = call.request, self._sender()
        fields = {"url": request.url, "secrets": request.secrets or (), "format": request.format}
        self._after_guard(call, request.url, lambda: self._ask(call, sender, "test", fields))

    def push_log(self, call: Call[PushLogPage]) -> None:
        """Answer with the recent requests of a push. Raise NotFound, Conflict."""
        row = self._push(call.request.topic, call.request.group)
        fields = {"topic": row.topic, "group": row.group, "limit": call.request.limit}
        self._ask(call, self._sender(), "log", fields)

    def resend(self, call: Call[Resend]) -> None:
        """Send a recent request again, and answer with its result. Raise NotFound, Conflict."""
        row = self._push(call.request.topic, call.request.group)
        fields = {"topic": row.topic, "group": row.group, "number": call.request.number}
        self._ask(call, self._sender(), "resend", fields)

    # --- requests of endpoints -------------------------------------------------------------------

    def settle_callback(self, call: Call[SettleCallback]) -> None:
        """Settle the task of a callback, whose token proves that the caller has received the task.
        Raise NotFound."""
        request = call.request
        callback, is_signed_by = read_token(request.token)
        topic, group, task_id, epoch, attempt = callback
        row = self._core.targets.get((topic, group))
        if row is None or not is_signed_by(row.secrets):
            raise NotFound("there is no such callback, or it has ended")
        receipt = (task_id, epoch, attempt)
        caller = Caller(
            _ResultSink(call.replies, USUAL[request.result]),
            principal=OUTBOUND,
            address=call.caller.address,
        )
        of_group, settling = (caller, call.number, topic, group), self._settling
        if request.result == "ack" and not self._is_newest(callback):
            self._parts.committer.answer(call, {"result": "stale"})
        elif request.result == "ack":
            settling.ack(*of_group, epoch, (task_id,), (attempt,))
        elif request.result == "nack":
            item = (*receipt, request.delay_ms, request.reason)
            settling.nack(*of_group, (item,), call.now)
        elif request.result == "reject":
            settling.reject(*of_group, ((*receipt, request.reason),), call.now)
        else:
            lease_ms = request.lease_ms or row.option("callback_lease_ms")
            if type(lease_ms) is not int:
                raise BadRequest(
                    "lease_ms is required because this push no longer has a callback_lease_ms"
                )
            settling.extend(*of_group, epoch, (task_id,), (attempt,), lease_ms, call.now)
        self._parts.wake()

    def _is_newest(self, callback: Callback) -> bool:
        """Return whether the task has not been sent again since, because a token is valid only for
        one delivery."""
        group = self._core.find_group(callback.topic, callback.group)
        return group is None or self._parts.border.act().settlement.is_newest(
            group, callback.id, callback.epoch, callback.attempt
        )

    def _sender(self) -> Sender:
        sender = self._parts.outbound
        if sender is None:
            raise Conflict(NO_SENDER)
        return sender

    def _push(self, topic: str, group: str) -> TargetRow:
        row = self._row(topic, group)
        if row.kind != PUSH:
            raise Conflict(f"group {group} of topic {topic} is forwarded, not pushed")
        return row

    def _ask(self, call: Call[Any], sender: Sender, what: str, fields: dict[str, Any]) -> None:
        async def wait() -> None:
            try:
                answer = await sender.ask(what, **fields)
            except TickwheelError as error:
                call.refuse(error)
            except Exception as error:
                call.refuse(self._parts.border.survive(f"{what} of {call.caller.address}", error))
            else:
                call.answer(answer)

        self._parts.spawn(wait())


class _ResultSink:
    """A sink for the answer about one settled delivery. It converts the word to a map."""

    def __init__(self, replies: ReplySink, usual: str) -> None:
        self._replies = replies
        self._usual = usual
        self.label = replies.label
        self.accepted = replies.accepted
        self.give = replies.give
        self.error = replies.error
        self.flush = replies.flush

    def answer_to(self, request: int, value: Any) -> Sized:
        word = value[0] if value else self._usual
        return self._replies.answer_to(request, {"result": word})


USUAL: Final = {"ack": "acked", "nack": "retrying", "reject": "dead", "extend": "extended"}
"""Result that a callback requests → the word that an answer of None means."""
TARGETS_MAX: Final = 1_000
"""Maximum number of targets of a daemon."""


def check_no_target(parts: Parts, caller: Caller, topic: object, group: object) -> None:
    """Raise Conflict if the group has a target and the caller is not the outbound process."""
    targets = parts.core.targets
    if not targets or caller.principal == OUTBOUND:
        return
    row = targets.get((checks.name(topic, "topic"), checks.group_name(group)))
    if row is not None:
        what = "pushed" if row.kind == PUSH else "forwarded"
        raise Conflict(
            f"group {row.group} of topic {row.topic} is {what} to {shown_url(row.url)} and cannot"
            " have subscribers; remove its target first (remove_target)"
        )


async def why_forbidden(guard: Guard, url: str) -> ForbiddenAddress | None:
    """Return why a URL is forbidden; None if it is allowed or its hosts cannot be resolved in
    time. A broker's URL can name hundreds of hosts."""
    default_port = PORTS.get(url.partition(":")[0].lower(), 0)
    # Addresses come first, because their check needs no time.
    hosts = sorted(hosts_of(url), key=lambda host: literal_of(host[0]) is None)
    with suppress(TimeoutError):
        async with asyncio.timeout(RESOLVE_S_MAX):
            for host, port in hosts:
                try:
                    await guard.resolve(host, port or default_port)
                except ForbiddenAddress as error:
                    return error
                except (OSError, UnicodeError):
                    continue  # it has no address
    return None


def target_map(row: TargetRow, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a target as the map that all answers use."""
    fields: dict[str, Any] = {
        "topic": row.topic,
        "group": row.group,
        "kind": row.kind,
        "url": shown_url(row.url),
        "since_ms": row.since_ms,
        "by": row.by,
        "state": "stopped",
        "secrets": len(row.secrets),
        **dict(row.options),
        **state,
    }
    if row.ended_ms is not None:
        fields |= {"state": "ended", "ended_ms": row.ended_ms, "reason": row.reason}
    return fields
