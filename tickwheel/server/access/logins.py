"""Authentication: checks tokens, delays the answers to failures, and reloads the file of tokens.

Every transport calls ``authenticate``, answers a failure through ``answer_later``, and disconnects
principals for which ``is_valid`` is false. Invariants:

* If the file becomes unreadable, the previous tokens stay valid, and the problem is logged and
  shown by a metric.
* Requests never wait for the file. It is checked in the background about once a second.
* A caller with a valid token never waits for callers without a valid token.

``Sessions`` contains the sessions of browsers and one-time login links. A login with a token begins
a session, and its cookie contains random text; the token is not stored in the browser
(docs/decisions/0027). Sessions are kept in memory and end with the process, with their token, or
after ``SESSION_S``. ``Sessions`` does not handle requests: ``Api`` authenticates the caller, and
handlers set the cookie. Invariants:

* A session is valid only while its token is valid.
* A principal cannot displace the sessions or links of others, because it can have only a few.
* A link works for a single login, successful or not.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tickwheel.errors import BadRequest, Overloaded, TickwheelError, Unauthorized
from tickwheel.server.access import tokens as files
from tickwheel.server.access.tls import Certificates, Files, TlsServer, parts_of, required_parts
from tickwheel.server.access.tokens import hash_of
from tickwheel.server.logs import LogRateLimit
from tickwheel.server.shard.callers import (
    ANONYMOUS,
    TOKEN_HOLDER,
    Principal,
    QuotaBook,
    Quotas,
)
from tickwheel.server.shard.guard import AuditLog, caller_fields
from tickwheel.waiting import cancel_all

if TYPE_CHECKING:
    import socket

    from tickwheel.clock import Clock
    from tickwheel.server.access.tokens import Token
    from tickwheel.server.metrics.observed import Observed
    from tickwheel.server.settings import Settings
    from tickwheel.server.shard.callers import Caller, OnEvent, Principal

CHECK_INTERVAL_S = 1.0
"""Seconds between checks of the file of tokens."""
USE_WRITE_INTERVAL_S = 60.0
"""Seconds between writes of the tokens' last use."""
WAITING_MAX = 256
"""Maximum delayed answers to failures; further failures are answered immediately."""
REVOKED = "the token was revoked, was changed or has expired"


