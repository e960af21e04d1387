"""Scenes of tasks that are there: cancelled, moved, looked up, listed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from support.shard_rig import NOW_MS
from verbs.scene import DAY_MS, UNKNOWN, Stage, Values, refusal, scene
from verbs.ways import Unsayable, outcome_of

KEY, TASK = "/v1/topics/{topic}/keys/{key}", "/v1/tasks/{ids[0]}"
OF_KEY = "--topic {topic} --key {key}"
HOUR_MS = 3_600_000
AT_MS = NOW_MS + HOUR_MS
"""When due windows begin: one of a millisecond is that moment, however full its tick is."""


def nothing(values: Values) -> None:
    """No body."""


def one(said: Any) -> Any:
    """Return the fields of a task as TCP has them."""
    return [outcome_of(said)]


def first(answer: Any) -> Any:
    return answer[0]


def first_word(answer: Any) -> Any:
    return answer[0][1]


# --- by ids --------------------------------------------------------------------------------------


@scene("cancel", cli="cancel {ids[0]}")
def cancel(stage: Stage) -> Any:
    [task] = stage.enqueue()
    yield {"ids": (task,)}, [["#0", "cancelled"]]
    assert stage.state(task) == "cancelled"


def of_several(values: Values) -> Any:
    """The body of a reschedule, which does not know all that a frame does."""
    if not values.keys() & {"delay_ms", "due_ms"} or values.keys() - {"ids", "delay_ms", "due_ms"}:
        raise Unsayable  # without a time it is at once
    return values | {"ids": [str(task) for task in values["ids"]]} if "ids" in values else values


@scene(
    "reschedule",
    http=(f"PATCH {KEY}", "POST /v1/reschedules"),
    body=of_several,
    cli="reschedule {ids[0]} --delay {delay_ms}ms",
)
def reschedule(stage: Stage) -> Any:
    [task] = stage.enqueue()
    due_ms = NOW_MS + HOUR_MS
    yield {"ids": (task,), "delay_ms": HOUR_MS}, [["#0", "scheduled", due_ms]]
    [found] = stage.ask("look_up", ids=(task,))
    assert found["due_ms"] == due_ms


@scene(
    "spread",
    cli="reschedule {ids[0]} --at 2027-01-15T09:00:00Z --spread {within_ms}ms [start_ms: ]",
)
def spread(stage: Stage) -> Any:
    [task] = stage.enqueue()
    fields = {"ids": (task,), "start_ms": AT_MS, "within_ms": 1}
    yield fields, [["#0", "scheduled", AT_MS]]
    [found] = stage.ask("look_up", ids=(task,))
    assert found["due_ms"] == AT_MS


@scene("run_now", cli="run-now {ids[0]}")
def run_now(stage: Stage) -> Any:
    stage.make_group()
    [task] = stage.enqueue()
    yield {"ids": (task,)}, [["#0", "scheduled", NOW_MS]]
    assert [delivery[0] for delivery in stage.pull()] == [task]


@scene(
    "look_up",
    http=(f"GET {KEY}", "POST /v1/lookups"),
    python="lookup",
    cli="show {ids[0]} {ids[1]}",
)
def look_up(stage: Stage) -> Any:
    stage.make_group()
    task, due = *stage.enqueue(key="k", tag="eu", properties={"n": 1}), *stage.enqueue(delay_ms=0)
    yield {"ids": (task, due)}, [
        {"id": "#0", "state": "scheduled", "topic": "t", "body": "0", "key": "k", "tag": "eu",
         "due_ms": NOW_MS + DAY_MS, "enqueued_ms": NOW_MS, "properties": {"n": 1}},
        {"id": "#1", "state": "ready", "groups": {"g": {"state": "ready", "attempt": 0}}},
    ]  # fmt: skip


EXPLANATION = f"GET {KEY}/explanation", "GET /v1/tasks/{id}/explanation"


def by_id(client: Any, values: Values) -> Any:
    """The client's call, which has the id in the first place."""
    rest = {name: one for name, one in values.items() if name != "id"}
    return client.explain(values.get("id"), **rest)


