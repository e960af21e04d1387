"""Scenes of bulk operations."""

from __future__ import annotations

from typing import Any

from support.shard_rig import NOW_MS
from tickwheel.api.bulk import AnySelectionFields, BulkTrial, options_of
from tickwheel.api.verbs import VERBS
from verbs.scene import DAY_MS, Stage, Values, refusal, scene
from verbs.ways import Unsayable, keywords


def make(stage: Stage, word: str = "mine", **more: Any) -> Values:
    """A bulk operation of the stage, which is over; its name as a value."""
    name = stage.name(word)
    stage.ask("make_bulk", topic=stage.topic, kind="cancel", id=name, **more)
    stage.house.settle()
    return {"bulk": name}


METHODS = {verb.bulk: verb.methods[0].name for verb in VERBS.values() if verb.bulk}
SELECTING = {field.python for field in AnySelectionFields.fields()}


def keywords_of(values: Values) -> tuple[str, Values, Values]:
    """The kind, what selects, and all else, as keywords."""
    kind = values["kind"]
    if kind not in METHODS or values.keys() - {"topic", "kind", *options_of(kind)}:
        raise Unsayable  # there is no method for it, or none with such keywords
    named = keywords(BulkTrial, {n: one for n, one in values.items() if n != "kind"})
    selecting = {name: one for name, one in named.items() if name in SELECTING}
    return kind, selecting, {n: one for n, one in named.items() if n not in SELECTING}


def made(client: Any, values: Values) -> Any:
    """The client's method of that kind, with a filter."""
    kind, selecting, rest = keywords_of(values)
    return getattr(client, METHODS[kind])(filter=selecting, **rest)


def tried(client: Any, values: Values) -> Any:
    kind, selecting, rest = keywords_of(values)
    if rest.keys() & {"id", "rate"}:
        raise Unsayable  # nothing is made
    return client.preview_bulk(kind, rest.pop("topic"), selecting, **rest)


def without_id(answer: Any) -> Any:
    """What a command shows: it makes the id itself."""
    return [{name: one for name, one in answer.items() if name != "id"}]


@scene(
    "make_bulk",
    python=made,
    cli="{kind} --topic {topic} [where: --where '{where}'] [rate: --rate {rate}] --yes [id: ]",
    shows=without_id,
)
def make_bulk(stage: Stage) -> Any:
    stage.enqueue(properties={"n": 1})
    _, _, third = stage.enqueue(3, properties={"n": 3})
    fields = {"topic": stage.topic, "kind": "cancel", "where": "n >= 3", "rate": 1000.0}
    yield fields | {"id": stage.name("mine")}, {
        "kind": "cancel", "topic": "t", "selection": {"where": "n >= 3"}, "rate": 1000.0,
    }  # fmt: skip
    stage.house.settle()
    assert stage.state(third) == "cancelled"


@scene(
    "preview_bulk",
    python=tried,
    cli="{kind} --topic {topic} --where '{where}' --dry-run",
)
def preview_bulk(stage: Stage) -> Any:
    stage.enqueue(properties={"n": 1})
    stage.enqueue(2, properties={"n": 3})
    fields = {"topic": stage.topic, "kind": "cancel", "where": "n >= 3"}
    yield fields, {"looked_at": 3, "matched": 2, "refused": {}, "examples": ["#1", "#2"]}
    assert len(stage.ask("list_tasks", topic=stage.topic)["tasks"]) == 3


@scene("list_bulk", cli="bulk list --topic {topic} --state {state}")
def list_bulk(stage: Stage) -> Any:
    stage.enqueue()
    make(stage, "older")
    make(stage)
    one = {"kind": "cancel", "state": "done"}
    yield {"topic": stage.topic, "state": "done"}, {
        "bulk": [one | {"id": "mine", "changed": 0}, one | {"id": "older", "changed": 1}],
    }  # fmt: skip


@scene("show_bulk", cli="bulk show {bulk}")
def show_bulk(stage: Stage) -> Any:
    stage.enqueue(2)
    yield make(stage), {"id": "mine", "state": "done", "looked_at": 2, "matched": 2, "changed": 2}


@scene("cancel_bulk", cli="bulk cancel {bulk}")
def cancel_bulk(stage: Stage) -> Any:
    stage.enqueue(3)
    yield make(stage, rate=0.001), {"id": "mine", "state": "cancelled"}
    assert "scheduled" in [
        task["state"] for task in stage.ask("list_tasks", topic=stage.topic)["tasks"]
    ]


# --- other kinds of them -------------------------------------------------------------------------


@scene("make_bulk", "move", python=made, shows=without_id,
       cli="reschedule --topic {topic} --all --shift 5s --yes"
       " [kind: ] [shift_ms: ] [id: ]")  # fmt: skip
