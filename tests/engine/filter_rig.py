"""An engine whose groups have filters: tasks with tags and properties, filters by their texts."""

from __future__ import annotations

from support.engine_rig import Rig
from tickwheel.engine.topics import NOTHING_SET, Group
from tickwheel.model.filters import Filter, judge_of
from tickwheel.model.records import PropertyValue, TaskOptions, size_of
from tickwheel.server.shard.groups import begin_group

Texts = tuple[str | None, str | None]
"""(tags, where)"""


class FilterRig(Rig):
    """Adds what the operations do with filters."""

    def put(
        self,
        delay_ms: int = 0,
        *,
        tag: str | None = None,
        topic: str = "t",
        ttl_ms: int | None = None,
        lands: bool = True,
        **properties: PropertyValue,
    ) -> int:
        """One task, durable unless it ``lands`` later. Its id."""
        options = TaskOptions(tag=tag, properties=properties or None, ttl_ms=ttl_ms)
        plain = None if options == TaskOptions() else options
        task = (topic, self.now_ms + delay_ms, b"b", plain)
        self.engine.intake.enqueue(None, None, 0, [task], size_of(b"b", plain), self.now_ms)
        if lands:
            self.commit()
        return self.core.ids.last

    def make(self, name: str, texts: Texts = (None, None), since_ms: int | None = None) -> Group:
        """A group that begins with a filter, and does not look back yet."""
        tags, where = texts
        settings = NOTHING_SET._replace(tags=tags, where=where)
        topic = self.core.topic("t")
        return begin_group(self.engine.grouping, topic, name, since_ms, self.now_ms, settings)

    def refilter(self, name: str, texts: Texts) -> None:
        """CONFIGURE."""
        group = self.group("t", name)
        tags, where = texts
        before = group.settings
        if Filter(tags, where) == Filter(before.tags, before.where):
            after = before._replace(tags=tags, where=where)
        else:
            after = self.engine.grouping.with_filter(group, before, tags, where, self.now_ms)
        self.engine.grouping.set(group, after, self.mono_ms)
        assert (group.judge is None) == (judge_of(after) is None)

    def had(self, name: str) -> list[int]:
        """Ids that the group holds: handed out to an endless consumer and kept."""
        group = self.group("t", name)
        return sorted((*group.flight, *group.waiting))

    def consume(self, *names: str) -> None:
        """Everything goes out to consumers that keep it, as far as it is due."""
        for name in names:
            if not self.group("t", name).subscribers:
                self.subscribe("t", name, prefetch=1_000_000, lease_ms=10**9)
        self.tick()
