"""RabbitMQ as a target, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import aio_pika
import pytest

from support.rabbitmq_server import RabbitServer
from support.waiting import comes
from tests.outbound.brokers import declare_queue, drained
from tests.outbound.conftest import in_time, running, tls_relay
from tests.outbound.endpoint import flooding
from tickwheel import Retry, Task
from tickwheel.outbound import forward, runner
from tickwheel.outbound.target import target_of
from tickwheel.testing import TestWheel


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    """One for all tests of this file: it takes seconds to start. Each has a queue of its own."""
    made = RabbitServer(tmp_path_factory.mktemp("rabbit")).start()
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses between tries to connect pass in real time."""
    monkeypatch.setattr(runner, "PAUSE_S", 0.001)


async def test_a_message_has_body_and_headers(wheel: TestWheel, server: RabbitServer) -> None:
    await declare_queue(server, "all")
    receipt = await wheel.client.enqueue(
        "t", b'{"a":1}', key="k", priority=9, encoding="json;v=2",
        properties={"paid": True, "amount": 3, "rate": 0.5, "who": "ännie"},
    )  # fmt: skip
    async with running(wheel.client, target_of(f"{server.url}/?routing_key=all")):
        await comes(lambda: acked(wheel, receipt.id))
    (found,) = await drained(server, "all")
    assert (found.body, found.message_id) == (b'{"a":1}', str(receipt.id))
    assert found.content_type == "application/json" and found.priority == 9
    assert found.delivery_mode == aio_pika.DeliveryMode.PERSISTENT
    headers = dict(found.headers)
    assert abs(int(str(headers.pop("tickwheel-enqueued-ms"))) - receipt.due_ms) < 1000
    assert headers == {
        "tickwheel-dedupe-id": str(receipt.id), "tickwheel-id": str(receipt.id),
        "tickwheel-topic": "t", "tickwheel-due-ms": receipt.due_ms, "tickwheel-attempt": 1,
        "tickwheel-key": "k", "tickwheel-priority": 9, "tickwheel-encoding": "json;v=2",
        "content-type": "application/json", "property-paid": True, "property-amount": 3,
        "property-rate": 0.5, "property-who": "ännie",
    }  # fmt: skip


async def acked(wheel: TestWheel, task_id: int) -> bool:
    (found,) = await wheel.client.lookup_many([task_id])
    return found.state == "acked"


async def test_messages_are_in_due_order(wheel: TestWheel, server: RabbitServer) -> None:
    await declare_queue(server, "order")
    bodies = [b"%d" % number for number in range(1_000)]
    receipts = await wheel.client.enqueue_columns("t", bodies)
    async with running(wheel.client, target_of(f"{server.url}/?routing_key=order&batch=64")):
        await comes(lambda: acked(wheel, receipts.ids[-1]))
    assert [found.body for found in await drained(server, "order")] == bodies


async def test_messages_use_exchange_and_routing_key(
    wheel: TestWheel, server: RabbitServer
) -> None:
    await declare_queue(server, "bound")
    async with await aio_pika.connect(server.url) as connection:
        channel = await connection.channel()
        await channel.declare_exchange("shop", "topic")
        await (await channel.get_queue("bound")).bind("shop", "orders.*")
        receipt = await wheel.client.enqueue("t", b"x")
        url = f"{server.url}/%2f?exchange=shop&routing_key=orders.eu"
        async with running(wheel.client, target_of(url)):
            await comes(lambda: acked(wheel, receipt.id))
    (found,) = await drained(server, "bound")
    assert (found.exchange, found.routing_key) == ("shop", "orders.eu")


