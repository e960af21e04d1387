"""Index a document after its author has stopped typing.

Every change enqueues a task with the document's number as its key. A pending task of an earlier
change is replaced: the new task has the newest text, and the delay starts again. So a burst of
changes becomes one task. ``max_wait`` limits the delay for an author who never stops.
"""

import asyncio

from tickwheel import Client, IfPending, Receipt

TOPIC = "example.index"
QUIET_S = 1.0
LONGEST_S = 5.0
TEXTS = (b"O", b"On", b"Onc", b"Once")

DEBOUNCE = IfPending("replace", max_wait=LONGEST_S)


async def changed(client: Client, document: str, text: bytes) -> Receipt:
    return await client.enqueue(TOPIC, text, delay=QUIET_S, key=document, if_pending=DEBOUNCE)


async def main() -> None:
    async with Client() as client:
        for text in TEXTS:
            receipt = await changed(client, "document-7", text)
            print(f"changed to {text.decode()!r}: {receipt.outcome}")
            await asyncio.sleep(QUIET_S / 10)

        async with client.subscribe(TOPIC, group="indexer") as deliveries:
            async for delivery in deliveries:
                print(f"indexed {delivery.key}: {delivery.body.decode()!r}")
                await delivery.ack()
                break

        # Nothing is pending now: the next change is stored.
        receipt = await changed(client, "document-7", b"Once upon")
        print(f"changed again: {receipt.outcome}")
        await client.cancel(topic=TOPIC, key="document-7")
    print("done")


if __name__ == "__main__":
    asyncio.run(main())
