"""Streams of lines, CloudEvents, packed bodies."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
from typing import Any

import pytest

from server.http.rig import HttpRig, Request
from support.shard_rig import NOW_MS

NDJSON = "application/x-ndjson"


def lines(*tasks: Any) -> bytes:
    return b"".join(json.dumps(task).encode() + b"\n" for task in tasks)


def begin(rig: HttpRig, **headers: str) -> Request:
    return rig.begin("POST", "/v1/tasks", b"", whole=False, content_type=NDJSON, **headers)


async def test_each_line_is_answered_by_a_line_in_its_order(rig: HttpRig) -> None:
    tasks = [{"topic": "t", "body": str(n), "delay_ms": n} for n in range(2_000)]
    response = await rig.call("POST", "/v1/tasks", lines(*tasks), content_type=NDJSON)
    assert response.status == 200 and response.whole
    assert [line["due_ms"] - NOW_MS for line in response.lines] == list(range(2_000))
    some = [response.lines[n]["id"] for n in (0, 777, 1_999)]
    found = (await rig.post("/v1/lookups", {"ids": some}))["tasks"]
    assert [task["body"] for task in found] == ["0", "777", "1999"]


@pytest.mark.parametrize("at_once", [True, False])
async def test_an_error_names_its_line_as_an_editor_counts_them(
    rig: HttpRig, at_once: bool
) -> None:
    """Empty lines, too; however the lines come, and whoever finds the mistake."""
    good = json.dumps({"topic": "t"})
    too_large = json.dumps({"topic": "t", "body": "x" * 1_048_577})
    given = [good, "", "{nonsense", good, "  ", too_large, '{"topic": "no topic"}', *[good] * 700]
    wrong = [number for number, line in enumerate(given, 1) if line.strip() and line != good]
    given += ["", '{"topic": 7}']
    wrong.append(len(given))
    data = "\r\n".join(given).encode()
    stream = begin(rig)
    size = len(data) if at_once else 100_000
    for start in range(0, len(data), size):
        stream.send(data[start : start + size])
    stream.send(b"", more=False)
    answers = (await stream.done()).lines
    assert [one["error"]["line"] for one in answers if "error" in one] == wrong
    assert rig.core.tasks == 702


async def test_an_error_that_ends_the_stream_names_the_line_where_it_ended(rig: HttpRig) -> None:
    most = rig.settings.http_body_bytes
    stream = begin(rig)
    stream.send(lines({"topic": "t"}, {"topic": "t"}))
    stream.send(b"x" * (most + 1), more=False)
    last = (await stream.done()).lines[-1]["error"]
    assert (last["code"], last["line"]) == ("body_too_large", 3)


async def test_answers_come_before_the_last_line_was_sent(rig: HttpRig) -> None:
    stream = begin(rig)
    whole = lines({"topic": "t", "body": "1"})
    stream.send(whole[:10])
    await rig.settle()
    assert stream.response.body == b""
    stream.send(whole[10:])
    await rig.until(lambda: rig.core.tasks == 1)
    stream.send(lines({"topic": "t", "body": "2"}))
    await stream.until(lambda response: response.lines)
    stream.send(b'{"topic": "t", "body": "3"}', more=False)
    assert len((await stream.done()).lines) == 3


async def test_an_answer_waits_for_its_batch(rig: HttpRig) -> None:
    rig.store.stall()
    stream = begin(rig)
    stream.send(lines({"topic": "t"}), more=False)
    await rig.settle()
    assert stream.response.body == b"" and not stream.task.done()
    rig.store.go_on()
    assert len((await stream.done()).lines) == 1


async def test_a_wrong_line_is_answered_and_the_others_are_taken(rig: HttpRig) -> None:
    data = (
        lines({"topic": "t", "body": "1"}, {"topic": "no topic"}, {"topic": "t", "body": "2"})
        + b"{nonsense\n\n"
        + b'{"topic": "t", "body": "\xff"}\n'
        + lines({"topic": "t", "body": "x" * 1_048_577}, {"topic": "t", "body": "3"})
    )
    response = await rig.call("POST", "/v1/tasks", data, content_type=NDJSON)
    codes = [line.get("error", {}).get("code", "taken") for line in response.lines]
    assert codes == [
        "taken", "bad_request", "taken", "bad_request", "bad_request", "body_too_large", "taken",
    ]  # fmt: skip
    assert rig.core.tasks == 3


async def test_a_line_has_a_limit(rig: HttpRig) -> None:
    stream = begin(rig)
    stream.send(lines({"topic": "t"}))
    for _ in range(40):
        stream.send(b"x" * 65_536)
    response = await stream.done()
    assert response.lines[-1]["error"]["code"] == "body_too_large"
    assert "http_body_bytes_max" in response.lines[-1]["error"]["detail"]
    assert len(response.lines) == 2 and rig.api._room.bytes == 0


async def test_a_client_that_does_not_read_its_answers_is_not_read_from(rig: HttpRig) -> None:
    stream = begin(rig)
    await stream.until(lambda response: response.status)
    stream.reads.clear()
    for _ in range(50):
        stream.send(lines(*({"topic": "t"} for _ in range(500))))
    await rig.settle(500)
    assert 0 < rig.core.tasks + rig.core.staged <= 8 * 500
    stream.reads.set()
    stream.send(b"", more=False)
    for _ in range(5):
        await asyncio.wait([stream.task], timeout=5)
    assert len((await stream.done()).lines) == 25_000


async def test_a_client_that_goes_leaves_whole_lines_behind(rig: HttpRig) -> None:
    stream = begin(rig)
    stream.send(lines({"topic": "t"}) + b'{"topic":')
    await rig.until(lambda: rig.core.tasks == 1)
    stream.leave()
    await stream.done()
    assert not rig.shard.callers


async def test_a_stream_of_lines_is_no_request_to_repeat(rig: HttpRig) -> None:
    response = await rig.call(
        "POST", "/v1/tasks", lines({"topic": "t"}), content_type=NDJSON, idempotency_key="a"
    )
    assert response.status == 400 and "idempotency-key is for" in response.json["detail"]


# --- packed --------------------------------------------------------------------------------------


async def test_bodies_may_be_packed(rig: HttpRig) -> None:
    task = gzip.compress(json.dumps({"topic": "t", "body": "x" * 100_000}).encode())
    response = await rig.call(
        "POST", "/v1/tasks", task, content_type="application/json", content_encoding="gzip"
    )
    assert response.status == 201
    many = gzip.compress(lines(*({"topic": "t", "body": "y" * 900} for _ in range(3_000))))
    response = await rig.call(
        "POST", "/v1/tasks", many, content_type=NDJSON, content_encoding="gzip"
    )
    assert len(response.lines) == 3_000 and rig.core.tasks == 3_001


@pytest.mark.parametrize(
    ("data", "status", "text"),
    [
        (gzip.compress(b"\0" * 50_000_000), 413, "http_body_bytes_max"),
        (gzip.compress(b'{"topic":"t"}')[:-9], 400, "ends too early"),
        (gzip.compress(b'{"topic":"t"}') + b"more", 400, "goes on behind its end"),
        (b"no gzip at all", 400, "no gzip"),
    ],
    ids=["a bomb", "cut short", "goes on", "not packed"],
)
async def test_a_packed_bomb_and_what_is_not_packed(
    rig: HttpRig, data: bytes, status: int, text: str
) -> None:
    for content_type in ("application/json", "text/plain"):
        path = "/v1/tasks" if content_type == "application/json" else "/v1/topics/t/tasks"
        response = await rig.call(
            "POST", path, data, content_type=content_type, content_encoding="gzip"
        )
        assert (response.status, text in response.json["detail"]) == (status, True), response.body
    assert rig.api._room.bytes == 0 and rig.core.tasks == 0


async def test_another_packing_is_not_taken(rig: HttpRig) -> None:
    response = await rig.call("POST", "/v1/tasks", {"topic": "t"}, content_encoding="br")
    assert (response.status, response.json["code"]) == (415, "unsupported_media_type")


async def test_answers_are_packed_for_those_who_take_it(rig: HttpRig) -> None:
    await rig.post("/v1/tasks", {"topic": "t", "body": "x" * 200_000, "delay_ms": 9_000})
    plain = await rig.call("GET", "/v1/tasks")
    assert "content-encoding" not in plain.headers
    asked = rig.begin("GET", "/v1/tasks", accept_encoding="br, gzip;q=0.5")
    await asyncio.wait_for(asked.task, 10)
    assert asked.response.headers["content-encoding"] == "gzip"
    assert gzip.decompress(asked.response.body) == plain.body
    refused = await rig.call("GET", "/v1/tasks", accept_encoding="gzip;q=0")
    assert "content-encoding" not in refused.headers


# --- CloudEvents ---------------------------------------------------------------------------------

EVENT = {"specversion": "1.0", "id": "7", "source": "/shop", "type": "order.made"}
KIND = "application/cloudevents+json"


async def body_and_properties(rig: HttpRig, task_id: str) -> tuple[Any, Any]:
    task = (await rig.call("GET", f"/v1/tasks/{task_id}")).json
    assert task["topic"] == "orders"
    return task.get("body", task.get("body_base64")), task["properties"]


async def test_a_binary_event(rig: HttpRig) -> None:
    headers = {f"ce-{name}": value for name, value in EVENT.items()}
    headers |= {"ce-subject": "caf%C3%A9", "content-type": "application/json"}
    for path, topic in (
        ("/v1/topics/orders/tasks", {}),
        ("/v1/tasks", {"tickwheel-topic": "orders"}),
    ):
        found = await rig.post(path, b'{"a":1}', **headers, **topic, tickwheel_delay_ms="60000")
        assert found["due_ms"] == NOW_MS + 60_000
        body, properties = await body_and_properties(rig, found["id"])
        assert body == '{"a":1}'
        assert properties == {f"ce-{name}": value for name, value in EVENT.items()} | {
            "ce-subject": "café", "ce-datacontenttype": "application/json",
        }  # fmt: skip


@pytest.mark.parametrize(
    ("event", "body"),
    [
        ({"data": {"a": [1, "é"]}}, '{"a":[1,"é"]}'),
        ({"data": "text", "datacontenttype": "text/plain"}, "text"),
        ({"data": "text"}, '"text"'),
        ({"data_base64": base64.b64encode(b"\xff").decode()}, "/w=="),
        ({}, ""),
    ],
)
async def test_a_structured_event(rig: HttpRig, event: dict[str, Any], body: str) -> None:
    found = await rig.post(
        "/v1/topics/orders/tasks", json.dumps(EVENT | event).encode(), content_type=KIND
    )
    assert (await body_and_properties(rig, found["id"]))[0] == body


async def test_a_batch_of_events(rig: HttpRig) -> None:
    batch = [EVENT | {"id": str(n), "data": n} for n in range(3)]
    found = await rig.post(
        "/v1/tasks", json.dumps(batch).encode(),
        content_type="application/cloudevents-batch+json", tickwheel_topic="orders",
    )  # fmt: skip
    assert len(found["tasks"]) == 3 and rig.core.tasks == 3


async def test_the_partition_key_of_an_event_is_the_order_key_of_its_task(rig: HttpRig) -> None:
    event = json.dumps(EVENT | {"partitionkey": "customer 7"}).encode()
    path = "/v1/topics/orders/tasks"
    for headers, expected in (
        ({}, "customer 7"),
        ({"tickwheel_order_key": "customer 8"}, "customer 8"),
    ):
        found = await rig.post(path, event, content_type=KIND, **headers)
        task = (await rig.call("GET", f"/v1/tasks/{found['id']}")).json
        assert (task["order_key"], task["properties"]["ce-partitionkey"]) == (
            expected, "customer 7",
        )  # fmt: skip
    headers = {f"ce-{name}": value for name, value in EVENT.items()}
    found = await rig.post(path, b"x", **headers, **{"ce-partitionkey": "caf%C3%A9"})
    assert (await rig.call("GET", f"/v1/tasks/{found['id']}")).json["order_key"] == "café"


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (EVENT | {"partitionkey": 5}, "order_key must be a string, not 5"),
        (EVENT | {"specversion": "0.3"}, "specversion must be '1.0', not '0.3'"),
        ({k: v for k, v in EVENT.items() if k != "id"}, "must have id"),
        (EVENT | {"data": 1, "data_base64": "AA=="}, "one of data and data_base64"),
        (EVENT | {"data_base64": "!"}, "must be base64, not '!'"),
        (EVENT | {"data_base64": 5}, "must be base64, not 5"),
        (EVENT | {"more": {"a": 1}}, "'more' must be a string"),
        ([], "Expected `object`"),
    ],
)
async def test_what_is_wrong_with_an_event_is_said(rig: HttpRig, event: Any, text: str) -> None:
    data = json.dumps(event).encode()
    response = await rig.call("POST", "/v1/topics/t/tasks", data, content_type=KIND)
    assert response.status == 400 and text in response.json["detail"], response.body
