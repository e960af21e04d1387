"""What a worker does with a task; with ``pip install 'tickwheel[cli]'`` in its image."""

import logging

from tickwheel import Client, Delivery, Worker

worker = Worker(Client())  # TICKWHEEL_URL and TICKWHEEL_TOKEN of the environment
log = logging.getLogger("orders")


@worker.on("orders.close", group="closer", concurrency=20, timeout=30)
async def close(delivery: Delivery) -> None:
    log.info("closed %s", delivery.body.decode())
