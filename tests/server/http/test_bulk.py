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
from support.vectors import vectors

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
    result = (await rig.post("/v1/lookups", {"ids": some}))["tasks"]
    assert [task["body"] for task in result] == ["0", "777", "1999"]


@pytest.mark.parametrize("at_once", [True, False])
async def test_an_error_names_its_line_as_an_editor_counts_them(
    rig: HttpRig, at_once: bool
) -> None:
    """Empty lines count, however the bytes are split and whichever check finds the error."""
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
    assert [answer["error"]["line"] for answer in answers if "error" in answer] == wrong
    assert rig.core.tasks == 702


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('{"topic":"t"}{"topic":"t"}\n{"topic":"t"}', [1]),
        ('{"topic":"t"}{"topic":"t"}\n\n', [1]),  # as many values as line ends
        ('{\n"topic": "t"\n}\n', [1, 2, 3]),
        ('{"topic":"t"}\n{"topic":"t","key":"a","key":"b"}\n{"topic":"t"}\n', [2]),
        ('{"topic":"t"}{"topic":"t"}\n{"topic":\n"t"}\n', [1, 2, 3]),  # as many as lines
    ],
)
async def test_a_line_is_exactly_one_task(rig: HttpRig, text: str, wrong: list[int]) -> None:
    response = await rig.call("POST", "/v1/tasks", text.encode(), content_type=NDJSON)
    errors = [answer["error"] for answer in response.lines if "error" in answer]
    assert [(error["line"], error["code"]) for error in errors] == [
        (number, "bad_request") for number in wrong
    ]
    assert response.whole and rig.core.tasks == len(response.lines) - len(wrong)


async def test_an_error_ending_the_stream_names_its_line(rig: HttpRig) -> None:
    most = rig.settings.http_body_bytes
    stream = begin(rig)
    stream.send(lines({"topic": "t"}, {"topic": "t"}))
    stream.send(b"x" * (most + 1), more=False)
    last = (await stream.done()).lines[-1]["error"]
    assert (last["code"], last["line"]) == ("body_too_large", 3)


@pytest.mark.one_shard("it counts the turns of the loop until an answer or an end is there")
async def test_answers_are_sent_before_the_last_line_arrives(rig: HttpRig) -> None:
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


async def test_an_invalid_line_does_not_affect_the_others(rig: HttpRig) -> None:
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


async def test_unfinished_lines_are_bodies_under_way(door: type[HttpRig]) -> None:
    rig = await door(http_bodies_bytes_max=100_000).start()
    first, second = begin(rig), begin(rig)
    first.send(b"x" * 60_000)
    await rig.until(lambda: rig.api._room.bytes == 60_000)
    second.send(lines({"topic": "t"}) + b"x" * 40_001)
    last = (await second.done()).lines[-1]["error"]
    assert (last["code"], last["line"], last["retryable"]) == ("overloaded", 2, True)
    assert "http_bodies_bytes_max" in last["detail"] and rig.core.tasks == 1
    first.send(b"\nxx")
    await rig.until(lambda: rig.api._room.bytes == 2)
    first.leave()
    await first.done()
    assert rig.api._room.bytes == 0
    await rig.stop()


async def test_a_client_that_does_not_read_is_throttled(rig: HttpRig) -> None:
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


@pytest.mark.one_shard("it looks at the shard's callers, and the API of all keeps its client")
async def test_a_disconnected_client_leaves_only_whole_lines(rig: HttpRig) -> None:
    stream = begin(rig)
    stream.send(lines({"topic": "t"}) + b'{"topic":')
    await rig.until(lambda: rig.core.tasks == 1)
    stream.leave()
    await stream.done()
    assert not rig.shard.callers


async def test_a_stream_of_lines_refuses_an_idempotency_key(rig: HttpRig) -> None:
    response = await rig.call(
        "POST", "/v1/tasks", lines({"topic": "t"}), content_type=NDJSON, idempotency_key="a"
    )
    assert response.status == 400 and "idempotency-key is not allowed" in response.json["detail"]


# --- packed --------------------------------------------------------------------------------------


