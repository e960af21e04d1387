"""Spans for sampled tasks: one per commit of a batch, and one per delivery.

``tickwheel.commit`` is the root of a trace and is linked to the producers of its sampled tasks.
``tickwheel.deliver`` is a child of the producer's span. It lasts from the due time until DELIVER
was written, and records the cause of a late delivery. A task is sampled if its ``trace`` has the
sampled flag and its trace id is in the daemon's share (``trace_sample``). Then all daemons sample
all its deliveries.

Invariants: the event loop only collects notes. Separate threads create spans from them, and threads
of the SDK send the spans. Waiting notes and spans are bounded; further ones are dropped and
counted. An endpoint that does not answer causes a warning every ten minutes and nothing else. This
module is imported only if ``otlp_endpoint`` is set.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
from tickwheel.waiting import cancel_all, in_thread

if TYPE_CHECKING:
    from tickwheel.clock import Clock
    from tickwheel.engine.topics import Dispatch
    from tickwheel.model.kinds import Effects
    from tickwheel.model.lateness import Causes
    from tickwheel.server.settings import Settings

NOTES_MAX = 2_048
"""Maximum notes that wait for conversion into spans, and maximum spans that wait to be sent."""
LINKS_MAX = 32
"""Maximum links from the span of a commit to producers."""
EVERY_S = 0.5
"""Seconds between two conversions of notes into spans."""
SEND_EVERY_MS = 1_000
SEND_TIMEOUT_S = 5.0
STOP_S = 2.0
"""Maximum seconds for sending the last spans when the daemon stops."""
QUIET_S = 600.0
"""Minimum seconds between two warnings about an endpoint that does not answer."""
LOGGERS = ("opentelemetry.exporter", "opentelemetry.sdk")
REASON_LENGTH_MAX = 300


class DeliveryNote(NamedTuple):
    """The content of a delivery's span. It does not refer to the task's row, because that would
    keep the body in memory."""

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
    """The content of a commit's span."""

    number: int
    tasks: int
    began_ns: int
    ended_ns: int
    traces: list[str]


