"""What the console looks at: the wheel in numbers, what is wrong in words, the story of a task."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from server.http.rig import HttpRig
from support.shard_rig import NOW_MS
from tickwheel.api.daemon import Overview
from tickwheel.history.read import Answer
from tickwheel.model.records import ORDER_ATTEMPTS
from tickwheel.server.http.declared import answer_type
from tickwheel.server.shard import overview as watching

HOUR_MS = 3_600_000
SINCE = "since 2027-01-15 08:00 UTC"


async def overview(rig: HttpRig) -> Any:
    rig.sources.now_ms += watching.FRESH_MS  # another one than the last
    response = await rig.call("GET", "/v1/overview")
    assert response.status == 200, response.body
    msgspec.json.decode(response.body, type=answer_type(Overview))
    return response.json


def texts(found: Any) -> list[str]:
    return [trouble["text"] for trouble in found["troubles"]]


async def test_the_ring_has_each_task_in_its_slot_and_turn(rig: HttpRig) -> None:
    dues = [10_000, 10_500, 3_000_000, HOUR_MS + 10_000, 2 * HOUR_MS - 5_000, 9 * HOUR_MS]
    tasks = [{"topic": "t", "due_ms": NOW_MS + due} for due in dues]
    await rig.post("/v1/tasks", {"tasks": tasks})
    ring = (await overview(rig))["ring"]
    here = NOW_MS // 1000 % 3600
    assert (ring["slots"], ring["tick_ms"], ring["slots_per_cell"]) == (3600, 1000, 1)
    assert ring["slot"] == here and len(ring["this"]) == len(ring["next"]) == 3600
    this = {slot: many for slot, many in enumerate(ring["this"]) if many}
    following = {slot: many for slot, many in enumerate(ring["next"]) if many}
    assert this == {(here + 10) % 3600: 2, (here + 3000) % 3600: 1}
    assert following == {(here + 10) % 3600: 1, (here - 5) % 3600: 1}
    assert ring["later"] == 1


async def test_held_keys_are_a_trouble(rig: HttpRig) -> None:
    await rig.call("PUT", "/v1/topics/t/groups/g", {"order_failure": "hold", "order_attempts": 1})
    for count, said in ((1, "1 order key is held"), (2, "2 order keys are held")):
        await rig.post("/v1/tasks", {"topic": "t", "order_key": str(count)})
        [one] = (await rig.post("/v1/topics/t/pull", {"group": "g"}))["deliveries"]
        await rig.post("/v1/nacks", {"receipts": [one["receipt"]]})
        result = texts(await overview(rig))
        assert f"{said} in group g of t: release or skip the failed tasks" in result


async def test_paused_keys_are_a_trouble_while_tasks_wait_for_them(rig: HttpRig) -> None:
    await rig.call("PUT", "/v1/topics/t/groups/g", {})
    await rig.post("/v1/topics/t/groups/g/held-keys/pause", {"key": "a"})
    await rig.post("/v1/tasks", {"topic": "t", "order_key": "b"})
    assert (await rig.post("/v1/topics/t/pull", {"group": "g"}))["deliveries"]
    assert "paused" not in " ".join(texts(await overview(rig)))
    await rig.post("/v1/tasks", {"topic": "t", "order_key": "a"})
    assert (await rig.post("/v1/topics/t/pull", {"group": "g"}))["deliveries"] == []
    rig.sources.now_ms += 3_600_000
    result = texts(await overview(rig))
    assert "1 key is paused in group g of t; 1 task waits for its turn" in result
    assert not any("Group g of t does not keep up" in text for text in result)


async def test_a_repeatedly_failing_order_key_is_a_trouble(rig: HttpRig) -> None:
    """The first of a key fails again and again; one without another behind it stops nobody."""
    made = await rig.post("/v1/tasks", {"tasks": [{"topic": "t", "order_key": k} for k in "aab"]})
    first = made["tasks"][0]["id"]
    for failed in range(1, ORDER_ATTEMPTS + 1):
        taken = (await rig.post("/v1/topics/t/pull", {"group": "g", "max": 3}))["deliveries"]
        receipts = [entry["receipt"] for entry in taken]
        assert len(taken) == 2
        await rig.post("/v1/nacks", {"receipts": receipts, "reason": "no such account"})
        rig.sources.now_ms += 2_000
        rig.shard.wake()
        results = [text for text in texts(await overview(rig)) if "stuck" in text]
        assert results == (
            [
                f"Group g of t is stuck on one order key: 1 task waits behind task {first}, which"
                f" has failed {failed} times (no such account)"
            ]
            if watching.STUCK_FAILURES <= failed < ORDER_ATTEMPTS
            else []
        )
    assert "2 order keys are held" in " ".join(texts(await overview(rig)))


async def test_a_large_wheel_is_shown_in_cells() -> None:
    running = await HttpRig(slots=10_000, tick_ms=100).start()
    try:
        await running.post("/v1/tasks", {"topic": "t", "delay_ms": 30_000})
        ring = (await overview(running))["ring"]
        assert ring["slots_per_cell"] == 3 and len(ring["this"]) == 3334
        assert ring["this"][(NOW_MS + 30_000) // 100 % 10_000 // 3] == sum(ring["this"]) == 1
    finally:
        await running.stop()


async def test_a_fresh_daemon_has_no_troubles(rig: HttpRig) -> None:
    assert (await overview(rig))["troubles"] == []


async def test_troubles_are_described_in_words(rig: HttpRig) -> None:
    for topic in ("paused", "alone", "busy", "new"):
        await rig.post("/v1/tasks", {"topic": topic, "body": "x"})
    for topic in ("paused", "alone"):
        await rig.call("PUT", f"/v1/topics/{topic}/groups/g", {"since": "first"})
    await rig.call("PATCH", "/v1/topics/paused/groups/g", {"paused": True})
    taken = (await rig.post("/v1/topics/busy/pull", {"group": "g"}))["deliveries"]
    fields = {"receipts": [taken[0]["receipt"]], "reason": "no"}
    await rig.post("/v1/rejections", fields)
    result = await overview(rig)
    assert texts(result) == [
        f"Group g of paused is paused {SINCE}, with 1 ready task",
        "1 dead letter waits for a decision",
    ]
    assert (result["troubles"][0]["topic"], result["troubles"][0]["group"]) == ("paused", "g")
    rig.sources.now_ms += watching.WAITS_LONG_MS + 60_000
    said_now = texts(await overview(rig))
    assert (
        "Nobody subscribes to group g of alone: 1 ready task, the oldest for 2 minutes" in said_now
    )
    assert "Topic new has no group yet: 1 ready task waits for the first subscriber" in said_now


async def test_the_worst_troubles_are_listed_and_the_rest_counted(rig: HttpRig) -> None:
    many = watching.TROUBLES_MAX + 5
    for number in range(many):
        path = f"/v1/topics/t{number}/groups/g"
        await rig.call("PUT", path, {"paused": True})
        await rig.post("/v1/tasks", {"topic": f"t{number}"})
    result = await overview(rig)
    assert len(result["troubles"]) == watching.TROUBLES_MAX
    assert result["troubles_left_out"] == 1  # the line that says how many others there are
    assert all("is paused" in text for text in texts(result))


async def test_watchers_share_one_snapshot(rig: HttpRig) -> None:
    first = (await rig.call("GET", "/v1/overview")).json
    await rig.post("/v1/tasks", {"topic": "t", "delay_ms": 60_000})
    assert (await rig.call("GET", "/v1/overview")).json == first
    assert (await overview(rig))["counts"]["scheduled"] == 1


@pytest.mark.one_shard("it counts the turns of the loop until an answer or an end is there")
async def test_a_stream_begins_at_once_and_ends_with_the_reason(rig: HttpRig) -> None:
    asked = rig.begin("GET", "/v1/overview/stream?every_ms=500")
    await asked.until(lambda response: response.sent)
    assert asked.response.headers["content-type"] == "text/event-stream"
    head, data, *_ = asked.response.sent[0].decode().split("\n")
    assert head == "event: overview"
    msgspec.json.decode(data.removeprefix("data: ").encode(), type=answer_type(Overview))
    rig.api.stop()
    await asked.done()
    assert b"event: end" in asked.response.sent[-1] and b"draining" in asked.response.sent[-1]


@pytest.mark.parametrize("every", ["499", "60001", "x"])
async def test_a_stream_has_a_pace(rig: HttpRig, every: str) -> None:
    response = await rig.call("GET", f"/v1/overview/stream?every_ms={every}")
    assert response.status == 400 and "every_ms" in response.json["detail"]


async def test_a_parked_transaction_is_a_trouble(rig: HttpRig) -> None:
    registry = rig.shard.core.transaction_registry
    assert (await overview(rig))["counts"]["transactions"] == 0
    registry.parked = 2
    result = await overview(rig)
    assert result["troubles"][0]["about"] == "transactions"
    assert texts(result) == [
        "2 transactions are parked: no producer knew the decision; commit or roll back by hand"
    ]
    registry.parked = 0


# --- tasks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("key_prefix=order-", [0, 1]),
        ("key_prefix=order-1", [1]),
        ("tag=eu", [0, 2]),
        ("property=region%3Dnorth", [0]),
        ("property=size%3D5", [1]),
        ("property=paid%3Dtrue", [2]),
        ("property=paid%3DTrue", []),
        ("tag=eu&key_prefix=order", [0]),
        ("topic=t&tag=eu&state=scheduled", [0, 2]),
        ("topic=u&tag=eu", []),
    ],
)
async def test_tasks_are_filtered_by_their_fields(
    rig: HttpRig, query: str, wanted: list[int]
) -> None:
    tasks: list[dict[str, Any]] = [
        {"key": "order-0", "tag": "eu", "properties": {"region": "north"}},
        {"key": "order-1", "tag": "us", "properties": {"size": 5}},
        {"tag": "eu", "properties": {"paid": True}},
        {},
    ]
    tasks = [task | {"topic": "t", "delay_ms": 60_000} for task in tasks]
    ids = [task["id"] for task in (await rig.post("/v1/tasks", {"tasks": tasks}))["tasks"]]
    response = await rig.call("GET", f"/v1/tasks?{query}")
    assert [ids.index(task["id"]) for task in response.json["tasks"]] == wanted


@pytest.mark.parametrize("text", ["region", "=5", ""])
async def test_a_property_filter_needs_a_value(rig: HttpRig, text: str) -> None:
    response = await rig.call("GET", f"/v1/tasks?property={text}")
    assert response.status == 400 and "NAME=VALUE" in response.json["detail"]


# --- tasks of the history ------------------------------------------------------------------------


async def test_tasks_of_the_history_have_their_bodies(
    rig: HttpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"state": "acked", "enqueued_ms": 1, "due_ms": 2, "ended_ms": 3, "attempts": 1}
    results = [{"id": "9", "body": "text", **kept}, {"id": "8", "body_base64": "/w==", **kept}]

    async def answer(question: bytes) -> Answer:
        return Answer(results, True)

    monkeypatch.setattr(rig.shard.stories, "_folder", "some")
    monkeypatch.setattr(rig.shard.stories, "_answer", answer)
    outcome = (await rig.call("GET", "/v1/history/tasks")).json
    assert (outcome["is_kept"], outcome["complete"]) == (True, True)
    assert [task["id"] for task in outcome["tasks"]] == ["9", "8"]
    assert (outcome["tasks"][0]["body"], outcome["tasks"][1]["body_base64"]) == ("text", "/w==")


# --- reports -------------------------------------------------------------------------------------


async def test_a_report_is_a_page_without_an_origin(tmp_path: Path) -> None:
    running = await HttpRig(report_dir=str(tmp_path)).start()
    try:
        none = running.begin("GET", "/v1/report")
        await asyncio.wait([none.task])
        assert none.response.status == 404 and "report.html" in none.response.json["detail"]
        (tmp_path / "report.html").write_text("<h1>figures</h1>")
        asked = running.begin("GET", "/v1/report")
        await asyncio.wait([asked.task])
        assert asked.response.body == b"<h1>figures</h1>"
        policy = asked.response.headers["content-security-policy"]
        assert policy.startswith("sandbox allow-scripts; default-src 'none'")
        assert "allow-same-origin" not in policy and "frame-ancestors 'self'" in policy
    finally:
        await running.stop()


async def test_the_report_needs_report_dir(rig: HttpRig) -> None:
    response = await rig.call("GET", "/v1/report")
    assert response.status == 404 and "report_dir" in response.json["detail"]


async def test_a_pause_without_ready_tasks_is_shown(rig: HttpRig) -> None:
    await rig.call("PUT", "/v1/topics/t/groups/g", {})
    assert texts(await overview(rig)) == []
    await rig.call("PATCH", "/v1/topics/t/groups/g", {"paused": True})
    assert texts(await overview(rig)) == [f"Group g of t is paused {SINCE}, with no ready tasks"]
    await rig.call("PATCH", "/v1/topics/t", {"paused": True})
    assert texts(await overview(rig)) == [f"Topic t is paused {SINCE}, with no ready tasks"]


@pytest.mark.parametrize("path", ["/v1/topics/t", "/v1/topics/t/groups/g"])
async def test_a_pause_shows_its_start_time(rig: HttpRig, path: str) -> None:
    """Paused twice it is paused once; what is paused again begins anew."""
    await rig.call("PUT", "/v1/topics/t/groups/g", {})

    async def since_ms() -> Any:
        topic = (await rig.call("GET", "/v1/topics/t")).json
        result = topic["groups"]["g"] if path.endswith("g") else topic
        return result["paused"], result.get("paused_ms")

    began_ms = rig.sources.now_ms
    await rig.call("PATCH", path, {"paused": True})
    for change in ({"paused": True}, {"rate": 5.0}):
        rig.sources.now_ms += 60_000
        await rig.call("PATCH", path, change)
        assert await since_ms() == (True, began_ms)
    await rig.call("PATCH", path, {"paused": False})
    assert await since_ms() == (False, None)
    await rig.call("PATCH", path, {"paused": True})
    assert await since_ms() == (True, rig.sources.now_ms)


class _Nodes:
    """A directory of `count` nodes, as a shard's daemon sees it."""

    def __init__(self, shard: int, count: int) -> None:
        self.shard, self._count = shard, count

    def listing(self) -> dict[str, Any]:
        return {"nodes": [{"node": str(number)} for number in range(self._count)]}


