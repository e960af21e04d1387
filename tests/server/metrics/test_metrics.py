"""What ``/metrics`` says: names, values, cardinality, and a text that others can read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector

from tickwheel.engine.state import Core, EngineConfig
from tickwheel.engine.topics import Group
from tickwheel.model.kinds import Effects
from tickwheel.persistence.contract import CommitRefused, CommitUnknown
from tickwheel.server.daemon import Daemon
from tickwheel.server.logs import configure
from tickwheel.server.metrics import catalogue as metrics
from tickwheel.server.metrics.exposition import (
    OPENMETRICS_TYPE,
    TEXT_TYPE,
    Exposition,
    Family,
    HistogramState,
    lines,
)
from tickwheel.server.metrics.observed import (
    BOUNDS_MS,
    BOUNDS_S,
    OTHER,
    Histogram,
    Lateness,
    Observed,
)
from tickwheel.server.settings import Settings

NOW_MS = 1_800_000_000_000
ROOT = Path(__file__).parents[3]


def make_daemon(**settings: Any) -> Daemon:
    return Daemon(Settings(store="memory:", **settings), configure("console", "error"))


def make_core() -> Core:
    return Core(EngineConfig(), 1, 0, NOW_MS)


def add_group(core: Core, topic: str, name: str, **counts: int) -> Group:
    owner = core.topic(topic)
    owner.default_backlog = None
    group = owner.groups[name] = Group(owner, name, 0)
    for field, value in counts.items():
        setattr(group, field, value)
    return group


async def samples(exposition: Exposition) -> dict[tuple[str, tuple[str, ...]], float]:
    """Numbers by name and values of the labels."""
    return {
        (family.name, key): value
        for family in await exposition.read()
        if family.kind != "histogram"
        for key, value in zip(family.keys, family.values, strict=True)
    }  # type: ignore[return-value]  # histograms are left out


def test_names_follow_the_conventions() -> None:
    names = metrics.names()
    assert len(names) == sum(
        map(len, (metrics.GROUP, metrics.TOPIC, metrics.ENGINE, metrics.DAEMON, metrics.HISTOGRAMS))
    ) + len(metrics.LABELLED)  # fmt: skip
    for name in names:
        assert re.fullmatch(r"tickwheel_[a-z_]+", name)
        assert not re.search(r"_(ms|millis|kb|mb|count|sum|bucket)$", name), name
    families = [name.removesuffix("_total") for name in names]
    assert len(set(families)) == len(families), "OpenMetrics drops _total from a family's name"


def test_metrics_and_manual_list_the_same_names() -> None:
    row = r"^\| `((?:tickwheel|process)_\w+)(?:\{([\w,]+)\})?` \|"
    rows = re.findall(row, _manual(), re.MULTILINE)
    documented = {name: tuple(filter(None, labels.split(","))) for name, labels in rows}
    assert len(documented) == len(rows), "a name stands there twice"
    of_shards = dict.fromkeys(dict(metrics.SHARD_METRICS), ("shard",))
    of_nodes = {name: ("node",) for name, _, _ in metrics.NODE_METRICS}
    assert documented == metrics.names() | of_shards | of_nodes | dict.fromkeys(metrics.PROCESS, ())


def _manual() -> str:
    return (ROOT / "docs/metrics.md").read_text()


async def test_the_counts_of_groups_and_topics_are_shown() -> None:
    exposition = Exposition(make_daemon())
    core = make_core()
    group = add_group(
        core, "orders", "billing", delivered=7, acked=5, nacked=2, dead_lettered=1, dead=1
    )
    for task_id in range(3):
        group.ready.push(task_id, 0, NOW_MS - 2_000)
    core.topics["orders"].enqueued = 9
    core.topics["orders"].scheduled = 4
    core.totals.early = 0
    exposition.attach(core)
    exposition._now_ms = lambda: NOW_MS  # type: ignore[method-assign]  # a clock that stands still
    result = await samples(exposition)
    pair = ("orders", "billing")
    assert result["tickwheel_delivered_total", pair] == 7
    assert result["tickwheel_acked_total", pair] == 5
    assert result["tickwheel_nacked_total", pair] == 2
    assert result["tickwheel_dead_total", pair] == 1
    assert result["tickwheel_dead_tasks", pair] == 1
    assert result["tickwheel_ready_tasks", pair] == 3
    assert result["tickwheel_oldest_ready_age_seconds", pair] == 2
    assert result["tickwheel_enqueued_total", ("orders",)] == 9
    assert result["tickwheel_scheduled_tasks", ("orders",)] == 4
    assert result["tickwheel_early_total", ()] == 0


async def test_beyond_the_limit_topics_and_groups_are_summed() -> None:
    exposition = Exposition(make_daemon(metrics_topics_max=2))
    core = make_core()
    for number in range(5):
        add_group(core, f"t{number}", "g", delivered=10 + number)
        core.topics[f"t{number}"].enqueued = 100
    exposition.attach(core)
    result = await samples(exposition)
    delivered = {k[1]: v for k, v in result.items() if k[0] == "tickwheel_delivered_total"}
    assert delivered == {("t0", "g"): 10, ("t1", "g"): 11, (OTHER, OTHER): 12 + 13 + 14}
    enqueued = {k[1]: v for k, v in result.items() if k[0] == "tickwheel_enqueued_total"}
    assert enqueued == {("t0",): 100, ("t1",): 100, (OTHER,): 300}


async def test_summed_counters_never_fall() -> None:
    exposition = Exposition(make_daemon(metrics_topics_max=2))
    core = make_core()
    for number in range(4):
        add_group(core, f"t{number}", "g", delivered=10)
    exposition.attach(core)
    assert (await samples(exposition))["tickwheel_delivered_total", (OTHER, OTHER)] == 20

    # One of those with a series of their own goes: those that are summed up stay where they are.
    del core.topics["t0"].groups["g"]
    assert (await samples(exposition))["tickwheel_delivered_total", (OTHER, OTHER)] == 20
    # A newcomer gets the place.
    add_group(core, "new", "g", delivered=1)
    result = await samples(exposition)
    assert result["tickwheel_delivered_total", ("new", "g")] == 1
    assert result["tickwheel_delivered_total", (OTHER, OTHER)] == 20

    # One of those that are summed up goes: what it counted was counted.
    del core.topics["t3"].groups["g"]
    assert (await samples(exposition))["tickwheel_delivered_total", (OTHER, OTHER)] == 20
    core.topics["t2"].groups["g"].delivered += 5
    result = await samples(exposition)
    assert result["tickwheel_delivered_total", (OTHER, OTHER)] == 25
    assert result["tickwheel_ready_tasks", (OTHER, OTHER)] == 0


async def test_counters_continue_over_tenures() -> None:
    exposition = Exposition(make_daemon(metrics_topics_max=2))
    assert not [name for name, _ in await samples(exposition) if "delivered" in name]
    first = make_core()
    add_group(first, "t", "g", delivered=7, dead=3)
    for number in range(3):
        add_group(first, f"more{number}", "g", delivered=1)
    first.totals.leases_over = 2
    exposition.attach(first)
    await samples(exposition)
    exposition.detach(first)

    standby = await samples(exposition)
    assert standby["tickwheel_delivered_total", ("t", "g")] == 7
    assert standby["tickwheel_leases_over_total", ()] == 2
    assert ("tickwheel_dead_tasks", ("t", "g")) not in standby
    assert ("tickwheel_sessions", ()) not in standby

    second = make_core()
    add_group(second, "more1", "g", delivered=1)
    add_group(second, "t", "g", delivered=4, dead=1)
    exposition.attach(second)
    again = await samples(exposition)
    assert again["tickwheel_delivered_total", ("t", "g")] == 11
    assert again["tickwheel_dead_tasks", ("t", "g")] == 1
    assert again["tickwheel_delivered_total", (OTHER, OTHER)] == 2 + 1
    assert again["tickwheel_leases_over_total", ()] == 2


async def test_what_was_deleted_between_two_tenures_has_no_series() -> None:
    exposition = Exposition(make_daemon(metrics_topics_max=2))
    first = make_core()
    add_group(first, "old", "g", delivered=7)
    add_group(first, "t", "g", delivered=3)
    first.totals.leases_over = 2
    exposition.attach(first)
    exposition.detach(first)
    exposition._observed.lateness.note("old", [3])
    assert (await samples(exposition))["tickwheel_delivered_total", ("old", "g")] == 7

    second = make_core()
    add_group(second, "t", "g", delivered=1)
    exposition.attach(second)
    again = await samples(exposition)
    assert not [key for key in again if "old" in key[1]]
    assert again["tickwheel_delivered_total", ("t", "g")] == 4
    assert again["tickwheel_leases_over_total", ()] == 2
    assert "old" not in exposition._observed.lateness.by_topic
    # A topic of its name begins anew, and finds room.
    add_group(second, "old", "g", delivered=1)
    assert (await samples(exposition))["tickwheel_delivered_total", ("old", "g")] == 1
    exposition.detach(second)
    assert (await samples(exposition))["tickwheel_leases_over_total", ()] == 2


async def test_a_tenure_that_ends_during_a_scrape_is_counted_once() -> None:
    exposition = Exposition(make_daemon())
    core = make_core()
    for number in range(5_000):
        add_group(core, f"t{number}", "g", delivered=1)
    exposition.attach(core)
    scrape = asyncio.create_task(exposition.render(""))
    await asyncio.sleep(0)
    assert not scrape.done()
    exposition.detach(core)
    body, _ = await scrape
    values = [
        sample.value
        for family in parse_text(body.decode())
        for sample in family.samples
        if sample.name == "tickwheel_delivered_total"
    ]
    assert sum(values) == 5_000
    assert len(values) == 1_001


async def full_exposition() -> Exposition:
    daemon = make_daemon(node='a "quoted" \\ node')
    exposition = Exposition(daemon)
    core = make_core()
    for number in range(3):
        add_group(core, f"t{number}", "g", delivered=number)
    seen = daemon.roles.observed
    seen.lateness.note("t0", [0, 1, 2, 7_000, 5_000_000])
    seen.lateness.note("t1", [40])
    seen.note_commit(Effects(), 0.0123)
    seen.loop_lag_s.observe(0.5)
    exposition.attach(core)
    exposition._now_ms = lambda: NOW_MS  # type: ignore[method-assign]  # a clock that stands still
    return exposition


class Given(Collector):
    """Metrics for a registry of prometheus-client."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return map(client_metric, self._families)


