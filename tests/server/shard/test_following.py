"""Settings of groups and topics that have their home in another shard."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.shard_rig import Peer
from support.shards import Shards, key_in
from support.waiting import comes, counted_turns
from tickwheel.api.frames import FrameType as T
from tickwheel.engine.topics import NOTHING_SET, Group, Topic
from tickwheel.model.kinds import GROUP
from tickwheel.model.records import GroupRow, SettingsCounter
from tickwheel.persistence.contract import SiblingSettings, StoreAway
from tickwheel.server.shard import following
from tickwheel.server.shard.groups import TOPICS_PER_STEP

COUNT, HOME, OTHER, THIRD = 3, 1, 2, 0
TOPIC = key_in(HOME, COUNT, "t")
"""Its home is shard 1."""


@pytest.fixture
async def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shards]:
    """Shards that look at each other when a test says so, and at a start."""
    monkeypatch.setattr(following, "READ_S_MIN", 3_600.0)
    async with Shards(COUNT, tmp_path) as found:
        await look(found)
        yield found


async def look(shards: Shards, *numbers: int) -> None:
    """Let these shards (none: all) look at the others, and commit what comes of it."""
    for inside in shards.insides:
        if inside.daemon is not None and inside.daemon.roles.shard is not None:
            await inside.daemon.roles.shard.committer.barrier()
    for number in numbers or range(COUNT):
        if shards.insides[number].daemon is None:
            continue
        shard = shards.shard(number)
        assert shard.following is not None
        for other in shard.following._others:
            await shard.following.look(other)
        await shard.committer.barrier()


async def tell(shards: Shards, number: int, kind: int, *fields: Any) -> Any:
    """The answer of one shard alone."""
    daemon = shards.insides[number].daemon
    assert daemon is not None
    peer = Peer(daemon.listener())
    await peer.hello()
    answer = await peer.do(kind, *fields)
    peer.lose()
    return answer


async def create(shards: Shards, number: int, group: str = "g", **options: Any) -> None:
    await tell(shards, number, T.GROUP_CREATE, TOPIC, group, options)


async def configure(shards: Shards, number: int, group: str | None = "g", **said: Any) -> None:
    await tell(shards, number, T.CONFIGURE, TOPIC, group, said)


async def delete(shards: Shards, number: int, group: str = "g") -> None:
    await tell(shards, number, T.GROUP_DELETE, TOPIC, group, True)


def topic(shards: Shards, number: int) -> Topic:
    return shards.shard(number).core.topics[TOPIC]


def group(shards: Shards, number: int, name: str = "g") -> Group | None:
    return shards.shard(number).core.find_group(TOPIC, name)


def versions(shards: Shards, name: str = "g") -> list[int | None]:
    """The version of the group in each shard; None: there is no such group."""
    result = (group(shards, number, name) for number in range(COUNT))
    return [None if item is None else item.version for item in result]


# --- a shard that serves -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "pause_s"), [(1, 2.0), (128, 2.0), (256, 4.0), (1_023, 1_023 / 64)]
)
def test_many_shards_look_at_each_other_less_often(others: int, pause_s: float) -> None:
    assert following.read_pause_s(others) == pytest.approx(pause_s)
    assert others / following.read_pause_s(others) <= 64


async def test_groups_of_the_home_shard_are_created_in_the_others(shards: Shards) -> None:
    await create(shards, HOME, tags="eu", rate=30, order_attempts=5)
    await look(shards)
    assert versions(shards) == [2, 2, 2], "made, and set"
    home, other = group(shards, HOME), group(shards, OTHER)
    assert home is not None and other is not None
    assert home.settings == other.settings != NOTHING_SET
    assert other.judge is not None and other.bucket is not None
    assert shards.shard(OTHER).observed.settings_followed == 1


async def test_followed_settings_are_stored(shards: Shards) -> None:
    await create(shards, HOME, paused=True)
    await configure(shards, HOME, None, rate=3)
    await look(shards, OTHER)
    stored = await shards.shard(OTHER).store.recover_small()
    rows = {row.group: row for row in stored.of_kind(GROUP)}
    assert {name: row.version for name, row in rows.items()} == {"g": 2, "": 3}
    assert rows["g"].settings is not None and rows["g"].settings.paused


async def test_a_followed_change_is_applied_like_the_verb(shards: Shards) -> None:
    await create(shards, HOME, tags="eu", paused=True)
    await look(shards)
    await tell(shards, OTHER, T.ENQUEUE, 1, [(TOPIC, b"old", 0, {"tag": "eu"})])
    before = group(shards, OTHER)
    assert before is not None
    await comes(lambda: before.ready_count == 1)
    await configure(shards, HOME, tags="us", paused=False)
    await look(shards, OTHER)
    other = group(shards, OTHER)
    assert other is not None
    assert (other.settings.tags, other.settings.paused) == ("us", False)
    assert [task.tags for task in other.settings.former] == ["eu"], "it judges what was due before"
    home = group(shards, HOME)
    assert home is not None and not home.settings.former, "each shard has its own"


async def test_topics_are_compared_with_their_home_in_steps(shards: Shards) -> None:
    shard = shards.shard(OTHER)
    assert shard.following is not None
    for n in range(10 * TOPICS_PER_STEP):
        shard.core.topic(f"t{n}")
    with counted_turns() as turns:
        assert await shard.following._missing_at_home(HOME, {}) == ([], 0)
    assert turns[0] >= 9


async def test_a_change_during_the_comparison_with_the_home_is_read_first(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(shards, HOME)
    await look(shards)
    await delete(shards, HOME)
    followed = shards.shard(OTHER).following
    assert followed is not None
    compare = followed._missing_at_home

    async def changed_meanwhile(*args: Any) -> Any:
        result = await compare(*args)
        followed._versions.strays[HOME] += 1
        return result

    with monkeypatch.context() as patch:
        patch.setattr(followed, "_missing_at_home", changed_meanwhile)
        await followed.look(HOME)
    assert group(shards, OTHER) is not None
    await look(shards, OTHER)
    await comes(lambda: group(shards, OTHER) is None)


async def test_an_unchanged_home_shard_is_read_without_rows(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(shards, HOME)
    await look(shards)
    results: list[SiblingSettings] = []
    follows = shards.shard(OTHER).following
    assert follows is not None
    read = follows._siblings.settings

    async def settings(shard: int, known: int | None) -> SiblingSettings:
        results.append(await read(shard, known))
        return results[-1]

    monkeypatch.setattr(follows._siblings, "settings", settings)
    await look(shards, OTHER)
    assert results == [(SettingsCounter(), None), (SettingsCounter(1), None)]


async def test_settings_made_outside_the_home_shard_are_reverted(shards: Shards) -> None:
    await create(shards, HOME, rate=5)
    await look(shards)
    await configure(shards, OTHER, rate=9)
    await configure(shards, OTHER, None, paused=True)
    await look(shards, OTHER)
    other = group(shards, OTHER)
    assert other is not None and other.settings.rate == 5
    assert topic(shards, OTHER).settings.paused, "home says nothing of that, and never did"


async def test_a_group_unknown_to_the_home_shard_is_kept(shards: Shards) -> None:
    await create(shards, OTHER)
    await create(shards, HOME, "another")
    await look(shards)
    assert versions(shards) == [None, None, 0]


async def test_a_deletion_at_home_is_followed(shards: Shards) -> None:
    await create(shards, HOME)
    await configure(shards, HOME, None, paused=True)
    await look(shards)
    await delete(shards, HOME)
    await configure(shards, HOME, None, paused=False)
    await look(shards)
    assert versions(shards) == [None, None, None]
    assert topic(shards, OTHER).settings == NOTHING_SET


async def test_a_deleted_group_in_use_ends_after_its_last_user(shards: Shards) -> None:
    await create(shards, HOME)
    await look(shards)
    daemon = shards.insides[OTHER].daemon
    assert daemon is not None
    peer = Peer(daemon.listener())
    await peer.hello()
    await peer.do(T.SUBSCRIBE, 1, TOPIC, "g", 10, {})
    await delete(shards, HOME)
    await look(shards)
    assert versions(shards) == [None, None, 1]
    peer.lose()
    await shards.settle()
    await look(shards, OTHER)
    assert versions(shards) == [None, None, None]


async def test_a_group_deleted_only_outside_the_home_shard_is_recreated(shards: Shards) -> None:
    """As after a deletion that one shard has refused: the group is still there."""
    await create(shards, HOME, paused=True)
    await look(shards)
    await delete(shards, OTHER)
    assert versions(shards) == [2, 2, None]
    await look(shards, OTHER)
    again = group(shards, OTHER)
    assert again is not None and again.version == 2 and again.settings.paused


async def test_the_home_shards_settings_win_for_a_group_made_twice(shards: Shards) -> None:
    await create(shards, OTHER, tags="us")
    await create(shards, HOME, tags="eu")
    await look(shards)
    other = group(shards, OTHER)
    assert other is not None and (other.settings.tags, other.version) == ("eu", 1)


async def test_broadcast_only_waits_until_the_groups_ended(shards: Shards) -> None:
    await create(shards, OTHER)
    await configure(shards, HOME, None, broadcast_only=True)
    await look(shards)
    assert not topic(shards, OTHER).settings.broadcast_only
    await delete(shards, OTHER)
    await look(shards)
    assert topic(shards, OTHER).settings.broadcast_only


async def test_a_change_during_the_read_of_home_is_kept(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client tells home first, and this shard next: what was read before is older."""
    await create(shards, HOME, rate=1)
    await look(shards)
    follows = shards.shard(OTHER).following
    assert follows is not None
    read = follows._siblings.settings
    await configure(shards, HOME, rate=2)

    async def slow(shard: int, known: int | None) -> SiblingSettings:
        rows = await read(shard, known)
        if shard == HOME:
            await configure(shards, HOME, rate=3)
            await configure(shards, OTHER, rate=3)
        return rows

    monkeypatch.setattr(follows._siblings, "settings", slow)
    await follows.look(HOME)
    other = group(shards, OTHER)
    assert other is not None and other.settings.rate == 3
    monkeypatch.undo()
    await look(shards, OTHER)
    assert (other.settings.rate, other.version) == (3, 4)


