"""What type checkers must accept."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

from tickwheel import Client, Delivery, Receipt, Retry, Task, Worker, sync, task

worker = Worker(Client(compress="zstd", compress_over=4096, keys={"2026-11": b"k" * 32}))


@worker.task("orders.close", group="billing", concurrency=8, timeout=30, retry=Retry.none())
async def close_order(order_id: int, *, note: str = "") -> None: ...


@worker.task("orders.ship")
async def ship(delivery: Delivery, order_id: int, express: bool = False) -> str:
    return delivery.topic


def from_1_to_2(old: dict[str, Any]) -> dict[str, Any]:
    return {"text": old["message"]}


@task("mails.send", version=2, upcasters={1: from_1_to_2}, encoding="msgpack")
def send(text: str) -> int:
    return len(text)


@task("orders.pay")
async def pay(order_id: int, amount: float, *, note: str = "") -> None: ...


@task("orders.pack")
def pack(delivery: Delivery, order_id: int, lines: list[str], express: bool = False) -> str:
    return delivery.topic


@task("ticks")
async def tick() -> None: ...


assert_type(worker.register(send, group="mails", tags="eu")("hello"), int)
registered = worker.register(pay, group="bank", concurrency=4)
packed = worker.register(pack)
worker.register(tick)
worker.register(pay.options(delay="1h"), group="later")
worker.register(pay.using(Client()), group="elsewhere")


async def main(client: Client, blocking: sync.Client, delivery: Delivery) -> None:
    assert_type(await close_order.enqueue(42), Receipt)
    await close_order.enqueue(order_id=42, note="late")
    await close_order.options(delay="30m", key="order-42").enqueue(order_id=42)
    await close_order.options(at=datetime.now(UTC), if_pending="keep").enqueue(42)
    await close_order.using(client).options(delay=timedelta(hours=1)).enqueue(42)
    await ship.enqueue(42)
    assert_type(await registered.enqueue(42, 3.5, note="late"), Receipt)
    assert_type(await packed.enqueue(42, ["a"], express=True), Receipt)
    assert_type(packed(delivery, 42, ["a"]), str)
    await ship.options(priority=3).enqueue(order_id=42, express=True)
    assert_type(close_order.using(blocking).enqueue(42), Receipt)
    assert_type(send.options(delay=3.5).using(blocking).enqueue(text="hello"), Receipt)
    assert_type(send("hello"), int)
    assert_type(await ship(delivery, 42), str)
    await close_order(42)
    assert_type(close_order.task(42), Task)
    await client.enqueue_many([close_order.task(n) for n in range(3)])
    async with client.transaction("orders") as transaction:
        await transaction.enqueue_many([ship.task(1), send.task("x")])
    body: bytes = send.body(text="x")
    await client.put_schedule("s", topic=send.topic, body=body, encoding=send.encoding, every=60)
    keys: Mapping[str, bytes] = {}
    assert_type(client.body_of(await client.lookup(1)), bytes | None)
    Client(keys=keys, encrypt_with="x", keys_file="keys", unpacked_bytes_max=1)
    sync.Client(compress="zlib")
