"""OpenTelemetry for clients and workers: a span for each enqueue and for each attempt.

    from tickwheel.otel import instrument, processing

    client = instrument(Client())       # or tickwheel.sync.Client()
    worker = instrument(Worker(client))

    async for delivery in deliveries:   # without a Worker
        with processing(delivery):
            ...

Requires the extra ``otel``, but uses only the OpenTelemetry API: without a configured SDK there are
no spans, and tasks carry no trace. docs/tracing.md lists the attributes of spans.

Invariants: recording never changes the outcome of a task. Methods are wrapped on a single client
object, so other clients have no overhead. A task's ``trace`` contains the context of its producer's
span, unless the caller sets it. An attempt is the root of a new trace and has a link to the
producer's span, because it can run days later, and several times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from tickwheel.client import Client, Task
from tickwheel.client.requests import SYNCHRONOUS, needs_loop
from tickwheel.client.subscription import reason_of
from tickwheel.client.worker import Reject, RetryLater, Snooze, Worker
from tickwheel.errors import BadRequest, TickwheelError, module_needs_extra, shown, text_of
from tickwheel.model.records import id_time_ms
from tickwheel.model.values import place_in_trace
from tickwheel.version import __version__

with module_needs_extra("tickwheel.otel", "otel"):
    from opentelemetry import context as contexts
    from opentelemetry import metrics, trace
    from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode, TraceFlags

if TYPE_CHECKING:
    from tickwheel import sync
    from tickwheel.client.delivery import Delivered

__all__ = ["instrument", "processing", "uninstrument"]

SYSTEM = "tickwheel"
BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""Bucket bounds of durations in seconds, from the semantic conventions for messaging."""
NOT_FAILED = frozenset(("ack", "release", "snooze"))
"""Outcomes of an attempt that are not failures."""
NOT_SETTLED = "not_settled"
"""``error.type`` of an attempt that was not settled because its lease was lost or its worker
ended."""

T = TypeVar("T", bound="Client | sync.Client | Worker")


def instrument(
    target: T,
    *,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
    parent: bool = False,
) -> T:
    """Trace the enqueues of a client, or the attempts of a worker and the enqueues of its client.

    Return the same object. A second call replaces the first. ``tracer_provider`` and
    ``meter_provider`` default to the global providers. With ``parent``, an attempt is a child of
    the producer's span in the same trace, instead of the root of a linked trace.
    """
    tracing = _tracing(tracer_provider, meter_provider, parent)
    uninstrument(target)
    if isinstance(target, Worker):
        target.observers.append(tracing)
        _wrap(tracing, target.client)
    else:
        _wrap(tracing, target)
    return target


def uninstrument(target: Client | sync.Client | Worker) -> None:
    """Stop tracing a client, or a worker and its client. Do nothing if it is not traced."""
    if isinstance(target, Worker):
        target.observers[:] = [o for o in target.observers if not isinstance(o, Tracing)]
        target = target.client
    if not callable(getattr(target, "enqueue_nowait", None)):
        raise BadRequest(f"target must be a Client or a Worker, not {shown(target)}")
    for name in (*PREPARERS, "transaction"):
        vars(target).pop(name, None)


@contextmanager
def processing(
    delivery: Delivered,
    *,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
    parent: bool = False,
) -> Iterator[trace.Span]:
    """Create a span for the processing of a delivery without a ``Worker``.

    The parameters are those of ``instrument``. An exception that leaves the block is recorded and
    raised again. The caller must settle the delivery."""
    attempt = _tracing(tracer_provider, meter_provider, parent).begin(delivery)
    try:
        yield attempt.span
    except BaseException as error:
        attempt.end("", error if isinstance(error, Exception) else None)
        raise
    attempt.end("")


@lru_cache(maxsize=64)
def _tracing(
    tracer_provider: trace.TracerProvider | None,
    meter_provider: metrics.MeterProvider | None,
    parent: bool,
) -> Tracing:
    return Tracing(tracer_provider, meter_provider, parent=parent)


