"""The seam between the store and the libraries that speak to Redis.

A ``Driver`` is one connection. It does not reconnect, retry or pool, and it has no time-outs: all
that is the store's business (``connection``), where a library is chosen and where an answer that
did not come decides the fate of a batch. Commands become bytes here, because both libraries' own
ways take three times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import hiredis

from tickwheel.persistence.contract import StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence


def pack_args(args: Sequence[bytes]) -> Packed:
    """These arguments in the protocol's form, as a part of a command."""
    return Packed(len(args), _after_count(args))


def joined(some: Sequence[Packed]) -> Packed:
    """Packed arguments put end to end."""
    return Packed(sum([one.count for one in some]), b"".join([one.data for one in some]))


def pack(args: tuple[Argument, ...]) -> list[bytes]:
    """One command in the protocol's form; its large parts are not copied."""
    last = args[-1]
    if not isinstance(last, Packed):
        return [_command(args)]
    head = b"*%d\r\n%b" % (len(args) - 1 + last.count, _after_count(args[:-1]))
    return [head, last.data] if last.data else [head]


def _command(args: Sequence[Argument]) -> bytes:
    packed: bytes = hiredis.pack_command(tuple(args))  # type: ignore[arg-type]  # its tuple is too narrow
    return packed


def _after_count(args: Sequence[Argument]) -> bytes:
    """The arguments in the protocol's form, without their count in front."""
    packed = _command(args)
    return packed[packed.index(b"\n") + 1 :]


@dataclass(frozen=True, slots=True)
class Packed:
    """Arguments in the protocol's form, which may only stand last in a command."""

    count: int
    data: bytes
    weight: int = 0
    """The arguments that it counts for where a script is cut into parts; 0: ``count``."""


Argument = bytes | str | int | Packed

REFUSING = frozenset((
    "OOM", "LOADING", "READONLY", "MASTERDOWN", "MISCONF", "NOREPLICAS", "BUSY", "CLUSTERDOWN",
    "TRYAGAIN", "MOVED", "ASK", "NOAUTH", "WRONGPASS", "NOPERM",
))  # fmt: skip
"""Errors that Redis raises before the first write of a script: nothing was changed."""


class NotConnected(StoreError):
    """There is no connection, and nothing was sent."""


class NoReply(StoreError):
    """Something was sent, and no answer came."""

    def __init__(self, message: str, *, silent: bool = False) -> None:
        super().__init__(message)
        self.silent = silent
        """Whether the connection stands, and only no answer came in time."""


class ServerError(StoreError):
    """Redis answered with an error; ``kind`` is its first word, such as OOM."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind} {text}".strip())
        self.kind = kind


class Driver(Protocol):
    """One connection to Redis, used by one call at a time."""

    async def call(self, *args: Argument) -> Any:
        """Send one command and wait for its answer: bytes, int, None, or a list of them.

        Raises Answer, or Lost: then the connection is of no use any more.
        """
        ...

    async def close(self) -> None:
        """Close the connection at once, whatever is under way. May be repeated."""
        ...


def answer(text: str) -> ServerError:
    """The error in the text of a reply; Redis before 7 wraps errors inside of scripts."""
    kind, _, rest = text.partition(" ")
    if kind == "ERR":
        for word in rest.split():
            if word.startswith("-") and word[1:].isupper():
                return ServerError(word[1:], rest)
    return ServerError(kind, rest)
