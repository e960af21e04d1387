"""Addresses of daemons: ``tcp://HOST:PORT``, several of them separated by commas."""

from __future__ import annotations

import os
from typing import NamedTuple

from tickwheel.errors import BadRequest
from tickwheel.protocol.frames import DEFAULT_PORT

DEFAULT_URL = f"tcp://127.0.0.1:{DEFAULT_PORT}"


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


def addresses(url: str | None) -> list[Address]:
    """The addresses of ``url``, of ``TICKWHEEL_URL``, or the default. Raises BadRequest."""
    text = url if url is not None else os.environ.get("TICKWHEEL_URL") or DEFAULT_URL
    return [_address(part.strip(), text) for part in text.split(",")]


def _address(part: str, url: str) -> Address:
    scheme, separator, rest = part.rpartition("://")
    if separator and scheme != "tcp":
        raise BadRequest(f"url {url!r}: {scheme}:// is not known; write tcp://HOST:PORT")
    host, colon, port = rest.rpartition(":")
    if not colon or "]" in port:
        host, port = rest, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65_536:
        raise BadRequest(f"url {url!r}: {part!r} is not tcp://HOST:PORT with a port of 1 to 65535")
    return Address(host, int(port))
