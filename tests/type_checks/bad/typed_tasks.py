"""What type checkers must reject: each line that ends so."""

from __future__ import annotations

from tickwheel import Client, Delivery, Worker, sync, task

worker = Worker(Client())


@worker.task("orders.close", group="billing")
async def close_order(order_id: int, *, note: str = "") -> None: ...


@worker.task("orders.ship")
async def ship(delivery: Delivery, order_id: int) -> str:
    return delivery.topic


@task("mails.send")
def send(text: str) -> int:
    return len(text)


async def main(client: Client, blocking: sync.Client, delivery: Delivery) -> None:
    await close_order.enqueue("42")  # error
    await close_order.enqueue()  # error
    await close_order.enqueue(42, "late")  # error
    await close_order.enqueue(order_id=42, nite="late")  # error
    await close_order.options(dely="30m").enqueue(42)  # error
    await close_order.options(key=42).enqueue(42)  # error
    await close_order.options(delay=b"30m").enqueue(42)  # error
    await ship.enqueue(delivery, 42)  # error
    await ship.enqueue(order_id="42")  # error
    await ship(42)  # error
    await ship.using(client).enqueue(text="42")  # error
    await close_order.using(blocking).enqueue(42)  # error
    close_order.using(blocking).enqueue("42")  # error
    close_order.using("tcp://127.0.0.1:7355")  # error
    send(42)  # error
    send.body(42)  # error
    close_order.task(note="x")  # error
    _length: str = send("x")  # error


@task("t", encoding="xml")  # error
def xml(n: int) -> None: ...


@task("t", version="2")  # error
def versions(n: int) -> None: ...


@task("t", upcasters={"1": dict})  # error
def upcasters(n: int) -> None: ...


worker.register(main)  # error
worker.register(close_order, gruop="billing")  # error
registered = worker.register(close_order)
registered.body("42")  # error
registered.body(42, nite="late")  # error
Client(compress="gzip")  # error
Client(keys={"a": "text"})  # error
sync.Client(compress_over="4 KiB")  # error
