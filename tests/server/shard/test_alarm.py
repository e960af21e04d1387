"""An alarm rings once, not before its moment, and with the event loop's timer where it must."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tickwheel.server.shard import shard as shard_module
from tickwheel.server.shard.shard import NS_PER_SECOND, Alarm

SOON_NS = 3_000_000
HOUR_NS = 3600 * NS_PER_SECOND
PATIENCE_S = 30


class Rings:
    """Notes when it rings."""

    def __init__(self) -> None:
        self.at_ns: list[int] = []
        self._rang = asyncio.Event()

    def __call__(self) -> None:
        self.at_ns.append(time.monotonic_ns())
        self._rang.set()

    async def wait(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self._rang.wait()
        self._rang.clear()


@pytest.fixture(params=["timerfd", "loop"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "loop":
        monkeypatch.setattr(shard_module, "_libc", _no_library)
    return request.param


def _no_library() -> None:
    raise OSError("no such library")


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_an_alarm_rings_once_and_never_early(kind: str) -> None:
    rings = Rings()
    alarm = Alarm(rings)
    assert (alarm._fd is not None) is (kind == "timerfd")
    for _ in range(20):
        set_ns = time.monotonic_ns()
        alarm.set(SOON_NS)
        await rings.wait()
        # The loop's own timers go by whole milliseconds.
        early_ns = 0 if kind == "timerfd" else 1_000_000
        assert rings.at_ns[-1] - set_ns >= SOON_NS - early_ns
    alarm.close()
    assert len(rings.at_ns) == 20


async def test_the_last_setting_of_an_alarm_counts(kind: str) -> None:
    rings = Rings()
    alarm = Alarm(rings)
    alarm.set(1)
    alarm.set(HOUR_NS)
    for _ in range(10):
        await asyncio.sleep(0.001)  # real time: the first would have rung
    assert not rings.at_ns
    alarm.set(HOUR_NS)
    alarm.set(-5)  # it is over: at once
    await rings.wait()
    alarm.close()
    assert len(rings.at_ns) == 1


async def test_an_alarm_reset_at_its_moment_rings_once(kind: str) -> None:
    rings = Rings()
    alarm = Alarm(rings)
    alarm.set(1)
    time.sleep(0.002)  # noqa: ASYNC251  # real time: it is over, and the loop does not know yet
    alarm.set(HOUR_NS)
    await asyncio.sleep(0.002)  # real time: the loop looks
    assert not rings.at_ns
    alarm.close()


async def test_a_closed_alarm_is_silent_and_keeps_no_descriptor(kind: str) -> None:
    before = _open_files()
    rings = Rings()
    alarm = Alarm(rings)
    alarm.set(1)
    time.sleep(0.002)  # noqa: ASYNC251  # real time: its moment passes
    alarm.close()
    alarm.close()
    await asyncio.sleep(0.002)  # real time: the loop looks
    assert not rings.at_ns
    assert _open_files() == before


async def test_an_alarm_without_a_descriptor_uses_the_loops_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> int:
        return -1

    libc = shard_module._libc()
    monkeypatch.setattr(shard_module, "_libc", lambda: _Libc(full, libc.timerfd_settime))
    rings = Rings()
    alarm = Alarm(rings)
    assert alarm._fd is None
    alarm.set(SOON_NS)
    await rings.wait()
    alarm.close()


class _Libc:
    def __init__(self, make: Callable[..., int], set_time: Callable[..., int]) -> None:
        self.timerfd_create, self.timerfd_settime = make, set_time
