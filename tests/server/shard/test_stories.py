"""Look-ups in the history: by a process of its own that is replaced when it dies, one at a time."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any

import pytest

from history.test_story import TASK, write
from support.waiting import comes
from tickwheel.errors import Overloaded
from tickwheel.history import read, segments
from tickwheel.server.shard import overview
from tickwheel.server.shard.overview import Stories

DEAF = [sys.executable, "-c", "import sys; sys.stdin.read()"]
DEAD = [sys.executable, "-c", "pass"]
RUBBISH = [sys.executable, "-c", "print('no JSON')"]


async def ended(pid: int) -> None:
    """The process is no more."""
    async with asyncio.timeout(60):
        while True:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return
            await asyncio.sleep(0.01)  # real time: another process


def pid_of(stories: Stories) -> int:
    assert stories._process is not None
    return stories._process.pid


async def test_history_is_read_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 5)

    def read_here(*_: object) -> None:
        raise AssertionError("the event loop's interpreter reads a history")

    for module, name in ((segments, "parse_line"), (segments, "raw_lines"), (read, "search")):
        monkeypatch.setattr(module, name, read_here)
    monkeypatch.setattr(read, "story", read_here)
    stories = Stories(str(tmp_path))
    try:
        for _ in range(3):
            events, is_whole = await stories.of(TASK)
            assert is_whole and len(events) == 5
        first = pid_of(stories)
        await stories.of(7)
        assert pid_of(stories) == first, "one process for all"
    finally:
        await stories.stop()
    await ended(first)


async def test_a_dead_history_reader_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, 5)
    stories = Stories(str(tmp_path))
    try:
        await stories.of(TASK)
        first = pid_of(stories)
        os.kill(first, 9)
        await ended(first)
        assert len((await stories.of(TASK))[0]) == 5
        assert pid_of(stories) != first
    finally:
        await stories.stop()


@pytest.mark.parametrize("command", [DEAF, DEAD, RUBBISH, ["/nowhere/at/all"]])
async def test_an_unresponsive_history_reader_is_ended_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(read, "lookup_command", lambda folder: command)
    monkeypatch.setattr(overview, "PATIENCE_S", 0.2 if command is DEAF else 30.0)
    stories = Stories(str(tmp_path))
    with pytest.raises(Overloaded, match="does not answer"):
        await stories.of(TASK)
    assert stories._process is None
    await stories.stop()


async def test_a_cancelled_history_question_does_not_answer_the_next(tmp_path: Path) -> None:
    write(tmp_path, 5)
    stories = Stories(str(tmp_path))
    try:
        await stories.of(7)
        first = pid_of(stories)
        asking = asyncio.create_task(stories.of(TASK))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await ended(first)
        assert await stories.of(7) == ([], True)
    finally:
        await stories.stop()


async def test_the_history_reader_ends_when_idle_or_with_the_tenure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    stories = Stories(str(tmp_path))
    await stories.of(TASK)
    pid = pid_of(stories)
    monkeypatch.setattr(overview, "IDLE_S", 0.0)
    assert len((await stories.of(TASK))[0]) == 1
    await ended(pid)
    assert stories._process is None
    await stories.stop()
    await stories.stop()
    with pytest.raises(Overloaded):
        await stories.of(TASK)
    assert stories._process is None
    await stories.stop()


@pytest.mark.parametrize("is_cut_off", [False, True])
async def test_a_stopped_history_reader_is_gone_when_its_question_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cut_off: bool
) -> None:
    """And no other one is started for it, when it was the tenure that ended."""
    begun: list[Process] = []
    begin = overview.start_process

    async def noting(*given: Any, **options: Any) -> Process:
        begun.append(await begin(*given, **options))
        return begun[-1]

    monkeypatch.setattr(overview, "start_process", noting)
    monkeypatch.setattr(read, "lookup_command", lambda folder: DEAF)
    stories = Stories(str(tmp_path))
    asking = asyncio.create_task(stories.of(TASK))
    await comes(lambda: begun)
    if is_cut_off:
        asking.cancel()
    else:
        await stories.stop()
    (error,) = await asyncio.gather(asking, return_exceptions=True)
    assert isinstance(error, asyncio.CancelledError if is_cut_off else Overloaded)
    assert [process.returncode is not None for process in begun] == [True]
    await stories.stop()
