"""A worker: handlers by topic and group, run as tasks come due.

    worker = Worker(Client())

    @worker.on("orders.close", group="billing", concurrency=32, timeout=30.0)
    async def close(delivery: Delivery) -> None:
        ...                                   # returned: acked; raised: retried

    await worker.run()                        # or: tickwheel work module:worker

``worker.py`` is the whole and one handler's subscription, ``routes.py`` what is handled how,
``job.py`` one delivery in a handler and where plain functions run.
"""

from tickwheel.client.worker.job import Reject, RetryLater, Snooze
from tickwheel.client.worker.routes import Handler
from tickwheel.client.worker.worker import Worker

__all__ = ["Handler", "Reject", "RetryLater", "Snooze", "Worker"]
