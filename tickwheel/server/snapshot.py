"""Reading the metrics: a walk over topics and groups that can be cut into small steps.

Invariants: a topic or group is read in one step of the event loop. At most ``most`` topics, and
as many pairs of topic and group, have series of their own, first come, first served; the rest
is summed under ``_other``, whose counters never fall, and a pair that is in there stays there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from tickwheel.engine.state import Core
from tickwheel.engine.topics import Group, Topic
from tickwheel.server import metrics
from tickwheel.server.lateness import OTHER
from tickwheel.server.measures import Metric, Moment

Key = tuple[str, ...]
"""Values of the labels."""
Values = Mapping[Key, list[float]]
"""One number for each metric of a table."""
Subject = TypeVar("Subject")


class Places:
    """Who has a series of its own. Kept from one walk to the next."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._own: set[Hashable] = set()
        self._others: set[Hashable] = set()
        self._seen: tuple[set[Hashable], set[Hashable]] = (set(), set())

    def begin(self) -> None:
        self._seen = (set(), set())

    def has(self, key: Hashable) -> bool:
        """Whether it has one; a newcomer gets a free place."""
        if key not in self._own and (key in self._others or len(self._own) >= self._most):
            self._seen[1].add(key)
            return False
        self._own.add(key)
        self._seen[0].add(key)
        return True

    def end(self) -> None:
        """The places of those that are gone become free."""
        self._own, self._others = self._seen


class Table(Generic[Subject]):
    """The values of one table of metrics, by labels, over all tenures of this process."""

    def __init__(self, table: Sequence[Metric[Subject]], labels: Key, most: int) -> None:
        self.metrics = table
        self.labels = labels
        self._places = Places(most)
        self._others = (OTHER,) * len(labels)
        self._earlier: Values = {}
        """Counters of the tenures that are over."""
        self._told = [0.0] * len(table)
        """What ``_other`` was last said to be, so far as it counts."""
        self._gone = [0.0] * len(table)
        """What was in there and has been deleted."""
        self._values: dict[Key, list[float]] = {}

    def begin(self) -> None:
        self._places.begin()
        self._values = {}
        for key, values in self._earlier.items():
            pairs = zip(self.metrics, values, strict=True)
            self._add(key, [value if metric.kind == "counter" else 0.0 for metric, value in pairs])

    def read(self, key: Key, subject: Subject, moment: Moment) -> None:
        """Add what ``subject`` has to say."""
        self._add(key, [metric.read(subject, moment) for metric in self.metrics])

    def _add(self, key: Key, found: list[float]) -> None:
        place = key if key == self._others or self._places.has(key) else self._others
        known = self._values.get(place)
        if known is not None:
            found = [
                metric.merge(a, b) for metric, a, b in zip(self.metrics, known, found, strict=True)
            ]
        self._values[place] = found

    def end(self) -> Values:
        self._places.end()
        values, self._values = self._values, {}
        others = values.get(self._others)
        if others is not None or any(self._told):
            values[self._others] = self._never_falling(others or [0.0] * len(self.metrics))
        return values

    def _never_falling(self, others: list[float]) -> list[float]:
        told = []
        for index, (metric, value) in enumerate(zip(self.metrics, others, strict=True)):
            if metric.kind == "counter":
                total = value + self._gone[index]
                if total < self._told[index]:
                    self._gone[index] += self._told[index] - total
                    total = self._told[index]
                self._told[index] = value = total
            told.append(value)
        return told

    def keep(self, values: Values) -> None:
        """A tenure is over: what was counted stays."""
        self._earlier = values
        self._told = [0.0] * len(self.metrics)
        self._gone = [0.0] * len(self.metrics)


class Tables:
    """All that is read from an engine."""

    def __init__(self, most: int) -> None:
        self.groups: Table[Group] = Table(metrics.GROUP, ("topic", "group"), most)
        self.topics: Table[Topic] = Table(metrics.TOPIC, ("topic",), most)
        self.engine: Table[Core] = Table(metrics.ENGINE, (), 1)
        self.tenures = 0
        """How many have ended. A walk during which one ended has to begin again."""

    def walk(self, core: Core | None, now_ms: int) -> Iterator[None]:
        """Read everything, a little at each step. None: this daemon is not active."""
        self.groups.begin()
        self.topics.begin()
        self.engine.begin()
        if core is None:
            return
        moment = Moment(now_ms, core)
        self.engine.read((), core, moment)
        for topic in list(core.topics.values()):
            self.topics.read((topic.name,), topic, moment)
            yield
            groups = list(topic.groups.values())
            if topic.unowned is not None:
                groups.append(topic.unowned)
            for group in groups:
                self.groups.read((topic.name, group.name), group, moment)
                yield

    def finish(self) -> tuple[Values, Values, Values]:
        """What a whole walk found: of groups, topics, the engine."""
        return self.groups.end(), self.topics.end(), self.engine.end()

    def end_tenure(self, core: Core, now_ms: int) -> None:
        """``core`` counts no further: read it a last time, and keep its counts."""
        for _ in self.walk(core, now_ms):
            pass
        self.tenures += 1
        groups, topics, engine = self.finish()
        self.groups.keep(groups)
        self.topics.keep(topics)
        self.engine.keep(engine)