class Tracing:
    """A tracer with its metrics. ``parent`` is that of ``instrument``."""

    def __init__(
        self,
        tracer_provider: trace.TracerProvider | None,
        meter_provider: metrics.MeterProvider | None,
        *,
        parent: bool,
    ) -> None:
        self.tracer = trace.get_tracer("tickwheel", __version__, tracer_provider)
        self.parent = parent
        meter = metrics.get_meter("tickwheel", __version__, meter_provider)
        self.sent = meter.create_counter(
            "messaging.client.sent.messages",
            "{message}",
            "Tasks passed to enqueue calls, including failed calls.",
        )
        self.send_s = meter.create_histogram(
            "messaging.client.operation.duration", "s", "Time from an enqueue call to its answer.",
            explicit_bucket_boundaries_advisory=BOUNDS_S,
        )  # fmt: skip
        self.consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Deliveries processed."
        )
        self.process_s = meter.create_histogram(
            "messaging.process.duration", "s",
            "Duration of attempts, from the start to the end of the handler.",
            explicit_bucket_boundaries_advisory=BOUNDS_S,
        )  # fmt: skip

    def begin(self, delivery: Delivered) -> Attempt:
        """Begin the span of an attempt and make it the current span."""
        return Attempt(self, delivery)


# --- enqueues ------------------------------------------------------------------------------------


class Sending:
    """The span of one enqueue.

    It is never the current span, because background work that the client starts during the call,
    such as its connection, would inherit it."""

    def __init__(
        self,
        tracing: Tracing,
        topics: Iterable[Any],
        count: int | None = None,
        body: Any = None,
    ) -> None:
        """``count`` is the number of tasks in a batch, or None for a single task with ``body``."""
        self._tracing = tracing
        self.count = 1 if count is None else count
        names = {topic for topic in topics if isinstance(topic, str)}
        self._labels: dict[str, Any] = {
            "messaging.system": SYSTEM,
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
        }
        name = "send"
        if len(names) == 1:
            (topic,) = names
            name = f"send {topic}"
            self._labels["messaging.destination.name"] = topic
        attributes = dict(self._labels)
        if count is not None:
            attributes["messaging.batch.message_count"] = count
        elif isinstance(body, (bytes, bytearray, memoryview)):
            attributes["messaging.message.body.size"] = len(body)
        self._span = tracing.tracer.start_span(name, kind=SpanKind.PRODUCER, attributes=attributes)
        self._began_s = time.perf_counter()

    @property
    def trace(self) -> str | None:
        """The ``trace`` for the tasks, or None without tracing."""
        context = self._span.get_span_context()
        if not context.is_valid:  # without an SDK, pass on the caller's context
            context = trace.get_current_span().get_span_context()
        if not context.is_valid:
            return None
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def end(self, error: BaseException | None, result: Any = None) -> None:
        """End the span with an error, or with the receipt of a single task."""
        if error is None:
            task_id = getattr(result, "id", None)
            if task_id is not None:
                self._span.set_attribute("messaging.message.id", str(task_id))
            if (outcome := getattr(result, "outcome", "stored")) != "stored":
                self._span.set_attribute("tickwheel.outcome", outcome)
        else:
            self._labels["error.type"] = _record_error(self._span, error)
        self._span.end()
        tracing = self._tracing
        tracing.sent.add(self.count, self._labels)
        tracing.send_s.record(time.perf_counter() - self._began_s, self._labels)

    def end_with(self, future: Any) -> None:
        """End the span with the result of a completed asyncio or threaded future."""
        if future.cancelled():
            self.end(None)
        else:
            error = future.exception()
            self.end(error, None if error is not None else future.result())


Arguments = tuple[Any, ...]
Named = dict[str, Any]
Call = tuple[Arguments, Named]
"""Positional and named arguments of a client's method. The method checks them itself."""


