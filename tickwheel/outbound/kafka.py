"""Kafka as a target: an idempotent producer that waits for all in-sync replicas.

    kafka://[USER@]HOST[:PORT][,HOST…]/?topic=NAME[&sasl=plain|scram-sha-256|scram-sha-512]

``kafkas://`` is TLS. A record's key is the task's order key, else its key: what belongs together is
in one partition. Without either Kafka chooses one.

Invariants: a delivery is acked by the brokers' answer for its own record; a record that is too
large for them is rejected, since no retry makes it smaller; when not one of a batch was taken the
target has failed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import Any, Final

from tickwheel.api.targets import BATCH
from tickwheel.client.delivery import Delivery
from tickwheel.outbound.target import ACK, Outcome, TargetUrl, as_text, message, needs, why

ANSWER_S: Final = 15.0
"""How long, in seconds, the brokers may take for a batch."""
REQUEST_MS: Final = 10_000
PORT: Final = 9092
RECORDS_BYTES: Final = 1 << 18
"""Bytes of the records that one request has for a partition."""


def kafka_target(url: str, secret: str | None) -> KafkaTarget:
    """A target of such a URL; ``secret`` is the password. Raises BadRequest."""
    found = TargetUrl(url)
    brokers = [one if ":" in one else f"{one}:{PORT}" for one in found.places.split(",") if one]
    if not brokers:
        found.host()  # says what is missing
    is_tls, protocol = found.scheme == "kafkas", "SSL" if found.scheme == "kafkas" else "PLAINTEXT"
    options: dict[str, Any] = {"bootstrap_servers": brokers}
    if is_tls:
        options["ssl_context"] = ssl.create_default_context()
    if found.user is not None:
        mechanism = found.choice("sasl", "plain", "scram-sha-256", "scram-sha-512")
        protocol = "SASL_SSL" if is_tls else "SASL_PLAINTEXT"
        options |= {"sasl_mechanism": mechanism.upper(), "sasl_plain_username": found.user}
        options["sasl_plain_password"] = secret or ""
    options["security_protocol"] = protocol
    batch = found.batch_max()
    made = KafkaTarget(found.option("topic"), options, batch_max=batch)
    found.done()
    return made


class KafkaTarget:
    """A topic of one cluster."""

    concurrency = 1
    """One batch at a time: records of a partition stand in the order in which they came due."""

    def __init__(self, topic: str, options: dict[str, Any], *, batch_max: int = BATCH) -> None:
        """``options`` are those of ``AIOKafkaProducer``."""
        with needs("kafka"):
            import aiokafka
            import aiokafka.errors
        self._aiokafka: Any = aiokafka
        self._too_large = (
            aiokafka.errors.MessageSizeTooLargeError,
            aiokafka.errors.RecordTooLargeError,
        )
        self._topic = topic
        self._options = options
        self.batch_max = batch_max
        self._producer: Any = None

    async def connect(self) -> None:
        """Make a producer, and let it find the cluster."""
        self._producer = self._aiokafka.AIOKafkaProducer(
            acks="all", enable_idempotence=True, request_timeout_ms=REQUEST_MS,
            max_batch_size=RECORDS_BYTES, **self._options,
        )  # fmt: skip
        await self._producer.start()

    async def send(self, deliveries: Sequence[Delivery]) -> list[Outcome]:
        """Hand over all records, and wait for the answer to each."""
        async with asyncio.timeout(ANSWER_S):
            begun = [await self._begin(delivery) for delivery in deliveries]
            ends = await asyncio.gather(*begun, return_exceptions=True)
        errors = [end for end in ends if isinstance(end, BaseException)]
        if len(errors) == len(ends) and not any(isinstance(e, self._too_large) for e in errors):
            raise errors[0]
        return [self._outcome(end) for end in ends]

    async def _begin(self, delivery: Delivery) -> asyncio.Future[Any]:
        """The future of the brokers' answer for one record."""
        found = message(delivery)
        key = delivery.order_key or delivery.key
        headers = [(name, as_text(value).encode()) for name, value in found.headers.items()]
        try:
            answer: asyncio.Future[Any] = await self._producer.send(
                self._topic, found.body, None if key is None else key.encode(), headers=headers
            )
        except self._too_large as error:  # seen before it was sent
            answer = asyncio.get_running_loop().create_future()
            answer.set_exception(error)
        return answer

    def _outcome(self, end: Any) -> Outcome:
        if not isinstance(end, BaseException):
            return ACK
        return Outcome("reject" if isinstance(end, self._too_large) else "retry", reason=why(end))

    async def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await producer.stop()
