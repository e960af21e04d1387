"""A target's connections are checked at the address that they go to, and no others are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import uvloop

from support.waiting import comes, soon
from tests.outbound.conftest import Scripted, running
from tickwheel import BadRequest, Delivery, Forbidden
from tickwheel.outbound import runner
from tickwheel.outbound.runner import checked
from tickwheel.outbound.target import ACK, Outcome
from tickwheel.testing import TestWheel


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """The port of a server that accepts connections."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def refuse(address: str) -> None:
    raise Forbidden(f"{address} is private")


async def connect(port: int) -> None:
    """By name: what is checked is what it stands for."""
    _, writer = await asyncio.open_connection("localhost", port, family=2)
    writer.close()


async def test_a_check_gets_the_resolved_address(port: int) -> None:
    seen: list[str] = []
    with checked(seen.append):
        await connect(port)
    assert seen == ["127.0.0.1"]


async def test_a_refused_address_is_not_connected(port: int) -> None:
    with checked(refuse), pytest.raises(Forbidden, match="127.0.0.1 is private"):
        await connect(port)


async def test_tasks_started_in_the_context_stay_checked(port: int) -> None:
    go_on = asyncio.Event()

    async def later() -> None:
        await go_on.wait()
        await connect(port)

    with checked(refuse):
        task = asyncio.create_task(later())
    await connect(port)
    with checked(None):
        await connect(port)
    go_on.set()
    with pytest.raises(Forbidden):
        await soon(task)


async def test_unix_sockets_are_refused(tmp_path: Any) -> None:
    with checked(lambda address: None), pytest.raises(Forbidden, match="must have an IP address"):
        await asyncio.open_unix_connection(str(tmp_path / "socket"))


def test_a_loop_that_connects_by_itself_is_refused() -> None:
    async def check() -> None:
        with checked(refuse):
            pass

    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as made,
        pytest.raises(BadRequest, match="needs asyncio's own event loop"),
    ):
        made.run(check())


async def test_a_runner_checks_its_target_and_not_its_client(
    wheel: TestWheel, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "PAUSE_S", 0.001)
    allowed = False

    def check(address: str) -> None:
        if not allowed:
            refuse(address)

    class Connects(Scripted):
        async def connect(self) -> None:
            await connect(port)

    async def answer(deliveries: Sequence[Delivery]) -> list[Outcome]:
        await connect(port)
        return [ACK] * len(deliveries)

    target = Connects(answer)
    async with running(wheel.client, target, check=check) as made:
        await wheel.client.enqueue("t", b"a")
        await comes(lambda: made.trouble)
        assert made.trouble == "Forbidden: 127.0.0.1 is private"
        allowed = True
        await wheel.client.enqueue("t", b"b")
        await comes(lambda: target.bodies)
        await wheel.settle()
        await connect(port)
