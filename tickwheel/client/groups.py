"""Groups and the settings of topics and groups: made, changed, deleted.

Each is one request. One that is asked again on a new connection, because the old one broke
before the answer, may say what the first did: a group that was just made "exists".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any, Final

from tickwheel.client.requests import Calls
from tickwheel.client.results import read
from tickwheel.client.retry import Retry, policy_wire
from tickwheel.client.tasks import TaskChecker
from tickwheel.client.times import moment_ms, shown
from tickwheel.errors import BadRequest, ClientClosed
from tickwheel.protocol.frames import FrameType

STARTS = ("now", "first")
HELD = ("ready", "in_flight", "waiting", "dead")


class Keep(Enum):
    """Stands for "as it is" where None means something."""

    KEEP = "as it is"


KEEP: Final = Keep.KEEP


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What holds for a group, or for a topic (then ``group`` is None)."""

    topic: str
    group: str | None
    paused: bool
    """Nothing is delivered; enqueues go on."""
    rate: float | None
    """Deliveries a second at most; None: no limit."""
    burst: int | None
    """Deliveries at once after a pause, when there is a rate."""
    retry: Retry | None
    """Its own policy; None: the one above it holds."""
    created: bool
    """Whether this very call made the group."""
    raw: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> GroupSettings:
        retry = raw.get("retry")
        return cls(
            topic=str(raw["topic"]),
            group=raw.get("group") or None,
            paused=bool(raw["paused"]),
            rate=raw.get("rate"),
            burst=raw.get("burst"),
            retry=None if retry is None else Retry.of(retry),
            created=bool(raw.get("created", False)),
            raw=raw,
        )


class Groups:
    """What ``Client`` can do with groups; mixed into it."""

    _calls: Calls
    _checker: TaskChecker

    def _ready(self) -> None:
        raise ClientClosed

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
    ) -> GroupSettings:
        """Make a group before its first subscriber comes; one that exists stays as it is
        (``created`` tells).

        ``start``: it is owed what comes due from "now" on, from the "first" task that is still
        there, or from a moment.
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
        answer = await self._calls.call(FrameType.GROUP_CREATE, *names, options)
        return read(GroupSettings.of, answer)

    async def delete_group(self, topic: str, group: str, *, force: bool = False) -> dict[str, int]:
        """Delete a group; how many it held: ready, in_flight, waiting, dead.

        Raises Conflict when it holds anything, unless ``force``: then that is gone for it.
        """
        names = self._names(topic, group, group_needed=True)
        answer = await self._calls.call(
            FrameType.GROUP_DELETE, *names, _bool(force, "force"), repeat=False
        )
        return read(lambda raw: {name: int(raw[name]) for name in HELD}, answer)

    async def configure(
        self,
        topic: str,
        group: str | None = None,
        *,
        paused: bool | Keep = KEEP,
        rate: float | Keep | None = KEEP,
        burst: int | Keep | None = KEEP,
        retry: Retry | Keep | None = KEEP,
    ) -> GroupSettings:
        """Change settings of a group, or of the topic itself; what is not named stays. None
        lifts a rate or a policy. Durable when it returns. Raises NotFound for a group."""
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
        answer = await self._calls.call(FrameType.CONFIGURE, *names, changed)
        return read(GroupSettings.of, answer)

    async def pause(self, topic: str, group: str | None = None) -> GroupSettings:
        """Deliver nothing until ``resume``; it outlasts restarts of the daemon."""
        return await self.configure(topic, group, paused=True)

    async def resume(self, topic: str, group: str | None = None) -> GroupSettings:
        """Deliver again."""
        return await self.configure(topic, group, paused=False)

    def _names(
        self, topic: str, group: str | None, *, group_needed: bool = False
    ) -> tuple[str, str | None]:
        self._ready()
        topic = self._checker.name(topic, "topic")
        if group is None and not group_needed:
            return topic, None
        return topic, self._checker.name(group, "group")


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
