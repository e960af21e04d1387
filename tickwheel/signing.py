"""Signatures of requests, as Standard Webhooks says (https://www.standardwebhooks.com), and the
tokens of callbacks.

A secret ``whsec_…`` signs by HMAC-SHA256 (``v1``), ``whsk_…`` by Ed25519 (``v1a``; needs the
package cryptography). With several secrets a request has a signature of each, so that a receiver
who knows one of them can check it while they change.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.errors import NotFound, needs_extra

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

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
