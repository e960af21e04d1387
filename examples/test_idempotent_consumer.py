"""The test of idempotent_consumer.py: an order that comes twice, an attempt that fails half way.

Run it with ``pytest examples/test_idempotent_consumer.py``; no daemon is needed.
"""

from idempotent_consumer import TOPIC, charged, handle, troubles

from tickwheel import Delivery, Retry, Worker
from tickwheel.client.idempotence import Once
from tickwheel.testing import TestWheel


async def test_an_order_is_charged_once_however_often_it_comes(tickwheel: TestWheel) -> None:
    charged.clear()
    troubles[:] = ["the bank does not answer"]
    once, worker = Once(ttl=3600), Worker(tickwheel.client)

    @worker.on(TOPIC)
    async def charge(delivery: Delivery) -> None:
        await handle(once, delivery)

    for order in ("7001", "7001", "7002"):
        await tickwheel.client.enqueue(TOPIC, b"", key=order, retry=Retry.fixed(0.1))
    tickwheel.duplicate(3)
    async with tickwheel.working(worker):
        await tickwheel.advance("1s")
    assert sorted(charged) == ["7001", "7002"]
    assert await tickwheel.enqueued() == []
