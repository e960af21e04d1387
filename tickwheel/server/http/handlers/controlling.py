"""Commands on tasks by id and by key, and on dead letters: requests whose forms no declaration has.

A request on one task is answered with the status of its outcome; one on several has a word for each
and is 200 whatever the words are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tickwheel.api.tasks import KeyLookUp, TaskIds, TaskInfo
from tickwheel.errors import BadRequest, Conflict, NotFound, TaskGone, shown
from tickwheel.server.http import types
from tickwheel.server.http.declared import (
    answer_type,
    read_id,
    read_ids,
    request_type,
    results,
    to_json,
)
from tickwheel.server.http.encode import as_json
from tickwheel.server.http.new_tasks import due_of

if TYPE_CHECKING:
    from tickwheel.server.http.call import Call

IDS_TYPE = request_type(TaskIds, frozenset())
KEY_QUERY_TYPE = request_type(KeyLookUp, frozenset(("topic", "key")))
TASKS_TYPE = msgspec.defstruct("TaskList", [("tasks", list[answer_type(TaskInfo)])])  # type: ignore[misc]
_ids = msgspec.json.Decoder(IDS_TYPE)
_reschedule = msgspec.json.Decoder(types.RescheduleIn)
_when = msgspec.json.Decoder(types.When)
_dead = msgspec.json.Decoder(types.DeadIn)
_CANCELLED = ("cancelled", "already_cancelled")
_SCHEDULED = ("scheduled",)


def _check(name: str, word: str, good: Sequence[str]) -> None:
    """Raises the error that the word means for a request about one task only."""
    if word in good:
        return
    if word == "unknown":
        raise NotFound(f"there is no {name}")
    if word == "gone":
        raise TaskGone(f"{name} finished so long ago that how it ended is no longer known")
    raise Conflict(f"{name} is {word}")


class Controlling:
    """The requests about tasks and dead letters."""

    # --- by id -----------------------------------------------------------------------------------

    async def look_up(self, call: Call) -> None:
        """Answer one task."""
        ids = _one(call)
        [task] = await call.ask("look_up", {"ids": ids})
        if task["state"] in ("unknown", "gone"):
            _check(f"task {ids[0]}", task["state"], ())
        await call.answer(to_json(TaskInfo, task))

    async def look_up_many(self, call: Call) -> None:
        """Answer several tasks."""
        said = {"ids": await _several(call)}
        await call.answer(await call.ask("look_up", said, _tasks))

    async def cancel(self, call: Call) -> None:
        """Cancel one task."""
        await self._done(call, "cancel", _CANCELLED)

    async def run_now(self, call: Call) -> None:
        """Make one task due now."""
        await self._done(call, "run_now", _SCHEDULED)

    async def _done(self, call: Call, command: str, good: Sequence[str]) -> None:
        """Do a command to the task that the path names."""
        ids = _one(call)
        await _answer_one(call, ids[0], await call.ask(command, {"ids": ids}), good)

    async def cancel_many(self, call: Call) -> None:
        """Cancel several tasks."""
        await self._all_done(call, "cancel")

    async def run_now_many(self, call: Call) -> None:
        """Make several tasks due now."""
        await self._all_done(call, "run_now")

    async def _all_done(self, call: Call, command: str) -> None:
        """Do a command to the tasks that the body names."""
        ids = await _several(call)
        await _answer_all(call, ids, await call.ask(command, {"ids": ids}))

    async def reschedule(self, call: Call) -> None:
        """Move one task to another due time."""
        ids = _one(call)
        when = due_of(await call.json(_when), "reschedule")
        outcomes = await call.ask("reschedule", {"items": ((*ids, *when),)})
        await _answer_one(call, ids[0], outcomes, _SCHEDULED)

    async def reschedule_many(self, call: Call) -> None:
        """Move several tasks to the same due time."""
        body = await call.json(_reschedule)
        ids, when = read_ids(body.ids), due_of(body, "reschedule")
        items = tuple((task_id, *when) for task_id in ids)
        await _answer_all(call, ids, await call.ask("reschedule", {"items": items}))

    # --- by key ----------------------------------------------------------------------------------

    async def look_up_key(self, call: Call) -> None:
        """Answer the tasks of a key."""
        query = call.query(KEY_QUERY_TYPE)
        said = {name: getattr(query, name) for name in query.__struct_fields__}
        said = {name: value for name, value in said.items() if value is not msgspec.UNSET}
        tasks = await call.ask("look_up_key", call.named | said)
        if not tasks:
            raise _no_task(call)
        await call.answer(_tasks(tasks))

    async def cancel_key(self, call: Call) -> None:
        """Cancel the tasks of a key."""
        await self._of_key(call, await call.ask("cancel_key", call.named))

    async def reschedule_key(self, call: Call) -> None:
        """Move the tasks of a key to another due time."""
        delay_ms, due_ms = due_of(await call.json(_when), "reschedule")
        when = {"delay_ms": delay_ms, "due_ms": due_ms}
        await self._of_key(call, await call.ask("reschedule_key", call.named | when))

    async def run_now_key(self, call: Call) -> None:
        """Make the tasks of a key due now."""
        await self._of_key(call, await call.ask("run_now_key", call.named))

    @staticmethod
    async def _of_key(call: Call, outcomes: Sequence[Any]) -> None:
        if outcomes[0][0] is None:
            raise _no_task(call)
        await call.answer(results(outcomes))

    # --- dead letters ----------------------------------------------------------------------------

    async def requeue_dead(self, call: Call) -> None:
        """Requeue dead letters: they are ready again, with failures counted anew."""
        await self._on_dead(call, "requeue_dead")

    async def delete_dead(self, call: Call) -> None:
        """Delete dead letters for good."""
        await self._on_dead(call, "delete_dead")

    @staticmethod
    async def _on_dead(call: Call, command: str) -> None:
        items = (await call.json(_dead)).items
        if not items:
            raise BadRequest("items has 0 elements; name at least one")
        pairs = tuple(
            (read_id(item.id, f"items[{index}].id"), item.group) for index, item in enumerate(items)
        )
        words = await call.ask(command, {"pairs": pairs})
        await _answer_all(call, [pair[0] for pair in pairs], words)


def _one(call: Call) -> tuple[int]:
    return (read_id(call.named["id"], "id"),)


async def _several(call: Call) -> tuple[int, ...]:
    return read_ids((await call.json(_ids)).ids)  # type: ignore[attr-defined]


def _tasks(tasks: Any) -> bytes:
    return as_json({"tasks": to_json(list[TaskInfo], tasks)})


async def _answer_one(
    call: Call, task_id: int, outcomes: Sequence[Any], good: Sequence[str]
) -> None:
    """Answer what became of the one task, or raise what that means."""
    [outcome] = _with_ids((task_id,), outcomes)
    _check(f"task {task_id}", outcome[1], good)
    await call.answer(results([outcome])["results"][0])


async def _answer_all(call: Call, ids: Sequence[int], outcomes: Sequence[Any]) -> None:
    await call.answer(results(_with_ids(ids, outcomes)))


def _with_ids(ids: Sequence[int], outcomes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Each id with its word, or with the word and the due time."""
    return [
        (task_id, outcome) if isinstance(outcome, str) else (task_id, *outcome)
        for task_id, outcome in zip(ids, outcomes, strict=True)
    ]


def _no_task(call: Call) -> NotFound:
    return NotFound(f"there is no task with the key {shown(call.named['key'])}")