async def test_request_bodies_can_be_compressed(rig: HttpRig) -> None:
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
        (gzip.compress(b'{"topic":"t"}') + b"more", 400, "data follows its end"),
        (b"no gzip at all", 400, "not valid gzip"),
    ],
    ids=["a bomb", "cut short", "goes on", "not packed"],
)
async def test_decompression_bombs_and_invalid_data_are_refused(
    rig: HttpRig, data: bytes, status: int, text: str
) -> None:
    for content_type in ("application/json", "text/plain"):
        path = "/v1/tasks" if content_type == "application/json" else "/v1/topics/t/tasks"
        response = await rig.call(
            "POST", path, data, content_type=content_type, content_encoding="gzip"
        )
        assert (response.status, text in response.json["detail"]) == (status, True), response.body
    assert rig.api._room.bytes == 0 and rig.core.tasks == 0


async def test_an_unknown_content_encoding_is_refused(rig: HttpRig) -> None:
    response = await rig.call("POST", "/v1/tasks", {"topic": "t"}, content_encoding="br")
    assert (response.status, response.json["code"]) == (415, "unsupported_media_type")


async def test_answers_are_compressed_on_request(rig: HttpRig) -> None:
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


async def test_a_binary_event_becomes_a_task(rig: HttpRig) -> None:
    headers = {f"ce-{name}": value for name, value in EVENT.items()}
    headers |= {"ce-subject": "caf%C3%A9", "content-type": "application/json"}
    for path, topic in (
        ("/v1/topics/orders/tasks", {}),
        ("/v1/tasks", {"tickwheel-topic": "orders"}),
    ):
        answer = await rig.post(path, b'{"a":1}', **headers, **topic, tickwheel_delay_ms="60000")
        assert answer["due_ms"] == NOW_MS + 60_000
        body, properties = await body_and_properties(rig, answer["id"])
        assert body == '{"a":1}'
        assert properties == {f"ce-{name}": value for name, value in EVENT.items()} | {
            "ce-subject": "café", "ce-datacontenttype": "application/json",
        }  # fmt: skip


@pytest.mark.parametrize(
    ("event", "body"),
    [
        ({"data": {"a": [1, "é"]}}, '{"a": [1, "é"]}'),
        ({"data": "text", "datacontenttype": "text/plain"}, "text"),
        ({"data": "text"}, '"text"'),
        ({"data_base64": base64.b64encode(b"\xff").decode()}, "/w=="),
        ({}, ""),
        ({"data": None}, "null"),
        ({"data_base64": None, "data": 0}, "0"),
        ({"data": "1.0\n", "datacontenttype": "text/csv; charset=utf-8", "subject": None}, "1.0\n"),
        ({"data": {"n": 1}, "datacontenttype": "application/vnd.a+json;v=1"}, '{"n": 1}'),
    ],
)
async def test_a_structured_event_becomes_a_task(
    rig: HttpRig, event: dict[str, Any], body: str
) -> None:
    answer = await rig.post(
        "/v1/topics/orders/tasks",
        json.dumps(EVENT | event, ensure_ascii=False).encode(),
        content_type=KIND,
    )
    assert (await body_and_properties(rig, answer["id"]))[0] == body


async def test_a_batch_of_events_becomes_tasks(rig: HttpRig) -> None:
    batch = [EVENT | {"id": str(n), "data": n} for n in range(3)]
    answer = await rig.post(
        "/v1/tasks", json.dumps(batch).encode(),
        content_type="application/cloudevents-batch+json", tickwheel_topic="orders",
    )  # fmt: skip
    assert len(answer["tasks"]) == 3 and rig.core.tasks == 3


BATCH = "application/cloudevents-batch+json"
OF_OTHERS = vectors("cloudevents")


def attributes_of(event: dict[str, Any]) -> dict[str, Any]:
    """The attributes that an event in JSON has, as properties of its task."""
    names = [name for name in event if name not in ("data", "data_base64")]
    result = {f"ce-{name}": event[name] for name in names if event[name] is not None}
    implied = {"ce-datacontenttype": "application/json"} if event.get("data") is not None else {}
    return implied | result


