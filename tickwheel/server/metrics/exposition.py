"""Serves ``/metrics``, in slices that are short enough not to delay deliveries.

Names and help texts come from ``catalogue``. A walk over topics and groups, in small steps, reads
the values. This module writes the text itself, because prometheus-client needs 90 ms for the 17,000
samples of a thousand topics and cannot do so in slices. A test compares both with the parsers of
prometheus-client.

Invariants: a topic or group is read in one step of the event loop. At most ``series_max`` topics,
and as many pairs of topic and group, have separate series, in the order of their appearance. The
others are summed under ``_other`` and stay there. Counters of ``_other`` never decrease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric as ClientMetric

from tickwheel.server.metrics import catalogue as metrics
from tickwheel.server.metrics.catalogue import Distribution, Metric, Moment, kind_of
from tickwheel.server.metrics.observed import OTHER, Observed

if TYPE_CHECKING:
    from tickwheel.engine.state import Core
    from tickwheel.engine.topics import Group, Topic
    from tickwheel.server.roles import Running


SLICE_S = 0.001
STEPS_PER_LOOK = 16
"""Number of steps of a walk between two readings of the clock."""
LINES_PER_CHUNK = 1_000
HISTOGRAMS_PER_CHUNK = 20
TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class HistogramState(NamedTuple):
    """The values of a histogram, in the unit of its metric."""

    bounds: tuple[str, ...]
    cumulative: list[int]
    sum: float


class Family(NamedTuple):
    """One metric with the values of all its series."""

    name: str
    kind: str
    help: str
    labels: Key
    keys: Sequence[Key]
    texts: Sequence[str]
    """The labels of each series as text."""
    values: Sequence[float | HistogramState]


class Exposition:
    """The metrics of a daemon. ``attach`` and ``detach`` set the engine that is read."""

    def __init__(self, daemon: Running) -> None:
        self._daemon = daemon
        self._observed: Observed = daemon.roles.observed
        self._tables = Tables(daemon.settings.metrics_topics_max)
        self._core: Core | None = None
        self._busy = asyncio.Lock()
        self._process = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._process)

    def attach(self, core: Core) -> None:
        """Read this core from now on, because the daemon begins to lead."""
        self._core, lateness = core, self._observed.lateness
        lateness.forget(lateness.by_topic.keys() - core.topics.keys() - {OTHER})

    def detach(self, core: Core) -> None:
        """Keep the counts of this core, because the daemon has stopped leading."""
        self._tables.end_tenure(core, self._now_ms())
        self._core = None

    async def render(self, accept: str) -> tuple[bytes, str]:
        """Return the body and content type of a scrape. Only one scrape runs at a time."""
        is_openmetrics = "application/openmetrics-text" in accept
        async with self._busy:
            began_s = time.monotonic()
            chunks = []
            for family in await self._read():
                for chunk in lines(family, is_openmetrics=is_openmetrics):
                    chunks.append(chunk.encode())
                    await asyncio.sleep(0)
            self._observed.scrape_s = time.monotonic() - began_s
        if is_openmetrics:
            chunks.append(b"# EOF\n")
        return b"".join(chunks), OPENMETRICS_TYPE if is_openmetrics else TEXT_TYPE

    async def read(self) -> list[Family]:
        """Return all metrics, including those of the process, read in slices."""
        async with self._busy:
            return await self._read()

    async def _read(self) -> list[Family]:
        values = await self._walk()
        process = await asyncio.to_thread(lambda: list(self._process.collect()))
        families = list(map(_process_family, process))
        for family in self._families(values):
            families.append(family)
            await asyncio.sleep(0)
        return families

    async def _walk(self) -> list[TableValues]:
        while True:
            tenures = self._tables.tenures
            until_s = time.monotonic() + SLICE_S
            for step, _ in enumerate(self._tables.walk(self._core, self._now_ms()), 1):
                if step % STEPS_PER_LOOK == 0 and time.monotonic() >= until_s:
                    await asyncio.sleep(0)
                    if self._tables.tenures != tenures:
                        break
                    until_s = time.monotonic() + SLICE_S
            else:
                return self._tables.finish()

    def _now_ms(self) -> int:
        return self._daemon.roles.clock.read().now_ms

    # --- families --------------------------------------------------------------------------

    def _families(self, tables: list[TableValues]) -> Iterator[Family]:
        for table, values in tables:
            yield from self._table_families(table, values)
        for plain in metrics.DAEMON:
            kind, value = kind_of(plain.name), plain.read(self._daemon)
            yield Family(plain.name, kind, plain.help, (), [()], [""], [+value])
        for distribution in metrics.HISTOGRAMS:
            yield _histogram(distribution, self._observed)
        moment = None if self._core is None else Moment(self._now_ms(), self._core)
        for name, about, labels, read in metrics.LABELLED:
            if numbers := read(self._daemon, moment):
                keys, column = list(numbers), list(numbers.values())
                texts = _texts(labels, [map(_escaped, key) for key in keys])
                yield Family(name, kind_of(name), about, labels, keys, texts, column)
        yield from self._node_families()

    def _node_families(self) -> Iterator[Family]:
        """Yield the metrics of the daemon's node, if it has one."""
        member = self._daemon.member
        if member is None:
            return
        labels, key, measured = ("node",), (self._daemon.settings.node,), member.measured
        texts = _texts(labels, [tuple(map(_escaped, key))])
        for name, about, field in metrics.NODE_METRICS:
            values = [measured.get(field, 0)]
            yield Family(name, kind_of(name), about, labels, [key], texts, values)

    def _table_families(self, table: Table[Any], values: Values) -> Iterator[Family]:
        """Yield the metrics of a table. A standby has only counters from when it last led."""
        if not values:
            return
        keys, rows = list(values), list(values.values())
        texts = _texts(table.labels, keys)
        for index, metric in enumerate(table.metrics):
            if metric.kind == "counter" or self._core is not None:
                column = [+row[index] for row in rows]
                about, labels = metric.help, table.labels
                yield Family(metric.name, metric.kind, about, labels, keys, texts, column)


