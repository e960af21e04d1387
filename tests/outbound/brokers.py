"""What tests do at a RabbitMQ beside forwarding: queues, and what is in them."""

from __future__ import annotations

from typing import Any

import aio_pika

from support.rabbitmq_server import RabbitServer


async def declare_queue(server: RabbitServer, name: str, **arguments: Any) -> None:
    """A durable queue."""
    async with await aio_pika.connect(server.url) as connection:
        channel = await connection.channel()
        await channel.declare_queue(name, durable=True, arguments=arguments or None)


async def drained(server: RabbitServer, name: str) -> list[aio_pika.abc.AbstractIncomingMessage]:
    """All messages of a queue, which is empty then."""
    results = []
    async with await aio_pika.connect(server.url) as connection:
        channel = await connection.channel()
        queue = await channel.get_queue(name)
        while (message := await queue.get(fail=False, no_ack=True)) is not None:
            results.append(message)
    return results
