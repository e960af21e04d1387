"""Lists, counts, topics, groups, dead letters, schedules, backups."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from server.http.rig import HttpRig
from support.shard_rig import NOW_MS
from tickwheel.api.bulk import BulkInfo, BulkList, BulkPreview
from tickwheel.api.daemon import GroupStats, Stats, TopicList, TopicStats
from tickwheel.api.dead import DeadLetters
from tickwheel.api.frames import FrameType as T
from tickwheel.api.groups import GroupSettings, HeldKeys, KeyLines, TopicHeld
from tickwheel.api.schedules import ScheduleInfo, ScheduleList
from tickwheel.api.tasks import TaskInfo, Tasks
from tickwheel.api.transactions import TransactionInfo, TransactionList
from tickwheel.server.http.declared import answer_type
from tickwheel.server.http.routes import GROUPS_TYPE
from tickwheel.server.shard import transactions

GROUP = "/v1/topics/t/groups/g"


async def get(rig: HttpRig, target: str, kind: Any) -> Any:
    """The answer, which must be of the documented type, without a field more."""
    response = await rig.call("GET", target)
    assert response.status == 200, response.body
    msgspec.json.decode(response.body, type=kind)
    return response.json


async def dead(rig: HttpRig, count: int) -> list[str]:
    """Ids of so many dead letters of group g."""
    await rig.post("/v1/topics/t/pull", {"group": "g"})
    tasks = [{"topic": "t", "body": str(n)} for n in range(count)]
    await rig.post("/v1/tasks", {"tasks": tasks})
    found = (await rig.post("/v1/topics/t/pull", {"group": "g", "max": count}))["deliveries"]
    for one in found:
        said = {"receipts": [one["receipt"]], "reason": f"bad {one['body']}"}
        assert await rig.post("/v1/rejections", said) == {"results": ["dead"]}
    return [one["id"] for one in found]


async def test_a_list_of_tasks_has_pages_and_filters(rig: HttpRig) -> None:
    tasks = [{"topic": f"t{n % 2}", "key": f"k{n}", "delay_ms": 9_000} for n in range(10)]
    ids = [task["id"] for task in (await rig.post("/v1/tasks", {"tasks": tasks}))["tasks"]]
    seen: list[str] = []
    target = "/v1/tasks?limit=3"
    while True:
        page = await get(rig, target, answer_type(Tasks))
        seen += [task["id"] for task in page["tasks"]]
        if page["next"] is None:
            break
        target = f"/v1/tasks?limit=3&after={page['next']}"
    assert seen == ids
    newest = await get(rig, "/v1/tasks?newest=true&limit=1", answer_type(Tasks))
    assert newest["tasks"][0]["id"] == ids[-1]
    assert len((await get(rig, "/v1/tasks?topic=t1", answer_type(Tasks)))["tasks"]) == 5
    assert len((await get(rig, "/v1/tasks?key=k3", answer_type(Tasks)))["tasks"]) == 1
    assert (await get(rig, "/v1/tasks?state=ready", answer_type(Tasks)))["tasks"] == []


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("limit=0", "limit must be an integer of 1 to 1000, not 0"),
        ("limit=1001", "1 to 1000, not 1001"),
        ("state=odd", "state must be one of"),
        ("after=x", "after must be a whole number"),
        ("topic=no%20topic", "topic must be"),
        ("newest=maybe", "newest"),
        ("until_ms=null", "until_ms has no value: 'null'"),
    ],
)
async def test_a_filter_that_is_none_is_named(rig: HttpRig, query: str, text: str) -> None:
    response = await rig.call("GET", f"/v1/tasks?{query}")
    assert response.status == 400 and text in response.json["detail"], response.body


async def test_topics_have_pages_by_name(rig: HttpRig) -> None:
    await rig.post("/v1/tasks", {"tasks": [{"topic": name} for name in ("b", "a/x", "c")]})
    first = await get(rig, "/v1/topics?limit=2", answer_type(TopicList))
    assert ([one["topic"] for one in first["topics"]], first["next"]) == (["a/x", "b"], "b")
    second = await get(rig, "/v1/topics?limit=2&after=b", answer_type(TopicList))
    assert ([one["topic"] for one in second["topics"]], second["next"]) == (["c"], None)
    one = await get(rig, "/v1/topics/a%2Fx", answer_type(TopicStats))
    assert (one["topic"], one["enqueued"]) == ("a/x", 1)
    unknown = await rig.call("GET", "/v1/topics/nobody")
    assert (unknown.status, unknown.json["code"]) == (404, "not_found")


async def test_a_group_is_made_set_shown_and_deleted(rig: HttpRig) -> None:
    made = await rig.call("PUT", GROUP, {"since": "first", "rate": 5, "paused": True})
    assert (made.status, made.json["created"], made.json["rate"]) == (201, True, 5.0)
    again = await rig.call("PUT", GROUP, {})
    assert (again.status, again.json["created"], again.json["paused"]) == (200, False, True)
    changed = await rig.call("PATCH", GROUP, {"rate": None, "retry": {"kind": "none"}})
    assert (changed.json["rate"], changed.json["paused"]) == (None, True)
    group = await get(rig, GROUP, answer_type(GroupStats))
    assert (group["paused"], group["retry"]) == (True, {"kind": "none"})
    assert list((await get(rig, "/v1/topics/t/groups", GROUPS_TYPE))["groups"]) == ["g"]
    topic = await rig.call("PATCH", "/v1/topics/t", {"paused": True})
    msgspec.json.decode(topic.body, type=answer_type(GroupSettings))
    assert topic.json["group"] is None
    held = await rig.call("DELETE", GROUP)
    assert held.json == {"ready": 0, "in_flight": 0, "waiting": 0, "dead": 0}
    assert (await rig.call("GET", GROUP)).status == 404
    assert (await rig.call("DELETE", GROUP)).status == 404


async def test_a_group_that_holds_tasks_is_deleted_by_force_only(rig: HttpRig) -> None:
    await rig.call("PUT", GROUP, {})
    await rig.post("/v1/tasks", {"topic": "t"})
    await rig.settle()
    kept = await rig.call("DELETE", GROUP)
    assert (kept.status, kept.json["code"]) == (409, "conflict")
    assert (await rig.call("DELETE", f"{GROUP}?force=true")).json["ready"] == 1


async def test_a_topic_is_for_broadcasts_only(rig: HttpRig) -> None:
    made = await rig.call("PATCH", "/v1/topics/t", {"broadcast_only": True})
    msgspec.json.decode(made.body, type=answer_type(GroupSettings))
    assert (made.status, made.json["broadcast_only"]) == (200, True)
    assert (await get(rig, "/v1/topics/t", answer_type(TopicStats)))["broadcast_only"] is True
    assert (await rig.call("PUT", GROUP, {})).status == 409
    assert (await rig.call("POST", "/v1/topics/t/pull", {"group": "g"})).status == 409
    await rig.call("PATCH", "/v1/topics/t", {"broadcast_only": False})
    assert (await rig.call("PUT", GROUP, {})).status == 201


async def test_a_group_has_a_filter(rig: HttpRig) -> None:
    made = await rig.call("PUT", GROUP, {"tags": "eu || uk"})
    msgspec.json.decode(made.body, type=answer_type(GroupSettings))
    assert (made.status, made.json["tags"]) == (201, "eu || uk")
    changed = await rig.call("PATCH", GROUP, {"tags": None, "where": "amount > 10"})
    msgspec.json.decode(changed.body, type=answer_type(GroupSettings))
    assert (changed.json.get("tags"), changed.json["where"]) == (None, "amount > 10")
    tasks = [{"topic": "t", "properties": {"amount": n}} for n in (10, 11)]
    small, large = (await rig.post("/v1/tasks", {"tasks": tasks}))["tasks"]
    pull = {"group": "g", "max": 9, "where": "amount > 10"}
    found = (await rig.post("/v1/topics/t/pull", pull))["deliveries"]
    assert [one["id"] for one in found] == [large["id"]]
    assert (await rig.call("GET", f"/v1/tasks/{small['id']}")).json["state"] == "filtered"
    group = (await get(rig, "/v1/topics/t", answer_type(TopicStats)))["groups"]["g"]
    assert (group["where"], group["filtered"]) == ("amount > 10", 1)
    other = await rig.call("POST", "/v1/topics/t/pull", {"group": "g", "where": "TRUE"})
    assert (other.status, other.json["code"]) == (409, "conflict")
    stream = await rig.call("GET", "/v1/topics/t/deliveries?group=g&tags=eu")
    assert (stream.status, stream.json["code"]) == (409, "conflict")
    wrong = await rig.call("PATCH", GROUP, {"where": "amount >"})
    assert (wrong.status, wrong.json["code"]) == (400, "bad_request")
    assert wrong.json["detail"].endswith("^")


async def test_held_keys_and_lines(rig: HttpRig) -> None:
    made = await rig.call("PUT", GROUP, {"order_failure": "hold", "order_attempts": 1})
    msgspec.json.decode(made.body, type=answer_type(GroupSettings))
    tasks = [{"topic": "t", "order_key": key} for key in ("a", "a", "b")]
    first, _, other = [
        one["id"] for one in (await rig.post("/v1/tasks", {"tasks": tasks}))["tasks"]
    ]
    pulled = (await rig.post("/v1/topics/t/pull", {"group": "g", "max": 9}))["deliveries"]
    receipts = [one["receipt"] for one in pulled]
    await rig.post("/v1/nacks", {"receipts": receipts, "reason": "why"})
    found = await get(rig, f"{GROUP}/held-keys", answer_type(HeldKeys))
    assert [(one["id"], one["key"], one["waiting"], one["reason"]) for one in found["keys"]] == [
        (first, "a", 1, "why"), (other, "b", 0, "why"),
    ]  # fmt: skip
    assert found["held"] == 2
    lines = await get(rig, f"{GROUP}/lines?limit=5", answer_type(KeyLines))
    assert [(one["value"], one["state"], one["waiting"]) for one in lines["lines"]] == [
        ("a", "held", 1)
    ]
    group = (await get(rig, "/v1/topics/t", answer_type(TopicStats)))["groups"]["g"]
    assert (group["held"], group["in_lines"]) == (2, 1)
    released = await rig.post(f"{GROUP}/held-keys/release", {"ids": [first, "5"]})
    assert [one["result"] for one in released["results"]] == ["released", "not_held"]
    skipped = await rig.post(f"{GROUP}/held-keys/skip", {"key": "b"})
    assert skipped["results"] == [{"id": other, "result": "skipped"}]
    again = await rig.post(f"{GROUP}/held-keys/skip", {"key": "b"})
    assert again["results"] == [{"id": None, "result": "not_held"}]
    assert (await rig.call("POST", f"{GROUP}/held-keys/skip", {})).status == 400
    for path in ("held-keys", "lines"):
        assert (await rig.call("GET", f"/v1/topics/t/groups/none/{path}")).status == 404


async def test_a_topic_has_a_rule_for_keys_that_are_pending(rig: HttpRig) -> None:
    topic, rule = "/v1/topics/t", {"action": "replace", "replaces": "body"}
    made = await rig.call("PATCH", topic, {"if_pending": rule})
    msgspec.json.decode(made.body, type=answer_type(GroupSettings))
    assert (made.status, made.json["if_pending"]) == (200, rule)
    assert (await get(rig, topic, answer_type(TopicStats)))["if_pending"] == rule
    for outcome in ("stored", "replaced"):
        assert (await rig.post("/v1/tasks", {"topic": "t", "key": "k"}))["outcome"] == outcome
    await rig.call("PATCH", topic, {"if_pending": None})
    assert (await rig.post("/v1/tasks", {"topic": "t", "key": "k"}))["outcome"] == "stored"
    wrong = await rig.call("PUT", GROUP, {"if_pending": "keep"})
    assert (wrong.status, wrong.json["code"]) == (400, "bad_request")
    assert "`if_pending`" in wrong.json["detail"]


async def test_a_topic_is_deleted(rig: HttpRig) -> None:
    topic = "/v1/topics/t"
    await rig.call("PUT", GROUP, {})
    await rig.post("/v1/tasks", {"topic": "t", "delay_ms": 60_000})
    await rig.settle()
    kept = await rig.call("DELETE", topic)
    assert (kept.status, kept.json["code"]) == (409, "conflict")
    assert "1 pending" in kept.json["detail"]
    held = await rig.call("DELETE", f"{topic}?force=true")
    msgspec.json.decode(held.body, type=answer_type(TopicHeld))
    assert (held.status, held.json["pending"], held.json["groups"]) == (200, 1, 1)
    await rig.settle()
    assert (await rig.call("GET", topic)).status == 404
    assert (await rig.call("DELETE", topic)).status == 404


async def test_dead_letters_are_listed_requeued_and_deleted(rig: HttpRig) -> None:
    ids = await dead(rig, 3)
    page = await get(rig, "/v1/dead-letters?limit=2", answer_type(DeadLetters))
    assert [letter["id"] for letter in page["dead"]] == ids[:2]
    assert page["dead"][0]["failures"][0]["reason"] == "bad 0"
    rest = await get(rig, f"/v1/dead-letters?after={page['next']}", answer_type(DeadLetters))
    assert ([letter["id"] for letter in rest["dead"]], rest["next"]) == (ids[2:], None)
    found = await get(rig, "/v1/dead-letters?group=g&reason=bad%201", answer_type(DeadLetters))
    assert [letter["id"] for letter in found["dead"]] == [ids[1]]
    items = {"items": [{"id": ids[0], "group": "g"}, {"id": "5", "group": "g"}]}
    requeued = await rig.post("/v1/dead-letters/requeue", items)
    assert [one["result"] for one in requeued["results"]] == ["requeued", "unknown"]
    deleted = await rig.post("/v1/dead-letters/delete", {"items": [{"id": ids[1], "group": "g"}]})
    assert deleted["results"] == [{"id": ids[1], "result": "deleted"}]
    wrong = await rig.call("GET", "/v1/dead-letters?after=x")
    assert wrong.status == 400


async def test_a_schedule_from_its_making_to_its_end(rig: HttpRig) -> None:
    path = "/v1/schedules/nightly"
    asked = {
        "topic": "t", "body": "go", "cron": "0 3 * * *", "timezone": "Europe/Berlin",
        "task": {"key": "k", "properties": {"a": 1}, "retry": {"kind": "none"}},
    }  # fmt: skip
    made = await rig.call("PUT", path, asked)
    assert (made.status, made.json["outcome"]) == (201, "created")
    msgspec.json.decode(made.body, type=answer_type(ScheduleInfo))
    assert made.json["task"]["properties"] == {"a": 1}
    assert (await rig.call("PUT", path, asked)).json["outcome"] == "unchanged"
    assert [one["name"] for one in (
        await get(rig, "/v1/schedules", answer_type(ScheduleList))
    )["schedules"]] == ["nightly"]  # fmt: skip
    assert (await rig.call("POST", f"{path}/pause")).json["paused"] is True
    assert (await rig.call("POST", f"{path}/resume")).json["paused"] is False
    [task_id] = (await rig.post(f"{path}/run"))["ids"]
    shown = await get(rig, f"{path}?next=3", answer_type(ScheduleInfo))
    assert (len(shown["planned_ms"]), shown["recent"][0]["id"]) == (3, task_id)
    span = {"from_ms": NOW_MS - 3 * 86_400_000, "to_ms": NOW_MS}
    assert len((await rig.post(f"{path}/backfill", span))["ids"]) == 3
    assert (await rig.call("DELETE", path)).json["name"] == "nightly"
    assert (await rig.call("GET", path)).status == 404
    wrong = await rig.call("PUT", path, {"topic": "t", "cron": "often"})
    assert wrong.status == 400 and "cron" in wrong.json["detail"]


async def test_a_page_of_transactions_looks_at_what_it_shows(
    rig: HttpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are remembered; and what matches little is looked for in steps."""
    shape = answer_type(TransactionList)
    monkeypatch.setattr(transactions, "NAMES_PER_STEP", 10)
    for n in range(100):
        name = {"id": f"x{n:02}", "group": "few" if n == 99 else "many", "part": 1}
        await rig.post("/v1/tasks", {"tasks": [{"topic": "t", "body": ""}], "transaction": name})
        if n % 10:
            await rig.post(f"/v1/transactions/x{n:02}/rollback")
    registry, looked_at = rig.core.transaction_registry, list[str]()
    durable = registry.durable

    def look(name: str) -> object:
        looked_at.append(name)
        return durable(name)

    monkeypatch.setattr(registry, "durable", look)
    page = await get(rig, "/v1/transactions?limit=2&after=x15", shape)
    assert ([one["id"] for one in page["transactions"]], page["next"]) == (["x20", "x30"], "x30")
    assert looked_at == ["x20", "x30", "x40"]
    page = await get(rig, "/v1/transactions?state=rolled_back&group=few", shape)
    assert ([one["id"] for one in page["transactions"]], page["next"]) == (["x99"], None)


