"""A worker: handlers by topic and group, with retries, time-outs and a graceful stop.

Run as a program it enqueues some tasks, works on them, and stops. As a service, run the worker
alone: ``tickwheel work worker_app:worker``; SIGTERM lets running handlers finish.
"""

import asyncio
import logging
import time

from tickwheel import Client, Delivery, Reject, Retry, RetryLater, Worker

client = Client()
worker = Worker(client, grace=5.0)


@worker.on("example.reports", group="printers", concurrency=4, retry=Retry.fixed(0.2), timeout=1.0)
async def report(delivery: Delivery) -> None:
    name = delivery.body.decode()
    if name == "nonsense":
        raise Reject("there is no such report")
    if name == "early" and delivery.attempt == 1:
        raise RetryLater(0.3, "its figures are not there yet")
    if name == "broken" and delivery.attempt == 1:
        raise ValueError("division by nothing")
    if name == "endless" and delivery.attempt == 1:
        await asyncio.sleep(60)
    print(f"report {name}: printed at attempt {delivery.attempt}", flush=True)


@worker.on("example.cleanup", timeout=5.0)
def clean(delivery: Delivery) -> None:
    """A plain function: it runs in a thread, and may block."""
    time.sleep(0.05)
    print(f"cleaned {delivery.body.decode()}", flush=True)


async def main() -> None:
    async with client:
        running = asyncio.create_task(worker.run())
        names = (b"monthly", b"early", b"broken", b"endless", b"nonsense")
        receipts = [await client.enqueue("example.reports", name) for name in names]
        receipts.append(await client.enqueue("example.cleanup", b"/var/spool/reports"))
        ids = [receipt.id for receipt in receipts]
        states = {"scheduled"}
        while states - {"acked", "dead"}:
            await asyncio.sleep(0.05)
            states = {task.state for task in await client.lookup_many(ids)}
        worker.stop()
        await running
        async for letter in client.dead_list(topic="example.reports"):
            print(f"dead letter: {letter.reason}")
    print("done")


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    asyncio.run(main())
