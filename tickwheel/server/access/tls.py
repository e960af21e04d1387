"""TLS for both ports: the certificate, which is reloaded when its files change, and handshakes.

``Certificates`` holds the current context. Existing connections keep their context, so a new
certificate does not interrupt them. ``TlsServer`` accepts connections and creates a transport for
those that finish their handshake. This module does not know the protocols above TLS. Invariants:

* If files become unusable, the previous certificate stays in use, and the problem is logged and
  shown by a metric. Only a start requires valid files.
* Handshakes in progress are bounded in time and number. At the limit, a new handshake replaces the
  oldest, so that silent peers cannot block others.
* A peer that does not use TLS gets an error in its own protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tickwheel.errors import BadRequest, shown
from tickwheel.server.logs import LogRateLimit

if TYPE_CHECKING:
    from tickwheel.server.metrics.observed import Observed
    from tickwheel.server.settings import Settings
    from tickwheel.server.shard.callers import OnEvent

CHECK_S: Final = 1.0
"""Seconds between checks of the files."""
FILE_BYTES_MAX: Final = 1024 * 1024
ACCEPTS_MAX: Final = 64
"""Maximum connections accepted in one turn of the event loop."""
NO_FILES_S: Final = 1.0
"""Seconds for which no connection is accepted after the file descriptors ran out."""
SHUTDOWN_S: Final = 2.0
"""Maximum seconds to wait for a peer's answer when TLS is shut down."""
_HANDSHAKE = b"\x16"
"""First byte of a TLS connection. No frame and no HTTP request begins with this byte."""
_SHORT = {
    "commonName": "CN",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "countryName": "C",
    "localityName": "L",
    "stateOrProvinceName": "ST",
    "domainComponent": "DC",
    "userId": "UID",
}


class Files(NamedTuple):
    """The paths of the files that the settings name."""

    cert: str
    key: str | None
    """File of the key; None if it is in ``cert``."""
    client_ca: str | None


class Certificates:
    """The certificate in use. Call ``start`` before the first connection, and ``run`` in the
    background."""

    def __init__(self, files: Files, on_event: OnEvent, observed: Observed) -> None:
        self._files = files
        self._on_event = on_event
        self._observed = observed
        self._stamp: object = None
        self._context: ssl.SSLContext | None = None

    @property
    def context(self) -> ssl.SSLContext:
        """The context for the next connection."""
        assert self._context is not None, "start was not called"
        return self._context

    async def start(self) -> None:
        """Read the files. Raise BadRequest if they are unusable."""
        await asyncio.to_thread(self._read)

    async def run(self) -> None:
        """Reload the files when they change, forever."""
        while True:
            await asyncio.sleep(CHECK_S)
            await self.reload_if_changed()

    async def reload_if_changed(self) -> None:
        """Reload the files if any of them has changed."""
        observed = self._observed
        try:
            is_new = await asyncio.to_thread(self._read)
        except Exception as error:
            if observed.certificate_ok:
                detail = f"{error}; the previous certificate stays in use"
                self._on_event("certificate_broken", detail)
            observed.certificate_ok = False
            return
        if is_new:
            until = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(observed.certificate_until_s))
            self._on_event("certificate_read", f"{self._files.cert}, valid until {until}")
        observed.certificate_ok = True

    def _read(self) -> bool:
        stamp = [_stamp(path) for path in self._files]
        if stamp == self._stamp:
            return False
        context, until_s = load(self._files)
        self._context, self._stamp, self._observed.certificate_until_s = context, stamp, until_s
        return True


def _stamp(path: str | None) -> tuple[int, int, int] | None:
    """Return the time, size and inode of the file, or None if it is unreadable."""
    try:
        status = None if path is None else Path(path).stat()
    except (OSError, ValueError):
        return None
    return None if status is None else (status.st_mtime_ns, status.st_size, status.st_ino)


# --- contexts ------------------------------------------------------------------------------------