def _process_family(metric: ClientMetric) -> Family:
    """Convert a metric of prometheus-client that has no labels."""
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    (sample,) = (sample for sample in metric.samples if sample.name == name)
    return Family(name, metric.type, metric.documentation, (), [()], [""], [sample.value])


def _histogram(distribution: Distribution, observed: Observed) -> Family:
    states = []
    histograms = distribution.read(observed)
    for _, histogram in histograms:
        bounds = tuple(str(bound / distribution.divisor) for bound in histogram.bounds)
        cumulative = list(accumulate(histogram.counts))
        states.append(
            HistogramState((*bounds, "+Inf"), cumulative, histogram.sum / distribution.divisor)
        )
    labels: Key = (distribution.label,) if distribution.label else ()
    keys: list[Key] = [(value,) if distribution.label else () for value, _ in histograms]
    texts = _texts(labels, keys)
    return Family(distribution.name, "histogram", distribution.help, labels, keys, texts, states)


def lines(family: Family, *, is_openmetrics: bool) -> Iterator[str]:
    """Yield a metric as text, in chunks. Each chunk takes less than a millisecond."""
    name, kind = family.name, family.kind
    title = name.removesuffix("_total") if is_openmetrics and kind == "counter" else name
    chunk = [f"# HELP {title} {family.help}", f"# TYPE {title} {kind}"]
    step = LINES_PER_CHUNK if kind != "histogram" else HISTOGRAMS_PER_CHUNK
    texts = family.texts
    for start in range(0, len(texts), step):
        series = zip(texts[start : start + step], family.values[start : start + step], strict=True)
        if kind == "histogram":
            for text, value in series:
                chunk += _histogram_lines(name, text, cast("HistogramState", value))
        else:
            chunk += [f"{name}{text} {value}" for text, value in series]
        yield "\n".join(chunk) + "\n"
        chunk = []


def _histogram_lines(name: str, text: str, value: HistogramState) -> list[str]:
    start = f"{name}_bucket{text[:-1]}," if text else f"{name}_bucket{{"
    buckets = zip(value.bounds, value.cumulative, strict=True)
    return [
        *(f'{start}le="{bound}"}} {count}' for bound, count in buckets),
        f"{name}_count{text} {value.cumulative[-1]}",
        f"{name}_sum{text} {value.sum}",
    ]


def _texts(labels: Key, keys: Iterable[Iterable[str]]) -> list[str]:
    """Return the labels of each series as text."""
    if not labels:
        return [""]
    pattern = "{{" + ",".join(f'{label}="{{}}"' for label in labels) + "}}"
    return [pattern.format(*key) for key in keys]