class Logins:
    """Authenticates callers. Call ``start`` before the first connection, and ``run`` in the
    background."""

    def __init__(
        self, settings: Settings, clock: Clock, on_event: OnEvent, observed: Observed
    ) -> None:
        self._expected_token = settings.serve_token
        self._path = None if settings.tokens_file is None else Path(settings.tokens_file)
        self._delay_s = settings.login_delay_s
        self._drain_timeout_s = settings.drain_timeout_s
        self._clock = clock
        self._on_event = on_event
        self._observed = observed
        self._needs_certificate = settings.tls_client_required
        self.audit: AuditLog | None = None
        if settings.audit_file is not None:
            self.audit = AuditLog(
                settings.audit_file, settings.audit_bytes_max, clock, on_event, observed
            )
        self._unauthenticated_log = LogRateLimit()
        self._former_tokens_log = LogRateLimit()
        self.quotas = QuotaBook()
        self.companions: dict[Principal, bytes] = {}
        """Current secrets of the daemon's own processes (``server/companion.py``)."""
        self._defaults = Quotas(
            tasks_per_s=settings.quota_tasks_per_s,
            bytes_per_s=settings.quota_bytes_per_s,
            pending=settings.quota_pending,
            connections=settings.quota_connections,
            subscriptions=settings.quota_subscriptions,
            transactions=settings.quota_transactions,
        )
        self._tokens: dict[str, Token] = {}
        self._rules: list[tuple[frozenset[str], Token]] = []
        """For each token with a certificate rule, the parts that a certificate must have."""
        self._stamp: object = None
        self._used: dict[str, int] = {}
        """Last use of each token that was used since the last write, by id."""
        self._unwritable = False
        self._call_later: Callable[[float, Callable[[], None]], object] = _call_later
        self._console_failures = LogRateLimit()
        self._check_failures = LogRateLimit()
        self.waiting = 0
        """Number of failures that are not yet answered."""

    # --- authentication --------------------------------------------------------------------------

    @property
    def are_needed(self) -> bool:
        """Whether callers need a token or a certificate."""
        return self._expected_token is not None or self._path is not None or self._needs_certificate

    def count_failure(self) -> None:
        """Count a failed login."""
        self._observed.login_failures += 1

    def note_stranger(self, address: str, error: TickwheelError) -> None:
        """Log a connection that ended before authentication. If there are many, most of them are
        only counted."""
        rest = self._unauthenticated_log.note(self._clock.read().mono_ms / 1000)
        if rest is not None:
            self._on_event("connection_closed", f"{address}: {error}{rest}")

    def check_certificate(self, peer: Mapping[str, Any] | None) -> None:
        """Raise Unauthorized if a required certificate is missing."""
        if self._needs_certificate and not peer:
            raise self._refusal("a client certificate is required (tls_client_required)")

    def authenticate(
        self, sent: object, peer: Mapping[str, Any] | None = None, address: str = "unknown"
    ) -> Principal:
        """Return the principal of the token ``sent``, or of the certificate ``peer``, which TLS has
        verified. Raise Unauthorized if neither is valid. Log the id of a former token together with
        the caller's ``address``."""
        text, expected = sent if isinstance(sent, str) else "", self._expected_token
        for principal, secret in self.companions.items():
            if hmac.compare_digest(_bytes(text), secret):
                return principal
        self.check_certificate(peer)
        parts = parts_of(peer)
        if expected is None and self._path is None:
            return Principal(_name_of(parts), None) if parts else ANONYMOUS
        if parts and not text:
            return self._by_certificate(parts)
        if expected and hmac.compare_digest(_bytes(text), _bytes(expected)):
            return TOKEN_HOLDER
        token = files.find(self._tokens, text)
        now_ms = self._clock.read().now_ms
        if token is None or token.is_over(now_ms):
            self._log_former_token(files.id_of(text), token, address)
            cause = "the token has expired" if token is not None else "the token is wrong"
            raise self._refusal(cause if text else "a token is required")
        self._used[token.id] = now_ms
        return self._principal(token)

    def _log_former_token(self, token_id: str | None, token: Token | None, address: str) -> None:
        """Log the use of a former token, so that the program that still uses it can be found. The
        id is not secret. Ids can be forged, so if there are many, most uses are only counted."""
        if token_id is None or (token is None and token_id in self._tokens):
            return  # a guess: an existing id with a wrong secret
        state = "is not in the file (revoked?)" if token is None else f"of {token.name} has expired"
        rest = self._former_tokens_log.note(self._clock.read().mono_ms / 1000)
        if rest is not None:
            self._on_event("token_refused", f"{address}: token {token_id} {state}{rest}")

    def _principal(self, token: Token) -> Principal:
        """Return the principal of a token. The token's quotas override those of the settings."""
        own = token.quotas or Quotas()
        overrides = {name: value for name, value in own._asdict().items() if value is not None}
        quotas = self._defaults._replace(**overrides)
        limits = None if quotas == Quotas() else quotas
        return token.principal._replace(quotas=limits)

    def _by_certificate(self, parts: frozenset[str]) -> Principal:
        token = next((token for required, token in self._rules if required <= parts), None)
        if token is None:
            raise self._refusal(f"a token is required: no rule matches the {_name_of(parts)}")
        now_ms = self._clock.read().now_ms
        if token.is_over(now_ms):
            raise self._refusal(f"the rule for the {_name_of(parts)} has expired")
        self._used[token.id] = now_ms
        return self._principal(token)

    def _refusal(self, reason: str) -> Unauthorized:
        self.count_failure()
        return Unauthorized(reason)

    def answer_later(self, answer: Callable[[], None]) -> None:
        """Call ``answer`` after a delay, which slows down the guessing of tokens."""
        if not self._delay_s or self.waiting >= WAITING_MAX:
            answer()
            return
        self.waiting += 1

        def finish() -> None:
            self.waiting -= 1
            answer()

        self._call_later(self._delay_s, finish)

    def is_valid(self, principal: Principal) -> bool:
        """Return whether the principal's token is still valid and unchanged."""
        if not principal.token_id:
            return True
        token = self._tokens.get(principal.token_id)
        is_same = token is not None and self._principal(token) == principal
        return is_same and token is not None and not token.is_over(self._clock.read().now_ms)

    def note_forbidden(self) -> None:
        """Count a request for which the principal lacked a right."""
        self._observed.forbidden += 1

    async def stop(self) -> None:
        """Write the tokens' last use, and finish the audit log."""
        self.note_unanswered()
        await self.write_last_use()
        timeout_s = self._drain_timeout_s
        if self.audit is not None and not await asyncio.to_thread(self.audit.close, timeout_s):
            detail = f"lines were not written within {timeout_s:g} s (drain_timeout_s)"
            self._on_event("audit_unfinished", detail)

    # --- the audit log ---------------------------------------------------------------------------

    def note_console(self, caller: Caller, operation: str) -> None:
        """Log a login to the console, or a logout from it."""
        if self.audit is not None:
            self.audit.write({**caller_fields(caller, operation, {}), "outcome": "ok"})

    def note_unanswered(self) -> None:
        """Log the requests that this daemon no longer answers."""
        if self.audit is not None:
            self.audit.write_open_lines()

    def note_signal(self, operation: str) -> None:
        """Log a signal that an operator sent to this process."""
        if self.audit is not None:
            who = {"who": "signal", "operation": operation}
            self.audit.write({**who, "named": {}, "outcome": "ok"})

    def note_failed_console_login(self, address: str, error: TickwheelError) -> None:
        """Log a failed login to the console. If there are many, most of them are only counted, so
        that they do not fill the log."""
        if self.audit is None:
            return
        if self._console_failures.note(self._clock.read().mono_ms / 1000) is None:
            return
        left_out = self._console_failures.left_out
        counts = {"counts": {"left_out": left_out}} if left_out else {}
        who = {"who": "nobody", "from": address, "client": "http", "operation": "console_login"}
        self.audit.write({**who, "named": {}, "outcome": error.code, **counts})

    # --- the file --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the tokens. Raise BadRequest if the file is unreadable or invalid."""
        if self._path is None:
            return
        try:
            await asyncio.to_thread(self._read, self._path)
        except OSError as error:
            raise BadRequest(f"tokens_file {self._path}: {error.strerror}") from None

    async def run(
        self, present: Callable[[], Iterable[Principal]], ended: Callable[[], None]
    ) -> None:
        """Check the file, forever. ``present`` returns the connected principals; ``ended`` is
        called when any of them is no longer valid."""
        path = self._path
        if path is None:
            return
        loop = asyncio.get_running_loop()
        write_s = loop.time() + USE_WRITE_INTERVAL_S
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                await self.reload_if_changed()
                connected = set(present())
                if not all(map(self.is_valid, connected)):
                    ended()
                if loop.time() >= write_s:
                    write_s = loop.time() + USE_WRITE_INTERVAL_S
                    now_ms, ids = self._clock.read().now_ms, {p.token_id for p in connected}
                    self._used |= dict.fromkeys(ids & self._tokens.keys(), now_ms)
                    await self.write_last_use()
            except Exception as error:  # otherwise, revoked tokens would stay valid
                rest = self._check_failures.note(loop.time())
                if rest is not None:
                    self._on_event("internal_error", f"the check of tokens: {error!r}{rest}")

    async def reload_if_changed(self) -> None:
        """Reload the tokens if the file has changed."""
        if self._path is None:
            return
        before = self._tokens
        try:
            is_new = await asyncio.to_thread(self._read, self._path)
        except Exception as error:
            if self._observed.tokens_file_ok:
                self._on_event("tokens_file_broken", f"{error}; the previous tokens stay valid")
            self._observed.tokens_file_ok = False
            return
        if is_new:
            self._note_changes(before, self._tokens)
        if is_new or not self._observed.tokens_file_ok:
            self._on_event("tokens_read", f"{self._path}: {len(self._tokens)} tokens")
        self._observed.tokens_file_ok = True

    def _read(self, path: Path) -> bool:
        stamp = files.stamp(path)
        if stamp == self._stamp:
            return False
        tokens = files.read(path)
        self._tokens, self._stamp = tokens, stamp
        self.quotas.scopes.put(self._principal(token) for token in tokens.values())
        self._rules = [
            (required_parts(token.certificate), token)
            for token in tokens.values()
            if token.certificate is not None
        ]
        return True

    def _note_changes(self, before: Mapping[str, Token], after: Mapping[str, Token]) -> None:
        """Log changed tokens. The file does not record who changed it."""
        for token_id in sorted(before.keys() | after.keys()) if self.audit is not None else ():
            old, new = before.get(token_id), after.get(token_id)
            if self.audit is None or old == new:
                continue
            change = "token_added" if old is None else "token_changed" if new else "token_removed"
            token = new or old
            assert token is not None, "the id is in one of the two"
            scopes = token.to_map()["scopes"]
            named = {"id": token.id, "name": token.name, "scopes": scopes}
            who = {"who": str(self._path), "operation": change}
            self.audit.write({**who, "named": named, "outcome": "ok"})

    async def write_last_use(self) -> None:
        """Write the last use of tokens since the previous write, if the file is writable."""
        used, self._used = self._used, {}
        if self._path is None or not used:
            return
        try:
            await asyncio.to_thread(files.write_used, self._path, used, self._tokens)
        except OSError as error:
            if not self._unwritable:
                detail = f"{error}; `token list` will not show the tokens' last use"
                self._on_event("tokens_used_unwritable", detail)
            self._unwritable = True


