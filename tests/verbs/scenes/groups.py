"""Scenes of groups and topics."""

from __future__ import annotations

from typing import Any

from support.shard_rig import NOW_MS
from verbs.scene import UNKNOWN, Stage, Values, refusal, scene
from verbs.scenes.bulk import without_id


def held(**counts: int) -> dict[str, int]:
    return dict.fromkeys(("ready", "in_flight", "waiting", "dead"), 0) | counts


@scene(
    "create_group",
    cli="groups create {topic} {group} [since: --start {since}]"
    " [rate: --rate {rate}] [tags: --tags {tags}]",
)
def create_group(stage: Stage) -> Any:
    fields = {"topic": stage.topic, "group": stage.group}
    settings = {"rate": 5.0, "tags": "eu"}
    yield fields | {"since": "first"} | settings, {
        "topic": "t", "group": "g", "created": True, "paused": False, **settings,
    }  # fmt: skip
    again = stage.ask("create_group", **fields)
    assert not again["created"] and again["tags"] == "eu"


@scene("configure", cli="groups set {topic} {group} --fair-by {fair_by} --limit-each {limit_each}")
def configure(stage: Stage) -> Any:
    stage.make_group(tags="eu")
    fields = {"topic": stage.topic, "group": stage.group}
    settings = {"fair_by": "key", "limit_each": 3}
    yield fields | settings, {"topic": "t", "group": "g", "tags": "eu", **settings}
    taken_away = stage.ask("configure", **fields, tags=None, fair_by=None)
    assert not taken_away.get("tags") and not taken_away.get("fair_by")


@scene("delete_group", cli="groups delete {topic} {group} [force: --force]")
def delete_group(stage: Stage) -> Any:
    stage.make_group()
    stage.enqueue(2, delay_ms=0)
    stage.pull()
    fields = {"topic": stage.topic, "group": stage.group, "force": True}
    yield fields, held(ready=1, in_flight=1)
    assert stage.group not in stage.ask("stats")["topics"][stage.topic]["groups"]


@scene(
    "delete_group", "a dry run",
    cli="groups delete {topic} {group} [force: --force] [dry_run: --dry-run]",
)  # fmt: skip
def try_to_delete_group(stage: Stage) -> Any:
    stage.make_group()
    stage.enqueue(delay_ms=0)
    fields = {"topic": stage.topic, "group": stage.group, "force": True, "dry_run": True}
    yield fields, held(ready=1)
    assert len(stage.pull()) == 1


@scene("delete_topic", cli="topics delete {topic} [force: --force]")
def delete_topic(stage: Stage) -> Any:
    stage.make_group()
    [task] = stage.enqueue()
    yield {"topic": stage.topic, "force": True}, held(scheduled=1, groups=1)
    stage.house.settle()
    assert stage.state(task) == "deleted"


@scene(
    "delete_topic", "a dry run", cli="topics delete {topic} [force: --force] [dry_run: --dry-run]"
)
def try_to_delete_topic(stage: Stage) -> Any:
    stage.make_group()
    [task] = stage.enqueue()
    fields = {"topic": stage.topic, "force": True, "dry_run": True}
    yield fields, held(scheduled=1, groups=1)
    stage.house.settle()
    assert stage.state(task) == "scheduled"


@scene(
    "reset_group",
    cli="groups reset {topic} {group} --to {to} [rate: --rate {rate}] --yes [id: ]",
    shows=without_id,
)
def reset_group(stage: Stage) -> Any:
    stage.deliver()
    fields = {"topic": stage.topic, "group": stage.group, "to": "first", "rate": 50.0}
    arguments = {"group": "g", "from_ms": 0}
    yield fields | {"id": stage.name("again")}, {
        "id": "again", "kind": "reset", "topic": "t", "rate": 50.0, "arguments": arguments,
    }  # fmt: skip


@scene("preview_reset", cli="groups reset {topic} {group} --to {to} --dry-run")
def preview_reset(stage: Stage) -> Any:
    stage.make_group()
    fields = {"topic": stage.topic, "group": stage.group, "to": "first"}
    yield fields, {"tasks": 0, "lost": 0, "until_ms": NOW_MS}


@scene("held_keys", cli="groups held {topic} {group}", shows=lambda answer: answer["keys"])
def held_keys(stage: Stage) -> Any:
    stage.hold("a", "b")
    one = {"since_ms": NOW_MS, "attempt": 1, "waiting": 0, "reason": "why"}
    yield {"topic": stage.topic, "group": stage.group}, {
        "keys": [one | {"id": "#0", "key": "a"}, one | {"id": "#1", "key": "b"}], "held": 2,
    }  # fmt: skip
    assert stage.ask("stats")["topics"][stage.topic]["groups"][stage.group]["held"] == 2