def client_metric(family: Family) -> Metric:
    name, about, labels = family.name.removesuffix("_total"), family.help, family.labels
    if family.kind == "histogram":
        histograms = HistogramMetricFamily(name, about, labels=labels)
        for key, value in zip(family.keys, family.values, strict=True):
            assert isinstance(value, HistogramState)
            buckets = list(zip(value.bounds, value.cumulative, strict=True))
            histograms.add_metric(key, buckets, value.sum)
        return histograms
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    numbers = kind(name, about, labels=labels)
    for key, value in zip(family.keys, family.values, strict=True):
        assert not isinstance(value, HistogramState)
        numbers.add_metric(key, value)
    return numbers


@pytest.mark.parametrize("is_openmetrics", [False, True])
async def test_the_text_equals_that_of_prometheus_client(is_openmetrics: bool) -> None:
    exposition = await full_exposition()
    registry = CollectorRegistry(auto_describe=False)
    families = await exposition.read()
    registry.register(Given(families))
    ours = "".join(
        chunk for family in families for chunk in lines(family, is_openmetrics=is_openmetrics)
    )
    if is_openmetrics:
        theirs = generate_openmetrics(registry).decode()
        assert list(parse_openmetrics(ours + "# EOF\n")) == list(parse_openmetrics(theirs))
    else:
        theirs = generate_latest(registry).decode()
        assert list(parse_text(ours)) == list(parse_text(theirs))


