"""Orders that are not paid in time are closed.

With every order goes a task that is due when the time to pay is over, with the order's number as
its key. Who pays cancels it by that number, without knowing the task's id; what comes due belongs
to an order that was not paid.
"""

import asyncio

from tickwheel import Client

TIME_TO_PAY_S = 1.0
ORDERS = ("1001", "1002", "1003")
PAID = "1002"


async def main() -> None:
    async with Client() as client:
        for order in ORDERS:
            receipt = await client.enqueue(
                "example.orders.close", order.encode(), delay=TIME_TO_PAY_S, key=order
            )
            print(f"order {order}: to be paid until {receipt.due:%H:%M:%S.%f}")

        # The customer pays: nothing is left to be closed. "in_flight" would mean: too late.
        for outcome in await client.cancel(topic="example.orders.close", key=PAID):
            print(f"order {PAID}: paid, its time-out is {outcome.status}")

        unpaid = set(ORDERS) - {PAID}
        async with client.subscribe("example.orders.close", group="billing") as deliveries:
            async for delivery in deliveries:
                late_ms = delivery.delivered_ms - delivery.due_ms
                print(f"order {delivery.key}: not paid in time, closed ({late_ms} ms late)")
                await delivery.ack()
                unpaid.discard(str(delivery.key))
                if not unpaid:
                    break
    print("done")


asyncio.run(main())
