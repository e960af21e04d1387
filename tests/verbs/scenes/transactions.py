"""Scenes of transactions of producers."""

from __future__ import annotations

from typing import Any

from support.shard_rig import NOW_MS
from verbs.scene import DAY_MS, Stage, Values, refusal, scene


def halves(values: Values) -> tuple[Any, ...]:
    return (values["transaction"], values["group"], 1, values["tasks"], None)


def halves_in_json(values: Values) -> Any:
    return {
        "transaction": {"id": values["transaction"], "group": values["group"], "part": 1},
        "tasks": [
            {"topic": topic, "body": body.decode(), "delay_ms": delay_ms}
            for topic, body, delay_ms in values["tasks"]
        ],
    }


@scene("prepare", frame=halves, http="POST /v1/tasks", body=halves_in_json,
       reply=lambda said: (NOW_MS, ()))  # fmt: skip
def prepare(stage: Stage) -> Any:
    name = stage.name("order-17")
    tasks = [(stage.topic, b"x", DAY_MS)] * 2
    said = {"transaction": name, "group": stage.name("payments"), "tasks": tasks}
    yield said, [NOW_MS, []]
    assert stage.ask("show_transaction", transaction=name)["tasks"] == 2
    assert stage.ask("list_tasks", topic=stage.topic)["tasks"] == ()


@scene("commit_transaction", python="commit_transaction", cli="transactions commit {transaction}",
       shows=lambda ids: [{"outcome": "committed", "ids": ids}])  # fmt: skip
def commit_transaction(stage: Stage) -> Any:
    named = {"transaction": stage.prepare("order-17", 2)}
    yield named, ["#0", "#1"]
    ids = [task["id"] for task in stage.ask("list_tasks", topic=stage.topic)["tasks"]]
    assert list(stage.ask("commit_transaction", **named)[1]) == ids, "once more is the same"
    answer = stage.ask("show_transaction", **named)
    assert (answer["state"], answer["first_id"]) == ("committed", ids[0])


@scene("rollback_transaction", "once more", python="rollback_transaction", gives=lambda ids: None,
       cli="transactions rollback {transaction}",
       shows=lambda ids: [{"outcome": "rolled_back"}])  # fmt: skip
def roll_back_again(stage: Stage) -> Any:
    named = {"transaction": stage.prepare("order-17")}
    stage.ask("rollback_transaction", **named)
    yield named, []


@scene("rollback_transaction", python="rollback_transaction", gives=lambda ids: None,
       cli="transactions rollback {transaction}",
       shows=lambda ids: [{"outcome": "rolled_back"}])  # fmt: skip
def rollback_transaction(stage: Stage) -> Any:
    name = stage.prepare("order-17")
    yield {"transaction": name}, []
    assert stage.ask("show_transaction", transaction=name)["state"] == "rolled_back"
    assert stage.ask("list_tasks", topic=stage.topic)["tasks"] == ()


@scene("list_transactions", cli="transactions list --group {group} --state {state}")
def list_transactions(stage: Stage) -> Any:
    stage.prepare("a")
    stage.prepare("b")
    fields = {"group": stage.name("payments"), "state": "open"}
    one = {"group": "payments", "state": "open", "tasks": 1, "began_ms": NOW_MS, "topics": ["t"]}
    yield fields, {"transactions": [one | {"id": "a"}, one | {"id": "b"}]}


@scene("show_transaction", cli="transactions show {transaction}")
def show_transaction(stage: Stage) -> Any:
    half = {"topic": "t", "due_ms": NOW_MS + DAY_MS, "bytes": 4}
    yield {"transaction": stage.prepare("a")}, {"id": "a", "state": "open", "halves": [half]}


@scene("show_transaction", "counted from its commit")
def show_counted(stage: Stage) -> Any:
    half = {"topic": "t", "due_ms": None, "delay_ms": DAY_MS}
    named = {"transaction": stage.prepare("a", count_from="commit")}
    yield named, {"state": "open", "halves": [half]}


def unknown(stage: Stage) -> Values:
    return {"transaction": stage.name("none")}


for _name in ("commit_transaction", "rollback_transaction", "show_transaction"):
    refusal(_name, "unknown_transaction")(unknown)


@refusal("commit_transaction", "transaction_rolled_back")
def rolled_back(stage: Stage) -> Values:
    name = stage.prepare("a")
    stage.ask("rollback_transaction", transaction=name)
    return {"transaction": name}


@refusal("rollback_transaction", "transaction_committed")
def committed(stage: Stage) -> Values:
    name = stage.prepare("a")
    stage.ask("commit_transaction", transaction=name)
    return {"transaction": name}
