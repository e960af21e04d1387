"""The breaker of a host, with the event loop's clock moved by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tickwheel.outbound.push import FAILURES_MAX, HOST_REQUESTS_MAX, OPEN_MAX_S, OPEN_S, Host


class HandLoop(asyncio.SelectorEventLoop):
    """Its time is moved by hand."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s

    async def jump(self, span_s: float) -> None:
        self.ahead_s += span_s
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
def loop() -> Iterator[HandLoop]:
    made = HandLoop()
    yield made
    made.close()


async def fail(host: Host, count: int) -> None:
    for _ in range(count):
        async with host.entered():
            host.failed()


def test_the_breaker_opens_probes_and_closes(loop: HandLoop) -> None:
    async def play() -> None:
        host, through = Host(), list[int]()

        async def one(number: int, *, works: bool) -> None:
            async with host.entered():
                through.append(number)
                if works:
                    host.succeeded()
                else:
                    host.failed()

        await fail(host, FAILURES_MAX - 1)
        assert not host.is_open
        await fail(host, 1)
        assert host.is_open
        first = asyncio.create_task(one(1, works=False))
        await loop.jump(OPEN_S * 0.5)
        assert through == []
        await loop.jump(OPEN_S * 0.6)
        await first
        assert through == [1] and host.is_open
        others = [asyncio.create_task(one(n, works=True)) for n in (2, 3, 4)]
        await loop.jump(OPEN_S * 1.5)
        assert through == [1], "the second time it stays open for longer"
        await loop.jump(OPEN_S)
        await asyncio.gather(*others)
        assert sorted(through) == [1, 2, 3, 4] and not host.is_open

    loop.run_until_complete(play())


def test_only_one_probe_runs_at_a_time(loop: HandLoop) -> None:
    async def play() -> None:
        host, entered, leave = Host(), list[int](), asyncio.Event()

        async def one(number: int) -> None:
            async with host.entered():
                entered.append(number)
                await leave.wait()
                host.succeeded()

        await fail(host, FAILURES_MAX)
        tasks = [asyncio.create_task(one(number)) for number in range(3)]
        await loop.jump(OPEN_S * 1.1)
        assert len(entered) == 1
        leave.set()
        await asyncio.gather(*tasks)
        assert len(entered) == 3

    loop.run_until_complete(play())


def test_a_cancelled_probe_allows_the_next(loop: HandLoop) -> None:
    async def play() -> None:
        host, entered = Host(), asyncio.Event()

        async def hangs() -> None:
            async with host.entered():
                entered.set()
                await asyncio.Event().wait()

        async def works() -> None:
            async with host.entered():
                host.succeeded()

        await fail(host, FAILURES_MAX)
        probe, other = asyncio.create_task(hangs()), asyncio.create_task(works())
        await loop.jump(OPEN_S * 1.1)
        assert entered.is_set() and not other.done()
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)
        await other
        assert not host.is_open

    loop.run_until_complete(play())


def test_the_open_time_is_bounded(loop: HandLoop) -> None:
    async def play() -> None:
        host = Host()
        await fail(host, FAILURES_MAX)
        for _ in range(20):
            await_probe = asyncio.create_task(fail(host, 1))
            await loop.jump(OPEN_MAX_S * 1.01)
            await await_probe

    loop.run_until_complete(play())


def test_failures_under_way_do_not_prolong_the_open_time(loop: HandLoop) -> None:
    async def play() -> None:
        host = Host()
        for _ in range(5 * FAILURES_MAX):
            host.failed()
        probe = asyncio.create_task(fail(host, 1))
        await loop.jump(OPEN_S * 1.1)
        await probe

    loop.run_until_complete(play())


def test_concurrent_requests_to_a_host_are_limited(loop: HandLoop) -> None:
    async def play() -> None:
        host, inside, most = Host(), 0, 0

        async def one() -> None:
            nonlocal inside, most
            async with host.entered():
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0)
                inside -= 1

        await asyncio.gather(*(one() for _ in range(3 * HOST_REQUESTS_MAX)))
        assert most == HOST_REQUESTS_MAX

    loop.run_until_complete(play())
