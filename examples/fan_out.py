"""Fan-out: every group of a topic gets every task, and the members of a group share them.

Two groups process the same orders: billing (with two members) and shipping. They are independent.
Each task is stored once, until both groups have acked it.
"""

import asyncio
from collections import Counter

from tickwheel import Client, Task

TOPIC, ORDERS = "example.orders.placed", 6
MEMBERS = (("billing", "billing-1"), ("billing", "billing-2"), ("shipping", "shipping-1"))


async def member(client: Client, group: str, name: str, seen: Counter[str]) -> None:
    # A prefetch of 1, so that both members get some of the few tasks.
    async with client.subscribe(TOPIC, group=group, prefetch=1) as deliveries:
        async for delivery in deliveries:
            await asyncio.sleep(0.02)  # the work
            await delivery.ack()
            seen[group] += 1
            print(f"{name}: order {delivery.body.decode()}")


async def main() -> None:
    seen: Counter[str] = Counter()
    async with Client() as client:
        # A group gets tasks that come due after its creation, so create both first.
        for group in ("billing", "shipping"):
            await client.create_group(TOPIC, group)
        await client.enqueue_many(Task(TOPIC, b"%d" % n, delay=0.2) for n in range(1, ORDERS + 1))
        members = [asyncio.create_task(member(client, g, name, seen)) for g, name in MEMBERS]
        while seen["billing"] < ORDERS or seen["shipping"] < ORDERS:
            await asyncio.wait(members, timeout=0.05)
        for task in members:
            task.cancel()
        await asyncio.gather(*members, return_exceptions=True)
    print(f"billing did {seen['billing']} of {ORDERS}, shipping {seen['shipping']} of {ORDERS}")
    print("done")


asyncio.run(main())