def load(files: Files) -> tuple[ssl.SSLContext, float]:
    """Return a TLS context that uses the files, and the certificate's expiry in seconds since 1970.
    Raise BadRequest, which names the unusable file."""
    cert = _text("tls_cert", files.cert, "CERTIFICATE-----")
    name, path = ("tls_cert", files.cert) if files.key is None else ("tls_key", files.key)
    key = _text(name, path, "PRIVATE KEY-----")
    if "ENCRYPTED" in key:
        raise BadRequest(f"{name} {path}: the key must not have a passphrase")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A resumed session would bypass a changed client CA; connections are long-lived anyway.
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0
    try:
        context.load_cert_chain(files.cert, files.key, password=lambda: "")
    except (OSError, ValueError) as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise BadRequest(f"{name} {path} is not the key of tls_cert {files.cert}") from None
        names = (
            f"tls_cert {files.cert}" if files.key is None else f"tls_cert {files.cert} or {path}"
        )
        raise BadRequest(f"{names}: {_reason(error)}") from None
    if files.client_ca is not None:
        ca = _text("tls_client_ca", files.client_ca, "CERTIFICATE-----")
        try:
            context.load_verify_locations(cadata=ca)
        except (OSError, ValueError) as error:
            raise BadRequest(f"tls_client_ca {files.client_ca}: {_reason(error)}") from None
        context.verify_mode = ssl.CERT_OPTIONAL
    return context, _until_s(context, cert, files.cert)


def _text(name: str, path: str, marker: str) -> str:
    try:
        with Path(path).open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        raise BadRequest(f"{name} {path}: {_reason(error)}") from None
    if len(data) > FILE_BYTES_MAX or marker.encode() not in data:
        kind = marker.rstrip("-").lower()
        raise BadRequest(f"{name} {path} must contain a {kind} in PEM format")
    return data.decode("ascii", "ignore")  # PEM is ASCII; comments may be anything


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or error.strerror or str(error)).replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)


def _until_s(context: ssl.SSLContext, cert: str, path: str) -> float:
    """Return the certificate's expiry, in seconds since 1970. It is read by a handshake within this
    process, which also detects any problem that clients would have with the certificate."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = context.wrap_bio(there, back, server_side=True)
    try:
        client.load_verify_locations(cadata=cert)
        theirs = client.wrap_bio(back, there)
        for side in (theirs, ours, theirs):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise BadRequest(f"tls_cert {path}: {error.verify_message}") from None
    except (OSError, ValueError) as error:
        raise BadRequest(f"tls_cert {path}: {_reason(error)}") from None
    certificate = theirs.getpeercert() or {}
    return float(ssl.cert_time_to_seconds(str(certificate["notAfter"])))


# --- names in a certificate ----------------------------------------------------------------------


def parts_of(peer: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the names that a client's certificate contains, such as ``CN=billing``."""
    if not peer:
        return frozenset()
    subject: Iterable[Sequence[tuple[str, str]]] = peer.get("subject", ())
    parts = {f"{_SHORT.get(name, name)}={value}" for group in subject for name, value in group}
    return frozenset(parts | {f"{kind}={value}" for kind, value in peer.get("subjectAltName", ())})


# --- connections ---------------------------------------------------------------------------------


