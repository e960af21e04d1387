"""Order keys and fair shares, as operators see and act on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tickwheel.server.http import types
from tickwheel.server.http.handlers.controlling import read_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.server.http.call import Call

_held = msgspec.json.Decoder(types.HeldIn)


class Lining:
    """The requests about order keys and fair shares of a group."""

    async def held_keys(self, call: Call) -> None:
        """Answer the order keys that are held for an operator."""
        operations, caller = call.operations, call.exchange.caller
        options = {"limit": call.query(types.LineQuery).limit}
        found = await call.exchange.ask(
            lambda number: operations.held_keys(caller, number, *_named(call), options)
        )
        await call.answer(found | {"keys": [_view(one) for one in found["keys"]]})

    async def key_lines(self, call: Call) -> None:
        """Answer the order keys and fair-share values with most waiting tasks."""
        operations, caller = call.operations, call.exchange.caller
        options = {"limit": call.query(types.LineQuery).limit}
        found = await call.exchange.ask(
            lambda number: operations.key_lines(caller, number, *_named(call), options)
        )
        await call.answer(found | {"lines": [_view(one) for one in found["lines"]]})

    async def release_key(self, call: Call) -> None:
        """Try the tasks of held order keys again."""
        await self._act(call, call.operations.release_key)

    async def skip_key(self, call: Call) -> None:
        """Make the tasks of held order keys dead letters, so that the keys go on."""
        await self._act(call, call.operations.skip_key)

    @staticmethod
    async def _act(call: Call, verb: Callable[..., None]) -> None:
        given = await call.json(_held)
        ids = None if given.ids is None else read_ids(given.ids)
        caller, names = call.exchange.caller, _named(call)
        found: list[tuple[int | None, str]] = await call.exchange.ask(
            lambda number: verb(caller, number, *names, ids, given.key)
        )
        results = [
            {"id": None if task_id is None else str(task_id), "result": word}
            for task_id, word in found
        ]
        await call.answer({"results": results})


def _named(call: Call) -> tuple[str, str]:
    return call.named["topic"], call.named["group"]


def _view(one: dict[str, Any]) -> dict[str, Any]:
    return one | {"id": str(one["id"])}
