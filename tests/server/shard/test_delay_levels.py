"""A task may name a level of the daemon's table instead of a delay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.in_process import InProcess
from support.shard_rig import NOW_MS
from tickwheel.api.frames import FrameType as T
from tickwheel.errors import BadRequest
from tickwheel.limits import DELAY_LEVELS, DELAY_LEVELS_MAX, delay_of_level, parse_delay_levels
from tickwheel.protocol import encode


async def enqueue(daemon: InProcess, *tasks: Any) -> Any:
    """What the daemon says of them: a due time each, or the error."""
    peer = daemon.connect()
    peer.feed(encode((int(T.ENQUEUE), 50, 0, tasks)))
    await daemon.settle()
    (answer,) = [frame for frame in peer.frames() if frame[1] == 50]
    if answer[0] == T.ERROR:
        return answer[2:]
    peer.feed(encode((int(T.LOOKUP), 51, answer[2][1])))
    await daemon.settle()
    (found,) = [frame for frame in peer.frames() if frame[1] == 51]
    return [task["due_ms"] - NOW_MS for task in found[2]]


async def test_levels_over_the_highest_use_the_highest_delay(tmp_path: Path) -> None:
    levels = (1, 2, 3, 18, 19, 2**31 - 1)
    tasks = [("t", b"", None, {"delay_level": level}) for level in levels]
    async with InProcess(tmp_path) as daemon:
        result = await enqueue(daemon, *tasks)
    assert result == [1_000, 5_000, 10_000, 7_200_000, 7_200_000, 7_200_000]


async def test_the_table_is_a_setting(tmp_path: Path) -> None:
    async with InProcess(tmp_path, delay_levels="7m 1d") as daemon:
        result = await enqueue(
            daemon,
            ("t", b"", None, {"delay_level": 1}),
            ("t", b"", None, {"delay_level": 2}),
        )
    assert result == [420_000, 86_400_000]


@pytest.mark.parametrize(
    ("delay_ms", "options", "words"),
    [
        (None, {"delay_level": 0}, "delay_level must be an integer between 1 and 2147483647"),
        (None, {"delay_level": "3"}, "delay_level must be an integer"),
        (5, {"delay_level": 3}, "must have one of delay_ms, due_ms and delay_level"),
        (None, {"delay_level": 3, "due_ms": 9}, "must have one of delay_ms, due_ms and"),
    ],
)
async def test_invalid_delay_levels_are_refused(
    delay_ms: int | None, options: dict[str, Any], words: str, daemon: InProcess
) -> None:
    code, message = await enqueue(daemon, ("t", b"", delay_ms, options))
    assert code == BadRequest.code and words in message
    assert daemon.shard.core.tasks == 0


def test_a_table_may_have_as_many_levels_as_its_limit_says() -> None:
    assert len(parse_delay_levels("1s " * DELAY_LEVELS_MAX)) == DELAY_LEVELS_MAX
    with pytest.raises(
        ValueError, match=f"between 1 and {DELAY_LEVELS_MAX}, not {DELAY_LEVELS_MAX + 1}"
    ):
        parse_delay_levels("1s " * (DELAY_LEVELS_MAX + 1))


def test_the_default_table_is_that_of_rocketmq() -> None:
    levels_ms = parse_delay_levels(DELAY_LEVELS)
    assert len(levels_ms) == 18
    assert (delay_of_level(levels_ms, 5), delay_of_level(levels_ms, 14)) == (60_000, 600_000)
