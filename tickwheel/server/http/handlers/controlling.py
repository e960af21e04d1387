"""Commands on tasks by id and by key, and dead letters.

A request on one task is answered with the status of its outcome; one on several has a word for each
and is 200 whatever the words are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tickwheel.errors import BadRequest, Conflict, NotFound, TaskGone, shown
from tickwheel.limits import ID_MAX
from tickwheel.server.http import types
from tickwheel.server.http.encode import as_json, dead_view, task_view
from tickwheel.server.http.new_tasks import due_of

if TYPE_CHECKING:
    from tickwheel.server.http.call import Call

_ids = msgspec.json.Decoder(types.IdsIn)
_reschedule = msgspec.json.Decoder(types.RescheduleIn)
_when = msgspec.json.Decoder(types.When)
_dead = msgspec.json.Decoder(types.DeadIn)
_CANCELLED = ("cancelled", "already_cancelled")
_SCHEDULED = ("scheduled",)


def read_id(text: str, field: str) -> int:
    """A task's id in a text. Raises BadRequest."""
    if text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= ID_MAX:
        return int(text)
    raise BadRequest(f"{field} must be a whole number of 0 to {ID_MAX} as text, not {shown(text)}")


def read_ids(texts: Sequence[str]) -> tuple[int, ...]:
    _check_some(texts, "ids")
    return tuple(read_id(text, f"ids[{index}]") for index, text in enumerate(texts))


