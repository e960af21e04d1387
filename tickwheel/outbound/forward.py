"""Targets that are brokers: Redis, RabbitMQ and Kafka.

    redis://[USER@]HOST[:PORT][/DB]?stream=NAME[&maxlen=N]
    redis://[USER@]HOST[:PORT][/DB]?list=NAME[&value=json|body]
    amqp://[USER@]HOST[:PORT][/VHOST]?routing_key=QUEUE
    amqp://[USER@]HOST[:PORT][/VHOST]?exchange=NAME[&routing_key=KEY]
    kafka://[USER@]HOST[:PORT][,HOST…]/?topic=NAME[&sasl=plain|scram-sha-256|scram-sha-512]

``rediss://``, ``amqps://`` and ``kafkas://`` use TLS. A target sends one batch at a time, so that
tasks are written in the order in which they came due. Each target imports the library of its
broker.

* Redis: ``XADD`` to a stream or ``RPUSH`` to a list, with one pipeline per batch. An entry of a
  stream has the field ``body`` and a field for each header. An element of a list is a JSON object
  with the same fields, or only the body. This module implements RESP with hiredis, so that a batch
  is one write and few reads, without a client's overhead per command.
* RabbitMQ (AMQP 0-9-1), with publisher confirms. Without an exchange the routing key names a queue.
  Messages are persistent and mandatory: a message that no queue accepts is returned and counts as
  failed. Queues, exchanges and bindings must exist.
* Kafka: an idempotent producer that waits for all in-sync replicas. A record's key is the task's
  order key or, without one, its key, so related tasks share a partition. Without either, Kafka
  chooses the partition.

Invariants: each delivery is acked only by the answer to its own command, message or record. If the
connection breaks before the answer, the delivery counts as not sent. The few errors that concern a
single task are listed here and count as its failure. A task that is too large for Kafka is
rejected, since retries cannot succeed. All other errors concern the broker and raise
``NotNow``, even if they affect only part of a batch.
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
    error_text,
    message,
    needs,
)
from tickwheel.waiting import cancel_all

if TYPE_CHECKING:
    from tickwheel.api.tasks import Value

LOGGER = logging.getLogger("tickwheel.outbound")

ANSWER_S: Final = 10.0
"""Maximum seconds for a batch of Redis or RabbitMQ."""

# --- Redis ---------------------------------------------------------------------------------------

REDIS_PORT: Final = 6379
READ_BYTES: Final = 1 << 16
REPLY_BYTES_MAX: Final = 9_999
"""Maximum bytes of a reply of Redis. If a reply is longer, the connection is closed before the
reply is read."""
_TOO_LARGE: Final = re.compile(rb"\n(?:[*%%~>|]|\$\d{%d,})" % (len(str(REPLY_BYTES_MAX)) + 1))
"""Matches the beginning of a reply with several values or a longer string. No command here has such
a reply, and the parser would allocate memory for the announced size."""
TASK_ERROR_PREFIXES: Final = (
    "WRONGTYPE ",
    "ERR Elements are too large",
    "ERR string exceeds maximum allowed size",
    "ERR Protocol error: invalid bulk length",
)
"""Prefixes of errors that concern a single command. All other errors describe the server."""


class RedisFailed(NotNow):
    """The server refuses commands. The text is its error."""


def redis_target(url: str, secret: str | None) -> RedisTarget:
    """Return a target from a URL, with ``secret`` as the password. Raise BadRequest."""
    target_url = TargetUrl(url)
    database = target_url.path or "0"
    if not database.isascii() or not database.isdigit():
        raise BadRequest(
            f"the path of url must be the number of a database, not {target_url.path!r:.60}"
        )
    batch = target_url.batch_max()
    if target_url.has_option("stream") == target_url.has_option("list"):
        raise BadRequest("url must have either stream=NAME or list=NAME")
    command_maker: Maker
    if target_url.has_option("stream"):
        command_maker = StreamEntries(
            target_url.option("stream"), target_url.number("maxlen", 0, 1, 1 << 53)
        )
    else:
        is_json = target_url.choice("value", "json", "body") == "json"
        command_maker = ListElements(target_url.option("list"), is_json=is_json)
    is_tls = target_url.scheme == "rediss"
    login = (
        ("AUTH", *(() if target_url.user is None else (target_url.user,)), secret)
        if secret
        else None
    )
    target = RedisTarget(
        target_url.host(), target_url.port(REDIS_PORT), is_tls=is_tls, login=login,
        database=database, make=command_maker, batch_max=batch,
    )  # fmt: skip
    target_url.check_all_read()
    return target


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
        self._tail, self._unparsed_bytes = b"\n", 0
        """The last bytes read, and the number of bytes read since the last complete reply."""
        self._asking = asyncio.Lock()

    async def connect(self) -> None:
        """Connect, log in and select the database."""
        host, port = self._address
        self._streams = await asyncio.open_connection(host, port, ssl=self._tls)
        self._parser = self._hiredis.Reader(notEnoughData=_INCOMPLETE)
        self._tail, self._unparsed_bytes = b"\n", 0
        pack = self._hiredis.pack_command
        async with asyncio.timeout(ANSWER_S):
            replies = await self._ask(b"".join(map(pack, self._hello)), len(self._hello))
        for reply in replies:
            if isinstance(reply, Exception):
                raise RedisFailed(str(reply))

    async def send(self, deliveries: Sequence[Delivery]) -> list[Outcome]:
        """Send a command for each delivery, all in one write."""
        pack, make = self._hiredis.pack_command, self._make.command
        commands = b"".join([pack(make(message(delivery))) for delivery in deliveries])
        async with asyncio.timeout(ANSWER_S):
            replies = await self._ask(commands, len(deliveries))
        outcomes = [
            _outcome_of_error(str(reply)) if isinstance(reply, Exception) else ACK
            for reply in replies
        ]
        refused = next((outcome for outcome in outcomes if outcome.settled == "later"), None)
        if refused is not None:
            raise RedisFailed(refused.reason or "", outcomes)
        return outcomes

    async def close(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].transport.abort()

    async def _ask(self, commands: bytes, count: int) -> list[Any]:
        """Send ``count`` commands and return their replies, for one caller at a time.

        Close the connection after an error, since late replies could still arrive on it."""
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
            while (reply := get()) is not _INCOMPLETE:
                self._unparsed_bytes = 0
                replies.append(reply)
        if len(replies) > count:
            raise RedisFailed(f"the server gave {len(replies)} replies to {count} commands")
        return replies

    def _check(self, data: bytes) -> None:
        """Raise RedisFailed for a reply that is too large."""
        self._unparsed_bytes += len(data)
        recent = self._tail + data
        if self._unparsed_bytes > READ_BYTES + REPLY_BYTES_MAX or _TOO_LARGE.search(recent):
            raise RedisFailed(
                f"the server answered with more than {REPLY_BYTES_MAX} bytes (REPLY_BYTES_MAX)"
            )
        self._tail = recent[-32:]


def _outcome_of_error(error: str) -> Outcome:
    return Outcome("retry" if error.startswith(TASK_ERROR_PREFIXES) else "later", reason=error)


_INCOMPLETE: Final = object()
"""Returned by the parser for an incomplete reply."""


class StreamEntries:
    """``XADD`` of each message. The stream keeps about ``maxlen`` entries, or all entries if
    ``maxlen`` is 0."""

    def __init__(self, name: str, maxlen: int) -> None:
        trim: tuple[str, ...] = ("MAXLEN", "~", str(maxlen)) if maxlen else ()
        self._head = ("XADD", name, *trim, "*", "body")

    def command(self, task_message: Message) -> tuple[str | bytes, ...]:
        """Return the words of the command for one message."""
        args: list[str | bytes] = [*self._head, task_message.body]
        for name, value in task_message.headers.items():
            args += (name, value if type(value) is str else as_text(value))
        return tuple(args)


class ListElements:
    """``RPUSH`` of each message, as JSON with its headers or only its body."""

    def __init__(self, name: str, *, is_json: bool) -> None:
        self._name = name
        self._is_json = is_json

    def command(self, task_message: Message) -> tuple[str | bytes, ...]:
        """Return the words of the command for one message."""
        if not self._is_json:
            return "RPUSH", self._name, task_message.body
        try:
            body = {"body": task_message.body.decode()}
        except UnicodeDecodeError:
            body = {"body_base64": base64.b64encode(task_message.body).decode()}
        text = json.dumps(body | {"headers": task_message.headers}, separators=(",", ":"))
        return "RPUSH", self._name, text


Maker = StreamEntries | ListElements


# --- RabbitMQ ------------------------------------------------------------------------------------

AMQP_PORT: Final = 5672
AMQPS_PORT: Final = 5671
AMQP_USER: Final = "guest"
FRAME_BYTES_MAX: Final = 1 << 20
"""Maximum bytes of a received frame. The limit of RabbitMQ itself is 128 KiB."""
BLOCKED: Final = "the broker has blocked the connection because of a memory or disk alarm"
NAME_BYTES_MAX: Final = 128
"""Maximum bytes of a header's name in AMQP."""
HEADERS_BYTES_MAX: Final = 64 * 1024
"""Maximum bytes of headers for properties of a task; further properties are left out. All headers
must fit into one RabbitMQ frame of at most 128 KiB."""