@scene("key_lines", cli="groups lines {topic} {group}", shows=lambda answer: answer["lines"])
def key_lines(stage: Stage) -> Any:
    stage.hold("a")
    stage.enqueue(2, delay_ms=0, order_key="a")
    yield {"topic": stage.topic, "group": stage.group}, {
        "lines": [{"kind": "order", "value": "a", "state": "held", "waiting": 2}], "waiting": 2,
    }  # fmt: skip
    assert stage.ask("stats")["topics"][stage.topic]["groups"][stage.group]["in_lines"] == 2


def result(answer: Any) -> Any:
    return [{"result": answer[0][1]}]


@scene("release_key", cli="groups release-key {topic} {group} --key {key}", shows=result)
def release_key(stage: Stage) -> Any:
    [task] = stage.hold("a")
    yield {"topic": stage.topic, "group": stage.group, "key": "a"}, [["#0", "released"]]
    assert stage.state(task) == "ready"


@scene("skip_key", cli="groups skip-key {topic} {group} {ids[0]}", shows=result)
def skip_key(stage: Stage) -> Any:
    [task] = stage.hold("a")
    yield {"topic": stage.topic, "group": stage.group, "ids": (task,)}, [["#0", "skipped"]]
    assert stage.state(task) == "dead"


OF_KEY = "{topic} {group} [key: --key {key}] [value: --value {value}]"


def one_key(stage: Stage, **said: Any) -> Values:
    """A group that has a task of each of two keys, and the names of one of them."""
    stage.make_group(fair_by="tenant")
    stage.enqueue(delay_ms=0, order_key="a", properties={"tenant": "x"})
    stage.enqueue(delay_ms=0, order_key="b", properties={"tenant": "y"})
    return {"topic": stage.topic, "group": stage.group, **said}


@scene("pause_key", cli=f"groups pause-key {OF_KEY}")
def pause_key(stage: Stage) -> Any:
    answer = one_key(stage, key="a")
    yield answer, {"paused": True, "changed": True, "since_ms": NOW_MS, "by": "token all"}
    assert [stage.plain(delivery[0]) for delivery in stage.pull(2)] == ["#1"]


@scene("resume_key", cli=f"groups resume-key {OF_KEY}")
def resume_key(stage: Stage) -> Any:
    answer = one_key(stage, key="a")
    stage.ask("pause_key", **answer)
    yield answer, {"paused": False, "changed": True, "since_ms": NOW_MS, "by": "token stage"}
    assert len(stage.pull(2)) == 2


@scene("pause_key", "a value", cli=f"groups pause-key {OF_KEY}")
def pause_value(stage: Stage) -> Any:
    yield one_key(stage, value="y"), {"paused": True, "changed": True}
    assert [stage.plain(delivery[0]) for delivery in stage.pull(2)] == ["#0"]
    paused = stage.ask("held_keys", topic=stage.topic, group=stage.group)["paused"]
    assert [(entry["kind"], entry["value"], entry["waiting"]) for entry in paused] == [
        ("fair", "y", 1)
    ]


@scene("pause_key", "a value that is a number",
       cli="groups pause-key {topic} {group} --value :=5 [value: ]")  # fmt: skip
def pause_number(stage: Stage) -> Any:
    yield one_key(stage, value=5), {"paused": True, "changed": True}


@scene("pause_key", "again", cli=f"groups pause-key {OF_KEY}")
def pause_again(stage: Stage) -> Any:
    answer = one_key(stage, key="a")
    stage.ask("pause_key", **answer)
    yield answer, {"paused": True, "changed": False, "since_ms": NOW_MS, "by": "token stage"}


@scene("held_keys", "the paused ones", python="paused_keys", gives=lambda answer: answer["paused"],
       cli="groups paused {topic} {group}", shows=lambda answer: answer["paused"])  # fmt: skip
def paused_keys(stage: Stage) -> Any:
    outcome = one_key(stage)
    stage.ask("pause_key", **outcome, key="a")
    stage.ask("pause_key", **outcome, value="y")
    one = {"since_ms": NOW_MS, "by": "token stage", "waiting": 1}
    yield outcome, {
        "keys": [], "held": 0,
        "paused": [one | {"kind": "order", "value": "a"}, one | {"kind": "fair", "value": "y"}],
    }  # fmt: skip


@scene("resume_key", "a value", cli=f"groups resume-key {OF_KEY}")
def resume_value(stage: Stage) -> Any:
    answer = one_key(stage, value="y")
    stage.ask("pause_key", **answer)
    yield answer, {"paused": False, "changed": True}
    assert len(stage.pull(2)) == 2


@scene("resume_key", "that is not paused", cli=f"groups resume-key {OF_KEY}")
def resume_none(stage: Stage) -> Any:
    yield one_key(stage, key="a"), {"paused": False, "changed": False}


