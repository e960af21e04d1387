"""Whoever is killed, and however often: each task arrives at least once, every signature right; and
only the leader's process sends."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbound.endpoint import SECRET, Endpoint, serving
from support.daemon import Daemon
from support.redis_server import RedisServer
from support.waiting import comes, rest, until
from tickwheel import Client, Task
from tickwheel.client import Retry

LOCAL = "127.0.0.0/8"
SENDER = b"tickwheel.outbound.process"


def sender_of(daemon: Daemon) -> int | None:
    """The process id of the process that sends for a daemon; None: it has none."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes()
        except (OSError, ValueError, IndexError):
            continue
        if parent == daemon.pid and SENDER in command:
            return int(folder.name)
    return None


async def torture(folder: Path, kills: int, tasks: int) -> None:
    chance = random.Random(kills)
    endpoint, port = Endpoint(), 0
    with Daemon(folder, push_allow=LOCAL) as daemon:
        async with serving(endpoint) as found:
            url, port = found.url, int(found.url.split(":")[2].partition("/")[0])
        ids: set[int] = set()
        async with Client(daemon.url, send_timeout=20) as client:
            await client.create_group("t", "g", retry=Retry.fixed(0.1, retries=1_000))
            await client.set_push("t", "g", url, secrets=[SECRET])
            for number in range(kills):
                made = [
                    Task("t", b"%d" % n, delay=chance.uniform(0, 1)) for n in range(tasks // kills)
                ]
                enqueued = asyncio.create_task(client.enqueue_many(made))
                async with serving(endpoint, port):
                    await rest(chance.uniform(0.1, 0.6))
                    victim = ("daemon", "sender", "endpoint")[number % 3]
                    if victim == "daemon":
                        await daemon.arestart()
                    elif victim == "sender" and (pid := sender_of(daemon)) is not None:
                        os.kill(pid, signal.SIGKILL)
                ids |= {receipt.id for receipt in await enqueued}
            async with serving(endpoint, port):
                await endpoint.until(lambda: {got.task for got in endpoint.got} >= ids, 120)
    assert len(ids) == tasks // kills * kills and not endpoint.bad
    assert {got.task for got in endpoint.got} == ids


async def test_kills_of_daemon_sender_and_endpoint_lose_no_task(tmp_path: Path) -> None:
    await torture(tmp_path, kills=6, tasks=600)


@pytest.mark.slow
async def test_a_hundred_kills_lose_no_task(tmp_path: Path) -> None:
    await torture(tmp_path, kills=100, tasks=10_000)


async def test_the_process_ends_with_its_daemon_and_is_started_again(tmp_path: Path) -> None:
    with Daemon(tmp_path, push_allow=LOCAL) as daemon:
        assert sender_of(daemon) is None, "nobody has a target"
        async with serving(Endpoint()) as endpoint, Client(daemon.url) as client:
            await client.set_push("t", "g", endpoint.url, secrets=[SECRET])
            first = until(lambda: sender_of(daemon))
            os.kill(first, signal.SIGKILL)
            await client.enqueue("t", b"x")
            await endpoint.until_count(1)
            second = sender_of(daemon)
            assert second not in (None, first)
            await daemon.akill()
            await comes(lambda: not Path(f"/proc/{second}").exists())
            await daemon.astart()
            await client.enqueue("t", b"y")
            await endpoint.until_count(2)
            third = sender_of(daemon)
            assert third is not None
            await daemon.aterminate()
            await comes(lambda: not Path(f"/proc/{third}").exists())


async def test_a_stop_acks_requests_under_way(tmp_path: Path) -> None:
    """A stop in order has nothing sent twice."""
    async with serving(Endpoint()) as endpoint:
        with Daemon(tmp_path, push_allow=LOCAL) as daemon:
            async with Client(daemon.url) as client:
                await client.set_push("t", "g", endpoint.url, secrets=[SECRET])
                await client.enqueue_many([Task("t", b"%d" % n) for n in range(500)])
                await endpoint.until_count(50)
            await daemon.arestart(kill=False)
            await endpoint.until(lambda: len({got.task for got in endpoint.got}) == 500)
        assert len(endpoint.got) == 500


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path / "redis").start().lay_out()
    yield made
    made.kill()


async def test_only_the_leader_sends_also_through_a_takeover(
    redis: RedisServer, tmp_path: Path
) -> None:
    options = {"store": redis.url(), "push_allow": LOCAL, "leader_ttl_s": 3}
    with Daemon(tmp_path / "a", **options) as first, Daemon(tmp_path / "b", **options) as second:
        async with (
            serving(Endpoint()) as endpoint,
            Client(f"{first.url},{second.url}", send_timeout=20) as client,
        ):
            await client.set_push("t", "g", endpoint.url, secrets=[SECRET])
            before = {task.id for task in await client.enqueue_many([Task("t", b"a")] * 50)}
            await endpoint.until(lambda: {got.task for got in endpoint.got} >= before)
            leader, other = (first, second) if sender_of(first) else (second, first)
            assert sender_of(leader) and sender_of(other) is None
            await leader.akill()
            after = {task.id for task in await client.enqueue_many([Task("t", b"b")] * 50)}
            await endpoint.until(lambda: {got.task for got in endpoint.got} >= before | after, 60)
            assert sender_of(other)
            await leader.astart()
            await rest(1.0)
            assert sender_of(leader) is None
        assert not endpoint.bad
