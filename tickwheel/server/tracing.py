"""Spans of the daemon, by sampling: a batch's commit, and a delivery, for tasks that are traced.

``tickwheel.commit`` is a trace of its own, linked to the producers of its sampled tasks.
``tickwheel.deliver`` is a child of its task's producer: from the due time until DELIVER was
written, with the cause when that is late. A task is sampled when its ``trace`` says so and its
trace id is in the daemon's share (``trace_sample``): then all of its deliveries are, and other
daemons choose the same.

Invariants: the event loop only notes what spans are to say; they are made in threads of their own,
and sent by the SDK's. What waits is bounded, and dropped and counted beyond. An endpoint that does
not answer is a warning each ten minutes and nothing else. Without ``otlp_endpoint`` nobody imports
this.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from tickwheel.errors import BadRequest
from tickwheel.model.lateness import LATE_MS
from tickwheel.model.records import id_time_ms
from tickwheel.model.values import place_in_trace
from tickwheel.version import __version__

if TYPE_CHECKING:
    from tickwheel.clock import Clock
    from tickwheel.engine.topics import Dispatch
    from tickwheel.model.kinds import Effects
    from tickwheel.model.lateness import Causes
    from tickwheel.server.settings import Settings

NOTES_MAX = 2_048
"""Spans that may wait to be made; as many may wait to be sent."""
LINKS_MAX = 32
"""Producers that the span of one commit names."""
EVERY_S = 0.5
"""How often, in seconds, spans are made of what was noted."""
SEND_EVERY_MS = 1_000
SEND_TIMEOUT_S = 5.0
STOP_S = 2.0
"""How long, in seconds, the last spans may take to be sent when the daemon stops."""
QUIET_S = 600.0
"""An endpoint that does not answer is a warning once in so many seconds."""
LOGGERS = ("opentelemetry.exporter", "opentelemetry.sdk")
REASON_LENGTH_MAX = 300

T = TypeVar("T")


class DeliveryNote(NamedTuple):
    """What the span of a delivery says. Not the row: its body would stay in memory."""

    task_id: int
    due_ms: int
    topic: str
    key: str | None
    trace: str
    attempt: int
    failures: int
    group: str
    consumer: str
    sent_ms: int
    cause: str | None


class CommitNote(NamedTuple):
    """What the span of a commit says."""

    number: int
    tasks: int
    began_ns: int
    ended_ns: int
    traces: list[str]


class Exports:
    """How exports end, told from any thread to the event loop's: counts, and few warnings."""

    def __init__(self, settings: Settings, on_event: Callable[[str, str], None]) -> None:
        """Raises BadRequest for a file of headers that is not right."""
        self.url = (settings.otlp_endpoint or "").rstrip("/")
        self.headers = headers_of(settings.otlp_headers_file)
        self.resource = Resource.create(
            {
                "service.name": "tickwheel",
                "service.version": __version__,
                "service.instance.id": settings.node,
            }
        )
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._quiet_until_s = 0.0
        self._is_failing = False
        self.spans_under_way = 0
        """Spans that were made and not sent yet."""
        self.spans_sent = 0
        self.spans_dropped = 0
        self.failures = 0
        """Exports of spans or metrics that the endpoint has not taken."""
        self._reason = _Reason()

    def listen(self) -> None:
        """Keep what the SDK logs of failures out of the log: it does so with each try."""
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self._reason)
            logging.getLogger(name).propagate = False

    def ended(self, what: str, spans: int, *, sent: bool, why: str = "") -> None:
        """An export of ``what`` is over, of so many spans; ``why`` it was not sent, where the SDK
        has not logged that."""
        with suppress(RuntimeError):  # the loop is closed: nobody counts any more
            self._loop.call_soon_threadsafe(self._note, what, spans, sent, why)

    def _note(self, what: str, spans: int, sent: bool, why: str) -> None:
        self.spans_under_way -= spans
        if sent:
            self.spans_sent += spans
            if self._is_failing:
                self._is_failing = False
                self._on_event("otlp_works_again", f"{self.url} takes {what}")
            return
        self.spans_dropped += spans
        self.failures += 1
        if self._loop.time() >= self._quiet_until_s:
            self._quiet_until_s = self._loop.time() + QUIET_S
            self._is_failing = True
            why = why or self._reason.text or "no reason is known"
            self._on_event("otlp_failed", f"{self.url} did not take {what}: {why}")