@pytest.mark.parametrize(("_", "event"), OF_OTHERS["valid"])
async def test_conforming_events_are_accepted(rig: HttpRig, _: str, event: dict[str, Any]) -> None:
    answer = await rig.post(
        "/v1/topics/orders/tasks", json.dumps(event).encode(), content_type=KIND
    )
    body, properties = await body_and_properties(rig, answer["id"])
    assert properties == attributes_of(event) and body == event.get("data", "")
    headers = {f"ce-{name}": str(value) for name, value in event.items() if value is not None}
    headers |= {"content-type": headers.pop("ce-datacontenttype", "")}
    data = headers.pop("ce-data", "").encode()
    answer = await rig.post("/v1/topics/orders/tasks", data, **headers)
    body, properties = await body_and_properties(rig, answer["id"])
    assert body.encode() == data
    assert properties == {name: str(value) for name, value in attributes_of(event).items()}


@pytest.mark.parametrize(("_", "event"), OF_OTHERS["invalid"])
async def test_nonconforming_events_are_refused(
    rig: HttpRig, _: str, event: dict[str, Any]
) -> None:
    for batch in (event, [event], [EVENT, event]):
        kind = BATCH if isinstance(batch, list) else KIND
        path, data = "/v1/topics/orders/tasks", json.dumps(batch).encode()
        answer = await rig.call("POST", path, data, content_type=kind)
        assert (answer.status, answer.json["code"]) == (400, "bad_request")
    assert rig.core.tasks == 0


async def test_conforming_batches_are_accepted_and_others_refused(rig: HttpRig) -> None:
    path = "/v1/topics/orders/tasks"
    for _, batch in OF_OTHERS["valid_batches"]:
        result = await rig.post(path, json.dumps(batch).encode(), content_type=BATCH)
        ids = [task["id"] for task in result["tasks"]]
        assert [(await body_and_properties(rig, task_id))[1] for task_id in ids] == [
            attributes_of(event) for event in batch
        ]
    before = rig.core.tasks
    for _, batch in OF_OTHERS["invalid_batches"]:
        answer = await rig.call("POST", path, json.dumps(batch).encode(), content_type=BATCH)
        assert (answer.status, answer.json["code"]) == (400, "bad_request")
    assert rig.core.tasks == before


@pytest.mark.parametrize(("event", "headers", "body"), OF_OTHERS["examples"])
async def test_specification_examples_are_equal_in_both_modes(
    rig: HttpRig, event: dict[str, Any], headers: dict[str, str], body: str
) -> None:
    path = "/v1/topics/orders/tasks"
    one = await rig.post(path, json.dumps(event).encode(), content_type=KIND)
    other = await rig.post(path, body.encode(), **headers)
    result = await body_and_properties(rig, other["id"])
    wanted = {name: value for name, value in headers.items() if name.startswith("ce-")}
    assert result == (body, wanted | {"ce-datacontenttype": headers["content-type"]})
    body_found, properties = await body_and_properties(rig, one["id"])
    assert (body_found, {k: str(v) for k, v in properties.items()}) == result


@pytest.mark.parametrize(("headers", "sent", "attributes", "data"), OF_OTHERS["messages"])
async def test_messages_equal_those_of_other_implementations(
    rig: HttpRig, headers: dict[str, str], sent: str, attributes: dict[str, str], data: str
) -> None:
    answer = await rig.post("/v1/topics/orders/tasks", sent.encode(), **headers)
    body, properties = await body_and_properties(rig, answer["id"])
    assert body == data
    assert properties == {f"ce-{name}": value for name, value in attributes.items()}


@pytest.mark.parametrize(("header", "attribute"), OF_OTHERS["headers"])
async def test_headers_are_decoded_as_the_binding_specifies(
    rig: HttpRig, header: str, attribute: str | None
) -> None:
    headers = {f"ce-{name}": value for name, value in EVENT.items()} | {"ce-subject": header}
    answer = await rig.call("POST", "/v1/topics/orders/tasks", b"x", **headers)
    if attribute is None:
        assert answer.status == 400 and "not UTF-8" in answer.json["detail"]
    else:
        properties = (await body_and_properties(rig, answer.json["id"]))[1]
        assert properties["ce-subject"] == attribute


