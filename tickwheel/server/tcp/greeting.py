"""HELLO: who may speak to the daemon, in which version, and as which producer session."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from tickwheel.api.frames import (
    PROTOCOL_VERSION,
    REQUEST_MAX,
    SESSION_BYTES,
    FrameType,
)
from tickwheel.errors import BadRequest, HelloRequired, VersionUnsupported
from tickwheel.limits import Limits
from tickwheel.protocol.codec import Frame, check_nesting
from tickwheel.server import checks
from tickwheel.server.logins import Logins
from tickwheel.server.settings import Settings
from tickwheel.server.shard.access import Principal
from tickwheel.server.shard.callers import Process
from tickwheel.server.tcp import shared

HELLO_OPTIONS = ("v", "session", "token", "client", "heartbeat", "host", "pid", "version")
TEXT_LENGTH_MAX = 255
PID_MAX = 2**32 - 1


class Hello(NamedTuple):
    """What a peer said in HELLO, checked."""

    request: int
    principal: Principal
    name: str
    session: bytes | None
    answers_heartbeats: bool
    process: Process


def read_hello(frame: Frame, logins: Logins, peer: Mapping[str, Any] | None = None) -> Hello:
    """A checked HELLO; ``peer`` is the certificate, if there is one. Raises what forbids it."""
    if frame[0] != FrameType.HELLO:
        raise HelloRequired("the first frame must be HELLO (1)")
    check_nesting(frame)
    shared.arity(frame, 1, "options")
    request = checks.integer(frame[1], "request", 1, REQUEST_MAX)
    options = checks.options(frame[2], HELLO_OPTIONS)
    version = options.get("v")
    if version != PROTOCOL_VERSION:
        raise VersionUnsupported(
            f"v {checks.shown(version)} is not spoken here; known: {PROTOCOL_VERSION}"
        )
    principal = logins.authenticate(options.get("token"), peer)
    name = checks.text(options.get("client", ""), "client", TEXT_LENGTH_MAX)
    session = options.get("session")
    if session is not None and (type(session) is not bytes or len(session) != SESSION_BYTES):
        raise BadRequest(f"session must be {SESSION_BYTES} bytes, not {checks.shown(session)}")
    heartbeat = options.get("heartbeat", False)
    if type(heartbeat) is not bool:
        raise BadRequest(f"heartbeat must be true or false, not {checks.shown(heartbeat)}")
    if session is not None and principal.is_limited:
        session = _own(principal, session)
    return Hello(request, principal, name, session, heartbeat, _process(options))


def _process(options: Mapping[str, Any]) -> Process:
    """The process that the peer names, if it does."""
    pid = options.get("pid")
    return Process(
        checks.text(options.get("host", ""), "host", TEXT_LENGTH_MAX),
        None if pid is None else checks.integer(pid, "pid", 0, PID_MAX),
        checks.text(options.get("version", ""), "version", TEXT_LENGTH_MAX),
    )


def _own(principal: Principal, session: bytes) -> bytes:
    """The key of a session under the name that the peer gave it. It depends on the principal: else
    one with few rights could name another's session, be it one of an idempotency key, and answer
    for it."""
    named = principal.name.encode() + session
    return hashlib.blake2b(named, digest_size=SESSION_BYTES, person=b"tw-tcp-session").digest()


def hello_answer(
    settings: Settings, limits: Limits, now_ms: int, greeting: dict[str, Any]
) -> dict[str, Any]:
    """The answer to HELLO; ``greeting`` has the daemon's part in the cluster."""
    return {
        "v": PROTOCOL_VERSION,
        "node": settings.node,
        **greeting,
        "now_ms": now_ms,
        "heartbeat": {
            "interval_ms": int(settings.heartbeat_interval_s * 1000),
            "timeout_ms": int(settings.heartbeat_timeout_s * 1000),
        },
        "limits": limits.to_wire(),
        "delay_levels_ms": settings.delay_levels_ms,
    }
