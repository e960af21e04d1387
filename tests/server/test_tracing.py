"""What the daemon notes for its spans: which tasks are sampled, what waits, and what is not right
in its settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from support.waiting import comes
from tickwheel.clock import Clock
from tickwheel.engine.topics import Dispatch, Group, Subscriber, Topic
from tickwheel.errors import BadRequest
from tickwheel.model.kinds import Effects
from tickwheel.model.lateness import Cause
from tickwheel.model.records import NO_PAST, TaskOptions, TaskRow
from tickwheel.server import tracing as module
from tickwheel.server.daemon import Daemon
from tickwheel.server.logs import configure
from tickwheel.server.metrics.exposition import Exposition, Family, HistogramState
from tickwheel.server.metrics.otlp import OtlpMetrics, metric_of
from tickwheel.server.settings import Settings, load
from tickwheel.server.tracing import LINKS_MAX, Exports, Tracing, headers_of

NOW_MS = 1_800_000_000_000
NOWHERE = "http://127.0.0.1:9"


def traceparent(low: int = 1, flags: str = "01") -> str:
    return f"00-{'a' * 16}{low:016x}-b7ad6b7169203331-{flags}"


def row(task_id: int, trace: str | None, due_ms: int = NOW_MS) -> TaskRow:
    options = None if trace is None else TaskOptions(key=f"key-{task_id}", trace=trace)
    return TaskRow(task_id, due_ms, "t", b"x" * 1_000, options)


class TracingRig:
    """A tracing whose spans stay here."""

    def __init__(self, **settings: Any) -> None:
        self.events: list[tuple[str, str]] = []
        made = Settings(store="memory:", otlp_endpoint=NOWHERE, **settings)
        self.exports = Exports(made, lambda event, text: self.events.append((event, text)))
        self.tracing = Tracing(made, Clock(1), self.exports)
        self.kept = InMemorySpanExporter()
        provider = self.tracing._provider
        provider._active_span_processor.shutdown()
        provider._active_span_processor._span_processors = ()
        provider.add_span_processor(
            SimpleSpanProcessor(module._ReportingExporter(self.kept, self.exports))
        )

    def deliver(self, items: list[tuple[TaskRow, int]], causes: Any = None) -> None:
        group = Group(Topic("t"), "g", 0)
        subscriber = Subscriber.__new__(Subscriber)
        subscriber.group, subscriber.label = group, "me"
        dispatch = Dispatch(subscriber, [(one, attempt, NO_PAST) for one, attempt in items])
        self.tracing.note_deliveries(dispatch, NOW_MS, causes)

    async def spans(self) -> list[Any]:
        await self.tracing._convert_notes()
        await comes(lambda: not self.exports.spans_under_way)
        return list(self.kept.get_finished_spans())


@pytest.fixture
async def rig() -> AsyncIterator[TracingRig]:
    made = TracingRig(trace_sample=1)
    yield made
    await made.tracing.stop()


@pytest.mark.parametrize(
    ("share", "low", "flags", "sampled"),
    [
        (1, 2**64 - 1, "01", True),
        (1, 2**64 - 1, "03", True),
        (1, 1, "00", False),
        (1, 1, "02", False),
        (0.25, 2**62 - 1, "01", True),
        (0.25, 2**62, "01", False),
        (0, 0, "01", False),
    ],
)
async def test_sampling_follows_flag_and_share(
    share: float, low: int, flags: str, sampled: bool
) -> None:
    rig = TracingRig(trace_sample=share)
    assert rig.tracing.is_sampled(traceparent(low, flags)) is sampled


async def test_spans_name_the_cause_of_lateness(rig: TracingRig) -> None:
    rig.deliver(
        [
            (row(1, traceparent(), NOW_MS - 500), 1),
            (row(2, None, NOW_MS - 500), 1),
            (row(3, traceparent(), NOW_MS - 50), 1),
            (row(4, traceparent(), NOW_MS - 500), 2),
            (row(5, traceparent(flags="00"), NOW_MS - 500), 1),
        ],
        [Cause.PAUSED, Cause.RATE, None, None, Cause.STORE],
    )
    answer = {span.attributes["messaging.message.id"]: span for span in await rig.spans()}
    assert answer.keys() == {"1", "3", "4"}
    late = answer["1"].attributes
    assert late["tickwheel.lateness_cause"] == "paused"
    assert (late["tickwheel.lateness_s"], late["tickwheel.key"]) == (0.5, "key-1")
    assert (answer["1"].end_time - answer["1"].start_time) == 500_000_000
    assert answer["1"].end_time == NOW_MS * 1_000_000
    assert "tickwheel.lateness_cause" not in answer["3"].attributes
    assert answer["4"].start_time == answer["4"].end_time, "when a retry was due, is not known here"
    assert "tickwheel.lateness_s" not in answer["4"].attributes


async def test_late_deliveries_of_a_frame_share_a_cause(rig: TracingRig) -> None:
    rig.deliver([(row(1, traceparent(), NOW_MS - 500), 1), (row(2, traceparent()), 1)], Cause.STORE)
    causes = [span.attributes.get("tickwheel.lateness_cause") for span in await rig.spans()]
    assert causes == ["store", None]


async def test_a_commit_span_links_a_limited_number_of_producers(rig: TracingRig) -> None:
    many = {i: row(i, traceparent()) for i in range(1, 2 * LINKS_MAX)}
    rig.tracing.note_commit(Effects(enqueued={1: row(1, None), **many}), 7, 0.25)
    rig.tracing.note_commit(Effects(enqueued={1: row(1, None)}), 8, 0.25)
    rig.tracing.note_commit(Effects(), 9, 0.25)
    (span,) = await rig.spans()
    assert len(span.links) == LINKS_MAX
    assert span.attributes["tickwheel.batch"] == 7
    assert span.attributes["messaging.batch.message_count"] == 2 * LINKS_MAX - 1
    assert span.end_time - span.start_time == 250_000_000


async def test_waiting_spans_are_limited_and_dropped_ones_counted(
    rig: TracingRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NOTES_MAX", 3)
    rig.deliver([(row(task_id, traceparent()), 1) for task_id in range(5)])
    assert rig.exports.spans_dropped == 2
    rig.exports.spans_under_way = 2  # an endpoint that is slow
    await rig.tracing._convert_notes()
    assert rig.exports.spans_dropped == 4
    await comes(lambda: rig.exports.spans_under_way == 2)
    assert len(rig.kept.get_finished_spans()) == 1
    assert not rig.tracing._deliveries


async def test_waiting_spans_hold_no_bodies(rig: TracingRig) -> None:
    rig.deliver([(row(1, traceparent()), 1)])
    (note,) = rig.tracing._deliveries
    assert not [value for value in note if isinstance(value, (bytes, TaskRow))]


async def test_export_failures_are_logged_at_a_limited_rate(rig: TracingRig) -> None:
    for sent in (False, False, True, False, True):
        rig.exports.note_export("metrics", 0, sent=sent, reason="it is away")
    await asyncio.sleep(0)
    assert [event for event, _ in rig.events] == ["otlp_failed", "otlp_works_again"]
    assert rig.events[0][1] == f"{NOWHERE} did not accept metrics: it is away"
    assert rig.exports.failures == 3
    rig.exports._quiet_until_s = 0
    rig.exports.note_export("metrics", 0, sent=False)
    await asyncio.sleep(0)
    assert rig.events[-1][0] == "otlp_failed"


async def test_a_failed_metrics_read_is_repeated(rig: TracingRig) -> None:
    class Broken:
        async def read(self) -> list[Family]:
            raise ValueError("no such series")

    metrics = OtlpMetrics(cast("Exposition", Broken()), rig.exports, Clock(1), 0.001)
    metrics.start()
    await comes(lambda: rig.exports.failures >= 2)
    await metrics.stop()
    assert rig.events == [
        ("otlp_failed", f"{NOWHERE} did not accept metrics: ValueError('no such series')")
    ]


async def test_the_metrics_of_several_shards_have_the_label_shard() -> None:
    """Otherwise a collector takes their series for one, and its counters jump."""
    histogram = HistogramState(("1.0", "+Inf"), [1, 2], 3.0)
    families = [
        Family("tickwheel_ready_tasks", "gauge", "Due.", ("topic",), [("t",)], [""], [5]),
        Family("tickwheel_acked_total", "counter", "Acked.", ("topic",), [("t",)], [""], [5]),
        Family("tickwheel_wait", "histogram", "Waits.", ("topic",), [("t",)], [""], [histogram]),
    ]
    for route, more in (("", {}), ("tcp://a:1,tcp://b:2", {"shard": "1"})):
        own: dict[str, Any] = {"shard": int(bool(route)), "route": route, "trace_sample": 0}
        settings = Settings(store="memory:", otlp_endpoint=NOWHERE, **own)
        daemon = Daemon(settings, configure("console", "error"), is_embedded=True)
        daemon.roles._begin_tracing()
        assert daemon.roles.exports is not None
        for family in families:
            [point] = metric_of(family, 0, 1, daemon.roles.exports.labels).data.data_points
            assert point.attributes == {"topic": "t", **more}


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    ["collector:4318", "ftp://collector", "http://", "http://h:99999", "http://h?a=b",
     "http://user:word@h", "http://h:x"],
)  # fmt: skip
def test_an_invalid_otlp_endpoint_is_refused(wrong: str) -> None:
    with pytest.raises(BadRequest, match=r"setting otlp_endpoint: .*\(got "):
        load(None, {"otlp_endpoint": wrong})


@pytest.mark.parametrize("wrong", [-0.1, 1.1, "half"])
def test_an_invalid_trace_sample_is_refused(wrong: Any) -> None:
    with pytest.raises(BadRequest, match="setting trace_sample: "):
        load(None, {"trace_sample": wrong})


def test_tracing_is_off_by_default() -> None:
    assert load(None, {}).otlp_endpoint is None
    assert load(None, {"otlp_endpoint": ""}).otlp_endpoint is None
    assert load(None, {"otlp_endpoint": "https://h/otlp"}).otlp_endpoint == "https://h/otlp"


def test_otlp_headers_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "headers"
    path.write_text("# a comment\nAuthorization: Bearer a:b\n\nX-Scope: shop \n")
    assert headers_of(str(path)) == {"authorization": "Bearer a:b", "x-scope": "shop"}
    assert headers_of(None) == {}
    path.write_text("X-Scope: shop\nBearer\n")
    with pytest.raises(BadRequest, match=r"otlp_headers_file .*headers, line 2: write NAME: VALUE"):
        headers_of(str(path))
    with pytest.raises(BadRequest, match="otlp_headers_file .*none: .*No such file"):
        headers_of(str(tmp_path / "none"))