async def test_transactions_are_listed_shown_and_decided(rig: HttpRig) -> None:
    peer = await rig.peer()
    for name in ("a", "b"):
        tasks = [("t", b"x", 60_000, {"key": "k"}), ("u", b"", 0)]
        answer = await peer.call(T.PREPARE, name, "payments", 1, tasks, {"from": "commit"})
        assert answer[2] == (NOW_MS, ())
    page = await get(rig, "/v1/transactions?limit=1", answer_type(TransactionList))
    assert ([one["id"] for one in page["transactions"]], page["next"]) == (["a"], "a")
    page = await get(rig, "/v1/transactions?after=a&group=payments", answer_type(TransactionList))
    assert ([one["id"] for one in page["transactions"]], page["next"]) == (["b"], None)
    shown = await get(rig, "/v1/transactions/a", answer_type(TransactionInfo))
    assert (shown["state"], shown["tasks"], shown["topics"]) == ("open", 2, ["t", "u"])
    first, second = shown["halves"]
    assert (first["due_ms"], first["delay_ms"], first["key"]) == (None, 60_000, "k")
    assert (second["delay_ms"], second["key"]) == (0, None)
    ids = (await rig.post("/v1/transactions/a/commit"))["ids"]
    assert (await rig.post("/v1/transactions/a/commit"))["ids"] == ids
    assert (await get(rig, f"/v1/tasks/{ids[0]}", answer_type(TaskInfo)))[
        "due_ms"
    ] == NOW_MS + 60_000
    assert await rig.post("/v1/transactions/b/rollback") == {"ids": []}
    assert await rig.post("/v1/transactions/b/rollback") == {"ids": []}
    for path, status, code in (
        ("a/rollback", 409, "transaction_committed"),
        ("b/commit", 409, "transaction_rolled_back"),
        ("c/commit", 404, "unknown_transaction"),
    ):
        wrong = await rig.call("POST", f"/v1/transactions/{path}")
        assert (wrong.status, wrong.json["code"]) == (status, code)
    assert (await rig.call("GET", "/v1/transactions?state=odd")).status == 400
    committed = await get(rig, "/v1/transactions?state=committed", answer_type(TransactionList))
    assert committed["transactions"][0]["first_id"] == ids[0]