async def test_an_events_partition_key_is_the_order_key(rig: HttpRig) -> None:
    event = json.dumps(EVENT | {"partitionkey": "customer 7"}).encode()
    path = "/v1/topics/orders/tasks"
    for headers, expected in (
        ({}, "customer 7"),
        ({"tickwheel_order_key": "customer 8"}, "customer 8"),
    ):
        answer = await rig.post(path, event, content_type=KIND, **headers)
        task = (await rig.call("GET", f"/v1/tasks/{answer['id']}")).json
        assert (task["order_key"], task["properties"]["ce-partitionkey"]) == (
            expected, "customer 7",
        )  # fmt: skip
    headers = {f"ce-{name}": value for name, value in EVENT.items()}
    answer = await rig.post(path, b"x", **headers, **{"ce-partitionkey": "caf%C3%A9"})
    assert (await rig.call("GET", f"/v1/tasks/{answer['id']}")).json["order_key"] == "café"


async def test_event_data_is_delivered_byte_for_byte(rig: HttpRig) -> None:
    """A parser would round numbers, drop repeated members and refuse a number beyond a double."""
    head = json.dumps(EVENT)[:-1].encode()
    for data in (
        b"1e400", b"12345678901234567890.12345678901234567890", b'{"a":1,"a":2}', b" [ 1 ,2 ] ",
        b'"\\u0041"', b"false", b"[]",
    ):  # fmt: skip
        event = head + b', "data":' + data + b"}"
        answer = await rig.post("/v1/topics/orders/tasks", event, content_type=KIND)
        body, properties = await body_and_properties(rig, answer["id"])
        assert body == data.strip().decode()
        assert properties["ce-datacontenttype"] == "application/json"
        batch = b"[" + event + b"]"
        answer = await rig.post(
            "/v1/topics/orders/tasks", batch, content_type="application/cloudevents-batch+json"
        )
        assert (await body_and_properties(rig, answer["tasks"][0]["id"]))[
            0
        ] == data.strip().decode()


async def test_an_attribute_that_is_null_is_not_set(rig: HttpRig) -> None:
    event = EVENT | {"subject": None, "time": None, "dataschema": None, "comexample": None}
    answer = await rig.post(
        "/v1/topics/orders/tasks", json.dumps(event).encode(), content_type=KIND
    )
    _, properties = await body_and_properties(rig, answer["id"])
    assert properties == {f"ce-{name}": value for name, value in EVENT.items()}


async def test_an_empty_batch_of_events_is_valid(rig: HttpRig) -> None:
    kind = "application/cloudevents-batch+json"
    assert await rig.post("/v1/topics/orders/tasks", b"[]", content_type=kind) == {"tasks": []}
    assert rig.core.tasks == 0


@pytest.mark.parametrize(
    ("header", "attribute"),
    [
        ("Euro %E2%82%AC %F0%9F%98%80", "Euro € 😀"),  # the example of the HTTP binding
        ('"Euro %E2%82%AC"', "Euro €"),
        (r'"a \"b\" \\ c"', 'a "b" \\ c'),
        ("%2522", "%22"),
        ("a+b", "a+b"),
    ],
)
async def test_a_header_of_an_event_is_decoded_once(
    rig: HttpRig, header: str, attribute: str
) -> None:
    headers = {f"ce-{name}": value for name, value in EVENT.items()} | {"ce-subject": header}
    answer = await rig.post("/v1/topics/orders/tasks", b"x", **headers)
    assert (await body_and_properties(rig, answer["id"]))[1]["ce-subject"] == attribute


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ("%FF", "percent-encoding that is not UTF-8"),
        ("%ED%A0%80", "percent-encoding that is not UTF-8"),
        ("50% off", "a % that is not followed by two hex digits"),
        ('"open', "a quote that is not closed"),
        ("%00", "a control or invalid character"),
    ],
)
async def test_a_header_of_an_event_that_cannot_be_decoded_is_refused(
    rig: HttpRig, header: str, text: str
) -> None:
    headers = {f"ce-{name}": value for name, value in EVENT.items()} | {"ce-subject": header}
    response = await rig.call("POST", "/v1/topics/t/tasks", b"x", **headers)
    assert response.status == 400 and text in response.json["detail"], response.body


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"id": 5}, "id must be a string of 1 character or more, not 5"),
        ({"source": ""}, "source must be a URI reference, not ''"),
        ({"source": "/a b"}, "source must be a URI reference"),
        ({"source": "/%zz"}, "source must be a URI reference"),
        ({"type": True}, "type must be a string of 1 character or more"),
        ({"type": None}, "type is missing"),
        ({"subject": ""}, "subject must be a string of 1 character or more, not ''"),
        ({"dataschema": "/relative"}, "dataschema must be a URI with its scheme"),
        ({"datacontenttype": "json"}, "datacontenttype must be a media type, not 'json'"),
        ({"time": "2030-01-01"}, "time must be a time of RFC 3339"),
        ({"time": "2030-01-01T00:00:00"}, "time must be a time of RFC 3339"),
        ({"time": "2030-02-30T00:00:00Z"}, "time must be a time of RFC 3339"),
        ({"time": "2030-01-01T24:00:00Z"}, "time must be a time of RFC 3339"),
        ({"time": "2030-01-01T00:00:00+25:00"}, "time must be a time of RFC 3339"),
        ({"time": "٢٠٣٠-01-01T00:00:00Z"}, "time must be a time of RFC 3339"),
        ({"comExample": "x"}, "must consist of a-z and 0-9"),
        ({"com-example": "x"}, "must consist of a-z and 0-9"),
        ({"": "x"}, "must consist of a-z and 0-9"),
        ({"comexample": 2**31}, "integer between -2147483648 and 2147483647, not 2147483648"),
        ({"comexample": -(2**31) - 1}, "integer between -2147483648 and 2147483647"),
        ({"comexample": 1.5}, "must be a string, an integer or a boolean, not 1.5"),
        ({"comexample": "a\u0085b"}, "a control or invalid character"),
        ({"comexample": "a\uffffb"}, "a control or invalid character"),
    ],
)
async def test_an_invalid_event_is_refused(
    rig: HttpRig, attributes: dict[str, Any], text: str
) -> None:
    data = json.dumps(EVENT | attributes).encode()
    response = await rig.call("POST", "/v1/topics/t/tasks", data, content_type=KIND)
    assert response.status == 400 and text in response.json["detail"], response.body


