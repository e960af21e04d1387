"""The verbs of resets: a group is given again what came due since a moment."""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any

from tickwheel.api.frames import FrameType
from tickwheel.api.times import Duration, moment_ms
from tickwheel.client.bulk import BulkInfo, ResetPreview
from tickwheel.client.results import read
from tickwheel.client.verbs.base import Verbs
from tickwheel.client.verbs.bulk import rate_wire
from tickwheel.errors import BadRequest, shown

FIRST = "first"


class ResetVerbs(Verbs):
    """Reset a group, or see what that would give it."""

    async def reset_group(
        self,
        topic: str,
        group: str,
        *,
        to: datetime | str,
        rate: float | None = None,
        id: str | None = None,  # noqa: A002  # the name of the published surface
        timeout: Duration | None = None,
    ) -> BulkInfo:
        """Give the group again what came due since ``to`` (a moment, or "first": all that is known)
        and that it has finished, or was never owed; at ``rate`` tasks a second at most.

        A bulk operation: durable when it returns, done in the background (``wait_bulk``). Each task
        comes as one of its own, of which ``Delivery.replay_of`` is the former's id. Other groups
        notice nothing. Raises NotFound, Conflict when the group is being reset already, Overloaded.
        """
        until_s = self._until(timeout)
        options: dict[str, Any] = {"to": _to(to)}
        names = self._names(topic, group, group_needed=True)
        if rate is not None:
            options["rate"] = rate_wire(rate)
        # It has its id here, so that asking again after a lost answer makes no second one.
        own = f"reset-{os.urandom(6).hex()}" if id is None else self._checker.name(id, "id")
        options["id"] = own
        kind = FrameType.GROUP_RESET
        return read(BulkInfo.of, await self._calls.call(kind, *names, options, until_s=until_s))

    async def preview_reset(
        self,
        topic: str,
        group: str,
        *,
        to: datetime | str,
        timeout: Duration | None = None,
    ) -> ResetPreview:
        """What a reset to that moment would give now; nothing is given. The whole history is
        looked through. Raises NotFound, Overloaded."""
        until_s, options = self._until(timeout), {"to": _to(to)}
        names = self._names(topic, group, group_needed=True)
        kind = FrameType.GROUP_RESET_PREVIEW
        answer = await self._calls.call(kind, *names, options, prompt=False, until_s=until_s)
        return read(ResetPreview.of, answer)


def _to(moment: Any) -> str | int:
    if isinstance(moment, datetime):
        return moment_ms(moment, "to")
    if moment != FIRST:
        raise BadRequest(f"to must be 'first' or a datetime, not {shown(moment)}")
    return FIRST
