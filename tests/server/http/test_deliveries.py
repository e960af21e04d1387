"""Pulls, their receipts, and streams of deliveries."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from server.access.access_rig import AccessRig
from server.http.rig import HttpRig, Response
from support.shard_rig import NOW_MS
from tickwheel.server.http.deliveries import GROUPS_MAX, receipt_text
from tickwheel.server.http.exchange import Receipt

PULL = "/v1/topics/t/pull"
STREAM = "/v1/topics/t/deliveries?group=g&credit=2"
ANY_RECEIPT = receipt_text(Receipt("t", "g", 5, 1, 1, 0))


@pytest.fixture
async def access() -> AsyncIterator[AccessRig]:
    rig = AccessRig()
    await rig.start()
    yield rig
    await rig.stop()


async def enqueue(rig: HttpRig, *bodies: str, **task: Any) -> list[str]:
    tasks = [{"topic": "t", "body": body, **task} for body in bodies]
    return [task["id"] for task in (await rig.post("/v1/tasks", {"tasks": tasks}))["tasks"]]


async def pull(rig: HttpRig, **asked: Any) -> list[dict[str, Any]]:
    deliveries: list[dict[str, Any]] = (await rig.post(PULL, {"group": "g", **asked}))["deliveries"]
    return deliveries


def events(response: Response) -> list[dict[str, Any]]:
    """The deliveries of a stream of server-sent events."""
    results = []
    for event in response.body.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in event.splitlines() if ": " in line)
        if fields.get("event") == "delivery":
            results.append(json.loads(fields["data"]))
            assert fields["id"] == results[-1]["id"]
    return results


# --- pull ----------------------------------------------------------------------------------------


async def test_due_tasks_are_pulled_and_acked(rig: HttpRig) -> None:
    ids = await enqueue(rig, "1", "2", key="k", priority=3, properties={"a": 1})
    deliveries = await pull(rig, max=5)
    assert [(delivery["id"], delivery["body"]) for delivery in deliveries] == [
        (ids[0], "1"),
        (ids[1], "2"),
    ]
    wanted = {
        "due_ms": NOW_MS, "delivered_ms": NOW_MS, "attempt": 1, "key": "k", "priority": 3,
        "properties": {"a": 1},
    }  # fmt: skip
    assert {name: deliveries[0][name] for name in wanted} == wanted
    receipts = [delivery["receipt"] for delivery in deliveries]
    assert await rig.post("/v1/acks", {"receipts": receipts}) == {"results": ["acked"] * 2}
    assert rig.core.tasks == 0
    again = await rig.post("/v1/acks", {"receipts": receipts})
    assert again == {"results": ["acked"] * 2}


async def test_a_pull_waits_for_the_first_task(rig: HttpRig) -> None:
    await pull(rig)
    asked = rig.begin("POST", PULL, {"group": "g", "wait_ms": 20_000})
    await rig.settle()
    assert not asked.task.done()
    [task_id] = await enqueue(rig, "now")
    [found] = (await asked.done()).json["deliveries"]
    assert found["id"] == task_id


async def test_a_pull_that_times_out_is_empty(rig: HttpRig) -> None:
    assert await pull(rig, wait_ms=0) == []


async def test_the_lease_of_an_answered_pull_outlives_its_connection(rig: HttpRig) -> None:
    await enqueue(rig, "x")
    [found] = await pull(rig, lease_ms=60_000)
    rig.pass_time(30_000)
    await rig.settle()
    assert await pull(rig) == []
    acked = await rig.post("/v1/acks", {"receipts": [found["receipt"]]})
    assert acked == {"results": ["acked"]}


async def test_an_expired_lease_frees_the_task(rig: HttpRig) -> None:
    await enqueue(rig, "x")
    [first] = await pull(rig, lease_ms=1_000)
    rig.pass_time(1_001)
    [second] = await pull(rig, wait_ms=1_000)
    assert (second["id"], second["attempt"]) == (first["id"], 2)
    stale = await rig.post("/v1/nacks", {"receipts": [first["receipt"]]})
    assert stale == {"results": ["stale"]}


@pytest.mark.one_shard("it counts the turns of the loop until an answer or an end is there")
async def test_a_disconnected_pull_takes_no_tasks(rig: HttpRig) -> None:
    await pull(rig)
    asked = rig.begin("POST", PULL, {"group": "g", "wait_ms": 60_000})
    await rig.settle()
    asked.leave()
    await asked.done()
    assert rig.core.subscribers == 0 and not rig.shard.callers
    await enqueue(rig, "x")
    assert len(await pull(rig)) == 1


@pytest.mark.one_shard("it counts the turns of the loop until an answer or an end is there")
async def test_an_undelivered_pull_answer_frees_its_leases_soon(rig: HttpRig) -> None:
    await pull(rig)
    asked = rig.begin("POST", PULL, {"group": "g", "wait_ms": 60_000, "lease_ms": 60_000})
    await rig.settle()
    asked.reads.clear()
    await enqueue(rig, "x")
    asked.leave()
    await rig.settle()
    asked.reads.set()
    await asked.done()
    rig.pass_time(5_001)
    [found] = await pull(rig, wait_ms=1_000)
    assert found["attempt"] == 2


# --- settle --------------------------------------------------------------------------------------


async def test_a_nack_says_when_the_next_attempt_is(rig: HttpRig) -> None:
    [task_id] = await enqueue(rig, "x")
    [found] = await pull(rig)
    fields = {"receipts": [found["receipt"]], "delay_ms": 2_000, "reason": "no stock"}
    assert await rig.post("/v1/nacks", fields) == {"results": ["retrying"]}
    [failure] = (await rig.call("GET", f"/v1/tasks/{task_id}")).json["groups"]["g"]["failures"]
    assert (failure["reason"], failure["attempt"]) == ("no stock", 1)
    assert "127.0.0.1" in failure["subscriber"]
    assert await pull(rig) == []
    rig.pass_time(2_000)
    assert [delivery["attempt"] for delivery in await pull(rig, wait_ms=1_000)] == [2]


async def test_receipts_of_several_groups_are_settled_by_one_request(rig: HttpRig) -> None:
    await rig.post("/v1/topics/t/pull", {"group": "other"})
    await pull(rig)
    await enqueue(rig, "1", "2")
    mine = [delivery["receipt"] for delivery in await pull(rig, max=9)]
    theirs = [delivery["receipt"] for delivery in (
        await rig.post("/v1/topics/t/pull", {"group": "other", "max": 9})
    )["deliveries"]]  # fmt: skip
    await rig.post("/v1/rejections", {"receipts": mine[:1]})
    mixed = [mine[0], theirs[0], mine[1], theirs[1]]
    answer = await rig.post("/v1/acks", {"receipts": mixed})
    assert answer == {"results": ["dead", "acked", "acked", "acked"]}


@pytest.mark.parametrize("receipt", ["", "x", "AAAA", "é", "lqF0oWc", "x" * 5_000, "////"])
@pytest.mark.parametrize("verb", ["acks", "nacks", "rejections", "releases"])
async def test_an_invalid_receipt_is_named(rig: HttpRig, verb: str, receipt: str) -> None:
    response = await rig.call("POST", f"/v1/{verb}", {"receipts": [receipt]})
    assert response.status == 400 and "receipts[0] must be the receipt" in response.json["detail"]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("acks", "receipts"), ("nacks", "receipts"), ("cancellations", "ids"), ("runs", "ids"),
        ("lookups", "ids"), ("dead-letters/requeue", "items"),
    ],
)  # fmt: skip
async def test_an_empty_list_is_refused(rig: HttpRig, path: str, field: str) -> None:
    response = await rig.call("POST", f"/v1/{path}", {field: []})
    assert response.status == 400 and f"{field} has 0 elements" in response.json["detail"]


# --- streams -------------------------------------------------------------------------------------


@pytest.mark.one_shard("it counts the turns of the loop until an answer or an end is there")
async def test_a_stream_is_limited_by_its_credit(rig: HttpRig) -> None:
    stream = rig.begin("GET", STREAM)
    await stream.until(lambda response: response.body)
    assert stream.response.headers["content-type"] == "text/event-stream"
    await enqueue(rig, "1", "2", "3")
    await stream.until(lambda response: len(events(response)) == 2)
    await rig.settle()
    first, second = events(stream.response)
    assert (first["body"], second["body"]) == ("1", "2")
    await rig.post("/v1/acks", {"receipts": [first["receipt"]]})
    await stream.until(lambda response: len(events(response)) == 3)
    stream.leave()
    await stream.done()
    assert rig.core.subscribers == 0 and not rig.shard.callers


async def test_deliveries_are_streamed_as_lines(rig: HttpRig) -> None:
    stream = rig.begin("GET", STREAM, accept="application/x-ndjson")
    await enqueue(rig, "1", "2")
    response = await stream.until(lambda response: len(response.lines) == 2)
    assert response.headers["content-type"] == "application/x-ndjson"
    assert [line["body"] for line in response.lines] == ["1", "2"]
    stream.leave()
    await stream.done()


@pytest.mark.one_shard("it counts the turns of the loop until an answer or an end is there")
async def test_deliveries_of_an_ended_stream_are_freed_soon(rig: HttpRig) -> None:
    stream = rig.begin("GET", STREAM + "&lease_ms=60000")
    await enqueue(rig, "1")
    await stream.until(lambda response: events(response))
    stream.leave()
    await stream.done()
    assert await pull(rig) == []
    rig.pass_time(5_001)
    [found] = await pull(rig, wait_ms=1_000)
    assert found["attempt"] == 2


async def test_a_consumer_with_a_lapsed_lease_gets_tasks_after_a_request(rig: HttpRig) -> None:
    stream = rig.begin("GET", STREAM + "&lease_ms=1000")
    await enqueue(rig, "1")
    await stream.until(lambda response: events(response))
    rig.pass_time(1_001)
    await rig.settle()
    assert len(events(stream.response)) == 1
    late = events(stream.response)[0]["receipt"]
    await rig.post("/v1/extensions", {"receipts": [late], "lease_ms": 500})
    await stream.until(lambda response: len(events(response)) == 2)
    assert events(stream.response)[1]["attempt"] == 2
    stream.leave()
    await stream.done()


async def test_another_tokens_receipt_is_no_sign_of_life(access: AccessRig) -> None:
    """Its number of a stream is text that anybody can write."""
    rig = access
    ours = await rig.token("all", name="ours")
    others = [
        (await rig.token("consume=theirs", name="stranger"), 403),
        (await rig.token("consume=*", name="other"), 200),
    ]
    stream = rig.begin("GET", STREAM + "&lease_ms=1000", authorization=f"Bearer {ours}")
    task = {"topic": "t", "body": "1"}
    assert (await rig.http(ours, "POST", "/v1/tasks", task)).status == 201
    await stream.until(lambda response: events(response))
    rig.pass_time(1_001)
    await rig.settle()
    extension = {"receipts": [events(stream.response)[0]["receipt"]], "lease_ms": 500}
    for token, status in others:
        assert (await rig.http(token, "POST", "/v1/extensions", extension)).status == status
        await rig.settle(500)
        assert len(events(stream.response)) == 1
    assert (await rig.http(ours, "POST", "/v1/extensions", extension)).status == 200
    await stream.until(lambda response: len(events(response)) == 2)
    stream.leave()
    await stream.done()


async def test_deliveries_to_a_slow_client_are_limited_by_its_buffer(rig: HttpRig) -> None:
    stream = rig.begin("GET", "/v1/topics/t/deliveries?group=g&credit=1000")
    await stream.until(lambda response: response.body)
    made = json.loads(stream.response.headers["tickwheel-new-group"])
    assert made == {"adopted": 0, "idle": {}}
    stream.reads.clear()
    for _ in range(20):
        await enqueue(rig, "x" * 1_000_000)
    await rig.settle(500)
    group = rig.core.topics["t"].groups["g"]
    assert 0 < len(group.flight) < 15
    stream.reads.set()
    await stream.until(lambda response: len(events(response)) == 20)
    stream.leave()
    await stream.done()


async def test_broadcast_deliveries_have_no_receipt(rig: HttpRig) -> None:
    stream = rig.begin(
        "GET", "/v1/topics/t/deliveries?broadcast=true", accept="application/x-ndjson"
    )
    await stream.until(lambda response: response.body)
    await enqueue(rig, "1")
    response = await stream.until(lambda response: response.lines)
    assert (response.lines[0]["body"], response.lines[0]["receipt"]) == ("1", "")
    stream.leave()
    await stream.done()


@pytest.mark.one_shard("it counts the turns of the loop until an answer or an end is there")
async def test_a_stream_ends_with_the_reason_when_its_group_is_deleted(rig: HttpRig) -> None:
    stream = rig.begin("GET", STREAM, accept="application/x-ndjson")
    await stream.until(lambda response: response.body)
    await rig.call("DELETE", "/v1/topics/t/groups/g?force=true")
    response = await stream.done()
    assert response.lines[-1]["error"]["code"] == "not_found" and response.whole
    assert not rig.shard.callers


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("credit=-1", "prefetch"),
        ("credit=x", "credit"),
        ("lease_ms=5", "lease_ms"),
        ("ack=never", "ack must be"),
        ("grup=g", "unknown field `grup`"),
        ("group=a&group=b", "more than once"),
        ("group=%FF", "query string is not valid"),
        ("broadcast=true&group=g", "cannot have group"),
    ],
)
@pytest.mark.one_shard("it looks at the shard's callers, and the API of all keeps its client")
async def test_an_invalid_stream_request_is_a_problem(rig: HttpRig, query: str, text: str) -> None:
    response = await rig.call("GET", f"/v1/topics/t/deliveries?{query}")
    assert response.status == 400 and text in response.json["detail"], response.body
    assert not rig.shard.callers


HUGE = 10**400


@pytest.mark.parametrize(
    ("method", "target", "body", "field"),
    [
        ("POST", PULL, {"lease_ms": HUGE}, "lease_ms"),
        ("POST", "/v1/extensions", {"receipts": [ANY_RECEIPT], "lease_ms": HUGE}, "lease_ms"),
        ("GET", f"{STREAM}&lease_ms={HUGE}", None, "lease_ms"),
        ("GET", f"/v1/topics/t/deliveries?credit={HUGE}", None, "prefetch"),
    ],
    ids=["pull", "extension", "stream", "credit"],
)
async def test_a_number_of_any_length_is_checked(
    rig: HttpRig, method: str, target: str, body: Any, field: str
) -> None:
    response = await rig.call(method, target, body)
    assert (response.status, response.json["code"]) == (400, "bad_request")
    assert f"{field} must be an integer between" in response.json["detail"]


async def test_groups_of_the_receipts_of_a_request_are_limited(rig: HttpRig) -> None:
    def receipts(count: int) -> list[str]:
        return [receipt_text(Receipt("t", f"g{n}", 5, 1, 1, 0)) for n in range(count)]

    fine = await rig.post("/v1/acks", {"receipts": receipts(GROUPS_MAX)})
    assert len(fine["results"]) == GROUPS_MAX
    more = await rig.call("POST", "/v1/acks", {"receipts": receipts(GROUPS_MAX + 1)})
    assert more.status == 400 and "the limit is 100" in more.json["detail"]
