"""Whoever is killed, and however often: each task has arrived at least once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import redis as redis_module

from support.daemon import Daemon
from support.rabbitmq_server import RabbitServer
from support.redis_server import RedisServer
from tests.outbound.brokers import declare_queue, drained
from tests.outbound.forwarding import Forwarder, survive

SURVIVORS = {"deaths_max": 1000, "death_retry_base_s": 0.1, "death_retry_cap_s": 0.1}
"""Every kill of the forwarder is a death for all that it has; here that is nobody's fault."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path / "daemon", **SURVIVORS) as made:
        yield made


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path / "redis").start()
    yield made
    made.kill()


@pytest.fixture
def rabbit(tmp_path: Path) -> Iterator[RabbitServer]:
    made = RabbitServer(tmp_path / "rabbit").start()
    yield made
    made.stop()


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
async def test_kills_lose_no_task_on_the_way_to_redis(
    kills: int, daemon: Daemon, redis: RedisServer, tmp_path: Path
) -> None:
    forwarder = Forwarder(tmp_path, daemon.url, redis.url("stream=s"))

    async def arrived() -> Iterable[str]:
        with redis_module.Redis(port=redis.port) as client:
            return [fields[b"tickwheel-id"].decode() for _, fields in client.xrange("s")]

    try:
        await survive(daemon, forwarder, redis.restart, arrived, kills=kills)
    finally:
        forwarder.kill()


@pytest.mark.parametrize("kills", [pytest.param(50, marks=pytest.mark.slow)])
async def test_kills_lose_no_task_on_the_way_to_rabbitmq(
    kills: int, daemon: Daemon, rabbit: RabbitServer, tmp_path: Path
) -> None:
    await declare_queue(rabbit, "q")
    forwarder = Forwarder(tmp_path, daemon.url, f"{rabbit.url}/?routing_key=q")

    async def arrived() -> Iterable[str]:
        return [str(found.message_id) for found in await drained(rabbit, "q")]

    try:
        await survive(daemon, forwarder, rabbit.restart, arrived, kills=kills)
    finally:
        forwarder.kill()