@scene(
    "explain", http=EXPLANATION, python=by_id, cli="explain {id}",
)  # fmt: skip
def explain(stage: Stage) -> Any:
    stage.make_group(paused=True)
    [task] = stage.enqueue(delay_ms=0)
    yield {"id": task}, {
        "id": "#0", "cause": "group_paused", "group": "g", "topic": "t", "others": [],
        "command": "tickwheel resume t --group g",
    }  # fmt: skip


@scene(
    "explain", "by key", http=EXPLANATION, python=by_id, cli=f"explain {OF_KEY}",
)  # fmt: skip
def explain_key(stage: Stage) -> Any:
    [task] = stage.enqueue(key="k")
    yield {"topic": stage.topic, "key": "k"}, {"id": "#0", "cause": "scheduled", "topic": "t"}


@scene(
    "list_tasks", cli="list --topic {topic} --state {state} --key {key} [newest: --newest-first]"
)
def list_tasks(stage: Stage) -> Any:
    stage.enqueue(2, key="k", tag="eu", properties={"n": "1"})
    stage.enqueue(key="other")
    fields = {"topic": stage.topic, "state": "scheduled", "key": "k", "newest": True}
    yield fields, {"tasks": [{"id": "#1", "tag": "eu"}, {"id": "#0", "properties": {"n": "1"}}]}


@scene(
    "peek",
    cli="peek {topic} [key: --key {key}] [due: --due] [newest: --newest-first]",
)
def peek(stage: Stage) -> Any:
    stage.enqueue(2, key="k", tag="eu", properties={"n": "1"})
    stage.enqueue(key="other")
    fields = {"topic": stage.topic, "key": "k", "newest": True}
    yield (
        fields,
        {
            "tasks": [
                {"id": "#1", "tag": "eu", "body": "1", "state": "scheduled"},
                {"id": "#0", "properties": {"n": "1"}, "body": "0"},
            ]
        },
    )


@scene("peek", "what is due", cli="peek {topic} [due: --due]")
def peek_due(stage: Stage) -> Any:
    stage.bury()
    stage.deliver()
    stage.enqueue(delay_ms=0)
    stage.enqueue()
    yield (
        {"topic": stage.topic, "due": True},
        {
            "tasks": [
                {"id": "#1", "state": "in_flight"},
                {"id": "#2", "state": "ready", "groups": {"g": {"attempt": 0}}},
            ]
        },
    )


# --- several of them, and what is not there ------------------------------------------------------


@scene("cancel", "several", cli="cancel {ids[0]} {ids[1]} {ids[2]}")
def cancel_several(stage: Stage) -> Any:
    [task] = stage.enqueue()
    stage.ask("cancel", ids=(task,))
    [other] = stage.enqueue()
    yield {"ids": (task, other, UNKNOWN)}, [
        ["#0", "already_cancelled"], ["#1", "cancelled"], ["#2", "unknown"],
    ]  # fmt: skip


@scene("cancel", "what is being worked on", cli="cancel {ids[0]}")
def cancel_in_flight(stage: Stage) -> Any:
    [[task, _, _]] = stage.deliver()
    yield {"ids": (task,)}, [["#0", "in_flight"]]


@scene("reschedule", "each by so much", cli="reschedule {ids[0]} {ids[1]} --shift 1h [shift_ms: ]")
def shift(stage: Stage) -> Any:
    ids = *stage.enqueue(), *stage.enqueue(delay_ms=5)
    yield {"ids": ids, "shift_ms": HOUR_MS}, [
        ["#0", "scheduled", NOW_MS + DAY_MS + HOUR_MS], ["#1", "scheduled", NOW_MS + HOUR_MS + 5],
    ]  # fmt: skip


@scene("spread", "what is not scheduled", cli="reschedule {ids[0]} {ids[1]} --spread {within_ms}ms")
def spread_ready(stage: Stage) -> Any:
    [[task, _, _]] = stage.deliver()
    yield {"ids": (task, UNKNOWN), "within_ms": HOUR_MS}, [["#0", "in_flight"], ["#1", "unknown"]]
    assert stage.state(task) == "in_flight"


@scene("spread", "to an end")
def spread_to_an_end(stage: Stage) -> Any:
    ids = tuple(stage.enqueue(2))
    fields = {"ids": ids, "start_ms": AT_MS, "end_ms": AT_MS + 1}
    yield fields, [["#0", "scheduled", AT_MS], ["#1", "scheduled", AT_MS]]