async def test_the_accept_header_chooses_the_format() -> None:
    exposition = await full_exposition()
    body, kind = await exposition.render("text/plain")
    assert kind == TEXT_TYPE
    assert b"# TYPE tickwheel_delivered_total counter\n" in body
    assert b"process_resident_memory_bytes" in body
    body, kind = await exposition.render("application/openmetrics-text;version=1.0.0,*/*;q=0.1")
    assert kind == OPENMETRICS_TYPE
    assert b"# TYPE tickwheel_delivered counter\n" in body
    assert body.endswith(b"# EOF\n")
    assert body.count(b"# EOF") == 1


async def test_every_name_is_shown_once_it_has_a_value() -> None:
    exposition = await full_exposition()
    body, _ = await exposition.render("")
    families = {family.name: family for family in parse_text(body.decode())}
    for name, labels in metrics.names().items():
        family = families[name.removesuffix("_total")]
        assert family.samples, name
        assert family.documentation.endswith("."), name
        for sample in family.samples:
            assert tuple(label for label in sample.labels if label != "le") == labels, name


@given(st.lists(st.integers(0, 10_000_000), min_size=1), st.integers(1, 3))
def test_observing_many_equals_observing_each(values: list[int], divisor: int) -> None:
    values = [value // 10 ** (divisor * 2) for value in values]
    together, single = Histogram(BOUNDS_MS), Histogram(BOUNDS_MS)
    together.observe_all(values, min(values), max(values))
    for value in values:
        single.observe(value)
    assert (together.counts, together.sum) == (single.counts, single.sum)


def test_lateness_histograms_are_limited_by_topics() -> None:
    lateness = Lateness(topics_max=2)
    for topic in ("a", "b", "c", "d", "a"):
        lateness.note(topic, [3])
    assert {name: sum(one.counts) for name, one in lateness.by_topic.items()} == {
        "a": 2, "b": 1, OTHER: 2,
    }  # fmt: skip
    assert lateness.count == 5


def test_lateness_begins_at_a_millisecond() -> None:
    assert BOUNDS_S[0] == 0.001
    assert list(BOUNDS_S) == sorted(BOUNDS_S)
    assert [bound_ms / 1000 for bound_ms in BOUNDS_MS] == list(BOUNDS_S)


def test_store_errors_are_counted_by_kind() -> None:
    seen = Observed()
    seen.note_store_error(CommitRefused("no"))
    seen.note_store_error(CommitRefused("no room", full=True))
    seen.note_store_error(CommitUnknown("what?"))
    seen.note_store_error(CommitUnknown("what?"))
    seen.note_event("election_trouble")
    assert seen.election_trouble
    seen.note_event("election_works_again")
    assert not seen.election_trouble
    assert seen.store_errors == {"refused": 1, "full": 1, "unknown": 2, "election": 1}


async def shown_by(exposition: Exposition, part: str) -> dict[str, float]:
    return {name: value for (name, _), value in (await samples(exposition)).items() if part in name}


async def test_history_and_backups_are_shown(tmp_path: Path) -> None:
    daemon = make_daemon(history_dir=str(tmp_path), backup_daily_hour=3)
    exposition, history = Exposition(daemon), daemon.roles.history
    assert history is not None
    history.dropped, history.writer_restarts = 7, 2
    daemon.roles.observed.note_backup(1_800_000_000.0)
    daemon.roles.observed.note_event("backup_failed")
    assert await shown_by(exposition, "history") == {
        "tickwheel_history_dropped_total": 7,
        "tickwheel_history_spool_bytes": 0,
        "tickwheel_history_writer_restarts_total": 2,
    }
    assert await shown_by(exposition, "backup") == {
        "tickwheel_backup_last_success_timestamp_seconds": 1_800_000_000,
        "tickwheel_backup_daily": 1,
        "tickwheel_backup_failures_total": 1,
    }


async def test_history_and_backup_metrics_default_to_0() -> None:
    exposition = Exposition(make_daemon())
    result = await shown_by(exposition, "history") | await shown_by(exposition, "backup")
    assert len(result) == 6 and set(result.values()) == {0}


@pytest.mark.parametrize(
    ("committer", "up", "is_full"),
    [
        ({"full": False, "stalled": False, "trouble": None}, 1, 0),
        ({"full": True, "stalled": False, "trouble": "its disk is 93.0% full"}, 1, 1),
        ({"full": False, "stalled": False, "trouble": "refused"}, 0, 0),
        ({"full": True, "stalled": True, "trouble": "no answer"}, 0, 1),
    ],
)
async def test_a_full_store_counts_as_up(committer: dict[str, Any], up: int, is_full: int) -> None:
    daemon = make_daemon()
    shard = SimpleNamespace(committer=SimpleNamespace(**committer), epoch=1)
    daemon.roles.shard = shard  # type: ignore[assignment]  # what the metrics read of it
    values = {plain.name: plain.read(daemon) for plain in metrics.DAEMON if "store_" in plain.name}
    assert (values["tickwheel_store_up"], values["tickwheel_store_full"]) == (up, is_full)
