"""The client of torture runs ends when it is told to."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from crash.link import Link, Numbers
from tickwheel.api.frames import FrameType


async def test_a_cancelled_wait_ends_despite_a_simultaneous_answer() -> None:
    reader = asyncio.StreamReader()
    link = Link(reader, Mock(is_closing=lambda: False), Numbers(), None)
    answer = link.send(FrameType.STATS)
    waiting = asyncio.create_task(link.wait(answer))
    await asyncio.sleep(0)
    answer.set_result((FrameType.OK, 1, {}))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    link.abort()