def amqp_target(url: str, secret: str | None) -> AmqpTarget:
    """Return a target from a URL, with ``secret`` as the password. Raise BadRequest."""
    target_url = TargetUrl(url)
    is_tls = target_url.scheme == "amqps"
    exchange = target_url.option("exchange", "")
    if not exchange and not target_url.has_option("routing_key"):
        raise BadRequest("url must have routing_key=QUEUE or exchange=NAME")
    target = AmqpTarget(
        exchange,
        target_url.option("routing_key", "" if exchange else None),
        host=target_url.host(),
        port=target_url.port(AMQPS_PORT if is_tls else AMQP_PORT),
        login=target_url.user or AMQP_USER,
        password=secret or AMQP_USER,
        virtualhost=target_url.path or "/",
        ssl=is_tls,
        ssl_context=ssl.create_default_context() if is_tls else None,
        batch_max=target_url.batch_max(),
    )
    target_url.check_all_read()
    return target


class AmqpTarget:
    """An exchange of a broker with a routing key."""

    concurrency = 1

    def __init__(
        self, exchange: str, routing_key: str, *, batch_max: int = BATCH, **options: Any
    ) -> None:
        """``options`` are the connection options of aio-pika."""
        with needs("amqp"):
            import aio_pika
            import aiormq.exceptions as errors
        self._aio_pika: Any = aio_pika
        is_tls = bool(options.get("ssl"))

        class Bounded(aio_pika.Connection):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                self.kwargs["transport_factory"] = BoundedTransport(is_tls=is_tls)

        self._bounded = Bounded
        self._returned = errors.PublishError
        self._message_errors = (
            errors.PublishError, errors.ChannelPreconditionFailed, errors.ConnectionSyntaxError,
            errors.ConnectionFrameError, errors.ConnectionUnexpectedFrame,
        )  # fmt: skip
        """Errors that concern a single message, which was returned or could not be encoded."""
        self._broker_errors = errors.DeliveryError, errors.ChannelClosed, errors.ConnectionClosed
        """All errors of the broker, such as an unconfirmed message or a closed channel."""
        self._exchange_name, self._routing_key = exchange, routing_key
        self._options = options
        self.batch_max = batch_max
        self._connection: Any = None
        self._exchange: Any = None

    async def connect(self) -> None:
        """Connect and check that the exchange exists."""
        self._connection = await self._aio_pika.connect(
            connection_class=self._bounded, **self._options
        )
        channel = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
        if self._exchange_name:
            self._exchange = await channel.get_exchange(self._exchange_name, ensure=True)
        else:
            self._exchange = channel.default_exchange

    async def send(self, deliveries: Sequence[Delivery]) -> list[Outcome]:
        """Publish all deliveries, and wait until each is confirmed."""
        tasks = [asyncio.ensure_future(self._publish(delivery)) for delivery in deliveries]
        try:
            await asyncio.wait(tasks, timeout=ANSWER_S)
            is_blocked = not all(task.done() for task in tasks) and await self._is_blocked()
        finally:
            await cancel_all(tasks)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return self._outcomes(results, BLOCKED if is_blocked else None)

    async def _is_blocked(self) -> bool:
        """Return whether the broker has blocked this connection because of an alarm."""
        try:
            async with asyncio.timeout(0):
                await self._connection.transport.connection.ready()
        except TimeoutError:
            return True
        return False

    def _outcomes(
        self, results: Sequence[BaseException | None], refusal: str | None
    ) -> list[Outcome]:
        """Return the outcomes. Raise NotNow for an error that concerns the broker. Raise
        any error that does not come from the broker."""
        for result in results:
            if refusal is None and result is not None and self._is_broker_error(result):
                refusal = error_text(result)
        outcomes = []
        for result in results:
            if result is None:
                outcomes.append(ACK)
            elif isinstance(result, self._returned):
                outcomes.append(Outcome("retry", reason=error_text(result)))
            elif refusal is not None:
                outcomes.append(Outcome("later", reason=refusal))
            elif isinstance(result, asyncio.CancelledError):
                raise TimeoutError
            else:
                raise result
        if refusal is not None:
            raise NotNow(refusal, outcomes)
        return outcomes

    async def _publish(self, delivery: Delivery) -> None:
        await self._exchange.publish(self._message(delivery), self._routing_key, mandatory=True)

    def _is_broker_error(self, result: object) -> bool:
        return isinstance(result, self._broker_errors) and not isinstance(
            result, self._message_errors
        )

    def _message(self, delivery: Delivery) -> Any:
        task_message = message(delivery)
        steps = (delivery.encoding or "").partition(",")[2]
        return self._aio_pika.Message(
            task_message.body,
            headers=headers_of(task_message.headers),
            message_id=str(task_message.headers[DEDUPE_ID]),
            content_type=task_message.headers.get("content-type"),
            content_encoding=steps or None,
            priority=delivery.priority,
            delivery_mode=self._aio_pika.DeliveryMode.PERSISTENT,
        )

    async def close(self) -> None:
        connection, self._connection, self._exchange = self._connection, None, None
        if connection is not None:
            await connection.close()


