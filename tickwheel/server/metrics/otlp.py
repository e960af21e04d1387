"""Sends the metrics as OTLP to the endpoint, every ``otlp_interval_s``. Names and values are those
of ``/metrics`` and are read in the same way.

Invariants: values are read in slices, as for a scrape. A thread creates and sends the messages.
Counters count from the start of the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from tickwheel.server.metrics.exposition import HistogramState
from tickwheel.server.tracing import SEND_TIMEOUT_S
from tickwheel.version import __version__
from tickwheel.waiting import cancel_all, in_thread

if TYPE_CHECKING:
    from tickwheel.clock import Clock
    from tickwheel.server.metrics.exposition import Exposition, Family
    from tickwheel.server.tracing import Exports

UNITS = {"seconds": "s", "bytes": "By"}
"""Word in a metric's name → unit."""
CUMULATIVE = AggregationTemporality.CUMULATIVE


class OtlpMetrics:
    """Sends the metrics of an exposition, between ``start`` and ``stop``."""

    def __init__(
        self, exposition: Exposition, exports: Exports, clock: Clock, interval_s: float
    ) -> None:
        self._exposition = exposition
        self._exports = exports
        self._clock = clock
        self._interval_s = interval_s
        self._began_ms = clock.read().now_ms
        self._exporter = OTLPMetricExporter(
            f"{exports.url}/v1/metrics", headers=exports.headers, timeout=SEND_TIMEOUT_S
        )
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to send the metrics."""
        self._running = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop sending. Do nothing if ``start`` was not called."""
        running, self._running = self._running, None
        if running is not None:
            await cancel_all([running])

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self._send_all()
            except Exception as bug:
                self._exports.note_export("metrics", 0, sent=False, reason=repr(bug))

    async def _send_all(self) -> None:
        families = await self._exposition.read()
        now_ms = self._clock.read().now_ms
        await in_thread(lambda: self._send(families, now_ms))

    def _send(self, families: Sequence[Family], now_ms: int) -> None:
        sent, reason = False, ""
        try:
            scope = ScopeMetrics(
                InstrumentationScope("tickwheel.daemon", __version__),
                [metric_of(f, self._began_ms, now_ms, self._exports.labels) for f in families],
                schema_url="",
            )
            resource = ResourceMetrics(self._exports.resource, [scope], schema_url="")
            result = self._exporter.export(MetricsData([resource]))
            sent = result is MetricExportResult.SUCCESS
        except Exception as bug:
            reason = repr(bug)
        self._exports.note_export("metrics", 0, sent=sent, reason=reason)


def metric_of(family: Family, began_ms: int, now_ms: int, more: Mapping[str, str]) -> Metric:
    """Convert a metric, which was read at ``now_ms``, to OTLP. Counters began at ``began_ms``.
    ``more`` are further labels."""
    times = (began_ms * 1_000_000, now_ms * 1_000_000)
    labels = [{**more, **dict(zip(family.labels, key, strict=True))} for key in family.keys]
    data: Sum | Gauge | Histogram
    if family.kind == "histogram":
        data = Histogram(list(_histograms(labels, family.values, *times)), CUMULATIVE)
    else:
        points = [
            NumberDataPoint(attributes, *times, value)
            for attributes, value in zip(labels, family.values, strict=True)
            if not isinstance(value, HistogramState)
        ]
        is_counter = family.kind == "counter"
        data = Sum(points, CUMULATIVE, is_monotonic=True) if is_counter else Gauge(points)
    words = family.name.split("_")
    unit = next((UNITS[word] for word in words if word in UNITS), "")
    return Metric(family.name, family.help, unit, data)


def _histograms(
    labels: Sequence[dict[str, Any]], values: Sequence[Any], began_ns: int, now_ns: int
) -> Iterable[HistogramDataPoint]:
    for attributes, value in zip(labels, values, strict=True):
        yield HistogramDataPoint(
            attributes,
            began_ns,
            now_ns,
            count=value.cumulative[-1],
            sum=value.sum,
            bucket_counts=[after - before for before, after in pairwise([0, *value.cumulative])],
            explicit_bounds=[float(bound) for bound in value.bounds[:-1]],
            min=None,  # type: ignore[arg-type]  # not recorded, and optional in OTLP
            max=None,  # type: ignore[arg-type]
        )
