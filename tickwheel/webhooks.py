"""Allowed addresses, signatures of requests, and tokens of callbacks, for the daemon and the
outbound process.

By default only public addresses are allowed, because a user who can set a target could otherwise
cause the daemon to send requests to this machine or its private network.

A name is resolved once, and the connection uses the checked addresses, so a DNS answer that changes
in between (DNS rebinding) has no effect. An IPv6 address that contains an IPv4 address is allowed
only if both addresses are allowed.

Requests are signed according to Standard Webhooks (https://www.standardwebhooks.com). A secret
``whsec_…`` signs with HMAC-SHA256 (``v1``), ``whsk_…`` with Ed25519 (``v1a``; needs the package
cryptography). With several secrets a request has a signature for each, so that receivers can verify
it while secrets are rotated. ``verify`` is for receivers.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tickwheel.errors import NotFound, needs_extra, shown

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_NAT64: Final = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"))
_COMPATIBLE: Final = IPv6Network("::/96")
"""Addresses that contain an IPv4 address in the last 32 bits."""


LOOK_UPS_MAX: Final = 256
"""Maximum number of host names that are looked up at the same time, each in a thread."""


class LookUps:
    """Looks up host names in threads of its own.

    A name server that does not answer holds a thread for many seconds. In the threads of the event
    loop, a few such names would stop all other work. A host has one look-up at a time, whose result
    is shared. It counts until its thread returns, even if nobody waits for it any more.
    """

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(LOOK_UPS_MAX)
        self._running: dict[tuple[Any, ...], asyncio.Task[Future[list[Any]]]] = {}

    @property
    def count(self) -> int:
        """The number of look-ups that run or wait for a thread."""
        return len(self._running)

    async def getaddrinfo(self, host: Any, port: Any, **options: int) -> list[Any]:
        """Return what the event loop's ``getaddrinfo`` returns, or raise its error."""
        key = (host, *sorted(options.items()))
        look_up = self._running.get(key)
        if look_up is None:
            look_up = self._running[key] = asyncio.create_task(self._look_up(host, options))
            look_up.add_done_callback(lambda _: self._running.pop(key))
        await asyncio.wait((look_up,))  # a cancelled caller does not end it
        results = look_up.result().result()
        return [(*kind, (address[0], port, *address[2:])) for *kind, address in results]

    async def _look_up(self, host: Any, options: dict[str, int]) -> Future[list[Any]]:
        future: Future[list[Any]] = Future()
        future.set_running_or_notify_cancel()  # a thread cannot be cancelled

        def run() -> None:
            try:
                future.set_result(socket.getaddrinfo(host, None, **options))
            except Exception as error:
                future.set_exception(error)

        async with self._room:
            threading.Thread(target=run, name="tickwheel-look-up", daemon=True).start()
            with suppress(Exception):  # callers read it from the future
                await asyncio.wrap_future(future)
        return future


class ForbiddenAddress(OSError):
    """The address is not allowed."""


class Guard:
    """Decides whether an address is allowed. ``allow`` are allowed networks that are not public."""

    def __init__(self, allow: Sequence[Network] = ()) -> None:
        self._allow = tuple(allow)
        self.look_ups = LookUps()

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> Guard:
        """Return a guard that also allows networks such as 10.0.0.0/8. Raise ValueError if a text
        is not a network."""
        return cls([ip_network(text) for text in texts])

    def check(self, host: str, address: str) -> None:
        """Raise ForbiddenAddress unless ``address``, an address of ``host``, is allowed."""
        try:
            parsed = ip_address(address.partition("%")[0])
        except ValueError:
            raise ForbiddenAddress(f"{address!r} of {host} is not a valid address") from None
        addresses = (parsed, *_embedded(parsed))
        if all(self._allows(candidate) or _is_public(candidate) for candidate in addresses):
            return
        label = host if host == address else f"{host} ({address})"
        raise ForbiddenAddress(f"{label} is not a public address; allow others with push_allow")

    def _allows(self, address: Address) -> bool:
        return any(address in network for network in self._allow)

    async def resolve(
        self, host: str, port: int, family: int = socket.AF_UNSPEC
    ) -> list[tuple[int, str]]:
        """Return the family and text of each allowed address of ``host``.

        Raise ForbiddenAddress if none is allowed, or OSError if the host has none."""
        literal = literal_of(host)
        if literal is not None:
            self.check(host, str(literal))
            literal_family = socket.AF_INET if literal.version == 4 else socket.AF_INET6
            return [(literal_family, str(literal))]
        results = await self.look_ups.getaddrinfo(
            host, port, family=family, type=socket.SOCK_STREAM
        )
        allowed: list[tuple[int, str]] = []
        refusal: ForbiddenAddress | None = None
        for address_family, _, _, _, sockaddr in results:
            address = str(sockaddr[0])
            try:
                self.check(host, address)
            except ForbiddenAddress as error:
                refusal = error
            else:
                allowed.append((address_family, address))
        if refusal is not None and not allowed:
            raise refusal
        return allowed


