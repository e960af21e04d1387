"""Recurring schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tickwheel.model.records import ID_STEP
from tickwheel.server.http import types
from tickwheel.server.http.encode import as_json, schedule_view
from tickwheel.server.http.new_tasks import body_of, policy

if TYPE_CHECKING:
    from tickwheel.server.http.call import Call

_put = msgspec.json.Decoder(types.ScheduleIn)
_backfill = msgspec.json.Decoder(types.BackfillIn)
_PLAIN = (
    "cron", "timezone", "every_ms", "anchor_ms", "jitter_ms", "start_ms", "end_ms", "runs_max",
    "gap", "fold", "catch_up", "catch_up_ms", "overlap",
)  # fmt: skip


class Scheduling:
    """The requests about schedules."""

    async def put_schedule(self, call: Call) -> None:
        """Make or change a schedule; 201 when it is new."""
        options = _options(await call.json(_put))
        caller, operations, now = call.exchange.caller, call.operations, call.now
        found = await call.exchange.ask(
            lambda number: operations.put_schedule(
                caller, number, call.named["name"], options, now
            ),
            render=schedule_view,
        )
        await call.answer(found, 201 if found["outcome"] == "created" else 200)

    async def list_schedules(self, call: Call) -> None:
        """Answer a page of schedules."""
        given = call.query(types.NamePage)
        options = {"after": given.after, "limit": given.limit}
        caller, operations = call.exchange.caller, call.operations
        answer = await call.exchange.ask(
            lambda number: operations.list_schedules(caller, number, options), render=_page
        )
        await call.answer(answer)

    async def show_schedule(self, call: Call) -> None:
        """Answer a schedule with its next planned times and its newest runs."""
        options = {"next": call.query(types.NextQuery).next}
        caller, operations, now = call.exchange.caller, call.operations, call.now
        await self._answer(
            call,
            lambda number: operations.show_schedule(
                caller, number, call.named["name"], options, now
            ),
        )

    async def pause_schedule(self, call: Call) -> None:
        """Pause a schedule, which fires nothing until it is resumed."""
        await self._pause(call, paused=True)

    async def resume_schedule(self, call: Call) -> None:
        """Resume a schedule."""
        await self._pause(call, paused=False)

    async def _pause(self, call: Call, *, paused: bool) -> None:
        caller, operations = call.exchange.caller, call.operations
        await self._answer(
            call,
            lambda number: operations.pause_schedule(
                caller, number, call.named["name"], paused=paused
            ),
        )

    async def delete_schedule(self, call: Call) -> None:
        """Delete a schedule; its tasks stay."""
        caller, operations = call.exchange.caller, call.operations
        await self._answer(
            call, lambda number: operations.delete_schedule(caller, number, call.named["name"])
        )

    @staticmethod
    async def _answer(call: Call, act: Any) -> None:
        await call.answer(await call.exchange.ask(act, render=schedule_view))

    async def run_schedule(self, call: Call) -> None:
        """Make a task of a schedule at once."""
        caller, operations, now = call.exchange.caller, call.operations, call.now
        await self._ids(
            call, lambda number: operations.run_schedule(caller, number, call.named["name"], now)
        )

    async def backfill_schedule(self, call: Call) -> None:
        """Make a task for each occurrence of a time that is over."""
        given = await call.json(_backfill)
        options = {"from_ms": given.from_ms, "to_ms": given.to_ms}
        caller, operations, now = call.exchange.caller, call.operations, call.now
        await self._ids(
            call,
            lambda number: operations.backfill_schedule(
                caller, number, call.named["name"], options, now
            ),
        )

    @staticmethod
    async def _ids(call: Call, act: Any) -> None:
        _, first, count = await call.exchange.ask(act)
        ids = range(first, first + count * ID_STEP, ID_STEP)
        await call.answer({"ids": [str(task_id) for task_id in ids]})


def _options(given: types.ScheduleIn) -> dict[str, Any]:
    options: dict[str, Any] = {"topic": given.topic, "body": body_of(given, "schedule")}
    options |= {n: v for n in _PLAIN if (v := getattr(given, n)) is not None}
    if given.task is not None:
        task = {
            "key": given.task.key,
            "tag": given.task.tag,
            "properties": given.task.properties,
            "priority": given.task.priority,
            "ttl_ms": given.task.ttl_ms,
            "retry": policy(given.task.retry),
            "within_ms": given.task.within_ms,
            "order_key": given.task.order_key,
        }
        options["task"] = {name: value for name, value in task.items() if value is not None}
    return options


def _page(page: dict[str, Any]) -> bytes:
    found = [schedule_view(schedule) for schedule in page["schedules"]]
    return as_json({"schedules": found, "next": page["next"]})
