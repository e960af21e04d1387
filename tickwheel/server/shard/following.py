"""Follows the settings of groups and topics that have their home in other shards; ends claims of
names (``names.py``) of which the shard that they were made for has nothing.

The home of a topic numbers the changes of its settings and groups (``engine/topics.py:Versions``).
This shard looks at what each of the others has committed, before it serves and every ``LOOK_S``
after that, less often where there are many. It takes over what it has missed, by the steps of the
verbs. Invariants:

* What is taken over is the whole of what home says of a group or topic, and its version with it.
  An older version than the one here is never taken over.
* A group ends here because home has none only if home has counted as far as it was followed here,
  and nobody uses the group here: a home that was set back to an older state ends nothing.
* Such a home takes back from the others, before it goes on counting, what they have of it beyond
  its own counter; and it makes groups of its topics that began elsewhere while it was away.
* A read never holds up the shard for longer than ``CATCH_UP_S``, and then only its start.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from tickwheel.engine.topics import NOTHING_SET
from tickwheel.errors import TickwheelError
from tickwheel.model.records import BY_DUE_ALONE, TOPIC_ITSELF, GroupRow
from tickwheel.persistence.contract import SiblingSettings, StoreError
from tickwheel.server.shard.groups import (
    check_broadcast_only,
    check_filter,
    find_room,
    make_group,
    set_topic,
    targets_changed,
    with_filter,
)
from tickwheel.server.shard.names import drop_claims, key_of_named, old_claims

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tickwheel.clock import Now
    from tickwheel.engine.topics import Group, Topic
    from tickwheel.persistence.contract import Siblings
    from tickwheel.server.shard.background import Upkeep
    from tickwheel.server.shard.parts import Parts

CATCH_UP_S: Final = 2.0
"""How long, in seconds, a start waits for what the other shards say."""
LOOK_S: Final = 2.0
LOOKS_A_SECOND: Final = 64
"""So many shards are looked at in a second, at most: among N shards, N times as many looks reach
the store."""
CLAIMS_LOOK_MS: Final = 60_000
"""How often, in ms, old claims of names are looked at."""
ROWS_AT_A_TIME: Final = 200
"""Rows that are taken over in one step of the event loop."""
LOGGED_MAX: Final = 20
"""Changes of one look that have a line of the log each; of more only their number is logged."""
Name = tuple[str, str]
"""(topic, group) of a row."""


def look_pause_s(others: int) -> float:
    """How long to wait before the next look at so many shards."""
    return max(LOOK_S, others / LOOKS_A_SECOND)


class Following:
    """``catch_up`` before the shard serves, then ``run`` as a task."""

    def __init__(self, parts: Parts, upkeep: Upkeep, siblings: Siblings) -> None:
        self._parts = parts
        self._upkeep = upkeep
        self._siblings = siblings
        self._versions = parts.core.versions
        self._others = [n for n in range(self._versions.shards) if n != self._versions.shard]
        self._known: dict[int, tuple[int, int]] = {}
        """Shard → its counter, and how often something of it was changed here, at the last look
        after which nothing was left to take over."""
        self._unseen = set(self._others)
        """Shards that this one has not read since its start."""
        before = self._versions.sure
        self._numbered = self._versions.counter if before is None else before
        """Numbers up to this were given before this shard could have been set back."""
        self._versions.sure = self._numbered
        self._unfired_ms: int | None = parts.engine.recovery.stopped_ms + 1
        """What is due from this time on has not fired; None: this shard serves."""
        self._reasons: dict[int, str] = {}
        """Shard → what was logged last of why it is not followed."""
        self._claims_mono_ms = 0
        """When claims are looked at next."""
        self._changes: list[str] = []
        """What the look under way has changed."""

    async def catch_up(self) -> None:
        """Take over what the other shards say, and take back what they have of this one, before
        it serves. What cannot be read in time is read later."""
        reading = {asyncio.ensure_future(self._read(one)): one for one in self._others}
        done, late = await asyncio.wait(reading, timeout=CATCH_UP_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        found: dict[int, SiblingSettings] = {}
        unread = {reading[task]: f"no answer within {CATCH_UP_S:g} s" for task in late}
        for task in done:
            answer = task.result()
            if isinstance(answer, StoreError):
                unread[reading[task]] = answer.message
            else:
                found[reading[task]] = answer
        if unread:
            names = ", ".join(map(str, sorted(unread)))
            why = next(iter(unread.values()))
            self._parts.on_event(
                "settings_not_followed", f"of shards {names}: {why}; they follow later"
            )
            self._reasons |= unread
        self._take_back(found)
        for shard, answer in sorted(found.items()):
            await self._follow(shard, answer)
        self._unfired_ms = None

    async def run(self) -> None:
        """Look at the other shards again and again, for ever."""
        while True:
            await asyncio.sleep(look_pause_s(len(self._others)))
            await asyncio.gather(*map(self.look, self._others))
            await self.end_claims()

    async def end_claims(self) -> None:
        """End old claims of names of which nothing is there, here or where they were made for."""
        now = self._parts.clock.read()
        if now.mono_ms < self._claims_mono_ms:
            return
        self._claims_mono_ms = now.mono_ms + CLAIMS_LOOK_MS
        here, elsewhere = old_claims(self._parts.core, now.now_ms)
        drop_claims(self._parts, here)
        for shard, rows in elsewhere.items():
            for start in range(0, len(rows), ROWS_AT_A_TIME):
                some = rows[start : start + ROWS_AT_A_TIME]
                try:
                    there = await self._siblings.have(shard, list(map(key_of_named, some)))
                except StoreError as error:
                    self._say_why(shard, error.message)
                    break
                gone = [row for row, is_there in zip(some, there, strict=True) if not is_there]
                drop_claims(self._parts, gone)
        self._parts.committer.kick()

    async def look(self, shard: int) -> None:
        """Look at one shard, and take over what is new there."""
        known = self._known.get(shard)
        is_strayed = known is None or known[1] != self._versions.strays[shard]
        strays = self._versions.strays[shard]
        answer = await self._read(shard, None if is_strayed or known is None else known[0])
        if isinstance(answer, StoreError):
            self._say_why(shard, answer.message)
            return
        if answer.rows is None:
            self._reasons.pop(shard, None)
            return
        if self._versions.strays[shard] != strays:
            return  # it was asked before what was changed here meanwhile: the next look sees that
        if shard in self._unseen:
            self._take_back({shard: answer})
        await self._follow(shard, answer)
        targets_changed(self._parts)
        self._parts.committer.kick()
        self._parts.wake()

    async def _read(self, shard: int, known: int | None = None) -> SiblingSettings | StoreError:
        try:
            return await self._siblings.settings(shard, known)
        except StoreError as error:
            return error

    def _say_why(self, shard: int, why: str) -> None:
        """Log once why a shard is not followed, or not in all."""
        if self._reasons.get(shard) != why:
            self._reasons[shard] = why
            self._parts.on_event("settings_not_followed", f"of shard {shard}: {why}; trying on")

    # --- what other homes say --------------------------------------------------------------------

    async def _follow(self, shard: int, answer: SiblingSettings) -> None:
        """Make groups and topics whose home is ``shard`` what they are there."""
        versions, strays = self._versions, self._versions.strays[shard]
        self._known.pop(shard, None)
        rows = {
            (row.topic, row.group): row
            for row in answer.rows or ()
            if not row.is_closed and versions.home_of(row.topic) == shard
        }
        gone, highest = self._beside(shard, rows)
        reasons = []
        if highest > answer.counter.number or (gone and answer.counter.sure is not None):
            reasons.append(
                f"it has numbered {answer.counter.number} changes, {highest} are known here, and it"
                " has not read all other shards since its start; nothing ends here until it has"
            )
        else:
            reasons += self._end(gone)
        ordered = sorted(rows.values(), key=lambda row: row.version)
        for start in range(0, len(ordered), ROWS_AT_A_TIME):
            if versions.strays[shard] != strays:
                break  # something of it was changed here meanwhile: the next look takes that over
            reasons += self._take_all(ordered[start : start + ROWS_AT_A_TIME])
            await asyncio.sleep(0)
        self._say_changes()
        if reasons:
            self._say_why(shard, reasons[0])
        elif versions.strays[shard] == strays:
            self._reasons.pop(shard, None)
            self._known[shard] = answer.counter.number, strays

    def _beside(
        self, shard: int, rows: dict[Name, GroupRow]
    ) -> tuple[list[tuple[Topic, Group | None]], int]:
        """The groups, and topics (None), with a version of a home that has them no more; and the
        highest of its versions here."""
        gone: list[tuple[Topic, Group | None]] = []
        highest = 0
        for topic in self._parts.core.topics.values():
            if self._versions.home_of(topic.name) != shard:
                continue
            ones: list[Group | None] = [*topic.live_groups]
            if topic.settings.closed_ms is None:
                ones.append(None)
            for one in ones:
                version = topic.version if one is None else one.version
                highest = max(highest, version)
                name = topic.name, TOPIC_ITSELF if one is None else one.name
                if version and name not in rows:
                    gone.append((topic, one))
        return gone, highest

    def _end(self, gone: Sequence[tuple[Topic, Group | None]]) -> list[str]:
        """Delete groups and take settings of topics away; why some stay."""
        reasons = []
        for topic, group in gone:
            self._versions.follows = True
            try:
                if group is None:
                    now = self._parts.clock.read()
                    grouping = self._parts.engine.grouping
                    set_topic(grouping, self._upkeep, topic, NOTHING_SET, now)
                elif group.subscribers or group.flight:
                    reasons.append(f"group {group.name} of topic {topic.name} is used here")
                    continue
                else:
                    self._upkeep.end_group(group)
            finally:
                self._versions.follows = False
            self._changed(topic.name, None if group is None else group.name, "gone")
        return reasons

    def _take_all(self, rows: Iterable[GroupRow]) -> list[str]:
        """Take over these rows as they are at home; why some cannot be."""
        reasons = []
        self._versions.follows = True
        try:
            for row in rows:
                try:
                    self._take(row)
                except TickwheelError as error:
                    reasons.append(error.message)
        finally:
            self._versions.follows = False
        return reasons

    def _take(self, row: GroupRow) -> None:
        """Make a group, or the settings of a topic, what this row says, unless it is older than
        what is here. Raises TickwheelError, when nothing was changed."""
        name = None if row.group == TOPIC_ITSELF else row.group
        topic, group = find_room(self._parts, row.topic, name)
        settings = (row.settings or NOTHING_SET)._replace(former=())
        parts, now = self._parts, self._parts.clock.read()
        grouping = parts.engine.grouping
        if name is None:
            if row.version < topic.version:
                return
            if topic.settings != settings:
                check_broadcast_only(topic, settings)
                set_topic(grouping, self._upkeep, topic, settings, now)
                self._changed(row.topic, None, f"version {row.version}")
            if self._is_followed(row) and topic.version != row.version:
                grouping.followed_topic(topic, row.version)
            return
        if group is None:
            check_filter(parts.core, topic, settings)
            group = make_group(grouping, topic, name, self._since_ms(row, now), now, settings)
            self._changed(row.topic, name, f"version {row.version}, made")
        elif row.version < group.version:
            return
        else:
            after = settings._replace(former=group.settings.former)
            after = with_filter(parts, group, after, now.now_ms)
            if after != group.settings:
                grouping.set(group, after, now.mono_ms)
                self._changed(row.topic, name, f"version {row.version}")
        if self._is_followed(row) and group.version != row.version:
            grouping.followed(group, row.version)

    def _since_ms(self, row: GroupRow, now: Now) -> int | None:
        """Where a group begins here; None: now. What came due here while this shard was away, and
        the group was there, is owed to it."""
        if row.since_id == BY_DUE_ALONE and row.since_ms > now.now_ms:
            return row.since_ms
        return None if self._unfired_ms is None else max(row.since_ms, self._unfired_ms)

    def _is_followed(self, row: GroupRow) -> bool:
        """Whether the row has its home elsewhere, so that its version is one of that home."""
        return self._versions.home_of(row.topic) != self._versions.shard

    # --- what others have of this home -----------------------------------------------------------

    def _take_back(self, answers: Mapping[int, SiblingSettings]) -> None:
        """Take back what others have of this home, and it has no more, because it was set back to
        an older state; and make groups of its topics that began elsewhere while it was away.

        What has a number above all that this shard had given before its start was lost, unless
        it was changed here since. All of it is one step, so that nobody sees a part: from then on
        the counter is past what was lost, and the others believe it again.
        """
        newest: dict[Name, GroupRow] = {}
        for row in (row for answer in answers.values() for row in answer.rows or ()):
            if row.is_closed or self._is_followed(row):
                continue
            name = row.topic, row.group
            if name not in newest or row.version > newest[name].version:
                newest[name] = row
        wanted = sorted(filter(self._is_missing, newest.values()), key=lambda row: row.version)
        lost = max((row.version for row in newest.values()), default=0)
        versions, count_on = self._versions, self._parts.engine.grouping.count_on
        self._unseen.difference_update(answers)
        if not self._unseen:
            versions.sure = None
        if wanted and lost > self._numbered:
            detail = f"{lost} changes of this shard are known to others: it was set back"
            self._parts.on_event("settings_taken_back", detail)
        if versions.counter > self._numbered or lost > self._numbered:
            count_on(max(lost, versions.counter))
        self._numbered = max(lost, self._numbered)
        for why in self._take_all(row._replace(version=self._versions.counter) for row in wanted):
            self._parts.on_event(
                "settings_not_followed", f"of this shard, as others have it: {why}"
            )
        self._say_changes()

    def _is_missing(self, row: GroupRow) -> bool:
        """Whether this home lacks what a row of another shard says of it."""
        topic = self._parts.core.topics.get(row.topic)
        if row.group == TOPIC_ITSELF:
            known = 0 if topic is None else topic.version
        else:
            group = None if topic is None else topic.groups.get(row.group)
            if row.version == 0:
                return group is None
            known = 0 if group is None else group.version
        return row.version > self._numbered >= known

    # --- said of it ------------------------------------------------------------------------------

    def _changed(self, topic: str, group: str | None, what: str) -> None:
        self._parts.observed.settings_followed += 1
        named = f"topic {topic}" if group is None else f"group {group} of topic {topic}"
        self._changes.append(f"{named}: {what}")

    def _say_changes(self) -> None:
        changes, self._changes = self._changes, []
        if len(changes) > LOGGED_MAX:
            changes = [f"{len(changes)} groups and topics"]
        for one in changes:
            self._parts.on_event("settings_followed", one)