def _prepare_one(tracing: Tracing, arguments: Arguments, named: Named) -> tuple[Sending, Call]:
    body = arguments[1] if len(arguments) > 1 else named.get("body")
    sending = Sending(tracing, [*arguments[:1], named.get("topic")][:1], body=body)
    if named.get("trace") is None and (text := sending.trace) is not None:
        named["trace"] = text
    return sending, (arguments, named)


def _prepare_many(tracing: Tracing, arguments: Arguments, named: Named) -> tuple[Sending, Call]:
    positional = [*arguments, *([named.pop("tasks")] if "tasks" in named else [])]
    tasks = list(positional[0]) if positional else []
    topics = [task.topic for task in tasks if isinstance(task, Task)]
    sending = Sending(tracing, topics, len(tasks))
    if (text := sending.trace) is not None:
        tasks = [
            replace(task, trace=text) if isinstance(task, Task) and task.trace is None else task
            for task in tasks
        ]
    return sending, ((tasks, *positional[1:]) if positional else (), named)


def _prepare_columns(tracing: Tracing, arguments: Arguments, named: Named) -> tuple[Sending, Call]:
    """Prepare columns. Their tasks have only bodies and delays, and therefore carry no context."""
    positional = [*arguments, *(named.pop(name) for name in ("topic", "bodies") if name in named)]
    bodies = list(positional[1]) if len(positional) > 1 else []
    sending = Sending(tracing, positional[:1], len(bodies))
    return sending, (
        (positional[0], bodies, *positional[2:]) if len(positional) > 1 else tuple(positional),
        named,
    )


PREPARERS: Mapping[str, Callable[..., tuple[Sending, Call]]] = {
    "enqueue": _prepare_one,
    "enqueue_nowait": _prepare_one,
    "oneway": _prepare_one,
    "enqueue_many": _prepare_many,
    "enqueue_columns": _prepare_columns,
}
"""Client's method for enqueues → the function that begins its span."""


def _wrap(tracing: Tracing, client: Any) -> None:
    """Wrap methods of a synchronous or asynchronous client so that they create spans."""
    is_awaited = isinstance(client, Client)
    for name in PREPARERS:
        setattr(client, name, _traced(tracing, getattr(client, name), name, is_awaited=is_awaited))
    begin = client.transaction

    @wraps(begin)
    def transaction(*arguments: Any, **named: Any) -> Any:
        new_transaction = begin(*arguments, **named)
        # The asynchronous ``enqueue`` calls ``enqueue_many``; the synchronous one does not.
        names = ("enqueue_many",) if is_awaited else ("enqueue", "enqueue_many")
        for name in names:
            method = getattr(new_transaction, name)
            traced = _traced(tracing, method, name, is_awaited=is_awaited)
            setattr(new_transaction, name, traced)
        return new_transaction

    client.transaction = transaction


def _traced(
    tracing: Tracing, method: Callable[..., Any], name: str, *, is_awaited: bool
) -> Callable[..., Any]:
    prepare = PREPARERS[name]

    @wraps(method)
    async def awaited(*arguments: Any, **named: Any) -> Any:
        sending, (arguments, named) = prepare(tracing, arguments, named)
        try:
            result = await method(*arguments, **named)
        except BaseException as error:
            sending.end(error)
            raise
        sending.end(None, result)
        return result

    @wraps(method)
    def called(*arguments: Any, **named: Any) -> Any:
        sending, (arguments, named) = prepare(tracing, arguments, named)
        try:
            result = method(*arguments, **named)
        except BaseException as error:
            sending.end(error)
            raise
        if name == "enqueue_nowait":
            result.add_done_callback(sending.end_with)
        else:
            sending.end(None, result)
        return result

    if is_awaited and name != "enqueue_nowait":
        return needs_loop(awaited, f"Client.{name}", SYNCHRONOUS)
    return called


# --- attempts ------------------------------------------------------------------------------------