class Tracing:
    """Notes what is sampled, and makes spans of it. ``start`` it, ``stop`` it."""

    def __init__(self, settings: Settings, clock: Clock, exports: Exports) -> None:
        self._bound = round(settings.trace_sample * 2**64)
        self._store = settings.store.partition(":")[0]
        self._clock = clock
        self._exports = exports
        self._deliveries: list[DeliveryNote] = []
        self._commits: list[CommitNote] = []
        sender = OTLPSpanExporter(
            f"{exports.url}/v1/traces", headers=exports.headers, timeout=SEND_TIMEOUT_S
        )
        self._provider = TracerProvider(ALWAYS_ON, exports.resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                _Told(sender, exports),
                max_queue_size=NOTES_MAX,
                schedule_delay_millis=SEND_EVERY_MS,
                max_export_batch_size=NOTES_MAX // 4,
            )
        )
        self._tracer = self._provider.get_tracer("tickwheel.daemon", __version__)
        self._making: asyncio.Task[None] | None = None

    # --- on the event loop ---------------------------------------------------------------------

    def is_sampled(self, trace: str) -> bool:
        """Whether spans are made of a task that has this ``traceparent``."""
        # The second half of the trace id, and the flags; asked for each task that is traced.
        return int(trace[19:35], 16) < self._bound and int(trace[53:], 16) & 1 == 1

    def committed(self, effects: Effects, number: int, elapsed_s: float) -> None:
        """A batch is durable, after ``elapsed_s``."""
        traces = (
            row.options.trace
            for row in effects.enqueued.values()
            if row.options is not None and row.options.trace is not None
        )
        sampled = list(islice(filter(self.is_sampled, traces), LINKS_MAX))
        if sampled and self._has_room():
            ended_ns = self._clock.read().now_ms * 1_000_000
            began_ns = ended_ns - round(elapsed_s * 1e9)
            note = CommitNote(number, len(effects.enqueued), began_ns, ended_ns, sampled)
            self._commits.append(note)

    def delivered(self, dispatch: Dispatch, now_ms: int, causes: Causes | None) -> None:
        """A frame of deliveries is written; ``causes``: of the late ones among them."""
        subscriber = dispatch.subscriber
        for index, (row, attempt, past) in enumerate(dispatch.items):
            options = row.options
            if options is None or options.trace is None or not self.is_sampled(options.trace):
                continue
            if not self._has_room():
                continue  # each is counted
            cause = causes[index] if isinstance(causes, list) else causes
            is_late = attempt == 1 and now_ms - row.due_ms > LATE_MS
            self._deliveries.append(
                DeliveryNote(
                    row.id,
                    row.due_ms,
                    row.topic,
                    options.key,
                    options.trace,
                    attempt,
                    past.failed,
                    subscriber.group.name,
                    subscriber.label,
                    now_ms,
                    str(cause) if is_late and cause is not None else None,
                )
            )

    def _has_room(self) -> bool:
        if len(self._deliveries) + len(self._commits) < NOTES_MAX:
            return True
        self._exports.spans_dropped += 1
        return False

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Make spans from now on."""
        self._making = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Send what was noted, if that goes quickly. Harmless when it has not started."""
        making, self._making = self._making, None
        if making is None:
            return
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._make()
                await in_thread(self._provider.shutdown)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self._make()
            except Exception as bug:
                self._exports.ended("spans", 0, sent=False, why=repr(bug))

    async def _make(self) -> None:
        deliveries, self._deliveries = self._deliveries, []
        commits, self._commits = self._commits, []
        left = NOTES_MAX - self._exports.spans_under_way
        over = max(0, len(deliveries) + len(commits) - left)
        if over:
            self._exports.spans_dropped += over
            deliveries, commits = deliveries[: max(0, left - len(commits))], commits[:left]
        if not (deliveries or commits):
            return
        self._exports.spans_under_way += len(deliveries) + len(commits)
        await in_thread(lambda: self._spans(deliveries, commits))

    # --- in a thread ---------------------------------------------------------------------------

    def _spans(self, deliveries: Sequence[DeliveryNote], commits: Sequence[CommitNote]) -> None:
        for commit in commits:
            span = self._tracer.start_span(
                "tickwheel.commit",
                context=Context(),
                links=[Link(context_of(trace)) for trace in commit.traces],
                attributes={
                    "messaging.system": "tickwheel",
                    "messaging.batch.message_count": commit.tasks,
                    "tickwheel.batch": commit.number,
                    "tickwheel.store": self._store,
                },
                start_time=commit.began_ns,
            )
            span.end(commit.ended_ns)
        for delivery in deliveries:
            producer = NonRecordingSpan(context_of(delivery.trace))
            began_ms = delivery.due_ms if delivery.attempt == 1 else delivery.sent_ms
            span = self._tracer.start_span(
                "tickwheel.deliver",
                context=set_span_in_context(producer, Context()),
                attributes=_described(delivery),
                start_time=min(began_ms, delivery.sent_ms) * 1_000_000,
            )
            span.end(delivery.sent_ms * 1_000_000)


