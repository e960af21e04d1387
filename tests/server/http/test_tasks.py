"""Enqueue, look up, cancel, reschedule, run now: by id and by key."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from server.http.rig import HttpRig
from support.shard_rig import NOW_MS
from tickwheel.server.http.types import ReadTask, stored_tasks


async def enqueue(rig: HttpRig, **task: Any) -> str:
    answer = await rig.post("/v1/tasks", {"topic": "t", **task})
    return str(answer["id"])


async def test_a_task_is_answered_with_its_id_as_text_and_its_due_time(rig: HttpRig) -> None:
    response = await rig.call("POST", "/v1/tasks", {"topic": "t", "body": "hé", "delay_ms": 5})
    assert response.status == 201
    assert response.json == {"id": response.json["id"], "due_ms": NOW_MS + 5, "outcome": "stored"}
    assert isinstance(response.json["id"], str)
    task = (await rig.call("GET", f"/v1/tasks/{response.json['id']}")).json
    assert (task["body"], task["state"], task["due_ms"]) == ("hé", "scheduled", NOW_MS + 5)


async def test_the_answer_waits_until_the_task_is_durable(rig: HttpRig) -> None:
    rig.store.stall()
    asked = rig.begin("POST", "/v1/tasks", {"topic": "t"})
    await rig.settle()
    assert not asked.task.done()
    rig.store.go_on()
    assert (await asked.done()).status == 201


@pytest.mark.parametrize(
    ("when", "due_ms"),
    [
        ({}, NOW_MS),
        ({"delay_ms": 1_500}, NOW_MS + 1_500),
        ({"due_ms": NOW_MS + 7}, NOW_MS + 7),
        ({"due_ms": 5}, NOW_MS),
        ({"at": "2027-01-15T09:00:00.0001+01:00"}, NOW_MS + 1),
        ({"delay_level": 2}, NOW_MS + 5_000),
        ({"delay_level": 99}, NOW_MS + 7_200_000),
    ],
)
async def test_due_times_are_given_in_each_form(
    rig: HttpRig, when: dict[str, Any], due_ms: int
) -> None:
    answer = await rig.post("/v1/tasks", {"topic": "t", **when})
    assert answer["due_ms"] == due_ms
    [task] = (await rig.post("/v1/lookups", {"ids": [answer["id"]]}))["tasks"]
    assert task["due_ms"] == due_ms


async def test_every_field_of_a_task_is_returned(rig: HttpRig) -> None:
    given = {
        "key": "k", "tag": "x", "properties": {"a": "b", "n": 3, "f": 1.5, "yes": True},
        "priority": 7, "ttl_ms": 1_000, "retry": {"kind": "table", "delays_ms": [5, 6]},
    }  # fmt: skip
    body = base64.b64encode(b"\xff\x00").decode()
    task_id = await enqueue(rig, body_base64=body, delay_ms=60_000, **given)
    task = (await rig.call("GET", f"/v1/tasks/{task_id}")).json
    assert task["body_base64"] == body
    assert {name: task[name] for name in given if name != "retry"} == {
        name: value for name, value in given.items() if name != "retry"
    }


async def test_a_due_window_is_answered_with_the_chosen_time(rig: HttpRig) -> None:
    window = {"topic": "t", "delay_ms": 10_000, "within_ms": 60_000}
    tasks = {"tasks": [window] * 20 + [{"topic": "t"}]}
    first = await rig.post("/v1/tasks", tasks, idempotency_key="a")
    dues_ms = [task["due_ms"] - NOW_MS for task in first["tasks"]]
    assert dues_ms[-1] == 0 and all(10_000 <= due_ms <= 70_000 for due_ms in dues_ms[:-1])
    assert len(set(dues_ms)) > 5
    ids = [task["id"] for task in first["tasks"]]
    result = (await rig.post("/v1/lookups", {"ids": ids}))["tasks"]
    assert [task["due_ms"] - NOW_MS for task in result] == dues_ms
    assert (result[0]["within_ms"], result[0]["asked_ms"]) == (60_000, NOW_MS + 10_000)
    assert await rig.post("/v1/tasks", tasks, idempotency_key="a") == first
    await rig.call("DELETE", f"/v1/tasks/{ids[0]}")
    again = await rig.post("/v1/tasks", tasks, idempotency_key="a")
    assert again["tasks"][0] == {"id": ids[0], "due_ms": None, "outcome": "stored"}
    line = (json.dumps(window) + "\n").encode()
    response = await rig.call("POST", "/v1/tasks", line, content_type="application/x-ndjson")
    assert 10_000 <= response.lines[0]["due_ms"] - NOW_MS <= 70_000
    load = (await rig.call("GET", "/v1/load?steps=2")).json
    assert sum(load["counts"]) == load["scheduled"] == 20


async def test_a_pending_key_is_answered_with_the_outcome(rig: HttpRig) -> None:
    task = {"topic": "t", "delay_ms": 10_000, "key": "k"}
    bodies = [
        {"body": "1"}, {"body": "2", "if_pending": "keep"},
        {"body": "3", "if_pending": {"action": "replace", "replaces": "body"}},
        {"body": "4", "if_pending": "reject"},
    ]  # fmt: skip
    tasks = {"tasks": [task | body for body in bodies]}
    first = await rig.post("/v1/tasks", tasks, idempotency_key="a")
    outcomes = ["stored", "kept", "replaced", "rejected"]
    assert [entry["outcome"] for entry in first["tasks"]] == outcomes
    (task_id,) = {row["id"] for row in first["tasks"]}
    assert {entry["due_ms"] for entry in first["tasks"]} == {NOW_MS + 10_000}
    assert (await rig.call("GET", f"/v1/tasks/{task_id}")).json["body"] == "3"
    assert await rig.post("/v1/tasks", tasks, idempotency_key="a") == first
    response = await rig.call(
        "POST", "/v1/topics/t/tasks", b"5",
        tickwheel_key="k", tickwheel_if_pending='{"action": "replace"}',
    )  # fmt: skip
    assert (response.status, response.json["outcome"]) == (201, "replaced")
    assert (await rig.call("GET", f"/v1/tasks/{task_id}")).json["body"] == "5"
    wrong = await rig.call("POST", "/v1/tasks", task | {"if_pending": {"action": "later"}})
    assert (wrong.status, wrong.json["code"]) == (400, "bad_request")
    assert "if_pending must be one of add, keep, replace, reject" in wrong.json["detail"]


async def test_many_tasks_are_accepted_in_order_or_refused_together(rig: HttpRig) -> None:
    answer = await rig.post(
        "/v1/tasks",
        {"tasks": [{"topic": "a", "body": "1", "delay_ms": 10}, {"topic": "b", "body": "2"}]},
    )
    assert [task["due_ms"] - NOW_MS for task in answer["tasks"]] == [10, 0]
    ids = [task["id"] for task in answer["tasks"]]
    tasks = (await rig.post("/v1/lookups", {"ids": ids}))["tasks"]
    assert [(task["topic"], task["body"]) for task in tasks] == [("a", "1"), ("b", "2")]
    wrong = {"tasks": [{"topic": "c"}, {"topic": "no topic"}]}
    response = await rig.call("POST", "/v1/tasks", wrong)
    assert (response.status, response.json["code"]) == (400, "bad_request")
    assert "tasks[1].topic" in response.json["detail"]
    assert "c" not in rig.core.topics


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"topic": "t", "body": "a", "body_base64": "YQ=="}, 400, "either body or body_base64"),
        ({"topic": "t", "body": 5}, 400, "Expected `str | null`, got `int` - at `$.body`"),
        ({"topic": "t", "boddy": ""}, 400, "unknown field `boddy`"),
        ({"body": "x"}, 400, "must have a topic"),
        ({"topic": "t", "tasks": [{"topic": "t"}]}, 400, "not both"),
        ({"tasks": []}, 400, "the minimum is 1"),
        ({"topic": "t", "delay_ms": -1}, 400, "delay_ms must be a non-negative integer, not -1"),
        ({"topic": "t", "delay_ms": 10**30}, 400, "the limit is 315576000000 ms"),
        ({"topic": "t", "delay_ms": 1, "due_ms": 1}, 400, "either delay_ms or due_ms"),
        ({"topic": "t", "delay_level": 0}, 400, "delay_level"),
        ({"topic": "t", "at": "2027-01-15T09:00:00"}, 400, "at `$.at`"),
        ({"topic": "t", "at": "2027-01-15T09:00:00Z", "due_ms": 5}, 400, "due_ms and at"),
        ({"topic": "t", "body": "x" * 1_048_577}, 413, "body_bytes_max"),
        ({"topic": "t", "retry": "unheard-of"}, 400, "does not exist"),
        ({"topic": "t", "priority": 256}, 400, "between 0 and 255, not 256"),
        (b'{"topic": "\\ud800"}', 400, "not valid JSON"),
        (b'{"topic": "t", "body": "\xff"}', 400, "not valid JSON"),
        (b"{", 400, "not valid JSON"),
        (b"", 400, "not valid JSON"),
        (b'{"topic":"t","delay_ms":1,"delay_ms":2}', 400, "'delay_ms' occurs more than once"),
        (b'{"topic":"t","retry":{"a":' + b"[" * 50_000, 400, "nested too deeply"),
    ],
)
async def test_invalid_tasks_are_refused(rig: HttpRig, body: Any, status: int, text: str) -> None:
    response = await rig.call("POST", "/v1/tasks", body)
    assert (response.status, text in response.json["detail"]) == (status, True), response.body
    assert response.headers["content-type"] == "application/problem+json"
    assert rig.core.tasks == 0 and not rig.notices


async def test_a_body_may_be_raw_with_its_fields_in_headers(rig: HttpRig) -> None:
    headers = {
        "tickwheel-delay-ms": "250", "tickwheel-key": "k", "tickwheel-tag": "é",
        "tickwheel-priority": "3", "tickwheel-property-colour": "blue",
        "tickwheel-retry": '{"kind":"fixed","delay_ms":5}', "content-type": "image/png",
    }  # fmt: skip
    response = await rig.call("POST", "/v1/topics/pictures%2Fbig/tasks", b"\x89PNG", **headers)
    assert (response.status, response.json["due_ms"]) == (201, NOW_MS + 250)
    task = (await rig.call("GET", f"/v1/tasks/{response.json['id']}")).json
    assert (task["topic"], task["key"], task["tag"]) == ("pictures/big", "k", "é")
    assert task["properties"] == {"colour": "blue"}
    assert base64.b64decode(task["body_base64"]) == b"\x89PNG"


async def test_an_order_key_is_given_in_json_or_a_header(rig: HttpRig) -> None:
    one = await rig.post("/v1/tasks", {"topic": "t", "order_key": "customer 7"})
    headers = {"tickwheel-order-key": "customer 7", "content-type": "text/plain"}
    other = (await rig.call("POST", "/v1/topics/t/tasks", b"x", **headers)).json
    for task_id in (one["id"], other["id"]):
        assert (await rig.call("GET", f"/v1/tasks/{task_id}")).json["order_key"] == "customer 7"
    pull = {"group": "g", "fair_by": "key", "limit_each": 2, "order_retry_ms": 50}
    deliveries = (await rig.post("/v1/topics/t/pull", pull))["deliveries"]
    assert [(task["id"], task["order_key"]) for task in deliveries] == [(one["id"], "customer 7")]
    wrong = await rig.call("POST", "/v1/tasks", {"topic": "t", "order_key": "k", "retry": "none"})
    assert (wrong.status, wrong.json["code"]) == (400, "bad_request")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("tickwheel-delay-ms", "soon", "must be a whole number, not 'soon'"),
        ("tickwheel-dealy-ms", "5", "unknown field `dealy_ms`"),
        ("tickwheel-body", "5", "a header cannot contain the body"),
        ("tickwheel-retry", "{", "not valid JSON"),
        ("tickwheel-retry", '{"kind":"none","kind":"none"}', "tickwheel-retry: 'kind' occurs more"),
        ("tickwheel-topic", "u", "must be the path's topic t"),
        ("tickwheel-at", "noon", "at"),
    ],
)
async def test_an_invalid_header_is_named(rig: HttpRig, name: str, value: str, text: str) -> None:
    response = await rig.call("POST", "/v1/topics/t/tasks", b"", **{name: value})
    assert response.status == 400 and text in response.json["detail"], response.body


async def test_a_task_is_rescheduled_and_run_now(rig: HttpRig) -> None:
    task_id = await enqueue(rig, delay_ms=10_000)
    path = f"/v1/tasks/{task_id}"
    moved = await rig.call("PATCH", path, {"at": "2027-01-15T08:01:40Z"})
    assert moved.json == {"id": task_id, "result": "scheduled", "due_ms": NOW_MS + 100_000}
    earlier = await rig.call("PATCH", path, {"shift_ms": -40_000})
    assert earlier.json["due_ms"] == NOW_MS + 60_000
    later = await rig.post("/v1/reschedules", {"ids": [task_id], "shift_ms": 5_000})
    assert later["results"][0]["due_ms"] == NOW_MS + 65_000
    both = await rig.call("PATCH", path, {"shift_ms": 1, "delay_ms": 1})
    assert (both.status, "one of delay, at and shift" in both.json["detail"]) == (400, True)
    assert (await rig.post(f"{path}/run"))["due_ms"] == NOW_MS
    nothing = await rig.call("PATCH", path, {})
    assert (nothing.status, "one of delay, at" in nothing.json["detail"]) == (400, True)
    assert (await rig.call("DELETE", path)).json == {"id": task_id, "result": "cancelled"}
    late = await rig.call("PATCH", path, {"delay_ms": 5})
    assert (late.status, late.json["code"]) == (409, "conflict")


@pytest.mark.parametrize("task_id", ["x", "-1", "1.5", "99999999999999999999", "%00", "²"])
async def test_an_invalid_id_is_refused(rig: HttpRig, task_id: str) -> None:
    from urllib.parse import quote

    quoted = task_id if task_id.startswith("%") else quote(task_id)
    response = await rig.call("GET", f"/v1/tasks/{quoted}")
    assert (response.status, response.json["code"]) == (400, "bad_request")


async def test_tasks_are_found_and_changed_by_key(rig: HttpRig) -> None:
    first = await enqueue(rig, key="order/42", delay_ms=5_000)
    second = await enqueue(rig, key="order/42", delay_ms=6_000)
    path = "/v1/topics/t/keys/order%2F42"
    tasks = (await rig.call("GET", path)).json["tasks"]
    assert [task["id"] for task in tasks] == [second, first]
    assert len((await rig.call("GET", f"{path}?newest=true")).json["tasks"]) == 1
    moved = (await rig.call("PATCH", path, {"shift_ms": 1_000})).json["results"]
    assert [each["due_ms"] for each in moved] == [NOW_MS + 6_000, NOW_MS + 7_000]
    moved = (await rig.call("PATCH", path, {"delay_ms": 70})).json["results"]
    assert [each["due_ms"] for each in moved] == [NOW_MS + 70] * 2
    assert [each["id"] for each in (await rig.post(f"{path}/run"))["results"]] == [first, second]
    gone = (await rig.call("DELETE", path)).json["results"]
    assert [each["result"] for each in gone] == ["cancelled"] * 2
    assert (await rig.call("DELETE", path)).json["results"][0]["result"] == "already_cancelled"
    for method, rest, body in (
        ("GET", "", None), ("DELETE", "", None), ("PATCH", "", {"delay_ms": 1}),
        ("POST", "/run", None),
    ):  # fmt: skip
        unknown = await rig.call(method, f"/v1/topics/t/keys/other{rest}", body)
        assert (unknown.status, unknown.json["code"]) == (404, "not_found"), method


# --- resends -------------------------------------------------------------------------------------


async def test_the_same_request_with_a_key_is_the_same_task(rig: HttpRig) -> None:
    task = {"topic": "t", "body": "x", "delay_ms": 90_000}
    first = await rig.post("/v1/tasks", task, idempotency_key="a")
    rig.pass_time(5_000)
    assert await rig.post("/v1/tasks", dict(reversed(task.items())), idempotency_key="a") == first
    other = await rig.post("/v1/tasks", task, idempotency_key="b")
    assert other["id"] != first["id"]
    assert rig.core.tasks == 2


async def test_another_payload_under_the_same_key_is_refused(rig: HttpRig) -> None:
    await rig.post("/v1/tasks", {"topic": "t", "body": "x"}, idempotency_key="a")
    again = await rig.call("POST", "/v1/tasks", {"topic": "t", "body": "y"}, idempotency_key="a")
    assert (again.status, again.json["code"]) == (422, "idempotency_key_reused")
    assert rig.core.tasks == 1


@pytest.mark.parametrize("rule", [None, "keep", "replace"])
@pytest.mark.parametrize("left", [False, True], ids=["both stay", "the first leaves"])
async def test_concurrent_payloads_under_one_key_store_one(
    rig: HttpRig, rule: str | None, left: bool
) -> None:
    """Whatever the first waits for: the store, or what its key has pending."""
    await rig.post("/v1/tasks", {"topic": "t", "key": "k", "body": "0", "delay_ms": 90_000})
    rig.store.stall()
    task = {"topic": "t", "key": "k", "delay_ms": 90_000}
    if rule is not None:
        task["if_pending"] = rule
        plain = rig.begin("POST", "/v1/tasks", {"topic": "t", "key": "k", "delay_ms": 90_000})
        await rig.until(lambda: rig.core.sealed is not None)
    one = rig.begin("POST", "/v1/tasks", task | {"body": "1"}, idempotency_key="a")
    await rig.settle()
    two = rig.begin("POST", "/v1/tasks", task | {"body": "2"}, idempotency_key="a")
    same = rig.begin("POST", "/v1/tasks", task | {"body": "1"}, idempotency_key="a")
    response = await two.done()
    assert (response.status, response.json["code"]) == (422, "idempotency_key_reused")
    if left:
        one.leave()
        await rig.settle()
    rig.store.go_on()
    answer = await same.done()
    assert answer.status == 201, answer.json
    if not left:
        assert (await one.done()).json == answer.json
    if rule is not None:
        await plain.done()
    word = {None: "stored", "keep": "kept", "replace": "replaced"}[rule]
    assert answer.json["outcome"] == word
    bodies = [row.row.body for row in await rig.store.scan(0, 10, None)]
    assert bodies.count(b"2") == 0
    again = await rig.call("POST", "/v1/tasks", task | {"body": "2"}, idempotency_key="a")
    assert again.status == 422


@pytest.mark.one_shard("a client asks again while the daemon drains")
async def test_a_key_is_free_again_when_its_first_payload_was_refused(rig: HttpRig) -> None:
    task = {"topic": "t", "key": "k", "if_pending": "keep"}
    rig.store.stall()
    plain = rig.begin("POST", "/v1/tasks", {"topic": "t", "key": "k"})
    await rig.until(lambda: rig.core.sealed is not None)
    one = rig.begin("POST", "/v1/tasks", task | {"body": "1"}, idempotency_key="a")
    await rig.settle()
    rig.shard.draining = True
    rig.store.go_on()
    assert (await plain.done()).status == 201
    assert (await one.done()).json["code"] == "draining"
    rig.shard.draining = False
    assert (await rig.post("/v1/tasks", task | {"body": "2"}, idempotency_key="a"))["id"]


async def test_a_resend_of_an_uncommitted_request_waits_for_it(rig: HttpRig) -> None:
    rig.store.stall()
    task = {"tasks": [{"topic": "t"}, {"topic": "t", "delay_ms": 5}]}
    one = rig.begin("POST", "/v1/tasks", task, idempotency_key="a")
    await rig.settle()
    two = rig.begin("POST", "/v1/tasks", task, idempotency_key="a")
    await rig.settle()
    assert not one.task.done() and not two.task.done()
    rig.store.go_on()
    assert (await one.done()).json == (await two.done()).json
    three = await rig.post("/v1/tasks", task, idempotency_key="a")
    assert three == (await one.done()).json and rig.core.tasks == 2


@pytest.mark.one_shard("it counts sessions, and the client of the API of all has one")
async def test_a_refused_request_leaves_its_key_free(rig: HttpRig) -> None:
    wrong = await rig.call("POST", "/v1/tasks", {"topic": "no topic"}, idempotency_key="a")
    assert wrong.status == 400
    assert (await rig.post("/v1/tasks", {"topic": "t"}, idempotency_key="a"))["id"]
    assert len(rig.core.sessions) == 1


@pytest.mark.parametrize("key", ["", "x" * 256])
async def test_the_length_of_an_idempotency_key_is_limited(rig: HttpRig, key: str) -> None:
    response = await rig.call("POST", "/v1/tasks", {"topic": "t"}, idempotency_key=key)
    assert response.status == 400 and "idempotency-key must have" in response.json["detail"]


@pytest.mark.parametrize(
    ("answer", "lines"),
    [
        ((100, 5, 1), [b'{"id":"5","due_ms":107,"outcome":"stored"}']),
        ((100, (5,)), [b'{"id":"5","due_ms":107,"outcome":"stored"}']),
        ((100, (5,), {"dues_ms": [None]}), [b'{"id":"5","due_ms":null,"outcome":"stored"}']),
        ((100, (5,), {"outcomes": [("kept", 33)]}), [b'{"id":"5","due_ms":33,"outcome":"kept"}']),
    ],
)
def test_task_answers_have_the_documented_form(answer: tuple[Any, ...], lines: list[bytes]) -> None:
    assert stored_tasks(answer, [ReadTask(("t", b"", 7), 7, None)]).lines() == lines
