"""Lists, counts, topics, groups, dead letters, schedules, backups."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from server.http.rig import HttpRig
from support.shard_rig import NOW_MS
from tickwheel.api.daemon import TopicStats
from tickwheel.api.groups import GroupSettings
from tickwheel.api.tasks import Tasks
from tickwheel.api.transactions import TransactionInfo, TransactionList
from tickwheel.server.http.declared import answer_type
from tickwheel.server.shard import transactions

GROUP = "/v1/topics/t/groups/g"


async def get(rig: HttpRig, target: str, kind: Any) -> Any:
    """The answer, which must be of the documented type, without a field more."""
    response = await rig.call("GET", target)
    assert response.status == 200, response.body
    msgspec.json.decode(response.body, type=kind)
    return response.json


async def dead(rig: HttpRig, count: int) -> list[str]:
    """Make `count` dead letters of group g and return their ids."""
    await rig.post("/v1/topics/t/pull", {"group": "g"})
    tasks = [{"topic": "t", "body": str(n)} for n in range(count)]
    await rig.post("/v1/tasks", {"tasks": tasks})
    deliveries = (await rig.post("/v1/topics/t/pull", {"group": "g", "max": count}))["deliveries"]
    for entry in deliveries:
        fields = {"receipts": [entry["receipt"]], "reason": f"bad {entry['body']}"}
        assert await rig.post("/v1/rejections", fields) == {"results": ["dead"]}
    return [row["id"] for row in deliveries]


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("after=x", "after must be text with a whole number"),
        ("newest=maybe", "newest"),
        ("until_ms=null", "until_ms is not valid: 'null'"),
    ],
)
async def test_an_invalid_filter_is_named(rig: HttpRig, query: str, text: str) -> None:
    response = await rig.call("GET", f"/v1/tasks?{query}")
    assert response.status == 400 and text in response.json["detail"], response.body


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
    deliveries = (await rig.post("/v1/topics/t/pull", pull))["deliveries"]
    assert [row["id"] for row in deliveries] == [large["id"]]
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


async def test_transaction_pages_read_a_bounded_number_of_rows(
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
    durable = registry.durable_state

    def look(name: str) -> object:
        looked_at.append(name)
        return durable(name)

    monkeypatch.setattr(registry, "durable_state", look)
    page = await get(rig, "/v1/transactions?limit=2&after=x15", shape)
    assert ([transaction["id"] for transaction in page["transactions"]], page["next"]) == (
        ["x20", "x30"],
        "x30",
    )
    assert looked_at == ["x20", "x30", "x40"]
    page = await get(rig, "/v1/transactions?state=rolled_back&group=few", shape)
    assert ([transaction["id"] for transaction in page["transactions"]], page["next"]) == (
        ["x99"],
        None,
    )


@pytest.mark.one_shard("a trial of all shards is one part")
async def test_a_bulk_preview_continues_from_its_last_part(rig: HttpRig) -> None:
    await dead(rig, 2)
    tasks = [{"topic": "t", "delay_ms": 9_000, "properties": {"n": n}} for n in range(5)]
    ids = [task["id"] for task in (await rig.post("/v1/tasks", {"tasks": tasks}))["tasks"]]
    wanted = {"kind": "cancel", "topic": "t", "where": "n >= 3"}
    tried = await rig.post("/v1/bulk-previews", wanted)
    assert (tried["looked_at"], tried["examples"]) == (7, ids[3:])
    more = wanted | {"after": f"{ids[3]}.", "until_id": tried["until_id"]}
    assert (await rig.post("/v1/bulk-previews", more))["examples"] == ids[4:]
    for body in (wanted | {"after": "here"}, wanted | {"until_id": "x"}, wanted | {"where": "n >"}):
        assert (await rig.call("POST", "/v1/bulk-previews", body)).status == 400, body


def half_tasks(name: str, part: int, *bodies: str, **more: Any) -> dict[str, Any]:
    of = {"id": name, "group": "payments", "part": part, **more}
    return {"transaction": of, "tasks": [{"topic": "t", "body": body} for body in bodies]}


async def test_a_commit_makes_the_tasks_of_a_transaction(rig: HttpRig) -> None:
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
    tasks = (await get(rig, "/v1/tasks", answer_type(Tasks)))["tasks"]
    assert [(task["id"], task["body"]) for task in tasks] == list(
        zip(ids, ("1", "2", "3"), strict=True)
    )
    assert (tasks[2]["due_ms"], tasks[2]["key"]) == (NOW_MS + 15_000, "k")


async def test_invalid_transaction_requests_are_refused(rig: HttpRig) -> None:
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


async def test_limits_are_as_documented(rig: HttpRig) -> None:
    assert (await get(rig, "/v1/limits", dict[str, int]))["body_bytes_max"] == 1_048_576
