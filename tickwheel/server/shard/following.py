"""Follows settings of groups and topics whose home is another shard, and ends unused claims.

The home of a topic numbers the changes of its settings and groups (``engine/topics.py:Versions``).
This shard reads the committed settings of all other shards before it serves, and then every
``READ_S_MIN``, or less often if there are many shards. It applies missed changes as the verbs do.
It also ends claims of names (``names.py``) that their target shard does not use. Invariants:

* A change is applied completely, together with its version. An older version is never applied.
* A group that no longer exists at its home is deleted here only if the home's counter has reached
  the version adopted here, and the group is not in use here. So a home that was set back to an
  older state causes no deletion.
* Such a home first recovers the changes beyond its counter from the other shards, and creates the
  groups of its topics that began elsewhere while it was unreachable. Then it continues counting.
* Reads delay the shard only during its start, for at most ``CATCH_UP_S``.
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
    in_steps,
    make_group,
    set_topic,
    targets_changed,
    with_filter,
)
from tickwheel.server.shard.names import drop_claims, key_of_named, old_claims
from tickwheel.waiting import cancel_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tickwheel.clock import Now
    from tickwheel.engine.topics import Group, Topic
    from tickwheel.persistence.contract import Siblings
    from tickwheel.server.shard.background import Upkeep
    from tickwheel.server.shard.parts import Parts

CATCH_UP_S: Final = 2.0
"""Maximum seconds that a start waits for the settings of other shards."""
READ_S_MIN: Final = 2.0
READS_PER_S_MAX: Final = 64
"""Maximum shards read per second. With N shards the store gets N times as many reads."""
CLAIMS_CHECK_MS: Final = 60_000
"""Milliseconds between two checks for old claims of names."""
ROWS_AT_A_TIME: Final = 200
"""Maximum number of rows that are applied in one step of the event loop."""
LOGGED_MAX: Final = 20
"""Maximum changes of one read that are logged individually. Of more, only the number is logged."""
Name = tuple[str, str]
"""(topic, group) of a row."""


def read_pause_s(others: int) -> float:
    """Return the seconds between two reads of ``others`` shards."""
    return max(READ_S_MIN, others / READS_PER_S_MAX)


class Following:
    """Applies the settings of other shards: ``catch_up`` before the shard serves, then ``run``."""

    def __init__(self, parts: Parts, upkeep: Upkeep, siblings: Siblings) -> None:
        self._parts = parts
        self._upkeep = upkeep
        self._siblings = siblings
        self._versions = parts.core.versions
        self._others = [n for n in range(self._versions.shards) if n != self._versions.shard]
        self._known: dict[int, tuple[int, int]] = {}
        """Shard → (its counter, its number of strays, see ``Versions``) at the last read after
        which everything was applied."""
        self._unread = set(self._others)
        """Shards that have not been read since the start."""
        before = self._versions.number_at_start
        self._assigned_max = self._versions.counter if before is None else before
        """The highest number that this shard has certainly assigned, even if it was set back."""
        self._versions.number_at_start = self._assigned_max
        self._unfired_ms: int | None = parts.engine.recovery.stopped_ms + 1
        """Tasks due from this time on have not fired; None once the shard serves."""
        self._reasons: dict[int, str] = {}
        """Shard → the last logged reason why it is not followed."""
        self._claims_mono_ms = 0
        """Steady time of the next check for old claims."""
        self._changes: list[str] = []
        """Changes of the current read, which are logged at its end."""

    async def catch_up(self) -> None:
        """Apply the settings of the other shards, and recover lost settings of this shard, before
        it serves. Shards that do not answer in time are read later."""
        reading = {asyncio.ensure_future(self._read(shard)): shard for shard in self._others}
        done, late = await asyncio.wait(reading, timeout=CATCH_UP_S)
        await cancel_all(late)
        answers: dict[int, SiblingSettings] = {}
        unread = {reading[task]: f"no answer within {CATCH_UP_S:g} s" for task in late}
        for task in done:
            answer = task.result()
            if isinstance(answer, StoreError):
                unread[reading[task]] = answer.message
            else:
                answers[reading[task]] = answer
        if unread:
            names = ", ".join(map(str, sorted(unread)))
            why = next(iter(unread.values()))
            self._parts.on_event(
                "settings_not_followed", f"of shards {names}: {why}; they are read later"
            )
            self._reasons |= unread
        self._recover(answers)
        for shard, answer in sorted(answers.items()):
            await self._follow(shard, answer)
        self._unfired_ms = None

    async def run(self) -> None:
        """Read the other shards repeatedly, forever."""
        while True:
            await asyncio.sleep(read_pause_s(len(self._others)))
            await asyncio.gather(*map(self.look, self._others))
            await self.end_claims()

    async def end_claims(self) -> None:
        """End old claims whose names are not used in their target shard."""
        now = self._parts.clock.read()
        if now.mono_ms < self._claims_mono_ms:
            return
        self._claims_mono_ms = now.mono_ms + CLAIMS_CHECK_MS
        here, elsewhere = old_claims(self._parts.core, now.now_ms)
        drop_claims(self._parts, here)
        for shard, rows in elsewhere.items():
            for start in range(0, len(rows), ROWS_AT_A_TIME):
                chunk = rows[start : start + ROWS_AT_A_TIME]
                try:
                    existing = await self._siblings.contains(shard, list(map(key_of_named, chunk)))
                except StoreError as error:
                    self._log_reason(shard, error.message)
                    break
                unused = [row for row, exists in zip(chunk, existing, strict=True) if not exists]
                drop_claims(self._parts, unused)
        self._parts.committer.kick()

    async def look(self, shard: int) -> None:
        """Read one shard and apply its changes."""
        known = self._known.get(shard)
        is_strayed = known is None or known[1] != self._versions.strays[shard]
        strays = self._versions.strays[shard]
        answer = await self._read(shard, None if is_strayed or known is None else known[0])
        if isinstance(answer, StoreError):
            self._log_reason(shard, answer.message)
            return
        if answer.rows is None:
            self._reasons.pop(shard, None)
            return
        if self._versions.strays[shard] != strays:
            return  # changed here since the read; the next read sees the change
        if shard in self._unread:
            self._recover({shard: answer})
        await self._follow(shard, answer)
        targets_changed(self._parts)
        self._parts.committer.kick()
        self._parts.wake()

    async def _read(self, shard: int, known: int | None = None) -> SiblingSettings | StoreError:
        try:
            return await self._siblings.settings(shard, known)
        except StoreError as error:
            return error

    def _log_reason(self, shard: int, why: str) -> None:
        """Log why a shard is not followed completely, unless that was the last reason logged."""
        if self._reasons.get(shard) != why:
            self._reasons[shard] = why
            self._parts.on_event("settings_not_followed", f"of shard {shard}: {why}; retrying")

    # --- settings of other homes -----------------------------------------------------------------

    async def _follow(self, shard: int, answer: SiblingSettings) -> None:
        """Apply the settings of groups and topics whose home is ``shard``."""
        versions, strays = self._versions, self._versions.strays[shard]
        self._known.pop(shard, None)
        rows = {
            (row.topic, row.group): row
            for row in answer.rows or ()
            if not row.is_closed and versions.home_of(row.topic) == shard
        }
        missing, highest = await self._missing_at_home(shard, rows)
        if versions.strays[shard] != strays:
            return  # changed here since the read; the next read is applied instead
        reasons = []
        if highest > answer.counter.number or (
            missing and answer.counter.number_at_start is not None
        ):
            reasons.append(
                f"its counter is {answer.counter.number}, the highest version here is {highest},"
                " and no group is deleted here before it has read all other shards since its start"
            )
        else:
            reasons += self._end(missing)
        ordered = sorted(rows.values(), key=lambda row: row.version)
        for start in range(0, len(ordered), ROWS_AT_A_TIME):
            if versions.strays[shard] != strays:
                break  # changed here since the read; the next read is applied instead
            reasons += self._apply_all(ordered[start : start + ROWS_AT_A_TIME])
            await asyncio.sleep(0)
        self._log_changes()
        if reasons:
            self._log_reason(shard, reasons[0])
        elif versions.strays[shard] == strays:
            self._reasons.pop(shard, None)
            self._known[shard] = answer.counter.number, strays

    async def _missing_at_home(
        self, shard: int, rows: dict[Name, GroupRow]
    ) -> tuple[list[tuple[Topic, Group | None]], int]:
        """Return (list of (topic, group or None for the topic itself) that no longer exist at the
        home, highest version of this home here)."""
        deleted: list[tuple[Topic, Group | None]] = []
        highest = 0
        async for topic in in_steps(list(self._parts.core.topics.values())):
            if self._versions.home_of(topic.name) != shard:
                continue
            groups: list[Group | None] = [*topic.live_groups]
            if topic.settings.closed_ms is None:
                groups.append(None)
            for group in groups:
                version = topic.version if group is None else group.version
                highest = max(highest, version)
                name = topic.name, TOPIC_ITSELF if group is None else group.name
                if version and name not in rows:
                    deleted.append((topic, group))
        return deleted, highest

    def _end(self, deleted: Sequence[tuple[Topic, Group | None]]) -> list[str]:
        """Delete groups and reset settings of topics. Return why some were not deleted."""
        reasons = []
        for topic, group in deleted:
            self._versions.follows = True
            try:
                if group is None:
                    now = self._parts.clock.read()
                    grouping = self._parts.engine.grouping
                    set_topic(grouping, self._upkeep, topic, NOTHING_SET, now)
                elif group.subscribers or group.flight:
                    reasons.append(f"group {group.name} of topic {topic.name} is in use here")
                    continue
                else:
                    self._upkeep.end_group(group)
            finally:
                self._versions.follows = False
            self._note_change(topic.name, None if group is None else group.name, "gone")
        return reasons

    def _apply_all(self, rows: Iterable[GroupRow]) -> list[str]:
        """Apply these rows of a home. Return the errors of rows that cannot be applied."""
        reasons = []
        self._versions.follows = True
        try:
            for row in rows:
                try:
                    self._apply(row)
                except TickwheelError as error:
                    reasons.append(error.message)
        finally:
            self._versions.follows = False
        return reasons

    def _apply(self, row: GroupRow) -> None:
        """Apply a row to a group or to the settings of a topic, unless its version is older. Raise
        TickwheelError before anything is changed."""
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
                self._note_change(row.topic, None, f"version {row.version}")
            if self._is_elsewhere(row) and topic.version != row.version:
                grouping.adopt_topic_version(topic, row.version)
            return
        if group is None:
            check_filter(parts.core, topic, settings)
            group = make_group(grouping, topic, name, self._since_ms(row, now), now, settings)
            self._note_change(row.topic, name, f"version {row.version}, created")
        elif row.version < group.version:
            return
        else:
            after = settings._replace(former=group.settings.former)
            after = with_filter(parts, group, after, now.now_ms)
            if after != group.settings:
                grouping.set(group, after, now.mono_ms)
                self._note_change(row.topic, name, f"version {row.version}")
        if self._is_elsewhere(row) and group.version != row.version:
            grouping.adopt_version(group, row.version)

    def _since_ms(self, row: GroupRow, now: Now) -> int | None:
        """Return the start of a group here; None means now. The group is owed tasks that came due
        while it existed and this shard was down."""
        if row.since_id == BY_DUE_ALONE and row.since_ms > now.now_ms:
            return row.since_ms
        return None if self._unfired_ms is None else max(row.since_ms, self._unfired_ms)

    def _is_elsewhere(self, row: GroupRow) -> bool:
        """Return whether another shard is the home of the row, and so numbers its versions."""
        return self._versions.home_of(row.topic) != self._versions.shard

    # --- recovery of this home -------------------------------------------------------------------

    def _recover(self, answers: Mapping[int, SiblingSettings]) -> None:
        """Recover settings of this home from other shards after it was set back to an older state,
        and create groups of its topics that began elsewhere while it was unreachable. A version
        above all numbers that this shard had assigned before its start counts as lost, unless the
        object was changed here since. The recovery is one step, so that no other shard sees a part
        of it. Afterwards the counter is above all lost versions, and the others follow it again."""
        newest: dict[Name, GroupRow] = {}
        for row in (row for answer in answers.values() for row in answer.rows or ()):
            if row.is_closed or self._is_elsewhere(row):
                continue
            name = row.topic, row.group
            if name not in newest or row.version > newest[name].version:
                newest[name] = row
        wanted = sorted(filter(self._is_missing, newest.values()), key=lambda row: row.version)
        lost = max((row.version for row in newest.values()), default=0)
        versions, set_counter = self._versions, self._parts.engine.grouping.set_counter
        self._unread.difference_update(answers)
        if not self._unread:
            versions.number_at_start = None
        if wanted and lost > self._assigned_max:
            detail = f"other shards know version {lost} of this shard: it was set back"
            self._parts.on_event("settings_taken_back", detail)
        if versions.counter > self._assigned_max or lost > self._assigned_max:
            set_counter(max(lost, versions.counter))
        self._assigned_max = max(lost, self._assigned_max)
        for why in self._apply_all(row._replace(version=self._versions.counter) for row in wanted):
            self._parts.on_event(
                "settings_not_followed",
                f"of this shard; they could not be restored from other shards: {why}",
            )
        self._log_changes()

    def _is_missing(self, row: GroupRow) -> bool:
        """Return whether this home lacks the settings in a row of another shard."""
        topic = self._parts.core.topics.get(row.topic)
        if row.group == TOPIC_ITSELF:
            version = 0 if topic is None else topic.version
        else:
            group = None if topic is None else topic.groups.get(row.group)
            if row.version == 0:
                return group is None
            version = 0 if group is None else group.version
        return row.version > self._assigned_max >= version

    # --- log -------------------------------------------------------------------------------------

    def _note_change(self, topic: str, group: str | None, what: str) -> None:
        self._parts.observed.settings_followed += 1
        label = f"topic {topic}" if group is None else f"group {group} of topic {topic}"
        self._changes.append(f"{label}: {what}")

    def _log_changes(self) -> None:
        changes, self._changes = self._changes, []
        if len(changes) > LOGGED_MAX:
            changes = [f"{len(changes)} groups and topics"]
        for change in changes:
            self._parts.on_event("settings_followed", change)
