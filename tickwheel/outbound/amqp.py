"""RabbitMQ (AMQP 0-9-1) as a target, with publisher confirms.

    amqp://[USER@]HOST[:PORT][/VHOST]?routing_key=QUEUE
    amqp://[USER@]HOST[:PORT][/VHOST]?exchange=NAME[&routing_key=KEY]

Without an exchange the routing key is the name of a queue. ``amqps://`` is TLS. Messages are
persistent and mandatory: one that no queue takes comes back, and has failed. Nothing is declared
here: queues, exchanges and bindings are the broker's.

Invariants: a delivery is acked by the broker's confirm of its own message; the loss of the channel
is a failure of the target, what a broker returns or refuses is one of the task.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from tickwheel.api.targets import BATCH
from tickwheel.client.delivery import Delivery
from tickwheel.errors import BadRequest
from tickwheel.outbound.target import (
    ACK,
    DEDUPE_ID,
    PROPERTY,
    Outcome,
    TargetUrl,
    message,
    needs,
    why,
)

if TYPE_CHECKING:
    from tickwheel.api.tasks import Value

ANSWER_S: Final = 10.0
"""How long, in seconds, the broker may take to confirm a batch."""
PORT: Final = 5672
PORT_TLS: Final = 5671
USER: Final = "guest"
NAME_BYTES_MAX: Final = 128
"""Bytes of a header's name in AMQP."""
HEADERS_BYTES_MAX: Final = 64 * 1024
"""Bytes of headers for properties of a task; those beyond are left out. A frame of RabbitMQ, into
which all headers have to go, has 128 KiB."""


def amqp_target(url: str, secret: str | None) -> AmqpTarget:
    """A target of such a URL; ``secret`` is the password. Raises BadRequest."""
    found = TargetUrl(url)
    is_tls = found.scheme == "amqps"
    exchange = found.option("exchange", "")
    if not exchange and not found.has("routing_key"):
        raise BadRequest("url must have routing_key=QUEUE, or exchange=NAME")
    made = AmqpTarget(
        exchange,
        found.option("routing_key", "" if exchange else None),
        host=found.host(),
        port=found.port(PORT_TLS if is_tls else PORT),
        login=found.user or USER,
        password=secret or USER,
        virtualhost=found.path or "/",
        ssl=is_tls,
        ssl_context=ssl.create_default_context() if is_tls else None,
        batch_max=found.batch_max(),
    )
    found.done()
    return made


class AmqpTarget:
    """An exchange of one broker, and a routing key."""

    concurrency = 1
    """One batch at a time: messages stand in the order in which they came due."""

    def __init__(
        self, exchange: str, routing_key: str, *, batch_max: int = BATCH, **place: Any
    ) -> None:
        """``place`` is what aio-pika connects by."""
        with needs("amqp"):
            import aio_pika
        self._aio_pika: Any = aio_pika
        self._exchange_name, self._routing_key = exchange, routing_key
        self._place = place
        self.batch_max = batch_max
        self._connection: Any = None
        self._exchange: Any = None

    async def connect(self) -> None:
        """Connect, and see that the exchange is there."""
        self._connection = await self._aio_pika.connect(**self._place)
        channel = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
        if self._exchange_name:
            self._exchange = await channel.get_exchange(self._exchange_name, ensure=True)
        else:
            self._exchange = channel.default_exchange

    async def send(self, deliveries: Sequence[Delivery]) -> list[Outcome]:
        """Publish all, and wait for the confirm of each."""
        async with asyncio.timeout(ANSWER_S):
            ends = await asyncio.gather(*map(self._publish, deliveries), return_exceptions=True)
        return [self._outcome(end) for end in ends]

    async def _publish(self, delivery: Delivery) -> None:
        await self._exchange.publish(self._message(delivery), self._routing_key, mandatory=True)

    def _outcome(self, end: BaseException | None) -> Outcome:
        if end is None:
            return ACK
        if isinstance(end, self._aio_pika.exceptions.DeliveryError):
            return Outcome("retry", reason=why(end))
        raise end

    def _message(self, delivery: Delivery) -> Any:
        found = message(delivery)
        steps = (delivery.encoding or "").partition(",")[2]
        return self._aio_pika.Message(
            found.body,
            headers=headers_of(found.headers),
            message_id=str(found.headers[DEDUPE_ID]),
            content_type=found.headers.get("content-type"),
            content_encoding=steps or None,
            priority=delivery.priority,
            delivery_mode=self._aio_pika.DeliveryMode.PERSISTENT,
        )

    async def close(self) -> None:
        connection, self._connection, self._exchange = self._connection, None, None
        if connection is not None:
            await connection.close()


def headers_of(told: Mapping[str, Value]) -> dict[str, Value]:
    """Headers as AMQP can say them, where a name has 128 bytes at most and all of them have to fit
    into one frame. Properties that do not are left out."""
    headers: dict[str, Value] = {}
    left = HEADERS_BYTES_MAX
    for name, value in told.items():
        if name.startswith(PROPERTY):
            length = len(name.encode())
            size = length + (len(value.encode()) if isinstance(value, str) else 8) + 8
            if length > NAME_BYTES_MAX or size > left:
                continue
            left -= size
        headers[name] = value
    return headers