def literal_of(host: str) -> Address | None:
    """Return the address if ``host`` is an address, or None for a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def _is_public(address: Address) -> bool:
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None or address in _NAT64[0]:
            return True  # the embedded IPv4 address decides
        if address in _COMPATIBLE or address.is_site_local:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _embedded(address: Address) -> Iterable[IPv4Address]:
    """Yield the IPv4 addresses that an IPv6 address contains."""
    if isinstance(address, IPv4Address):
        return
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo
    if any(address in network for network in _NAT64):
        yield IPv4Address(int(address) & 0xFFFFFFFF)


SYMMETRIC, PRIVATE = "whsec_", "whsk_"
SEED_BYTES = 32
Sign = Callable[[bytes], str]


class Signer:
    """Signs requests with secrets. Creating it raises BadRequest if a package is missing."""

    def __init__(self, secrets: Sequence[str]) -> None:
        self._signs: list[Sign] = [_sign_of(secret) for secret in secrets]

    def headers(self, message_id: str, at_s: int, body: bytes) -> dict[str, str]:
        """Return the headers of a request with this body, sent at ``at_s`` (Unix time)."""
        headers = {"webhook-id": message_id, "webhook-timestamp": str(at_s)}
        if self._signs:
            signed = b"%b.%d.%b" % (message_id.encode(), at_s, body)
            headers["webhook-signature"] = " ".join(sign(signed) for sign in self._signs)
        return headers


def _sign_of(secret: str) -> Sign:
    if secret.startswith(PRIVATE):
        return _private_sign(private_key(secret))
    key = base64.b64decode(secret.removeprefix(SYMMETRIC))
    if not key:
        raise ValueError("a secret must not be empty, since anyone could sign with it")

    def sign(signed: bytes) -> str:
        return "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()

    return sign


def _private_sign(key: Ed25519PrivateKey) -> Sign:
    def sign(signed: bytes) -> str:
        return "v1a," + base64.b64encode(key.sign(signed)).decode()

    return sign


NEEDS_EXTRA = f"a secret {PRIVATE}…", "encryption"
"""A feature and the extra that it needs, as arguments of ``needs_extra``."""


def private_key(secret: str) -> Ed25519PrivateKey:
    """Return the key that a secret ``whsk_…`` contains. Raise BadRequest if cryptography is not
    installed."""
    with needs_extra(*NEEDS_EXTRA):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    seed = base64.b64decode(secret.removeprefix(PRIVATE))[:SEED_BYTES]
    return Ed25519PrivateKey.from_private_bytes(seed)


class InvalidSignature(ValueError):
    """A request has no valid signature, or was not sent recently."""


PUBLIC: Final = "whpk_"
TOLERANCE_S: Final = 300.0
"""Maximum seconds between a request's timestamp and the receiver's clock."""


def verify(
    secrets: str | Sequence[str],
    headers: Mapping[str, str],
    body: bytes,
    *,
    tolerance_s: float = TOLERANCE_S,
    now_s: float | None = None,
) -> str:
    """Verify a request, and return its ``webhook-id``, which is the same for every attempt.

    ``body`` contains the raw bytes. ``secrets`` are one or several texts ``whsec_…``, or
    ``whpk_…``, the public key of a ``whsk_…`` (which needs the package cryptography).
    ``tolerance_s`` is the maximum age in seconds. Raise InvalidSignature, or ValueError for an
    empty or malformed secret.
    """
    by_name = {name.lower(): value for name, value in headers.items()}
    try:
        message_id, at, signature = (
            by_name[name] for name in ("webhook-id", "webhook-timestamp", "webhook-signature")
        )
    except KeyError as error:
        raise InvalidSignature(f"the request has no header {error.args[0]}") from None
    if not (at.isascii() and at.isdigit() and len(at) <= TIMESTAMP_DIGITS_MAX):
        raise InvalidSignature(f"webhook-timestamp must be whole seconds, not {shown(at)}")
    age_s = (time.time() if now_s is None else now_s) - int(at)
    if abs(age_s) > tolerance_s:
        raise InvalidSignature(
            f"the request was sent {age_s:.0f} s ago; the limit is {tolerance_s:g} s (tolerance_s)"
        )
    signed = b"%b.%b.%b" % (message_id.encode(), at.encode(), body)
    signatures = signature.split(" ")
    for secret in (secrets,) if isinstance(secrets, str) else secrets:
        if _is_signed(secret, signed, signatures):
            return message_id
    raise InvalidSignature("no signature of the request matches a secret of the receiver")


TIMESTAMP_DIGITS_MAX: Final = 12


def _is_signed(secret: str, signed: bytes, signatures: Sequence[str]) -> bool:
    if not secret.startswith(PUBLIC):
        expected = _sign_of(secret)(signed).encode()
        return any(
            hmac.compare_digest(expected, signature.encode("utf-8", "replace"))
            for signature in signatures
        )
    with needs_extra(f"a key {PUBLIC}…", "encryption"):
        from cryptography.exceptions import InvalidSignature as Wrong
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    key = Ed25519PublicKey.from_public_bytes(base64.b64decode(secret.removeprefix(PUBLIC)))
    for signature in signatures:
        version, _, text = signature.partition(",")
        with suppress(ValueError, Wrong):
            if version == "v1a":
                key.verify(base64.b64decode(text, validate=True), signed)
                return True
    return False


# --- callbacks -----------------------------------------------------------------------------------

TOKEN_LENGTH_MAX = 2048
MAC_BYTES = 16


class Callback(NamedTuple):
    """The delivery that a callback settles."""

    topic: str
    group: str
    id: int
    epoch: int
    attempt: int


def callback_token(callback: Callback, secret: str) -> str:
    """Return a URL-safe token. Only a holder of the push's secret can create it."""
    data = json.dumps(callback, separators=(",", ":")).encode()
    return f"{_text(data)}.{_text(_mac(data, secret))}"


def read_token(token: str) -> tuple[Callback, Callable[[Sequence[str]], bool]]:
    """Return the callback that a token contains, and a function that returns whether the token was
    created with one of the secrets passed to it. Raise NotFound for a malformed token."""
    try:
        if len(token) > TOKEN_LENGTH_MAX:
            raise ValueError("the token is too long")
        data_text, _, mac_text = token.partition(".")
        data, mac = _data(data_text), _data(mac_text)
        topic, group, *numbers = json.loads(data)
        callback = Callback(topic, group, *numbers)
        if [type(value) for value in callback] != [str, str, int, int, int]:
            raise ValueError("the token does not have the expected fields")
    except (ValueError, TypeError, RecursionError):
        raise NotFound("there is no such callback, or it has ended") from None

    def is_signed_by(secrets: Sequence[str]) -> bool:
        return any(hmac.compare_digest(_mac(data, secret), mac) for secret in secrets)

    return callback, is_signed_by


def _mac(data: bytes, secret: str) -> bytes:
    key = hashlib.sha256(b"tickwheel callback " + secret.encode()).digest()
    return hmac.digest(key, data, hashlib.sha256)[:MAC_BYTES]


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _data(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