class Attempt:
    """The span of one attempt, which is the current span until ``end``."""

    def __init__(self, tracing: Tracing, delivery: Delivered) -> None:
        self._tracing = tracing
        self._delivery = delivery
        producer = _context_of(delivery.trace)
        root = contexts.Context()
        if producer is not None and tracing.parent:
            root = trace.set_span_in_context(trace.NonRecordingSpan(producer), root)
        self.span = tracing.tracer.start_span(
            f"process {delivery.topic}",
            context=root,
            kind=SpanKind.CONSUMER,
            links=[] if producer is None or tracing.parent else [Link(producer)],
            attributes=_attributes(delivery),
        )
        self._current = contexts.attach(trace.set_span_in_context(self.span))
        self._began_s = time.perf_counter()

    def end(self, outcome: str, error: BaseException | None = None) -> None:
        """End the span.

        ``outcome`` tells how the delivery was settled; it is empty if this is unknown. ``error`` is
        the exception that the handler raised."""
        contexts.detach(self._current)
        labels = _labels(self._delivery)
        if outcome == "nothing":
            labels["error.type"] = NOT_SETTLED
            self.span.set_status(StatusCode.ERROR, "its lease was lost, or its worker ended")
            self.span.set_attribute("error.type", NOT_SETTLED)
        elif error is not None and outcome not in NOT_FAILED:
            labels["error.type"] = _record_error(self.span, error, self._delivery)
        if outcome:
            self.span.set_attribute("tickwheel.outcome", outcome)
        self.span.end()
        self._tracing.consumed.add(1, labels)
        self._tracing.process_s.record(time.perf_counter() - self._began_s, labels)


def _labels(delivery: Delivered) -> dict[str, Any]:
    """Return the attributes that the spans and metrics of attempts share."""
    return {
        "messaging.system": SYSTEM,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": delivery.topic,
        "messaging.consumer.group.name": delivery.group,
    }


def _attributes(delivery: Delivered) -> dict[str, Any]:
    attributes = _labels(delivery)
    attributes |= {
        "messaging.message.id": str(delivery.id),
        "messaging.message.body.size": len(delivery.raw[3]),  # as stored
        "tickwheel.attempt": delivery.attempt,
        "tickwheel.failures": delivery.failures,
        "tickwheel.due_ms": delivery.due_ms,
        "tickwheel.wait_s": max(0, delivery.due_ms - id_time_ms(delivery.id)) / 1000,
    }
    if delivery.attempt == 1:
        attributes["tickwheel.lateness_s"] = (delivery.delivered_ms - delivery.due_ms) / 1000
    if delivery.deaths:
        attributes["tickwheel.deaths"] = delivery.deaths
    if delivery.key is not None:
        attributes["tickwheel.key"] = delivery.key
    if delivery.order_key is not None:
        attributes["tickwheel.order_key"] = delivery.order_key
    return attributes


def _context_of(traceparent: str | None) -> SpanContext | None:
    """Return the span context that a task's ``trace`` contains. The daemon has validated it."""
    if traceparent is None:
        return None
    _, trace_id, span_id, flags = place_in_trace(traceparent)
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))


def _record_error(span: trace.Span, error: BaseException, delivery: Delivered | None = None) -> str:
    """Record an error in its span and return its type.

    For an encrypted delivery, record only types and line numbers, because texts can contain parts
    of the body."""
    kind = error.code if isinstance(error, TickwheelError) else type(error).__qualname__
    is_bug = isinstance(error, Exception) and not isinstance(error, (Reject, RetryLater, Snooze))
    is_secret = delivery is not None and delivery.encrypted_with is not None
    if is_bug and delivery is not None and is_secret:
        attributes = {"exception.type": kind, "exception.stacktrace": reason_of(error, delivery)}
        span.add_event("exception", attributes)
    elif isinstance(error, Exception) and is_bug:
        span.record_exception(error)
    span.set_status(StatusCode.ERROR, kind if is_secret else text_of(error))
    span.set_attribute("error.type", kind)
    return kind