class TlsServer:
    """A TLS server in place of ``loop.create_server``. Call ``start``, and ``close`` at the end."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], asyncio.Protocol],
        certificates: Certificates,
        settings: Settings,
        observed: Observed,
        on_event: OnEvent,
        *,
        plain: bytes,
    ) -> None:
        """``plain`` is the answer to clients that do not use TLS."""
        self._listener = listener
        self._make = make
        self._certificates = certificates
        self._handshakes_max = settings.tls_handshakes_max
        self._pace = Pace(settings.tls_handshakes_per_s, self._handshakes_max)
        self._timeout_s = settings.tls_handshake_timeout_s
        self._observed = observed
        self._on_event = on_event
        self._plain = plain
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.Task[None], socket.socket] = {}
        """Sockets of the handshakes in progress, by task; the oldest is first."""
        self._resume_timer: asyncio.TimerHandle | None = None
        self._failures = LogRateLimit()
        self._is_open = False

    @property
    def handshakes(self) -> int:
        """The number of handshakes in progress."""
        return len(self._waiting)

    def start(self) -> None:
        self._listener.setblocking(False)
        self._listener.listen(1024)
        self._is_open = True
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Stop accepting connections. Repeated calls do nothing."""
        if not self._is_open:
            return
        self._is_open = False
        if self._resume_timer is not None:
            self._resume_timer.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for task in list(self._waiting):
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until all handshakes have ended. asyncio's servers have the same method."""
        await asyncio.gather(*self._waiting, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_MAX):
            wait_s = self._pace.wait_s(self._loop.time())
            if wait_s:
                # The system queues new connections, and existing connections are not delayed.
                self._pause(wait_s)
                return
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._accept_later(error)
                return
            self._pace.count()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if len(self._waiting) >= self._handshakes_max:
                self._make_room()
            task = self._loop.create_task(self._handshake(sock, address))
            self._waiting[task] = sock
            task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        sock = self._waiting.pop(task, None)
        if sock is not None and task.cancelled():
            sock.close()  # the task may never have started

    def _accept_later(self, error: OSError) -> None:
        context = {"message": "socket.accept() out of system resource", "exception": error}
        self._loop.call_exception_handler(context)
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            self._pause(NO_FILES_S)

    def _pause(self, wait_s: float) -> None:
        self._loop.remove_reader(self._listener)
        self._resume_timer = self._loop.call_later(
            wait_s, self._loop.add_reader, self._listener, self._accept
        )

    def _make_room(self) -> None:
        oldest = next(iter(self._waiting))
        oldest.cancel()
        self._waiting.pop(oldest).close()
        self._log_failure(
            "?",
            f"replaced, because {self._handshakes_max} handshakes began later (tls_handshakes_max)",
        )

    async def _handshake(self, sock: socket.socket, address: Any) -> None:
        """Perform the handshake of an accepted connection."""
        handed_over = False
        try:
            async with asyncio.timeout(self._timeout_s):
                first = await self._first_byte(sock)
                if first != _HANDSHAKE:
                    self._refuse_plain(sock, first, address)
                    return
                handed_over = True  # the transport closes the socket from now on
                await self._loop.connect_accepted_socket(
                    self._make,
                    sock,
                    ssl=self._certificates.context,
                    ssl_handshake_timeout=self._timeout_s,
                    ssl_shutdown_timeout=SHUTDOWN_S,
                )
        except TimeoutError:
            limit = f"{self._timeout_s:g} s (tls_handshake_timeout_s)"
            self._log_failure(address, f"the handshake did not finish within {limit}")
        except ssl.SSLCertVerificationError as error:
            self._log_failure(address, f"the client's certificate: {error.verify_message}")
        except ssl.SSLError as error:
            self._log_failure(address, _reason(error))
        except OSError as error:
            self._log_failure(address, error.strerror or str(error))
        finally:
            if not handed_over:
                sock.close()

    async def _first_byte(self, sock: socket.socket) -> bytes:
        """Return the first byte without consuming it, or b"" if the peer has disconnected."""
        while True:
            try:
                return sock.recv(1, socket.MSG_PEEK)
            except (BlockingIOError, InterruptedError):
                pass
            readable: asyncio.Future[None] = self._loop.create_future()
            self._loop.add_reader(sock, _complete, readable)
            try:
                await readable
            finally:
                self._loop.remove_reader(sock)

    def _refuse_plain(self, sock: socket.socket, first: bytes, address: Any) -> None:
        if not first:
            return  # a port scan
        try:
            sock.send(self._plain)
            sock.shutdown(socket.SHUT_WR)
            # Unread data would reset the connection and lose the answer.
            sock.recv(65_536)
        except OSError:
            pass
        self._log_failure(address, "the client does not use TLS")

    def _log_failure(self, address: Any, reason: str) -> None:
        self._observed.tls_failures += 1
        rest = self._failures.note(self._loop.time())
        if rest is not None:
            peer = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "a client"
            self._on_event("tls_failed", f"{peer}: {reason}{rest}")


class Pace:
    """Limits the rate of handshakes. A burst has at most as many as can be in progress."""

    def __init__(self, per_s: float, in_progress_max: int) -> None:
        self._per_s = per_s
        self._left = self._burst = max(1.0, min(per_s, in_progress_max))
        self._at_s = 0.0

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until a handshake can begin."""
        left = self._left + max(0.0, now_s - self._at_s) * self._per_s
        self._left, self._at_s = min(self._burst, left), now_s
        return max(0.0, (1.0 - self._left) / self._per_s)

    def count(self) -> None:
        self._left -= 1.0


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def required_parts(text: str) -> frozenset[str]:
    """Return the parts of a rule such as ``CN=billing,O=shop``. Raise BadRequest if it is
    invalid."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        name, equals, value = part.partition("=")
        is_name = name.isalnum() or name == "IP Address"
        if not (equals and is_name and value) or len(part) > 255:
            raise BadRequest(
                "a certificate rule must have parts such as CN=billing,O=shop, DNS=host or"
                f" URI=spiffe://shop/billing, not {shown(text)}"
            )
    return frozenset(parts)
