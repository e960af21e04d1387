"""Who may come in: tokens checked, failures slowed down, the file of tokens read when it changes.

For every transport: ``authenticate`` what was shown, answer a failure by ``later``, end whoever
``is_valid`` no more. Invariants:

* A file that cannot be read changes nothing: the tokens that were read before stay, and that is
  logged and shown by a metric.
* No request waits for a file: it is looked at beside the work, about once a second.
* Whoever has a right token never waits for those who have not.

``Sessions`` are those of browsers: what a login with a token leaves in a cookie, and links that log
in once. A cookie has a random text that means nothing anywhere else; the token is not in the
browser (docs/decisions/0027). Sessions are in memory: they end with the process, with their token,
and after ``SESSION_S``. They know no request: ``Api`` finds out who asks, handlers set the cookie.
Invariants:

* A session is worth what its token is worth at that moment: revoked or expired, it is over.
* Nobody can end the others' sessions or links by making many: each has only so many of its own.
* A link is good for one login, whatever comes of it.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tickwheel.errors import BadRequest, Overloaded, TickwheelError, Unauthorized
from tickwheel.server import tokens as files
from tickwheel.server.logs import Sparing
from tickwheel.server.shard.callers import (
    ANONYMOUS,
    OUTBOUND,
    TOKEN_HOLDER,
    Principal,
    QuotaBook,
    Quotas,
)
from tickwheel.server.shard.guard import AuditLog, said_of
from tickwheel.server.tls import Certificates, Files, TlsServer, parts_of, required_parts
from tickwheel.server.tokens import hash_of

if TYPE_CHECKING:
    import socket

    from tickwheel.clock import Clock
    from tickwheel.server.metrics.observed import Observed
    from tickwheel.server.settings import Settings
    from tickwheel.server.shard.callers import Caller, OnEvent, Principal
    from tickwheel.server.tokens import Token

LOOK_S = 1.0
"""Seconds between two looks at the file of tokens."""
NOTE_S = 60.0
"""Seconds between two notes of which tokens were used."""
WAITING_MAX = 256
"""Failures that wait for their answers; further ones are answered at once."""
REVOKED = "the token was revoked, changed or has expired"


class Logins:
    """Decides who may come in: ``start`` before the first connection, ``run`` beside the work."""

    def __init__(
        self, settings: Settings, clock: Clock, on_event: OnEvent, observed: Observed
    ) -> None:
        self._wanted = settings.serve_token
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
        self._strangers = Sparing()
        self._tokens_over = Sparing()
        self.quotas = QuotaBook()
        self.own = b""
        """The secret of the moment of the daemon's own process; empty: there is none."""
        self._defaults = Quotas(
            tasks_per_s=settings.quota_tasks_per_s,
            bytes_per_s=settings.quota_bytes_per_s,
            pending=settings.quota_pending,
            connections=settings.quota_connections,
            subscriptions=settings.quota_subscriptions,
            transactions=settings.quota_transactions,
        )
        self._tokens: dict[str, Token] = {}
        self._certified: list[tuple[frozenset[str], Token]] = []
        """Tokens that a certificate opens, and the parts that it must have."""
        self._stamp: object = None
        self._used: dict[str, int] = {}
        """Id of a token → when it was used last, since the last note."""
        self._unwritable = False
        self._call_later: Callable[[float, Callable[[], None]], object] = _call_later
        self._console_failures = Sparing()
        self.waiting = 0
        """How many failures are not answered yet."""

    # --- a stranger ------------------------------------------------------------------------------

    @property
    def are_needed(self) -> bool:
        """Whether a token or a certificate has to be shown at all."""
        return self._wanted is not None or self._path is not None or self._needs_certificate

    def failed(self) -> None:
        """Count a failed login."""
        self._observed.login_failures += 1

    def note_stranger(self, address: str, error: TickwheelError) -> None:
        """Log that a conversation has ended before anybody was let in: some of them, and how many
        others there were."""
        rest = self._strangers.note(self._clock.read().mono_ms / 1000)
        if rest is not None:
            self._on_event("connection_closed", f"{address}: {error}{rest}")

    def check_certificate(self, peer: Mapping[str, Any] | None) -> None:
        """Raises Unauthorized if a certificate is needed and there is none."""
        if self._needs_certificate and not peer:
            raise self._refusal("a client certificate is required (tls_client_required)")

    def authenticate(
        self, shown: object, peer: Mapping[str, Any] | None = None, address: str = "somebody"
    ) -> Principal:
        """The principal of a token, or of the certificate ``peer`` that TLS has verified. Raises
        Unauthorized, and logs the id of a token that opened the door once. ``address``: whose."""
        if self.own and isinstance(shown, str) and hmac.compare_digest(_bytes(shown), self.own):
            return OUTBOUND
        self.check_certificate(peer)
        parts = parts_of(peer)
        if self._wanted is None and self._path is None:
            return Principal(_named(parts), None) if parts else ANONYMOUS
        text = shown if isinstance(shown, str) else ""
        if parts and not text:
            return self._by_certificate(parts)
        if self._wanted is not None and hmac.compare_digest(_bytes(text), _bytes(self._wanted)):
            return TOKEN_HOLDER
        token = files.find(self._tokens, text)
        now_ms = self._clock.read().now_ms
        if token is None or token.is_over(now_ms):
            self._note_over(files.id_of(text), token, address)
            expired = "the token has expired" if token is not None else "the token is wrong"
            raise self._refusal(expired if text else "a token is required")
        self._used[token.id] = now_ms
        return self._principal(token)

    def _note_over(self, token_id: str | None, token: Token | None, address: str) -> None:
        """Log a token that is over, by its id, which is no secret: whose program still shows it.
        Anybody can make an id up, so some lines are written and the others are counted."""
        if token_id is None or (token is None and token_id in self._tokens):
            return  # the id of a token that is there, with a wrong secret: a guess
        why = "is not in the file (revoked?)" if token is None else f"of {token.name} has expired"
        rest = self._tokens_over.note(self._clock.read().mono_ms / 1000)
        if rest is not None:
            self._on_event("token_refused", f"{address}: token {token_id} {why}{rest}")

    def _principal(self, token: Token) -> Principal:
        """The principal of a token, with its own quotas before those of the settings."""
        own = token.quotas or Quotas()
        said = {name: value for name, value in own._asdict().items() if value is not None}
        quotas = self._defaults._replace(**said)
        limits = None if quotas == Quotas() else quotas
        return token.principal._replace(quotas=limits)

    def _by_certificate(self, parts: frozenset[str]) -> Principal:
        found = next((token for named, token in self._certified if named <= parts), None)
        if found is None:
            raise self._refusal(f"a token is required: no rule names the {_named(parts)}")
        now_ms = self._clock.read().now_ms
        if found.is_over(now_ms):
            raise self._refusal(f"the rule for the {_named(parts)} has expired")
        self._used[found.id] = now_ms
        return self._principal(found)

    def _refusal(self, why: str) -> Unauthorized:
        self.failed()
        return Unauthorized(why)

    def later(self, answer: Callable[[], None]) -> None:
        """Call ``answer`` when a failure may be answered: guessing shall be slow."""
        if not self._delay_s or self.waiting >= WAITING_MAX:
            answer()
            return
        self.waiting += 1

        def over() -> None:
            self.waiting -= 1
            answer()

        self._call_later(self._delay_s, over)

    def is_valid(self, principal: Principal) -> bool:
        """Whether the principal may stay."""
        if not principal.token_id:
            return True
        token = self._tokens.get(principal.token_id)
        is_same = token is not None and self._principal(token) == principal
        return is_same and token is not None and not token.is_over(self._clock.read().now_ms)

    def refused(self) -> None:
        """Count a request of a known principal that lacked a right."""
        self._observed.forbidden += 1

    async def stop(self) -> None:
        """Keep notes of used tokens, and finish the log."""
        await self.note()
        timeout_s = self._drain_timeout_s
        if self.audit is not None and not await asyncio.to_thread(self.audit.close, timeout_s):
            detail = f"lines were not written within {timeout_s:g} s (drain_timeout_s)"
            self._on_event("audit_unfinished", detail)

    # --- the log of what operators did -----------------------------------------------------------

    def note_console(self, caller: Caller, operation: str) -> None:
        """Log that somebody has logged in to the console, or out."""
        if self.audit is not None:
            self.audit.write({**said_of(caller, operation, {}), "outcome": "ok"})

    def note_signal(self, operation: str) -> None:
        """Log that somebody has sent this process a signal."""
        if self.audit is not None:
            who = {"who": "signal", "operation": operation}
            self.audit.write({**who, "named": {}, "outcome": "ok"})

    def note_failed_console(self, address: str, error: TickwheelError) -> None:
        """Log a failed login to the console. Somebody who fails for ever must not fill the log:
        most are only counted."""
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
        """Read the tokens. Raises BadRequest: there is nothing to go on with yet."""
        if self._path is None:
            return
        try:
            await asyncio.to_thread(self._read, self._path)
        except OSError as error:
            raise BadRequest(f"tokens_file {self._path}: {error.strerror}") from None

    async def run(
        self, present: Callable[[], Iterable[Principal]], ended: Callable[[], None]
    ) -> None:
        """Look at the file for ever. ``present``: who is connected; ``ended`` is called when some
        of them may not stay."""
        path = self._path
        if path is None:
            return
        loop = asyncio.get_running_loop()
        note_s = loop.time() + NOTE_S
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()
            there = set(present())
            if not all(map(self.is_valid, there)):
                ended()
            if loop.time() >= note_s:
                note_s = loop.time() + NOTE_S
                now_ms = self._clock.read().now_ms
                self._used |= {p.token_id: now_ms for p in there if p.token_id in self._tokens}
                await self.note()

    async def look(self) -> None:
        """Read the tokens again, if the file has changed."""
        if self._path is None:
            return
        before = self._tokens
        try:
            is_new = await asyncio.to_thread(self._read, self._path)
        except (OSError, TickwheelError) as error:
            if self._observed.tokens_file_ok:
                self._on_event("tokens_file_broken", f"{error}; the tokens of before stay")
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
        found = files.read(path)
        self._tokens, self._stamp = found, stamp
        self.quotas.scopes.put(self._principal(token) for token in found.values())
        self._certified = [
            (required_parts(token.certificate), token)
            for token in found.values()
            if token.certificate is not None
        ]
        return True

    def _note_changes(self, before: Mapping[str, Token], after: Mapping[str, Token]) -> None:
        """Log changed tokens; the file does not say who has changed it."""
        for token_id in sorted(before.keys() | after.keys()) if self.audit is not None else ():
            old, new = before.get(token_id), after.get(token_id)
            if self.audit is None or old == new:
                continue
            what = "token_added" if old is None else "token_changed" if new else "token_removed"
            token = new or old
            assert token is not None, "it is in one of them"
            scopes = token.to_map()["scopes"]
            named = {"id": token.id, "name": token.name, "scopes": scopes}
            who = {"who": str(self._path), "operation": what}
            self.audit.write({**who, "named": named, "outcome": "ok"})

    async def note(self) -> None:
        """Write down which tokens were used since the last time, if that can be written."""
        used, self._used = self._used, {}
        if self._path is None or not used:
            return
        try:
            await asyncio.to_thread(files.write_used, self._path, used, self._tokens)
        except OSError as error:
            if not self._unwritable:
                self._on_event("tokens_used_unwritable", f"{error}; `token list` will not show it")
            self._unwritable = True


