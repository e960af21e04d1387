"""Plain values of operations as JSON: ids as text, bodies as text or base64, receipts opaque."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tickwheel.engine.topics import Item
from tickwheel.errors import BadRequest, shown
from tickwheel.model.records import TaskOptions

_encoder = msgspec.json.Encoder()
as_json = _encoder.encode
JSON = "application/json"
JSON_TYPE = JSON.encode()


# --- receipts ------------------------------------------------------------------------------------


class Receipt(NamedTuple):
    """What names a delivery when it is settled."""

    topic: str
    group: str
    id: int
    epoch: int
    attempt: int
    stream: int
    """The stream that the delivery came from; 0: it came from a pull."""


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Receipt).decode
RECEIPT_LENGTH_MAX = 1_024


def receipt_text(receipt: Receipt) -> str:
    """The receipt as an opaque text that is safe in a URL."""
    return base64.urlsafe_b64encode(_pack(receipt)).rstrip(b"=").decode()


def read_receipt(text: str, field: str) -> Receipt:
    """The receipt in a text. Raises BadRequest."""
    if len(text) <= RECEIPT_LENGTH_MAX:
        try:
            data = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
            return _unpack(data)
        except (binascii.Error, ValueError, msgspec.DecodeError):
            pass
    raise BadRequest(f"{field} must be a receipt as a delivery has it, not {shown(text)}")


# --- tasks ---------------------------------------------------------------------------------------


def put_body(into: dict[str, Any], body: bytes) -> None:
    """Put a body into an answer: as text if it is UTF-8, else as base64."""
    try:
        into["body"] = body.decode()
    except UnicodeDecodeError:
        into["body_base64"] = body


# --- deliveries ----------------------------------------------------------------------------------


def delivery_view(
    item: Item, topic: str, group: str, epoch: int, now_ms: int, stream: int = 0
) -> dict[str, Any]:
    """One delivery as the API answers it, made at ``now_ms``."""
    row, attempt, past = item
    receipt = Receipt(topic, group, row.id, epoch, attempt, stream)
    view: dict[str, Any] = {
        "id": str(row.id),
        # A broadcast has no group, and nothing to settle.
        "receipt": receipt_text(receipt) if group else "",
        "due_ms": row.due_ms,
        "delivered_ms": now_ms,
        "attempt": attempt,
        "failures": past.failed,
        "deaths": past.deaths,
    }
    put_body(view, row.body)
    if row.options is not None:
        _put_options(view, row.options)
    return view


def _put_options(view: dict[str, Any], options: TaskOptions) -> None:
    if options.key is not None:
        view["key"] = options.key
    if options.tag is not None:
        view["tag"] = options.tag
    if options.properties:
        view["properties"] = options.properties
    if options.priority:
        view["priority"] = options.priority
    if options.order_key is not None:
        view["order_key"] = options.order_key
    if options.replayed is not None:
        view["replay_of"] = str(options.replayed.id)
        if options.replayed.key is not None:
            view["key"] = options.replayed.key


def deliveries(items: Sequence[Item], topic: str, group: str, epoch: int, now_ms: int) -> bytes:
    """The answer to a pull, as JSON."""
    views = [delivery_view(item, topic, group, epoch, now_ms) for item in items]
    return as_json({"deliveries": views})
