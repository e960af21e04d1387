"""Other brokers as targets: Redis, RabbitMQ and Kafka.

    redis://[USER@]HOST[:PORT][/DB]?stream=NAME[&maxlen=N]
    redis://[USER@]HOST[:PORT][/DB]?list=NAME[&value=json|body]
    amqp://[USER@]HOST[:PORT][/VHOST]?routing_key=QUEUE
    amqp://[USER@]HOST[:PORT][/VHOST]?exchange=NAME[&routing_key=KEY]
    kafka://[USER@]HOST[:PORT][,HOST…]/?topic=NAME[&sasl=plain|scram-sha-256|scram-sha-512]

``rediss://``, ``amqps://`` and ``kafkas://`` are TLS. A target sends one batch at a time: what it
writes stands in the order in which it came due. The library of a broker is imported by its target.

* Redis: ``XADD`` to a stream, or ``RPUSH`` to a list, one pipeline a batch. An entry of a stream
  has the field ``body`` and one for each header; an element of a list is a JSON object of the same,
  or the body alone. It speaks RESP by itself, with hiredis: a batch is one write and as few reads
  as it comes in, without a step of a client's for each command.
* RabbitMQ (AMQP 0-9-1), with publisher confirms. Without an exchange the routing key is the name of
  a queue. Messages are persistent and mandatory: one that no queue takes comes back, and has
  failed. Nothing is declared here: queues, exchanges and bindings are the broker's.
* Kafka: an idempotent producer that waits for all in-sync replicas. A record's key is the task's
  order key, else its key: what belongs together is in one partition. Without either Kafka chooses
  one.

Invariants: a delivery is acked by the answer to its own command, message or record; what a broken
connection has left open counts as not done. Few errors are about one task: those are named here,
and count as its failure; one that is too large for Kafka is rejected, since no retry makes it
smaller. Whatever else a broker says is about itself: ``NotNow``, also for part of a batch.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import logging
import re
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
    Message,
    NotNow,
    Outcome,
    TargetUrl,
    as_text,
    message,
    needs,
    why,
)

if TYPE_CHECKING:
    from tickwheel.api.tasks import Value

LOGGER = logging.getLogger("tickwheel.outbound")

ANSWER_S: Final = 10.0
"""How long, in seconds, Redis or RabbitMQ may take for a batch."""

# --- Redis ---------------------------------------------------------------------------------------

REDIS_PORT: Final = 6379
READ_BYTES: Final = 1 << 16
REPLY_BYTES_MAX: Final = 9_999
"""Bytes of one reply of Redis; a connection with a longer one is closed before it is read."""
_TOO_LARGE: Final = re.compile(rb"\n(?:[*%%~>|]|\$\d{%d,})" % (len(str(REPLY_BYTES_MAX)) + 1))
"""Begins a reply that nothing asked for: several values, or a string that is longer. The parser
makes room for as many values as are announced."""
OF_A_TASK: Final = (
    "WRONGTYPE ",
    "ERR Elements are too large",
    "ERR string exceeds maximum allowed size",
    "ERR Protocol error: invalid bulk length",
)
"""How errors begin that are about one command. All others say how the server is, whatever it was
asked: what it lacks, forbids or is busy with."""


class RedisFailed(NotNow):
    """The server's word for why it takes nothing."""


def redis_target(url: str, secret: str | None) -> RedisTarget:
    """A target of such a URL; ``secret`` is the password. Raises BadRequest."""
    found = TargetUrl(url)
    database = found.path or "0"
    if not database.isascii() or not database.isdigit():
        raise BadRequest(f"url must end with the number of a database, not with {found.path!r:.60}")
    batch = found.batch_max()
    if found.has("stream") == found.has("list"):
        raise BadRequest("url must have stream=NAME or list=NAME, and not both")
    make: Maker
    if found.has("stream"):
        make = StreamEntries(found.option("stream"), found.number("maxlen", 0, 1, 1 << 53))
    else:
        is_json = found.choice("value", "json", "body") == "json"
        make = ListElements(found.option("list"), is_json=is_json)
    is_tls = found.scheme == "rediss"
    login = ("AUTH", *(() if found.user is None else (found.user,)), secret) if secret else None
    made = RedisTarget(
        found.host(), found.port(REDIS_PORT), is_tls=is_tls, login=login, database=database,
        make=make, batch_max=batch,
    )  # fmt: skip
    found.done()
    return made


