"""A document is indexed once its author has stopped typing.

Every change hands in a task with the document's number as its key. While the task of the change
before is pending it is replaced: the newest text, and the delay begins anew. So a burst of changes
is one task; the longest wait bounds how long somebody who never stops can put it off.
"""

import asyncio

from tickwheel import Client, IfPending

QUIET_S = 1.0
LONGEST_S = 5.0
TEXTS = (b"O", b"On", b"Onc", b"Once")


async def main() -> None:
    debounce = IfPending("replace", max_wait=LONGEST_S)
    async with Client() as client:
        for text in TEXTS:
            receipt = await client.enqueue(
                "example.index", text, delay=QUIET_S, key="document-7", if_pending=debounce
            )
            print(f"changed to {text.decode()!r}: {receipt.outcome}")
            await asyncio.sleep(QUIET_S / 10)

        async with client.subscribe("example.index", group="indexer") as deliveries:
            async for delivery in deliveries:
                print(f"indexed {delivery.key}: {delivery.body.decode()!r}")
                await delivery.ack()
                break

        # Nothing is pending now: the next change is stored.
        receipt = await client.enqueue(
            "example.index", b"Once upon", delay=QUIET_S, key="document-7", if_pending=debounce
        )
        print(f"changed again: {receipt.outcome}")
        await client.cancel(topic="example.index", key="document-7")
    print("done")


asyncio.run(main())
