"""The trace of a task from the frame to the delivery: over TCP, what is taken and what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.shard.test_scheduling import Rig
from support.in_process import InProcess
from support.traces import LOWEST, MUST_BE, OTHER, RIGHT, TRACE, WRONG
from tickwheel.api.frames import FrameType as T

FLOOR = 0


def traced(trace: Any, **options: Any) -> tuple[Any, ...]:
    return "t", b"x", 0, {"trace": trace, **options}


async def deliveries(rig: Rig, count: int) -> list[Any]:
    _, _, found = await rig.ask(T.PULL, "t", "g", count, 0, {"lease_ms": 60_000})
    return list(found)


@pytest.mark.parametrize("trace", RIGHT)
async def test_it_is_shown_and_delivered(tmp_path: Path, trace: str) -> None:
    async with InProcess(tmp_path) as daemon:
        rig = Rig(daemon)
        await rig.ask(T.ENQUEUE, FLOOR, [traced(trace), traced(None), ("t", b"x", 0)])
        assert [task["trace"] for task in await rig.tasks()] == [trace, None, None]
        found = await deliveries(rig, 3)
        assert [delivery[4:] for delivery in found] == [({"trace": trace},), (), ()]


async def test_it_stands_beside_every_other_option(tmp_path: Path) -> None:
    async with InProcess(tmp_path) as daemon:
        rig = Rig(daemon)
        others = {"key": "k", "tag": "g", "properties": {"n": 1}, "priority": 7, "order_key": "o"}
        await rig.ask(T.ENQUEUE, FLOOR, [traced(TRACE, ttl_ms=9_000, **others), traced(OTHER)])
        first, second = await deliveries(rig, 2)
        assert (first[4], second[4]) == (others | {"trace": TRACE}, {"trace": OTHER})


@pytest.mark.parametrize("trace", WRONG, ids=repr)
async def test_what_is_no_trace_is_refused_wherever_a_task_comes_in(
    tmp_path: Path, trace: Any
) -> None:
    async with InProcess(tmp_path) as daemon:
        rig = Rig(daemon)
        plain = ("t", b"x", 0)
        answers = [
            ("tasks[1].", await rig.ask(T.ENQUEUE, FLOOR, [plain, traced(trace)])),
            ("tasks[0].", await rig.ask(T.PREPARE, "tx", "g", 1, [traced(trace)], None)),
            ("task.", await rig.put(task={"trace": trace})),
        ]
        for task, (code, message) in answers:
            assert code == "bad_request" and task + MUST_BE in message, message
        assert await rig.tasks() == []


async def test_tasks_of_a_schedule_and_of_a_transaction_have_it(tmp_path: Path) -> None:
    async with InProcess(tmp_path) as daemon:
        rig = Rig(daemon)
        made = await rig.put(task={"trace": TRACE})
        assert made["task"] == {"trace": TRACE}
        await rig.ask(T.PREPARE, "tx", "g", 1, [traced(LOWEST)], None)
        assert len(await rig.ask(T.COMMIT, "tx")) == 3
        await rig.pass_time(10_000)
        assert sorted(task["trace"] for task in await rig.tasks()) == [LOWEST, TRACE]
