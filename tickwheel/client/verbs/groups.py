"""The verbs of groups and topics: made, set, paused, deleted."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

from tickwheel.client.coalescing import IfPending, rule_wire
from tickwheel.client.filters import filter_wire
from tickwheel.client.lines import Lines, changed_lines
from tickwheel.client.results import KEEP, ConsumerInfo, GroupSettings, Keep, read
from tickwheel.client.retry import Retry, policy_wire
from tickwheel.client.times import Duration, moment_ms
from tickwheel.client.verbs.base import Verbs
from tickwheel.client.words import Action, OrderFailure
from tickwheel.errors import BadRequest, shown
from tickwheel.protocol.frames import FrameType

STARTS = ("now", "first")
HELD = ("ready", "in_flight", "waiting", "dead")
TOPIC_HELD = ("pending", *HELD, "groups")


class GroupVerbs(Verbs):
    """Groups and topics, and their settings."""

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
        tags: str | None = None,
        where: str | None = None,
        order_retry: Duration | None = None,
        order_attempts: int | None = None,
        order_failure: OrderFailure | None = None,
        fair_by: str | None = None,
        limit_each: int | None = None,
        rate_each: float | None = None,
        timeout: Duration | None = None,
    ) -> GroupSettings:
        """Make a group before its first subscriber comes; one that exists stays as it is
        (``created`` of the answer says which).

        ``start``: it is owed what comes due from "now" on, from the "first" task that is still
        there, or from a moment. ``tags``, ``where``: its filter; what it leaves out the group is
        not owed. ``order_retry``, ``order_attempts``, ``order_failure``: when a failed task of an
        order key is tried again, and what becomes of it after how many attempts: its key is held
        ("hold", after 16), it is a dead letter ("dead"), or it is tried for ever ("retry").
        ``fair_by``: what has equal turns ("key", "tag", a property's name), each value of it with
        at most ``limit_each`` deliveries in flight and ``rate_each`` a second.
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
        options |= filter_wire(tags, where)
        options |= Lines(
            order_retry=order_retry, order_attempts=order_attempts, order_failure=order_failure,
            fair_by=fair_by, limit_each=limit_each, rate_each=rate_each,
        ).to_wire()  # fmt: skip
        answer = await self._calls.call(
            FrameType.GROUP_CREATE, *names, options, until_s=self._until(timeout)
        )
        return read(GroupSettings.of, answer)

    async def delete_group(
        self, topic: str, group: str, *, force: bool = False, timeout: Duration | None = None
    ) -> dict[str, int]:
        """Delete a group; how many it held: ready, in_flight, waiting, dead.

        Raises Conflict when it holds anything, unless ``force``: then that is gone for it.
        """
        names = self._names(topic, group, group_needed=True)
        answer = await self._calls.call(
            FrameType.GROUP_DELETE,
            *names,
            _bool(force, "force"),
            repeat=False,
            until_s=self._until(timeout),
        )
        return read(lambda raw: {name: int(raw[name]) for name in HELD}, answer)

    async def delete_topic(
        self, topic: str, *, force: bool = False, timeout: Duration | None = None
    ) -> dict[str, int]:
        """Delete a topic with its groups, settings and dead letters; what it held: pending, ready,
        in_flight, waiting, dead, groups. Durable when it returns; its tasks end as deleted in the
        background, and until then the topic takes no new ones (Refused).

        Raises Conflict when it holds tasks or has subscribers, unless ``force``, and always when a
        schedule enqueues to it; NotFound.
        """
        name, _ = self._names(topic, None)
        answer = await self._calls.call(
            FrameType.TOPIC_DELETE,
            name,
            _bool(force, "force"),
            repeat=False,
            until_s=self._until(timeout),
        )
        return read(lambda raw: {what: int(raw[what]) for what in TOPIC_HELD}, answer)

    async def configure(
        self,
        topic: str,
        group: str | None = None,
        *,
        paused: bool | Keep = KEEP,
        rate: float | Keep | None = KEEP,
        burst: int | Keep | None = KEEP,
        retry: Retry | Keep | None = KEEP,
        if_pending: Action | IfPending | Keep | None = KEEP,
        broadcast_only: bool | Keep = KEEP,
        tags: str | Keep | None = KEEP,
        where: str | Keep | None = KEEP,
        order_retry: Duration | Keep | None = KEEP,
        order_attempts: int | Keep | None = KEEP,
        order_failure: OrderFailure | Keep | None = KEEP,
        fair_by: str | Keep | None = KEEP,
        limit_each: int | Keep | None = KEEP,
        rate_each: float | Keep | None = KEEP,
        timeout: Duration | None = None,
    ) -> GroupSettings:
        """Change settings of a group, or of the topic itself; what is not named stays. None
        lifts a rate or a policy. ``if_pending``, of a topic: what becomes of its tasks whose key is
        pending and that do not say it themselves. ``broadcast_only``, of a topic without groups:
        its tasks go to the broadcast subscriptions that are connected when they come due, and end;
        nobody is owed them. ``tags``, ``where``, of a group: its filter, by which what comes due
        from now on is judged; the rest as in ``create_group``. Durable when it returns. Raises
        NotFound for a group, Conflict for ``broadcast_only`` of a topic with groups."""
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
        if if_pending is not KEEP:
            rule = None if if_pending is None else rule_wire(if_pending, "if_pending")
            changed["if_pending"] = rule
        if broadcast_only is not KEEP:
            changed["broadcast_only"] = _bool(broadcast_only, "broadcast_only")
        for name, text in (("tags", tags), ("where", where)):
            if not isinstance(text, Keep):
                changed[name] = None
                changed |= filter_wire(**{name: text})
        lines = {
            "order_retry": order_retry, "order_attempts": order_attempts,
            "order_failure": order_failure, "fair_by": fair_by, "limit_each": limit_each,
            "rate_each": rate_each,
        }  # fmt: skip
        changed |= changed_lines({n: v for n, v in lines.items() if not isinstance(v, Keep)})
        answer = await self._calls.call(
            FrameType.CONFIGURE, *names, changed, until_s=self._until(timeout)
        )
        return read(GroupSettings.of, answer)

    async def pause(
        self, topic: str, group: str | None = None, *, timeout: Duration | None = None
    ) -> GroupSettings:
        """Deliver nothing until ``resume``; it outlasts restarts of the daemon."""
        return await self.configure(topic, group, paused=True, timeout=timeout)

    async def resume(
        self, topic: str, group: str | None = None, *, timeout: Duration | None = None
    ) -> GroupSettings:
        """Deliver again."""
        return await self.configure(topic, group, paused=False, timeout=timeout)

    async def list_consumers(
        self,
        *,
        topic: str | None = None,
        group: str | None = None,
        limit: int | None = None,
        timeout: Duration | None = None,
    ) -> AsyncIterator[ConsumerInfo]:
        """Who is connected and takes tasks: each subscription, and each pull that waits, in the
        order in which their connections came; of a topic, of a group; page by page (``timeout``:
        of each page)."""
        options = {"topic": topic, "group": group}
        count = 0
        # A page of the daemon ends behind all of one connection, so it may be longer than asked.
        async for one in self._pages(FrameType.CONSUMER_LIST, options, "consumers", limit, timeout):
            yield read(ConsumerInfo.of, one)
            count += 1
            if count == limit:
                return


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
