"""Restores: begun, looked at, cancelled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tickwheel.server.http import types
from tickwheel.server.http.handlers.controlling import read_id

if TYPE_CHECKING:
    from tickwheel.server.http.call import Call

_restore = msgspec.json.Decoder(types.RestoreIn)
_OPTIONS = ("history", "include_overdue", "allow_missing_bodies", "dry_run")


class Restoring:
    """The requests about restores."""

    async def restore(self, call: Call) -> None:
        """Begin a restore; answered when it is under way."""
        given = await call.json(_restore)
        options: dict[str, Any] = {name: getattr(given, name) for name in _OPTIONS}
        if given.ids is not None:
            options["ids"] = tuple(
                read_id(text, f"ids[{index}]") for index, text in enumerate(given.ids)
            )
        caller, operations = call.exchange.caller, call.operations
        found = await call.exchange.ask(
            lambda n: operations.restore(caller, n, given.into, given.backup, options)
        )
        await call.answer(_view(found))

    async def list_restores(self, call: Call) -> None:
        """Answer the restores that are remembered."""
        caller, operations = call.exchange.caller, call.operations
        found = await call.exchange.ask(lambda n: operations.list_restores(caller, n))
        await call.answer({"restores": [_view(one) for one in found["restores"]]})

    async def show_restore(self, call: Call) -> None:
        """Answer how far a restore is, or how it ended."""
        named = read_id(call.named["id"], "id")
        caller, operations = call.exchange.caller, call.operations
        found = await call.exchange.ask(lambda n: operations.show_restore(caller, n, named))
        await call.answer(_view(found))

    async def cancel_restore(self, call: Call) -> None:
        """Cancel a restore; answered when it has ended."""
        named = read_id(call.named["id"], "id")
        caller, operations = call.exchange.caller, call.operations
        found = await call.exchange.ask(lambda n: operations.cancel_restore(caller, n, named))
        await call.answer(_view(found))


def _view(restore: dict[str, Any]) -> dict[str, Any]:
    return restore | {"id": str(restore["id"])}
