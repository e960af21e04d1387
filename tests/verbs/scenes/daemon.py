"""Scenes of the daemon itself: counts, load, status, topics, consumers, history, backups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from support.shard_rig import NOW_MS
from tickwheel.api.daemon import NewRestore
from verbs.scene import DAY_MS, Stage, Values, refusal, scene


@scene("ping")
def ping(stage: Stage) -> Any:
    yield {}, None


@scene("status", cli="status")
def status(stage: Stage) -> Any:
    yield {}, {"state": "ready", "store": "memory:", "store_ok": True}


@scene("stats")
def stats(stage: Stage) -> Any:
    stage.make_group()
    stage.enqueue(2)
    topic = {"scheduled": 2, "enqueued": 2, "groups": {"g": {"ready": 0, "subscribers": 0}}}
    yield {}, {"now_ms": NOW_MS, "store_ok": True, "topics": {"t": topic}}


@scene("load")
def load(stage: Stage) -> Any:
    stage.enqueue()
    yield {"from_ms": NOW_MS + DAY_MS - 3_600_000, "step_ms": 3_600_000, "steps": 3}, {
        "step_ms": 3_600_000, "counts": lambda counts: len(counts) == 3 and sum(counts) > 0,
    }  # fmt: skip


@scene("list_topics")
def list_topics(stage: Stage) -> Any:
    stage.enqueue()
    yield {"limit": 1_000}, {"topics": [{"topic": "t", "scheduled": 1}]}


@scene("show_topic")
def show_topic(stage: Stage) -> Any:
    stage.make_group(rate=5.0)
    yield {"topic": stage.topic}, {"topic": "t", "groups": {"g": {"rate": 5.0}}}


@scene("show_topic", "its groups", http="GET /v1/topics/{topic}/groups", is_of_http=True)
def list_groups(stage: Stage) -> Any:
    stage.make_group()
    yield {"topic": stage.topic}, {"groups": {"g": {"ready": 0, "subscribers": 0}}}


@scene(
    "show_topic", "one of its groups", http="GET /v1/topics/{topic}/groups/{group}", is_of_http=True
)
def show_group(stage: Stage) -> Any:
    stage.make_group(paused=True)
    yield {"topic": stage.topic, "group": stage.group}, {"paused": True, "ready": 0}


@refusal("show_topic", "not_found")
def no_topic(stage: Stage) -> Values:
    return {"topic": stage.name("none")}


@scene("consumers", cli="consumers --topic {topic} --group {group}")
def consumers(stage: Stage) -> Any:
    with stage.subscribed(), stage.subscribed():
        one = {"topic": "t", "group": "g", "kind": "subscription", "prefetch": 5, "in_flight": 0}
        yield {"topic": stage.topic, "group": stage.group}, {"consumers": [one, one]}


@scene("overview")
def overview(stage: Stage) -> Any:
    yield {}, {"now_ms": NOW_MS, "state": "ready", "troubles_left_out": 0}


@scene("group_lag")
def group_lag(stage: Stage) -> Any:
    stage.make_group()
    yield {"topic": stage.topic, "group": stage.group}, {"every_ms": 10_000}


@refusal("group_lag", "not_found")
def no_group(stage: Stage) -> Values:
    stage.make_group()
    return {"topic": stage.topic, "group": "none"}


@scene("task_history")
def task_history(stage: Stage) -> Any:
    [task] = stage.enqueue()
    yield {"id": task}, {"events": [], "is_kept": False}


@scene("history_tasks")
def history_tasks(stage: Stage) -> Any:
    yield {"key": "k", "topic": stage.topic}, {"tasks": [], "is_kept": False}


# --- backups and restores ------------------------------------------------------------------------


@scene("backup", cli="backup {name}")
def backup(stage: Stage) -> Any:
    fields = {"name": stage.name("copy.db")}
    yield fields, {"path": lambda path: path.endswith("/copy.db")}


@refusal("backup", "bad_request")
def no_name(stage: Stage) -> Values:
    return {"name": "../copy.db"}


RESTORE_IDS = count(1 << 50)
"""Ids of restores, large enough to be told from other numbers."""


@contextmanager
def restoring(stage: Stage) -> Iterator[Values]:
    """While a restore is under way, of which there is one at a time; its id as a value."""
    stage.ask("backup", name=stage.name("copy.db"))
    wanted = NewRestore(
        into=stage.name("new.db"), backup=stage.name("copy.db"), history=False, id=next(RESTORE_IDS)
    )
    restores = stage.house.running.shard.restores
    made = stage.house.do(restores.begin(wanted))
    try:
        yield {"id": made.id}
    finally:
        stage.house.do(restores.cancel(made))


@scene("restore")
def restore(stage: Stage) -> Any:
    stage.ask("backup", name=stage.name("copy.db"))
    fields = {"into": stage.name("new.db"), "backup": stage.name("copy.db"), "history": False}
    result = {"state": "running", "into": "new.db", "backup": "copy.db", "dry_run": False}
    try:
        yield fields | {"id": next(RESTORE_IDS), "of_shards": 3}, result | {"of_shards": 3}
    finally:
        restores = stage.house.running.shard.restores
        stage.house.do(restores.cancel(restores.all()[0]))


@scene("list_restores")
def list_restores(stage: Stage) -> Any:
    with restoring(stage):
        yield {}, {"restores": [{"into": "new.db", "state": "running"}]}


@scene("show_restore")
def show_restore(stage: Stage) -> Any:
    with restoring(stage) as named:
        yield named, {"into": "new.db", "state": "running"}


@scene("cancel_restore")
def cancel_restore(stage: Stage) -> Any:
    with restoring(stage) as named:
        yield named, {"into": "new.db", "state": "cancelled"}


@refusal("restore", "not_found")
def no_backup(stage: Stage) -> Values:
    return {"into": stage.name("new.db"), "backup": stage.name("none.db"), "history": False}


@refusal("restore", "conflict")
def it_is_there(stage: Stage) -> Values:
    for name in ("new.db", "copy.db"):
        stage.ask("backup", name=stage.name(name))
    return no_backup(stage) | {"backup": stage.name("copy.db")}


@refusal("backup", "conflict")
def it_is_there_already(stage: Stage) -> Values:
    stage.ask("backup", name=stage.name("copy.db"))
    return {"name": stage.name("copy.db")}


@refusal("show_restore", "not_found")
def no_restore(stage: Stage) -> Values:
    return {"id": 999}


refusal("cancel_restore", "not_found")(no_restore)
refusal("show_topic: its groups", "not_found")(no_topic)
refusal("show_topic: one of its groups", "not_found")(no_group)
