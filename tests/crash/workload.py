"""Traffic of one kind in a torture run, beside that of the others, with its own judge."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from crash.link import Link, Lost, Numbers
from crash.plan import Plan
from support.waiting import rest
from tickwheel.api.frames import FrameType
from tickwheel.api.verbs import VERBS
from tickwheel.client import Client
from tickwheel.errors import TickwheelError
from tickwheel.protocol import Frame

RETRYABLE = {"refused", "overloaded", "draining", "outcome_unknown", "store_full", "not_active"}
TRY_AGAIN_S = 0.03
SHOWN_MAX = 20


class Caller:
    """One who asks until there is an answer; each question may be asked twice. Several shards are
    asked by the real client, which makes one answer of theirs."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._numbers = Numbers()
        self._link: Link | None = None
        self._linking = asyncio.Lock()
        self.resent = 0
        """Number of lost answers of the last request."""

    async def ask(self, kind: FrameType, *fields: Any) -> Frame:
        self.resent = 0
        if self._plan.operator is not None:
            return await self._ask_all(self._plan.operator, kind, fields)
        while True:
            link = await self._up()
            try:
                frame = await link.call(kind, *fields)
            except Lost:
                self.resent += 1
                continue
            if frame[0] == FrameType.OK or frame[2] not in RETRYABLE:
                return frame
            if frame[2] == "outcome_unknown":
                self.resent += 1
            await rest(TRY_AGAIN_S)

    async def _ask_all(self, client: Client, kind: FrameType, fields: tuple[Any, ...]) -> Frame:
        while True:
            try:
                return FrameType.OK, 0, await _answer_of_all(client, kind, fields)
            except TickwheelError as error:
                if not error.retryable:
                    return FrameType.ERROR, 0, error.code, error.message
            self.resent += 1
            await rest(TRY_AGAIN_S)

    async def _up(self) -> Link:
        """The link; of several that ask at once one makes it anew."""
        async with self._linking:
            if self._link is None or self._link.down:
                self._link = await self._plan.link(self._numbers)
            return self._link

    async def get(self, kind: FrameType, *fields: Any) -> Any:
        """What an OK says; there must be one."""
        frame = await self.ask(kind, *fields)
        assert frame[0] == FrameType.OK, frame
        return frame[2]

    @property
    def epoch(self) -> int:
        return 0 if self._link is None else self._link.epoch

    def close(self) -> None:
        if self._link is not None:
            self._link.abort()


async def _answer_of_all(client: Client, kind: FrameType, fields: tuple[Any, ...]) -> Any:
    """What the frame of a verb is answered with, in the form of the wire. Raises TickwheelError."""
    if kind is FrameType.SUBSCRIBE:  # for its group alone
        kind, fields = FrameType.GROUP_CREATE, (*fields[1:3], {})
    verbs = [verb for verb in VERBS.values() if verb.frame is kind]
    if len(verbs) > 1:
        name, word, *more = fields
        verbs, fields = [verb for verb in verbs if verb.word == word], (name, *more)
    (verb,) = verbs
    if not verb.pages:
        return await client._call(verb, fields, None)
    items = client._pages(verb.name, {}, fields[0].get("limit"), None)
    return {verb.pages: [item.raw async for item in items]}


class Workload:
    """``begin`` and ``run``, while ``consumers`` consume; then ``look``, and ``problems``."""

    what: ClassVar[str]
    """What it is about, in a report."""
    settings: ClassVar[dict[str, Any]] = {}
    """Settings of the daemons."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.caller = Caller(plan)
        self.odd: list[str] = []
        """Answers that are wrong by themselves."""
        self.consumers: list[Any] = []

    @property
    def shows_enough(self) -> bool:
        """Return whether the run had enough events to judge."""
        return True

    async def begin(self) -> None:
        """Before anything is killed: its groups are owed every task."""
        raise NotImplementedError

    async def run(self) -> None:
        """Until the last kill; then until all is answered."""
        raise NotImplementedError

    async def look(self) -> None:
        """After everything was consumed."""

    def judge(self) -> list[str]:
        """Return violations, and what the run did not show."""
        raise NotImplementedError

    def text(self) -> str:
        """What the run has seen."""
        raise NotImplementedError

    def problems(self) -> list[str]:
        """The first of them. Call it after ``look``."""
        results = [*self.odd, *self.judge()]
        more = [f"… and {len(results) - SHOWN_MAX} more of {self.what}"]
        return results[:SHOWN_MAX] + (more if len(results) > SHOWN_MAX else [])
