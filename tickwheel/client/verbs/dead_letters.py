"""The verbs of dead letters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from datetime import datetime
from typing import Any, cast

from tickwheel.api.frames import FrameType
from tickwheel.api.times import Duration, moment_ms
from tickwheel.api.words import DeleteWord, RequeueWord
from tickwheel.client.results import DeadLetter, read
from tickwheel.client.verbs.base import Verbs, checked_id
from tickwheel.errors import BadRequest, shown


class DeadLetterVerbs(Verbs):
    """Look at dead letters, requeue them, delete them."""

    async def dead_list(
        self,
        *,
        topic: str | None = None,
        group: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        reason: str | None = None,
        limit: int | None = None,
        timeout: Duration | None = None,
    ) -> AsyncIterator[DeadLetter]:
        """Dead letters in the order of their ids, at most ``limit``, read page by page: those
        that died at ``since`` or later and before ``until``, with ``reason`` somewhere in the
        text of the last failure (in whatever case). ``timeout``: of each page."""
        options = {
            "topic": topic,
            "group": group,
            "since_ms": None if since is None else moment_ms(since, "since"),
            "until_ms": None if until is None else moment_ms(until, "until"),
            "reason": reason,
        }
        async for letter in self._pages(FrameType.DEAD_LIST, options, "dead", limit, timeout):
            yield read(DeadLetter.of, letter)

    async def dead_requeue(
        self, pairs: Iterable[tuple[int, str]], *, timeout: Duration | None = None
    ) -> list[RequeueWord]:
        """Deliver dead letters, given as (id, group), again: "requeued" or "unknown" for each."""
        words = await self._each(FrameType.DEAD_REQUEUE, _pairs(pairs), str, timeout)
        return cast("list[RequeueWord]", words)

    async def dead_delete(
        self, pairs: Iterable[tuple[int, str]], *, timeout: Duration | None = None
    ) -> list[DeleteWord]:
        """Delete dead letters, given as (id, group): "deleted" or "unknown" for each."""
        words = await self._each(FrameType.DEAD_DELETE, _pairs(pairs), str, timeout)
        return cast("list[DeleteWord]", words)


def _pairs(values: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    return [_pair(value) for value in values]


def _pair(value: Any) -> tuple[int, str]:
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not isinstance(value[1], str):
        raise BadRequest(f"a dead letter is (id, group), not {shown(value)}")
    return checked_id(value[0]), value[1]
