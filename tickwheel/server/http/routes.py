"""Which handler a request is for, and all that the document says of it.

A path is compared segment by segment as it was sent, before its escapes are undone: a topic's name
may have a slash, which a client then sends as %2F.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote_to_bytes

from msgspec import Struct

from tickwheel.errors import BadRequest, MethodNotAllowed, NotFound, shown
from tickwheel.server.http import types

Handler = Callable[[Any], Awaitable[None]]
"""Handles one ``Call``."""


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path."""

    method: str
    path: str
    handler: Handler
    tag: str
    summary: str
    operations: tuple[str, ...]
    """The operations that the handler calls: the route's rights are theirs."""
    answer: Any = None
    """The type of the answer; None: there is none, or no JSON."""
    status: int = 200
    body: Any = None
    """The type of the JSON body; a union: any of its types."""
    query: type[Struct] = types.NoQuery
    headers: tuple[tuple[str, str], ...] = ()
    """(name, what it says) of the headers that the handler reads."""
    raw: tuple[str, ...] = ()
    """Content types that the route takes beside JSON."""
    streams: tuple[str, ...] = ()
    """Content types that the route answers with, line by line."""
    codes: tuple[str, ...] = ()
    """Error codes of the route, beside those that every request may get."""
    standby: bool = False
    """Whether a standby answers the route, too."""
    public: bool = False
    """Whether the route needs no login: it says nothing of any task."""
    page: bool = False
    """Whether a browser opens the route as a page, with a cookie and no header of ours."""


@dataclass(slots=True)
class _Node:
    """The routes whose paths begin with the same segments."""

    fixed: dict[str, _Node] = field(default_factory=dict)
    named: tuple[str, _Node] | None = None
    methods: dict[str, Route] = field(default_factory=dict)


class Router:
    """Finds the route of a request."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = routes
        self._root = _Node()
        for route in routes:
            self._add(route)

    def _add(self, route: Route) -> None:
        node = self._root
        for segment in route.path.strip("/").split("/"):
            if segment.startswith("{"):
                name = segment[1:-1]
                if node.named is None:
                    node.named = (name, _Node())
                assert node.named[0] == name, route.path
                node = node.named[1]
            else:
                node = node.fixed.setdefault(segment, _Node())
        assert route.method not in node.methods, route.path
        node.methods[route.method] = route

    def find(self, method: str, raw_path: bytes) -> tuple[Route, dict[str, str]]:
        """The route and what its path names. Raises NotFound, MethodNotAllowed, BadRequest."""
        node, named = self._root, {}
        for segment in raw_path.decode("ascii").strip("/").split("/"):
            following = node.fixed.get(segment)
            if following is None:
                if node.named is None or not segment:
                    raise self._unknown(raw_path)
                name, following = node.named
                named[name] = _text(segment)
            node = following
        if not node.methods:
            raise self._unknown(raw_path)
        route = node.methods.get(method)
        if route is None:
            raise _NotAllowed(method, tuple(node.methods))
        return route, named

    @staticmethod
    def _unknown(raw_path: bytes) -> NotFound:
        return NotFound(f"there is no {shown(raw_path.decode('ascii'))} here")


class _NotAllowed(MethodNotAllowed):
    """The path is known, but not with this method."""

    def __init__(self, method: str, allowed: tuple[str, ...]) -> None:
        super().__init__(f"{shown(method)} is not allowed here; allowed: {', '.join(allowed)}")
        self.allowed = allowed


def allowed_by(error: Exception) -> bytes | None:
    """The header Allow, if the error has one."""
    return ", ".join(error.allowed).encode() if isinstance(error, _NotAllowed) else None


def _text(segment: str) -> str:
    try:
        return unquote_to_bytes(segment).decode()
    except UnicodeDecodeError:
        raise BadRequest(f"the path has a segment that is no UTF-8: {shown(segment)}") from None