@scene("run_now", "what has ended", cli="run-now {ids[0]}")
def run_ended(stage: Stage) -> Any:
    [task] = stage.enqueue()
    stage.ask("cancel", ids=(task,))
    yield {"ids": (task,)}, [["#0", "already_cancelled"]]


@scene("look_up", "what is not there", http="POST /v1/lookups", python="lookup",
       cli="show {ids[0]}")  # fmt: skip
def look_up_unknown(stage: Stage) -> Any:
    yield {"ids": (UNKNOWN,)}, [{"id": "#0", "state": "unknown"}]


# --- one task, in words of its own ---------------------------------------------------------------


@scene("cancel", "one", http=f"DELETE {TASK}", reply=one, gives=first_word,
       python=lambda client, v: client.cancel(v["ids"][0]))  # fmt: skip
def cancel_one(stage: Stage) -> Any:
    yield from cancel(stage)


@scene(
    "reschedule",
    "one to a moment",
    http=f"PATCH {TASK}",
    body=lambda v: {"due_ms": v["due_ms"]},
    reply=one,
    python=lambda client, v: client.reschedule(
        v["ids"][0], at=datetime.fromtimestamp(v["due_ms"] // 1000, UTC)
    ),
    gives=first,
    cli="reschedule {ids[0]} --at 2027-01-16T08:00:00Z [due_ms: ]",
)
def reschedule_at(stage: Stage) -> Any:
    [task] = stage.enqueue(delay_ms=5)
    due_ms = NOW_MS + DAY_MS
    yield {"ids": (task,), "due_ms": due_ms}, [["#0", "scheduled", due_ms]]


@scene(
    "spread",
    "one",
    python=lambda client, v: client.spread(
        v["ids"][0], within=timedelta(milliseconds=v["within_ms"])
    ),
    gives=first,
    cli="reschedule {ids[0]} --spread {within_ms}ms",
)
def spread_one(stage: Stage) -> Any:
    [task] = stage.enqueue(delay_ms=HOUR_MS)
    yield {"ids": (task,), "within_ms": 1}, [["#0", "scheduled", AT_MS]]


@scene("run_now", "one", http=f"POST {TASK}/run", body=nothing, reply=one,
       python=lambda client, v: client.run_now(v["ids"][0]), gives=first)  # fmt: skip
def run_one_now(stage: Stage) -> Any:
    yield from run_now(stage)


@scene("look_up", "one", http=f"GET {TASK}", reply=lambda said: [said], gives=first,
       body=nothing, python=lambda client, v: client.lookup(v["ids"][0]))  # fmt: skip
def look_one_up(stage: Stage) -> Any:
    [task] = stage.enqueue(key="k")
    yield {"ids": (task,)}, [{"id": "#0", "state": "scheduled", "key": "k", "body": "0"}]


# --- by topic and key ----------------------------------------------------------------------------


@scene("cancel", "by key", cli=f"cancel {OF_KEY}")
def cancel_key(stage: Stage) -> Any:
    first, second = stage.enqueue(2, key="k/1")
    [other] = stage.enqueue(key="k")
    yield {"topic": stage.topic, "key": "k/1"}, [["#0", "cancelled"], ["#1", "cancelled"]]
    assert stage.state(first) == stage.state(second) == "cancelled"
    assert stage.state(other) == "scheduled"


@scene("cancel", "the tasks of a key", http=f"DELETE {KEY}")
def cancel_of_key(stage: Stage) -> Any:
    yield from cancel_key(stage)


@scene("cancel", "a key that nobody has", cli=f"cancel {OF_KEY}")
def cancel_no_key(stage: Stage) -> Any:
    yield {"topic": stage.topic, "key": "none"}, [[None, "unknown"]]


@scene("cancel", "a key whose task has ended", cli=f"cancel {OF_KEY}")
def cancel_ended_key(stage: Stage) -> Any:
    [task] = stage.enqueue(key="k")
    stage.ask("cancel", ids=(task,))
    yield {"topic": stage.topic, "key": "k"}, [["#0", "already_cancelled"]]


@scene("reschedule", "by key", http=f"PATCH {KEY}",
       cli=f"reschedule {OF_KEY} --delay {{delay_ms}}ms")  # fmt: skip
def reschedule_key(stage: Stage) -> Any:
    stage.enqueue(2, key="k")
    due_ms = NOW_MS + HOUR_MS
    fields = {"topic": stage.topic, "key": "k", "delay_ms": HOUR_MS}
    yield fields, [["#0", "scheduled", due_ms], ["#1", "scheduled", due_ms]]


@scene("spread", "by key", cli=f"reschedule {OF_KEY} --spread {{within_ms}}ms")
def spread_key(stage: Stage) -> Any:
    stage.enqueue(2, key="k", delay_ms=HOUR_MS)
    fields = {"topic": stage.topic, "key": "k", "within_ms": 1}
    yield fields, [["#0", "scheduled", AT_MS], ["#1", "scheduled", AT_MS]]


@scene("run_now", "by key", cli=f"run-now {OF_KEY}")
def run_now_key(stage: Stage) -> Any:
    stage.make_group()
    [task] = stage.enqueue(key="k")
    yield {"topic": stage.topic, "key": "k"}, [["#0", "scheduled", NOW_MS]]
    assert [delivery[0] for delivery in stage.pull()] == [task]


@scene("run_now", "the tasks of a key", http=f"POST {KEY}/run", body=nothing)
def run_now_of_key(stage: Stage) -> Any:
    yield from run_now_key(stage)


@scene("look_up", "by key", http=f"GET {KEY}", python="lookup")
def look_up_key(stage: Stage) -> Any:
    stage.enqueue(2, key="k")
    yield {"topic": stage.topic, "key": "k"}, [{"id": "#1", "key": "k"}, {"id": "#0", "key": "k"}]


@scene("look_up", "the newest of a key", http=f"GET {KEY}", python="lookup",
       cli="show --topic {topic} --key {key} --before 2027-01-15T08:00Z"
       " [newest: ] [until_ms: ]")  # fmt: skip
def look_up_newest(stage: Stage) -> Any:
    stage.enqueue(2, key="k")
    fields = {"topic": stage.topic, "key": "k", "newest": True, "until_ms": NOW_MS}
    yield fields, [{"id": "#1", "key": "k", "state": "scheduled"}]


# --- what is refused -----------------------------------------------------------------------------

MOVED = {
    "cancel": {}, "reschedule": {"delay_ms": 5}, "spread": {"within_ms": 5}, "run_now": {},
    "look_up": {},
}  # fmt: skip


def named(name: str, **said: Any) -> None:
    """Declare that an invalid selection is refused."""
    refusal(name, "bad_request", cli=False)(lambda stage: said | MOVED[name])


for _name in MOVED:
    named(_name)
    named(_name, topic="t")
    named(_name, key="k")
    named(_name, ids=(5,), topic="t")
    named(_name, ids=(5,), key="k", topic="t")


def of_one(stage: Stage, **said: Any) -> Values:
    return {"ids": tuple(stage.enqueue()), **said}


TOO_FAR_MS = 400_000_000_000


@refusal("reschedule", "due_too_far", cli=False)
def too_far(stage: Stage) -> Values:
    return of_one(stage, delay_ms=TOO_FAR_MS)


@refusal("reschedule: by key", "due_too_far")
def too_far_of_key(stage: Stage) -> Values:
    return {"topic": stage.topic, "key": "k", "delay_ms": TOO_FAR_MS}


@refusal("spread", "due_too_far", cli=False)
def begins_too_far(stage: Stage) -> Values:
    return of_one(stage, start_ms=NOW_MS + TOO_FAR_MS, within_ms=5)


for _said in ({}, {"delay_ms": 5, "shift_ms": 5}, {"delay_ms": 5, "due_ms": NOW_MS}):
    refusal("reschedule", "bad_request", cli=False)(lambda stage, said=_said: of_one(stage, **said))
for _said in ({}, {"start_ms": NOW_MS}, {"end_ms": NOW_MS}, {"within_ms": 5, "end_ms": NOW_MS},
              {"start_ms": NOW_MS, "end_ms": NOW_MS}):  # fmt: skip
    refusal("spread", "bad_request", cli=False)(lambda stage, said=_said: of_one(stage, **said))
