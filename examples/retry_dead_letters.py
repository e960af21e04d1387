"""A consumer that fails: retries, the dead letter with its reasons, and its requeue.

The group's policy is two retries, 0.2 s apart. After the last retry the task is a dead letter of
its group, until an operator requeues or deletes it.
"""

import asyncio

from tickwheel import Client, Delivery, Retry

TOPIC, GROUP = "example.mail.send", "mailer"
POLICY = Retry.fixed(0.2, retries=2)

troubles = ["the mail server does not answer"]


async def send(delivery: Delivery) -> None:
    if troubles:
        raise ConnectionError(troubles[0])
    print(f"attempt {delivery.attempt}: sent to {delivery.body.decode()}")


async def consume_one(client: Client, attempts: int) -> None:
    """Consume until a mail is sent or has failed in ``attempts`` attempts."""
    async with client.subscribe(TOPIC, group=GROUP, retry=POLICY) as deliveries:
        async for delivery in deliveries:
            try:
                await send(delivery)
            except ConnectionError as error:
                word = await delivery.nack(reason=str(error))
                print(f"attempt {delivery.attempt}: {error}; {word}")
                if delivery.attempt >= attempts:
                    return
            else:
                await delivery.ack()
                return


async def main() -> None:
    async with Client() as client:
        receipt = await client.enqueue(TOPIC, b"ann@example.com")
        await consume_one(client, attempts=3)

        async for letter in client.dead_list(topic=TOPIC, group=GROUP):
            print(f"dead letter of {letter.group}: {letter.reason}")
            for attempt, _, reason, *_ in letter.failures:
                print(f"  attempt {attempt}: {reason}")

        print("the mail server is repaired")
        troubles.clear()
        [word] = await client.dead_requeue([(receipt.id, GROUP)])
        print(f"dead letter: {word}")
        await consume_one(client, attempts=1)
        print(f"the task is {(await client.lookup(receipt.id)).state}")
    print("done")


if __name__ == "__main__":
    asyncio.run(main())