class RedisTarget:
    """A stream or a list of one Redis server."""

    concurrency = 1

    def __init__(
        self,
        host: str,
        port: int,
        *,
        is_tls: bool,
        login: tuple[str, ...] | None,
        database: str,
        make: Maker,
        batch_max: int = BATCH,
    ) -> None:
        with needs("redis"):
            import hiredis
        self._hiredis: Any = hiredis
        self.batch_max = batch_max
        self._address = host, port
        self._tls = ssl.create_default_context() if is_tls else None
        self._hello = [*([login] if login else []), ("SELECT", database)]
        self._make = make
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._parser: Any = None
        self._tail, self._held = b"\n", 0
        """The last bytes that were read, and how many of them since the last whole reply."""
        self._asking = asyncio.Lock()

    async def connect(self) -> None:
        """Connect, log in, choose the database."""
        host, port = self._address
        self._streams = await asyncio.open_connection(host, port, ssl=self._tls)
        self._parser = self._hiredis.Reader(notEnoughData=_MORE)
        self._tail, self._held = b"\n", 0
        pack = self._hiredis.pack_command
        async with asyncio.timeout(ANSWER_S):
            replies = await self._ask(b"".join(map(pack, self._hello)), len(self._hello))
        for reply in replies:
            if isinstance(reply, Exception):
                raise RedisFailed(str(reply))

    async def send(self, deliveries: Sequence[Delivery]) -> list[Outcome]:
        """One command for each delivery, all of them in one write."""
        pack, make = self._hiredis.pack_command, self._make.command
        commands = b"".join([pack(make(message(one))) for one in deliveries])
        async with asyncio.timeout(ANSWER_S):
            replies = await self._ask(commands, len(deliveries))
        outcomes = [
            _of_error(str(reply)) if isinstance(reply, Exception) else ACK for reply in replies
        ]
        refused = next((one for one in outcomes if one.settled == "later"), None)
        if refused is not None:
            raise RedisFailed(refused.reason or "", outcomes)
        return outcomes

    async def close(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].transport.abort()

    async def _ask(self, commands: bytes, count: int) -> list[Any]:
        """The replies to so many commands; those of one caller at a time. What has failed once has
        no connection any more: its replies may still come."""
        async with self._asking:
            try:
                return await self._replies(commands, count)
            except BaseException:
                await self.close()
                raise

    async def _replies(self, commands: bytes, count: int) -> list[Any]:
        if self._streams is None:
            raise ConnectionError("not connected")
        reader, writer = self._streams
        writer.write(commands)
        await writer.drain()
        replies: list[Any] = []
        get = self._parser.gets
        while len(replies) < count:
            data = await reader.read(READ_BYTES)
            if not data:
                raise ConnectionError("the server closed the connection")
            self._check(data)
            self._parser.feed(data)
            while (reply := get()) is not _MORE:
                self._held = 0
                replies.append(reply)
        if len(replies) > count:
            raise RedisFailed(f"the server gave {len(replies)} replies to {count} commands")
        return replies

    def _check(self, data: bytes) -> None:
        """Raises RedisFailed for a reply that is too large."""
        self._held += len(data)
        looked = self._tail + data
        if self._held > READ_BYTES + REPLY_BYTES_MAX or _TOO_LARGE.search(looked):
            raise RedisFailed(
                f"the server answers with more than {REPLY_BYTES_MAX} bytes (REPLY_BYTES_MAX)"
            )
        self._tail = looked[-32:]


def _of_error(said: str) -> Outcome:
    return Outcome("retry" if said.startswith(OF_A_TASK) else "later", reason=said)


_MORE: Final = object()
"""Stands for a reply that has not come as a whole."""


class StreamEntries:
    """``XADD`` of each message; ``maxlen`` 0 trims nothing, else about so many entries are kept."""

    def __init__(self, name: str, maxlen: int) -> None:
        trim: tuple[str, ...] = ("MAXLEN", "~", str(maxlen)) if maxlen else ()
        self._head = ("XADD", name, *trim, "*", "body")

    def command(self, found: Message) -> tuple[str | bytes, ...]:
        """The words of the command for one message."""
        words: list[str | bytes] = [*self._head, found.body]
        for name, value in found.headers.items():
            words += (name, value if type(value) is str else as_text(value))
        return tuple(words)


class ListElements:
    """``RPUSH`` of each message, as JSON with its headers, or its body alone."""

    def __init__(self, name: str, *, is_json: bool) -> None:
        self._name = name
        self._is_json = is_json

    def command(self, found: Message) -> tuple[str | bytes, ...]:
        """The words of the command for one message."""
        if not self._is_json:
            return "RPUSH", self._name, found.body
        try:
            body = {"body": found.body.decode()}
        except UnicodeDecodeError:
            body = {"body_base64": base64.b64encode(found.body).decode()}
        text = json.dumps(body | {"headers": found.headers}, separators=(",", ":"))
        return "RPUSH", self._name, text


Maker = StreamEntries | ListElements


# --- RabbitMQ ------------------------------------------------------------------------------------

