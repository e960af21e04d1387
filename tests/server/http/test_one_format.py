"""A task in JSON is one format: a line of the command line's and a body over HTTP say the same."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from support.encodings import ENCODING
from support.traces import TRACE
from tickwheel.cli.enqueue import FIELDS, read_task
from tickwheel.client.tasks import TaskChecker
from tickwheel.errors import BadRequest
from tickwheel.limits import DELAY_LEVELS, parse_delay_levels
from tickwheel.model import policies
from tickwheel.server.http import types
from tickwheel.server.http.call import decoded
from tickwheel.server.http.types import Reader

DUE_MS = 4_000_000_000_000
POLICY = {"kind": "fixed", "delay_ms": 5_000, "retries": 3}
REPLACE = {"action": "replace", "window_ms": 60_000, "max_wait_ms": 90_000}

TASKS: list[dict[str, Any]] = [
    {},
    {"body": "text"},
    {"body_base64": "/w=="},
    {"delay": "5m"},
    {"delay": 300},
    {"delay": 0.5},
    {"delay_ms": 300_000},
    {"delay_level": 3},
    {"due_ms": DUE_MS},
    {"at": "2096-10-02T07:06:40Z"},
    {"key": "k", "if_pending": "keep"},
    {"key": "k", "if_pending": {"action": "replace", "window": "1m", "max_wait": 90}},
    {"key": "k", "if_pending": REPLACE},
    {"key": "k", "if_pending": {"action": "reject", "unique_until": "started"}},
    {"key": "k", "if_pending": {"action": "replace", "replaces": "due", "due": "later"}},
    {"tag": "g", "priority": 7, "order_key": "o", "properties": {"a": "b", "c": 1, "d": True}},
    {"ttl": "1h"},
    {"ttl_ms": 3_600_000},
    {"within": "10m"},
    {"within": 600},
    {"within_ms": 600_000},
    {"retry": "none"},
    {"retry": "fixed:delay=5s,retries=3"},
    {"retry": POLICY},
    {"trace": TRACE},
    {"encoding": ENCODING},
    {"key": "k", "shard_by": "s"},
]
"""Every field, in each of its forms."""
SAME = [
    ({"delay": "5m"}, {"delay_ms": 300_000}),
    ({"ttl": "1h"}, {"ttl_ms": 3_600_000}),
    ({"within": 600}, {"within_ms": 600_000}),
    ({"at": "2096-10-02T07:06:40Z"}, {"due_ms": DUE_MS}),
    ({"retry": "fixed:delay=5s,retries=3"}, {"retry": POLICY}),
    (
        {"key": "k", "if_pending": {"action": "replace", "window": "1m", "max_wait": 90}},
        {"key": "k", "if_pending": REPLACE},
    ),
]
WRONG: list[dict[str, Any]] = [
    {"dealy": "5m"},
    {"body": "x", "body_base64": "eA=="},
    {"delay": "soon"},
    {"delay": -1},
    {"delay": True},
    {"delay": "5m", "delay_ms": 1},
    {"ttl": "1h", "ttl_ms": 1},
    {"within": "1h", "within_ms": 1},
    {"at": "2096-10-02T07:06:40Z", "due_ms": DUE_MS},
    {"retry": "fixed:x=1"},
    {"key": "k", "if_pending": {"action": "replace", "window": "1m", "window_ms": 1}},
]


def of_the_command_line(fields: dict[str, Any]) -> tuple[Any, ...]:
    task = read_task(json.dumps({"topic": "t", **fields}).encode(), {})
    wire, _ = TaskChecker().check(task)
    return wire


def over_http(fields: dict[str, Any]) -> tuple[Any, ...]:
    given = msgspec.convert({"topic": "t", **fields}, types.NewTask)
    return Reader(parse_delay_levels(DELAY_LEVELS)).task(given, given.topic).task


def normal(wire: tuple[Any, ...]) -> tuple[Any, ...]:
    """As the daemon understands it."""
    topic, body, delay_ms, *more = wire
    options = {name: value for name, value in (more[0] if more else {}).items() if value}
    if "if_pending" in options:
        options["if_pending"] = policies.checked_rule(options["if_pending"], "if_pending")
    if isinstance(policy := options.get("retry"), dict):
        options["retry"] = policies.checked(policy, "retry", policies.RetryPolicy())
    is_delayed = not options.keys() & {"due_ms", "delay_level"}
    return topic, body, delay_ms if is_delayed else None, options


def test_cli_and_http_know_the_same_fields() -> None:
    names = {field.encode_name for field in msgspec.structs.fields(types.NewTask)}
    assert names == FIELDS
    assert {name for fields in TASKS for name in fields} | {"topic"} == FIELDS


MEMBERS = {"topic": "t"} | {name: value for fields in TASKS for name, value in fields.items()}
REPEATED = [
    *((name, ",".join([json.dumps({name: value})[1:-1]] * 2)) for name, value in MEMBERS.items()),
    ("key", r'"key":"a","k\u0065y":"b"'),
    ("key", r'"body":"\u0022","key":"a","key":"b"'),  # when encoded again, the body has more quotes
    ("a", '"properties":{"b":1,"a":1,"a":1}'),
    ("delay_ms", '"retry":{"kind":"fixed","delay_ms":5,"delay_ms":5}'),
    ("window", '"key":"k","if_pending":{"action":"keep","window":"1s","window":"5s"}'),
]
"""A name, and members of which two have this name."""


@pytest.mark.parametrize(("name", "text"), REPEATED)
def test_cli_and_http_refuse_a_repeated_member(name: str, text: str) -> None:
    data = ("{" + text + ("}" if name == "topic" else ',"topic":"t"}')).encode()
    with pytest.raises(ValueError, match=f"^'{name}' occurs more than once"):
        read_task(data, {})
    with pytest.raises(BadRequest, match=f"^the body: '{name}' occurs more than once"):
        decoded(data, msgspec.json.Decoder(types.NewTask))


def test_two_spellings_of_a_header_are_refused() -> None:
    headers = {b"tickwheel-delay-ms": b"5", b"tickwheel-delay_ms": b"7"}
    reader = Reader(parse_delay_levels(DELAY_LEVELS))
    with pytest.raises(BadRequest, match="header tickwheel-delay_ms was sent more than once"):
        reader.task_from_headers("t", headers, b"")


def test_cli_and_http_accept_quotes_and_json_in_a_text() -> None:
    data = rb'{"topic":"t","body":"\u0022\"{\"a\":1,\"a\":2}\\","properties":{"a":"a","b":"a"}}'
    task = decoded(data, msgspec.json.Decoder(types.NewTask))
    assert task.body is not None
    assert task.body.encode() == read_task(data, {}).body == b'""{"a":1,"a":2}\\'


@pytest.mark.parametrize("fields", TASKS, ids=json.dumps)
def test_cli_and_http_read_the_same_task(fields: dict[str, Any]) -> None:
    assert normal(of_the_command_line(fields)) == normal(over_http(fields))


@pytest.mark.parametrize(("one", "other"), SAME)
def test_readable_and_numeric_values_are_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert normal(over_http(one)) == normal(over_http(other))


@pytest.mark.parametrize("fields", WRONG, ids=json.dumps)
def test_cli_and_http_refuse_the_same(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="field "):
        of_the_command_line(fields)
    with pytest.raises((BadRequest, msgspec.ValidationError)):
        over_http(fields)
