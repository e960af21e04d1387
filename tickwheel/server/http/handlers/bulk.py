"""Bulk operations: what is done to everything of a topic that matches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tickwheel.errors import BadRequest, shown
from tickwheel.server.http import types
from tickwheel.server.http.declared import read_id
from tickwheel.server.http.encode import as_json

if TYPE_CHECKING:
    from tickwheel.server.http.call import Call

_make = msgspec.json.Decoder(types.BulkIn)
_try = msgspec.json.Decoder(types.BulkTrial)


class Bulks:
    """The requests about bulk operations."""

    async def make_bulk(self, call: Call) -> None:
        """Make a bulk operation, whose steps begin in the background."""
        given = await call.json(_make)
        caller, operations, now = call.exchange.caller, call.operations, call.now
        answer = await call.exchange.ask(
            lambda number: operations.make_bulk(
                caller, number, given.topic, given.kind, _options(given), now
            )
        )
        await call.answer(answer)

    async def preview_bulk(self, call: Call) -> None:
        """Answer what a bulk operation would do, and change nothing."""
        given = await call.json(_try)
        options = _options(given)
        if given.after is not None:
            task_id, slash, group = given.after.partition("/")
            if not slash:
                raise BadRequest(f"after must be next of an answer, not {shown(given.after)}")
            options["after"] = read_id(task_id, "after"), group
        if given.until_id is not None:
            options["until_id"] = read_id(given.until_id, "until_id")
        caller, operations, now = call.exchange.caller, call.operations, call.now
        answer = await call.exchange.ask(
            lambda number: operations.preview_bulk(
                caller, number, given.topic, given.kind, options, now
            ),
            render=_preview,
        )
        await call.answer(answer)

    async def list_bulk(self, call: Call) -> None:
        """Answer a page of bulk operations."""
        given = call.query(types.BulkPage)
        caller, operations = call.exchange.caller, call.operations
        options = _options(given, ())
        answer = await call.exchange.ask(
            lambda number: operations.list_bulk(caller, number, options)
        )
        await call.answer(answer)

    async def show_bulk(self, call: Call) -> None:
        """Answer how far a bulk operation is."""
        caller, operations = call.exchange.caller, call.operations
        answer = await call.exchange.ask(
            lambda number: operations.show_bulk(caller, number, call.named["bulk"])
        )
        await call.answer(answer)

    async def cancel_bulk(self, call: Call) -> None:
        """Cancel a bulk operation, which changes nothing more."""
        caller, operations, now = call.exchange.caller, call.operations, call.now
        answer = await call.exchange.ask(
            lambda number: operations.cancel_bulk(caller, number, call.named["bulk"], now)
        )
        await call.answer(answer)


def _options(given: msgspec.Struct, but: tuple[str, ...] = ("kind", "topic")) -> dict[str, Any]:
    """The fields of a request, ``but`` those that an operation has as arguments of their own."""
    found = {name: getattr(given, name) for name in given.__struct_fields__ if name not in but}
    return {name: value for name, value in found.items() if value is not None}


def _preview(found: dict[str, Any]) -> bytes:
    place = found["next"]
    said = {
        "examples": [str(task_id) for task_id in found["examples"]],
        "until_id": str(found["until_id"]),
        "next": None if place is None else f"{place[0]}/{place[1]}",
    }
    return as_json(found | said)
