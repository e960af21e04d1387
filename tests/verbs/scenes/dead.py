"""Scenes of dead letters."""

from __future__ import annotations

from typing import Any

from support.shard_rig import NOW_MS
from verbs.scene import Stage, Values, scene


def items(values: Values) -> Any:
    by_name = {name: value for name, value in values.items() if name != "pairs"}
    return {
        "items": [{"id": str(one), "group": group} for one, group in values["pairs"]],
        **by_name,
    }


@scene(
    "list_dead",
    cli="dead list --topic {topic} --group {group} --reason {reason}"
    " [since_ms: --since 2027-01-15T08:00Z]"
    " [until_ms: --until 2027-01-15T08:00:01Z]",
)
def list_dead(stage: Stage) -> Any:
    stage.bury(2)
    one = {"group": "g", "topic": "t", "died_ms": NOW_MS, "attempt": 1, "reason": "bad"}
    fields = {"topic": stage.topic, "group": stage.group, "reason": "BAD", "since_ms": NOW_MS,
            "until_ms": NOW_MS + 1}  # fmt: skip
    yield fields, {"dead": [one | {"id": "#0"}, one | {"id": "#1"}]}


@scene("requeue_dead", http="POST /v1/dead-letters/requeue", body=items,
       cli="dead requeue {pairs[0][0]} --group {pairs[0][1]}"
       " [ttl_ms: --ttl {ttl_ms}ms]")  # fmt: skip
def requeue_dead(stage: Stage) -> Any:
    [task] = stage.bury()
    yield {"pairs": ((task, "g"),), "ttl_ms": 5}, ["requeued"]
    assert stage.state(task) == "ready"


@scene("delete_dead", http="POST /v1/dead-letters/delete", body=items,
       cli="dead delete {pairs[0][0]} --group {pairs[0][1]}")  # fmt: skip
def delete_dead(stage: Stage) -> Any:
    [task] = stage.bury()
    yield {"pairs": ((task, "g"),)}, ["deleted"]
    assert stage.ask("list_dead", topic=stage.topic)["dead"] == ()
