"""Requests about topics, groups and limits whose paths no declaration has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from tickwheel.api.groups import Settings
from tickwheel.errors import NotFound
from tickwheel.server.http import types
from tickwheel.server.http.declared import of_json, request_type
from tickwheel.server.http.encode import as_json

if TYPE_CHECKING:
    from tickwheel.server.http.call import Call

_reset = msgspec.json.Decoder(types.ResetIn)
_reset_trial = msgspec.json.Decoder(types.ResetTrial)
_settings = msgspec.json.Decoder(request_type(Settings, frozenset(("topic", "group"))))


class Listing:
    """The requests about topics, groups and limits."""

    async def limits(self, call: Call) -> None:
        """Answer the daemon's limits, as HELLO announces them over TCP."""
        await call.answer(call.operations.limits.to_wire())

    # --- topics ----------------------------------------------------------------------------------

    async def list_groups(self, call: Call) -> None:
        """Answer the groups of a topic."""
        await call.answer({"groups": (await self._topic(call))["groups"]})

    async def show_group(self, call: Call) -> None:
        """Answer one group."""
        groups = (await self._topic(call))["groups"]
        name = call.named["group"]
        if name not in groups:
            raise NotFound(f"topic {call.named['topic']} has no group {name}")
        await call.answer(groups[name])

    @staticmethod
    async def _topic(call: Call) -> dict[str, Any]:
        found: dict[str, Any] = await call.ask("show_topic", {"topic": call.named["topic"]})
        return found

    async def configure_topic(self, call: Call) -> None:
        """Set what holds for a whole topic."""
        given = await call.json(_settings)
        said = {n: v for n in given.__struct_fields__ if (v := getattr(given, n)) is not UNSET}
        named = {n: of_json(Settings.field(n).kind, v, n) for n, v in said.items()}
        await call.answer(await call.ask("configure", {**call.named, **named}))

    async def reset_group(self, call: Call) -> None:
        """Make the bulk operation that resets a group."""
        given = await call.json(_reset)
        named = {"to": given.to, "rate": given.rate, "id": given.id}
        options = {name: value for name, value in named.items() if value is not None}
        caller, operations, now = call.exchange.caller, call.operations, call.now
        answer = await call.exchange.ask(
            lambda number: operations.reset_group(
                caller, number, call.named["topic"], call.named["group"], options, now
            )
        )
        await call.answer(answer)

    async def preview_reset(self, call: Call) -> None:
        """Answer what a reset would give, and give nothing."""
        options = {"to": (await call.json(_reset_trial)).to}
        caller, operations, now = call.exchange.caller, call.operations, call.now
        answer = await call.exchange.ask(
            lambda number: operations.preview_reset(
                caller, number, call.named["topic"], call.named["group"], options, now
            ),
            render=as_json,
        )
        await call.answer(answer)
