"""What the daemon and the process that sends share of targets: which addresses may be asked, how
requests are signed, and the tokens of callbacks.

By default no address may be asked of this machine, of its network, or of any other place that the
internet cannot reach. Whoever may set a target could otherwise have the daemon ask
what only the daemon can reach.

A name is looked up once, and what was looked up is what is connected to: an answer that changes
between a check and the connection (DNS rebinding) is checked again, because there is only the one
check. IPv6 addresses that carry an IPv4 address are judged by both.

Requests are signed as Standard Webhooks says (https://www.standardwebhooks.com). A secret
``whsec_…`` signs by HMAC-SHA256 (``v1``), ``whsk_…`` by Ed25519 (``v1a``; needs the
package cryptography). With several secrets a request has a signature of each, so that a receiver
who knows one of them can check it while they change. ``verify`` is for receivers.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import TYPE_CHECKING, Final, NamedTuple

from tickwheel.errors import NotFound, needs_extra, shown

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_NAT64: Final = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"))
_COMPATIBLE: Final = IPv6Network("::/96")
"""Addresses that carry an IPv4 address in their last 32 bits."""


class ForbiddenAddress(OSError):
    """An address may not be asked."""


class Guard:
    """Decides whether an address may be asked; ``allow`` are networks that may, though they are not
    public."""

    def __init__(self, allow: Sequence[Network] = ()) -> None:
        self._allow = tuple(allow)

    @classmethod
    def of(cls, texts: Iterable[str]) -> Guard:
        """The guard that allows these networks too, written like 10.0.0.0/8. Raises ValueError."""
        return cls([ip_network(text) for text in texts])

    def check(self, host: str, address: str) -> None:
        """Raises ForbiddenAddress unless ``address``, which ``host`` stands for, may be asked."""
        try:
            found = ip_address(address.partition("%")[0])
        except ValueError:
            raise ForbiddenAddress(f"{host} has the address {address!r}, which is none") from None
        ones = (found, *_carried(found))
        if all(self._allows(one) or _is_public(one) for one in ones):
            return
        named = host if host == address else f"{host} ({address})"
        raise ForbiddenAddress(
            f"{named} is not a public address; push_allow names others that may be asked"
        )

    def _allows(self, address: Address) -> bool:
        return any(address in network for network in self._allow)

    async def resolve(
        self, host: str, port: int, family: int = socket.AF_UNSPEC
    ) -> list[tuple[int, str]]:
        """(family, address) of those addresses of ``host`` that may be asked. Raises
        ForbiddenAddress when there are only others, OSError when there are none."""
        literal = _literal(host)
        if literal is not None:
            self.check(host, str(literal))
            one = socket.AF_INET if literal.version == 4 else socket.AF_INET6
            return [(one, str(literal))]
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(
            host, port, family=socket.AddressFamily(family), type=socket.SOCK_STREAM
        )
        allowed: list[tuple[int, str]] = []
        refusal: ForbiddenAddress | None = None
        for one, _, _, _, where in found:
            address = str(where[0])
            try:
                self.check(host, address)
            except ForbiddenAddress as error:
                refusal = error
            else:
                allowed.append((one, address))
        if refusal is not None and not allowed:
            raise refusal
        return allowed


def _literal(host: str) -> Address | None:
    """The address that ``host`` is; None: it is a name, or an address in another form."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def _is_public(address: Address) -> bool:
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None or address in _NAT64[0]:
            return True  # the IPv4 address decides
        if address in _COMPATIBLE or address.is_site_local:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _carried(address: Address) -> Iterable[IPv4Address]:
    """The IPv4 addresses that an IPv6 address carries."""
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
    """Signs with some secrets. Raises BadRequest when a package is missing for one."""

    def __init__(self, secrets: Sequence[str]) -> None:
        self._signs: list[Sign] = [_sign_of(secret) for secret in secrets]

    def headers(self, message_id: str, at_s: int, body: bytes) -> dict[str, str]:
        """The three headers of a request with this body, sent at this time."""
        found = {"webhook-id": message_id, "webhook-timestamp": str(at_s)}
        if self._signs:
            signed = b"%b.%d.%b" % (message_id.encode(), at_s, body)
            found["webhook-signature"] = " ".join(sign(signed) for sign in self._signs)
        return found


def _sign_of(secret: str) -> Sign:
    if secret.startswith(PRIVATE):
        return _of_private(private_key(secret))
    key = base64.b64decode(secret.removeprefix(SYMMETRIC))
    if not key:
        raise ValueError("a secret is empty: everybody could sign with it")

    def sign(signed: bytes) -> str:
        return "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()

    return sign


