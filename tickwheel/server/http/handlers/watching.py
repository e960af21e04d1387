"""What the console looks at: the overview, once or as a stream, the story of a task, a report."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tickwheel.errors import ConnectionLost, SlowReader, TickwheelError
from tickwheel.server import checks
from tickwheel.server.http import types
from tickwheel.server.http.encode import as_json
from tickwheel.server.http.handlers.consuming import SSE
from tickwheel.server.http.handlers.controlling import read_id
from tickwheel.server.http.problems import line as problem_line

if TYPE_CHECKING:
    from tickwheel.server.http.call import Call

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


class Watching:
    """The requests of the console and of people who look at history."""

    def __init__(self, *, keep_alive_s: float) -> None:
        """``keep_alive_s``: how often, in seconds, a stream says something at least."""
        self._keep_alive_s = keep_alive_s

    async def overview_now(self, call: Call) -> None:
        """Answer the overview as it is now."""
        await call.answer(await _overview(call))

    async def watch_overview(self, call: Call) -> None:
        """Send the overview as server-sent events, until the client goes or may not stay."""
        every_ms = call.query(types.WatchQuery).every_ms
        checks.integer(every_ms, "every_ms", EVERY_MS_MIN, EVERY_MS_MAX)
        said = await _overview(call)  # what is wrong is an answer with a status
        await call.begin(SSE.encode())
        over = asyncio.Event()
        call.exchange.on_end = lambda error: over.set()
        gone = call.client.gone()
        gone.add_done_callback(lambda _: over.set())
        try:
            while not gone.done():
                await _write(call, b"event: overview\ndata: %b\n\n" % said)
                await self._pause(call, over, every_ms / 1000)
                if not gone.done():
                    said = await _overview(call)
        except SlowReader:
            raise
        except TickwheelError as error:
            last = as_json({"error": problem_line(error)})
            await call.piece(b"event: end\ndata: %b\n\n" % last, more=False)
            return
        raise ConnectionLost("the client has gone")

    async def _pause(self, call: Call, over: asyncio.Event, left_s: float) -> None:
        while left_s > 0 and not over.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, self._keep_alive_s)):
                    await over.wait()
            left_s -= self._keep_alive_s
            if left_s > 0 and not over.is_set():
                await _write(call, b": still here\n\n")

    async def group_lag(self, call: Call) -> None:
        """Answer how far one group was behind in the last hour."""
        named, caller, operations = call.named, call.exchange.caller, call.operations
        answer = await call.exchange.ask(
            lambda number: operations.group_lag(caller, number, named["topic"], named["group"])
        )
        await call.answer(answer)

    async def consumers(self, call: Call) -> None:
        """Answer a page of connected consumers."""
        given = call.query(types.ConsumersQuery)
        options = {
            name: value
            for name in ("topic", "group", "after", "limit")
            if (value := getattr(given, name)) is not None
        }
        caller, operations = call.exchange.caller, call.operations
        answer = await call.exchange.ask(
            lambda number: operations.consumers(caller, number, options), render=as_json
        )
        await call.answer(answer)

    async def task_history(self, call: Call) -> None:
        """Answer the history of one task."""
        task_id = read_id(call.named["id"], "id")
        caller, operations = call.exchange.caller, call.operations
        answer = await call.exchange.ask(
            lambda number: operations.task_history(caller, number, task_id), render=as_json
        )
        await call.answer(answer)

    async def history_tasks(self, call: Call) -> None:
        """Answer tasks from the history that fit, finished or not."""
        given = call.query(types.HistoryQuery)
        named = {name: getattr(given, name) for name in ("key", "topic", "since_ms", "until_ms")}
        options = {name: value for name, value in named.items() if value is not None}
        caller, operations = call.exchange.caller, call.operations
        answer = await call.exchange.ask(
            lambda number: operations.history_tasks(
                caller, number, {**options, "limit": given.limit}
            ),
            render=as_json,
        )
        await call.answer(answer)

    async def last_report(self, call: Call) -> None:
        """Answer the last report's page, as ``tickwheel report`` wrote it."""
        caller, operations = call.exchange.caller, call.operations
        found: dict[str, Any] = await call.exchange.ask(
            lambda number: operations.report(caller, number)
        )
        await call.reply(200, list(REPORT_HEADERS), found["page"])


async def _overview(call: Call) -> bytes:
    caller, operations = call.exchange.caller, call.operations
    said: bytes = await call.exchange.ask(
        lambda number: operations.overview(caller, number), render=as_json
    )
    return said


async def _write(call: Call, data: bytes) -> None:
    timeout_s = call.operations.settings.slow_reader_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            await call.piece(data)
    except TimeoutError:
        raise SlowReader(f"it read too little for {timeout_s} s (slow_reader_timeout_s)") from None
