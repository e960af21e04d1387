"""The encoding of a task from the frame to the delivery: over TCP, what is taken and what not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.shard.test_scheduling import Rig
from support.encodings import ENCODING, LONGEST, MUST_BE, RIGHT, WRONG
from support.in_process import InProcess
from tickwheel.api.frames import FrameType as T

FLOOR = 0


def encoded(encoding: Any, **options: Any) -> tuple[Any, ...]:
    return "t", b"x", 0, {"encoding": encoding, **options}


@pytest.mark.parametrize("encoding", RIGHT)
async def test_it_is_shown_and_delivered_and_the_body_is_not_looked_at(
    tmp_path: Path, encoding: str
) -> None:
    async with InProcess(tmp_path) as daemon:
        rig = Rig(daemon)
        await rig.ask(T.ENQUEUE, FLOOR, [encoded(encoding), encoded(None), ("t", b"x", 0)])
        tasks = await rig.tasks()
        assert [(task["encoding"], task["body"]) for task in tasks] == [
            (encoding, b"x"), (None, b"x"), (None, b"x"),
        ]  # fmt: skip
        _, _, found = await rig.ask(T.PULL, "t", "g", 3, 0, {"lease_ms": 60_000})
        assert [one[3:] for one in found] == [(b"x", {"encoding": encoding}), (b"x",), (b"x",)]


@pytest.mark.parametrize("encoding", WRONG, ids=repr)
async def test_what_is_no_encoding_is_refused_wherever_a_task_comes_in(
    tmp_path: Path, encoding: Any
) -> None:
    async with InProcess(tmp_path) as daemon:
        rig = Rig(daemon)
        plain = ("t", b"x", 0)
        answers = [
            ("tasks[1].", await rig.ask(T.ENQUEUE, FLOOR, [plain, encoded(encoding)])),
            ("tasks[0].", await rig.ask(T.PREPARE, "tx", "g", 1, [encoded(encoding)], None)),
            ("task.", await rig.put(task={"encoding": encoding})),
        ]
        for task, (code, message) in answers:
            assert code == "bad_request" and task + MUST_BE in message, message
        assert await rig.tasks() == []


async def test_tasks_of_a_schedule_and_of_a_transaction_have_it(tmp_path: Path) -> None:
    async with InProcess(tmp_path) as daemon:
        rig = Rig(daemon)
        made = await rig.put(task={"encoding": ENCODING})
        assert made["task"] == {"encoding": ENCODING}
        await rig.ask(T.PREPARE, "tx", "g", 1, [encoded(LONGEST)], None)
        assert len(await rig.ask(T.COMMIT, "tx")) == 3
        await rig.pass_time(10_000)
        assert sorted(task["encoding"] for task in await rig.tasks()) == [ENCODING, LONGEST]
