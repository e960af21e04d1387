"""At least once means: sometimes twice. An order is charged once all the same.

The same order is enqueued twice, as a shop does that asks again after a time-out of its own; and
the first attempt fails half way. ``Once`` lets one attempt at a time work on an order, and none
when it is done. By default a claim goes by the task's id; here two tasks are the same work, so the
handler names the key that they share. This one remembers within the process; ``Once("redis://…")``
among many, and ``tickwheel.contrib.sqlalchemy.SqlOnce`` in the transaction of the work.
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
    """Whether it is done, now or before."""
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
