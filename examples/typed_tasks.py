"""A function is a task: its parameters are the arguments, checked when it is enqueued and called.

The order's shape had no currency once. Tasks that were enqueued then come with version 1; an
upcaster says what they mean today. What does not fit at all is refused before it is sent.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from tickwheel import BadRequest, Client, Worker

TOPIC = "example.orders.remind"
client = Client()
worker = Worker(client, signals=False)

reminded: list[str] = []


@dataclass
class Amount:
    cents: int
    currency: str


def with_currency(arguments: dict[str, Any]) -> dict[str, Any]:
    """Version 1 had an amount in cents of euros."""
    return {**arguments, "amount": {"cents": arguments["amount"], "currency": "EUR"}}


@worker.task(TOPIC, version=2, upcasters={1: with_currency})
async def remind(order: str, amount: Amount) -> None:
    reminded.append(order)
    print(f"order {order}: {amount.cents / 100:.2f} {amount.currency} are due")


def stop_after_two(*_: object) -> None:
    if len(reminded) == 2:
        worker.stop()


async def main() -> None:
    worker.on_settled = stop_after_two
    async with client:
        running = asyncio.create_task(worker.run())
        await remind.options(delay="100ms", key="1001").enqueue("1001", Amount(4200, "CHF"))
        # As a program of last year did, which knew no currency.
        await client.enqueue(TOPIC, b'{"order": "1000", "amount": 990}', delay=0.2, encoding="json")
        try:
            await remind.enqueue(order="1002", amount="a lot")  # type: ignore[arg-type]  # refused
        except BadRequest as error:
            print(f"refused: {error}")
        await running
    print("done")


if __name__ == "__main__":
    asyncio.run(main())
