"""The async client of Tickwheel. Needs msgpack and the standard library only.

async with Client("tcp://127.0.0.1:7355") as client:
    receipt = await client.enqueue("orders.close", b"42", delay=1800)
    async with client.subscribe("orders.close", group="billing") as deliveries:
        async for delivery in deliveries:
            await delivery.ack()
"""

from tickwheel.client.client import Client
from tickwheel.client.consumer import Delivery
from tickwheel.client.subscription import Subscription
from tickwheel.client.values import (
    DeadLetter,
    GroupStats,
    Receipt,
    Rescheduled,
    Stats,
    Task,
    TaskInfo,
    TopicStats,
)

__all__ = [
    "Client",
    "DeadLetter",
    "Delivery",
    "GroupStats",
    "Receipt",
    "Rescheduled",
    "Stats",
    "Subscription",
    "Task",
    "TaskInfo",
    "TopicStats",
]