async def test_a_bulk_from_its_trial_to_its_end(rig: HttpRig) -> None:
    await dead(rig, 2)
    tasks = [{"topic": "t", "delay_ms": 9_000, "properties": {"n": n}} for n in range(5)]
    ids = [task["id"] for task in (await rig.post("/v1/tasks", {"tasks": tasks}))["tasks"]]
    wanted = {"kind": "cancel", "topic": "t", "where": "n >= 3"}
    tried = await rig.call("POST", "/v1/bulk-previews", wanted)
    msgspec.json.decode(tried.body, type=answer_type(BulkPreview))
    assert (tried.json["looked_at"], tried.json["examples"]) == (7, ids[3:])
    more = wanted | {"after": f"{ids[3]}.", "until_id": tried.json["until_id"]}
    assert (await rig.post("/v1/bulk-previews", more))["examples"] == ids[4:]
    for _ in range(2):
        made = await rig.call("POST", "/v1/bulk", wanted | {"id": "mine"})
        assert (made.status, made.json["id"], made.json["kind"]) == (201, "mine", "cancel")
        msgspec.json.decode(made.body, type=answer_type(BulkInfo))
    await rig.settle()
    shown = await get(rig, "/v1/bulk/mine", answer_type(BulkInfo))
    assert (shown["state"], shown["changed"], shown["selection"]) == (
        "done", 2, {"where": "n >= 3"},
    )  # fmt: skip
    requeued = {"kind": "requeue", "topic": "t", "group": "g", "reason": "bad 1", "rate": 100}
    assert (await rig.post("/v1/bulk", requeued))["rate"] == 100
    await rig.settle()
    page = await get(rig, "/v1/bulk?limit=1&topic=t&state=done", answer_type(BulkList))
    assert (page["bulk"][0]["kind"], page["bulk"][0]["changed"]) == ("requeue", 1)
    page = await get(rig, f"/v1/bulk?after={page['next']}", answer_type(BulkList))
    assert [bulk["id"] for bulk in page["bulk"]] == ["mine"]
    assert (await get(rig, "/v1/bulk?topic=u", answer_type(BulkList)))["bulk"] == []
    assert (await rig.call("DELETE", "/v1/bulk/mine")).json == shown, "it was over"
    for method, target, body, status in (
        ("POST", "/v1/bulk", {"kind": "cancel", "topic": "t", "id": "mine"}, 409),
        ("POST", "/v1/bulk", {"kind": "cancel", "topic": "typo"}, 404),
        ("POST", "/v1/bulk", {"kind": "cancel", "topic": "t", "where": "n >"}, 400),
        ("POST", "/v1/bulk", {"kind": "cancel", "topic": "t", "colour": "red"}, 400),
        ("POST", "/v1/bulk-previews", wanted | {"after": "here"}, 400),
        ("POST", "/v1/bulk-previews", wanted | {"until_id": "x"}, 400),
        ("GET", "/v1/bulk/typo", None, 404),
        ("DELETE", "/v1/bulk/typo", None, 404),
        ("GET", "/v1/bulk?state=odd", None, 400),
    ):
        assert (await rig.call(method, target, body)).status == status, (method, target, body)