async def test_missing_expected_standbys_and_nodes_are_a_trouble() -> None:
    rig = await HttpRig(expect_standbys=2, expect_nodes=3).start()
    try:
        no_nodes = "0 of 3 expected nodes are seen"
        for count in range(4):
            rig.shard.status = lambda count=count: {"standbys": [{}] * count}  # type: ignore[misc]
            answer = [f"{count} of 2 expected standbys are seen"] if count < 2 else []
            assert texts(await overview(rig)) == [*answer, no_nodes]
        for shard, count, is_said in ((0, 2, True), (0, 3, False), (1, 2, False)):
            rig.shard.directory = _Nodes(shard, count)  # type: ignore[assignment]
            answer = [f"{count} of 3 expected nodes are seen"] if is_said else []
            assert texts(await overview(rig)) == answer
    finally:
        await rig.stop()


async def test_a_missing_or_old_daily_backup_is_a_trouble() -> None:
    rig = await HttpRig(backup_daily_hour=3).start()
    try:
        assert texts(await overview(rig)) == []
        rig.sources.now_ms += watching.BACKUP_OLD_MS + HOUR_MS
        [said] = texts(await overview(rig))
        assert said == "No daily backup has been made since the start 27 hours ago"
        rig.shard.observed.note_backup((rig.sources.now_ms - 30 * HOUR_MS) / 1000)
        assert texts(await overview(rig)) == ["The newest daily backup is 30 hours old"]
        rig.shard.observed.note_backup((rig.sources.now_ms - 25 * HOUR_MS) / 1000)
        assert texts(await overview(rig)) == []
    finally:
        await rig.stop()


@pytest.mark.parametrize(("used", "is_near"), [(0.86, True), (0.84, False), (0.0, False)])
async def test_a_nearly_full_disk_is_a_trouble(rig: HttpRig, used: float, *, is_near: bool) -> None:
    rig.shard.observed.disk_used = used
    text = "The disk with the database is 86% full; above 90% (disk_refuse) new tasks are refused"
    assert texts(await overview(rig)) == ([text] if is_near else [])


@pytest.mark.parametrize("tag", ["a||b", " a", "*", ""])
async def test_an_unfilterable_tag_is_refused(rig: HttpRig, tag: str) -> None:
    task = {"topic": "t", "tag": tag}
    for body in (task, {"tasks": [{"topic": "t"}, task]}):
        response = await rig.call("POST", "/v1/tasks", body)
        assert response.status == 400
        assert "tag must be a tag" in response.json["detail"]
    schedule = {"topic": "t", "every_ms": 60_000, "task": {"tag": tag}}
    response = await rig.call("PUT", "/v1/schedules/s", schedule)
    assert response.status == 400
    assert "tag must be a tag" in response.json["detail"]
