"""The verbs of bulk operations: what is done to everything of a topic that matches, in the
background."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any, Unpack

from tickwheel.api.frames import FrameType
from tickwheel.api.times import Duration, duration_ms, moment_ms, seconds
from tickwheel.api.words import BulkState
from tickwheel.client.bulk import BulkInfo, BulkPreview
from tickwheel.client.keywords import (
    AnySelectionKeywords,
    DeadSelectionKeywords,
    TaskSelectionKeywords,
    refuse_unknown,
    spelled_out,
)
from tickwheel.client.results import read
from tickwheel.client.verbs.base import Verbs
from tickwheel.client.wire import wire_of
from tickwheel.errors import BadRequest, SendTimeout, shown

LOOK_S = 0.25
"""How often, in seconds, ``wait_bulk`` looks."""


class BulkVerbs(Verbs):
    """Make bulk operations, try what they would do, look at them, end them.

    ``selection``: keywords of TaskSelectionKeywords, of dead letters those of
    DeadSelectionKeywords; what all of them say must be true of a task. ``rate``: so many changes a
    second at most. ``id``: yours; asked for again, the same bulk operation is answered with, and
    another one with its id is a Conflict (default: a random one). Durable when it returns; what is
    enqueued, or dies, later is none of the bulk operation's business. Raises NotFound for a topic
    that is not there, Overloaded when too many bulk operations are running.
    """

    @spelled_out(TaskSelectionKeywords)
    async def cancel_matching(
        self,
        topic: str,
        *,
        rate: float | None = None,
        id: str | None = None,  # noqa: A002  # the name of the published surface
        timeout: Duration | None = None,
        **selection: Unpack[TaskSelectionKeywords],
    ) -> BulkInfo:
        """Cancel all that match and that nobody is working on."""
        refuse_unknown(selection, TaskSelectionKeywords, "Client.cancel_matching")
        return await self._make("cancel", topic, wire_of(selection), rate, id, timeout)

    @spelled_out(TaskSelectionKeywords)
    async def reschedule_matching(
        self,
        topic: str,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        shift: Duration | None = None,
        rate: float | None = None,
        id: str | None = None,  # noqa: A002  # the name of the published surface
        timeout: Duration | None = None,
        **selection: Unpack[TaskSelectionKeywords],
    ) -> BulkInfo:
        """Give all that match another due time: one (``delay`` from now, ``at``), or each its own,
        ``shift`` later, which may be negative."""
        refuse_unknown(selection, TaskSelectionKeywords, "Client.reschedule_matching")
        options = wire_of(selection) | moved_wire(delay, at, shift)
        return await self._make("reschedule", topic, options, rate, id, timeout)

    @spelled_out(TaskSelectionKeywords)
    async def run_now_matching(
        self,
        topic: str,
        *,
        rate: float | None = None,
        id: str | None = None,  # noqa: A002  # the name of the published surface
        timeout: Duration | None = None,
        **selection: Unpack[TaskSelectionKeywords],
    ) -> BulkInfo:
        """Make all that match due at once."""
        refuse_unknown(selection, TaskSelectionKeywords, "Client.run_now_matching")
        return await self._make("run_now", topic, wire_of(selection), rate, id, timeout)

    @spelled_out(DeadSelectionKeywords)
    async def dead_requeue_matching(
        self,
        topic: str,
        *,
        rate: float | None = None,
        id: str | None = None,  # noqa: A002  # the name of the published surface
        timeout: Duration | None = None,
        **selection: Unpack[DeadSelectionKeywords],
    ) -> BulkInfo:
        """Let all dead letters that match be delivered again, failures counted anew."""
        refuse_unknown(selection, DeadSelectionKeywords, "Client.dead_requeue_matching")
        return await self._make("requeue", topic, wire_of(selection), rate, id, timeout)

    @spelled_out(DeadSelectionKeywords)
    async def dead_delete_matching(
        self,
        topic: str,
        *,
        rate: float | None = None,
        id: str | None = None,  # noqa: A002  # the name of the published surface
        timeout: Duration | None = None,
        **selection: Unpack[DeadSelectionKeywords],
    ) -> BulkInfo:
        """Delete all dead letters that match, for good."""
        refuse_unknown(selection, DeadSelectionKeywords, "Client.dead_delete_matching")
        return await self._make("delete", topic, wire_of(selection), rate, id, timeout)

    async def _make(
        self,
        kind: str,
        topic: str,
        options: dict[str, Any],
        rate: float | None,
        name: str | None,
        timeout: Duration | None,
    ) -> BulkInfo:
        until_s = self._until(timeout)
        checked, _ = self._names(topic, None)
        if rate is not None:
            options["rate"] = rate_wire(rate)
        # It has its id here, so that asking again after a lost answer makes no second one.
        own = f"{kind}-{os.urandom(6).hex()}" if name is None else self._checker.name(name, "id")
        options["id"] = own
        answer = await self._calls.call(
            FrameType.BULK_MAKE, checked, kind, options, until_s=until_s
        )
        return read(BulkInfo.of, answer)

    @spelled_out(AnySelectionKeywords)
    async def preview_matching(
        self,
        kind: str,
        topic: str,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        shift: Duration | None = None,
        timeout: Duration | None = None,
        **selection: Unpack[AnySelectionKeywords],
    ) -> BulkPreview:
        """What a bulk operation of this kind ("cancel", "reschedule", "run_now", "requeue",
        "delete") would do now: nothing is changed. A large topic is looked through in parts
        (``timeout``: of each)."""
        refuse_unknown(selection, AnySelectionKeywords, "Client.preview_matching")
        checked, _ = self._names(topic, None)
        options = wire_of(selection) | moved_wire(delay, at, shift)
        found: BulkPreview | None = None
        while True:
            until_s = self._until(timeout)
            answer = await self._calls.call(
                FrameType.BULK_PREVIEW, checked, kind, options, prompt=False, until_s=until_s
            )
            part = read(BulkPreview.of, answer)
            found = part if found is None else found.and_then(part)
            following = read(lambda raw: raw["next"], answer)
            if following is None:
                return found
            options |= {"after": following}
            options |= {name: answer[name] for name in ("until_id", "until_ms")}

    async def list_bulk(
        self,
        *,
        topic: str | None = None,
        state: BulkState | None = None,
        limit: int | None = None,
        timeout: Duration | None = None,
    ) -> AsyncIterator[BulkInfo]:
        """The newest first; of ``state`` "running", "done", "cancelled" or "failed"; page by page
        (``timeout``: of each page)."""
        options = {"topic": topic, "state": state}
        async for one in self._pages(FrameType.BULK_LIST, options, "bulk", limit, timeout):
            yield read(BulkInfo.of, one)

    async def show_bulk(self, bulk: str, *, timeout: Duration | None = None) -> BulkInfo:
        """One bulk operation, and how far it is. Raises NotFound."""
        return await self._one(bulk, "show", timeout)

    async def cancel_bulk(self, bulk: str, *, timeout: Duration | None = None) -> BulkInfo:
        """It changes nothing more; what it has changed stays. Once more is harmless. Raises
        NotFound."""
        return await self._one(bulk, "cancel", timeout)

    async def wait_bulk(self, bulk: str, *, timeout: Duration | None = None) -> BulkInfo:
        """The bulk operation when it is over. Raises NotFound, and SendTimeout if it is not after
        ``timeout``."""
        loop = asyncio.get_running_loop()
        until_s = None if timeout is None else loop.time() + seconds(timeout, "timeout")
        while True:
            found = await self.show_bulk(bulk)
            if found.is_over:
                return found
            if until_s is not None and loop.time() >= until_s:
                raise SendTimeout(
                    f"bulk operation {bulk} goes on: it has changed {found.changed} tasks so far"
                )
            await asyncio.sleep(LOOK_S)

    async def _one(self, bulk: str, verb: str, timeout: Duration | None) -> BulkInfo:
        until_s = self._until(timeout)
        name = self._checker.name(bulk, "bulk")
        return read(
            BulkInfo.of, await self._calls.call(FrameType.BULK, name, verb, until_s=until_s)
        )


def moved_wire(
    delay: Duration | None, at: datetime | None, shift: Duration | None
) -> dict[str, int]:
    """The fields that say where tasks are moved to, as far as given."""
    found: dict[str, int] = {}
    if delay is not None:
        found["delay_ms"] = duration_ms(delay, "delay")
    if at is not None:
        found["due_ms"] = moment_ms(at, "at")
    if shift is not None:
        found["shift_ms"] = _signed_ms(shift)
    return found


def _signed_ms(shift: Any) -> int:
    is_number = isinstance(shift, (int, float)) and not isinstance(shift, bool)
    if is_number and shift < 0:
        return -duration_ms(-shift, "shift")
    if isinstance(shift, timedelta) and shift < timedelta():
        return -duration_ms(-shift, "shift")
    return duration_ms(shift, "shift")


def rate_wire(value: Any) -> float:
    """A checked rate: changes a second."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise BadRequest(f"rate must be a number above 0 (changes a second), not {shown(value)}")
    return float(value)
