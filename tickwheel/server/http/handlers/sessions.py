"""Logging a browser in and out: by a token that is shown as on every request, or by a link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tickwheel.api.verb import Right
from tickwheel.server.http.sessions import SESSION_S, cookie_name, cookie_of
from tickwheel.server.shard.access import ALL_TOPICS, NOBODY

if TYPE_CHECKING:
    from tickwheel.server.http.call import Call
    from tickwheel.server.http.sessions import Sessions
    from tickwheel.server.shard.access import Principal

COOKIE_PATH = "/v1"


class Login:
    """The requests of the console about its own login."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def log_in(self, call: Call) -> None:
        """Begin a session for whoever asks. Where nobody has to log in there is none."""
        principal = call.exchange.caller.principal
        if not self._sessions.are_needed:
            await call.answer(self._said(principal, None))
            return
        text, session = self._sessions.begin(principal)
        self._sessions.note(call.exchange.caller, "console_login")
        said = self._said(principal, session.until_ms)
        await call.answer(said, headers={b"set-cookie": _cookie(call, text, SESSION_S)})

    async def who_am_i(self, call: Call) -> None:
        """Answer who asks, by the session or the token that is shown."""
        session = self._sessions.find(cookie_of(call.headers))
        until_ms = session.until_ms if session is not None else None
        await call.answer(self._said(call.exchange.caller.principal, until_ms))

    async def log_out(self, call: Call) -> None:
        """Log out; whoever is not logged in is answered the same."""
        if call.exchange.caller.principal is not NOBODY:
            self._sessions.end(cookie_of(call.headers))
            self._sessions.note(call.exchange.caller, "console_logout")
        who = NOBODY if self._sessions.are_needed else call.exchange.caller.principal
        await call.answer(self._said(who, None), headers={b"set-cookie": _cookie(call, "", 0)})

    async def session_link(self, call: Call) -> None:
        """Make a link that logs in, for ``tickwheel console``."""
        if not self._sessions.are_needed:
            await call.answer({"code": None, "until_ms": None})
            return
        code, session = self._sessions.link(call.exchange.caller.principal)
        self._sessions.note(call.exchange.caller, "console_link")
        await call.answer({"code": code, "until_ms": session.until_ms})

    def _said(self, principal: Principal, until_ms: int | None) -> dict[str, Any]:
        is_nobody = principal is NOBODY
        return {
            "name": None if is_nobody else principal.name,
            "is_login_needed": self._sessions.are_needed,
            "until_ms": until_ms,
            "rights": _rights(principal),
        }


def _rights(principal: Principal) -> dict[str, list[str]]:
    if principal.grants is None:
        return {right.value: [ALL_TOPICS] for right in Right}
    return {right.value: list(patterns) for right, patterns in principal.grants}


def _cookie(call: Call, text: str, lasts_s: int) -> bytes:
    name = cookie_name(call.headers.get(b"host", b""))
    parts = [f"{name}={text}", f"Path={COOKIE_PATH}", f"Max-Age={lasts_s}"]
    parts += ["HttpOnly", "SameSite=Strict", *(["Secure"] if call.is_encrypted else [])]
    return "; ".join(parts).encode("latin-1")