def _call_later(delay_s: float, act: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_later(delay_s, act)


def _named(parts: frozenset[str]) -> str:
    """A short name for a certificate, always the same for the same one."""
    said = next((part for part in sorted(parts) if part.startswith("CN=")), min(parts))
    return f"certificate {said:.80}"


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class Entrance:
    """What lets somebody in at the ports of a process: the tokens, and the certificates where a
    port speaks TLS. ``start`` it before the first connection, ``watch`` beside the work, ``stop``
    it in the end."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        on_event: OnEvent,
        observed: Observed,
        ports: tuple[str, ...],
    ) -> None:
        """``ports``: the settings that have the addresses of the ports."""
        self.logins = Logins(settings, clock, on_event, observed)
        self._settings, self._on_event, self._observed = settings, on_event, observed
        self._certificates: Certificates | None = None
        if any(map(settings.speaks_tls, ports)):
            files = Files(settings.tls_cert or "", settings.tls_key, settings.tls_client_ca)
            self._certificates = Certificates(files, on_event, observed)
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Read the files. Raises BadRequest for those that are not right."""
        await self.logins.start()
        if self._certificates is not None:
            await self._certificates.start()

    def watch(
        self, present: Callable[[], Iterable[Principal]], dismiss: Callable[[], None]
    ) -> None:
        """Look at the files from now on. ``present``: who is connected; ``dismiss`` is called when
        some of them may not stay."""
        self._watching.append(asyncio.create_task(self.logins.run(present, dismiss)))
        if self._certificates is not None:
            self._watching.append(asyncio.create_task(self._certificates.run()))

    def tls_server(
        self, listener: socket.socket, make: Callable[[], asyncio.Protocol], plain: bytes
    ) -> TlsServer:
        """A server for a port that speaks TLS; ``plain``: the answer for who does not."""
        assert self._certificates is not None, "settings refuse a port with TLS without it"
        return TlsServer(
            listener, make, self._certificates, self._settings, self._observed, self._on_event,
            plain=plain,
        )  # fmt: skip

    async def stop(self) -> None:
        """Look at no file any more, and finish the notes and the log of who came in."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self.logins.stop()


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
