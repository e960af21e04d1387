"""Transactions, as operators see and decide them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tickwheel.model.records import ID_STEP
from tickwheel.server.http import types
from tickwheel.server.http.encode import as_json

if TYPE_CHECKING:
    from tickwheel.server.http.call import Call


class Transacting:
    """The requests about transactions."""

    async def list_transactions(self, call: Call) -> None:
        """Answer a page of transactions."""
        given = call.query(types.TransactionPage)
        named = {"after": given.after, "group": given.group, "state": given.state}
        options: dict[str, Any] = {n: value for n, value in named.items() if value is not None}
        options["limit"] = given.limit
        caller, operations = call.exchange.caller, call.operations
        answer = await call.exchange.ask(
            lambda number: operations.list_transactions(caller, number, options), render=_page
        )
        await call.answer(answer)

    async def show_transaction(self, call: Call) -> None:
        """Answer a transaction with its half tasks."""
        caller, operations = call.exchange.caller, call.operations
        answer = await call.exchange.ask(
            lambda number: operations.show_transaction(caller, number, call.named["name"]),
            render=_view,
        )
        await call.answer(answer)

    async def commit_transaction(self, call: Call) -> None:
        """Commit a transaction: its half tasks become tasks."""
        caller, operations, now = call.exchange.caller, call.operations, call.now
        found = await call.exchange.ask(
            lambda number: operations.commit_transaction(caller, number, call.named["name"], now)
        )
        await self._decided(call, found)

    async def rollback_transaction(self, call: Call) -> None:
        """Roll a transaction back: its half tasks are dropped."""
        caller, operations, now = call.exchange.caller, call.operations, call.now
        found = await call.exchange.ask(
            lambda number: operations.rollback_transaction(caller, number, call.named["name"], now)
        )
        await self._decided(call, found)

    @staticmethod
    async def _decided(call: Call, found: Any) -> None:
        """Answer a decision. The first answer of a rollback has no list of ids, but a count."""
        ids = found[1]
        if isinstance(ids, int):
            ids = range(ids, ids + found[2] * ID_STEP, ID_STEP)
        await call.answer({"ids": [str(task_id) for task_id in ids]})


def _view(transaction: dict[str, Any]) -> dict[str, Any]:
    first_id = transaction["first_id"]
    return transaction | {"first_id": None if first_id is None else str(first_id)}


def _page(page: dict[str, Any]) -> bytes:
    found = [_view(transaction) for transaction in page["transactions"]]
    return as_json({"transactions": found, "next": page["next"]})
