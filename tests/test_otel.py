"""The spans of clients and workers, read from the SDK's exporter in memory, on the test wheel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, use_span

from support.traces import TRACE
from tickwheel import (
    BadRequest,
    Client,
    Delivery,
    Reject,
    Retry,
    RetryLater,
    Snooze,
    Task,
    Worker,
)
from tickwheel.otel import _context_of, instrument, processing, uninstrument
from tickwheel.testing import SyncTestWheel, TestWheel


class Seen:
    """What was exported, by whom."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.meters = MeterProvider([self._reader])
        self.tracer = self.tracers.get_tracer("a program")

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def instrument(self, target: Any, **options: Any) -> Any:
        return instrument(
            target, tracer_provider=self.tracers, meter_provider=self.meters, **options
        )

    def points(self, name: str) -> list[Any]:
        data = self._reader.get_metrics_data()
        assert data is not None
        return [
            point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


def traceparent(context: SpanContext | None) -> str:
    assert context is not None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def place(span: ReadableSpan) -> str:
    return traceparent(span.context)


def links(span: ReadableSpan) -> list[str]:
    return [traceparent(link.context) for link in span.links]


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
async def wheel() -> AsyncIterator[TestWheel]:
    async with TestWheel() as made:
        yield made


@pytest.fixture
def blocking() -> Iterator[SyncTestWheel]:
    with SyncTestWheel() as made:
        yield made


# --- enqueues ------------------------------------------------------------------------------------


async def test_an_enqueue_span_is_the_parent_of_the_task(wheel: TestWheel, seen: Seen) -> None:
    client = seen.instrument(wheel.client)
    with seen.tracer.start_as_current_span("request") as request:
        receipt = await client.enqueue("ORDERS.CLOSE", b"42", delay=60, key="order-42")
    span = seen.one("send ORDERS.CLOSE")
    assert span.kind is SpanKind.PRODUCER
    assert span.parent is not None and span.parent.span_id == request.get_span_context().span_id
    assert dict(span.attributes or {}) == {
        "messaging.system": "tickwheel",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "ORDERS.CLOSE",
        "messaging.message.id": str(receipt.id),
        "messaging.message.body.size": 2,
    }
    (task,) = await wheel.enqueued("ORDERS.CLOSE")
    assert task.trace == place(span)


async def test_the_callers_own_trace_stays(wheel: TestWheel, seen: Seen) -> None:
    client = seen.instrument(wheel.client)
    await client.enqueue("t", b"", trace=TRACE)
    await client.enqueue_many([Task("t", b"", trace=TRACE), Task("t", b"", trace=TRACE)])
    assert [task.trace for task in await wheel.enqueued("t")] == [TRACE] * 3


async def test_a_noop_tracer_adds_no_trace(wheel: TestWheel) -> None:
    client = instrument(wheel.client, tracer_provider=trace.NoOpTracerProvider())
    await client.enqueue("t", b"")
    await client.enqueue_many([Task("t", b"")])
    assert [task.trace for task in await wheel.enqueued("t")] == [None, None]


async def test_the_callers_trace_is_passed_on_without_a_tracer(wheel: TestWheel) -> None:
    client = instrument(wheel.client, tracer_provider=trace.NoOpTracerProvider())
    context = _context_of(TRACE)
    assert context is not None
    with use_span(NonRecordingSpan(context)):
        await client.enqueue("t", b"")
    assert [task.trace for task in await wheel.enqueued("t")] == [TRACE]


async def test_a_batch_is_one_span_and_keeps_the_callers_tasks(
    wheel: TestWheel, seen: Seen
) -> None:
    client = seen.instrument(wheel.client)
    tasks = [Task("t", b"a", key="k"), Task("t", b"b", trace=TRACE)]
    await client.enqueue_many(tasks)
    assert [task.trace for task in tasks] == [None, TRACE]
    span = seen.one("send t")
    assert (span.attributes or {})["messaging.batch.message_count"] == 2
    traces = {task.body: task.trace for task in await wheel.enqueued("t")}
    assert traces == {b"a": place(span), b"b": TRACE}
    await client.enqueue_many(iter([Task("t", b""), Task("u", b"")]))
    mixed = seen.one("send").attributes or {}
    assert mixed["messaging.batch.message_count"] == 2
    assert "messaging.destination.name" not in mixed


async def test_columns_have_a_span_but_no_trace(wheel: TestWheel, seen: Seen) -> None:
    client = seen.instrument(wheel.client)
    await client.enqueue_columns("t", (b"%d" % n for n in range(3)), delay=1)
    await client.enqueue_columns(topic="t", bodies=[b""])
    counts = [
        (span.attributes or {})["messaging.batch.message_count"] for span in seen.named("send t")
    ]
    assert counts == [3, 1]
    assert [task.trace for task in await wheel.enqueued("t")] == [None] * 4


async def test_a_future_ends_its_span(wheel: TestWheel, seen: Seen) -> None:
    client = seen.instrument(wheel.client)
    future = client.enqueue_nowait("t", b"")
    assert seen.spans == []
    receipt = await future
    await wheel.settle()
    assert (seen.one("send t").attributes or {})["messaging.message.id"] == str(receipt.id)
    with wheel.failing_store():
        future = client.enqueue_nowait("fails", b"")
        with pytest.raises(Exception, match="refuse all batches"):
            await future
        await wheel.settle()
    span = seen.one("send fails")
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "refused"


async def test_errors_are_recorded_and_raised(wheel: TestWheel, seen: Seen) -> None:
    client = seen.instrument(wheel.client)
    with pytest.raises(BadRequest):
        await client.enqueue("t", b"", delay=-1)
    with pytest.raises(BadRequest):
        client.enqueue_nowait("not a name", b"")
    with pytest.raises(BadRequest):
        await client.enqueue_many([Task("t", b""), "no task"])
    with pytest.raises(BadRequest):
        await client.enqueue([], b"")
    with pytest.raises(BadRequest):
        await client.enqueue_columns([], [b""])
    with pytest.raises(TypeError, match="colour"):
        await client.enqueue("t", b"", colour="blue")
    with pytest.raises(TypeError, match="topic"):
        await client.enqueue()
    kinds = [(span.name, (span.attributes or {})["error.type"]) for span in seen.spans]
    assert kinds == [
        ("send t", "bad_request"),
        ("send not a name", "bad_request"),
        ("send t", "bad_request"),
        ("send", "bad_request"),
        ("send", "bad_request"),
        ("send t", "TypeError"),
        ("send", "TypeError"),
    ]
    assert all(span.events[0].name == "exception" for span in seen.spans)
    assert await wheel.enqueued("t") == []


async def test_oneway_and_transactions_have_spans(wheel: TestWheel, seen: Seen) -> None:
    client = seen.instrument(wheel.client)
    await client.oneway("one", b"")
    async with client.transaction("payments") as transaction:
        await transaction.enqueue("half", b"")
        await transaction.enqueue_many([Task("halves", b""), Task("halves", b"")])
    await wheel.settle()
    for topic in ("one", "half", "halves"):
        span = seen.one(f"send {topic}")
        assert {task.trace for task in await wheel.enqueued(topic)} == {place(span)}


async def test_instrumentation_can_be_undone_and_repeated(wheel: TestWheel, seen: Seen) -> None:
    client = seen.instrument(seen.instrument(wheel.client))
    await client.enqueue("t", b"")
    assert len(seen.spans) == 1
    uninstrument(client)
    uninstrument(client)
    await client.enqueue("t", b"")
    assert len(seen.spans) == 1
    assert "enqueue" not in vars(client)
    with pytest.raises(BadRequest, match="must be a Client or a Worker, not 'x'"):
        instrument("x")  # type: ignore[type-var]


@pytest.mark.parametrize("name", ["enqueue", "enqueue_many", "enqueue_columns", "oneway"])
def test_instrumented_calls_without_an_event_loop_raise(seen: Seen, name: str) -> None:
    client = seen.instrument(Client())
    with pytest.raises(BadRequest, match=rf"Client\.{name} is asynchronous.*sync\.Client"):
        getattr(client, name)("t", b"x")


def test_the_client_without_an_event_loop_makes_the_same_spans(
    blocking: SyncTestWheel, seen: Seen
) -> None:
    client = seen.instrument(blocking.client)
    with seen.tracer.start_as_current_span("request") as request:
        receipt = client.enqueue("t", b"1", key="k")
        client.enqueue_nowait("nowait", b"").result(5)
    span = seen.one("send t")
    assert span.parent is not None and span.parent.span_id == request.get_span_context().span_id
    assert (span.attributes or {})["messaging.message.id"] == str(receipt.id)
    with client.transaction("payments") as transaction:
        transaction.enqueue("half", b"")
    with client.subscribe("t") as deliveries:
        for delivery in deliveries:
            with processing(delivery, tracer_provider=seen.tracers):
                delivery.ack()
            break
    assert links(seen.one("process t")) == [place(span)]
    with client.subscribe("half") as deliveries:
        assert next(iter(deliveries)).trace == place(seen.one("send half"))


# --- attempts ------------------------------------------------------------------------------------


class Handled:
    """A traced worker with one handler of ``t``, which raises what its body names."""

    ENDS = {
        b"retry": RetryLater(1, "not yet"),
        b"reject": Reject("no such order"),
        b"snooze": Snooze(3600),
        b"fails": ValueError("it fails"),
    }

    def __init__(self, seen: Seen, client: Client, **options: Any) -> None:
        self.worker = seen.instrument(Worker(client, signals=False), **options)
        self.current: list[int] = []

        @self.worker.on("t", retry=Retry.fixed(5, retries=1))
        async def handle(delivery: Delivery) -> None:
            self.note()
            if delivery.body == b"settles":
                await delivery.ack()
            if delivery.body in self.ENDS:
                raise self.ENDS[delivery.body]

        @self.worker.on("threads")
        def work(delivery: Delivery) -> None:
            self.note()

    def note(self) -> None:
        self.current.append(trace.get_current_span().get_span_context().span_id)


async def test_each_attempt_is_a_trace_linked_to_the_producers(
    wheel: TestWheel, seen: Seen
) -> None:
    handled = Handled(seen, wheel.client)
    receipt = await wheel.client.enqueue(
        "t", b"fails", delay=60, key="order-42", retry=Retry.fixed(5, retries=1)
    )
    async with wheel.working(handled.worker):
        await wheel.advance("2m")
    send = seen.one("send t")
    first, second = seen.named("process t")
    for attempt in (first, second):
        assert attempt.kind is SpanKind.CONSUMER
        assert attempt.parent is None
        assert links(attempt) == [place(send)]
        assert attempt.status.status_code is StatusCode.ERROR
        assert attempt.status.description == "it fails"
        assert attempt.events[0].name == "exception"
    assert len({place(span).split("-")[1] for span in (send, first, second)}) == 3
    assert handled.current == [s.context.span_id for s in (first, second) if s.context]
    assert dict(first.attributes or {}) == {
        "messaging.system": "tickwheel",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "t",
        "messaging.consumer.group.name": "default",
        "messaging.message.id": str(receipt.id),
        "messaging.message.body.size": 5,
        "tickwheel.attempt": 1,
        "tickwheel.failures": 0,
        "tickwheel.due_ms": receipt.due_ms,
        "tickwheel.wait_s": 60.0,
        "tickwheel.lateness_s": 0.0,
        "tickwheel.key": "order-42",
        "tickwheel.outcome": "nack",
        "error.type": "ValueError",
    }
    again = second.attributes or {}
    assert (again["tickwheel.attempt"], again["tickwheel.failures"]) == (2, 1)
    assert "tickwheel.lateness_s" not in again


@pytest.mark.parametrize(
    ("body", "outcome", "status", "kind"),
    [
        (b"", "ack", StatusCode.UNSET, None),
        (b"settles", "settled", StatusCode.UNSET, None),
        (b"snooze", "snooze", StatusCode.UNSET, None),
        (b"reject", "reject", StatusCode.ERROR, "Reject"),
        (b"retry", "nack", StatusCode.ERROR, "RetryLater"),
        (b"fails", "nack", StatusCode.ERROR, "ValueError"),
    ],
)
async def test_spans_have_the_outcome_of_an_attempt(
    wheel: TestWheel, seen: Seen, body: bytes, outcome: str, status: StatusCode, kind: str | None
) -> None:
    handled = Handled(seen, wheel.client)
    await wheel.client.enqueue("t", body)
    async with wheel.working(handled.worker):
        await wheel.settle()
    span = seen.named("process t")[0]
    answer = span.attributes or {}
    assert (answer["tickwheel.outcome"], span.status.status_code) == (outcome, status)
    assert answer.get("error.type") == kind
    assert bool(span.events) == (body == b"fails")


async def test_spans_of_encrypted_tasks_have_only_types_and_lines(
    wheel: TestWheel, seen: Seen
) -> None:
    client = wheel.new_client(keys={"a": b"k" * 32})
    worker = seen.instrument(Worker(client))

    @worker.on("t")
    async def reads(delivery: Delivery) -> None:
        raise ValueError(f"what is {delivery.body.decode()}?")

    await client.enqueue("t", b"a secret")
    async with wheel.working(worker):
        await wheel.settle()
    span = seen.one("process t")
    [event] = span.events
    told = f"{span.status.description} {span.attributes} {event.attributes}"
    assert span.status.description == "ValueError"
    assert "in reads" in told and "secret" not in told


async def test_a_body_that_cannot_be_unpacked_is_traced_as_it_is_stored(
    wheel: TestWheel, seen: Seen
) -> None:
    """The handler need not look into it, so that tracing must not, either."""
    await wheel.new_client(keys={"a": b"k" * 32}).enqueue("t", b"a secret")
    worker = seen.instrument(Worker(wheel.client))

    @worker.on("t")
    async def looks_away(delivery: Delivery) -> None:
        """It is done with it."""

    async with wheel.working(worker):
        await wheel.settle()
    answer = seen.one("process t").attributes or {}
    assert answer["tickwheel.outcome"] == "ack"
    assert answer["messaging.message.body.size"] == 12 + len(b"a secret") + 16
    assert await wheel.enqueued() == []


async def test_a_function_in_a_thread_has_its_span(wheel: TestWheel, seen: Seen) -> None:
    handled = Handled(seen, wheel.client)
    await wheel.client.enqueue_many([Task("threads", b""), Task("threads", b"")])
    async with wheel.working(handled.worker):
        await wheel.settle()
    spans = seen.named("process threads")
    assert sorted(handled.current) == sorted(s.context.span_id for s in spans if s.context)
    assert len(set(handled.current)) == 2


async def test_a_timed_out_handlers_span_is_an_error(wheel: TestWheel, seen: Seen) -> None:
    worker = seen.instrument(Worker(wheel.client, signals=False))

    @worker.on("slow", timeout=0.01)
    async def slow(delivery: Delivery) -> None:
        await asyncio.Event().wait()

    async with wheel.working(worker):
        await wheel.client.enqueue("slow", b"", retry=Retry.none())
        await wheel.settle()
    span = seen.one("process slow")
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["tickwheel.outcome"] == "nack"
    assert (span.attributes or {})["error.type"] == "TimeoutError"


async def test_an_attempt_can_be_a_child_span(wheel: TestWheel, seen: Seen) -> None:
    handled = Handled(seen, wheel.client, parent=True)
    await wheel.client.enqueue("t", b"")
    async with wheel.working(handled.worker):
        await wheel.settle()
    send, attempt = seen.one("send t"), seen.one("process t")
    assert send.context is not None and attempt.parent is not None
    assert attempt.parent.span_id == send.context.span_id
    assert attempt.links == ()


async def test_deliveries_without_a_worker_can_be_traced(wheel: TestWheel, seen: Seen) -> None:
    await wheel.client.enqueue_many([Task("t", b"a", trace=TRACE), Task("t", b"b")])
    outer = seen.tracer.start_span("outer")
    with use_span(outer):
        async with wheel.client.subscribe("t") as deliveries:
            first = await anext(deliveries)
            with processing(first, tracer_provider=seen.tracers) as span:
                assert trace.get_current_span() is span
                await first.ack()
            assert trace.get_current_span() is outer
            second = await anext(deliveries)
            failing = processing(second, tracer_provider=seen.tracers)
            with pytest.raises(ValueError, match="it fails"), failing:
                raise ValueError("it fails")
            assert not second.settled
            await second.ack()
    acked, failed = seen.named("process t")
    assert (acked.parent, links(acked)) == (None, [TRACE])
    assert (failed.parent, links(failed)) == (None, [])
    assert acked.status.status_code is StatusCode.UNSET
    assert failed.status.status_code is StatusCode.ERROR


async def test_metrics_follow_the_conventions(wheel: TestWheel, seen: Seen) -> None:
    handled = Handled(seen, wheel.client)
    await wheel.client.enqueue_many([Task("t", b"a"), Task("t", b"reject")])
    async with wheel.working(handled.worker):
        await wheel.settle()
    (sent,) = seen.points("messaging.client.sent.messages")
    assert (sent.value, sent.attributes["messaging.destination.name"]) == (2, "t")
    (send_s,) = seen.points("messaging.client.operation.duration")
    assert send_s.count == 1 and 0 < send_s.sum < 60
    consumed = seen.points("messaging.client.consumed.messages")
    assert {point.attributes.get("error.type"): point.value for point in consumed} == {
        None: 1,
        "Reject": 1,
    }
    assert sum(point.count for point in seen.points("messaging.process.duration")) == 2