def _call_later(delay_s: float, act: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_later(delay_s, act)


def _name_of(parts: frozenset[str]) -> str:
    """Return a short, stable name for a certificate."""
    part = next((part for part in sorted(parts) if part.startswith("CN=")), min(parts))
    return f"certificate {part:.80}"


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class Entrance:
    """The access control of a process's ports: tokens, and certificates for TLS. Call ``start``
    before the first connection, ``watch`` to check files in the background, and finally
    ``stop``."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        on_event: OnEvent,
        observed: Observed,
        ports: tuple[str, ...],
    ) -> None:
        """``ports`` are the names of the settings that contain the ports' addresses."""
        self.logins = Logins(settings, clock, on_event, observed)
        self._settings, self._on_event, self._observed = settings, on_event, observed
        self._certificates: Certificates | None = None
        if any(map(settings.speaks_tls, ports)):
            files = Files(settings.tls_cert or "", settings.tls_key, settings.tls_client_ca)
            self._certificates = Certificates(files, on_event, observed)
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Read the files. Raise BadRequest if a file is unreadable or invalid."""
        await self.logins.start()
        if self._certificates is not None:
            await self._certificates.start()

    def watch(
        self, present: Callable[[], Iterable[Principal]], dismiss: Callable[[], None]
    ) -> None:
        """Check the files in the background. ``present`` returns the connected principals;
        ``dismiss`` is called when any of them is no longer valid."""
        self._watching.append(asyncio.create_task(self.logins.run(present, dismiss)))
        if self._certificates is not None:
            self._watching.append(asyncio.create_task(self._certificates.run()))

    def tls_server(
        self, listener: socket.socket, make: Callable[[], asyncio.Protocol], plain: bytes
    ) -> TlsServer:
        """Return a server for a TLS port. It answers ``plain`` to clients that do not use TLS."""
        assert self._certificates is not None, "settings refuse a TLS port without a certificate"
        return TlsServer(
            listener, make, self._certificates, self._settings, self._observed, self._on_event,
            plain=plain,
        )  # fmt: skip

    async def stop(self) -> None:
        """Stop checking files, write the tokens' last use, and finish the audit log."""
        await cancel_all(self._watching)
        await self.logins.stop()


SESSION_S: Final = 12 * 3600
SESSIONS_MAX: Final = 1_000
SESSIONS_EACH_MAX: Final = 20
"""Maximum sessions of a token. A further session ends the oldest."""
LINK_S: Final = 60
LINKS_MAX: Final = 100
LINKS_EACH_MAX: Final = 5
"""Maximum login links of a token. A further link invalidates the oldest."""
LINK_PREFIX: Final = "once_"
SECRET_BYTES: Final = 32


class Session(NamedTuple):
    """The principal and the expiry of a session or login link."""

    principal: Principal
    until_ms: int
    """The expiry by wall time, as callers see it."""
    until_mono_ms: int


class Sessions:
    """The sessions and login links of a daemon in any role."""

    def __init__(self, logins: Logins, clock: Clock) -> None:
        self._logins = logins
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        """Sessions, by the hash of the cookie's text; the oldest is first."""
        self._links: dict[str, Session] = {}
        """Login links, by the hash of the code; the oldest is first."""

    @property
    def are_needed(self) -> bool:
        """Whether a login is required."""
        return self._logins.are_needed

    # --- sessions --------------------------------------------------------------------------------

    def begin(self, principal: Principal) -> tuple[str, Session]:
        """Begin a session. Return the text for its cookie, and the session. Raise Overloaded if too
        many sessions are open."""
        return self._put(self._sessions, "", principal, SESSION_S, SESSIONS_EACH_MAX, SESSIONS_MAX)

    def find(self, text: str | None) -> Session | None:
        """Return the session to which a cookie's text belongs, or None if it is not valid."""
        session = self._sessions.get(hash_of(text)) if text else None
        return session if session is not None and self._is_current(session) else None

    def end(self, text: str | None) -> None:
        """End the session to which a cookie's text belongs, if it exists."""
        if text:
            self._sessions.pop(hash_of(text), None)

    def audit(self, caller: Caller, operation: str) -> None:
        """Write an operation to the audit log."""
        self._logins.note_console(caller, operation)

    # --- links -----------------------------------------------------------------------------------

    def link(self, principal: Principal) -> tuple[str, Session]:
        """Create a link. Return its code, for a single login as this principal, and its expiry.
        Raise Overloaded if too many links are open."""
        return self._put(self._links, LINK_PREFIX, principal, LINK_S, LINKS_EACH_MAX, LINKS_MAX)

    def redeem(self, code: str) -> Principal:
        """Return the principal of a login link and invalidate the link. Raise Unauthorized if the
        link is used or expired."""
        link = self._links.pop(hash_of(code), None)
        if link is None or not self._is_current(link):
            self._logins.count_failure()
            raise Unauthorized("the login link was already used or has expired: create another")
        return link.principal

    # --- both ------------------------------------------------------------------------------------

    def _put(
        self,
        sessions: dict[str, Session],
        prefix: str,
        principal: Principal,
        lifetime_s: int,
        each_max: int,
        all_max: int,
    ) -> tuple[str, Session]:
        for key in [key for key, session in sessions.items() if not self._is_current(session)]:
            del sessions[key]
        own = [key for key, session in sessions.items() if session.principal == principal]
        for key in own[: max(0, len(own) + 1 - each_max)]:
            del sessions[key]
        if len(sessions) >= all_max:
            raise Overloaded(f"{len(sessions)} logins are open; the limit is {all_max}")
        text = prefix + secrets.token_urlsafe(SECRET_BYTES)
        now, lifetime_ms = self._clock.read(), lifetime_s * 1000
        session = Session(principal, now.now_ms + lifetime_ms, now.mono_ms + lifetime_ms)
        sessions[hash_of(text)] = session
        return text, session

    def _is_current(self, session: Session) -> bool:
        is_in_time = self._clock.read().mono_ms < session.until_mono_ms
        return is_in_time and self._logins.is_valid(session.principal)


def cookie_name(host: bytes) -> str:
    """Return the cookie's name, which contains the port because daemons can share a host."""
    port = host.decode("latin-1").rpartition(":")[2]
    return f"tickwheel_{port}" if port.isascii() and port.isdigit() else "tickwheel"


def cookie_of(headers: dict[bytes, bytes]) -> str | None:
    """Return the text of the session cookie in the headers of a request, or None."""
    expected_name = cookie_name(headers.get(b"host", b""))
    for pair in headers.get(b"cookie", b"").decode("latin-1").split(";"):
        name, _, value = pair.strip().partition("=")
        if name == expected_name:
            return value
    return None
