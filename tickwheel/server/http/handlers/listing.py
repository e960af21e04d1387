"""What is there: tasks page by page, counts, topics, groups and their settings, backups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tickwheel.errors import NotFound
from tickwheel.server.http import types
from tickwheel.server.http.encode import as_json, task_view
from tickwheel.server.http.handlers.controlling import read_id
from tickwheel.server.http.new_tasks import policy
from tickwheel.server.shard.operations.grouping import SETTINGS

if TYPE_CHECKING:
    from tickwheel.server.http.call import Call

_group = msgspec.json.Decoder(types.GroupIn)
_reset = msgspec.json.Decoder(types.ResetIn)
_reset_trial = msgspec.json.Decoder(types.ResetTrial)
_settings = msgspec.json.Decoder(types.SettingsIn)
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
        await self._configure(call, None)

    async def delete_topic(self, call: Call) -> None:
        """Delete a topic with all that it holds."""
        force = call.query(types.ForceQuery).force
        caller, operations, now = call.exchange.caller, call.operations, call.now
        answer = await call.exchange.ask(
            lambda number: operations.delete_topic(caller, number, call.named["topic"], force, now)
        )
        await call.answer(answer)

    async def configure_group(self, call: Call) -> None:
        """Set what holds for one group."""
        await self._configure(call, call.named["group"])

    @staticmethod
    async def _configure(call: Call, group: str | None) -> None:
        settings = _named_settings(await call.json(_settings))
        caller, operations, now = call.exchange.caller, call.operations, call.now
        answer = await call.exchange.ask(
            lambda number: operations.configure(
                caller, number, call.named["topic"], group, settings, now
            )
        )
        await call.answer(answer)

    async def create_group(self, call: Call) -> None:
        """Make a group (201), or answer the settings of an existing one (200)."""
        given = await call.json(_group)
        options = _named_settings(given) | {"since": given.since}
        caller, operations, now = call.exchange.caller, call.operations, call.now
        answer = await call.exchange.ask(
            lambda number: operations.create_group(
                caller, number, call.named["topic"], call.named["group"], options, now
            )
        )
        await call.answer(answer, 201 if answer["created"] else 200)

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

    async def delete_group(self, call: Call) -> None:
        """Delete a group with all that it holds."""
        force = call.query(types.ForceQuery).force
        caller, operations = call.exchange.caller, call.operations
        answer = await call.exchange.ask(
            lambda number: operations.delete_group(
                caller, number, call.named["topic"], call.named["group"], force
            )
        )
        await call.answer(answer)


def _named_settings(given: types.SettingsIn) -> dict[str, Any]:
    """The settings that the request names."""
    found = {name: getattr(given, name) for name in SETTINGS}
    return {k: policy(v) for k, v in found.items() if v is not msgspec.UNSET}


def _task_page(page: dict[str, Any]) -> bytes:
    after = page["next"]
    return as_json(
        {
            "tasks": [task_view(task) for task in page["tasks"]],
            "next": None if after is None else str(after),
        }
    )
