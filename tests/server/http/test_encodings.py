"""The encoding of a task over HTTP: each way in, pulled, listed, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.http.rig import HttpRig, Response
from support.encodings import LONGEST, MUST_BE, RIGHT, WRONG_TEXTS

EVENT = {"specversion": "1.0", "id": "7", "source": "/shop", "type": "order.made"}
RAW = "/v1/topics/t/tasks"
WAYS = ("json", "many", "transaction", "lines", "header", "binary event", "schedule")


async def way_in(rig: HttpRig, way: str, encoding: str) -> Response:
    task = {"topic": "t", "encoding": encoding}
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
        return await rig.call("POST", RAW, b"x", tickwheel_encoding=encoding)
    if way == "binary event":
        headers = {f"ce-{name}": value for name, value in EVENT.items()}
        return await rig.call("POST", RAW, b"x", **headers, tickwheel_encoding=encoding)
    given = {"topic": "t", "every_ms": 60_000, "task": {"encoding": encoding}}
    return await rig.call("PUT", "/v1/schedules/s", given)


@pytest.mark.parametrize("encoding", RIGHT)
@pytest.mark.parametrize("way", WAYS)
async def test_it_comes_in_and_goes_out(rig: HttpRig, way: str, encoding: str) -> None:
    assert (await way_in(rig, way, encoding)).status in (200, 201)
    if way == "transaction":
        await rig.post("/v1/transactions/x/commit")
    if way == "schedule":
        shown = (await rig.call("GET", "/v1/schedules/s")).json
        assert shown["task"] == {"encoding": encoding}
        await rig.post("/v1/schedules/s/run")
    (task,) = (await rig.call("GET", "/v1/tasks?topic=t")).json["tasks"]
    assert task["encoding"] == encoding
    (delivery,) = (await rig.post("/v1/topics/t/pull", {"group": "g"}))["deliveries"]
    assert delivery["encoding"] == encoding


@pytest.mark.parametrize("encoding", [*WRONG_TEXTS, ""], ids=repr)
@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("header", "binary event")])
async def test_what_is_none_is_refused(rig: HttpRig, way: str, encoding: str) -> None:
    answer = await way_in(rig, way, encoding)
    problem: dict[str, Any] = answer.json
    if way == "lines":
        problem = problem["error"]
    assert problem["code"] == "bad_request" and MUST_BE in problem["detail"], problem
    assert rig.core.tasks == 0


async def test_a_header_that_is_none_is_refused(rig: HttpRig) -> None:
    for wrong in ("JSON", LONGEST + "z", "json; v=2"):
        answer = await way_in(rig, "header", wrong)
        assert answer.status == 400 and MUST_BE in answer.json["detail"]


async def test_a_body_is_shown_and_delivered_as_it_is_stored(rig: HttpRig) -> None:
    given = {"topic": "t", "body_base64": "eJxLTEpOSQQABRYBdw==", "encoding": "zlib"}
    made = await rig.post("/v1/tasks", given)
    task = (await rig.call("GET", f"/v1/tasks/{made['id']}")).json
    assert (task["body_base64"], task["encoding"]) == (given["body_base64"], "zlib")
    (delivery,) = (await rig.post("/v1/topics/t/pull", {"group": "g"}))["deliveries"]
    assert delivery["body_base64"] == given["body_base64"]
