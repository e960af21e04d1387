"""Request the status of daemons at their own addresses.

``status_at`` asks one address whatever its role; a client's own connection is always to the active
daemon. ``statuses`` asks all daemons.
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
    Trust,
    address_text,
    connect,
    explain,
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
    """Return the status of each address of ``url`` and of each address that their daemons name: the
    active daemons, and all shards if there are several.

    Keys are ``tcp://HOST:PORT`` (``tls://``); a value is an error if there was no valid answer. The
    arguments have the defaults of ``Client``'s. Takes at most twice ``timeout`` seconds.
    """
    token = token if token is not None else environment.value("TICKWHEEL_TOKEN")
    answers: dict[str, Status | TickwheelError] = {}

    async def ask(url: str) -> None:
        try:
            answers[url] = await status_at(
                url, token=token, timeout=timeout, name=name, ca=ca,
                client_cert=client_cert, client_key=client_key,
            )  # fmt: skip
        except TickwheelError as error:
            answers[url] = error

    url = url or environment.value("TICKWHEEL_URL") or DEFAULT_URL
    secure = is_secure(url)
    urls = dict.fromkeys(url_of(address, secure=secure) for address in parse_url(url))
    await asyncio.gather(*map(ask, urls))
    answers = {url: answers[url] for url in urls}
    named = _named(status for status in answers.values() if isinstance(status, Status))
    others = [url for url in named if url not in urls]
    others = [url for url in others if is_secure(url) == secure]  # never send a token without TLS
    await asyncio.gather(*map(ask, others))
    return {url: answers[url] for url in (*urls, *others)}


def _named(known: Iterable[Status]) -> list[str]:
    """Return the URLs of active daemons and of shards, except these daemons' own addresses. Shards
    are in order."""
    urls: dict[str, None] = {}
    own: set[str] = set()
    for status in known:
        with suppress(BadRequest):
            own.add(_url(status.address or ""))
        active = status.active if status.role != "active" else None
        for address in (*([active.address] if active is not None else ()), *status.shards):
            with suppress(BadRequest):
                urls[_url(address)] = None
    return [url for url in urls if url not in own]


def _url(address: str) -> str:
    return url_of(parse_url(address)[0], secure=is_secure(address))


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
    """Return the status of the daemon at ``url``, a single address. Standbys answer as well.

    Raise Unreachable after ``timeout`` seconds, or the daemon's refusal.
    """
    addresses = parse_url(url)
    if len(addresses) != 1:
        raise BadRequest(f"url must be one address, not {len(addresses)}: {url!r:.200}")
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


async def _ask(connection: Connection, address: Address, token: str | None, name: str) -> Status:
    options = {"v": PROTOCOL_VERSION, "session": None, "token": token, "client": name}
    info = await connection.answer_to(1, hello(1, options, Limits().frame_bytes_max))
    if not isinstance(info, Mapping):
        raise ProtocolError("HELLO's answer is not a map")
    try:
        answer = await connection.answer_to(2, encode((int(FrameType.STATUS), 2)))
    except UnknownType:
        return read(lambda known: _from_hello(known, address), info)
    return Status.of(answer)


def _from_hello(info: Mapping[str, Any], address: Address) -> Status:
    """Return the status of a daemon too old for STATUS. Such a daemon answers only when active."""
    fields = {
        "node": info["node"], "version": UNKNOWN, "role": "active", "state": UNKNOWN,
        "detail": None, "epoch": info["epoch"], "address": f"tcp://{address_text(address)}",
        "since_ms": 0, "active": None, "store": UNKNOWN, "store_ok": True,
        "now_ms": info["now_ms"], "uptime_s": 0.0, "loaded": 0,
    }  # fmt: skip
    return Status.of(fields)
