"""Spans and metrics of a real daemon, as a real receiver of OTLP gets them: one trace over a kill
and two attempts, an endpoint that is down, and what is sampled."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from e2e.stores import killed_on
from support.daemon import Daemon
from support.otlp_receiver import OtlpReceiver, Span
from support.waiting import comes
from tickwheel import Client, Delivery, Task, Worker, embedded
from tickwheel.otel import instrument, processing
from tickwheel.server.metrics import catalogue

killed = killed_on("sqlite", "redis", "postgresql")


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as made:
        yield made


class Program:
    """What a program's own SDK has exported."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]


def ids(span: ReadableSpan) -> tuple[str, str]:
    assert span.context is not None
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


def linked(span: ReadableSpan) -> list[tuple[str, str]]:
    contexts = [link.context for link in span.links]
    return [(f"{item.trace_id:032x}", f"{item.span_id:016x}") for item in contexts]


async def test_a_trace_spans_a_kill_and_two_attempts(
    receiver: OtlpReceiver, killed: Daemon
) -> None:
    program = Program()
    killed.settings |= {"otlp_endpoint": receiver.url, "trace_sample": 1}
    await killed.astart()
    async with instrument(Client(killed.url, send_timeout=10), tracer_provider=program.tracers) as (
        client
    ):
        await client.create_group("orders.close", "shop")
        with program.tracers.get_tracer("shop").start_as_current_span("request"):
            receipt = await client.enqueue("orders.close", b"42", delay=0.1, key="order-42")
        (first,) = await client.pull("orders.close", group="shop", wait=20)
        with (
            pytest.raises(ConnectionError),
            processing(first, tracer_provider=program.tracers),
        ):
            raise ConnectionError("the shop does not answer")
        assert await first.nack(delay=0) == "retrying"
        await comes(lambda: receiver.named("tickwheel.deliver"))
        await killed.arestart(kill=True)
        await work(instrument(Worker(client, signals=False), tracer_provider=program.tracers))
        delivered = await comes(lambda: receiver.named("tickwheel.deliver")[1:])

    (request,), (send,) = program.named("request"), program.named("send orders.close")
    trace_id, span_id = ids(send)
    assert send.parent is not None and f"{send.parent.span_id:016x}" == ids(request)[1]
    attempts = program.named("process orders.close")
    assert [linked(attempt) for attempt in attempts] == [[(trace_id, span_id)]] * 2
    outcomes = [(item.attributes or {}).get("tickwheel.outcome") for item in attempts]
    assert outcomes == [None, "ack"]
    deliveries = [receiver.named("tickwheel.deliver")[0], *delivered]
    assert [(delivery.trace_id, delivery.parent_id) for delivery in deliveries] == [
        (trace_id, span_id)
    ] * 2
    assert [delivery.attributes["tickwheel.attempt"] for delivery in deliveries] == [1, 2]
    assert {delivery.attributes["messaging.message.id"] for delivery in deliveries} == {
        str(receipt.id)
    }
    (commit,) = receiver.named("tickwheel.commit")
    assert commit.links == [(trace_id, span_id)]
    assert commit.trace_id != trace_id and commit.parent_id == ""
    says(killed, commit, deliveries[0])


def says(daemon: Daemon, commit: Span, first: Span) -> None:
    kind = daemon.store.partition(":")[0]
    assert commit.attributes.pop("tickwheel.batch") > 0
    assert commit.attributes == {
        "messaging.system": "tickwheel",
        "messaging.batch.message_count": 1,
        "tickwheel.store": kind,
    }
    assert commit.took_ms >= 0
    assert commit.resource["service.name"] == "tickwheel"
    attributes = first.attributes
    assert first.took_ms == pytest.approx(attributes["tickwheel.lateness_s"] * 1000, abs=1)
    assert attributes["messaging.destination.name"] == "orders.close"
    assert attributes["messaging.consumer.group.name"] == "shop"
    assert (attributes["tickwheel.key"], attributes["tickwheel.wait_s"]) == ("order-42", 0.1)


async def work(worker: Worker) -> None:
    """Work until the first delivery was handled."""

    @worker.on("orders.close", group="shop")
    async def close(delivery: Delivery) -> None:
        worker.stop()

    await asyncio.wait_for(worker.run(), 60)


