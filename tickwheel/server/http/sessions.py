"""Sessions of browsers: what a login with a token leaves in a cookie, and links that log in once.

A cookie has a random text that means nothing anywhere else; the token is not in the browser
(docs/decisions/0027). Sessions are in memory: they end with the process, with their token, and
after ``SESSION_S``. Knows no request: ``Api`` finds out who asks, handlers set the cookie.
Invariants:

* A session is worth what its token is worth at that moment: revoked or expired, it is over.
* Nobody can end the others' sessions or links by making many: each has only so many of its own.
* A link is good for one login, whatever comes of it.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final, NamedTuple

from tickwheel.errors import Overloaded, Unauthorized
from tickwheel.server.tokens import hash_of

if TYPE_CHECKING:
    from tickwheel.clock import Clock
    from tickwheel.server.logins import Logins
    from tickwheel.server.shard.callers import Caller, Principal

SESSION_S: Final = 12 * 3600
SESSIONS_MAX: Final = 1_000
SESSIONS_EACH_MAX: Final = 20
"""Sessions of one token; one more ends its oldest."""
LINK_S: Final = 60
LINKS_MAX: Final = 100
LINKS_EACH_MAX: Final = 5
"""Login links of one token; one more voids its oldest."""
LINK_PREFIX: Final = "once_"
SECRET_BYTES: Final = 32


class Session(NamedTuple):
    """The principal of a session, and its end."""

    principal: Principal
    until_ms: int


class Sessions:
    """The sessions and login links of one daemon, whatever its role is."""

    def __init__(self, logins: Logins, clock: Clock) -> None:
        self._logins = logins
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        """Sessions by the hash of the cookie's text, the oldest first."""
        self._links: dict[str, Session] = {}
        """Login links by the hash of the code, the oldest first."""

    @property
    def are_needed(self) -> bool:
        """Whether anybody has to log in at all."""
        return self._logins.are_needed

    # --- sessions --------------------------------------------------------------------------------

    def begin(self, principal: Principal) -> tuple[str, Session]:
        """Begin a session; returns also the text for the cookie. Raises Overloaded."""
        return self._put(self._sessions, "", principal, SESSION_S, SESSIONS_EACH_MAX, SESSIONS_MAX)

    def find(self, text: str | None) -> Session | None:
        """The session of a cookie's text; None: there is none, or it is over."""
        found = self._sessions.get(hash_of(text)) if text else None
        return found if found is not None and self._lasts(found) else None

    def end(self, text: str | None) -> None:
        """End the session of this text, if there is one."""
        if text:
            self._sessions.pop(hash_of(text), None)

    def note(self, caller: Caller, operation: str) -> None:
        """Note an operation in the log of what operators did."""
        self._logins.note_console(caller, operation)

    # --- links -----------------------------------------------------------------------------------

    def link(self, principal: Principal) -> tuple[str, Session]:
        """A code that logs in as this principal, once. Raises Overloaded."""
        return self._put(self._links, LINK_PREFIX, principal, LINK_S, LINKS_EACH_MAX, LINKS_MAX)

    def redeem(self, code: str) -> Principal:
        """The principal of a login link, which is used up by that. Raises Unauthorized."""
        found = self._links.pop(hash_of(code), None)
        if found is None or not self._lasts(found):
            self._logins.failed()
            raise Unauthorized("the link was used before, or is too old: make another one")
        return found.principal

    # --- both ------------------------------------------------------------------------------------

    def _put(
        self,
        among: dict[str, Session],
        prefix: str,
        principal: Principal,
        lasts_s: int,
        each_max: int,
        all_max: int,
    ) -> tuple[str, Session]:
        for key in [key for key, one in among.items() if not self._lasts(one)]:
            del among[key]
        own = [key for key, one in among.items() if one.principal == principal]
        for key in own[: max(0, len(own) + 1 - each_max)]:
            del among[key]
        if len(among) >= all_max:
            raise Overloaded(f"{len(among)} logins are open; the limit is {all_max}")
        text = prefix + secrets.token_urlsafe(SECRET_BYTES)
        made = Session(principal, self._clock.read().now_ms + lasts_s * 1000)
        among[hash_of(text)] = made
        return text, made

    def _lasts(self, session: Session) -> bool:
        is_in_time = self._clock.read().now_ms < session.until_ms
        return is_in_time and self._logins.is_valid(session.principal)


def cookie_name(host: bytes) -> str:
    """The cookie's name, with the port: daemons on one host must not overwrite each other's."""
    port = host.decode("latin-1").rpartition(":")[2]
    return f"tickwheel_{port}" if port.isascii() and port.isdigit() else "tickwheel"


def cookie_of(headers: dict[bytes, bytes]) -> str | None:
    """The text of the session's cookie in a request, if there is one."""
    wanted = cookie_name(headers.get(b"host", b""))
    for pair in headers.get(b"cookie", b"").decode("latin-1").split(";"):
        name, _, value = pair.strip().partition("=")
        if name == wanted:
            return value
    return None
