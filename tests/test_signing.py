"""Signatures as receivers check them, and tokens of callbacks."""

from __future__ import annotations

import base64
import hmac
import time
from math import inf

import pytest
from cryptography.exceptions import InvalidSignature as WrongSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from standardwebhooks import Webhook, WebhookVerificationError

from support.vectors import vectors
from tickwheel.errors import NotFound
from tickwheel.webhooks import (
    TOLERANCE_S,
    Callback,
    InvalidSignature,
    Signer,
    callback_token,
    private_key,
    read_token,
    verify,
)

FIRST = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
NEXT = "whsec_" + base64.b64encode(b"n" * 32).decode()
PRIVATE = "whsk_" + base64.b64encode(b"p" * 32).decode()
BODY = '{"order": 42, "name": "Ä"}'.encode()


NOW_S = 1_700_000_000


def public_of(secret: str) -> str:
    raw = private_key(secret).public_key().public_bytes_raw()
    return f"whpk_{base64.b64encode(raw).decode()}"


OF_OTHERS = vectors("standard_webhooks")


@pytest.mark.parametrize(
    ("secret", "message_id", "at_s", "body", "signature"), OF_OTHERS["signatures"]
)
def test_signatures_are_those_of_the_reference_libraries(
    secret: str, message_id: str, at_s: int, body: str, signature: str
) -> None:
    headers = Signer([secret]).headers(message_id, at_s, body.encode())
    assert headers["webhook-signature"] == signature


@pytest.mark.parametrize("secret", OF_OTHERS["secrets"])
@pytest.mark.parametrize(("_", "away_s", "changes", "is_timed", "is_valid"), OF_OTHERS["cases"])
def test_a_request_is_valid_as_in_the_reference_libraries(
    secret: str, _: str, away_s: int, changes: dict[str, str | None], is_timed: bool, is_valid: bool
) -> None:
    message_id, body = OF_OTHERS["id"], OF_OTHERS["body"].encode()
    headers: dict[str, str | None] = {}
    headers |= Signer([secret]).headers(message_id, NOW_S + away_s, body)
    signature = headers["webhook-signature"]
    for name, value in changes.items():
        headers[name] = value and value.format(signature=signature)
    sent = {name: value for name, value in headers.items() if value is not None}
    receiver = secret if not secret.startswith("whsk_") else public_of(secret)
    tolerance_s = TOLERANCE_S if is_timed else inf
    if is_valid:
        assert verify(receiver, sent, body, now_s=NOW_S, tolerance_s=tolerance_s) == message_id
    else:
        with pytest.raises(InvalidSignature):
            verify(receiver, sent, body, now_s=NOW_S, tolerance_s=tolerance_s)


@pytest.mark.parametrize(
    "secret", [*OF_OTHERS["refused_secrets"], "whsec_", "whsec_=", "?", "whpk_"]
)
def test_an_empty_secret_verifies_no_request(secret: str) -> None:
    """A receiver whose secret is missing refuses all requests, also one signed with no key."""
    signed = b"1-a.%d.%b" % (NOW_S, BODY)
    mac = base64.b64encode(hmac.digest(b"", signed, "sha256")).decode()
    headers = {
        "webhook-id": "1-a", "webhook-timestamp": str(NOW_S), "webhook-signature": f"v1,{mac}",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"empty|32 bytes"):
        verify(secret, headers, BODY, now_s=NOW_S)


def test_a_receiver_with_either_secret_accepts_a_request() -> None:
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
    with pytest.raises(WrongSignature):
        key.verify(base64.b64decode(signature), b"1-a.1700000001." + BODY)


def test_hmac_and_ed25519_signatures_are_combined() -> None:
    result = Signer([FIRST, PRIVATE]).headers("1-a", int(time.time()), BODY)["webhook-signature"]
    assert [part[:3] for part in result.split(" ")] == ["v1,", "v1a"]


PUBLIC = public_of(PRIVATE)


@pytest.mark.parametrize("body", [b"", b"order 42", b"\xff\x00", b"\x81\xa1n\x01", BODY])
@pytest.mark.parametrize("secret", [FIRST, NEXT, PUBLIC])
def test_a_receiver_verifies_a_body_of_any_bytes(body: bytes, secret: str) -> None:
    result = Signer([FIRST, NEXT, PRIVATE]).headers("1-a", NOW_S, body)
    headers = {name.title(): value for name, value in result.items()}
    assert verify(secret, headers, body, now_s=NOW_S + 299.0) == "1-a"
    assert verify([OTHER, secret], headers, body, now_s=NOW_S - 299.0) == "1-a"
    for wrong in (body + b" ", body + b"\0", b"x"):
        with pytest.raises(InvalidSignature, match="no signature"):
            verify(secret, headers, wrong, now_s=NOW_S)


OTHER = "whsec_" + base64.b64encode(b"o" * 32).decode()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"webhook-id": "2-a"}, "no signature"),
        ({"webhook-timestamp": str(NOW_S + 1)}, "no signature"),
        ({"webhook-timestamp": str(NOW_S - 301)}, "sent 301 s ago"),
        ({"webhook-timestamp": str(NOW_S + 301)}, "sent -301 s ago"),
        ({"webhook-timestamp": "nan"}, "whole seconds"),
        ({"webhook-timestamp": "-1"}, "whole seconds"),
        ({"webhook-timestamp": "9" * 5_000}, "whole seconds"),
        ({"webhook-timestamp": "\u0661"}, "whole seconds"),
        ({"webhook-signature": ""}, "no signature"),
        ({"webhook-signature": "v1,é v1 v1a,AA== v2,x \ud800"}, "no signature"),
    ],
)
def test_a_request_that_is_not_signed_is_refused(change: dict[str, str], reason: str) -> None:
    headers = Signer([FIRST, PRIVATE]).headers("1-a", NOW_S, BODY) | change
    for secrets in (FIRST, [PUBLIC], [OTHER, FIRST]):
        with pytest.raises(InvalidSignature, match=reason):
            verify(secrets, headers, BODY, now_s=NOW_S)
    for name in headers:
        with pytest.raises(InvalidSignature, match=f"no header {name}"):
            verify(FIRST, {k: v for k, v in headers.items() if k != name}, BODY, now_s=NOW_S)
    with pytest.raises(InvalidSignature):
        verify([], Signer([FIRST]).headers("1-a", NOW_S, BODY), BODY, now_s=NOW_S)


CALLBACK = Callback("orders", "g/ä.1", 2**62, 3, 7)


def test_a_token_names_its_delivery_and_signer() -> None:
    token = callback_token(CALLBACK, FIRST)
    assert token.isascii() and "/" not in token and "=" not in token
    found, is_of = read_token(token)
    assert found == CALLBACK
    assert is_of([NEXT, FIRST]) and not is_of([NEXT]) and not is_of([])


@pytest.mark.parametrize("change", ["", "x", "..", "bm8.bm8", "W10.bm8", "A" * 5_000])
def test_an_invalid_token_is_refused(change: str) -> None:
    with pytest.raises(NotFound, match="callback"):
        read_token(change)


def test_a_token_of_another_delivery_is_not_signed() -> None:
    said, _, mac = callback_token(CALLBACK, FIRST).partition(".")
    other, _, _ = callback_token(CALLBACK._replace(id=5), FIRST).partition(".")
    assert other != said
    _, is_of = read_token(f"{other}.{mac}")
    assert not is_of([FIRST])
