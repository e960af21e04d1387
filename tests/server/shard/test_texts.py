"""The trace and the encoding of a task from the frame to the delivery: over TCP, what is taken and
what is not."""

from __future__ import annotations

from typing import Any

import pytest

from server.shard.test_scheduling import SchedulingRig
from support import encodings, traces
from support.in_process import InProcess
from support.traces import OTHER, TRACE
from tickwheel.api.frames import FrameType as T

FLOOR = 0
TEXTS = (("trace", traces), ("encoding", encodings))
MUST_BE = {name: texts.MUST_BE for name, texts in TEXTS}
TWO = {"trace": (traces.LOWEST, TRACE), "encoding": (encodings.ENCODING, encodings.LONGEST)}
"""Two right ones, in order."""


@pytest.fixture
async def rig(daemon: InProcess) -> SchedulingRig:
    return SchedulingRig(daemon)


def with_text(name: str, text: Any, **options: Any) -> tuple[Any, ...]:
    return "t", b"x", 0, {name: text, **options}


async def deliveries(rig: SchedulingRig, count: int) -> list[Any]:
    _, _, found = await rig.ask(T.PULL, "t", "g", count, 0, {"lease_ms": 60_000})
    return list(found)


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in TEXTS for text in texts.RIGHT]
)
async def test_trace_and_encoding_are_stored_and_delivered(
    name: str, text: str, rig: SchedulingRig
) -> None:
    tasks = [with_text(name, text), with_text(name, None), ("t", b"x", 0)]
    await rig.ask(T.ENQUEUE, FLOOR, tasks)
    shown = [(task[name], task["body"]) for task in await rig.tasks()]
    assert shown == [(text, b"x"), (None, b"x"), (None, b"x")]
    result = await deliveries(rig, 3)
    assert [item[3:] for item in result] == [(b"x", {name: text}), (b"x",), (b"x",)]


async def test_trace_works_with_every_other_option(rig: SchedulingRig) -> None:
    others = {"key": "k", "tag": "g", "properties": {"n": 1}, "priority": 7, "order_key": "o"}
    first = with_text("trace", TRACE, ttl_ms=9_000, **others)
    await rig.ask(T.ENQUEUE, FLOOR, [first, with_text("trace", OTHER)])
    first, second = await deliveries(rig, 2)
    assert (first[4], second[4]) == (others | {"trace": TRACE}, {"trace": OTHER})


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in TEXTS for text in texts.WRONG], ids=repr
)
async def test_an_invalid_text_option_is_refused_on_every_path(
    name: str, text: Any, rig: SchedulingRig
) -> None:
    plain, wrong = ("t", b"x", 0), with_text(name, text)
    answers = [
        ("tasks[1].", await rig.ask(T.ENQUEUE, FLOOR, [plain, wrong])),
        ("tasks[0].", await rig.ask(T.PREPARE, "tx", "g", 1, [wrong], None)),
        ("task.", await rig.put(task={name: text})),
    ]
    for task, (code, message) in answers:
        assert code == "bad_request" and task + MUST_BE[name] in message, message
    assert await rig.tasks() == []


@pytest.mark.parametrize("name", TWO)
async def test_schedules_and_transactions_keep_text_options(rig: SchedulingRig, name: str) -> None:
    one, other = TWO[name]
    made = await rig.put(task={name: one})
    assert made["task"] == {name: one}
    await rig.ask(T.PREPARE, "tx", "g", 1, [with_text(name, other)], None)
    assert len(await rig.ask(T.COMMIT, "tx")) == 3
    await rig.pass_time(10_000)
    assert sorted(task[name] for task in await rig.tasks()) == [one, other]
