"""HELLO: who may speak to the daemon, in which version, and as which producer session."""

from __future__ import annotations

import hmac
from typing import Any, NamedTuple

from tickwheel.clock import Now
from tickwheel.errors import BadRequest, HelloRequired, Unauthorized, VersionUnsupported
from tickwheel.protocol.codec import Frame
from tickwheel.protocol.frames import PROTOCOL_VERSION, REQUEST_MAX, SESSION_BYTES, FrameType
from tickwheel.server import checks
from tickwheel.server.shell import Shell
from tickwheel.wheel.sessions import Session


class Greeting(NamedTuple):
    """What a connection begins with."""

    request: int
    name: str
    session: Session | None
    answer: dict[str, Any]


def greet(shell: Shell, frame: Frame, now: Now) -> Greeting:
    """Raises what forbids the conversation; the session is joined last."""
    if frame[0] != FrameType.HELLO:
        raise HelloRequired("the first frame must be HELLO (1)")
    checks.arity(frame, 1, "options")
    request = checks.integer(frame[1], "request", 1, REQUEST_MAX)
    options = checks.options(frame[2], ("v", "session", "token", "client"))
    version = options.get("v")
    if version != PROTOCOL_VERSION:
        raise VersionUnsupported(
            f"v {checks.shown(version)} is not spoken here; known: {PROTOCOL_VERSION}"
        )
    _authorize(shell.settings.token, options.get("token"))
    name = checks.text(options.get("client", ""), "client", 255)
    session = _session(shell, options.get("session"), now.now_ms)
    answer = {
        "v": PROTOCOL_VERSION,
        "epoch": shell.epoch,
        "node": shell.settings.node,
        "now_ms": now.now_ms,
        "limits": shell.limits.to_wire(),
    }
    return Greeting(request, name, session, answer)


def _authorize(wanted: str | None, token: object) -> None:
    if wanted is None:
        return
    given = token if isinstance(token, str) else ""
    if not hmac.compare_digest(given.encode(), wanted.encode()):
        raise Unauthorized("the token is wrong" if token else "a token is required")


def _session(shell: Shell, key: object, now_ms: int) -> Session | None:
    if key is None:
        return None
    if type(key) is not bytes or len(key) != SESSION_BYTES:
        raise BadRequest(f"session must be {SESSION_BYTES} bytes, not {checks.shown(key)}")
    return shell.join_session(key, now_ms)
