"""Close orders that are not paid in time.

Every order has a task that is due at the end of its time to pay, with the order's number as the
key. A payment cancels the task by that key. So a task that comes due belongs to an unpaid order.
The tests are in test_order_timeout.py.
"""

import asyncio

from tickwheel import Client, Delivery, Receipt, Worker

TOPIC = "example.orders.close"
closed: set[str] = set()
worker = Worker(Client(), signals=False)


async def place(client: Client, order: str, time_to_pay_s: float) -> Receipt:
    return await client.enqueue(TOPIC, order.encode(), delay=time_to_pay_s, key=order)


async def pay(client: Client, order: str) -> str:
    """Return "cancelled", or "in_flight" if the order is already being closed."""
    (outcome,) = await client.cancel(topic=TOPIC, key=order)
    return outcome.status


@worker.on(TOPIC, group="billing")
async def close(delivery: Delivery) -> None:
    order = str(delivery.key)
    if order in closed:  # a task can be delivered again after a crash
        return
    closed.add(order)
    late_ms = delivery.delivered_ms - delivery.due_ms
    print(f"order {order}: not paid in time, closed ({late_ms} ms late)")


async def main() -> None:
    async with Client() as client:
        for order in ("1001", "1002", "1003"):
            receipt = await place(client, order, 1.0)
            print(f"order {order}: to be paid until {receipt.due:%H:%M:%S.%f}")
        print(f"order 1002: paid, its time-out is {await pay(client, '1002')}")
        working, left = asyncio.create_task(worker.run()), ["all"]
        while left:  # a service would run forever
            await asyncio.sleep(0.05)
            left = [task.key async for task in client.list_tasks(topic=TOPIC)]
        worker.stop()
        await working
    print("done")


if __name__ == "__main__":
    asyncio.run(main())