@pytest.mark.parametrize(
    "attributes",
    [
        {"time": "2016-12-31t23:59:60.123456789123z"}, {"comexample": 2**31 - 1},
        {"time": "2030-01-01T00:00:00-23:59"}, {"comexample": False, "a1": ""},
        {"source": "urn:uuid:6e8bc430-9c3a-11d9-9669-0800200c9a66"}, {"source": "#"},
        {"dataschema": "https://example.com/a%20b?c#d"}, {"subject": "é 😀"},
        {"datacontenttype": 'multipart/mixed; boundary="a; b"'}, {"n" * 40: "long"},
    ],
)  # fmt: skip
async def test_a_valid_event_is_accepted_with_all_its_attributes(
    rig: HttpRig, attributes: dict[str, Any]
) -> None:
    data = json.dumps(EVENT | attributes).encode()
    answer = await rig.post("/v1/topics/orders/tasks", data, content_type=KIND)
    properties = (await body_and_properties(rig, answer["id"]))[1]
    assert properties == {f"ce-{name}": value for name, value in (EVENT | attributes).items()}


@pytest.mark.parametrize("text", ['{"id": "7", ', '{"data": 1, '])
async def test_an_event_with_a_member_twice_is_refused(rig: HttpRig, text: str) -> None:
    event = text.encode() + json.dumps(EVENT | {"data": 2})[1:].encode()
    for data, kind in ((event, KIND), (b"[%b]" % event, "application/cloudevents-batch+json")):
        response = await rig.call("POST", "/v1/topics/t/tasks", data, content_type=kind)
        assert response.status == 400 and "more than once" in response.json["detail"]


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (EVENT | {"partitionkey": 5}, "order_key must be a string, not 5"),
        (EVENT | {"specversion": "0.3"}, "specversion must be '1.0', not '0.3'"),
        ({k: v for k, v in EVENT.items() if k != "id"}, "id is missing"),
        (EVENT | {"data": 1, "data_base64": "AA=="}, "either data or data_base64"),
        (EVENT | {"data_base64": "!"}, "must be base64, not '!'"),
        (EVENT | {"data_base64": 5}, "Expected `str | null`"),
        (EVENT | {"more": {"a": 1}}, "more must be a string"),
        ([], "Expected `object`"),
    ],
)
async def test_invalid_events_name_the_problem(rig: HttpRig, event: Any, text: str) -> None:
    data = json.dumps(event).encode()
    response = await rig.call("POST", "/v1/topics/t/tasks", data, content_type=KIND)
    assert response.status == 400 and text in response.json["detail"], response.body
