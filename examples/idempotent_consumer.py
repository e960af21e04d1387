"""Charge an order once, although tasks are delivered at least once.

The same order is enqueued twice, as by a shop that retries after a timeout, and the first attempt
fails half way. ``Once`` lets one attempt at a time work on an order, and none after it is done. A
claim uses the task's id by default. Here two tasks are the same work, so the handler passes their
common key. This ``Once`` remembers within the process. ``Once("redis://…")`` works across
processes, and ``tickwheel.contrib.sqlalchemy.SqlOnce`` in the transaction of the work.
"""

import asyncio

from tickwheel import Client, Delivery, Retry
from tickwheel.client.idempotence import Once

TOPIC = "example.orders.charge"
ENQUEUED = ("7001", "7001", "7002")

charged: list[str] = []
troubles = ["the bank does not answer"]


async def charge(order: str) -> None:
    if troubles:
        raise ConnectionError(troubles.pop())
    charged.append(order)


async def handle(once: Once, delivery: Delivery) -> bool:
    """Return whether the order is charged, now or before."""
    try:
        async with once.claim(delivery, key=delivery.key) as first:
            if first:
                await charge(str(delivery.key))
                print(f"order {delivery.key}: charged (attempt {delivery.attempt})")
            else:
                print(f"order {delivery.key}: was charged before, nothing to do")
    except ConnectionError as error:
        print(f"order {delivery.key}: {error}; {await delivery.nack(reason=str(error))}")
        return False
    await delivery.ack()
    return True


async def main() -> None:
    once = Once(ttl=3600)
    done = 0
    async with Client() as client:
        for order in ENQUEUED:
            await client.enqueue(TOPIC, b"", key=order, retry=Retry.fixed(0.1))
        async with client.subscribe(TOPIC) as deliveries:
            async for delivery in deliveries:
                done += await handle(once, delivery)
                if done == len(ENQUEUED):
                    break
    print(f"charged: {', '.join(sorted(charged))}")
    print("done")


if __name__ == "__main__":
    asyncio.run(main())
