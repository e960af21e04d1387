"""Versions of the settings of groups and topics, where there are several shards."""

from __future__ import annotations

from dataclasses import replace

from support.engine_recount import recounted
from support.engine_rig import CONFIG, Rig
from support.shards import key_in
from tickwheel.engine.topics import NOTHING_SET
from tickwheel.model.records import TOPIC_ITSELF

SHARD, SHARDS = 1, 3
OURS, THEIRS = key_in(SHARD, SHARDS, "t"), key_in(2, SHARDS, "t")
"""A topic whose home this shard is, and one whose home is shard 2."""


class OfShards(Rig):
    def __init__(self) -> None:
        super().__init__(replace(CONFIG, shard=SHARD, shards=SHARDS))

    def stored(self, topic: str, group: str = TOPIC_ITSELF) -> int | None:
        """The version of a row in the store; None: there is no such row."""
        self.commit()
        row = self.rows.groups.get((topic, group))
        return None if row is None else row.version


of_one = recounted(Rig)
rig = recounted(OfShards)


def test_a_single_shard_assigns_no_versions(of_one: Rig) -> None:
    of_one.create_group("t", "g")
    of_one.configure("t", "g", paused=True)
    of_one.configure("t", paused=True)
    of_one.delete_group("t", "g")
    assert not of_one.rows.counter
    assert [row.version for row in of_one.rows.groups.values()] == [0]


def test_the_home_shard_numbers_each_change(rig: OfShards) -> None:
    rig.create_group(OURS, "a")
    rig.create_group(OURS, "b")
    assert (rig.stored(OURS, "a"), rig.stored(OURS, "b")) == (1, 2)
    rig.configure(OURS, "a", order_attempts=5)
    rig.configure(OURS, paused=True)
    assert (rig.stored(OURS, "a"), rig.stored(OURS, "b"), rig.stored(OURS)) == (3, 2, 4)
    assert not rig.core.versions.strays


def test_a_group_made_by_a_subscription_is_numbered(rig: OfShards) -> None:
    rig.subscribe(OURS, "g")
    assert rig.stored(OURS, "g") == 1


def test_a_deletion_at_home_raises_the_counter(rig: OfShards) -> None:
    rig.create_group(OURS, "g")
    rig.delete_group(OURS, "g")
    assert rig.stored(OURS, "g") is None
    assert rig.core.versions.counter == 2


def test_removing_topic_settings_raises_the_counter(rig: OfShards) -> None:
    rig.configure(OURS, paused=True)
    rig.configure(OURS, paused=False)
    assert rig.stored(OURS) is None
    assert rig.core.versions.counter == 2
    assert rig.core.topics[OURS].version == 0


def test_other_shards_assign_no_versions(rig: OfShards) -> None:
    group = rig.create_group(THEIRS, "g")
    assert rig.stored(THEIRS, "g") == 0
    rig.engine.grouping.adopt_version(group, 7)
    rig.configure(THEIRS, "g", paused=True)
    assert rig.stored(THEIRS, "g") == 7
    rig.delete_group(THEIRS, "g")
    assert rig.core.versions.counter == 0
    assert rig.core.versions.strays == {2: 3}, "made, set and deleted here"


def test_following_marks_no_stray_changes(rig: OfShards) -> None:
    rig.core.versions.follows = True
    rig.create_group(THEIRS, "g")
    rig.configure(THEIRS, paused=True)
    assert not rig.core.versions.strays


def test_versions_and_the_counter_survive_a_crash(rig: OfShards) -> None:
    rig.create_group(OURS, "g")
    rig.configure(OURS, paused=True)
    rig.configure(THEIRS, paused=True)
    rig.engine.grouping.adopt_topic_version(rig.core.topics[THEIRS], 9)
    rig.commit()
    rig.crash()
    topics = rig.core.topics
    assert (topics[OURS].groups["g"].version, topics[OURS].version) == (1, 2)
    assert (topics[THEIRS].version, rig.core.versions.counter) == (9, 2)
    rig.configure(OURS, "g", paused=True)
    assert rig.stored(OURS, "g") == 3
    assert topics[OURS].groups["g"].settings != NOTHING_SET
