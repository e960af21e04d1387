"""Scenes of tasks that are there: cancelled, moved, looked up, listed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from support.shard_rig import NOW_MS
from verbs.scene import DAY_MS, UNKNOWN, Stage, Values, refusal, scene

KEY = "/v1/topics/{topic}/keys/{key}"
HOUR_MS = 3_600_000


@scene("cancel", http="POST /v1/cancellations", python="cancel_many", cli="cancel {ids[0]}")
def cancel(stage: Stage) -> Any:
    [task] = stage.enqueue()
    yield {"ids": (task,)}, ["cancelled"]
    assert stage.state(task) == "cancelled"


@scene(
    "reschedule",
    http="POST /v1/reschedules",
    body=lambda v: {"ids": [str(one[0]) for one in v["items"]], "delay_ms": v["items"][0][1]},
    python=lambda client, v: client.reschedule(
        v["items"][0][0], delay=timedelta(milliseconds=v["items"][0][1])
    ),
    gives=lambda answer: answer[0],
    cli="reschedule {items[0][0]} --delay {items[0][1]}ms",
)
def reschedule(stage: Stage) -> Any:
    [task] = stage.enqueue()
    due_ms = NOW_MS + HOUR_MS
    yield {"items": ((task, HOUR_MS, None),)}, [["scheduled", due_ms]]
    [found] = stage.ask("look_up", ids=(task,))
    assert found["due_ms"] == due_ms


@scene("run_now", http="POST /v1/runs", python="run_now_many")
def run_now(stage: Stage) -> Any:
    stage.make_group()
    [task] = stage.enqueue()
    yield {"ids": (task,)}, [["scheduled", NOW_MS]]
    assert [one[0] for one in stage.pull()] == [task]


@scene("look_up", http="POST /v1/lookups", python="lookup_many", cli="show {ids[0]} {ids[1]}")
def look_up(stage: Stage) -> Any:
    stage.make_group()
    task, due = *stage.enqueue(key="k", tag="eu", properties={"n": 1}), *stage.enqueue(delay_ms=0)
    yield {"ids": (task, due)}, [
        {"id": "#0", "state": "scheduled", "topic": "t", "body": "0", "key": "k", "tag": "eu",
         "due_ms": NOW_MS + DAY_MS, "enqueued_ms": NOW_MS, "properties": {"n": 1}},
        {"id": "#1", "state": "ready", "groups": {"g": {"state": "ready", "attempt": 0}}},
    ]  # fmt: skip


@scene(
    "cancel_key", http=f"DELETE {KEY}", python="cancel", cli="cancel --topic {topic} --key {key}"
)
def cancel_key(stage: Stage) -> Any:
    first, second = stage.enqueue(2, key="k/1")
    yield {"topic": stage.topic, "key": "k/1"}, [["#0", "cancelled"], ["#1", "cancelled"]]
    assert stage.state(first) == stage.state(second) == "cancelled"


@scene(
    "reschedule_key",
    http=f"PATCH {KEY}",
    python="reschedule",
    cli="reschedule --topic {topic} --key {key} --delay {delay_ms}ms",
)
def reschedule_key(stage: Stage) -> Any:
    stage.enqueue(key="k")
    said = {"topic": stage.topic, "key": "k", "delay_ms": HOUR_MS}
    yield said, [["#0", "scheduled", NOW_MS + HOUR_MS]]


@scene("run_now_key", http=f"POST {KEY}/run", python="run_now")
def run_now_key(stage: Stage) -> Any:
    stage.make_group()
    [task] = stage.enqueue(key="k")
    yield {"topic": stage.topic, "key": "k"}, [["#0", "scheduled", NOW_MS]]
    assert [one[0] for one in stage.pull()] == [task]


@scene("look_up_key", http=f"GET {KEY}", python="lookup")
def look_up_key(stage: Stage) -> Any:
    stage.enqueue(2, key="k")
    said = {"topic": stage.topic, "key": "k", "newest": True}
    yield said, [{"id": "#1", "key": "k", "state": "scheduled"}]


@scene(
    "list_tasks", cli="list --topic {topic} --state {state} --key {key} [newest: --newest-first]"
)
def list_tasks(stage: Stage) -> Any:
    stage.enqueue(2, key="k", tag="eu", properties={"n": "1"})
    stage.enqueue(key="other")
    said = {"topic": stage.topic, "state": "scheduled", "key": "k", "newest": True}
    yield said, {"tasks": [{"id": "#1", "tag": "eu"}, {"id": "#0", "properties": {"n": "1"}}]}


# --- one task by its id, in words of its own -----------------------------------------------------


def one_word(said: Any) -> Any:
    return [said["result"]]


def one_move(said: Any) -> Any:
    return [(said["result"], said["due_ms"])]


def first(answer: Any) -> Any:
    return answer[0]


@scene("cancel", "one", http="DELETE /v1/tasks/{ids[0]}", reply=one_word, gives=first,
       python=lambda client, v: client.cancel(v["ids"][0]))  # fmt: skip
def cancel_one(stage: Stage) -> Any:
    yield from cancel(stage)


@scene("cancel", "what is not there", http="POST /v1/cancellations", python="cancel_many",
       cli="cancel {ids[0]}")  # fmt: skip
def cancel_unknown(stage: Stage) -> Any:
    yield {"ids": (UNKNOWN,)}, ["unknown"]


@scene(
    "reschedule",
    "to a moment",
    http="PATCH /v1/tasks/{items[0][0]}",
    body=lambda v: {"due_ms": NOW_MS + DAY_MS},
    reply=one_move,
    python=lambda client, v: client.reschedule(
        v["items"][0][0], at=datetime.fromtimestamp(v["items"][0][2] // 1000, UTC)
    ),
    gives=first,
    cli="reschedule {items[0][0]} --at 2027-01-16T08:00:00Z",
)
def reschedule_at(stage: Stage) -> Any:
    [task] = stage.enqueue(delay_ms=5)
    due_ms = NOW_MS + DAY_MS
    yield {"items": ((task, None, due_ms),)}, [["scheduled", due_ms]]


@scene("run_now", "one", http="POST /v1/tasks/{ids[0]}/run", body=lambda v: None, reply=one_move,
       python=lambda client, v: client.run_now(v["ids"][0]), gives=first)  # fmt: skip
def run_one_now(stage: Stage) -> Any:
    yield from run_now(stage)


@scene("look_up", "one", http="GET /v1/tasks/{ids[0]}", reply=lambda said: [said], gives=first,
       body=lambda v: None, python=lambda client, v: client.lookup(v["ids"][0]))  # fmt: skip
def look_one_up(stage: Stage) -> Any:
    [task] = stage.enqueue(key="k")
    yield {"ids": (task,)}, [{"id": "#0", "state": "scheduled", "key": "k", "body": "0"}]


@scene("look_up", "what is not there", http="POST /v1/lookups", python="lookup_many")
def look_up_unknown(stage: Stage) -> Any:
    yield {"ids": (UNKNOWN,)}, [{"id": "#0", "state": "unknown"}]


@scene("cancel_key", "what is not there", python="cancel",
       cli="cancel --topic {topic} --key {key}")  # fmt: skip
def cancel_no_key(stage: Stage) -> Any:
    yield {"topic": stage.topic, "key": "none"}, [[None, "unknown"]]


@refusal("reschedule_key", "due_too_far")
def too_far(stage: Stage) -> Values:
    return {"topic": stage.topic, "key": "k", "delay_ms": 400_000_000_000}
