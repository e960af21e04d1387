"""What the console looks at and no declaration gives: the overview as a stream, a report."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tickwheel.errors import ConnectionLost, SlowReader, TickwheelError
from tickwheel.server import checks
from tickwheel.server.http import types
from tickwheel.server.http.encode import as_json
from tickwheel.server.http.handlers.consuming import SSE
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
    """The requests of the console that are no single answer in JSON."""

    def __init__(self, *, keep_alive_s: float) -> None:
        """``keep_alive_s``: how often, in seconds, a stream says something at least."""
        self._keep_alive_s = keep_alive_s

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

    async def last_report(self, call: Call) -> None:
        """Answer the last report's page, as ``tickwheel report`` wrote it."""
        found: dict[str, Any] = await call.ask("report", {})
        await call.reply(200, list(REPORT_HEADERS), found["page"])


async def _overview(call: Call) -> bytes:
    said: bytes = await call.ask("overview", {}, as_json)
    return said


async def _write(call: Call, data: bytes) -> None:
    timeout_s = call.operations.settings.slow_reader_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            await call.piece(data)
    except TimeoutError:
        raise SlowReader(f"it read too little for {timeout_s} s (slow_reader_timeout_s)") from None
