"""The answers to the daemon's questions about transactions that nobody has decided.

``Checks`` is what a client says of them over all of its links; ``Answers`` answers those of one.
Knows no socket. Invariant: a transaction that this client has under way is not asked about, because
its program is about to decide. What the daemon asks about it is left without an answer; it asks
again.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.api.frames import FrameType
from tickwheel.api.times import moment
from tickwheel.client.connection import LOGGER, Connection
from tickwheel.errors import BadRequest, TickwheelError, shown

if TYPE_CHECKING:
    from tickwheel.client.reconnector import Reconnector
    from tickwheel.client.requests import Calls

CHECKS_AT_A_TIME = 16
"""Questions that handlers work on at one time;"""
CHECKS_MAX = 10_000
"""and how many more may wait. Others are asked again by the daemon."""


class Check(NamedTuple):
    """A question: what became of this transaction?"""

    transaction: str
    group: str
    began: datetime
    tasks: int
    """Half tasks that it has."""
    number: int
    """How often it was asked, with this time."""


Decision = str | None
"""What a handler answers: "commit", "rollback", or "unknown" (or None) to be asked again."""
CheckHandler = Callable[[Check], Decision | Awaitable[Decision]]


class Checks:
    """What a client says of transactions that nobody has decided, over all of its links."""

    def __init__(self) -> None:
        self.handlers: dict[str, CheckHandler] = {}
        """Producer group that the client answers for → who is asked."""
        self.under_way: dict[str, None] = {}
        """The ids of the client's undecided transactions."""


class Answers:
    """The answers to the questions of one shard: a reconnector's source."""

    def __init__(self, checks: Checks, reconnector: Reconnector, calls: Calls) -> None:
        self._checks = checks
        self._reconnector = reconnector
        self._calls = calls
        self._asked: dict[str, None] = {}
        """The ids of transactions that a handler works on, or will."""
        self._turns = asyncio.Semaphore(CHECKS_AT_A_TIME)

    def asked(self, group: str, items: Iterable[Any]) -> None:
        """Take a CHECK of the daemon."""
        handler, under_way = self._checks.handlers.get(group), self._checks.under_way
        if handler is None:
            return
        for name, began_ms, tasks, number in items:
            if name in under_way or name in self._asked or len(self._asked) >= CHECKS_MAX:
                continue
            self._asked[name] = None
            check = Check(name, group, moment(began_ms), tasks, number)
            self._reconnector.spawn(self._answer(handler, check))

    async def _answer(self, handler: CheckHandler, check: Check) -> None:
        try:
            async with self._turns:
                decision = handler(check)
                if inspect.isawaitable(decision):
                    decision = await decision
                await self._decide(check, decision)
        except TickwheelError as error:
            LOGGER.warning("transaction %s: %s: %s", check.transaction, error.code, error.message)
        except Exception:
            LOGGER.exception("the handler of checks failed for transaction %s", check.transaction)
        finally:
            self._asked.pop(check.transaction, None)

    async def _decide(self, check: Check, decision: Decision) -> None:
        if decision == "commit":
            await self._calls.call(FrameType.COMMIT, check.transaction)
        elif decision == "rollback":
            await self._calls.call(FrameType.ROLLBACK, check.transaction)
        elif decision not in (None, "unknown"):
            raise BadRequest(
                'a handler of checks must return "commit", "rollback" or "unknown", not'
                f" {shown(decision)}"
            )

    # --- a source of the reconnector ------------------------------------------------------------

    def up(self) -> None:
        """Tell a new connection for which groups this client answers."""
        if self._checks.handlers:
            self._reconnector.spawn(self._say())

    async def _say(self) -> None:
        try:
            await self._calls.call(FrameType.CHECKS, list(self._checks.handlers))
        except TickwheelError as error:
            LOGGER.warning("nobody asks here about transactions: %s", error.message)

    def down(self) -> None:
        """Do nothing: the daemon asks again about what is under way."""

    def collect(self, connection: Connection) -> None:
        """Do nothing: answers are sent as calls."""

    def sweep(self, now_s: float) -> None:
        """Do nothing: nothing waits here."""

    def stop(self, error: TickwheelError) -> None:
        """Do nothing: handlers end with the reconnector."""
