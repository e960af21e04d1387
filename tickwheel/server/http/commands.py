"""Requests about tasks, keys, dead letters, topics and groups whose forms no declaration has; the
overview as a stream, and the page of the last report.

A request on one task is answered with the status of its outcome; one on several has a word for each
and is 200 whatever the words are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from tickwheel.api.groups import Settings
from tickwheel.api.tasks import LookUp, TaskInfo, words_of_success
from tickwheel.errors import (
    BadRequest,
    Conflict,
    ConnectionLost,
    NotFound,
    SlowReader,
    TaskGone,
    TickwheelError,
    shown,
)
from tickwheel.server import checks
from tickwheel.server.http import types
from tickwheel.server.http.call import as_json
from tickwheel.server.http.call import line as problem_line
from tickwheel.server.http.declared import (
    answer_type,
    of_json,
    read_id,
    read_ids,
    request_type,
    results,
    said_of,
    to_json,
)
from tickwheel.server.http.deliveries import SSE
from tickwheel.server.http.new_tasks import due_of

if TYPE_CHECKING:
    from tickwheel.server.http.call import Call, Handler

IDS_TYPE = request_type(LookUp, frozenset(("topic", "key", "newest", "until_ms")))
KEY_QUERY_TYPE = request_type(LookUp, frozenset(("ids", "topic", "key")))
TASKS_TYPE = msgspec.defstruct("TaskList", [("tasks", list[answer_type(TaskInfo)])])  # type: ignore[misc]
_ids = msgspec.json.Decoder(IDS_TYPE)
_reschedule = msgspec.json.Decoder(types.RescheduleIn)
_move = msgspec.json.Decoder(types.Move)
_dead = msgspec.json.Decoder(types.DeadIn)


def _check(name: str, word: str, good: Sequence[str]) -> None:
    """Raises the error that the word means for a request about one task only."""
    if word in good:
        return
    if word == "unknown":
        raise NotFound(f"there is no {name}")
    if word == "gone":
        raise TaskGone(f"{name} finished so long ago that how it ended is no longer known")
    raise Conflict(f"{name} is {word}")


async def look_up(call: Call) -> None:
    """Answer one task."""
    ids = _one(call)
    [task] = await call.ask("look_up", {"ids": ids})
    if task["state"] in ("unknown", "gone"):
        _check(f"task {ids[0]}", task["state"], ())
    await call.answer(to_json(TaskInfo, task))


async def look_up_many(call: Call) -> None:
    """Answer several tasks."""
    said = {"ids": read_ids((await call.json(_ids)).ids)}  # type: ignore[attr-defined]
    await call.answer(await call.ask("look_up", said, _tasks))


async def look_up_key(call: Call) -> None:
    """Answer the tasks of a key."""
    tasks = await call.ask("look_up", call.named | said_of(call.query(KEY_QUERY_TYPE)))
    if not tasks:
        raise _no_task(call)
    await call.answer(_tasks(tasks))


async def reschedule_many(call: Call) -> None:
    """Move several tasks."""
    body = await call.json(_reschedule)
    said = {"ids": read_ids(body.ids), **_moved(body)}
    await call.answer(results(await call.ask("reschedule", said)))


def on_dead(verb: str) -> Handler:
    """The handler of a command on dead letters."""

    async def handle(call: Call) -> None:
        items = (await call.json(_dead)).items
        if not items:
            raise BadRequest("items has 0 elements; name at least one")
        pairs = tuple(
            (read_id(item.id, f"items[{index}].id"), item.group) for index, item in enumerate(items)
        )
        words = await call.ask(verb, {"pairs": pairs})
        ids = (pair[0] for pair in pairs)
        await call.answer(results(list(zip(ids, words, strict=True))))

    handle.__name__ = verb
    return handle


def changing(verb: str, what: str) -> Handler:
    """The handler of a command on the "task", or the tasks of the "key", that a path names."""

    async def handle(call: Call) -> None:
        said = _moved(await call.json(_move)) if verb == "reschedule" else {}
        if what == "key":
            outcomes = await call.ask(verb, call.named | said)
            if outcomes[0][0] is None:
                raise _no_task(call)
            await call.answer(results(outcomes))
            return
        [outcome] = await call.ask(verb, {"ids": _one(call), **said})
        _check(f"task {outcome[0]}", outcome[1], words_of_success(verb))
        await call.answer(results([outcome])["results"][0])

    handle.__name__ = f"{verb}_{what}"
    return handle


def _one(call: Call) -> tuple[int]:
    return (read_id(call.named["id"], "id"),)


def _moved(given: types.Move) -> dict[str, Any]:
    delay_ms, due_ms = due_of(given, "reschedule")
    return {"delay_ms": delay_ms, "due_ms": due_ms, "shift_ms": given.shift_ms}


def _tasks(tasks: Any) -> bytes:
    return as_json({"tasks": to_json(list[TaskInfo], tasks)})


def _no_task(call: Call) -> NotFound:
    return NotFound(f"there is no task with the key {shown(call.named['key'])}")


# --- topics, groups and limits -------------------------------------------------------------------


SETTINGS_TYPE = request_type(Settings, frozenset(("topic", "group")))
_settings = msgspec.json.Decoder(SETTINGS_TYPE)


async def limits(call: Call) -> None:
    """Answer the daemon's limits, as HELLO announces them over TCP."""
    await call.answer(call.operations.limits.to_wire())