AMQP_PORT: Final = 5672
AMQPS_PORT: Final = 5671
AMQP_USER: Final = "guest"
FRAME_BYTES_MAX: Final = 1 << 20
"""Bytes of one frame of RabbitMQ, whose own limit is 128 KiB."""
BLOCKED: Final = "the broker has blocked the connection: an alarm of its memory or disk"
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
        port=found.port(AMQPS_PORT if is_tls else AMQP_PORT),
        login=found.user or AMQP_USER,
        password=secret or AMQP_USER,
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

    def __init__(
        self, exchange: str, routing_key: str, *, batch_max: int = BATCH, **place: Any
    ) -> None:
        """``place`` is what aio-pika connects by."""
        with needs("amqp"):
            import aio_pika
            import aiormq.exceptions as errors
        self._aio_pika: Any = aio_pika
        is_tls = bool(place.get("ssl"))

        class Bounded(aio_pika.Connection):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                self.kwargs["transport_factory"] = BoundedTransport(is_tls=is_tls)

        self._bounded = Bounded
        self._returned = errors.PublishError
        self._of_a_message = (
            errors.PublishError, errors.ChannelPreconditionFailed, errors.ConnectionSyntaxError,
            errors.ConnectionFrameError, errors.ConnectionUnexpectedFrame,
        )  # fmt: skip
        """What the broker answers to one message: it returns it, or does not understand it."""
        self._said = errors.DeliveryError, errors.ChannelClosed, errors.ConnectionClosed
        """Whatever the broker says: it did not confirm a message, or closed something."""
        self._exchange_name, self._routing_key = exchange, routing_key
        self._place = place
        self.batch_max = batch_max
        self._connection: Any = None
        self._exchange: Any = None

    async def connect(self) -> None:
        """Connect, and see that the exchange is there."""
        self._connection = await self._aio_pika.connect(
            connection_class=self._bounded, **self._place
        )
        channel = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
        if self._exchange_name:
            self._exchange = await channel.get_exchange(self._exchange_name, ensure=True)
        else:
            self._exchange = channel.default_exchange

    async def send(self, deliveries: Sequence[Delivery]) -> list[Outcome]:
        """Publish all, and wait for the confirm of each."""
        begun = [asyncio.ensure_future(self._publish(one)) for one in deliveries]
        try:
            await asyncio.wait(begun, timeout=ANSWER_S)
            is_blocked = not all(one.done() for one in begun) and await self._is_blocked()
        finally:
            for one in begun:
                one.cancel()
        ends = await asyncio.gather(*begun, return_exceptions=True)
        return self._outcomes(ends, BLOCKED if is_blocked else None)

    async def _is_blocked(self) -> bool:
        """Whether the broker has said that it takes nothing from this connection: an alarm."""
        try:
            async with asyncio.timeout(0):
                await self._connection.transport.connection.ready()
        except TimeoutError:
            return True
        return False

    def _outcomes(self, ends: Sequence[BaseException | None], refusal: str | None) -> list[Outcome]:
        """The outcome of each end. Raises NotNow for what the broker says of itself, else what no
        broker has said."""
        for end in ends:
            if refusal is None and end is not None and self._is_of_the_broker(end):
                refusal = why(end)
        outcomes = []
        for end in ends:
            if end is None:
                outcomes.append(ACK)
            elif isinstance(end, self._returned):
                outcomes.append(Outcome("retry", reason=why(end)))
            elif refusal is not None:
                outcomes.append(Outcome("later", reason=refusal))
            elif isinstance(end, asyncio.CancelledError):
                raise TimeoutError
            else:
                raise end
        if refusal is not None:
            raise NotNow(refusal, outcomes)
        return outcomes

    async def _publish(self, delivery: Delivery) -> None:
        await self._exchange.publish(self._message(delivery), self._routing_key, mandatory=True)

    def _is_of_the_broker(self, end: object) -> bool:
        return isinstance(end, self._said) and not isinstance(end, self._of_a_message)

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


class BoundedReader(asyncio.StreamReader):
    """A stream of frames that makes no room for one that is announced as too large."""

    async def readexactly(self, n: int) -> bytes:
        if n > FRAME_BYTES_MAX:
            raise ConnectionError(
                f"the broker sends a frame of {n} bytes; {FRAME_BYTES_MAX} (FRAME_BYTES_MAX) are"
                " allowed"
            )
        return await super().readexactly(n)


