"""Scenes of bulk operations."""

from __future__ import annotations

from typing import Any

from verbs.scene import Stage, Values, refusal, scene


def make(stage: Stage, **more: Any) -> Values:
    """A bulk operation of the stage, which is over; its name as a value."""
    name = stage.name("mine")
    stage.ask("make_bulk", topic=stage.topic, kind="cancel", id=name, **more)
    stage.house.settle()
    return {"bulk": name}


def without_id(answer: Any) -> Any:
    """What a command shows: it makes the id itself."""
    return [{name: one for name, one in answer.items() if name != "id"}]


@scene(
    "make_bulk",
    cli="{kind} --topic {topic} [where: --where '{where}'] [rate: --rate {rate}] --yes [id: ]",
    shows=without_id,
)
def make_bulk(stage: Stage) -> Any:
    stage.enqueue(properties={"n": 1})
    _, _, third = stage.enqueue(3, properties={"n": 3})
    said = {"topic": stage.topic, "kind": "cancel", "where": "n >= 3", "rate": 1000.0}
    yield said | {"id": stage.name("mine")}, {
        "kind": "cancel", "topic": "t", "selection": {"where": "n >= 3"}, "rate": 1000.0,
    }  # fmt: skip
    stage.house.settle()
    assert stage.state(third) == "cancelled"


@scene(
    "preview_bulk",
    python="preview_matching",
    cli="{kind} --topic {topic} --where '{where}' --dry-run",
)
def preview_bulk(stage: Stage) -> Any:
    stage.enqueue(properties={"n": 1})
    stage.enqueue(2, properties={"n": 3})
    said = {"topic": stage.topic, "kind": "cancel", "where": "n >= 3"}
    yield said, {"looked_at": 3, "matched": 2, "refused": {}, "examples": ["#1", "#2"]}
    assert len(stage.ask("list_tasks", topic=stage.topic)["tasks"]) == 3


@scene("list_bulk", cli="bulk list --topic {topic} --state {state}")
def list_bulk(stage: Stage) -> Any:
    stage.enqueue()
    make(stage)
    said = {"topic": stage.topic, "state": "done"}
    yield said, {"bulk": [{"id": "mine", "kind": "cancel", "changed": 1, "state": "done"}]}


@scene("show_bulk", cli="bulk show {bulk}")
def show_bulk(stage: Stage) -> Any:
    stage.enqueue(2)
    yield make(stage), {"id": "mine", "state": "done", "looked_at": 2, "matched": 2, "changed": 2}


@scene("cancel_bulk", cli="bulk cancel {bulk}")
def cancel_bulk(stage: Stage) -> Any:
    stage.enqueue(3)
    yield make(stage, rate=0.001), {"id": "mine", "state": "cancelled"}
    assert "scheduled" in [
        one["state"] for one in stage.ask("list_tasks", topic=stage.topic)["tasks"]
    ]


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
