"""Signatures as receivers check them, and tokens of callbacks."""

from __future__ import annotations

import base64
import time

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from standardwebhooks import Webhook, WebhookVerificationError

from tickwheel.errors import NotFound
from tickwheel.webhooks import (
    Callback,
    Signer,
    callback_token,
    read_token,
)

FIRST = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
NEXT = "whsec_" + base64.b64encode(b"n" * 32).decode()
PRIVATE = "whsk_" + base64.b64encode(b"p" * 32).decode()
BODY = '{"order": 42, "name": "Ä"}'.encode()


def test_the_signature_of_the_specification() -> None:
    """The example that the reference libraries test."""
    found = Signer([FIRST]).headers(
        "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
    )
    assert found["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_receiver_of_either_secret_accepts_it() -> None:
    headers = Signer([NEXT, FIRST]).headers("1-a", int(time.time()), BODY)
    for secret in (FIRST, NEXT):
        Webhook(secret).verify(BODY, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook("whsec_" + base64.b64encode(b"o" * 32).decode()).verify(BODY, headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(FIRST).verify(BODY + b" ", headers, json_parse=False)
    with pytest.raises(WebhookVerificationError):
        Webhook(FIRST).verify(BODY, headers | {"webhook-id": "2-a"})


def test_a_public_key_is_enough_to_check_ed25519() -> None:
    headers = Signer([PRIVATE]).headers("1-a", 1_700_000_000, BODY)
    version, _, signature = headers["webhook-signature"].partition(",")
    assert version == "v1a"
    key = Ed25519PrivateKey.from_private_bytes(b"p" * 32).public_key()
    key.verify(base64.b64decode(signature), b"1-a.1700000000." + BODY)
    with pytest.raises(InvalidSignature):
        key.verify(base64.b64decode(signature), b"1-a.1700000001." + BODY)


def test_both_kinds_go_together() -> None:
    found = Signer([FIRST, PRIVATE]).headers("1-a", int(time.time()), BODY)["webhook-signature"]
    assert [one[:3] for one in found.split(" ")] == ["v1,", "v1a"]


CALLBACK = Callback("orders", "g/ä.1", 2**62, 3, 7)


def test_a_token_says_its_delivery_and_who_made_it() -> None:
    token = callback_token(CALLBACK, FIRST)
    assert token.isascii() and "/" not in token and "=" not in token
    found, is_of = read_token(token)
    assert found == CALLBACK
    assert is_of([NEXT, FIRST]) and not is_of([NEXT]) and not is_of([])


@pytest.mark.parametrize("change", ["", "x", "..", "bm8.bm8", "W10.bm8", "A" * 5_000])
def test_what_is_no_token_is_refused(change: str) -> None:
    with pytest.raises(NotFound, match="callback"):
        read_token(change)


def test_a_token_of_another_delivery_is_not_signed() -> None:
    said, _, mac = callback_token(CALLBACK, FIRST).partition(".")
    other, _, _ = callback_token(CALLBACK._replace(id=5), FIRST).partition(".")
    assert other != said
    _, is_of = read_token(f"{other}.{mac}")
    assert not is_of([FIRST])