async def test_only_the_home_shard_ends_unused_groups(tmp_path: Path) -> None:
    async with Shards(COUNT, tmp_path, group_unused_report_s=1, group_unused_end_s=1) as shards:
        await create(shards, HOME)
        await look(shards)
        for number in (OTHER, HOME):
            await shards.shard(number).upkeep.unused.look()
        shards.pass_time(5_000)
        await shards.shard(OTHER).upkeep.unused.look()
        assert versions(shards) == [1, 1, 1]
        await shards.shard(HOME).upkeep.unused.look()
        await shards.shard(HOME).committer.barrier()
        await look(shards)
        assert versions(shards) == [None, None, None]


# --- a shard that was away -----------------------------------------------------------------------


async def test_a_returning_shard_follows_before_it_serves(shards: Shards) -> None:
    await create(shards, HOME, "stays")
    await create(shards, HOME, "goes")
    await look(shards)
    await shards.stop(OTHER)
    await create(shards, HOME, tags="eu")
    await configure(shards, HOME, "stays", paused=True)
    await configure(shards, HOME, None, paused=True)
    await delete(shards, HOME, "goes")
    await shards.start(OTHER)
    new, stays = group(shards, OTHER), group(shards, OTHER, "stays")
    assert new is not None and stays is not None
    assert (new.settings.tags, stays.settings.paused) == ("eu", True)
    assert topic(shards, OTHER).settings.paused
    assert group(shards, OTHER, "goes") is None