def _check_some(given: Sequence[object], field: str) -> None:
    if not given:
        raise BadRequest(f"{field} has 0 elements; at least 1 is needed")


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
        task_id = read_id(call.named["id"], "id")
        [task] = await self._look_up(call, (task_id,))
        if task["state"] in ("unknown", "gone"):
            _check(f"task {task_id}", task["state"], ())
        await call.answer(task_view(task))

    async def look_up_many(self, call: Call) -> None:
        """Answer several tasks."""
        ids = read_ids((await call.json(_ids)).ids)
        caller, operations = call.exchange.caller, call.operations
        answer = await call.exchange.ask(
            lambda number: operations.look_up(caller, number, ids),
            render=lambda tasks: as_json({"tasks": [task_view(task) for task in tasks]}),
        )
        await call.answer(answer)

    @staticmethod
    async def _look_up(call: Call, ids: tuple[int, ...]) -> list[dict[str, Any]]:
        caller, operations = call.exchange.caller, call.operations
        found: list[dict[str, Any]] = await call.exchange.ask(
            lambda number: operations.look_up(caller, number, ids)
        )
        return found

    async def cancel(self, call: Call) -> None:
        """Cancel one task."""
        task_id = read_id(call.named["id"], "id")
        [word] = await self._cancel(call, (task_id,))
        _check(f"task {task_id}", word, _CANCELLED)
        await call.answer({"id": str(task_id), "result": word})

    async def cancel_many(self, call: Call) -> None:
        """Cancel several tasks."""
        ids = read_ids((await call.json(_ids)).ids)
        words = await self._cancel(call, ids)
        results = [{"id": str(i), "result": w} for i, w in zip(ids, words, strict=True)]
        await call.answer({"results": results})

    @staticmethod
    async def _cancel(call: Call, ids: tuple[int, ...]) -> list[str]:
        caller, operations = call.exchange.caller, call.operations
        words: list[str] = await call.exchange.ask(
            lambda number: operations.cancel(caller, number, ids)
        )
        return words

    async def reschedule(self, call: Call) -> None:
        """Move one task to another due time."""
        task_id = read_id(call.named["id"], "id")
        given = await call.json(_when)
        [found] = await self._reschedule(call, (task_id,), given)
        await self._moved(call, task_id, found)

    async def reschedule_many(self, call: Call) -> None:
        """Move several tasks to the same due time."""
        given = await call.json(_reschedule)
        ids = read_ids(given.ids)
        await self._all_moved(call, ids, await self._reschedule(call, ids, given))

    @staticmethod
    async def _reschedule(
        call: Call, ids: tuple[int, ...], given: types.When
    ) -> list[tuple[str, int | None]]:
        caller, operations, now = call.exchange.caller, call.operations, call.now
        when = due_of(given, "reschedule")
        items = tuple((task_id, *when) for task_id in ids)
        found: list[tuple[str, int | None]] = await call.exchange.ask(
            lambda number: operations.reschedule(caller, number, items, now)
        )
        return found

    async def run_now(self, call: Call) -> None:
        """Make one task due now."""
        task_id = read_id(call.named["id"], "id")
        [found] = await self._run_now(call, (task_id,))
        await self._moved(call, task_id, found)

    async def run_now_many(self, call: Call) -> None:
        """Make several tasks due now."""
        ids = read_ids((await call.json(_ids)).ids)
        await self._all_moved(call, ids, await self._run_now(call, ids))

    @staticmethod
    async def _run_now(call: Call, ids: tuple[int, ...]) -> list[tuple[str, int | None]]:
        caller, operations, now = call.exchange.caller, call.operations, call.now
        found: list[tuple[str, int | None]] = await call.exchange.ask(
            lambda number: operations.run_now(caller, number, ids, now)
        )
        return found

    @staticmethod
    async def _moved(call: Call, task_id: int, found: tuple[str, int | None]) -> None:
        word, due_ms = found
        _check(f"task {task_id}", word, _SCHEDULED)
        await call.answer({"id": str(task_id), "result": word, "due_ms": due_ms})

    @staticmethod
    async def _all_moved(
        call: Call, ids: Sequence[int], found: Sequence[tuple[str, int | None]]
    ) -> None:
        results = [
            {"id": str(task_id), "result": word, "due_ms": due_ms}
            for task_id, (word, due_ms) in zip(ids, found, strict=True)
        ]
        await call.answer({"results": results})

    # --- by key ----------------------------------------------------------------------------------

    async def look_up_key(self, call: Call) -> None:
        """Answer the tasks of a key."""
        given = call.query(types.KeyQuery)
        caller, operations = call.exchange.caller, call.operations
        options: dict[str, Any] = {"newest": given.newest}
        if given.until_ms is not None:
            options["until_ms"] = given.until_ms
        tasks = await call.exchange.ask(
            lambda number: operations.look_up_key(caller, number, *_named(call), options)
        )
        if not tasks:
            raise NotFound(f"there is no task with the key {shown(call.named['key'])}")
        await call.answer({"tasks": [task_view(task) for task in tasks]})

    async def cancel_key(self, call: Call) -> None:
        """Cancel the tasks of a key."""
        caller, operations = call.exchange.caller, call.operations
        found = await call.exchange.ask(
            lambda number: operations.cancel_key(caller, number, *_named(call))
        )
        await self._of_key(call, [(task_id, word, None) for task_id, word in found])

    async def reschedule_key(self, call: Call) -> None:
        """Move the tasks of a key to another due time."""
        when = due_of(await call.json(_when), "reschedule")
        caller, operations, now = call.exchange.caller, call.operations, call.now
        found = await call.exchange.ask(
            lambda number: operations.reschedule_key(caller, number, *_named(call), *when, now)
        )
        await self._of_key(call, found)

    async def run_now_key(self, call: Call) -> None:
        """Make the tasks of a key due now."""
        caller, operations, now = call.exchange.caller, call.operations, call.now
        found = await call.exchange.ask(
            lambda number: operations.run_now_key(caller, number, *_named(call), now)
        )
        await self._of_key(call, found)

    @staticmethod
    async def _of_key(call: Call, found: Sequence[tuple[int | None, str, int | None]]) -> None:
        if found[0][0] is None:
            raise NotFound(f"there is no task with the key {shown(call.named['key'])}")
        results = [
            {"id": str(task_id), "result": word, "due_ms": due_ms}
            for task_id, word, due_ms in found
        ]
        await call.answer({"results": results})

    # --- dead letters ----------------------------------------------------------------------------

    async def list_dead(self, call: Call) -> None:
        """Answer a page of dead letters."""
        given = call.query(types.DeadQuery)
        options: dict[str, Any] = {
            name: value
            for name in ("topic", "group", "reason", "since_ms", "until_ms", "limit")
            if (value := getattr(given, name)) is not None
        }
        if given.after is not None:
            task_id, _, group = given.after.partition(".")
            options["after"] = (read_id(task_id, "after"), group)
        caller, operations = call.exchange.caller, call.operations
        answer = await call.exchange.ask(
            lambda number: operations.list_dead(caller, number, options), render=_dead_page
        )
        await call.answer(answer)

    async def requeue_dead(self, call: Call) -> None:
        """Requeue dead letters: they are ready again, with failures counted anew."""
        await self._on_dead(call, call.operations.requeue_dead)

    async def delete_dead(self, call: Call) -> None:
        """Delete dead letters for good."""
        await self._on_dead(call, call.operations.delete_dead)

    @staticmethod
    async def _on_dead(call: Call, operation: Any) -> None:
        items = (await call.json(_dead)).items
        _check_some(items, "items")
        pairs = tuple(
            (read_id(item.id, f"items[{index}].id"), item.group) for index, item in enumerate(items)
        )
        caller = call.exchange.caller
        words = await call.exchange.ask(lambda number: operation(caller, number, pairs))
        results = [
            {"id": str(task_id), "result": word}
            for (task_id, _), word in zip(pairs, words, strict=True)
        ]
        await call.answer({"results": results})


def _named(call: Call) -> tuple[str, str]:
    return call.named["topic"], call.named["key"]


def _dead_page(page: dict[str, Any]) -> bytes:
    after = page["next"]
    return as_json(
        {
            "dead": [dead_view(letter) for letter in page["dead"]],
            "next": None if after is None else f"{after[0]}.{after[1]}",
        }
    )
