"""Bulk operations: made, tried without changing anything, listed, shown, cancelled.

A bulk operation is made with the id that its caller has chosen, so that a resend finds it: the same
request is answered with the bulk operation as it is then, another one with the same id is a
conflict. ``only``: a bulk operation on another topic is as if it were not there.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from tickwheel.api.bulk import BulkFields, options_of
from tickwheel.engine.tasks import OF_DEAD_LETTERS
from tickwheel.errors import BadRequest, Conflict, NotFound, Overloaded
from tickwheel.model.bulk import START, Bulk, BulkState, Selection
from tickwheel.server import checks, policies
from tickwheel.server.shard import storable

if TYPE_CHECKING:
    from tickwheel.api.bulk import BulkName, BulkPage, BulkTrial, NewBulk
    from tickwheel.clock import Now
    from tickwheel.model.bulk import BulkRow
    from tickwheel.server.shard.access import Only
    from tickwheel.server.shard.callers import Ask, Caller
    from tickwheel.server.shard.operations.listing import Listing
    from tickwheel.server.shard.shard import Shard
    from tickwheel.server.shard.views import ValueBytes

STATES = {state.name.lower(): state for state in BulkState}


class Bulks:
    """The operations on bulk operations."""

    def __init__(self, shard: Shard, value_bytes: ValueBytes, show: Listing) -> None:
        self._shard = shard
        self._bulks = shard.engine.bulks
        self._value_bytes = value_bytes
        self._answer = show.answer

    def make_bulk(self, ask: Ask[NewBulk]) -> None:
        """Do to everything on the topic that is selected what ``kind`` says, from now on in the
        background; answered with the bulk operation when it is durable. Raises BadRequest,
        LimitExceeded, DueTooFar, and once its turn has come Conflict, NotFound, Overloaded."""
        core, now = self._shard.core, ask.now
        wanted = self._checked(ask.request, ask.request.id, now)
        # Its moment is now, not when its turn comes: what is sent behind it is not touched.
        until_id = core.ids.last
        if wanted.kind in OF_DEAD_LETTERS:
            # A place of its own in the order: what dies from now on is behind it.
            until_id = core.ids.take(1, now.now_ms)
        wanted = wanted._replace(by=_who(ask.caller), until_id=until_id)
        storable.check_bulk(wanted)

        def done() -> None:
            shard, found = self._shard, self._bulks.known.get(wanted.id)
            if found is not None and not found.bulk.is_same(wanted):
                raise Conflict(f"there is a bulk operation {wanted.id} that does something else")
            if found is None:
                self._check_room(wanted)
                found = shard.border.act().bulks.make(wanted)
                shard.bulks.begin(wanted.id)
            shard.committer.reply(ask.caller.replies, ask.number, bulk_map(found))

        self._shard.commands.put(ask.caller, ask.number, (), _nothing, done)

    def _check_room(self, bulk: Bulk) -> None:
        core = self._shard.core
        if bulk.topic not in core.topics:
            raise NotFound(f"there is no topic {bulk.topic}")
        if core.bulk_running >= core.config.bulk_max:
            raise Overloaded(
                f"{core.bulk_running} bulk operations are running; the limit is"
                f" {core.config.bulk_max} (bulk_max)"
            )

    def preview_bulk(self, ask: Ask[BulkTrial]) -> None:
        """What a bulk operation would do now, without doing it: the part of the answer behind
        ``after``, with ``next`` to go on after. ``until_id`` and ``until_ms``, of the first part's
        answer, keep its moment. Raises BadRequest, LimitExceeded, DueTooFar, Overloaded."""
        bulk = self._checked(ask.request, ask.request.id, ask.now)
        place, until_id = ask.request.after or START, ask.request.until_id
        if ask.request.until_ms is not None:
            bulk = bulk._replace(made_ms=ask.request.until_ms)

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

        self._answer(ask.caller, ask.number, part)

    def cancel_bulk(self, ask: Ask[BulkName]) -> None:
        """End a bulk operation; what it has changed stays. One that is over stays as it is. Raises
        NotFound."""
        name = ask.request.bulk

        def done() -> None:
            found = self._found(name, ask.only)
            if not found.state.is_over:
                bulks = self._shard.border.act().bulks
                found = bulks.end(name, BulkState.CANCELLED, ask.now.now_ms)
            self._shard.committer.reply(ask.caller.replies, ask.number, bulk_map(found))

        self._shard.commands.put(ask.caller, ask.number, (), _nothing, done)

    def show_bulk(self, ask: Ask[BulkName]) -> None:
        """Answer one bulk operation, and how far it is. Raises NotFound."""
        found = self._found(ask.request.bulk, ask.only)
        self._shard.committer.reply(ask.caller.replies, ask.number, bulk_map(found))

    def list_bulk(self, ask: Ask[BulkPage]) -> None:
        """Answer a page of bulk operations, newest first. Raises NotFound."""
        asked, only = ask.request, ask.only
        topic, state = asked.topic, asked.state
        rows = list(reversed(self._bulks.known.values()))
        if asked.after is not None:
            rows = rows[rows.index(self._found(asked.after, only)) + 1 :]
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
            if len(found) >= asked.limit or (found and bytes_left < 0):
                following = found[-1]["id"]
                break
            found.append(one)
        answer = {"bulk": found, "next": following}
        self._shard.committer.reply(ask.caller.replies, ask.number, answer)

    def _found(self, name: str, only: Only | None) -> BulkRow:
        found = self._bulks.known.get(name)
        if found is None or not _is_seen(found, only):
            raise NotFound(
                f"there is no bulk operation {name}, or it ended so long ago that it is forgotten"
            )
        return found

    # --- what is asked for -----------------------------------------------------------------------

    def _checked(self, asked: BulkFields, own: str | None, now: Now) -> Bulk:
        """The checked bulk operation. Raises BadRequest, LimitExceeded, DueTooFar."""
        kind, options = asked.kind, options_of(asked.kind)
        for name in asked.said(BulkFields):
            if name not in options and name not in ("topic", "kind"):
                raise BadRequest(_not_of(kind, name))
        return Bulk(
            id=own or f"{kind}-{secrets.token_hex(6)}",
            kind=kind,
            topic=asked.topic,
            selection=_selection(asked),
            # As it was asked for: a resend says the same.
            arguments=tuple(checks.moved(kind, asked, now.now_ms, self._shard.limits).items()),
            rate=asked.rate,
            made_ms=now.now_ms,
            until_id=0,
        )


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


def _selection(asked: BulkFields) -> Selection:
    policies.filter_of(asked.tags, asked.where)
    return Selection(
        asked.tags,
        asked.where,
        asked.key_prefix or "",
        asked.due_from_ms,
        asked.due_to_ms,
        asked.state,
        asked.group,
        asked.reason or "",
    )


def _not_of(kind: str, name: str) -> str:
    known = ", ".join(options_of(kind))
    hint = ""
    if kind in OF_DEAD_LETTERS and name == "state":
        hint = f"; {kind} is about dead letters: cancel ends tasks that are pending"
    return (
        f"a bulk operation of kind {kind} has no {checks.shown(name)}; it may have: {known}{hint}"
    )


def _who(caller: Caller) -> str:
    return caller.principal.name or "anonymous"


def _is_seen(row: BulkRow, only: Only | None) -> bool:
    return only is None or only(row.bulk.topic)


def _nothing(some: range, known: object) -> None:
    """A bulk operation names no ids: its command is done when its turn has come."""