async def test_messages_are_sent_over_tls(
    wheel: TestWheel, server: RabbitServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await declare_queue(server, "tls")
    proxy, authority = await tls_relay(server.port, tmp_path / "tls")
    url = f"amqps://localhost:{proxy.port}/?routing_key=tls"
    receipt = await wheel.client.enqueue("t", b"x")
    async with running(wheel.client, target_of(url)) as made:
        await comes(lambda: made.trouble)
        assert "CERTIFICATE_VERIFY_FAILED" in (made.trouble or "")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
    async with running(wheel.client, target_of(url)):
        await in_time(wheel, lambda: acked(wheel, receipt.id))
    await proxy.stop()
    assert [found.body for found in await drained(server, "tls")] == [b"x"]


async def test_an_unroutable_message_fails_alone(wheel: TestWheel, server: RabbitServer) -> None:
    await wheel.client.configure("t", group="g", retry=Retry.none())
    await wheel.client.enqueue("t", b"x")
    async with running(wheel.client, target_of(f"{server.url}/?routing_key=nobodys")) as made:
        await comes(lambda: dead(wheel))
        assert made.is_connected and made.trouble is None
    assert "NO_ROUTE" in (await dead(wheel))[0]


async def dead(wheel: TestWheel) -> list[str]:
    return [letter.failures[-1].reason for letter in await wheel.dead_letters("t", "g")]


async def test_messages_refused_by_a_full_queue_are_retried(
    wheel: TestWheel, server: RabbitServer
) -> None:
    await declare_queue(server, "full", **{"x-max-length": 1, "x-overflow": "reject-publish"})
    await wheel.client.configure("t", group="g", retry=Retry.none())
    receipts = await wheel.client.enqueue_columns("t", [b"1", b"2", b"3"])
    bodies: list[bytes] = []
    async with running(wheel.client, target_of(f"{server.url}/?routing_key=full")) as made:
        await comes(lambda: made.trouble)
        assert "Nack" in (made.trouble or "")

        async def are_acked() -> bool:
            bodies.extend([message.body for message in await drained(server, "full")])
            return all([await acked(wheel, task_id) for task_id in receipts.ids])

        await comes(are_acked)
    bodies += [message.body for message in await drained(server, "full")]
    assert set(bodies) == {b"1", b"2", b"3"} and await dead(wheel) == []


# aio-pika leaves a coroutine behind when a connection breaks while it is opened.
@pytest.mark.filterwarnings("ignore:coroutine 'Connection.close' was never awaited")
@pytest.mark.parametrize("begin", [b"\1\0\0\x7f\xff\xff\xff", b"\1\0\0\0\x20\0\0"])
async def test_an_oversized_amqp_frame_is_not_read(
    wheel: TestWheel, server: RabbitServer, begin: bytes
) -> None:
    await declare_queue(server, "beside")
    await wheel.client.create_group("u", "g")
    await wheel.client.enqueue("u", b"x")
    with flooding(begin, b"x" * (1 << 20)) as hostile:
        url = f"amqp://127.0.0.1:{hostile.port}/?routing_key=q"
        flooded = runner.Runner(wheel.client, "u", "g", target_of(url))
        running_on = asyncio.create_task(flooded.run())
        async with running(wheel.client, target_of(f"{server.url}/?routing_key=beside")):
            await comes(lambda: flooded.tries > 3)
            receipt = await wheel.client.enqueue("t", b"x")
            await comes(lambda: acked(wheel, receipt.id))
        await flooded.stop()
        await running_on
        assert "(FRAME_BYTES_MAX)" in (flooded.trouble or "")
        assert hostile.sent < 200 * (1 << 20), "kernels take some of each try"


async def test_a_missing_exchange_uses_no_attempt(wheel: TestWheel, server: RabbitServer) -> None:
    await wheel.client.configure("t", group="g", retry=Retry.none())
    await declare_queue(server, "behind")
    async with await aio_pika.connect(server.url) as connection:
        channel = await connection.channel()

        async def declare() -> None:
            await channel.declare_exchange("goes", "fanout")
            await (await channel.get_queue("behind")).bind("goes")

        await declare()
        async with running(wheel.client, target_of(f"{server.url}/?exchange=goes")) as made:
            first = await wheel.client.enqueue("t", b"0")
            await comes(lambda: acked(wheel, first.id))
            await channel.exchange_delete("goes")
            receipts = await wheel.client.enqueue_columns("t", [b"1", b"2", b"3"])
            await comes(lambda: made.tries > 2)
            assert "no exchange 'goes'" in (made.trouble or "")
            await declare()
            for task_id in receipts.ids:
                await comes(partial(acked, wheel, task_id))
    assert await dead(wheel) == []


async def test_a_broker_alarm_uses_no_attempt(
    wheel: TestWheel, server: RabbitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "ANSWER_S", 0.5)
    monkeypatch.setattr(runner, "CONNECT_S", 2.0)
    await wheel.client.configure("t", group="g", retry=Retry.none())
    await declare_queue(server, "alarm")
    receipts = await wheel.client.enqueue_columns("t", [b"1", b"2", b"3"])
    await asyncio.to_thread(server.control, "set_vm_memory_high_watermark", "0")
    async with running(wheel.client, target_of(f"{server.url}/?routing_key=alarm")) as made:
        await comes(lambda: made.trouble == forward.BLOCKED)
        await asyncio.to_thread(server.control, "set_vm_memory_high_watermark", "0.6")
        for task_id in receipts.ids:
            await comes(partial(acked, wheel, task_id))
    assert await dead(wheel) == []


@pytest.mark.parametrize(
    ("query", "secret", "words"),
    [
        ("exchange=absent", None, "NOT_FOUND - no exchange 'absent'"),
        ("routing_key=q", "wrong", "ACCESS_REFUSED"),
    ],
)
async def test_a_failed_connection_names_the_reason(
    wheel: TestWheel, server: RabbitServer, query: str, secret: str | None, words: str
) -> None:
    await wheel.client.configure("t", group="g", retry=Retry.none())
    await wheel.client.enqueue("t", b"x")
    async with running(wheel.client, target_of(f"{server.url}/?{query}", secret)) as made:
        await comes(lambda: made.tries > 3)
        assert words in (made.trouble or "")
    assert await dead(wheel) == []


async def test_a_hanging_broker_is_retried_later(
    wheel: TestWheel, server: RabbitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "ANSWER_S", 1.5)
    monkeypatch.setattr(runner, "CONNECT_S", 3.0)
    await declare_queue(server, "hangs")
    await wheel.client.configure("t", group="g", retry=Retry.fixed(delay=1, retries=100))
    async with running(wheel.client, target_of(f"{server.url}/?routing_key=hangs")) as made:
        first = await wheel.client.enqueue("t", b"1")
        await comes(lambda: acked(wheel, first.id))
        server.pause()
        second = await wheel.client.enqueue("t", b"2")
        await comes(lambda: made.trouble)
        assert made.trouble == "no answer in time"
        server.go_on()
        await in_time(wheel, lambda: acked(wheel, second.id))
    assert {found.body for found in await drained(server, "hangs")} == {b"1", b"2"}


ODD_PROPERTIES = {
    "name": {"漢" * 255: "x"},
    "number": {"n": 2**63 - 1, "least": -(2**63), "rate": -0.0},
    "size": {f"p{n}": "x" * 4_096 for n in range(63)},
}


@pytest.mark.parametrize("what", ODD_PROPERTIES)
async def test_values_that_amqp_cannot_encode_are_left_out(
    wheel: TestWheel, server: RabbitServer, what: str
) -> None:
    await wheel.client.configure("t", group="g", retry=Retry.none())
    await declare_queue(server, what)
    odd, plain = ODD_PROPERTIES[what], {"paid": True}
    tasks = [Task("t", b"%d" % n, properties=plain | (odd if n == 3 else {})) for n in range(8)]
    receipts = await wheel.client.enqueue_many(tasks)
    async with running(wheel.client, target_of(f"{server.url}/?routing_key={what}")) as made:
        for receipt in receipts:
            await in_time(wheel, partial(acked, wheel, receipt.id))
        assert made.trouble is None
    messages = await drained(server, what)
    assert [found.body for found in messages] == [task.body for task in tasks]
    assert all(found.headers["property-paid"] is True for found in messages)
