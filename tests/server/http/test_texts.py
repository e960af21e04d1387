"""The trace and the encoding of a task over HTTP: each way in, pulled, listed; what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.http.rig import HttpRig, Response
from support import encodings, traces

EVENT = {"specversion": "1.0", "id": "7", "source": "/shop", "type": "order.made"}
RAW = "/v1/topics/t/tasks"
WAYS = ("json", "many", "transaction", "lines", "header", "binary event", "schedule")
OF_TRACES = (*WAYS, "structured event")
RIGHT = [
    *((way, "trace", text) for way in OF_TRACES for text in traces.RIGHT),
    *((way, "encoding", text) for way in WAYS for text in encodings.RIGHT),
]
EVENTS = ("binary event", "structured event")
WRONG = [
    *((way, "trace", text) for way in WAYS if way not in EVENTS for text in traces.WRONG_TEXTS),
    *(
        (way, "encoding", text)
        for way in WAYS
        if way not in ("header", "binary event")
        for text in (*encodings.WRONG_TEXTS, "")
    ),
]
IGNORED = [
    (way, "trace", text)
    for way in EVENTS
    for text in traces.WRONG_TEXTS
    if text.isascii() and text.isprintable()  # else it is not a text of an event
]
MUST_BE = {"trace": traces.MUST_BE, "encoding": encodings.MUST_BE}


async def way_in(rig: HttpRig, way: str, name: str, text: str) -> Response:
    task = {"topic": "t", name: text}
    header = {f"tickwheel_{name}": text}
    if way == "json":
        return await rig.call("POST", "/v1/tasks", task)
    if way == "many":
        return await rig.call("POST", "/v1/tasks", {"tasks": [task]})
    if way == "transaction":
        of = {"id": "x", "group": "g", "part": 1}
        return await rig.call("POST", "/v1/tasks", {"transaction": of, "tasks": [task]})
    if way == "lines":
        line = json.dumps(task).encode()
        return await rig.call("POST", "/v1/tasks", line, content_type="application/x-ndjson")
    if way == "header":
        return await rig.call("POST", RAW, b"x", **header)
    if way == "binary event":
        headers = {f"ce-{name}": value for name, value in EVENT.items()}
        headers |= {"ce_traceparent": text} if name == "trace" else header
        return await rig.call("POST", RAW, b"x", **headers)
    if way == "schedule":
        given = {"topic": "t", "every_ms": 60_000, "task": {name: text}}
        return await rig.call("PUT", "/v1/schedules/s", given)
    event = json.dumps(EVENT | {"traceparent": text}).encode()
    return await rig.call("POST", RAW, event, content_type="application/cloudevents+json")


@pytest.mark.parametrize(("way", "name", "text"), RIGHT)
async def test_trace_and_encoding_pass_through_http(
    rig: HttpRig, way: str, name: str, text: str
) -> None:
    assert (await way_in(rig, way, name, text)).status in (200, 201)
    if way == "transaction":
        await rig.post("/v1/transactions/x/commit")
    if way == "schedule":
        shown = (await rig.call("GET", "/v1/schedules/s")).json
        assert shown["task"] == {name: text}
        await rig.post("/v1/schedules/s/run")
    (task,) = (await rig.call("GET", "/v1/tasks?topic=t")).json["tasks"]
    assert task[name] == text
    (delivery,) = (await rig.post("/v1/topics/t/pull", {"group": "g"}))["deliveries"]
    assert delivery[name] == text


@pytest.mark.parametrize(("way", "name", "text"), WRONG, ids=repr)
async def test_an_invalid_text_option_is_refused(
    rig: HttpRig, way: str, name: str, text: str
) -> None:
    answer = await way_in(rig, way, name, text)
    problem: dict[str, Any] = answer.json
    if way == "lines":
        problem = problem["error"]
    assert problem["code"] == "bad_request" and MUST_BE[name] in problem["detail"], problem
    assert rig.core.tasks == 0


@pytest.mark.parametrize(("way", "name", "text"), IGNORED, ids=repr)
async def test_an_events_invalid_traceparent_is_ignored(
    rig: HttpRig, way: str, name: str, text: str
) -> None:
    """W3C Trace Context, 3.2.2: a receiver that cannot parse it goes on without a parent."""
    made = (await way_in(rig, way, name, text)).json
    task = (await rig.call("GET", f"/v1/tasks/{made['id']}")).json
    assert task["trace"] is None and task["properties"]["ce-traceparent"] == text


async def test_an_invalid_encoding_header_is_refused(rig: HttpRig) -> None:
    for wrong in ("JSON", encodings.LONGEST + "z", "json; v=2"):
        answer = await way_in(rig, "header", "encoding", wrong)
        assert answer.status == 400 and encodings.MUST_BE in answer.json["detail"]


async def test_a_header_overrides_the_events_attribute(rig: HttpRig) -> None:
    event = json.dumps(EVENT | {"traceparent": traces.OTHER}).encode()
    kind = "application/cloudevents+json"
    made = await rig.post(RAW, event, content_type=kind, tickwheel_trace=traces.TRACE)
    task = (await rig.call("GET", f"/v1/tasks/{made['id']}")).json
    results = task["trace"], task["properties"]["ce-traceparent"]
    assert results == (traces.TRACE, traces.OTHER)


async def test_a_body_is_shown_and_delivered_as_it_is_stored(rig: HttpRig) -> None:
    given = {"topic": "t", "body_base64": "eJxLTEpOSQQABRYBdw==", "encoding": "zlib"}
    made = await rig.post("/v1/tasks", given)
    task = (await rig.call("GET", f"/v1/tasks/{made['id']}")).json
    assert (task["body_base64"], task["encoding"]) == (given["body_base64"], "zlib")
    (delivery,) = (await rig.post("/v1/topics/t/pull", {"group": "g"}))["deliveries"]
    assert delivery["body_base64"] == given["body_base64"]
