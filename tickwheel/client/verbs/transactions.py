"""The verbs of transactions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from tickwheel.api.frames import FrameType
from tickwheel.api.times import Duration
from tickwheel.api.words import CountFrom, TransactionState
from tickwheel.client.results import read
from tickwheel.client.transactions import CheckHandler, Checks, Transaction, TransactionInfo
from tickwheel.client.verbs.base import Verbs
from tickwheel.errors import BadRequest, shown

H = TypeVar("H", bound=CheckHandler)


class TransactionVerbs(Verbs):
    """Make transactions, answer for them, look at them and decide them."""

    _checks: Checks

    def transaction(
        self,
        group: str,
        *,
        id: str | None = None,  # noqa: A002  # the name of the published surface
        count_from: CountFrom = "enqueue",
    ) -> Transaction:
        """A transaction of the producer group ``group``, to be used in a ``with`` block.

        ``id``: its name; yours for ever, so do not use one twice (default: a random one).
        ``count_from``: what the delays of its tasks count from, "enqueue" or "commit"."""
        self._ready()
        return Transaction(self, self._checks, group, id, count_from)

    def on_check(self, group: str) -> Callable[[H], H]:
        """``@client.on_check("payments")``: the function is asked about transactions of the
        producer group that nobody has decided in time, with a Check; it returns "commit",
        "rollback", or "unknown" to be asked again. Any member of the group may be asked."""
        name = self._checker.name(group, "group")

        def register(handler: H) -> H:
            if not callable(handler):
                raise BadRequest(f"a handler of checks must be a function, not {shown(handler)}")
            self._checks.register(name, handler)
            return handler

        return register

    async def list_transactions(
        self,
        *,
        group: str | None = None,
        state: TransactionState | None = None,
        limit: int | None = None,
        timeout: Duration | None = None,
    ) -> AsyncIterator[TransactionInfo]:
        """Those that are not decided, or those in ``state`` ("open", "parked", "committed",
        "rolled_back"), by name; page by page (``timeout``: of each page)."""
        options = {"group": group, "state": state}
        pages = self._pages(FrameType.TRANSACTION_LIST, options, "transactions", limit, timeout)
        async for one in pages:
            yield read(TransactionInfo.of, one)

    async def show_transaction(
        self, transaction: str, *, timeout: Duration | None = None
    ) -> TransactionInfo:
        """One, with its half tasks. Raises UnknownTransaction."""
        until_s = self._until(timeout)
        answer = await self._calls.call(FrameType.TRANSACTION_SHOW, transaction, until_s=until_s)
        return read(TransactionInfo.of, answer)

    async def commit_transaction(
        self, transaction: str, *, timeout: Duration | None = None
    ) -> list[int]:
        """Decide one by its name: its half tasks are tasks; their ids. Once more gives the same.
        Raises UnknownTransaction, TransactionRolledBack."""
        until_s = self._until(timeout)
        answer = await self._calls.call(FrameType.COMMIT, transaction, until_s=until_s)
        return read(lambda raw: list(map(int, raw[1])), answer)

    async def rollback_transaction(
        self, transaction: str, *, timeout: Duration | None = None
    ) -> None:
        """Decide one by its name: none of its tasks ever was. Once more is harmless. Raises
        UnknownTransaction, TransactionCommitted."""
        until_s = self._until(timeout)
        await self._calls.call(FrameType.ROLLBACK, transaction, until_s=until_s)
