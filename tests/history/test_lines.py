"""Records as lines: every event with its fields, and valid JSON whatever a string holds."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.encodings import ENCODING
from support.traces import TRACE
from tickwheel.history.lines import (
    EVENTS,
    FIELDS,
    MALFORMED,
    NAMES,
    TASK_OPTIONS,
    EventKind,
    Renderer,
    to_json,
)
from tickwheel.model.records import TaskOptions

T = 1_795_255_200_000
END = {"node": "n", "shard": 3, "epoch": 9}
ANY = st.text(st.characters(), max_size=40)
"""Surrogates included."""


def render(record: list[Any], seq: int = 1) -> list[dict[str, Any]]:
    lines = Renderer("n", 3, 9).render(record, seq)
    results = []
    for number, line in enumerate(lines, seq):
        assert line.endswith("}\n") and line.count("\n") == 1 and line.isascii()
        event = json.loads(line)
        assert {name: event.pop(name) for name in END} == END
        assert event.pop("seq") == number and event.pop("v") == 1 and event.pop("time_ms") == T
        assert None not in event.values()
        results.append(event)
    return results


TASK = {"task_id": "5", "topic": "t"}
CASES: list[tuple[list[Any], list[dict[str, Any]]]] = [
    (
        [EventKind.ENQUEUED, T, "p", [5, 6], [T, T + 1], "t", {}, None],
        [
            {"event": "enqueued", **TASK, "due_ms": T, "producer": "p"},
            {"event": "enqueued", "task_id": "6", "topic": "t", "due_ms": T + 1, "producer": "p"},
        ],
    ),
    (
        [EventKind.ENQUEUED, T, "", [5, 6], [T, T], ["t", "u"], {1: ["k", None, None, 0, 0]}, None],
        [
            {"event": "enqueued", **TASK, "due_ms": T},
            {
                "event": "enqueued", "task_id": "6", "topic": "u", "due_ms": T, "key": "k",
                "ttl_ms": 0,
            },
        ],
    ),
    (
        [EventKind.ENQUEUED, T, "", [5], [T], "t",
         {0: [None, None, None, 0, None, None, None, 9, T - 3]}, None],
        [{"event": "enqueued", **TASK, "due_ms": T, "within_ms": 9, "asked_ms": T - 3}],
    ),
    (
        [EventKind.ENQUEUED, T, "", [5], [T], "t",
         {0: [None, None, None, 0, None, None, None, None, None, "customer 7"]}, None],
        [{"event": "enqueued", **TASK, "due_ms": T, "order_key": "customer 7"}],
    ),
    (
        [EventKind.ENQUEUED, T, "", [5], [T], "t",
         {0: [None, None, None, 0, None, None, None, None, None, None, None, TRACE]}, None],
        [{"event": "enqueued", **TASK, "due_ms": T, "traceparent": TRACE}],
    ),
    (
        [EventKind.ENQUEUED, T, "", [5], [T], "t",
         {0: [None, None, None, 0, None, None, None, None, None, None, None, None, ENCODING]},
         None],
        [{"event": "enqueued", **TASK, "due_ms": T, "encoding": ENCODING}],
    ),
    (
        [EventKind.ENQUEUED, T, "", [5], [T], "t",
         {0: [None, None, None, 0, *[None] * 9, "customer-7"]}, None],
        [{"event": "enqueued", **TASK, "due_ms": T, "shard_by": "customer-7"}],
    ),
    (
        [EventKind.ENQUEUED, T, "", [5], [T], "t", {0: [*[None] * 10, [3, "g", "k"]]}, None],
        [{"event": "enqueued", **TASK, "due_ms": T, "key": "k", "replay_of": "3",
          "replay_to": "g"}],
    ),
    (
        [EventKind.GROUP, T, "t", "g", "reset", {"bulk": "j", "from_ms": 0}],
        [{"event": "group_reset", "topic": "t", "group": "g",
          "settings": {"bulk": "j", "from_ms": 0}}],
    ),
    (
        [EventKind.ENQUEUED, T, "p", [5], [T], "t", {0: ["k", "", {"a": 1}, 7, 9, "slow"]},
         [b"\x00"]],
        [
            {
                "event": "enqueued", **TASK, "due_ms": T, "producer": "p", "key": "k", "tag": "",
                "props": {"a": 1}, "priority": 7, "ttl_ms": 9, "retry": "slow", "body": "AA==",
            }
        ],
    ),
    (
        [EventKind.DELIVERED, T, "t", "g", "w", [5], [1], [T - 4]],
        [
            {
                "event": "delivered", **TASK, "group": "g", "due_ms": T - 4, "attempt": 1,
                "lateness_ms": 4, "subscriber": "w",
            }
        ],
    ),
    (
        [EventKind.DELIVERED, T, "t", None, "", [5, 5], [2, 1], [T, T + 9]],
        [
            {"event": "delivered", **TASK, "due_ms": T, "attempt": 2},
            {"event": "delivered", **TASK, "due_ms": T + 9, "attempt": 1, "lateness_ms": 0},
        ],
    ),
    (
        [EventKind.DELIVERED, T, "t", "g", "", [5, 5], 1, [T - 400, T - 300], "no_credit"],
        [
            {"event": "delivered", **TASK, "group": "g", "due_ms": T - late, "attempt": 1,
             "lateness_ms": late, "cause": "no_credit"}
            for late in (400, 300)
        ],
    ),
    (
        [EventKind.DELIVERED, T, "t", "g", "", [5, 5, 5], [1, 1, 2], [T - 400, T, T - 400],
         ["paused", None, None]],
        [
            {"event": "delivered", **TASK, "group": "g", "due_ms": T - 400, "attempt": 1,
             "lateness_ms": 400, "cause": "paused"},
            {"event": "delivered", **TASK, "group": "g", "due_ms": T, "attempt": 1,
             "lateness_ms": 0},
            {"event": "delivered", **TASK, "group": "g", "due_ms": T - 400, "attempt": 2},
        ],
    ),
    (
        [EventKind.ACKED, T, "t", "g", "w", 9, [5], [2], [T - 7], False],
        [
            {
                "event": "acked", **TASK, "group": "g", "attempt": 2, "ack_ms": 7,
                "subscriber": "w", "ended": False,
            }
        ],
    ),
    (
        [EventKind.ACKED, T, "t", "g", "w", 9, [5, 6], [2, 1], [None, T + 3], True],
        [
            {"event": "acked", **TASK, "group": "g", "attempt": 2, "subscriber": "w",
             "ended": True},
            {
                "event": "acked", "task_id": "6", "topic": "t", "group": "g", "attempt": 1,
                "ack_ms": 0, "subscriber": "w", "ended": True,
            },
        ],
    ),
    (
        [EventKind.ACKED, T, "t", "g", "", 9, [5], [2], [T - 7], True],
        [{"event": "acked", **TASK, "group": "g", "attempt": 2, "ack_ms": 7, "ended": True}],
    ),
    (
        [EventKind.ACKED, T, "t", "g", "", 9, [5, 6], 1, T, [False, True]],
        [
            {"event": "acked", "task_id": i, "topic": "t", "group": "g", "attempt": 1,
             "ack_ms": 0, "ended": ended}
            for i, ended in (("5", False), ("6", True))
        ],
    ),
    (
        [EventKind.ENDED, T, "t", "g", "expired", [5], False],
        [{"event": "expired", **TASK, "group": "g", "ended": False}],
    ),
    (
        [EventKind.NACKED, T, "t", "g", "w", [5], [2], [T + 9], ["no"]],
        [
            {
                "event": "nacked", **TASK, "group": "g", "due_ms": T + 9, "attempt": 2,
                "reason": "no", "subscriber": "w",
            }
        ],
    ),
    (
        [EventKind.NACKED, T, "t", "g", "w", [5], [2], [None], ["no"]],
        [
            {
                "event": "nacked", **TASK, "group": "g", "attempt": 2, "reason": "no",
                "subscriber": "w",
            }
        ],
    ),
    (
        [EventKind.LEASE_OVER, T, "t", "g", "w", [5], [2], "lease over"],
        [
            {
                "event": "lease_over", **TASK, "group": "g", "attempt": 2,
                "reason": "lease over", "subscriber": "w",
            }
        ],
    ),
    (
        [EventKind.RELEASED, T, "t", "g", "w", [5], [2]],
        [{"event": "released", **TASK, "group": "g", "attempt": 2, "subscriber": "w"}],
    ),
    (
        [EventKind.RELEASED, T, "t", "g", "w", [5], [2], [T + 9]],
        [
            {
                "event": "released", **TASK, "group": "g", "due_ms": T + 9, "attempt": 2,
                "subscriber": "w",
            }
        ],
    ),
    (
        [EventKind.DEAD, T, "t", "g", [5], [2], ["why"]],
        [{"event": "dead", **TASK, "group": "g", "attempt": 2, "reason": "why"}],
    ),
    (
        [EventKind.DEAD, T, "t", "g", [5], [2], ["why\nhere\nand there"]],
        [
            {
                "event": "dead", **TASK, "group": "g", "attempt": 2, "reason": "why",
                "trace": "here\nand there",
            }
        ],
    ),
    ([EventKind.ENDED, T, "t", None, "cancelled", [5], None], [{"event": "cancelled", **TASK}]),
    (
        [EventKind.ENDED, T, "t", "g", "cancelled", [5], False, "replaced by 6; no"],
        [
            {
                "event": "cancelled", **TASK, "group": "g", "ended": False,
                "reason": "replaced by 6; no",
            }
        ],
    ),
    (
        [EventKind.ENDED, T, "t", "g", "expired", [5], True],
        [{"event": "expired", **TASK, "group": "g", "ended": True}],
    ),
    (
        [EventKind.ENDED, T, "t", "g", "filtered", [5], True],
        [{"event": "filtered", **TASK, "group": "g", "ended": True}],
    ),
    (
        [EventKind.ENDED, T, "t", "g", "deleted", [5], False],
        [{"event": "deleted", **TASK, "group": "g", "ended": False}],
    ),
    (
        [EventKind.RESCHEDULED, T, "t", [5], [T + 1]],
        [{"event": "rescheduled", **TASK, "due_ms": T + 1}],
    ),
    (
        [EventKind.RESCHEDULED, T, "t", [5], [T + 1], [2**63 - 1]],
        [{"event": "rescheduled", **TASK, "due_ms": T + 1, "order_id": str(2**63 - 1)}],
    ),
    (
        [EventKind.REPLACED, T, "p", [5], [T + 1], "t", {0: ["k", None, None, 3]}, [b"hi"], None],
        [
            {
                "event": "replaced", **TASK, "due_ms": T + 1, "key": "k", "priority": 3,
                "producer": "p", "body": "aGk=",
            }
        ],
    ),
    (
        [EventKind.REPLACED, T, "", [5], [T + 1], "t", {}, None, [7]],
        [{"event": "replaced", **TASK, "due_ms": T + 1, "order_id": "7"}],
    ),
    (
        [EventKind.MERGED, T, "p", "t", "kept", [5]],
        [{"event": "kept", **TASK, "producer": "p"}],
    ),
    ([EventKind.MERGED, T, "", "t", "rejected", [5]], [{"event": "rejected", **TASK}]),
    (
        [EventKind.OVERTAKEN, T, "t", "g", [5], 2, 2**63 - 1],
        [{"event": "overtaken", **TASK, "group": "g", "attempt": 2,
          "details": {"by": "9223372036854775807"}}],
    ),
    ([EventKind.REQUEUED, T, "t", "g", [5]], [{"event": "requeued", **TASK, "group": "g"}]),
    ([EventKind.REQUEUED, T, "t", "g", [5], 70],
     [{"event": "requeued", **TASK, "group": "g", "ttl_ms": 70}]),
    (
        [EventKind.GROUP, T, "t", "g", "created", {"since_ms": 0, "since_id": "7"}],
        [
            {
                "event": "group_created", "topic": "t", "group": "g", "since_ms": 0,
                "since_id": "7",
            }
        ],
    ),
    (
        [EventKind.GROUP, T, "t", None, "configured", {"paused": True}],
        [{"event": "group_configured", "topic": "t", "settings": {"paused": True}}],
    ),
    (
        [EventKind.GROUP, T, "t", "g", "deleted", {"closed_ms": 5, "closed_id": "7"}],
        [{"event": "group_deleted", "topic": "t", "group": "g",
          "settings": {"closed_ms": 5, "closed_id": "7"}}],
    ),
    (
        [EventKind.RECORD, T, "t", "g", "paused_key", "dropped", {"key": ["t", "g", "", "str a"]}],
        [{"event": "record_dropped", "topic": "t", "group": "g",
          "settings": {"record": "paused_key", "key": ["t", "g", "", "str a"]}}],
    ),
    (
        [EventKind.RECORD, T, "t", None, "claim", "put", {"of": "schedule", "name": "n"}],
        [{"event": "record_put", "topic": "t",
          "settings": {"record": "claim", "of": "schedule", "name": "n"}}],
    ),
    (
        [EventKind.DAEMON, T, "started", {"clean": False, "scheduled": 3}],
        [{"event": "started", "clean": False, "details": {"scheduled": 3}}],
    ),
    ([EventKind.DAEMON, T, "stopped", {"clean": True}], [{"event": "stopped", "clean": True}]),
    (
        [EventKind.DAEMON, T, "clock_set_back", {"position_ms": T + 9}],
        [{"event": "clock_set_back", "details": {"position_ms": T + 9}}],
    ),
    ([EventKind.DROPPED, T, 12], [{"event": "dropped", "count": 12}]),
    ([EventKind.DROPPED, T, None, "why"], [{"event": "dropped", "reason": "why"}]),
    (
        [EventKind.SCHEDULE, T, "t", "daily", "put",
         {"settings": {"cron": "@daily", "task": ["k", None, {"a": 1}, 0, 0, None, None]},
          "next_ms": T + 9, "runs": 0}, b"\x00"],
        [
            {
                "event": "schedule_put", "topic": "t", "schedule": "daily", "body": "AA==",
                "settings": {
                    "cron": "@daily", "task": {"key": "k", "props": {"a": 1}, "ttl_ms": 0},
                },
                "next_ms": T + 9, "runs": 0,
            }
        ],
    ),
    *(
        (
            [EventKind.SCHEDULE, T, "t", "daily", what, {"runs": 7}, None],
            [{"event": f"schedule_{what}", "topic": "t", "schedule": "daily", "runs": 7}],
        )
        for what in ("paused", "resumed", "deleted")
    ),
    (
        [EventKind.OCCURRENCE, T, "t", "s",
         [[T - 9, "missed", 0, 3], [T - 4, "overlap", 0, 1], [T - 3, "queued", 0, 1],
          [T - 2, "fired", 5, 1], [T, "run", 5, 1], [T + 1, "backfill", 5, 1]],
         {"next_ms": T + 9, "runs": 7, "queued_ms": T - 3}],
        [
            item | {"topic": "t", "schedule": "s", "next_ms": T + 9, "runs": 7, "queued_ms": T - 3}
            for item in (
                {"event": "occurrence_skipped", "planned_ms": T - 9, "reason": "missed",
                 "count": 3},
                {"event": "occurrence_skipped", "planned_ms": T - 4, "reason": "overlap"},
                {"event": "occurrence_queued", "planned_ms": T - 3},
                {"event": "occurrence_fired", **TASK, "planned_ms": T - 2, "lateness_ms": 2},
                {"event": "occurrence_fired", **TASK, "planned_ms": T, "lateness_ms": 0,
                 "reason": "run"},
                {"event": "occurrence_fired", **TASK, "planned_ms": T + 1, "lateness_ms": 0,
                 "reason": "backfill"},
            )
        ],
    ),
    *(
        (
            [EventKind.TRANSACTION, T, "p" if what == "prepared" else "", "x", what, 3, first,
             {"group": "g", "bytes": 9}],
            [
                {"event": f"transaction_{what}", "transaction": "x", "count": 3,
                 "details": {"group": "g", "bytes": 9}}
                | ({"producer": "p"} if what == "prepared" else {})
                | ({"task_id": "5"} if first else {})
            ],
        )
        for what, first in (
            ("prepared", 0), ("committed", 5), ("rolled_back", 0), ("checked", 0), ("parked", 0),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("record", "events"), CASES, ids=lambda value: str(value)[:40])
def test_records_are_rendered_as_events(record: list[Any], events: list[dict[str, Any]]) -> None:
    assert render(record) == events
    assert render(record, 41) == events


def test_the_cases_cover_every_event_and_field() -> None:
    made = [event for _, events in CASES for event in events]
    assert {event["event"] for event in made} == set(EVENTS)
    fields = {name for event in made for name in event} | {"v", "time_ms", "seq", *END}
    assert fields == set(FIELDS) - {"synthetic"}


@given(ANY, ANY, ANY, ANY, st.binary(max_size=30))
def test_any_text_is_read_back_unchanged(
    topic: str, key: str, who: str, reason: str, body: bytes
) -> None:
    options = [key, reason, {key: who, "n": [reason]}]
    (event,) = render([EventKind.ENQUEUED, T, who, [5], [T], topic, {0: options}, [body]])
    assert event["topic"] == topic and event["key"] == key and event["tag"] == reason
    assert event.get("producer", "") == who
    assert event["props"] == {key: who, "n": [reason]}
    assert base64.b64decode(event["body"]) == body
    (event,) = render([EventKind.NACKED, T, topic, key, who, [5], [1], [T], [reason]])
    assert (event["topic"], event.get("group", "")) == (topic, key)
    assert event.get("subscriber", "") == who
    assert (event.get("reason", ""), event.get("trace", "")) == reason.partition("\n")[::2]


@given(st.recursive(st.floats() | ANY | st.integers() | st.booleans(), st.lists, max_leaves=5))
def test_special_numbers_in_properties_are_valid_json(value: Any) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    json.loads(to_json({"p": value}), parse_constant=refuse)


@given(st.lists(st.integers() | ANY | st.lists(st.integers()) | st.none(), max_size=10))
def test_invalid_records_are_refused(record: list[Any]) -> None:
    renderer = Renderer("n", 0, 1)
    for kind in EventKind:
        try:
            lines = renderer.render([kind, T, *record], 1)
        except MALFORMED:
            continue
        for line in lines:
            json.loads(line)


def test_a_line_has_a_name_for_each_option_of_a_task() -> None:
    assert tuple(NAMES.get(name, name) for name in TaskOptions._fields) == TASK_OPTIONS