def move(stage: Stage) -> Any:
    [task] = stage.enqueue()
    fields = {"topic": stage.topic, "kind": "reschedule", "shift_ms": 5_000, "id": stage.name("a")}
    yield fields, {"kind": "reschedule", "arguments": {"shift_ms": 5_000}}
    stage.house.settle()
    [found] = stage.ask("look_up", ids=(task,))
    assert found["due_ms"] == NOW_MS + DAY_MS + 5_000


@scene("make_bulk", "spread", python=made, shows=without_id,
       cli="reschedule --topic {topic} --all --spread 1h"
       " [kind: ] [within_ms: ] [id: ]")  # fmt: skip
def spread(stage: Stage) -> Any:
    [task] = stage.enqueue()
    fields = {"topic": stage.topic, "kind": "spread", "within_ms": 3_600_000, "id": stage.name("a")}
    yield fields, {"kind": "spread", "arguments": {"within_ms": 3_600_000}}
    stage.house.settle()
    [found] = stage.ask("look_up", ids=(task,))
    assert 0 <= found["due_ms"] - NOW_MS - DAY_MS <= 3_600_000


@scene("preview_bulk", "spread", python=tried,
       cli="reschedule --topic {topic} --tags {tags} --at 2027-01-16T08:00Z --spread 1h --dry-run"
       " [kind: ] [start_ms: ] [end_ms: ]")  # fmt: skip
def preview_spread(stage: Stage) -> Any:
    stage.make_group()
    stage.enqueue(tag="eu")
    stage.enqueue(tag="eu", delay_ms=0)
    start_ms = NOW_MS + DAY_MS
    fields = {"topic": stage.topic, "kind": "spread", "tags": "eu", "start_ms": start_ms}
    yield fields | {"end_ms": start_ms + 3_600_000}, {"matched": 2, "refused": {"ready": 1}}


@scene("make_bulk", "run now", python=made, shows=without_id,
       cli="run-now --topic {topic} --tags {tags} --key-prefix {key_prefix} --yes"
       " [kind: ] [id: ]")  # fmt: skip
def run_matching(stage: Stage) -> Any:
    [task] = stage.enqueue(tag="eu", key="k1")
    [other] = stage.enqueue(tag="eu", key="other")
    fields = {"topic": stage.topic, "kind": "run_now", "tags": "eu", "key_prefix": "k"}
    yield fields | {"id": stage.name("a")}, {"selection": {"tags": "eu", "key_prefix": "k"}}
    stage.house.settle()
    assert (stage.state(task), stage.state(other)) == ("ready", "scheduled")


@scene("make_bulk", "requeue", python=made, shows=without_id,
       cli="dead requeue --topic {topic} --group {group} --reason {reason} --where 'TRUE' --yes"
       " [kind: ] [where: ] [id: ]")  # fmt: skip
def requeue(stage: Stage) -> Any:
    [task] = stage.bury()
    fields = {"topic": stage.topic, "kind": "requeue", "group": stage.group, "reason": "bad"}
    yield fields | {"where": "TRUE", "id": stage.name("a")}, {"kind": "requeue"}
    stage.house.settle()
    assert stage.state(task) == "ready"


@scene("make_bulk", "delete", python=made, shows=without_id,
       cli="dead delete --topic {topic} --where 'TRUE' --yes"
       " [kind: ] [where: ] [id: ]")  # fmt: skip
def delete(stage: Stage) -> Any:
    stage.bury(2)
    fields = {"topic": stage.topic, "kind": "delete", "where": "TRUE", "id": stage.name("a")}
    yield fields, {"kind": "delete"}
    stage.house.settle()
    assert stage.ask("list_dead", topic=stage.topic)["dead"] == ()


@scene("make_bulk", "the same again", python=made, shows=without_id)
def make_the_same(stage: Stage) -> Any:
    stage.enqueue()
    named = make(stage)["bulk"]
    yield {"topic": stage.topic, "kind": "cancel", "id": named}, {"id": "mine", "state": "done"}


# --- what is refused -----------------------------------------------------------------------------


@refusal("make_bulk", "not_found")
def no_topic(stage: Stage) -> Values:
    return {"topic": stage.topic, "kind": "cancel", "where": "n > 1"}


refusal("preview_bulk", "not_found")(no_topic)


@refusal("make_bulk", "conflict", cli=False)
def another_of_that_name(stage: Stage) -> Values:
    stage.enqueue()
    make(stage)
    return {"topic": stage.topic, "kind": "run_now", "id": stage.name("mine")}


def too_far(stage: Stage) -> Values:
    stage.enqueue()
    return {"topic": stage.topic, "kind": "reschedule", "delay_ms": 400_000_000_000}


refusal("make_bulk", "due_too_far", cli=False)(too_far)
refusal("preview_bulk", "due_too_far", cli=False)(too_far)


def no_bulk(stage: Stage) -> Values:
    return {"bulk": stage.name("none")}


refusal("show_bulk", "not_found")(no_bulk)
refusal("cancel_bulk", "not_found")(no_bulk)


@refusal("list_bulk", "not_found")
def no_such_place(stage: Stage) -> Values:
    return {"after": stage.name("none")}
