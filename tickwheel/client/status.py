"""What a daemon says of itself, asked at its own address.

``status_at`` asks one address whatever its role, which a client's own connection cannot: that one
stands with the active daemon only. ``statuses`` asks all that there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from tickwheel import environment
from tickwheel.api.daemon import UNKNOWN, Status
from tickwheel.api.frames import PROTOCOL_VERSION, FrameType
from tickwheel.client.connection import (
    DEFAULT_URL,
    Address,
    Connection,
    Request,
    Trust,
    address_text,
    connect,
    explain,
    fail,
    hello,
    is_secure,
    parse_url,
    url_of,
)
from tickwheel.client.requests import read
from tickwheel.errors import BadRequest, ProtocolError, TickwheelError, UnknownType, Unreachable
from tickwheel.limits import Limits
from tickwheel.protocol import encode
from tickwheel.version import __version__

NAME = f"tickwheel-python/{__version__}"


async def statuses(
    url: str | None = None,
    *,
    token: str | None = None,
    timeout: float = 3.0,
    name: str = NAME,
    ca: str | None = None,
    client_cert: str | None = None,
    client_key: str | None = None,
) -> dict[str, Status | TickwheelError]:
    """The answer of each address of ``url``, and of those that they name: active daemons, and all
    shards where there are several.

    Keys are ``tcp://HOST:PORT`` (``tls://``); an error stands for one that did not answer as it
    should. All arguments default as ``Client``'s do. Takes at most twice ``timeout`` seconds.
    """
    token = token if token is not None else environment.value("TICKWHEEL_TOKEN")
    found: dict[str, Status | TickwheelError] = {}

    async def ask(url: str) -> None:
        try:
            found[url] = await status_at(
                url, token=token, timeout=timeout, name=name, ca=ca,
                client_cert=client_cert, client_key=client_key,
            )  # fmt: skip
        except TickwheelError as error:
            found[url] = error

    url = url or environment.value("TICKWHEEL_URL") or DEFAULT_URL
    secure = is_secure(url)
    urls = dict.fromkeys(url_of(address, secure=secure) for address in parse_url(url))
    await asyncio.gather(*map(ask, urls))
    found = {url: found[url] for url in urls}
    named = _named(status for status in found.values() if isinstance(status, Status))
    others = [url for url in named if url not in urls]
    others = [url for url in others if is_secure(url) == secure]  # a token goes nowhere else
    await asyncio.gather(*map(ask, others))
    return {url: found[url] for url in (*urls, *others)}


def _named(known: Iterable[Status]) -> list[str]:
    """The URLs of active daemons and of shards that did not answer under the addresses they give.
    Shards are in their order."""
    given: dict[str, None] = {}
    own: set[str] = set()
    for status in known:
        with suppress(BadRequest):
            own.add(_url(status.address or ""))
        active = status.active if status.role != "active" else None
        for address in (*([active.address] if active is not None else ()), *status.shards):
            with suppress(BadRequest):
                given[_url(address)] = None
    return [url for url in given if url not in own]


def _url(given: str) -> str:
    return url_of(parse_url(given)[0], secure=is_secure(given))


async def status_at(
    url: str,
    *,
    token: str | None = None,
    timeout: float = 3.0,
    name: str = NAME,
    ca: str | None = None,
    client_cert: str | None = None,
    client_key: str | None = None,
) -> Status:
    """What the daemon at ``url``, one address, says of itself; standbys answer, too.

    Raises Unreachable after ``timeout`` seconds, or what the daemon objects to.
    """
    addresses = parse_url(url)
    if len(addresses) != 1:
        raise BadRequest(f"status_at asks one address, not {len(addresses)}: {url!r:.200}")
    [address] = addresses
    tls = Trust(ca, client_cert, client_key).context() if is_secure(url) else None
    connection = Connection(lambda *delivery: None, lambda: None)
    try:
        async with asyncio.timeout(timeout):
            await connect(connection, address, tls)
            return await _ask(connection, address, token, name)
    except TimeoutError:
        raise Unreachable(f"{address_text(address)} did not answer within {timeout:g} s") from None
    except (OSError, UnicodeError) as problem:
        error = explain(problem)
        raise type(error)(f"{address_text(address)}: {error.message}") from None
    finally:
        connection.abort(Unreachable())


class _Question(Request):
    """A request whose answer is awaited on a connection of its own."""

    __slots__ = ("answer",)

    def __init__(self) -> None:
        super().__init__(float("inf"))
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answered(self, result: Any) -> None:
        self.answer.set_result(result)

    def failed(self, error: TickwheelError) -> None:
        fail(self.answer, error)


async def _ask(connection: Connection, address: Address, token: str | None, name: str) -> Status:
    options = {"v": PROTOCOL_VERSION, "session": None, "token": token, "client": name}
    info = await _answer(connection, 1, hello(1, options, Limits().frame_bytes_max))
    if not isinstance(info, Mapping):
        raise ProtocolError("HELLO's answer is not a map")
    try:
        answer = await _answer(connection, 2, encode((int(FrameType.STATUS), 2)))
    except UnknownType:
        return read(lambda known: _from_hello(known, address), info)
    return Status.of(answer)


async def _answer(connection: Connection, number: int, data: bytes) -> Any:
    question = _Question()
    connection.ask(number, question, data)
    connection.flush()
    ends: tuple[asyncio.Future[Any], ...] = (question.answer, connection.closed)
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if not question.answer.done():
        raise connection.closed.result()
    return question.answer.result()


def _from_hello(info: Mapping[str, Any], address: Address) -> Status:
    """The status of a daemon older than STATUS: it serves alone, or it would not have answered."""
    given = {
        "node": info["node"], "version": UNKNOWN, "role": "active", "state": UNKNOWN,
        "detail": None, "epoch": info["epoch"], "address": f"tcp://{address_text(address)}",
        "since_ms": 0, "active": None, "store": UNKNOWN, "store_ok": True,
        "now_ms": info["now_ms"], "uptime_s": 0.0, "loaded": 0,
    }  # fmt: skip
    return Status.of(given)