# --- settings in other words ---------------------------------------------------------------------

EVERYTHING = {
    "tags": "eu || us", "where": "n > 1", "order_retry_ms": 50, "order_attempts": 3,
    "order_failure": "hold", "fair_by": "tenant", "limit_each": 5, "rate_each": 2.5, "rate": 5.0,
    "burst": 2, "paused": True,
}  # fmt: skip
FIXED = {"kind": "fixed", "delay_ms": 5_000, "retries": 2, "jitter": 0.0}


@scene(
    "create_group",
    "with all settings",
    cli="groups create {topic} {group} --start 2027-01-15T08:00Z [since: ] --tags '{tags}'"
    " --where '{where}' --order-retry {order_retry_ms}ms --order-attempts {order_attempts}"
    " --order-failure {order_failure} --fair-by {fair_by} --limit-each {limit_each}"
    " --rate-each {rate_each} --rate {rate} --burst {burst} [paused: --paused]"
    " [retry: --retry fixed:delay=5s,retries=2,jitter=0]",
)
def create_group_with_all(stage: Stage) -> Any:
    fields = {"topic": stage.topic, "group": stage.group, "retry": FIXED, **EVERYTHING}
    yield fields | {"since": NOW_MS}, {"created": True, "retry": FIXED, **EVERYTHING}


@scene("create_group", "again", cli="groups create {topic} {group} [paused: --paused]")
def create_group_again(stage: Stage) -> Any:
    stage.make_group(rate=5.0)
    fields = {"topic": stage.topic, "group": stage.group, "paused": True}
    yield fields, {"created": False, "paused": False, "rate": 5.0}


@scene("configure", "all settings", cli="")
def configure_all(stage: Stage) -> Any:
    stage.make_group()
    fields = {"topic": stage.topic, "group": stage.group, "retry": FIXED, **EVERYTHING}
    yield fields, {"retry": FIXED, **EVERYTHING}


@scene(
    "configure",
    "nothing any more",
    cli="groups set {topic} {group} --all --no-fair --no-order [tags: ] [where: ] [fair_by: ]"
    " [limit_each: ] [rate_each: ] [order_retry_ms: ] [order_attempts: ] [order_failure: ]",
)
def take_settings_away(stage: Stage) -> Any:
    stage.make_group(**EVERYTHING)
    names = EVERYTHING.keys() - {"rate", "burst", "paused"}
    fields = {"topic": stage.topic, "group": stage.group, **dict.fromkeys(names)}
    left = {"rate": 5.0, "tags": None, "where": None, "fair_by": None, "limit_each": None}
    default = {"order_retry_ms": 1_000, "order_attempts": 16, "order_failure": "hold"}
    yield fields, left | default | {"rate_each": None}


@scene("configure", "paused", python=lambda client, v: client.pause(v["topic"], v["group"]),
       cli="pause {topic} --group {group} [paused: ]")  # fmt: skip
def pause(stage: Stage) -> Any:
    stage.make_group()
    stage.enqueue(delay_ms=0)
    yield {"topic": stage.topic, "group": stage.group, "paused": True}, {"paused": True}
    assert not stage.pull()


@scene("configure", "resumed", python=lambda client, v: client.resume(v["topic"], v["group"]),
       cli="resume {topic} --group {group} [paused: ]")  # fmt: skip
def resume(stage: Stage) -> Any:
    stage.make_group(paused=True)
    stage.enqueue(delay_ms=0)
    yield {"topic": stage.topic, "group": stage.group, "paused": False}, {"paused": False}
    assert stage.pull()


@scene("configure", "a rate", cli="rate {topic} {rate} --group {group} --burst {burst}")
def rate(stage: Stage) -> Any:
    stage.make_group()
    fields = {"topic": stage.topic, "group": stage.group}
    yield fields | {"rate": 7.5, "burst": 3}, {"rate": 7.5, "burst": 3}


@scene("configure", "no rate", cli="rate {topic} none --group {group} [rate: ] [burst: ]")
def no_rate(stage: Stage) -> Any:
    stage.make_group(rate=7.5, burst=3)
    fields = {"topic": stage.topic, "group": stage.group}
    yield fields | {"rate": None, "burst": None}, {"rate": None, "burst": None}


@scene("configure", "a policy by its name", cli="policy set {topic} {retry} --group {group}")
def policy(stage: Stage) -> Any:
    stage.make_group()
    fields = {"topic": stage.topic, "group": stage.group, "retry": "rocketmq"}
    yield fields, {"retry": {"kind": "table", "name": "rocketmq"}}
    assert not stage.ask("configure", **fields | {"retry": None}).get("retry")


