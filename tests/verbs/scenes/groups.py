"""Scenes of groups and topics."""

from __future__ import annotations

from typing import Any

from support.shard_rig import NOW_MS
from verbs.scene import Stage, Values, refusal, scene
from verbs.scenes.bulk import without_id
from verbs.ways import Unsayable


def held(**counts: int) -> dict[str, int]:
    return dict.fromkeys(("ready", "in_flight", "waiting", "dead"), 0) | counts


@scene(
    "create_group",
    cli="groups create {topic} {group} [since: --start {since}]"
    " [rate: --rate {rate}] [tags: --tags {tags}]",
)
def create_group(stage: Stage) -> Any:
    said = {"topic": stage.topic, "group": stage.group}
    settings = {"rate": 5.0, "tags": "eu"}
    yield said | {"since": "first"} | settings, {
        "topic": "t", "group": "g", "created": True, "paused": False, **settings,
    }  # fmt: skip
    again = stage.ask("create_group", **said)
    assert not again["created"] and again["tags"] == "eu"


@scene("configure", cli="groups set {topic} {group} --fair-by {fair_by} --limit-each {limit_each}")
def configure(stage: Stage) -> Any:
    stage.make_group(tags="eu")
    said = {"topic": stage.topic, "group": stage.group}
    settings = {"fair_by": "key", "limit_each": 3}
    yield said | settings, {"topic": "t", "group": "g", "tags": "eu", **settings}
    taken_away = stage.ask("configure", **said, tags=None, fair_by=None)
    assert not taken_away.get("tags") and not taken_away.get("fair_by")


@scene("delete_group", cli="groups delete {topic} {group} [force: --force]")
def delete_group(stage: Stage) -> Any:
    stage.make_group()
    stage.enqueue(2, delay_ms=0)
    stage.pull()
    said = {"topic": stage.topic, "group": stage.group, "force": True}
    yield said, held(ready=1, in_flight=1)
    assert stage.group not in stage.ask("stats")["topics"][stage.topic]["groups"]


@scene("delete_topic", cli="topics delete {topic} [force: --force]")
def delete_topic(stage: Stage) -> Any:
    stage.make_group()
    [task] = stage.enqueue()
    yield {"topic": stage.topic, "force": True}, held(pending=1, groups=1)
    stage.house.settle()
    assert stage.state(task) == "deleted"


@scene("reset_group", cli="groups reset {topic} {group} --to {to} --yes [id: ]", shows=without_id)
def reset_group(stage: Stage) -> Any:
    stage.deliver()
    said = {"topic": stage.topic, "group": stage.group, "to": "first", "id": stage.name("again")}
    yield said, {"kind": "reset", "topic": "t", "arguments": lambda it: it["group"] == "g"}


@scene("preview_reset", cli="groups reset {topic} {group} --to {to} --dry-run")
def preview_reset(stage: Stage) -> Any:
    stage.make_group()
    said = {"topic": stage.topic, "group": stage.group, "to": "first"}
    yield said, {"tasks": 0, "lost": 0, "until_ms": NOW_MS}


@scene("held_keys", cli="groups held {topic} {group}", shows=lambda answer: answer["keys"])
def held_keys(stage: Stage) -> Any:
    stage.hold("a", "b")
    one = {"since_ms": NOW_MS, "attempt": 1, "waiting": 0, "reason": "why"}
    yield {"topic": stage.topic, "group": stage.group}, {
        "keys": [one | {"id": "#0", "key": "a"}, one | {"id": "#1", "key": "b"}], "held": 2,
    }  # fmt: skip


@scene("key_lines", cli="groups lines {topic} {group}", shows=lambda answer: answer["lines"])
def key_lines(stage: Stage) -> Any:
    stage.hold("a")
    stage.enqueue(2, delay_ms=0, order_key="a")
    yield {"topic": stage.topic, "group": stage.group}, {
        "lines": [{"kind": "order", "value": "a", "state": "held", "waiting": 2}], "waiting": 2,
    }  # fmt: skip


def of_key(client: Any, values: Values, verb: str) -> Any:
    if values.get("ids") and values.get("key"):
        raise Unsayable  # it is the one or the other
    ids = values.get("ids") or (None,)
    call = getattr(client, verb)
    return call(values["topic"], values["group"], ids[0], key=values.get("key"))


def word(answer: Any) -> Any:
    return answer[0][1]


@scene("release_key", python=lambda client, v: of_key(client, v, "release_key"), gives=word,
       cli="groups release-key {topic} {group} --key {key}",
       shows=lambda answer: [{"result": answer[0][1]}])  # fmt: skip
def release_key(stage: Stage) -> Any:
    [task] = stage.hold("a")
    yield {"topic": stage.topic, "group": stage.group, "key": "a"}, [["#0", "released"]]
    assert stage.state(task) == "ready"


@scene("skip_key", python=lambda client, v: of_key(client, v, "skip_key"), gives=word,
       cli="groups skip-key {topic} {group} {ids[0]}",
       shows=lambda answer: [{"result": answer[0][1]}])  # fmt: skip
def skip_key(stage: Stage) -> Any:
    [task] = stage.hold("a")
    yield {"topic": stage.topic, "group": stage.group, "ids": (task,)}, [["#0", "skipped"]]
    assert stage.state(task) == "dead"


# --- what is refused -----------------------------------------------------------------------------


def no_group(stage: Stage) -> Values:
    stage.enqueue()
    return {"topic": stage.topic, "group": "none"}


for _name in ("configure", "delete_group", "held_keys", "key_lines"):
    refusal(_name, "not_found")(no_group)
for _name in ("reset_group", "preview_reset"):
    refusal(_name, "not_found")(lambda stage: no_group(stage) | {"to": "first"})
refusal("release_key", "not_found")(lambda stage: no_group(stage) | {"key": "k"})
refusal("skip_key", "not_found")(lambda stage: no_group(stage) | {"ids": (5,)})


@refusal("delete_topic", "not_found")
def no_topic(stage: Stage) -> Values:
    return {"topic": stage.name("none")}


@refusal("delete_group", "conflict")
def it_holds_tasks(stage: Stage) -> Values:
    stage.make_group()
    stage.enqueue(delay_ms=0)
    return {"topic": stage.topic, "group": stage.group}


@refusal("delete_topic", "conflict")
def it_has_tasks(stage: Stage) -> Values:
    stage.enqueue()
    return {"topic": stage.topic}


@refusal("create_group", "conflict")
def only_for_broadcasts(stage: Stage) -> Values:
    stage.ask("configure", topic=stage.topic, group=None, broadcast_only=True)
    return {"topic": stage.topic, "group": stage.group}


@refusal("reset_group", "conflict", cli=False)
def not_again(stage: Stage) -> Values:
    stage.make_group()
    named = {"topic": stage.topic, "group": stage.group, "to": "first", "id": stage.name("one")}
    stage.ask("reset_group", **named)
    return named | {"rate": 5.0}


@refusal("configure", "conflict")
def it_has_groups(stage: Stage) -> Values:
    stage.make_group()
    return {"topic": stage.topic, "group": None, "broadcast_only": True}
