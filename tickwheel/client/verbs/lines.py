"""The verbs of order keys and fair shares: who waits for whom, and held keys let go on."""

from __future__ import annotations

from typing import Any, cast

from tickwheel.api.frames import FrameType
from tickwheel.api.times import Duration
from tickwheel.api.words import ReleaseKeyWord, SkipKeyWord
from tickwheel.client.results import HeldKey, KeyLine, read
from tickwheel.client.verbs.base import Verbs, checked_id
from tickwheel.errors import BadRequest


class LineVerbs(Verbs):
    """What operators ask for about the keys of a group."""

    async def held_keys(
        self, topic: str, group: str, *, limit: int = 100, timeout: Duration | None = None
    ) -> list[HeldKey]:
        """Order keys that are held until an operator acts, the oldest first. Raises NotFound."""
        names = self._names(topic, group, group_needed=True)
        answer = await self._calls.call(
            FrameType.HELD_KEYS, *names, {"limit": limit}, until_s=self._until(timeout)
        )
        return read(lambda raw: [HeldKey.of(one) for one in raw["keys"]], answer)

    async def key_lines(
        self, topic: str, group: str, *, limit: int = 100, timeout: Duration | None = None
    ) -> list[KeyLine]:
        """Order keys, and values that share the group, for whose turn most tasks wait. Raises
        NotFound."""
        names = self._names(topic, group, group_needed=True)
        answer = await self._calls.call(
            FrameType.KEY_LINES, *names, {"limit": limit}, until_s=self._until(timeout)
        )
        return read(lambda raw: [KeyLine.of(one) for one in raw["lines"]], answer)

    async def release_key(
        self,
        topic: str,
        group: str,
        task_id: int | None = None,
        *,
        key: str | None = None,
        timeout: Duration | None = None,
    ) -> ReleaseKeyWord:
        """The task of a held key, by its id or the key, is tried again at once, its failures
        counted anew: "released", or "not_held". Raises NotFound for a group."""
        held = FrameType.RELEASE_KEY, (topic, group), task_id, key, timeout
        return cast("ReleaseKeyWord", await self._of_held(*held))

    async def skip_key(
        self,
        topic: str,
        group: str,
        task_id: int | None = None,
        *,
        key: str | None = None,
        timeout: Duration | None = None,
    ) -> SkipKeyWord:
        """It goes to the dead letters, and its key goes on: "skipped", or "not_held". Raises
        NotFound for a group."""
        held = FrameType.SKIP_KEY, (topic, group), task_id, key, timeout
        return cast("SkipKeyWord", await self._of_held(*held))

    async def _of_held(
        self,
        kind: FrameType,
        named: tuple[str, str],
        task_id: int | None,
        key: str | None,
        timeout: Duration | None,
    ) -> str:
        names = self._names(*named, group_needed=True)
        if (task_id is None) == (key is None):
            raise BadRequest("task_id or key must be given, one of them")
        ids: Any = None if task_id is None else [checked_id(task_id)]
        answer = await self._calls.call(kind, *names, ids, key, until_s=self._until(timeout))
        return read(lambda raw: str(raw[0][1]), answer)
