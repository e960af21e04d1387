"""The verbs of groups and topics: made, set, paused, deleted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, Unpack

from tickwheel.api.frames import FrameType
from tickwheel.api.times import Duration, moment_ms
from tickwheel.client.keywords import (
    NewGroupKeywords,
    SettingsKeywords,
    refuse_unknown,
    spelled_out,
)
from tickwheel.client.results import ConsumerInfo, GroupSettings, read
from tickwheel.client.verbs.base import Verbs
from tickwheel.client.wire import flag, wire_of
from tickwheel.errors import BadRequest, shown

STARTS = ("now", "first")
HELD = ("ready", "in_flight", "waiting", "dead")
TOPIC_HELD = ("pending", *HELD, "groups")


class GroupVerbs(Verbs):
    """Groups and topics, and their settings."""

    @spelled_out(NewGroupKeywords)
    async def create_group(
        self,
        topic: str,
        group: str,
        *,
        start: str | datetime = "now",
        timeout: Duration | None = None,
        **settings: Unpack[NewGroupKeywords],
    ) -> GroupSettings:
        """Make a group before its first subscriber comes; one that exists stays as it is
        (``created`` of the answer says which).

        ``start``: it is owed what comes due from "now" on, from the "first" task that is still
        there, or from a moment. ``settings`` are those of NewGroupKeywords.
        """
        refuse_unknown(settings, NewGroupKeywords, "Client.create_group")
        names = self._names(topic, group, group_needed=True)
        options = {"since": _since(start)} | wire_of(settings)
        if not options.get("paused"):
            options.pop("paused", None)
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
            flag(force, "force"),
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
            flag(force, "force"),
            repeat=False,
            until_s=self._until(timeout),
        )
        return read(lambda raw: {what: int(raw[what]) for what in TOPIC_HELD}, answer)

    @spelled_out(SettingsKeywords)
    async def configure(
        self,
        topic: str,
        group: str | None = None,
        *,
        timeout: Duration | None = None,
        **settings: Unpack[SettingsKeywords],
    ) -> GroupSettings:
        """Change settings of a group, or of the topic itself: those of SettingsKeywords. What is
        not named stays; None takes a setting away. By a filter is judged what comes due from now
        on. Durable when it returns. Raises NotFound for a group, Conflict for ``broadcast_only``
        of a topic with groups."""
        refuse_unknown(settings, SettingsKeywords, "Client.configure")
        names = self._names(topic, group)
        changed = wire_of(settings, with_none=True)
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