def _escaped(value: str) -> str:
    """Return the escaped value of a label. Names of nodes can contain any characters."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


Key = tuple[str, ...]
"""Values of the labels."""
Values = Mapping[Key, list[float]]
"""One number for each metric of a table."""
Subject = TypeVar("Subject")


class Table(Generic[Subject]):
    """The values of one table of metrics, by labels, since the process started."""

    def __init__(self, table: Sequence[Metric[Subject]], labels: Key, series_max: int) -> None:
        self.metrics = table
        self.labels = labels
        self._series_max = series_max
        self._with_series: set[Key] = set()
        """Labels with separate series, kept from one walk to the next."""
        self._in_other: set[Key] = set()
        """Labels whose values are summed under ``_other``."""
        self._found: tuple[set[Key], set[Key]] = (set(), set())
        self._others = (OTHER,) * len(labels)
        self._earlier: Values = {}
        """The counters from earlier times when the daemon led, of labels that still exist."""
        self._leads = False
        self._last_totals = [0.0] * len(table)
        """The counters of ``_other`` in the last scrape."""
        self._deleted_totals = [0.0] * len(table)
        """The counters that deleted series contribute to ``_other``."""
        self._values: dict[Key, list[float]] = {}

    def begin(self, *, leads: bool) -> None:
        """Begin a walk. While the daemon leads, only labels that the walk reads have series."""
        self._leads = leads
        self._found = (set(), set())
        self._values = {}
        for key, values in self._earlier.items():
            if not leads or key == self._others:
                self._add(key, values)

    def read(self, key: Key, subject: Subject, moment: Moment) -> None:
        """Add the values of ``subject``."""
        values = [metric.read(subject, moment) for metric in self.metrics]
        earlier = None if key == self._others else self._earlier.get(key)  # ``begin`` added those
        self._add(key, values if earlier is None else self._merged(earlier, values))

    def _merged(self, some: list[float], more: list[float]) -> list[float]:
        return [m.merge(a, b) for m, a, b in zip(self.metrics, some, more, strict=True)]

    def _add(self, key: Key, values: list[float]) -> None:
        series = key if key == self._others or self._has_series(key) else self._others
        sums = self._values.get(series)
        self._values[series] = values if sums is None else self._merged(sums, values)

    def _has_series(self, key: Key) -> bool:
        """Return whether the labels have a separate series. New labels get one if there are not too
        many."""
        is_own = key in self._with_series or (
            key not in self._in_other and len(self._with_series) < self._series_max
        )
        if is_own:
            self._with_series.add(key)
        self._found[not is_own].add(key)
        return is_own

    def end(self) -> Values:
        # Series of labels that were deleted can be used for others.
        self._with_series, self._in_other = self._found
        if self._leads:
            found = self._with_series | self._in_other | {self._others}
            self._earlier = {key: v for key, v in self._earlier.items() if key in found}
        values, self._values = self._values, {}
        others = values.get(self._others)
        if others is not None or any(self._last_totals):
            values[self._others] = self._monotonic(others or [0.0] * len(self.metrics))
        return values

    def _monotonic(self, others: list[float]) -> list[float]:
        counted = []
        for index, (metric, value) in enumerate(zip(self.metrics, others, strict=True)):
            if metric.kind == "counter":
                total = value + self._deleted_totals[index]
                if total < self._last_totals[index]:
                    self._deleted_totals[index] += self._last_totals[index] - total
                    total = self._last_totals[index]
                self._last_totals[index] = value = total
            counted.append(value)
        return counted

    def keep_counters(self, values: Values) -> None:
        """Keep the counters when the daemon has stopped leading."""
        is_counter = [metric.kind == "counter" for metric in self.metrics]
        self._earlier = {
            key: [value if counts else 0.0 for counts, value in zip(is_counter, row, strict=True)]
            for key, row in values.items()
        }
        self._last_totals = [0.0] * len(self.metrics)
        self._deleted_totals = [0.0] * len(self.metrics)


TableValues = tuple[Table[Any], Values]
"""A table, and the values that a walk has read."""


class Tables:
    """All tables whose values are read from an engine."""

    def __init__(self, series_max: int) -> None:
        self.groups: Table[Group] = Table(metrics.GROUP, ("topic", "group"), series_max)
        self.topics: Table[Topic] = Table(metrics.TOPIC, ("topic",), series_max)
        self.engine: Table[Core] = Table(metrics.ENGINE, (), 1)
        self._all = (self.engine, self.topics, self.groups)
        self.tenures = 0
        """How often the daemon has stopped leading. A walk during which it did must restart."""

    def walk(self, core: Core | None, now_ms: int) -> Iterator[None]:
        """Read all values, a few in each step. ``core`` is None if the daemon does not lead."""
        for table in self._all:
            table.begin(leads=core is not None)
        if core is None:
            return
        moment = Moment(now_ms, core)
        self.engine.read((), core, moment)
        for topic in list(core.topics.values()):
            self.topics.read((topic.name,), topic, moment)
            yield
            groups = list(topic.groups.values())
            if topic.default_backlog is not None:
                groups.append(topic.default_backlog)
            for group in groups:
                self.groups.read((topic.name, group.name), group, moment)
                yield

    def finish(self) -> list[TableValues]:
        """Return the values after a complete walk."""
        return [(table, table.end()) for table in self._all]

    def end_tenure(self, core: Core, now_ms: int) -> None:
        """Read ``core`` for the last time and keep its counters."""
        for _ in self.walk(core, now_ms):
            pass
        self.tenures += 1
        for table, values in self.finish():
            table.keep_counters(values)