def half_tasks(name: str, part: int, *bodies: str, **more: Any) -> dict[str, Any]:
    of = {"id": name, "group": "payments", "part": part, **more}
    return {"transaction": of, "tasks": [{"topic": "t", "body": body} for body in bodies]}


async def test_tasks_of_a_transaction_are_tasks_when_it_is_committed(rig: HttpRig) -> None:
    first = await rig.call("POST", "/v1/tasks", half_tasks("a", 1, "1", "2"))
    assert (first.status, first.json) == (201, {"transaction": "a", "part": 1, "tasks": 2})
    again = await rig.post("/v1/tasks", half_tasks("a", 1, "1", "2"))
    assert again == first.json, "a resend keeps nothing twice"
    more = half_tasks("a", 2, "3", count_from="commit")
    more["tasks"][0] |= {"delay_ms": 5_000, "key": "k", "properties": {"n": 1}}
    await rig.post("/v1/tasks", more)
    assert (await get(rig, "/v1/tasks", answer_type(Tasks)))["tasks"] == []
    shown = await get(rig, "/v1/transactions/a", answer_type(TransactionInfo))
    assert (shown["tasks"], shown["halves"][2]["delay_ms"]) == (3, 5_000)
    rig.sources.now_ms += 10_000
    ids = (await rig.post("/v1/transactions/a/commit"))["ids"]
    found = (await get(rig, "/v1/tasks", answer_type(Tasks)))["tasks"]
    assert [(task["id"], task["body"]) for task in found] == list(
        zip(ids, ("1", "2", "3"), strict=True)
    )
    assert (found[2]["due_ms"], found[2]["key"]) == (NOW_MS + 15_000, "k")


