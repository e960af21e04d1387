"""The trace of a task over HTTP: each way in, pulled, listed, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.http.rig import HttpRig, Response
from support.traces import MUST_BE, OTHER, RIGHT, TRACE, WRONG_TEXTS

EVENT = {"specversion": "1.0", "id": "7", "source": "/shop", "type": "order.made"}
RAW = "/v1/topics/t/tasks"


async def way_in(rig: HttpRig, way: str, trace: str) -> Response:
    task = {"topic": "t", "trace": trace}
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
        return await rig.call("POST", RAW, b"x", tickwheel_trace=trace)
    if way == "binary event":
        headers = {f"ce-{name}": value for name, value in EVENT.items()}
        return await rig.call("POST", RAW, b"x", **headers, ce_traceparent=trace)
    if way == "schedule":
        given = {"topic": "t", "every_ms": 60_000, "task": {"trace": trace}}
        return await rig.call("PUT", "/v1/schedules/s", given)
    event = json.dumps(EVENT | {"traceparent": trace}).encode()
    return await rig.call("POST", RAW, event, content_type="application/cloudevents+json")


WAYS = (
    "json", "many", "transaction", "lines", "header", "binary event", "structured event", "schedule"
)  # fmt: skip


@pytest.mark.parametrize("trace", RIGHT)
@pytest.mark.parametrize("way", WAYS)
async def test_it_comes_in_and_goes_out(rig: HttpRig, way: str, trace: str) -> None:
    assert (await way_in(rig, way, trace)).status in (200, 201)
    if way == "transaction":
        await rig.post("/v1/transactions/x/commit")
    if way == "schedule":
        shown = (await rig.call("GET", "/v1/schedules/s")).json
        assert shown["task"] == {"trace": trace}
        await rig.post("/v1/schedules/s/run")
    (task,) = (await rig.call("GET", "/v1/tasks?topic=t")).json["tasks"]
    assert task["trace"] == trace
    (delivery,) = (await rig.post("/v1/topics/t/pull", {"group": "g"}))["deliveries"]
    assert delivery["trace"] == trace


@pytest.mark.parametrize("trace", WRONG_TEXTS, ids=repr)
@pytest.mark.parametrize("way", WAYS)
async def test_what_is_none_is_refused(rig: HttpRig, way: str, trace: str) -> None:
    answer = await way_in(rig, way, trace)
    problem: dict[str, Any] = answer.json
    if way == "lines":
        problem = problem["error"]
    assert problem["code"] == "bad_request" and MUST_BE in problem["detail"], problem
    assert rig.core.tasks == 0


async def test_a_header_wins_over_the_attribute_of_an_event(rig: HttpRig) -> None:
    event = json.dumps(EVENT | {"traceparent": OTHER}).encode()
    kind = "application/cloudevents+json"
    made = await rig.post(RAW, event, content_type=kind, tickwheel_trace=TRACE)
    task = (await rig.call("GET", f"/v1/tasks/{made['id']}")).json
    assert (task["trace"], task["properties"]["ce-traceparent"]) == (TRACE, OTHER)