class BoundedReader(asyncio.StreamReader):
    """A stream reader that refuses frames with an announced size above the limit."""

    async def readexactly(self, n: int) -> bytes:
        if n > FRAME_BYTES_MAX:
            raise ConnectionError(
                f"the broker sent a frame of {n} bytes; the limit is {FRAME_BYTES_MAX}"
                " (FRAME_BYTES_MAX)"
            )
        return await super().readexactly(n)


class BoundedTransport:
    """A ``TransportFactory`` of aiormq with bounded streams."""

    def __init__(self, *, is_tls: bool) -> None:
        self._is_tls = is_tls

    async def create(
        self, url: Any, *, ssl_context_provider: Any, **options: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect. Raise the same errors as the factories of aiormq."""
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


def headers_of(fields: Mapping[str, Value]) -> dict[str, Value]:
    """Return AMQP headers, whose names have at most 128 bytes and which must fit into one frame.

    Properties that do not fit are left out."""
    headers: dict[str, Value] = {}
    bytes_left = HEADERS_BYTES_MAX
    for name, value in fields.items():
        if name.startswith(PROPERTY):
            length = len(name.encode())
            size = length + (len(value.encode()) if isinstance(value, str) else 8) + 8
            if length > NAME_BYTES_MAX or size > bytes_left:
                continue
            bytes_left -= size
        headers[name] = value
    return headers


# --- Kafka ---------------------------------------------------------------------------------------

KAFKA_ANSWER_S: Final = 15.0
"""Maximum seconds for a batch of Kafka."""
KAFKA_REQUEST_MS: Final = 10_000
KAFKA_PORT: Final = 9092
RESPONSE_BYTES_MAX: Final = 16 * 1024 * 1024
"""Maximum bytes of a response of Kafka. The largest response lists all partitions of a topic."""
RECORDS_BYTES: Final = 1 << 18
"""Maximum bytes of the records for a partition in one request."""


def kafka_target(url: str, secret: str | None) -> KafkaTarget:
    """Return a target from a URL, with ``secret`` as the password. Raise BadRequest."""
    target_url = TargetUrl(url)
    brokers = [
        broker if ":" in broker else f"{broker}:{KAFKA_PORT}"
        for broker in target_url.hosts.split(",")
        if broker
    ]
    if not brokers:
        target_url.host()  # raises the error
    is_tls, protocol = (
        target_url.scheme == "kafkas",
        "SSL" if target_url.scheme == "kafkas" else "PLAINTEXT",
    )
    options: dict[str, Any] = {"bootstrap_servers": brokers}
    if is_tls:
        options["ssl_context"] = ssl.create_default_context()
    if target_url.user is not None:
        mechanism = target_url.choice("sasl", "plain", "scram-sha-256", "scram-sha-512")
        protocol = "SASL_SSL" if is_tls else "SASL_PLAINTEXT"
        options |= {"sasl_mechanism": mechanism.upper(), "sasl_plain_username": target_url.user}
        options["sasl_plain_password"] = secret or ""
    options["security_protocol"] = protocol
    batch = target_url.batch_max()
    target = KafkaTarget(target_url.option("topic"), options, batch_max=batch)
    target_url.check_all_read()
    return target


def _bound_responses(connection: Any) -> None:
    """Limit the size of responses in connections of aiokafka, which has no such option."""
    begin = connection._create_reader_task
    if hasattr(begin, "__wrapped__"):
        return

    @functools.wraps(begin)
    def bounded(self: Any) -> Any:
        read = self._reader.readexactly

        async def readexactly(n: int) -> Any:
            if not 0 <= n <= RESPONSE_BYTES_MAX:
                problem = (
                    f"the broker sends a response of {n} bytes; the limit is {RESPONSE_BYTES_MAX}"
                    " (RESPONSE_BYTES_MAX)"
                )
                LOGGER.warning("%s", problem)  # aiokafka reports only a closed connection
                raise ConnectionError(problem)
            return await read(n)

        self._reader.readexactly = readexactly
        return begin(self)

    connection._create_reader_task = bounded


class KafkaTarget:
    """A topic of a cluster."""

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
        self._record_errors = (
            errors.MessageSizeTooLargeError, errors.RecordTooLargeError,
            errors.RecordListTooLargeError, errors.InvalidTimestampError,
            errors.CorruptRecordException,
        )  # fmt: skip
        """Errors that concern a single record. All other errors concern the topic or cluster."""
        self._too_large = (
            aiokafka.errors.MessageSizeTooLargeError,
            aiokafka.errors.RecordTooLargeError,
        )
        self._topic = topic
        self._options = options
        self.batch_max = batch_max
        self._producer: Any = None

    async def connect(self) -> None:
        """Create a producer and connect it to the cluster."""
        self._producer = self._aiokafka.AIOKafkaProducer(
            acks="all", enable_idempotence=True, request_timeout_ms=KAFKA_REQUEST_MS,
            max_batch_size=RECORDS_BYTES, **self._options,
        )  # fmt: skip
        await self._producer.start()

    async def send(self, deliveries: Sequence[Delivery]) -> list[Outcome]:
        """Send all records and wait for the answer to each."""
        async with asyncio.timeout(KAFKA_ANSWER_S):
            answers: list[asyncio.Future[Any]] = []
            for delivery in deliveries:
                answers.append(await self._begin(delivery))
                if answers[-1].done() and self._is_cluster_error(answers[-1].exception()):
                    break  # the next records would fail in the same way
            results = await asyncio.gather(*answers, return_exceptions=True)
            results += results[-1:] * (len(deliveries) - len(results))
        outcomes = [self._outcome(result) for result in results]
        refused = next((outcome for outcome in outcomes if outcome.settled == "later"), None)
        if refused is not None:
            raise NotNow(refused.reason or "", outcomes)
        return outcomes

    async def _begin(self, delivery: Delivery) -> asyncio.Future[Any]:
        """Return a future for the brokers' answer to one record."""
        task_message = message(delivery)
        key = delivery.order_key or delivery.key
        headers = [(name, as_text(value).encode()) for name, value in task_message.headers.items()]
        try:
            answer: asyncio.Future[Any] = await self._producer.send(
                self._topic,
                task_message.body,
                None if key is None else key.encode(),
                headers=headers,
            )
        except (
            self._kafka_error
        ) as error:  # there is no metadata, or the record is too large to send
            answer = asyncio.get_running_loop().create_future()
            answer.set_exception(error)
        return answer

    def _outcome(self, result: Any) -> Outcome:
        if not isinstance(result, BaseException):
            return ACK
        if isinstance(result, self._too_large):
            return Outcome("reject", reason=error_text(result))
        return Outcome(
            "later" if self._is_cluster_error(result) else "retry", reason=error_text(result)
        )

    def _is_cluster_error(self, result: object) -> bool:
        return isinstance(result, self._kafka_error) and not isinstance(result, self._record_errors)

    async def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await producer.stop()
