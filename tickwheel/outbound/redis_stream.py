"""Redis as a target: ``XADD`` to a stream, or ``RPUSH`` to a list, one pipeline a batch.

    redis://[USER@]HOST[:PORT][/DB]?stream=NAME[&maxlen=N]
    redis://[USER@]HOST[:PORT][/DB]?list=NAME[&value=json|body]

An entry of a stream has the field ``body`` and one for each header; an element of a list is a JSON
object of the same, or the body alone. ``rediss://`` is TLS. It speaks RESP by itself, with hiredis:
a batch is one write and as few reads as it comes in, without a step of a client's for each command.

Invariants: a delivery is acked by the reply to its own command; what a broken connection has left
open counts as not done; a server that takes nothing at all is a failure of the target, and no
task's.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import Sequence
from typing import Any, Final

from tickwheel.api.targets import BATCH
from tickwheel.client.delivery import Delivery
from tickwheel.errors import BadRequest
from tickwheel.outbound.target import ACK, Message, Outcome, TargetUrl, as_text, message, needs

ANSWER_S: Final = 10.0
"""How long, in seconds, the server may take for a batch."""
PORT: Final = 6379
READ_BYTES: Final = 1 << 16
OF_THE_SERVER: Final = frozenset(
    ("LOADING", "READONLY", "MASTERDOWN", "OOM", "MISCONF", "NOREPLICAS", "NOAUTH", "CLUSTERDOWN")
)
"""First words of errors that say how the server is, whatever it was asked."""


class RedisFailed(Exception):
    """The server's word for why it takes nothing."""


def redis_target(url: str, secret: str | None) -> RedisTarget:
    """A target of such a URL; ``secret`` is the password. Raises BadRequest."""
    found = TargetUrl(url)
    database = found.path or "0"
    if not database.isascii() or not database.isdigit():
        raise BadRequest(f"url must end with the number of a database, not with {found.path!r:.60}")
    batch = found.batch_max()
    if found.has("stream") == found.has("list"):
        raise BadRequest("url must have stream=NAME or list=NAME, and not both")
    make: Maker
    if found.has("stream"):
        make = StreamEntries(found.option("stream"), found.number("maxlen", 0, 1, 1 << 53))
    else:
        is_json = found.choice("value", "json", "body") == "json"
        make = ListElements(found.option("list"), is_json=is_json)
    is_tls = found.scheme == "rediss"
    login = ("AUTH", *(() if found.user is None else (found.user,)), secret) if secret else None
    made = RedisTarget(
        found.host(), found.port(PORT), is_tls=is_tls, login=login, database=database,
        make=make, batch_max=batch,
    )  # fmt: skip
    found.done()
    return made


class RedisTarget:
    """A stream or a list of one Redis server."""

    concurrency = 1
    """One pipeline at a time: entries stand in the order in which they came due."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        is_tls: bool,
        login: tuple[str, ...] | None,
        database: str,
        make: Maker,
        batch_max: int = BATCH,
    ) -> None:
        with needs("redis"):
            import hiredis
        self._hiredis: Any = hiredis
        self.batch_max = batch_max
        self._address = host, port
        self._tls = ssl.create_default_context() if is_tls else None
        self._hello = [*([login] if login else []), ("SELECT", database)]
        self._make = make
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._parser: Any = None
        self._asking = asyncio.Lock()

    async def connect(self) -> None:
        """Connect, log in, choose the database."""
        host, port = self._address
        self._streams = await asyncio.open_connection(host, port, ssl=self._tls)
        self._parser = self._hiredis.Reader(notEnoughData=_MORE)
        pack = self._hiredis.pack_command
        async with asyncio.timeout(ANSWER_S):
            replies = await self._ask(b"".join(map(pack, self._hello)), len(self._hello))
        for reply in replies:
            if isinstance(reply, Exception):
                raise RedisFailed(str(reply))

    async def send(self, deliveries: Sequence[Delivery]) -> list[Outcome]:
        """One command for each delivery, all of them in one write."""
        pack, make = self._hiredis.pack_command, self._make.command
        commands = b"".join([pack(make(message(one))) for one in deliveries])
        async with asyncio.timeout(ANSWER_S):
            replies = await self._ask(commands, len(deliveries))
        outcomes = [
            Outcome("retry", reason=str(reply)) if isinstance(reply, Exception) else ACK
            for reply in replies
        ]
        if all(outcome.settled != "ack" for outcome in outcomes):
            said = outcomes[0].reason or ""
            if said.partition(" ")[0] in OF_THE_SERVER:
                raise RedisFailed(said)
        return outcomes

    async def close(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].transport.abort()

    async def _ask(self, commands: bytes, count: int) -> list[Any]:
        """The replies to so many commands; those of one caller at a time. What has failed once has
        no connection any more: its replies may still come."""
        async with self._asking:
            try:
                return await self._replies(commands, count)
            except BaseException:
                await self.close()
                raise

    async def _replies(self, commands: bytes, count: int) -> list[Any]:
        if self._streams is None:
            raise ConnectionError("not connected")
        reader, writer = self._streams
        writer.write(commands)
        await writer.drain()
        replies: list[Any] = []
        get = self._parser.gets
        while len(replies) < count:
            data = await reader.read(READ_BYTES)
            if not data:
                raise ConnectionError("the server closed the connection")
            self._parser.feed(data)
            while (reply := get()) is not _MORE:
                replies.append(reply)
        return replies


_MORE: Final = object()
"""Stands for a reply that has not come as a whole."""


class StreamEntries:
    """``XADD`` of each message; ``maxlen`` 0 trims nothing, else about so many entries are kept."""

    def __init__(self, name: str, maxlen: int) -> None:
        trim: tuple[str, ...] = ("MAXLEN", "~", str(maxlen)) if maxlen else ()
        self._head = ("XADD", name, *trim, "*", "body")

    def command(self, found: Message) -> tuple[str | bytes, ...]:
        """The words of the command for one message."""
        words: list[str | bytes] = [*self._head, found.body]
        for name, value in found.headers.items():
            words += (name, value if type(value) is str else as_text(value))
        return tuple(words)


class ListElements:
    """``RPUSH`` of each message, as JSON with its headers, or its body alone."""

    def __init__(self, name: str, *, is_json: bool) -> None:
        self._name = name
        self._is_json = is_json

    def command(self, found: Message) -> tuple[str | bytes, ...]:
        """The words of the command for one message."""
        if not self._is_json:
            return "RPUSH", self._name, found.body
        try:
            body = {"body": found.body.decode()}
        except UnicodeDecodeError:
            body = {"body_base64": base64.b64encode(found.body).decode()}
        text = json.dumps(body | {"headers": found.headers}, separators=(",", ":"))
        return "RPUSH", self._name, text


Maker = StreamEntries | ListElements
