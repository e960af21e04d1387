"""Answers to the daemon's checks of undecided transactions.

``Checks`` has a client's handlers for all links; ``Answers`` answers the checks of one link. No
socket is known here. Invariant: checks of transactions that this client has open are ignored,
because the program is about to decide them; the daemon checks again.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.api.frames import FrameType
from tickwheel.api.times import moment
from tickwheel.client.connection import LOGGER
from tickwheel.client.reconnector import Source
from tickwheel.errors import BadRequest, TickwheelError, shown

if TYPE_CHECKING:
    from tickwheel.client.reconnector import Reconnector
    from tickwheel.client.requests import Calls

CHECKS_AT_A_TIME = 16
"""Maximum checks in handlers at a time."""
CHECKS_MAX = 10_000
"""Maximum waiting checks. The daemon repeats the others."""


class Check(NamedTuple):
    """A check by the daemon: was this transaction committed or rolled back?"""

    transaction: str
    group: str
    began: datetime
    tasks: int
    """The number of its half tasks."""
    number: int
    """The number of this check, from 1."""


Decision = str | None
"""A handler's answer: "commit", "rollback", or "unknown" (or None) to be asked again."""
CheckHandler = Callable[[Check], Decision | Awaitable[Decision]]


class Checks:
    """A client's handlers for undecided transactions, shared by all links."""

    def __init__(self) -> None:
        self.handlers: dict[str, CheckHandler] = {}
        """Producer group → its handler."""
        self.open: dict[str, None] = {}
        """The ids of the client's undecided transactions."""


class Answers(Source):
    """Answers the checks of one shard; a source of the reconnector."""

    def __init__(self, checks: Checks, reconnector: Reconnector, calls: Calls) -> None:
        self._checks = checks
        self._reconnector = reconnector
        self._calls = calls
        self._pending: dict[str, None] = {}
        """The ids of transactions with a waiting or running handler."""
        self._turns = asyncio.Semaphore(CHECKS_AT_A_TIME)

    def check(self, group: str, items: Iterable[Any]) -> None:
        """Handle a CHECK of the daemon."""
        handler, own = self._checks.handlers.get(group), self._checks.open
        if handler is None:
            return
        for name, began_ms, tasks, number in items:
            if name in own or name in self._pending or len(self._pending) >= CHECKS_MAX:
                continue
            self._pending[name] = None
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
            LOGGER.exception("the check handler failed for transaction %s", check.transaction)
        finally:
            self._pending.pop(check.transaction, None)

    async def _decide(self, check: Check, decision: Decision) -> None:
        if decision == "commit":
            await self._calls.call(FrameType.COMMIT, check.transaction)
        elif decision == "rollback":
            await self._calls.call(FrameType.ROLLBACK, check.transaction)
        elif decision not in (None, "unknown"):
            raise BadRequest(
                'a check handler must return "commit", "rollback" or "unknown", not'
                f" {shown(decision)}"
            )

    # --- a source of the reconnector ------------------------------------------------------------

    def up(self) -> None:
        """On a new connection, announce the producer groups that this client answers for."""
        if self._checks.handlers:
            self._reconnector.spawn(self._announce())

    async def _announce(self) -> None:
        try:
            await self._calls.call(FrameType.CHECKS, list(self._checks.handlers))
        except TickwheelError as error:
            LOGGER.warning("this client receives no transaction checks: %s", error.message)
