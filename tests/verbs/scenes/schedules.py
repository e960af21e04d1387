"""Scenes of recurring schedules."""

from __future__ import annotations

from typing import Any

from support.shard_rig import NOW_MS
from verbs.scene import DAY_MS, Stage, Values, refusal, scene

HOUR_MS = 3_600_000


def put(stage: Stage, word: str = "nightly", **more: Any) -> Values:
    """A schedule of the stage, which is there; its name as a value."""
    name = {"name": stage.name(word)}
    stage.ask("put_schedule", **name, topic=stage.topic, every_ms=HOUR_MS, **more)
    return name


@scene(
    "put_schedule",
    python="put_schedule",
    cli="schedule put {name} --topic {topic} [body: --body go] [task: --key k --prop of=test]"
    " [every_ms: --every {every_ms}ms] [cron: --cron {cron}]",
)
def put_schedule(stage: Stage) -> Any:
    task = {"key": "k", "properties": {"of": "test"}}
    fields = {"name": stage.name("nightly"), "topic": stage.topic, "body": b"go", "task": task,
            "every_ms": HOUR_MS}  # fmt: skip
    yield fields, {
        "name": "nightly", "topic": "t", "body": "go", "task": task, "every_ms": HOUR_MS,
        "anchor_ms": NOW_MS, "next_ms": NOW_MS + HOUR_MS, "paused": False, "outcome": "created",
    }  # fmt: skip
    again = stage.ask("put_schedule", **fields)
    assert again["outcome"] == "unchanged"


@scene("list_schedules", cli="schedule list [limit: ]")
def list_schedules(stage: Stage) -> Any:
    put(stage)
    put(stage, "often")
    one = {"topic": "t", "runs": 0}
    fields = {"schedules": [one | {"name": "nightly"}, one | {"name": "often"}]}
    yield {"limit": 1_000}, fields


@scene("show_schedule", cli="schedule show {name} --next {next}")
def show_schedule(stage: Stage) -> Any:
    answer = put(stage) | {"next": 2}
    planned_ms = [NOW_MS + HOUR_MS, NOW_MS + 2 * HOUR_MS]
    yield answer, {"name": "nightly", "planned_ms": planned_ms, "recent": []}


@scene("show_schedule", "its next times", cli="schedule next {name} -n {next}",
       shows=lambda answer: [{"planned_ms": ms} for ms in answer["planned_ms"]])  # fmt: skip
def next_times(stage: Stage) -> Any:
    yield put(stage) | {"next": 3}, {"planned_ms": [NOW_MS + n * HOUR_MS for n in (1, 2, 3)]}


@scene(
    "put_schedule",
    "by cron",
    python="put_schedule",
    cli="schedule put {name} --topic {topic} --cron '{cron}' --timezone {timezone}",
)
def put_by_cron(stage: Stage) -> Any:
    when = {"cron": "0 9 * * *", "timezone": "Europe/Berlin"}
    fields = {"name": stage.name("nine"), "topic": stage.topic, **when}
    yield fields, {"outcome": "created", **when}


@scene("put_schedule", "once more", python="put_schedule",
       cli="schedule put {name} --topic {topic} --every {every_ms}ms")  # fmt: skip
def put_again(stage: Stage) -> Any:
    answer = put(stage)
    yield answer | {"topic": stage.topic, "every_ms": HOUR_MS}, {"outcome": "unchanged"}


@scene("pause_schedule", cli="schedule pause {name}", shows=lambda answer: [
    answer | {"outcome": "paused"}
])  # fmt: skip
def pause_schedule(stage: Stage) -> Any:
    outcome = put(stage)
    yield outcome, {"name": "nightly", "paused": True}
    assert stage.ask("show_schedule", **outcome)["paused"]


@scene("resume_schedule", cli="schedule resume {name}", shows=lambda answer: [
    answer | {"outcome": "resumed"}
])  # fmt: skip
def resume_schedule(stage: Stage) -> Any:
    outcome = put(stage)
    stage.ask("pause_schedule", **outcome)
    yield outcome, {"name": "nightly", "paused": False}
    assert not stage.ask("show_schedule", **outcome)["paused"]


@scene("run_schedule", python="run_schedule", gives=lambda ids: ids[0], cli="schedule run {name}")
def run_schedule(stage: Stage) -> Any:
    answer = put(stage)
    yield answer, ["#0"]
    [run] = stage.ask("show_schedule", **answer)["recent"]
    [task] = stage.ask("list_tasks", topic=stage.topic)["tasks"]
    assert (run["outcome"], run["id"]) == ("run", task["id"])
    assert task["properties"]["tickwheel.schedule"] == answer["name"]


@scene(
    "backfill_schedule",
    python="backfill_schedule",
    cli="schedule backfill {name} [from_ms: --from 2027-01-15T00:00Z]"
    " [to_ms: --to 2027-01-15T03:00Z]",
)
def backfill_schedule(stage: Stage) -> Any:
    answer = put(stage, anchor_ms=0)
    first_ms = NOW_MS - NOW_MS % DAY_MS
    yield answer | {"from_ms": first_ms, "to_ms": first_ms + 3 * HOUR_MS}, ["#0", "#1", "#2"]
    assert len(stage.ask("list_tasks", topic=stage.topic)["tasks"]) == 3


@scene("delete_schedule", cli="schedule delete {name}", shows=lambda answer: [
    answer | {"outcome": "deleted"}
])  # fmt: skip
def delete_schedule(stage: Stage) -> Any:
    yield put(stage), {"name": "nightly", "topic": "t"}
    assert stage.name("nightly") not in [
        schedule["name"] for schedule in stage.ask("list_schedules", limit=1_000)["schedules"]
    ]


# --- what is refused -----------------------------------------------------------------------------


def none(stage: Stage) -> Values:
    return {"name": stage.name("none")}


for _word in ("show", "pause", "resume", "run", "delete"):
    refusal(f"{_word}_schedule", "not_found")(none)
refusal("backfill_schedule", "not_found")(lambda stage: none(stage) | {"from_ms": 1, "to_ms": 2})


@refusal("put_schedule", "bad_request")
def no_cron(stage: Stage) -> Values:
    return {"name": stage.name("nightly"), "topic": stage.topic, "cron": "often"}


@refusal("delete_topic", "conflict")
def a_schedule_enqueues_to_it(stage: Stage) -> Values:
    stage.enqueue()
    put(stage)
    return {"topic": stage.topic, "force": True}
