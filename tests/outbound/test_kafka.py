"""Kafka as a target, at the seam of aiokafka's producer. No broker takes part."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import aiokafka
import aiokafka.producer.producer as real_producer
import pytest
from aiokafka.errors import (
    InvalidTimestampError,
    KafkaConnectionError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    NotEnoughReplicasError,
    ProducerFenced,
    RecordTooLargeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)

from support.waiting import comes
from tests.outbound.conftest import in_time, running
from tests.outbound.endpoint import flooding
from tickwheel import Retry
from tickwheel.outbound import forward, runner
from tickwheel.outbound.target import target_of
from tickwheel.testing import TestWheel


class Record(NamedTuple):
    topic: str
    value: bytes
    key: bytes | None
    headers: list[tuple[str, bytes]]


class FakeProducer:
    """Stands for ``AIOKafkaProducer``: ``send`` gives a future of the brokers' answer."""

    made: ClassVar[list[FakeProducer]] = []
    records: ClassVar[list[Record]] = []
    refusals: ClassVar[list[Exception]] = []
    answers: ClassVar[dict[bytes, Exception]] = {}
    """Answers by value of a record; other records are accepted."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.started = self.stopped = 0
        FakeProducer.made.append(self)

    async def start(self) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        self.started += 1

    async def send(
        self, topic: str, value: bytes, key: bytes | None, *, headers: list[tuple[str, bytes]]
    ) -> asyncio.Future[None]:
        error = self.answers.get(value)
        if isinstance(error, MessageSizeTooLargeError):
            raise error
        future = asyncio.get_running_loop().create_future()
        if error is None:
            self.records.append(Record(topic, value, key, headers))
            future.set_result(None)
        else:
            future.set_exception(error)
        return future

    async def stop(self) -> None:
        self.stopped += 1


@pytest.fixture(autouse=True)
def producer(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeProducer]]:
    monkeypatch.setattr(aiokafka, "AIOKafkaProducer", FakeProducer)
    monkeypatch.setattr(runner, "PAUSE_S", 0.001)
    yield FakeProducer
    for kept in (FakeProducer.made, FakeProducer.records, FakeProducer.refusals):
        kept.clear()
    FakeProducer.answers.clear()


def test_the_fake_is_called_as_the_real_producer_is() -> None:
    import inspect

    import aiokafka.producer.producer as real

    options = inspect.signature(real.AIOKafkaProducer.__init__).parameters
    for url in ("kafka://a/?topic=t", "kafkas://u@a/?topic=t&sasl=plain"):
        target: Any = target_of(url, "p")
        assert target._options.keys() <= options.keys()
    assert {"acks", "enable_idempotence", "request_timeout_ms", "max_batch_size"} <= options.keys()
    sent = inspect.signature(real.AIOKafkaProducer.send).parameters
    assert [*sent][1:4] == ["topic", "value", "key"] and "headers" in sent


async def test_a_record_has_the_body_a_key_and_the_headers(
    wheel: TestWheel, producer: type[FakeProducer]
) -> None:
    first = await wheel.client.enqueue("t", b"1", key="order-1", order_key="ann")
    await wheel.client.enqueue("t", b"2", key="order-2", properties={"paid": True})
    await wheel.client.enqueue("t", b"3")
    async with running(wheel.client, target_of("kafka://a,b:9999/?topic=orders")):
        await wheel.settle()
    records = sorted(producer.records, key=lambda record: record.value)
    assert [(r.topic, r.value, r.key) for r in records] == [
        ("orders", b"1", b"ann"), ("orders", b"2", b"order-2"), ("orders", b"3", None),
    ]  # fmt: skip
    assert dict(records[0].headers)["tickwheel-dedupe-id"] == str(first.id).encode()
    assert dict(records[1].headers)["property-paid"] == b"true"
    (made,) = producer.made
    options = made.options
    assert options["acks"] == "all" and options["enable_idempotence"] is True
    assert options["bootstrap_servers"] == ["a:9092", "b:9999"]
    assert options["security_protocol"] == "PLAINTEXT"
    assert (made.started, made.stopped) == (1, 1)


async def test_user_and_tls_are_configured(wheel: TestWheel, producer: type[FakeProducer]) -> None:
    await wheel.client.enqueue("t", b"1")
    url = "kafkas://ann@a/?topic=orders&sasl=scram-sha-512"
    async with running(wheel.client, target_of(url, "anns")):
        await wheel.settle()
    options = producer.made[0].options
    assert options["security_protocol"] == "SASL_SSL" and options["ssl_context"] is not None
    assert options["sasl_mechanism"] == "SCRAM-SHA-512"
    assert (options["sasl_plain_username"], options["sasl_plain_password"]) == ("ann", "anns")


@pytest.mark.parametrize("size", [0x7FFFFFFF, -1, forward.RESPONSE_BYTES_MAX + 1])
async def test_an_oversized_response_is_not_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    monkeypatch.setattr(aiokafka, "AIOKafkaProducer", real_producer.AIOKafkaProducer)
    with flooding(struct.pack(">i", size), b"x" * (1 << 20)) as hostile:
        target = target_of(f"kafka://127.0.0.1:{hostile.port}/?topic=t")
        with pytest.raises(KafkaConnectionError):
            await target.connect()
        await target.close()
        assert hostile.sent < 50 * (1 << 20), "kernels take some of each try"
    assert "(RESPONSE_BYTES_MAX)" in caplog.text


async def test_a_record_with_a_time_that_the_brokers_refuse_has_failed(
    wheel: TestWheel, producer: type[FakeProducer]
) -> None:
    producer.answers[b"2"] = InvalidTimestampError()
    await wheel.client.configure("t", group="g", retry=Retry.none())
    await wheel.client.enqueue_columns("t", [b"1", b"2", b"3"])
    async with running(wheel.client, target_of("kafka://a/?topic=orders")):
        await comes(lambda: wheel.dead_letters("t", "g"))
    assert {record.value for record in producer.records} == {b"1", b"3"}


@pytest.mark.parametrize("error", [MessageSizeTooLargeError("1"), RecordTooLargeError("2")])
async def test_an_oversized_record_is_a_dead_letter_at_once(
    wheel: TestWheel, producer: type[FakeProducer], error: Exception
) -> None:
    producer.answers[b"large"] = error
    await wheel.client.configure("t", group="g", retry=Retry.fixed(delay=1, retries=5))
    await wheel.client.enqueue_columns("t", [b"1", b"large", b"2"])
    async with running(wheel.client, target_of("kafka://a/?topic=orders")):
        await wheel.settle()
    assert {record.value for record in producer.records} == {b"1", b"2"}
    (dead,) = await wheel.dead_letters("t", "g")
    assert type(error).__name__ in dead.failures[-1].reason


@pytest.mark.parametrize(
    "error",
    [
        NotEnoughReplicasError(), TopicAuthorizationFailedError("t"),
        UnknownTopicOrPartitionError(), KafkaTimeoutError(), ProducerFenced(),
    ],
)  # fmt: skip
async def test_cluster_errors_use_no_attempt(
    wheel: TestWheel, producer: type[FakeProducer], error: Exception
) -> None:
    producer.answers[b"2"] = error
    await wheel.client.configure("t", group="g", retry=Retry.none())
    await wheel.client.enqueue_columns("t", [b"1", b"2", b"3"])
    async with running(wheel.client, target_of("kafka://a/?topic=orders")):
        await comes(lambda: len(producer.records) == 2)
        producer.answers.clear()
        await in_time(wheel, lambda: len(producer.records) == 3)
        assert [record.value for record in producer.records] == [b"1", b"3", b"2"]
    assert await wheel.dead_letters("t", "g") == []


async def test_a_failing_producer_is_replaced(
    wheel: TestWheel, producer: type[FakeProducer]
) -> None:
    producer.refusals.append(KafkaConnectionError("nobody there"))
    producer.answers[b"1"] = KafkaConnectionError("it broke")
    await wheel.client.configure("t", group="g", retry=Retry.fixed(delay=1, retries=50))
    await wheel.client.enqueue("t", b"1")
    async with running(wheel.client, target_of("kafka://a/?topic=orders")) as made:
        await comes(lambda: made.trouble)
        await in_time(wheel, lambda: "it broke" in (made.trouble or ""))
        producer.answers.clear()
        await in_time(wheel, lambda: producer.records)
    assert len(producer.made) >= 3
    assert all(item.stopped == 1 for item in producer.made)
