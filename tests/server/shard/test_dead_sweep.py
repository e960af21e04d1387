"""When dead letters will be deleted is known before they are: an alert rests on it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from support.in_process import InProcess
from tickwheel.api.frames import FrameType as T
from tickwheel.server.shard import background

DAY_MS = 86_400_000


class Over(Exception):
    """The test has seen enough rounds."""


async def die(daemon: InProcess) -> tuple[int, int]:
    """A new dead letter: its task, and when it died."""
    peer = daemon.connect()
    peer.send(T.SUBSCRIBE, 1, "t", "g", 10, {})
    peer.send(T.ENQUEUE, 0, [("t", b"x", 0)])
    await daemon.settle()
    frames: list[Any] = peer.frames()
    (delivery,) = [frame for frame in frames if frame[0] == T.DELIVER]
    task_id, attempt = delivery[4][0][:2]
    peer.send(T.REJECT, "t", "g", [(task_id, delivery[2], attempt, None)])
    peer.send(T.UNSUBSCRIBE, 1)
    await daemon.settle()
    return task_id, daemon.sources.now_ms


async def test_the_next_dead_letter_expiry_follows_the_oldest(
    daemon: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, first_ms = await die(daemon)
    daemon.sources.now_ms += DAY_MS
    _, second_ms = await die(daemon)
    shown: list[float] = []
    observed = daemon.daemon.roles.observed

    async def between_rounds(_: float) -> None:
        shown.append(observed.dead_expire_s * 1000)
        if len(shown) == 1:
            daemon.sources.now_ms = first_ms + 12 * DAY_MS
        elif len(shown) == 2:  # it is looked for again, as its end is near
            peer = daemon.connect()
            peer.send(T.DEAD_DELETE, [(first, "g")])
            await daemon.settle()
            daemon.sources.now_ms += DAY_MS // 10
        elif len(shown) == 3:
            daemon.sources.now_ms = second_ms + 14 * DAY_MS
        else:
            raise Over

    quick = SimpleNamespace(sleep=between_rounds)
    monkeypatch.setattr(background, "asyncio", SimpleNamespace(**vars(asyncio) | vars(quick)))
    with suppress(Over):
        await daemon.shard.upkeep._sweep_forever()
    first_end_ms, second_end_ms = first_ms + 14 * DAY_MS, second_ms + 14 * DAY_MS
    assert shown == [first_end_ms, first_end_ms, second_end_ms, 0]
    assert daemon.shard.core.totals.dead_expired == 1
