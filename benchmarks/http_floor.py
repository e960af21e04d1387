"""A server with the daemon's HTTP stack that reads a task and answers like the API, but does
nothing with it. ``python -m benchmarks.http_floor PORT``."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, cast

import msgspec
import uvloop

from tickwheel.server.http import types
from tickwheel.server.http.api import Api
from tickwheel.server.http.app import Http
from tickwheel.server.http.call import JSON_TYPE, Message, Receive, Send

_decoder = msgspec.json.Decoder(types.OneOrMany)


class Nothing:
    """Handles requests instead of the API."""

    wait_ms_max = 0

    def __init__(self) -> None:
        self._last = 1 << 58

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body += message["body"]
            more = message.get("more_body", False)
        task = _decoder.decode(body)
        self._last += 1024
        answer = b'{"id":"%d","due_ms":%d}' % (self._last, task.delay_ms or 0)
        headers = [(b"content-type", JSON_TYPE), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


async def serve(port: int) -> None:
    """Serve until killed."""
    http = Http("127.0.0.1", port, _ready, _nothing, api=cast(Api, Nothing()))
    await http.start()
    await asyncio.Event().wait()


async def _ready() -> tuple[bool, dict[str, Any]]:
    return True, {}


async def _nothing(accept: str) -> tuple[bytes, str]:
    return b"", "text/plain"


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
