"""Bulk operations: made, tried without changing anything, listed, shown, cancelled.

A bulk operation is made with the id that its caller has chosen, so that a resend finds it: the same
request is answered with the bulk operation as it is then, another one with the same id is a
conflict. ``only``: a bulk operation on another topic is as if it were not there.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from tickwheel.engine.tasks import OF_DEAD_LETTERS, OF_TASKS
from tickwheel.errors import BadRequest, Conflict, NotFound, Overloaded
from tickwheel.limits import ID_MAX
from tickwheel.model.bulk import START, Argument, Bulk, BulkState, Selection
from tickwheel.server import checks, policies
from tickwheel.server.shard import storable
from tickwheel.server.shard.operations.listing import LIVE

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.model.bulk import BulkRow, Place
    from tickwheel.server.shard.access import Only
    from tickwheel.server.shard.callers import Caller
    from tickwheel.server.shard.operations.listing import Listing
    from tickwheel.server.shard.shard import Shard
    from tickwheel.server.shard.views import ValueBytes

_OF_ALL = ("tags", "where", "key_prefix", "due_from_ms", "due_to_ms", "rate", "id")
_MOVED = ("delay_ms", "due_ms", "shift_ms")
_OPTIONS = {
    **dict.fromkeys(OF_TASKS, (*_OF_ALL, "state")),
    "reschedule": (*_OF_ALL, "state", *_MOVED),
    **dict.fromkeys(OF_DEAD_LETTERS, (*_OF_ALL, "group", "reason")),
}
"""The options of each kind; any other is refused with the list of these."""
BULK_OPTIONS = tuple(dict.fromkeys(name for names in _OPTIONS.values() for name in names))
PREVIEW_OPTIONS = (*BULK_OPTIONS, "after", "until_id", "until_ms")
LIST_OPTIONS = ("after", "limit", "topic", "state")
STATES = {state.name.lower(): state for state in BulkState}
PAGE_DEFAULT, PAGE_MAX = 100, 1_000
KEY_PREFIX_LENGTH_MAX = REASON_LENGTH_MAX = 255
RATE_MIN, RATE_MAX = 0.001, 1_000_000.0
TIME_MS_MAX = 2**53 - 1


class Bulks:
    """The operations on bulk operations."""

    def __init__(self, shard: Shard, value_bytes: ValueBytes, show: Listing) -> None:
        self._shard = shard
        self._bulks = shard.engine.bulks
        self._value_bytes = value_bytes
        self._answer = show.answer

    def make_bulk(
        self,
        caller: Caller,
        request: int,
        topic: object,
        kind: object,
        options: dict[str, Any],
        now: Now,
    ) -> None:
        """Do ``kind`` to everything on the topic that ``options`` select, from now on in the
        background; answered with the bulk operation when it is durable. Raises BadRequest,
        LimitExceeded, DueTooFar, and once its turn has come Conflict, NotFound, Overloaded."""
        core = self._shard.core
        wanted = self._checked(topic, kind, options, now)
        # Its moment is now, not when its turn comes: what is sent behind it is not touched.
        until_id = core.ids.last
        if wanted.kind in OF_DEAD_LETTERS:
            # A place of its own in the order: what dies from now on is behind it.
            until_id = core.ids.take(1, now.now_ms)
        wanted = wanted._replace(by=_who(caller), until_id=until_id)
        storable.check_bulk(wanted)

        def done() -> None:
            shard, found = self._shard, self._bulks.known.get(wanted.id)
            if found is not None and not found.bulk.is_same(wanted):
                raise Conflict(f"there is a bulk operation {wanted.id} that does something else")
            if found is None:
                self._check_room(wanted)
                found = shard.border.act().bulks.make(wanted)
                shard.bulks.begin(wanted.id)
            shard.committer.reply(caller.replies, request, bulk_map(found))

        self._shard.commands.put(caller, request, (), _nothing, done)

    def _check_room(self, bulk: Bulk) -> None:
        core = self._shard.core
        if bulk.topic not in core.topics:
            raise NotFound(f"there is no topic {bulk.topic}")
        if core.bulk_running >= core.config.bulk_max:
            raise Overloaded(
                f"{core.bulk_running} bulk operations are running; the limit is"
                f" {core.config.bulk_max} (bulk_max)"
            )

    def preview_bulk(
        self,
        caller: Caller,
        request: int,
        topic: object,
        kind: object,
        options: dict[str, Any],
        now: Now,
    ) -> None:
        """What a bulk operation would do now, without doing it: the part of the answer behind
        ``after``, with ``next`` to go on after. ``until_id`` and ``until_ms``, of the first part's
        answer, keep its moment. Raises BadRequest, LimitExceeded, DueTooFar, Overloaded."""
        named = ("after", "until_id", "until_ms")
        given = {name: value for name, value in options.items() if name not in named}
        bulk = self._checked(topic, kind, given, now)
        place = _place(options.get("after"))
        until_id, until_ms = options.get("until_id"), options.get("until_ms")
        if until_id is not None:
            checks.integer(until_id, "until_id", 0, ID_MAX)
        if until_ms is not None:
            bulk = bulk._replace(made_ms=checks.integer(until_ms, "until_ms", 0, TIME_MS_MAX))

        async def part() -> dict[str, Any]:
            shard = self._shard
            await shard.committer.barrier()
            until = shard.core.ids.last + 1 if until_id is None else until_id
            asked = bulk._replace(until_id=until)
            if asked.topic not in shard.core.topics:
                raise NotFound(f"there is no topic {asked.topic}")
            found = await shard.bulks.preview(asked, place)
            return {
                "looked_at": found.looked_at,
                "matched": found.matched,
                "refused": dict(found.refused),
                "examples": found.examples,
                "until_id": until,
                "until_ms": asked.made_ms,
                "next": None if found.is_over else found.place,
            }

        self._answer(caller, request, part)

    def cancel_bulk(
        self, caller: Caller, request: int, bulk: object, now: Now, *, only: Only | None = None
    ) -> None:
        """End a bulk operation; what it has changed stays. One that is over stays as it is. Raises
        NotFound."""
        name = checks.name(bulk, "bulk")

        def done() -> None:
            found = self._found(name, only)
            if not found.state.is_over:
                bulks = self._shard.border.act().bulks
                found = bulks.end(name, BulkState.CANCELLED, now.now_ms)
            self._shard.committer.reply(caller.replies, request, bulk_map(found))

        self._shard.commands.put(caller, request, (), _nothing, done)

    def show_bulk(
        self, caller: Caller, request: int, bulk: object, *, only: Only | None = None
    ) -> None:
        """Answer one bulk operation, and how far it is. Raises NotFound."""
        found = self._found(checks.name(bulk, "bulk"), only)
        self._shard.committer.reply(caller.replies, request, bulk_map(found))

    def list_bulk(
        self, caller: Caller, request: int, options: dict[str, Any], *, only: Only | None = None
    ) -> None:
        """A page of bulk operations, newest first; ``next`` of the answer is ``after`` of the next
        page. Raises BadRequest, NotFound."""
        after, topic, state = (options.get(name) for name in ("after", "topic", "state"))
        if topic is not None:
            checks.name(topic, "topic")
        if state is not None and (type(state) is not str or state not in STATES):
            checks.wrong("state", f"one of {', '.join(STATES)}", state)
        limit = checks.integer(options.get("limit", PAGE_DEFAULT), "limit", 1, PAGE_MAX)
        rows = list(reversed(self._bulks.known.values()))
        if after is not None:
            last = self._found(checks.name(after, "after"), only)
            rows = rows[rows.index(last) + 1 :]
        bytes_left = self._shard.limits.frame_bytes_max // 2
        found: list[dict[str, Any]] = []
        following: str | None = None
        for row in rows:
            if not _is_seen(row, only) or topic not in (None, row.bulk.topic):
                continue
            if state is not None and row.state is not STATES[state]:
                continue
            one = bulk_map(row)
            bytes_left -= self._value_bytes(one)
            if len(found) >= limit or (found and bytes_left < 0):
                following = found[-1]["id"]
                break
            found.append(one)
        answer = {"bulk": found, "next": following}
        self._shard.committer.reply(caller.replies, request, answer)

    def _found(self, name: str, only: Only | None) -> BulkRow:
        found = self._bulks.known.get(name)
        if found is None or not _is_seen(found, only):
            raise NotFound(
                f"there is no bulk operation {name}, or it ended so long ago that it is forgotten"
            )
        return found

    # --- what is asked for -----------------------------------------------------------------------

    def _checked(self, topic: object, kind: object, options: dict[str, Any], now: Now) -> Bulk:
        """The checked bulk operation. Raises BadRequest, LimitExceeded, DueTooFar."""
        topic_name = checks.name(topic, "topic")
        if type(kind) is not str or kind not in _OPTIONS:
            checks.wrong("kind", f"one of {', '.join(_OPTIONS)}", kind)
        for name in options:
            if name not in _OPTIONS[kind]:
                raise BadRequest(_not_of(kind, name))
        rate = options.get("rate")
        if rate is not None and (
            type(rate) not in (int, float) or not RATE_MIN <= rate <= RATE_MAX
        ):
            checks.wrong("rate", f"a number of {RATE_MIN} to {RATE_MAX:.0f} a second", rate)
        own = options.get("id")
        return Bulk(
            id=f"{kind}-{secrets.token_hex(6)}" if own is None else checks.name(own, "id"),
            kind=kind,
            topic=topic_name,
            selection=_selection(options),
            arguments=self._arguments(kind, options, now),
            rate=None if rate is None else float(rate),
            made_ms=now.now_ms,
            until_id=0,
        )

    def _arguments(
        self, kind: str, options: dict[str, Any], now: Now
    ) -> tuple[tuple[str, Argument], ...]:
        """The arguments of a reschedule: where tasks are moved to; none of other kinds."""
        if kind != "reschedule":
            return ()
        given = [name for name in _MOVED if options.get(name) is not None]
        if len(given) != 1:
            raise BadRequest(f"reschedule must have one of {', '.join(_MOVED)}")
        limits = self._shard.limits
        if given[0] == "shift_ms":
            most = limits.delay_ms_max
            return (("shift_ms", checks.integer(options["shift_ms"], "shift_ms", -most, most)),)
        checks.due(options.get("delay_ms"), options.get("due_ms"), kind, now.now_ms, limits)
        # As it was asked for: a resend says the same.
        return ((given[0], options[given[0]]),)


def bulk_map(row: BulkRow) -> dict[str, Any]:
    """A bulk operation as every answer has it."""
    bulk = row.bulk
    selected = {
        name: value
        for name, value in bulk.selection._asdict().items()
        if value is not None and value != ""
    }
    return {
        "id": bulk.id,
        "kind": bulk.kind,
        "topic": bulk.topic,
        "selection": selected,
        "arguments": dict(bulk.arguments),
        "rate": bulk.rate,
        "state": row.state.name.lower(),
        "looked_at": row.looked_at,
        "matched": row.matched,
        "changed": row.changed,
        "refused": dict(row.refused),
        "made_ms": bulk.made_ms,
        "by": bulk.by,
        "ended_ms": row.ended_ms or None,
        "note": row.note,
    }


def _selection(options: dict[str, Any]) -> Selection:
    tags, where = options.get("tags"), options.get("where")
    policies.filter_of(tags, where)
    prefix = checks.text(options.get("key_prefix", ""), "key_prefix", KEY_PREFIX_LENGTH_MAX)
    times = [options.get(name) for name in ("due_from_ms", "due_to_ms")]
    for name, value in zip(("due_from_ms", "due_to_ms"), times, strict=True):
        if value is not None:
            checks.integer(value, name, 0, TIME_MS_MAX)
    state, group = options.get("state"), options.get("group")
    if state is not None and state not in LIVE:
        checks.wrong("state", f"one of {', '.join(LIVE)}", state)
    if group is not None:
        checks.name(group, "group")
    reason = checks.text(options.get("reason", ""), "reason", REASON_LENGTH_MAX)
    return Selection(tags, where, prefix, times[0], times[1], state, group, reason)


def _not_of(kind: str, name: str) -> str:
    known = ", ".join(_OPTIONS[kind])
    hint = ""
    if kind in OF_DEAD_LETTERS and name == "state":
        hint = f"; {kind} is about dead letters: cancel ends tasks that are pending"
    return (
        f"a bulk operation of kind {kind} has no {checks.shown(name)}; it may have: {known}{hint}"
    )


def _place(after: object) -> Place:
    if after is None:
        return START
    if type(after) is not tuple or len(after) != 2:
        checks.wrong("after", "[id, group], as next of the part before has it", after)
    return checks.integer(after[0], "after[0]", 0, ID_MAX), checks.text(after[1], "after[1]", 255)


def _who(caller: Caller) -> str:
    return caller.principal.name or "anonymous"


def _is_seen(row: BulkRow, only: Only | None) -> bool:
    return only is None or only(row.bulk.topic)


def _nothing(some: range, known: object) -> None:
    """A bulk operation names no ids: its command is done when its turn has come."""
