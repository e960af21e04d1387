"""HELLO: who may speak to the daemon, in which version, and as which producer session."""

from __future__ import annotations

import hmac
from typing import Any, NamedTuple

from tickwheel.clock import Now
from tickwheel.engine.sessions import Session
from tickwheel.errors import BadRequest, HelloRequired, Unauthorized, VersionUnsupported
from tickwheel.protocol.codec import Frame, check_nesting
from tickwheel.protocol.frames import (
    PROTOCOL_VERSION,
    REQUEST_MAX,
    SESSION_BYTES,
    FrameType,
    Limits,
)
from tickwheel.server.settings import Settings
from tickwheel.server.shard.shard import Shell
from tickwheel.server.tcp import decode as checks


class Hello(NamedTuple):
    """What a peer said of itself, checked."""

    request: int
    name: str
    session: bytes | None
    answers_heartbeats: bool


class Greeting(NamedTuple):
    """What a connection begins with."""

    request: int
    name: str
    session: Session | None
    answers_heartbeats: bool
    answer: dict[str, Any]


def greet(shell: Shell, frame: Frame, now: Now) -> Greeting:
    """Raises what forbids the conversation; the session is joined last."""
    hello = read_hello(frame, shell.settings)
    session = None
    if hello.session is not None:
        session = shell.join_session(hello.session, now.now_ms)
    answer = hello_answer(shell.settings, shell.limits, now.now_ms, shell.epoch, "active", None)
    return Greeting(hello.request, hello.name, session, hello.answers_heartbeats, answer)


def read_hello(frame: Frame, settings: Settings) -> Hello:
    """Raises what forbids the conversation."""
    if frame[0] != FrameType.HELLO:
        raise HelloRequired("the first frame must be HELLO (1)")
    check_nesting(frame)
    checks.arity(frame, 1, "options")
    request = checks.integer(frame[1], "request", 1, REQUEST_MAX)
    options = checks.options(frame[2], ("v", "session", "token", "client", "heartbeat"))
    version = options.get("v")
    if version != PROTOCOL_VERSION:
        raise VersionUnsupported(
            f"v {checks.shown(version)} is not spoken here; known: {PROTOCOL_VERSION}"
        )
    _authorize(settings.token, options.get("token"))
    name = checks.text(options.get("client", ""), "client", 255)
    session = options.get("session")
    if session is not None and (type(session) is not bytes or len(session) != SESSION_BYTES):
        raise BadRequest(f"session must be {SESSION_BYTES} bytes, not {checks.shown(session)}")
    heartbeat = options.get("heartbeat", False)
    if type(heartbeat) is not bool:
        raise BadRequest(f"heartbeat must be true or false, not {checks.shown(heartbeat)}")
    return Hello(request, name, session, heartbeat)


def hello_answer(
    settings: Settings, limits: Limits, now_ms: int, epoch: int, role: str, active: str | None
) -> dict[str, Any]:
    """``active``: the address of the daemon that is, when this one is not."""
    return {
        "v": PROTOCOL_VERSION,
        "epoch": epoch,
        "node": settings.node,
        "role": role,
        "active": active,
        "now_ms": now_ms,
        "heartbeat": {
            "interval_ms": int(settings.heartbeat_interval_s * 1000),
            "timeout_ms": int(settings.heartbeat_timeout_s * 1000),
        },
        "limits": limits.to_wire(),
    }


def _authorize(wanted: str | None, token: object) -> None:
    if wanted is None:
        return
    given = token if isinstance(token, str) else ""
    if not hmac.compare_digest(given.encode(), wanted.encode()):
        raise Unauthorized("the token is wrong" if token else "a token is required")