class BoundedTransport:
    """Makes the streams of a connection of aiormq, a ``TransportFactory`` there."""

    def __init__(self, *, is_tls: bool) -> None:
        self._is_tls = is_tls

    async def create(
        self, url: Any, *, ssl_context_provider: Any, **options: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect; failures are those of aiormq's own factories."""
        from aiormq.exceptions import AMQPConnectionError

        loop = asyncio.get_running_loop()
        context = await ssl_context_provider.get_context() if self._is_tls else None
        reader = BoundedReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.create_connection(
                lambda: protocol, url.host, url.port, ssl=context, **options
            )
        except OSError as error:
            raise AMQPConnectionError(*error.args) from error
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


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


# --- Kafka ---------------------------------------------------------------------------------------

KAFKA_ANSWER_S: Final = 15.0
"""How long, in seconds, the brokers may take for a batch."""
KAFKA_REQUEST_MS: Final = 10_000
KAFKA_PORT: Final = 9092
RESPONSE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes of one response of Kafka: the largest one names all partitions of a topic."""
RECORDS_BYTES: Final = 1 << 18
"""Bytes of the records that one request has for a partition."""


def kafka_target(url: str, secret: str | None) -> KafkaTarget:
    """A target of such a URL; ``secret`` is the password. Raises BadRequest."""
    found = TargetUrl(url)
    brokers = [
        one if ":" in one else f"{one}:{KAFKA_PORT}" for one in found.places.split(",") if one
    ]
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


def _bound_responses(connection: Any) -> None:
    """Bound what a connection of aiokafka reads: it has no limit of its own, and no place for
    one."""
    begin = connection._create_reader_task
    if hasattr(begin, "__wrapped__"):
        return

    @functools.wraps(begin)
    def bounded(self: Any) -> Any:
        read = self._reader.readexactly

        async def readexactly(n: int) -> Any:
            if not 0 <= n <= RESPONSE_BYTES_MAX:
                problem = (
                    f"the broker sends a response of {n} bytes; {RESPONSE_BYTES_MAX}"
                    " (RESPONSE_BYTES_MAX) are allowed"
                )
                LOGGER.warning("%s", problem)  # aiokafka says only that the connection has ended
                raise ConnectionError(problem)
            return await read(n)

        self._reader.readexactly = readexactly
        return begin(self)

    connection._create_reader_task = bounded


class KafkaTarget:
    """A topic of one cluster."""

    concurrency = 1

    def __init__(self, topic: str, options: dict[str, Any], *, batch_max: int = BATCH) -> None:
        """``options`` are those of ``AIOKafkaProducer``."""
        with needs("kafka"):
            import aiokafka
            import aiokafka.conn
            import aiokafka.errors
        _bound_responses(aiokafka.conn.AIOKafkaConnection)
        errors = aiokafka.errors
        self._aiokafka: Any = aiokafka
        self._kafka_error = errors.KafkaError
        self._of_a_record = (
            errors.MessageSizeTooLargeError, errors.RecordTooLargeError,
            errors.RecordListTooLargeError, errors.InvalidTimestampError,
            errors.CorruptRecordException,
        )  # fmt: skip
        """What the brokers answer to one record; all else is about a topic or the cluster."""
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
            acks="all", enable_idempotence=True, request_timeout_ms=KAFKA_REQUEST_MS,
            max_batch_size=RECORDS_BYTES, **self._options,
        )  # fmt: skip
        await self._producer.start()

    async def send(self, deliveries: Sequence[Delivery]) -> list[Outcome]:
        """Hand over all records, and wait for the answer to each."""
        async with asyncio.timeout(KAFKA_ANSWER_S):
            begun: list[asyncio.Future[Any]] = []
            for delivery in deliveries:
                begun.append(await self._begin(delivery))
                if begun[-1].done() and self._is_of_the_cluster(begun[-1].exception()):
                    break  # the next ones would wait for the same
            ends = await asyncio.gather(*begun, return_exceptions=True)
            ends += ends[-1:] * (len(deliveries) - len(ends))
        outcomes = [self._outcome(end) for end in ends]
        refused = next((one for one in outcomes if one.settled == "later"), None)
        if refused is not None:
            raise NotNow(refused.reason or "", outcomes)
        return outcomes

    async def _begin(self, delivery: Delivery) -> asyncio.Future[Any]:
        """The future of the brokers' answer for one record."""
        found = message(delivery)
        key = delivery.order_key or delivery.key
        headers = [(name, as_text(value).encode()) for name, value in found.headers.items()]
        try:
            answer: asyncio.Future[Any] = await self._producer.send(
                self._topic, found.body, None if key is None else key.encode(), headers=headers
            )
        except self._kafka_error as error:  # too large, seen before it was sent; no metadata
            answer = asyncio.get_running_loop().create_future()
            answer.set_exception(error)
        return answer

    def _outcome(self, end: Any) -> Outcome:
        if not isinstance(end, BaseException):
            return ACK
        if isinstance(end, self._too_large):
            return Outcome("reject", reason=why(end))
        return Outcome("later" if self._is_of_the_cluster(end) else "retry", reason=why(end))

    def _is_of_the_cluster(self, end: object) -> bool:
        return isinstance(end, self._kafka_error) and not isinstance(end, self._of_a_record)

    async def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await producer.stop()
