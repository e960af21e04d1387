"""Why a delivery was late, as a real daemon's metrics and history say it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web

from observe.test_failover_metrics import scraped
from outbound.endpoint import SECRET, Endpoint, serving
from support.daemon import Daemon
from support.history_daemon import daemon_in, taken_up
from support.history_rig import read_all
from support.redis_server import RedisServer
from support.steering import WallClock
from support.waiting import comes
from tickwheel import Client
from tickwheel.model.lateness import LATE_MS, Cause

ENOUGH_S = 5 * LATE_MS / 1000
"""Seconds of lateness that a busy machine does not add by itself."""
PREFETCH = 2
"""Prefetch of a push with one request at a time."""
NAME = "tickwheel_lateness_cause_seconds_count"
AGE = "tickwheel_oldest_ready_age_seconds t g"


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    return daemon_in(tmp_path, http=True)


async def has_aged(daemon: Daemon, age_s: float = ENOUGH_S) -> None:
    """Wait until the oldest ready task is `age_s` seconds old."""
    await comes(lambda: scraped(daemon).get(AGE, 0.0) >= age_s)


async def has_passed(due_s: float) -> None:
    """Wait until a delivery due at `due_s` would be late."""
    await comes(lambda: time.time() >= due_s + ENOUGH_S)


async def blamed(daemon: Daemon, cause: Cause, count: int = 1) -> None:
    """``cause`` has been counted so often, and no other but what a busy machine adds; when the
    daemon is over, its history says the same."""
    counts = {item: scraped(daemon)[f"{NAME} {item}"] for item in Cause}
    busy = {Cause.LOOP_BUSY, Cause.STORE} - {cause}
    wanted = {cause: count} if count else {}
    assert {one: n for one, n in counts.items() if n and one not in busy} == wanted
    assert await daemon.aterminate() == 0
    history = Path(daemon.settings["history_dir"])
    await taken_up(history)
    events = [e for e in read_all(history) if e["event"] == "delivered" and e["attempt"] == 1]
    causes = [e["cause"] for e in events if e["lateness_ms"] > LATE_MS]
    assert [item for item in causes if item not in busy] == [cause.value] * count
    assert not any("cause" in e for e in events if e["lateness_ms"] <= LATE_MS)


async def take(client: Client, wait: float = 20.0) -> None:
    (delivery,) = await client.pull("t", group="g", wait=wait)
    await delivery.ack()


async def is_sending(client: Client) -> bool:
    (target,) = await client.targets()
    return target.state == "sending"


async def test_a_slow_push_endpoint_is_the_cause(tmp_path: Path) -> None:
    daemon = daemon_in(tmp_path, http=True, push_allow="127.0.0.0/8")
    answers = asyncio.Event()

    async def answer(_request: web.Request) -> web.StreamResponse:
        await answers.wait()
        return web.Response()

    async with daemon, Client(daemon.url) as client, serving(Endpoint(answer=answer)) as endpoint:
        await client.set_push("t", "g", endpoint.url, secrets=[SECRET], concurrency=1)
        await comes(partial(is_sending, client))
        for _ in range(PREFETCH + 1):
            await client.enqueue("t", b"x")
        await has_aged(daemon)
        answers.set()
        await endpoint.until_count(PREFETCH + 1)
        await blamed(daemon, Cause.ENDPOINT)


async def test_a_stopped_daemon_is_the_cause(daemon: Daemon) -> None:
    async with daemon:
        async with Client(daemon.url) as client:
            await client.create_group("t", "g")
            due_s = time.time() + 0.3
            await client.enqueue("t", b"x", delay=0.3)
        await daemon.akill()
        await has_passed(due_s)
        await daemon.astart()
        async with Client(daemon.url) as client:
            await take(client)
            await blamed(daemon, Cause.DAEMON_DOWN)


@pytest.mark.slow  # engine/test_lateness.py
async def test_a_wait_before_a_restart_has_an_unknown_cause(tmp_path: Path) -> None:
    clock = WallClock(tmp_path / "clock")
    daemon = daemon_in(tmp_path, http=True, env=clock.env)
    async with daemon:
        async with Client(daemon.url) as client:
            await client.create_group("t", "g")
            await client.enqueue("t", b"x")
            await has_aged(daemon, 0.001)
            clock.step(3_600_000)
            await has_aged(daemon, 3_600.0)
            # The store learns with it that the daemon was up until then.
            await client.enqueue("u", b"y", delay=3_600)
        assert await daemon.aterminate() == 0
        await daemon.astart()
        async with Client(daemon.url) as client:
            await take(client)
            await blamed(daemon, Cause.UNKNOWN)


@pytest.mark.slow  # engine/test_lateness.py
async def test_a_clock_jump_is_the_cause(tmp_path: Path) -> None:
    clock = WallClock(tmp_path / "clock")
    daemon = daemon_in(tmp_path, http=True, env=clock.env)
    async with daemon, Client(daemon.url) as client:
        subscription = client.subscribe("t", group="g")
        await client.enqueue("t", b"x", delay=60)
        clock.step(120_000)
        await (await anext(subscription)).ack()
        await blamed(daemon, Cause.CLOCK)


async def test_a_busy_loop_is_the_cause(daemon: Daemon) -> None:
    async with daemon, Client(daemon.url) as client:
        subscription = client.subscribe("t", group="g")
        due_s = time.time() + 0.3
        await client.enqueue("t", b"x", delay=0.3)
        daemon.pause()
        await has_passed(due_s)
        daemon.go_on()
        await (await anext(subscription)).ack()
        await blamed(daemon, Cause.LOOP_BUSY)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis").start()
    yield server
    server.kill()


async def test_an_unavailable_store_is_the_cause(redis: RedisServer, tmp_path: Path) -> None:
    redis.lay_out()
    daemon = daemon_in(tmp_path, http=True, store=redis.url())
    async with daemon, Client(daemon.url) as client:
        subscription = client.subscribe("t", group="g")
        await client.enqueue("t", b"x")
        await (await anext(subscription)).ack()
        redis.pause()
        due_s = time.time()
        asked = asyncio.ensure_future(client.enqueue("t", b"x"))
        await has_passed(due_s)
        redis.go_on()
        await asked
        await (await anext(subscription)).ack()
        await blamed(daemon, Cause.STORE)