@scene("configure", "no policy", cli="policy clear {topic} --group {group} [retry: ]")
def no_policy(stage: Stage) -> Any:
    stage.make_group(retry=FIXED)
    yield {"topic": stage.topic, "group": stage.group, "retry": None}, {"retry": None}


TOPIC = "PATCH /v1/topics/{topic}"


@scene("configure", "of a topic", http=TOPIC, cli="pause {topic} [paused: ]")
def configure_topic(stage: Stage) -> Any:
    stage.make_group()
    stage.enqueue(delay_ms=0)
    yield {"topic": stage.topic, "paused": True}, {"topic": "t", "paused": True, "group": None}
    assert not stage.pull()


@scene("configure", "only for broadcasts", http=TOPIC,
       cli="topics broadcast {topic} [broadcast_only: ]")  # fmt: skip
def broadcast_only(stage: Stage) -> Any:
    yield {"topic": stage.topic, "broadcast_only": True}, {"broadcast_only": True}
    assert stage.ask("stats")["topics"][stage.topic]["broadcast_only"]


@scene("configure", "not only for broadcasts", http=TOPIC,
       cli="topics broadcast {topic} --off [broadcast_only: ]")  # fmt: skip
def broadcast_off(stage: Stage) -> Any:
    stage.ask("configure", topic=stage.topic, broadcast_only=True)
    yield {"topic": stage.topic, "broadcast_only": False}, {"topic": "t"}
    stage.make_group()


@scene("configure", "a rule for pending keys", http=TOPIC, cli="pending set {topic} {if_pending}")
def rule(stage: Stage) -> Any:
    yield {"topic": stage.topic, "if_pending": "reject"}, {"if_pending": "reject"}


@scene("configure", "a rule with more", http=TOPIC)
def whole_rule(stage: Stage) -> Any:
    rule = {"action": "replace", "replaces": "body"}
    yield {"topic": stage.topic, "if_pending": rule}, {"if_pending": rule}
    assert stage.ask("stats")["topics"][stage.topic]["if_pending"] == rule
    [first] = stage.enqueue(key="k")
    assert stage.enqueue(key="k") == [first]
    assert not stage.ask("configure", topic=stage.topic, if_pending=None).get("if_pending")


@scene("release_key", "by its id", cli="groups release-key {topic} {group} {ids[0]}", shows=result)
def release_id(stage: Stage) -> Any:
    [task] = stage.hold("a")
    yield {"topic": stage.topic, "group": stage.group, "ids": (task,)}, [["#0", "released"]]
    assert stage.state(task) == "ready"


@scene("skip_key", "that is not held", cli="groups skip-key {topic} {group} --key {key}",
       shows=result)  # fmt: skip
def skip_none(stage: Stage) -> Any:
    stage.make_group()
    fields = {"topic": stage.topic, "group": stage.group, "key": "a"}
    yield fields, [[None, "not_held"]]


@scene("release_key", "several")
def release_several(stage: Stage) -> Any:
    first, second = stage.hold("a", "b")
    fields = {"topic": stage.topic, "group": stage.group, "ids": (first, second, UNKNOWN)}
    yield fields, [["#0", "released"], ["#1", "released"], ["#2", "not_held"]]


# --- what is refused -----------------------------------------------------------------------------


def no_group(stage: Stage) -> Values:
    stage.enqueue()
    return {"topic": stage.topic, "group": "none"}


for _name in ("configure", "delete_group", "held_keys", "key_lines"):
    refusal(_name, "not_found")(no_group)
for _name in ("reset_group", "preview_reset"):
    refusal(_name, "not_found")(lambda stage: no_group(stage) | {"to": "first"})
refusal("skip_key", "bad_request", cli=False)(lambda stage: no_group(stage) | {"group": "g"})
refusal("configure: paused", "not_found")(lambda stage: no_group(stage) | {"paused": True})
refusal("release_key", "not_found")(lambda stage: no_group(stage) | {"key": "k"})
refusal("skip_key", "not_found")(lambda stage: no_group(stage) | {"ids": (5,)})
refusal("skip_key", "bad_request")(lambda stage: no_group(stage) | {"ids": (5,), "key": "k"})
for _name in ("pause_key", "resume_key"):
    refusal(_name, "not_found")(lambda stage: no_group(stage) | {"key": "k"})
    refusal(_name, "bad_request", cli=False)(lambda stage: one_key(stage))
    refusal(_name, "bad_request", cli=False)(lambda stage: one_key(stage, key="k", value="v"))


def not_shared(stage: Stage) -> Values:
    stage.make_group()
    return {"topic": stage.topic, "group": stage.group, "value": "x"}


refusal("pause_key", "conflict")(not_shared)
refusal("resume_key", "conflict")(not_shared)


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