async def test_late_spans_have_a_cause_and_unsampled_tasks_no_span(
    make_daemon: Callable[..., Daemon], receiver: OtlpReceiver
) -> None:
    daemon = make_daemon(otlp_endpoint=receiver.url, trace_sample=0.5)
    await daemon.astart()
    low, high = "0" * 15 + "1", "f" * 16
    traces = {
        "mine": f"00-{'a' * 16}{low}-b7ad6b7169203331-01",
        "others": f"00-{'a' * 16}{high}-b7ad6b7169203331-01",
        "unsampled": f"00-{'a' * 16}{low}-b7ad6b7169203331-00",
    }
    async with Client(daemon.url) as client:
        await client.create_group("t", "g")
        await client.enqueue_many([Task("t", b"", key=key, trace=traces[key]) for key in traces])
        await client.enqueue("t", b"", key="none")
        await asyncio.sleep(1.0)  # real time: the wait that is the cause
        deliveries = await client.pull("t", group="g", wait=20)
        while len(deliveries) < 4:
            deliveries += await client.pull("t", group="g", wait=20)
        for delivery in deliveries:
            await delivery.ack()
    assert await daemon.aterminate() == 0  # and sends what it has
    (span,) = receiver.named("tickwheel.deliver")
    assert span.attributes["tickwheel.key"] == "mine"
    assert span.attributes["tickwheel.lateness_cause"] == "no_subscriber"
    assert span.attributes["tickwheel.lateness_s"] >= 1.0
    (commit,) = receiver.named("tickwheel.commit")
    assert commit.links == [("a" * 16 + low, "b7ad6b7169203331")]


async def test_an_endpoint_that_is_down_costs_a_warning_and_is_counted(
    make_daemon: Callable[..., Daemon], receiver: OtlpReceiver, tmp_path: Path
) -> None:
    headers = tmp_path / "headers"
    headers.write_text("# of the collector\nAuthorization: Bearer secret-42\n\n")
    daemon = make_daemon(
        http=True, otlp_endpoint=receiver.url, trace_sample=1, otlp_interval_s=1,
        otlp_headers_file=headers,
    )  # fmt: skip
    receiver.status = 400
    await daemon.astart()
    async with Client(daemon.url) as client:
        program = Program()
        instrument(client, tracer_provider=program.tracers)
        await client.enqueue("t", b"")
        async with client.subscribe("t") as deliveries:
            await (await anext(deliveries)).ack()
        await comes(lambda: metric(daemon, "tickwheel_spans_dropped_total") == 2)
        await comes(lambda: metric(daemon, "tickwheel_otlp_failures_total") >= 3)
        await comes(lambda: daemon.log_text().count("otlp_failed") == 1)
        receiver.status = 200
        await comes(lambda: "otlp_works_again" in daemon.log_text())
        await client.enqueue("t", b"")
        await comes(lambda: metric(daemon, "tickwheel_spans_total") >= 1)
    assert {header["authorization"] for header in receiver.headers} == {"Bearer secret-42"}
    assert "secret-42" not in daemon.log_text()
    receiver.status = 503  # is tried again, for longer than a stop may take
    assert await daemon.aterminate(timeout_s=20) == 0


def metric(daemon: Daemon, name: str) -> float:
    with urllib.request.urlopen(f"{daemon.http}/metrics") as answer:  # noqa: S310  # http
        lines = answer.read().decode().splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"{name} "))
    return float(value)


async def test_every_metric_is_sent_also_without_a_port_to_scrape(
    make_daemon: Callable[..., Daemon], receiver: OtlpReceiver
) -> None:
    daemon = make_daemon(otlp_endpoint=receiver.url, otlp_interval_s=1)
    await daemon.astart()
    async with Client(daemon.url) as client:
        await client.enqueue_many([Task("orders", b"")] * 3)
        async with client.subscribe("orders", group="billing") as deliveries:
            for _ in range(3):
                await (await anext(deliveries)).ack()
        acked = await comes(lambda: of_billing(receiver, "tickwheel_acked_total", 3))
    assert acked.sum.is_monotonic and acked.sum.aggregation_temporality == 2  # cumulative
    names = {*catalogue.names(), *catalogue.PROCESS}
    assert names <= receiver.metrics.keys()
    assert receiver.metrics["tickwheel_connections"].gauge.data_points[0].as_int == 1
    late = receiver.metrics["tickwheel_delivery_lateness_seconds"]
    (point,) = late.histogram.data_points
    assert (late.unit, point.count, sum(point.bucket_counts)) == ("s", 3, 3)
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
    assert point.attributes[0].value.string_value == "orders"


def of_billing(receiver: OtlpReceiver, name: str, value: int) -> object:
    """The metric, once it has this value for the group."""
    answer = receiver.metrics.get(name)
    if answer is None:
        return None
    for point in answer.sum.data_points:
        by_key = {attribute.key: attribute.value.string_value for attribute in point.attributes}
        if by_key == {"topic": "orders", "group": "billing"} and point.as_int == value:
            return answer
    return None


async def test_an_embedded_daemon_sends_spans(receiver: OtlpReceiver) -> None:
    program = Program()
    settings = {"otlp_endpoint": receiver.url, "trace_sample": 1, "otlp_interval_s": 1}
    async with embedded("memory:", **settings) as client:
        instrument(client, tracer_provider=program.tracers)
        await client.enqueue("t", b"")
        async with client.subscribe("t") as deliveries:
            await (await anext(deliveries)).ack()
        await comes(lambda: "tickwheel_acked_total" in receiver.metrics)
    (send,) = program.named("send t")
    (span,) = receiver.named("tickwheel.deliver")
    assert (span.trace_id, span.parent_id) == ids(send)
