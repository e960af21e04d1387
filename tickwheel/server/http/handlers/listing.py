"""What is there: tasks page by page, counts, topics, groups and their settings, backups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from tickwheel.api.groups import Settings
from tickwheel.errors import NotFound
from tickwheel.server.http import types
from tickwheel.server.http.declared import of_json, request_type
from tickwheel.server.http.encode import as_json, task_view
from tickwheel.server.http.handlers.controlling import read_id
from tickwheel.server.shard.callers import Ask

if TYPE_CHECKING:
    from tickwheel.server.http.call import Call

_reset = msgspec.json.Decoder(types.ResetIn)
_reset_trial = msgspec.json.Decoder(types.ResetTrial)
_settings = msgspec.json.Decoder(request_type(Settings, frozenset(("topic", "group"))))
_backup = msgspec.json.Decoder(types.BackupIn)


class Listing:
    """The requests about lists, counts, topics, groups, settings and backups."""

    async def list_tasks(self, call: Call) -> None:
        """Answer a page of live tasks."""
        given = call.query(types.TasksQuery)
        options: dict[str, Any] = {
            name: value
            for name in (
                "topic", "state", "key", "key_prefix", "tag", "property", "until_ms", "newest",
                "limit",
            )
            if (value := getattr(given, name)) is not None
        }  # fmt: skip
        if given.after is not None:
            options["after"] = read_id(given.after, "after")
        caller, operations = call.exchange.caller, call.operations
        answer = await call.exchange.ask(
            lambda number: operations.list_tasks(caller, number, options), render=_task_page
        )
        await call.answer(answer)

    async def stats(self, call: Call) -> None:
        """Answer the daemon's counts."""
        caller, operations, now = call.exchange.caller, call.operations, call.now
        answer = await call.exchange.ask(
            lambda number: operations.stats(caller, number, now), render=as_json
        )
        await call.answer(answer)

    async def load(self, call: Call) -> None:
        """Answer how many tasks are due when."""
        given = call.query(types.LoadQuery)
        options = {
            name: value
            for name in ("from_ms", "step_ms", "steps")
            if (value := getattr(given, name)) is not None
        }
        caller, operations, now = call.exchange.caller, call.operations, call.now
        answer = await call.exchange.ask(
            lambda number: operations.load(caller, number, options, now), render=as_json
        )
        await call.answer(answer)

    async def status(self, call: Call) -> None:
        """Answer the daemon's status, also as a standby."""
        caller, operations = call.exchange.caller, call.operations
        await call.answer(await call.exchange.ask(lambda n: operations.status(caller, n)))

    async def limits(self, call: Call) -> None:
        """Answer the daemon's limits, as HELLO announces them over TCP."""
        await call.answer(call.operations.limits.to_wire())

    async def backup(self, call: Call) -> None:
        """Copy the store; answered when the copy is whole."""
        given = await call.json(_backup)
        caller, operations = call.exchange.caller, call.operations
        await call.answer(
            await call.exchange.ask(lambda n: operations.backup(caller, n, given.name))
        )

    # --- topics ----------------------------------------------------------------------------------

    async def list_topics(self, call: Call) -> None:
        """Answer a page of topics."""
        given = call.query(types.NamePage)
        options = {"after": given.after, "limit": given.limit}
        caller, operations = call.exchange.caller, call.operations
        answer = await call.exchange.ask(
            lambda number: operations.list_topics(caller, number, options), render=as_json
        )
        await call.answer(answer)

    async def show_topic(self, call: Call) -> None:
        """Answer one topic."""
        await call.answer(await self._topic(call))

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
        caller, operations = call.exchange.caller, call.operations
        found: dict[str, Any] = await call.exchange.ask(
            lambda number: operations.show_topic(caller, number, call.named["topic"])
        )
        return found

    async def configure_topic(self, call: Call) -> None:
        """Set what holds for a whole topic."""
        given = await call.json(_settings)
        said = {n: v for n in given.__struct_fields__ if (v := getattr(given, n)) is not UNSET}
        named = {n: of_json(Settings.field(n).kind, v, n) for n, v in said.items()}
        asked = Settings.checked({**call.named, **named}, call.operations.limits)
        exchange, now = call.exchange, call.now
        answer = await exchange.ask(
            lambda number: call.operations.configure(Ask(exchange.caller, number, asked, now))
        )
        await call.answer(answer)

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


def _task_page(page: dict[str, Any]) -> bytes:
    after = page["next"]
    return as_json(
        {
            "tasks": [task_view(task) for task in page["tasks"]],
            "next": None if after is None else str(after),
        }
    )
