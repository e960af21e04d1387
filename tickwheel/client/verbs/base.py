"""What the verbs of a client rest on: that it is open, and how they ask the daemon.

Knows no verb. ``Client`` fills in what is only declared here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tickwheel.api.times import Duration, seconds
from tickwheel.client.results import read
from tickwheel.errors import BadRequest, ProtocolError, shown
from tickwheel.limits import ID_MAX

if TYPE_CHECKING:
    from tickwheel.api.frames import FrameType
    from tickwheel.client.reconnector import Reconnector
    from tickwheel.client.requests import Calls
    from tickwheel.client.tasks import TaskChecker

PAGE = 1000

T = TypeVar("T")


class Verbs:
    """A part of the client that asks the daemon."""

    _calls: Calls
    _checker: TaskChecker
    _reconnector: Reconnector
    _state: str

    def _ready(self) -> None:
        """Let a new client begin to connect. Raises ClientClosed."""
        raise NotImplementedError

    def _until(self, timeout: Duration | None) -> float | None:
        """When a call's own time is over, by the loop's clock; None: it has none."""
        self._ready()
        if timeout is None:
            return None
        return self._reconnector.loop.time() + seconds(timeout, "timeout")

    def _names(
        self, topic: str, group: str | None, *, group_needed: bool = False
    ) -> tuple[str, str | None]:
        self._ready()
        topic = self._checker.name(topic, "topic")
        if group is None and not group_needed:
            return topic, None
        return topic, self._checker.name(group, "group")

    async def _each(
        self,
        kind: FrameType,
        items: Sequence[Any],
        parse: Callable[[Any], T],
        timeout: Duration | None = None,
    ) -> list[T]:
        until_s = self._until(timeout)
        found: list[T] = []
        step = self._reconnector.limits.ids_per_frame_max
        for start in range(0, len(items), step):
            some = items[start : start + step]
            found += list_of(await self._calls.call(kind, some, until_s=until_s), len(some), parse)
        return found

    async def _pages(
        self,
        kind: FrameType,
        options: Mapping[str, Any],
        field: str,
        limit: int | None,
        timeout: Duration | None = None,
    ) -> AsyncIterator[Any]:
        """The items of a listing, page by page; ``timeout`` is for each page."""
        self._ready()
        if limit is not None and (type(limit) is not int or limit < 1):
            raise BadRequest(f"limit must be an integer of 1 or more, not {shown(limit)}")
        asked = {name: value for name, value in options.items() if value is not None}
        left = limit
        while left is None or left > 0:
            asked["limit"] = PAGE if left is None else min(left, PAGE)
            until_s = self._until(timeout)
            answer = await self._calls.call(kind, asked, prompt=False, until_s=until_s)
            items, following = read(lambda raw: (tuple(raw[field]), raw["next"]), answer)
            for item in items:
                yield item
            if following is None:
                return
            if left is not None:
                left -= len(items)
            asked["after"] = following


def list_of(answer: Any, count: int, parse: Callable[[Any], T]) -> list[T]:
    if not isinstance(answer, tuple) or len(answer) != count:
        raise ProtocolError(f"the daemon's answer is no list of {count}: {answer!r:.100}")
    return [read(parse, item) for item in answer]


def checked_id(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= ID_MAX:
        raise BadRequest(f"id must be an integer of 0 to {ID_MAX}, not {shown(value)}")
    return value


def checked_ids(values: Iterable[int]) -> list[int]:
    return [checked_id(value) for value in values]