def _described(note: DeliveryNote) -> dict[str, Any]:
    found: dict[str, Any] = {
        "messaging.system": "tickwheel",
        "messaging.destination.name": note.topic,
        "messaging.consumer.group.name": note.group,
        "messaging.message.id": str(note.task_id),
        "tickwheel.attempt": note.attempt,
        "tickwheel.failures": note.failures,
        "tickwheel.consumer": note.consumer,
        "tickwheel.due_ms": note.due_ms,
        "tickwheel.wait_s": max(0, note.due_ms - id_time_ms(note.task_id)) / 1000,
    }
    if note.attempt == 1:
        found["tickwheel.lateness_s"] = max(0, note.sent_ms - note.due_ms) / 1000
    if note.cause is not None:
        found["tickwheel.lateness_cause"] = note.cause
    if note.key is not None:
        found["tickwheel.key"] = note.key
    return found


def context_of(trace: str) -> SpanContext:
    """The place that a task's ``trace`` names."""
    _, trace_id, span_id, flags = place_in_trace(trace)
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))


class _Told(SpanExporter):
    """An exporter that tells how each export ended."""

    def __init__(self, inner: SpanExporter, exports: Exports) -> None:
        self._inner = inner
        self._exports = exports

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            sent = result is SpanExportResult.SUCCESS
            self._exports.ended("spans", len(spans), sent=sent)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


class _Reason(logging.Handler):
    """Keeps the last thing that the SDK had to say."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()[:REASON_LENGTH_MAX]


def headers_of(path: str | None) -> dict[str, str]:
    """The headers in a file, one ``Name: value`` a line. Raises BadRequest."""
    if path is None:
        return {}
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"otlp_headers_file {path}: {error}") from None
    found = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or not value.strip():
            raise BadRequest(f"otlp_headers_file {path}, line {number}: write NAME: VALUE")
        found[name.strip().lower()] = value.strip()
    return found


async def in_thread(work: Callable[[], T]) -> T:
    """What ``work`` returns or raises, done in a thread that keeps no process from ending: one of
    the loop's own would be waited for, however long an endpoint is silent."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if ended.done():
            return
        if error is not None:
            ended.set_exception(error)
        else:
            ended.set_result(result)  # type: ignore[arg-type]  # what ``work`` returned

    def run() -> None:
        result: T | None = None
        problem: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            problem = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, result, problem)

    threading.Thread(target=run, name="tickwheel-otlp", daemon=True).start()
    return await ended
