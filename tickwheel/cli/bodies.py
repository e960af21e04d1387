"""Stored bodies as people and programs read them: unpacked, as far as this process has the keys."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from functools import lru_cache
from typing import Any

import msgpack

from tickwheel.cli.output import BODY_SHOWN_MAX, body_fields, body_text, printable
from tickwheel.client.encodings import KEYS_VARIABLE, Codec, key_of
from tickwheel.errors import Undecodable


@lru_cache(1)
def _codec(keys_file: str | None) -> Codec:
    """What unpacks bodies, with the keys of the file that this process was given."""
    return Codec(keys_file=keys_file)


def unpacked(topic: str, body: bytes, encoding: str | None) -> tuple[bytes, str | None, str]:
    """A body as far as it can be read here, what it is then, and why it is no further."""
    if encoding is None:
        return body, None, ""
    try:
        return *_codec(os.environ.get(KEYS_VARIABLE)).unpacked(topic, body, encoding), ""
    except Undecodable as error:
        key = key_of(encoding)
        why = error.message if key is None else f"encrypted with key {key}"
        return body, encoding, why


def stored_text(
    topic: str, body: bytes, encoding: str | None, length_max: int | None = BODY_SHOWN_MAX
) -> str:
    """``body_text`` of a stored body, unpacked; or why it cannot be."""
    body, encoding, why = unpacked(topic, body, encoding)
    if why:
        return printable(f"({len(body)} bytes: {why})")
    if encoding is not None and encoding.partition(";")[0] == "msgpack":
        with suppress(ValueError, msgpack.exceptions.UnpackException):
            return printable(json.dumps(msgpack.unpackb(body), default=str), length_max)
    return body_text(body, length_max)


def stored_fields(topic: str, body: bytes, encoding: str | None) -> dict[str, Any]:
    """``body_fields`` of a stored body, unpacked if that can be; with ``encoding``, what it is, and
    ``stored_encoding``, where that was another one."""
    body, now, _ = unpacked(topic, body, encoding)
    fields = body_fields(body) | {"encoding": now}
    return fields if now == encoding else fields | {"stored_encoding": encoding}
