"""The client, ``status`` and ``init`` with two real daemons on one real Redis."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.cli_runner import Cli
from support.daemon import Daemon
from support.redis_server import RedisServer
from support.waiting import comes, rest
from tickwheel import Client, Delivery
from tickwheel.client import Status, statuses

TAKEOVER_S = 5.0
"""Until the standby delivers, with the default time to live of 3 s."""
TIMEOUT_S = 60.0
Pair = tuple[Daemon, Daemon]
End = Callable[[Daemon], Any]


@pytest.fixture
async def pair(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """The active daemon and its standby. The parameter is the settings of their lease."""
    server = await asyncio.to_thread(lambda: RedisServer(tmp_path / "redis").start().lay_out())
    options: dict[str, Any] = {"store": server.url(), **getattr(request, "param", {})}
    try:
        async with (
            Daemon(tmp_path / "first", **options) as first,
            Daemon(tmp_path / "second", **options) as second,
        ):
            yield first, second
    finally:
        server.kill()


def addresses(*daemons: Daemon) -> str:
    return ",".join(daemon.url for daemon in daemons)


async def command(daemon: Daemon, *words: str, expect: int) -> str:
    """A call of the command line; what it says on both streams."""
    done = await asyncio.to_thread(Cli(daemon).run, *words, expect=expect)
    return (done.stdout + done.stderr).decode()


ENDS = [
    pytest.param(Daemon.kill, id="SIGKILL"),
    pytest.param(Daemon.pause, id="SIGSTOP", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("end", ENDS)
async def test_subscribers_follow_to_the_standby(pair: Pair, end: End) -> None:
    active, standby = pair
    got: list[Delivery] = []

    async def consume(client: Client) -> None:
        async for delivery in client.subscribe("t"):
            got.append(delivery)
            delivery.ack_nowait()

    async with Client(addresses(active, standby)) as client:
        await client.enqueue("t", b"before")
        await client.enqueue("t", b"after", delay=4.0)
        consuming = asyncio.create_task(consume(client))
        await comes(lambda: got, TAKEOVER_S)
        end(active)
        await comes(lambda: len(got) == 2, TAKEOVER_S)
        consuming.cancel()
        assert [delivery.body for delivery in got] == [b"before", b"after"]
        assert got[1].epoch > got[0].epoch
        assert (await client.status()).address == standby.url
        if end is Daemon.pause:
            active.go_on()
            await comes(
                lambda: "deposed" in active.log_text() or "standby" in active.log_text(), TAKEOVER_S
            )
            result = await statuses(addresses(active, standby))
            roles = [answer.role for answer in result.values() if isinstance(answer, Status)]
            assert roles == ["standby", "active"]
        assert len(got) == 2, "nothing that was acked comes again"


@pytest.mark.parametrize("end", ENDS)
async def test_enqueues_under_way_are_stored_once(pair: Pair, end: End) -> None:
    active, standby = pair
    async with Client(addresses(standby, active), retries=4) as client:
        futures = []
        for number in range(300):
            futures.append(client.enqueue_nowait("t", b"%d" % number, delay=3600))
            if number == 100:
                end(active)
            await rest(0.005)  # so that they are many frames
        receipts = await asyncio.gather(*futures)
        assert len({receipt.id for receipt in receipts}) == 300
        stored = [task async for task in client.list_tasks(topic="t")]
        assert sorted(task.id for task in stored) == sorted(receipt.id for receipt in receipts)


async def test_the_address_of_a_standby_is_enough(pair: Pair) -> None:
    active, standby = pair
    async with Client(standby.url) as client:
        assert (await client.status()).address == active.url


async def test_status_shows_the_leader_and_init_refuses(pair: Pair) -> None:
    active, standby = pair
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        out = await command(standby, "status", "--json", expect=0)
        by_url = {line["url"]: line for line in map(json.loads, out.splitlines())}
        if by_url[standby.url]["active"]["epoch"]:
            break  # a leader has it a moment after its lease, and a standby looks now and then
        assert time.monotonic() < deadline_s
    assert by_url[standby.url]["role"] == "standby"
    assert by_url[active.url]["role"] == "active"
    assert by_url[active.url]["epoch"] == by_url[standby.url]["active"]["epoch"]
    answer = await command(active, "init", "--store", active.store, "--force", "--yes", expect=1)
    assert f"at {active.url} leads" in answer
    active.kill()
    standby.kill()
    assert "unreachable" in await command(standby, "status", expect=3)


@pytest.mark.parametrize("pair", [{"leader_ttl_s": 60}], indirect=True)
async def test_status_without_a_leader_exits_with_1(pair: Pair) -> None:
    active, standby = pair
    active.pause()
    try:
        out = await command(standby, "status", expect=1)
        assert "standby" in out
        assert "unreachable" in out
    finally:
        active.go_on()
