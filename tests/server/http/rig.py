"""The API without a socket: requests as ASGI messages on a shard whose store and clock the test
holds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from support.shard_rig import ShardRig, Turns
from tickwheel.client.connection import Connection
from tickwheel.gateway import Gateway, GatewayClient
from tickwheel.inside import join
from tickwheel.persistence.contract import Leader
from tickwheel.server.http.api import Api
from tickwheel.server.shard.callers import Principal
from tickwheel.server.shard.operations import StandbyOperations
from tickwheel.server.tcp.listener import Listener

NOWHERE = "tcp://127.0.0.1:7355"
"""An address that nobody connects to."""
Door = Callable[[Any, Any, Any], Coroutine[Any, Any, None]]


class Response:
    """What an answer has become so far."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.whole = False
        self.aborted = False
        self.sent: list[bytes] = []

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.body.splitlines() if line.strip()]


class Request:
    """One that is under way."""

    def __init__(
        self,
        api: Door,
        method: str,
        target: str,
        body: bytes | None,
        headers: dict[str, str],
        *,
        whole: bool = True,
        connection: dict[str, Any] | None = None,
    ) -> None:
        self.response = Response()
        self._text = f"{method} {target} {body!r:.300}"
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._gone = asyncio.Event()
        self.reads = asyncio.Event()
        """Unset: the client takes nothing."""
        self.reads.set()
        if body is not None and whole:
            headers.setdefault("content-length", str(len(body)))
        if whole:
            self.send(body or b"", more=False)
        elif body:
            self.send(body)
        parts = urlsplit(target)
        scope = {
            "type": "http",
            "method": method,
            "path": parts.path,
            "raw_path": parts.path.encode(),
            "query_string": parts.query.encode(),
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
            "state": {
                "abort": self._abort,
                "is_complete": lambda: False,
                "address": "127.0.0.1:5",
                **(connection or {}),
            },
        }
        self.task = asyncio.create_task(api(scope, self._receive, self._take))

    def send(self, data: bytes, *, more: bool = True) -> None:
        """Another piece of the body."""
        self._messages.put_nowait({"type": "http.request", "body": data, "more_body": more})

    def leave(self) -> None:
        """The client goes."""
        self._gone.set()
        self._messages.put_nowait({"type": "http.disconnect"})

    def _abort(self) -> None:
        self.response.aborted = True
        self.leave()

    async def _receive(self) -> dict[str, Any]:
        return await self._messages.get()

    async def _take(self, message: Any) -> None:
        await self.reads.wait()
        if self._gone.is_set():
            return
        response = self.response
        if message["type"] == "http.response.start":
            response.status = message["status"]
            response.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            response.sent.append(message["body"])
            response.body += message["body"]
            response.whole = not message.get("more_body", False)

    async def done(self) -> Response:
        """When it is answered, or its handler has ended."""
        async for _ in Turns():
            if self.task.done():
                self.task.result()
                return self.response
        where = self.task.get_stack(limit=1)
        raise AssertionError(f"{self._text} is not answered: {self.response.__dict__}, {where}")

    async def until(self, condition: Callable[[Response], object]) -> Response:
        async for _ in Turns():
            if condition(self.response):
                return self.response
        raise AssertionError(f"it never came to that: {self.response.__dict__}")


class HttpRig(ShardRig):
    """``call`` for a whole request; ``begin`` for one that goes on."""

    async def start(self) -> HttpRig:
        await super().start()
        standby = StandbyOperations(
            self.settings,
            self.settings.limits(),
            self.shard.clock,
            active=lambda: Leader("other/1", "tcp://127.0.0.1:1", 0, 1, http="http://127.0.0.1:2"),
            status=lambda: {"role": "standby"},
            on_event=self.notice,
        )
        self.api = Api(self.settings, standby, self.logins, self.observed)
        self.api.serve(self.operations)
        self.door: Door = self.api
        return self

    def begin(
        self, method: str, target: str, body: Any = None, whole: bool = True, **headers: str
    ) -> Request:
        """``body``: bytes as they are, anything else as JSON."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            named.setdefault("content-type", "application/json")
        return Request(self.door, method, target, body, named, whole=whole)

    async def call(self, method: str, target: str, body: Any = None, **headers: str) -> Response:
        return await self.begin(method, target, body, **headers).done()

    async def post(self, target: str, body: Any = None, **headers: str) -> Any:
        """The answer's JSON; the request must succeed."""
        response = await self.call("POST", target, body, **headers)
        assert response.status in (200, 201), (response.status, response.body)
        return response.json


class RigOfAll(HttpRig):
    """The same, asked at the API of all shards, whose only one this is."""

    async def start(self) -> RigOfAll:
        await super().start()
        settings = self.settings.model_copy(update={"listen": NOWHERE, "advertise": NOWHERE})
        self.gateway = _Gateway(
            settings, [settings], lambda shard: "", self.logins, self.shard.clock, self.observed,
            self.notice,
        )  # fmt: skip
        self.gateway.listener = self.listener
        self.gateway.start()
        self.api, self.door = self.gateway._api, self.gateway
        return self

    async def stop(self) -> None:
        await self.gateway.stop()
        await super().stop()


class _Gateway(Gateway):
    """The API of all shards, whose clients need no socket."""

    listener: Listener

    def new_client(self, principal: Principal) -> GatewayClient:
        client = super().new_client(principal)
        client._options.open_to = self._open_to
        return client

    async def _open_to(self, connection: Connection, address: Any, tls: Any) -> None:
        join(asyncio.get_running_loop(), connection, self.listener(), "127.0.0.1")


async def nothing(accept: str) -> tuple[bytes, str]:
    return b"", "text/plain"


async def ready() -> tuple[bool, dict[str, Any]]:
    return True, {}
