"""A test wheel, a runner that works on it, and a target whose answers a test says."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from inspect import isawaitable
from pathlib import Path
from typing import Any

import pytest
import redis as redis_module

from support.certificates import Authority
from support.redis_proxy import Proxy
from support.redis_server import RedisServer
from support.waiting import comes
from tickwheel import Client, Delivery
from tickwheel.outbound.runner import Runner
from tickwheel.outbound.target import ACK, Outcome, Target
from tickwheel.testing import TestWheel

Answer = Callable[[Sequence[Delivery]], Awaitable[Sequence[Outcome]]]
PASSWORD = "letmein"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path / "redis", requirepass=PASSWORD).start()
    yield made
    made.kill()


@pytest.fixture
def redis(server: RedisServer) -> Iterator[Any]:
    with redis_module.Redis(port=server.port, password=PASSWORD) as client:
        yield client


async def takes_all(deliveries: Sequence[Delivery]) -> Sequence[Outcome]:
    return [ACK] * len(deliveries)


class Scripted:
    """A target in memory. ``answer`` says what becomes of a batch; ``refusals`` are what its next
    tries to connect end with."""

    def __init__(self, answer: Answer = takes_all, *, batch_max: int = 10, concurrency: int = 1):
        self.batch_max, self.concurrency = batch_max, concurrency
        self.answer = answer
        self.refusals: list[Exception] = []
        self.connected = self.closed = 0
        self.batches: list[list[bytes]] = []
        self.under_way = self.under_way_max = 0

    @property
    def bodies(self) -> list[bytes]:
        return [body for batch in self.batches for body in batch]

    async def connect(self) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        self.connected += 1

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[Outcome]:
        self.batches.append([delivery.body for delivery in deliveries])
        self.under_way += 1
        self.under_way_max = max(self.under_way_max, self.under_way)
        try:
            return await self.answer(deliveries)
        finally:
            self.under_way -= 1

    async def close(self) -> None:
        self.closed += 1


@asynccontextmanager
async def running(client: Client, target: Target, **options: Any) -> AsyncIterator[Runner]:
    """A runner of topic ``t``, group ``g``, until the end of the block."""
    runner = Runner(client, "t", "g", target, **options)
    task = asyncio.create_task(runner.run())
    try:
        yield runner
    finally:
        await runner.stop()
        await task


async def in_time(wheel: TestWheel, look: Callable[[], Any]) -> None:
    """Until ``look`` finds something, while the wheel's time passes: whatever waits for its next
    attempt gets it."""

    async def step() -> Any:
        await wheel.advance(1)
        result = look()
        return await result if isawaitable(result) else result

    await comes(step)


@pytest.fixture
async def wheel() -> AsyncIterator[TestWheel]:
    async with TestWheel() as made:
        await made.client.create_group("t", "g")
        yield made


async def tls_relay(port: int, folder: Path) -> tuple[Proxy, Authority]:
    """Start a TLS server in front of a port, and return it with who signed its certificate."""
    # The relay's failed handshake is not the target's error.
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    authority = Authority(folder)
    pair = authority.sign("server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.cert, pair.key)
    return await Proxy(port, context).start(), authority
