"""A URL makes a target, or says what is wrong with it; a task is told to others as it is."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint

import pytest

from tests.outbound.conftest import Scripted, in_time, running
from tickwheel import BadRequest, Delivery
from tickwheel.outbound import target as target_module
from tickwheel.outbound.target import ACK, Message, Outcome, as_text, message, target_of
from tickwheel.testing import TestWheel

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nowhere", "url must begin with one of redis://"),
        ("http://host/", "kafka://, kafkas://, not 'http://'"),
        ("redis://user:secret@host/?stream=s", "url must not contain a password"),
        ("redis://host:port/?stream=s", "url is not a valid URL: "),
        ("redis:///0?stream=s", "url must name one host: redis://HOST"),
        ("redis://a,b/0?stream=s", "url must name one host"),
        ("redis://host/zero?stream=s", "the number of a database, not 'zero'"),
        ("redis://host/0", "url must have either stream=NAME or list=NAME"),
        ("redis://host/0?stream=s&list=l", "either stream=NAME or list=NAME"),
        ("redis://host/0?stream=", "url must have stream"),
        ("redis://host/0?stream=s&stream=t", "url has an option more than once"),
        ("redis://host/0?stream=s&maxlen=many", "maxlen of url must be between 1 and "),
        ("redis://host/0?stream=s&maxlen=0", "maxlen of url must be between 1 and "),
        (f"redis://host/0?stream=s&maxlen={'9' * 5_000}", "maxlen of url must be between 1 and "),
        (
            "redis://host/0?stream=s&batch=4097",
            "batch of url must be between 1 and 4096, not '4097'",
        ),
        ("redis://host/0?list=l&value=xml", "value of url must be json or body, not 'xml'"),
        ("redis://host/0?list=l&maxlen=9", "'maxlen' is not a valid option of redis://"),
        ("redis://host/0?stream=s&tsl=1", "'tsl' is not a valid option of redis://"),
        ("redis://host/0?stream", "the query of url is not valid"),
        ("amqp://host/", "url must have routing_key=QUEUE or exchange=NAME"),
        ("amqp://host/?routing_key=", "url must have routing_key"),
        ("amqp://host/?exchange=e&queue=q", "'queue' is not a valid option of amqp://"),
        ("kafka:///?topic=t", "url must name one host"),
        ("kafka://host/", "url must have topic: kafka://…?topic=…"),
        ("kafka://a@host/?topic=t&sasl=gssapi", "sasl of url must be plain or scram-sha-256 or"),
        ("kafka://host/?topic=t&sasl=plain", "'sasl' is not a valid option of kafka:"),
    ],
)
def test_an_invalid_url_names_the_problem(url: str, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        target_of(url)
    assert words in caught.value.message
    assert "secret" not in caught.value.message


def test_custom_targets_are_found_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{__name__}:carrier_target"
    theirs = EntryPoint(name="carrier", value=name, group="tickwheel.targets")
    monkeypatch.setattr(target_module, "entry_points", lambda group: {theirs}.copy())
    made = target_of("carrier://pigeon", "corn")
    assert isinstance(made, Carrier) and (made.url, made.secret) == ("carrier://pigeon", "corn")
    with pytest.raises(BadRequest, match="carrier://, not 'owl://'"):
        target_of("owl://post")


class Carrier(Scripted):
    """A target that somebody else has written."""

    def __init__(self, url: str, secret: str | None) -> None:
        super().__init__()
        self.url, self.secret = url, secret


def carrier_target(url: str, secret: str | None) -> Carrier:
    return Carrier(url, secret)


async def told(wheel: TestWheel) -> Message:
    """What a target gets of the task that is due."""
    messages: list[Message] = []

    async def take(deliveries: Sequence[Delivery]) -> list[Outcome]:
        messages.extend(map(message, deliveries))
        return [ACK] * len(deliveries)

    async with running(wheel.client, Scripted(take)):
        await wheel.settle()
    (one,) = messages
    return one


async def test_a_plain_tasks_message_has_body_id_and_times(wheel: TestWheel) -> None:
    receipt = await wheel.client.enqueue("t", b"\x00\xff", delay=1)
    await wheel.advance(1)
    assert await told(wheel) == Message(
        b"\x00\xff",
        {
            "tickwheel-dedupe-id": str(receipt.id),
            "tickwheel-id": str(receipt.id),
            "tickwheel-topic": "t",
            "tickwheel-enqueued-ms": receipt.due_ms - 1000,
            "tickwheel-due-ms": receipt.due_ms,
            "tickwheel-attempt": 1,
        },
    )


async def test_a_message_has_every_field_of_its_task(wheel: TestWheel) -> None:
    await wheel.client.enqueue(
        "t", b"{}", key="order-1", order_key="ann", tag="eu", priority=7, trace=TRACE,
        encoding="json;v=2", properties={"amount": 3, "paid": True, "rate": 0.5, "who": "ännie"},
    )  # fmt: skip
    headers = (await told(wheel)).headers
    for name in ("id", "dedupe-id", "enqueued-ms", "due-ms"):
        del headers[f"tickwheel-{name}"]
    assert headers == {
        "tickwheel-topic": "t", "tickwheel-attempt": 1,
        "tickwheel-key": "order-1", "tickwheel-order-key": "ann", "tickwheel-tag": "eu",
        "tickwheel-priority": 7, "tickwheel-encoding": "json;v=2", "traceparent": TRACE,
        "content-type": "application/json", "property-amount": 3, "property-paid": True,
        "property-rate": 0.5, "property-who": "ännie",
    }  # fmt: skip


async def test_the_dedupe_id_is_stable_over_attempts(wheel: TestWheel) -> None:
    messages: list[Message] = []

    async def refuse(deliveries: Sequence[Delivery]) -> list[Outcome]:
        messages.extend(map(message, deliveries))
        return [Outcome("retry", 1.0)] * len(deliveries)

    receipt = await wheel.client.enqueue("t", b"x")
    async with running(wheel.client, Scripted(refuse)):
        await in_time(wheel, lambda: len(messages) == 2)
    await wheel.crash()
    async with running(wheel.client, Scripted(refuse)):
        await in_time(wheel, lambda: len(messages) == 3)
    assert [item.headers["tickwheel-attempt"] for item in messages] == [1, 2, 3]
    assert {item.headers["tickwheel-dedupe-id"] for item in messages} == {str(receipt.id)}


async def test_a_packed_body_goes_out_as_it_was_stored(wheel: TestWheel) -> None:
    packer = wheel.new_client(compress="zlib", compress_over=10)
    await packer.enqueue("t", b"a" * 1000, encoding="text")
    result = await told(wheel)
    assert len(result.body) < 100
    assert result.headers["tickwheel-encoding"] == "text,zlib"
    assert "content-type" not in result.headers


@pytest.mark.parametrize(
    ("value", "text"), [("x", "x"), (True, "true"), (False, "false"), (-3, "-3"), (0.1, "0.1")]
)
def test_header_values_are_formatted_as_text(value: str | float | bool, text: str) -> None:
    assert as_text(value) == text