def _of_private(key: Ed25519PrivateKey) -> Sign:
    def sign(signed: bytes) -> str:
        return "v1a," + base64.b64encode(key.sign(signed)).decode()

    return sign


NEEDS_EXTRA = f"a secret {PRIVATE}…", "encryption"
"""What needs an extra here, and which."""


def private_key(secret: str) -> Ed25519PrivateKey:
    """The key of a secret ``whsk_…``. Raises BadRequest without the package for it."""
    with needs_extra(*NEEDS_EXTRA):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    seed = base64.b64decode(secret.removeprefix(PRIVATE))[:SEED_BYTES]
    return Ed25519PrivateKey.from_private_bytes(seed)


class InvalidSignature(ValueError):
    """A request is not signed by a secret of its receiver, or was not sent just now."""


PUBLIC: Final = "whpk_"
TOLERANCE_S: Final = 300.0
"""Seconds between the clocks of sender and receiver, beyond which a request is refused."""


def verify(
    secrets: str | Sequence[str],
    headers: Mapping[str, str],
    body: bytes,
    *,
    tolerance_s: float = TOLERANCE_S,
    now_s: float | None = None,
) -> str:
    """Check the signature of a request with this body, whatever its bytes are, and return its
    ``webhook-id``, which is the same for every attempt.

    ``secrets``: one or several of ``whsec_…``, or of ``whpk_…``, the public key of a ``whsk_…``
    (which needs the package cryptography). Raises InvalidSignature; ValueError for a secret that is
    empty or cannot be read.
    """
    named = {name.lower(): value for name, value in headers.items()}
    try:
        message_id, at, given = (
            named[name] for name in ("webhook-id", "webhook-timestamp", "webhook-signature")
        )
    except KeyError as error:
        raise InvalidSignature(f"the request has no header {error.args[0]}") from None
    if not (at.isascii() and at.isdigit() and len(at) <= TIMESTAMP_DIGITS_MAX):
        raise InvalidSignature(f"webhook-timestamp must be whole seconds, not {shown(at)}")
    away_s = (time.time() if now_s is None else now_s) - int(at)
    if abs(away_s) > tolerance_s:
        raise InvalidSignature(
            f"the request was sent {away_s:.0f} s ago; {tolerance_s:g} s (tolerance_s) are allowed"
        )
    signed = b"%b.%b.%b" % (message_id.encode(), at.encode(), body)
    signatures = given.split(" ")
    for secret in (secrets,) if isinstance(secrets, str) else secrets:
        if _is_signed(secret, signed, signatures):
            return message_id
    raise InvalidSignature("no signature of the request is by a secret of the receiver")


TIMESTAMP_DIGITS_MAX: Final = 12


def _is_signed(secret: str, signed: bytes, signatures: Sequence[str]) -> bool:
    if not secret.startswith(PUBLIC):
        right = _sign_of(secret)(signed).encode()
        return any(hmac.compare_digest(right, one.encode("utf-8", "replace")) for one in signatures)
    with needs_extra(f"a key {PUBLIC}…", "encryption"):
        from cryptography.exceptions import InvalidSignature as Wrong
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    key = Ed25519PublicKey.from_public_bytes(base64.b64decode(secret.removeprefix(PUBLIC)))
    for one in signatures:
        version, _, text = one.partition(",")
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
    """A text, safe in a URL, that only somebody who knows the secret of the push can make."""
    data = json.dumps(callback, separators=(",", ":")).encode()
    return f"{_text(data)}.{_text(_mac(data, secret))}"


def read_token(token: str) -> tuple[Callback, Callable[[Sequence[str]], bool]]:
    """What a token says, and whether one of some secrets has made it. Raises NotFound when it is no
    token at all."""
    try:
        if len(token) > TOKEN_LENGTH_MAX:
            raise ValueError("it is too long")
        said, _, mac_text = token.partition(".")
        data, mac = _data(said), _data(mac_text)
        topic, group, *numbers = json.loads(data)
        callback = Callback(topic, group, *numbers)
        if [type(one) for one in callback] != [str, str, int, int, int]:
            raise ValueError("its fields are others")
    except (ValueError, TypeError, RecursionError):
        raise NotFound("there is no such callback, or not any more") from None

    def is_of(secrets: Sequence[str]) -> bool:
        return any(hmac.compare_digest(_mac(data, secret), mac) for secret in secrets)

    return callback, is_of


def _mac(data: bytes, secret: str) -> bytes:
    key = hashlib.sha256(b"tickwheel callback " + secret.encode()).digest()
    return hmac.digest(key, data, hashlib.sha256)[:MAC_BYTES]


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _data(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
