"""CloudEvents 1.0 over HTTP as tasks: binary, structured and batched.

An event's data is the body of its task, its attributes are properties ``ce-…``, and its
partitionkey is the task's order key as well. Where the task goes and when it is due is said by the
path or the headers ``Tickwheel-…``, for all events of a batch.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec

from tickwheel.errors import BadRequest, shown
from tickwheel.server.http import types
from tickwheel.server.http.call import decoded

if TYPE_CHECKING:
    from tickwheel.server.http.call import Call
    from tickwheel.server.http.new_tasks import Given, Reader

STRUCTURED = "application/cloudevents+json"
BATCHED = "application/cloudevents-batch+json"
_VERSION = "1.0"
_REQUIRED = ("id", "source", "type")
_ATTRIBUTE_HEADER = b"ce-"
_ORDER_KEY = "partitionkey"
"""The attribute of the extension "partitioning"; a header ``Tickwheel-Order-Key`` wins over it."""

_event = msgspec.json.Decoder(dict[str, Any])
_events = msgspec.json.Decoder(list[dict[str, Any]])
_json_type = ("json", "+json")


def is_binary(call: Call) -> bool:
    """Whether the attributes of the event are in headers."""
    return b"ce-specversion" in call.headers


def is_any(call: Call) -> bool:
    return call.content_type in (STRUCTURED, BATCHED) or is_binary(call)


def read(call: Call, topic: str, data: bytes, reader: Reader) -> tuple[list[Given], bool]:
    """(tasks, whether the request is a batch of events). Raises BadRequest."""
    if call.content_type == BATCHED:
        events = decoded(data, _events)
        if not events:
            raise BadRequest("the batch has no event; at least 1 is needed")
        return [_structured(call, topic, event, reader) for event in events], True
    if call.content_type == STRUCTURED:
        return [_structured(call, topic, decoded(data, _event), reader)], False
    attributes: dict[str, types.Property] = {
        name[len(_ATTRIBUTE_HEADER) :].decode("latin-1"): unquote(value.decode("latin-1"))
        for name, value in call.headers.items()
        if name.startswith(_ATTRIBUTE_HEADER)
    }
    content_type = call.header(b"content-type")
    if content_type:
        attributes["datacontenttype"] = content_type
    return [_task(call, topic, attributes, data, reader)], False


def _structured(call: Call, topic: str, event: dict[str, Any], reader: Reader) -> Given:
    data, packed = event.pop("data", None), event.pop("data_base64", None)
    for name, value in event.items():
        if type(value) not in (str, int, bool):
            raise BadRequest(
                f"the event's {shown(name)} must be a string, a whole number or a boolean, not"
                f" {shown(value)}"
            )
    if packed is not None:
        if data is not None:
            raise BadRequest("the event must have one of data and data_base64")
        body = _from_base64(packed)
    else:
        body = _body(data, event.get("datacontenttype"))
    return _task(call, topic, event, body, reader)


def _body(data: Any, content_type: object) -> bytes:
    """The body of an event's task: JSON stays JSON, and text that is said to be no JSON is text."""
    if data is None:
        return b""
    kind = str(content_type or "application/json").partition(";")[0].strip().lower()
    is_json = kind.partition("/")[2].endswith(_json_type)
    if isinstance(data, str) and not is_json:
        return data.encode()
    return msgspec.json.encode(data)


def _from_base64(packed: object) -> bytes:
    try:
        return base64.b64decode(packed, validate=True) if isinstance(packed, str) else _no_text()
    except (binascii.Error, ValueError):
        raise BadRequest(f"data_base64 must be base64, not {shown(packed)}") from None


def _no_text() -> bytes:
    raise ValueError


def _task(
    call: Call, topic: str, attributes: dict[str, types.Property], body: bytes, reader: Reader
) -> Given:
    if attributes.get("specversion") != _VERSION:
        version = shown(attributes.get("specversion"))
        raise BadRequest(f"the event's specversion must be {_VERSION!r}, not {version}")
    for name in _REQUIRED:
        if not attributes.get(name):
            raise BadRequest(f"the event must have {name}")
    given = reader.of_headers(topic, call.headers, body)
    options = dict(given.task[3]) if len(given.task) > 3 else {}
    if attributes.get(_ORDER_KEY):
        options.setdefault("order_key", attributes[_ORDER_KEY])
    own = options.get("properties", {})
    options["properties"] = own | {f"ce-{name}": value for name, value in attributes.items()}
    return given._replace(task=(*given.task[:3], options))