async def test_a_group_created_during_a_stop_gets_tasks_due_since(shards: Shards) -> None:
    await create(shards, OTHER, "first")
    await tell(shards, OTHER, T.ENQUEUE, 1, [(TOPIC, b"", 5_000)])
    await shards.settle()
    await shards.stop(OTHER)
    await create(shards, HOME)
    shards.pass_time(10_000)
    await shards.start(OTHER)
    new, first = group(shards, OTHER), group(shards, OTHER, "first")
    assert new is not None and first is not None
    await comes(lambda: (new.ready_count, first.ready_count) == (1, 1))


async def test_a_returning_home_shard_creates_groups_begun_elsewhere(shards: Shards) -> None:
    await shards.stop(HOME)
    await create(shards, OTHER, tags="eu")
    await configure(shards, OTHER, None, paused=True)
    await shards.start(HOME)
    home = group(shards, HOME)
    assert home is not None and home.settings.tags == "eu"
    assert not shards.shard(HOME).core.topics[TOPIC].settings.paused, "only groups began there"
    await look(shards)
    assert versions(shards) == [1, 1, 1]


async def test_an_unreadable_shard_does_not_block_the_others(
    shards: Shards, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await create(shards, HOME)
    await shards.stop(OTHER)
    monkeypatch.setattr(following, "CATCH_UP_S", 0.01)
    read = shards.insides[THIRD].daemon

    class Silent:
        def prepare(self) -> None:
            """Do nothing."""

        async def settings(self, shard: int, known: int | None) -> SiblingSettings:
            if shard == THIRD:
                raise StoreAway("it is broken")
            await asyncio.Event().wait()
            raise AssertionError

        async def close(self) -> None:
            """Nothing is open."""

    assert read is not None
    monkeypatch.setattr("tickwheel.server.roles.open_siblings", lambda url: Silent())
    with caplog.at_level(logging.INFO):
        await shards.start(OTHER)
    lines = [line for line in caplog.messages if "settings_not_followed" in line]
    assert len(lines) == 1 and "of shards 0, 1" in lines[0]
    assert group(shards, OTHER) is None


# --- a shard that was set back -------------------------------------------------------------------


async def set_back(shards: Shards, number: int, change: Any) -> None:
    """Make a backup of a shard, change something, and go back to the backup."""
    assert shards.folder is not None
    path = Path(shards.folder.database(number))
    await shards.stop(number)
    shutil.copy(path, f"{path}.backup")
    await shards.start(number)
    await change()
    await look(shards)
    await shards.stop(number)
    shutil.copy(f"{path}.backup", path)


async def test_a_restored_home_shard_adopts_newer_settings(shards: Shards) -> None:
    await create(shards, HOME, "old")
    await look(shards)

    async def change() -> None:
        await create(shards, HOME, tags="eu")
        await configure(shards, HOME, "old", paused=True)
        await configure(shards, HOME, None, paused=True)

    await set_back(shards, HOME, change)
    await look(shards, OTHER)
    assert group(shards, OTHER) is not None, "home has none, and has not counted so far"
    await shards.start(HOME)
    home, old = group(shards, HOME), group(shards, HOME, "old")
    assert home is not None and home.settings.tags == "eu"
    assert old is not None and old.settings.paused
    assert topic(shards, HOME).settings.paused
    await look(shards)
    assert len({*versions(shards)}) == len({*versions(shards, "old")}) == 1
    await configure(shards, HOME, tags="us")
    await look(shards)
    other = group(shards, OTHER)
    assert other is not None and other.settings.tags == "us"


async def test_no_group_ends_while_the_home_shard_is_behind(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Home cannot read the others when it starts, and has something new to say."""

    async def change() -> None:
        for name in ("a", "b", "c"):
            await create(shards, HOME, name)

    await set_back(shards, HOME, change)

    class Deaf:
        def prepare(self) -> None:
            """Do nothing."""

        async def settings(self, shard: int, known: int | None) -> SiblingSettings:
            raise StoreAway("it is cut off")

        async def close(self) -> None:
            """Nothing is open."""

    with monkeypatch.context() as patch:
        patch.setattr("tickwheel.server.roles.open_siblings", lambda url: Deaf())
        await shards.start(HOME)
    await create(shards, HOME, "new")
    await look(shards, OTHER)
    names = {"a", "b", "c", "new"}
    assert topic(shards, OTHER).groups.keys() == names
    await shards.stop(HOME)
    await shards.start(HOME)
    await look(shards)
    for number in range(COUNT):
        assert topic(shards, number).groups.keys() == names


async def test_a_restored_follower_copies_the_home_shard(shards: Shards) -> None:
    await create(shards, HOME, "old")
    await look(shards)

    async def change() -> None:
        await delete(shards, HOME, "old")
        await create(shards, HOME)

    await set_back(shards, OTHER, change)
    await shards.start(OTHER)
    assert topic(shards, OTHER).groups.keys() == {"g"}


async def test_a_restored_home_shard_adopts_the_newest_version(shards: Shards) -> None:
    """Each shard has followed the home that was set back to another moment."""
    follows = shards.shard(HOME).following
    assert follows is not None
    old = GroupRow(TOPIC, "g", 0, NOTHING_SET._replace(tags="eu"), 0, 40)
    new = old._replace(settings=NOTHING_SET._replace(tags="us"), version=57)
    rows = [new, old, old._replace(group="h", version=41)]
    follows._recover({OTHER: SiblingSettings(SettingsCounter(), rows)})
    assert {name: one.settings.tags for name, one in topic(shards, HOME).groups.items()} == {
        "g": "us", "h": "eu",
    }  # fmt: skip
    assert shards.shard(HOME).core.versions.counter > 57
    late = old._replace(group="late", version=50)
    follows._recover({THIRD: SiblingSettings(SettingsCounter(), [late])})
    assert "late" not in topic(shards, HOME).groups, "57 is newer, and does not know it"