async def list_groups(call: Call) -> None:
    """Answer the groups of a topic."""
    topic = await call.ask("show_topic", call.named)
    await call.answer({"groups": topic["groups"]})


async def show_group(call: Call) -> None:
    """Answer one group."""
    topic, group = call.named["topic"], call.named["group"]
    groups = (await call.ask("show_topic", {"topic": topic}))["groups"]
    if group not in groups:
        raise NotFound(f"topic {topic} has no group {group}")
    await call.answer(groups[group])


async def configure_topic(call: Call) -> None:
    """Set what holds for a whole topic."""
    said = said_of(await call.json(_settings))
    named = {n: of_json(Settings.field(n).kind, v, n) for n, v in said.items()}
    await call.answer(await call.ask("configure", {**call.named, **named}))


# --- what the console looks at and no declaration gives ------------------------------------------


HTML = "text/html"
EVERY_MS_MIN, EVERY_MS_MAX = 500, 60_000
REPORT_POLICY = (
    b"sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline';"
    b" style-src 'unsafe-inline'; img-src data:; frame-ancestors 'self'"
)
"""The policy of a report's page: its script and style are in it, and it gets no origin."""
REPORT_HEADERS = [
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", REPORT_POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]


async def watch_overview(call: Call) -> None:
    """Send the overview as server-sent events, until the client goes or may not stay."""
    every_ms = call.query(types.WatchQuery).every_ms
    checks.integer(every_ms, "every_ms", EVERY_MS_MIN, EVERY_MS_MAX)
    said = await _overview(call)  # what is wrong is an answer with a status
    await call.begin(SSE)
    over = asyncio.Event()
    call.exchange.on_end = lambda error: over.set()
    gone = call.client.gone()
    gone.add_done_callback(lambda _: over.set())
    try:
        while not gone.done():
            await call.piece_in_time(b"event: overview\ndata: %b\n\n" % said)
            await _pause(call, over, every_ms / 1000)
            if not gone.done():
                said = await _overview(call)
    except SlowReader:
        raise
    except TickwheelError as error:
        last = as_json({"error": problem_line(error)})
        await call.piece(b"event: end\ndata: %b\n\n" % last, more=False)
        return
    raise ConnectionLost("the client has gone")


async def _pause(call: Call, over: asyncio.Event, left_s: float) -> None:
    while left_s > 0 and not over.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(min(left_s, call.api.keep_alive_s)):
                await over.wait()
        left_s -= call.api.keep_alive_s
        if left_s > 0 and not over.is_set():
            await call.piece_in_time(b": still here\n\n")


async def _overview(call: Call) -> bytes:
    said: bytes = await call.ask("overview", {}, as_json)
    return said


async def last_report(call: Call) -> None:
    """Answer the last report's page, as ``tickwheel report`` wrote it."""
    found: dict[str, Any] = await call.ask("report", {})
    await call.reply(200, list(REPORT_HEADERS), found["page"])
