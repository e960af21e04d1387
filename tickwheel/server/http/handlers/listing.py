"""Requests about topics, groups and limits whose paths no declaration has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from tickwheel.api.groups import Settings
from tickwheel.errors import NotFound
from tickwheel.server.http.declared import of_json, request_type

if TYPE_CHECKING:
    from tickwheel.server.http.call import Call

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
