"""Scenes of verbs whose frames are read by hand: tasks that are enqueued, pulled and settled."""

from __future__ import annotations

from typing import Any

from support.shard_rig import NOW_MS
from tickwheel.client import Task
from tickwheel.server.http.deliveries import receipt_text
from tickwheel.server.http.exchange import Receipt
from verbs.scene import DAY_MS, Stage, Values, scene


def ids_of(answer: Any) -> Any:
    return list(answer[1])


@scene(
    "enqueue",
    frame=lambda v: (v["tasks"],),
    http="POST /v1/tasks",
    body=lambda v: {
        "tasks": [
            {"topic": topic, "body": body.decode(), "delay_ms": delay_ms, **options}
            for topic, body, delay_ms, options in v["tasks"]
        ]
    },
    reply=lambda said: [row["id"] for row in said["tasks"]],
    python=lambda client, v: client.enqueue_many(
        Task(topic, body, delay=delay_ms / 1000, **options)
        for topic, body, delay_ms, options in v["tasks"]
    ),
    means=ids_of,
    cli="enqueue {tasks[0][0]} x --delay 1d --key k",
    shows=lambda ids: [{"id": ids[0]}],
)
def enqueue(stage: Stage) -> Any:
    yield {"tasks": [(stage.topic, b"x", DAY_MS, {"key": "k"})]}, ["#0"]
    [task] = stage.ask("look_up", topic=stage.topic, key="k")
    assert (task["body"], task["due_ms"]) == (b"x", NOW_MS + DAY_MS)


@scene(
    "enqueue_columns",
    frame=lambda v: (v["topic"], v["bodies"], v["delay_ms"]),
    python=lambda client, v: client.enqueue_columns(
        v["topic"], v["bodies"], delay=v["delay_ms"] / 1000
    ),
    means=ids_of,
)
def enqueue_columns(stage: Stage) -> Any:
    fields = {"topic": stage.topic, "bodies": [b"x", b"y"], "delay_ms": DAY_MS}
    yield fields, ["#0", "#1"]
    tasks = stage.ask("list_tasks", topic=stage.topic)["tasks"]
    assert [entry["body"] for entry in tasks] == [b"x", b"y"]


@scene(
    "pull",
    frame=lambda v: (v["topic"], v["group"], v["max"], 0, None),
    http="POST /v1/topics/{topic}/pull",
    body=lambda v: v,
    reply=lambda said: [
        (delivery["id"], delivery["attempt"], delivery["body"]) for delivery in said["deliveries"]
    ],
    python=lambda client, v: client.pull(**v),
    means=lambda answer: [(row[0], row[1], row[3]) for row in answer[2]],
)
def pull(stage: Stage) -> Any:
    stage.make_group()
    [task] = stage.enqueue(delay_ms=0)
    yield {"topic": stage.topic, "group": stage.group, "max": 5}, [["#0", 1, "0"]]
    assert stage.state(task) == "in_flight"


# --- ends of deliveries --------------------------------------------------------------------------


def receipts(values: Values) -> list[str]:
    """As HTTP has them."""
    return [
        receipt_text(Receipt(values["topic"], values["group"], *item, 0))
        for item in values["items"]
    ]


def columns(values: Values, *more: Any) -> tuple[Any, ...]:
    """The frame of a verb that takes ids and attempts of one epoch."""
    ids, epochs, attempts = zip(*values["items"], strict=True)
    return (values["topic"], values["group"], epochs[0], ids, attempts, *more)


def rows(values: Values, *more: Any) -> tuple[Any, ...]:
    """Return the frame of a verb that takes receipts with options."""
    return (values["topic"], values["group"], [(*item, *more) for item in values["items"]])


def settling(stage: Stage) -> Values:
    return {"topic": stage.topic, "group": stage.group, "items": stage.deliver()}


def settles(name: str, path: str, word: str, state: str, **said: Any) -> None:
    """The scene of a verb that ends a delivery, or its lease: the word for it, the task's state
    afterwards."""
    more = tuple(said.values())
    is_of_columns = name in ("ack", "extend", "release")
    frame = columns if is_of_columns else rows

    def play(stage: Stage) -> Any:
        values = settling(stage)
        yield values, [word]
        assert stage.state(values["items"][0][0]) == state

    scene(
        name,
        frame=lambda values: frame(values, *more),
        http=f"POST {path}",
        body=lambda values: {"receipts": receipts(values), **said},
        reply=lambda answer: answer["results"],
        means=lambda words: words or [word],
    )(play)


settles("ack", "/v1/acks", "acked", "acked")
settles("nack", "/v1/nacks", "retrying", "waiting", delay_ms=5_000, reason="why")
settles("reject", "/v1/rejections", "dead", "dead", reason="why")
settles("snooze", "/v1/snoozes", "snoozed", "waiting", delay_ms=5_000)
settles("extend", "/v1/extensions", "extended", "in_flight", lease_ms=60_000)
settles("release", "/v1/releases", "released", "ready")