async def test_what_does_not_fit_a_transaction_says_so(rig: HttpRig) -> None:
    await rig.post("/v1/tasks", half_tasks("a", 1, "1"))
    await rig.post("/v1/transactions/a/rollback")
    late = await rig.call("POST", "/v1/tasks", half_tasks("a", 2, "2"))
    assert (late.status, late.json["code"]) == (409, "transaction_rolled_back")
    await rig.post("/v1/tasks", half_tasks("b", 1, "1"))
    other = half_tasks("b", 2, "2")
    other["transaction"]["group"] = "others"
    wrong = await rig.call("POST", "/v1/tasks", other)
    assert (wrong.status, wrong.json["code"]) == (409, "conflict")
    of = half_tasks("c", 1, "1")
    for body, word in (
        ({"transaction": of["transaction"], "topic": "t"}, "tasks"),
        (of | {"topic": "t"}, "not both"),
        ({"transaction": {"id": "c", "group": "payments"}, "tasks": of["tasks"]}, "part"),
        (half_tasks("c", 0, "1"), "part"),
        (half_tasks("c", 1), "0"),
        (half_tasks("c", 1, "1", count_from="never"), "commit"),
    ):
        wrong = await rig.call("POST", "/v1/tasks", body)
        assert wrong.status == 400 and word in wrong.json["detail"], (body, wrong.json)
    keyed = await rig.call("POST", "/v1/tasks", of, idempotency_key="k")
    assert keyed.status == 400 and "part" in keyed.json["detail"]
    assert (await rig.call("GET", "/v1/transactions/c")).status == 404


async def test_counts_status_and_limits_are_as_documented(rig: HttpRig) -> None:
    await rig.call("PUT", GROUP, {})
    await get(rig, "/v1/stats", answer_type(Stats))
    assert (await get(rig, "/v1/limits", dict[str, int]))["body_bytes_max"] == 1_048_576


async def test_a_backup_is_made_or_its_name_refused(rig: HttpRig) -> None:
    made = await rig.call("POST", "/v1/backups", {"name": "a.db"})
    assert made.status == 201 and made.json["path"].endswith("a.db")
    assert (await rig.call("POST", "/v1/backups", {"name": "../a.db"})).status == 400