class Exports:
    """Counts exports, and logs their failures. Threads report to the thread of the event loop."""

    def __init__(
        self, settings: Settings, on_event: Callable[[str, str], None], shard: int | None = None
    ) -> None:
        """``shard`` is the daemon's shard if there are several, which share the resource. Raise
        BadRequest if the headers file is invalid."""
        self.url = (settings.otlp_endpoint or "").rstrip("/")
        self.labels = {} if shard is None else {"shard": str(shard)}
        """The labels that all metrics have in addition."""
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
        """Number of spans that were created but not yet sent."""
        self.spans_sent = 0
        self.spans_dropped = 0
        self.failures = 0
        """Number of failed exports of spans or metrics."""
        self._last_message = _LastMessage()

    def listen(self) -> None:
        """Keep the SDK's messages about failures out of the log: it logs each attempt."""
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self._last_message)
            logging.getLogger(name).propagate = False

    def note_export(self, content: str, spans: int, *, sent: bool, reason: str = "") -> None:
        """Note that an export of ``content``, "spans" or "metrics", has ended. ``reason`` is the
        reason for a failure that the SDK has not logged."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._note, content, spans, sent, reason)

    def _note(self, content: str, spans: int, sent: bool, reason: str) -> None:
        self.spans_under_way -= spans
        if sent:
            self.spans_sent += spans
            if self._is_failing:
                self._is_failing = False
                self._on_event("otlp_works_again", f"{self.url} accepts {content}")
            return
        self.spans_dropped += spans
        self.failures += 1
        if self._loop.time() >= self._quiet_until_s:
            self._quiet_until_s = self._loop.time() + QUIET_S
            self._is_failing = True
            reason = reason or self._last_message.text or "unknown reason"
            self._on_event("otlp_failed", f"{self.url} did not accept {content}: {reason}")


class Tracing:
    """Creates spans for sampled tasks, between ``start`` and ``stop``."""

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
                _ReportingExporter(sender, exports),
                max_queue_size=NOTES_MAX,
                schedule_delay_millis=SEND_EVERY_MS,
                max_export_batch_size=NOTES_MAX // 4,
            )
        )
        self._tracer = self._provider.get_tracer("tickwheel.daemon", __version__)
        self._conversion: asyncio.Task[None] | None = None

    # --- on the event loop ---------------------------------------------------------------------

    def is_sampled(self, trace: str) -> bool:
        """Return whether a task with this ``traceparent`` is sampled."""
        # The second half of the trace id, and the flags. This runs once per traced task.
        return int(trace[19:35], 16) < self._bound and int(trace[53:], 16) & 1 == 1

    def note_commit(self, effects: Effects, number: int, elapsed_s: float) -> None:
        """Note that a batch is durable; its commit took ``elapsed_s``."""
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

    def note_deliveries(self, dispatch: Dispatch, now_ms: int, causes: Causes | None) -> None:
        """Note the deliveries of a frame that was written, with the causes of late deliveries."""
        subscriber = dispatch.subscriber
        for index, (row, attempt, history) in enumerate(dispatch.items):
            options = row.options
            if options is None or options.trace is None or not self.is_sampled(options.trace):
                continue
            if not self._has_room():
                continue  # ``_has_room`` has counted the dropped span
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
                    history.failed,
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

    # --- start and stop ------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to create spans."""
        self._conversion = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Send the last spans, within ``STOP_S``. Do nothing if ``start`` was not called."""
        conversion, self._conversion = self._conversion, None
        if conversion is None:
            return
        await cancel_all([conversion])
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._convert_notes()
                await in_thread(self._provider.shutdown)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self._convert_notes()
            except Exception as bug:
                self._exports.note_export("spans", 0, sent=False, reason=repr(bug))

    async def _convert_notes(self) -> None:
        deliveries, self._deliveries = self._deliveries, []
        commits, self._commits = self._commits, []
        room = NOTES_MAX - self._exports.spans_under_way
        excess = max(0, len(deliveries) + len(commits) - room)
        if excess:
            self._exports.spans_dropped += excess
            deliveries, commits = deliveries[: max(0, room - len(commits))], commits[:room]
        if not (deliveries or commits):
            return
        self._exports.spans_under_way += len(deliveries) + len(commits)
        await in_thread(lambda: self._convert(deliveries, commits))

    # --- in a thread ---------------------------------------------------------------------------

    def _convert(self, deliveries: Sequence[DeliveryNote], commits: Sequence[CommitNote]) -> None:
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
                attributes=_attributes(delivery),
                start_time=min(began_ms, delivery.sent_ms) * 1_000_000,
            )
            span.end(delivery.sent_ms * 1_000_000)


def _attributes(note: DeliveryNote) -> dict[str, Any]:
    attributes: dict[str, Any] = {
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
        attributes["tickwheel.lateness_s"] = max(0, note.sent_ms - note.due_ms) / 1000
    if note.cause is not None:
        attributes["tickwheel.lateness_cause"] = note.cause
    if note.key is not None:
        attributes["tickwheel.key"] = note.key
    return attributes


def context_of(trace: str) -> SpanContext:
    """Return the span context that a task's ``trace`` contains."""
    _, trace_id, span_id, flags = place_in_trace(trace)
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))


class _ReportingExporter(SpanExporter):
    """An exporter that reports the end of each export."""

    def __init__(self, inner: SpanExporter, exports: Exports) -> None:
        self._inner = inner
        self._exports = exports

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            sent = result is SpanExportResult.SUCCESS
            self._exports.note_export("spans", len(spans), sent=sent)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


class _LastMessage(logging.Handler):
    """Keeps the last log message of the SDK."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()[:REASON_LENGTH_MAX]


def headers_of(path: str | None) -> dict[str, str]:
    """Return the headers in a file, one on each line. Raise BadRequest if the file is invalid."""
    if path is None:
        return {}
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"otlp_headers_file {path}: {error}") from None
    headers = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or not value.strip():
            raise BadRequest(f"otlp_headers_file {path}, line {number}: write NAME: VALUE")
        headers[name.strip().lower()] = value.strip()
    return headers
