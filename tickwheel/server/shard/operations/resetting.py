"""Resets of groups: made as bulk operations (``bulk.py`` lists, shows and cancels them), or tried
without giving anything."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from tickwheel.api.bulk import TIME_MS_MAX
from tickwheel.engine.tasks import RESET
from tickwheel.errors import BadRequest, Conflict, NotFound, Overloaded, Refused
from tickwheel.model.bulk import Bulk, Selection
from tickwheel.server import checks
from tickwheel.server.shard import storable
from tickwheel.server.shard.operations.bulk import bulk_map
from tickwheel.server.shard.resets import CannotPlan, wanted_of

if TYPE_CHECKING:
    from tickwheel.api.groups import Reset, ResetTrial
    from tickwheel.clock import Now
    from tickwheel.engine.topics import Group
    from tickwheel.server.shard.bulk import Runner
    from tickwheel.server.shard.callers import Ask
    from tickwheel.server.shard.parts import Parts
    from tickwheel.server.shard.resets import Resets


class Resetting:
    """The operations that reset groups."""

    def __init__(self, parts: Parts, runner: Runner, resets: Resets) -> None:
        self._parts = parts
        self._bulks = parts.engine.bulks
        self._runner = runner
        self._resets = resets

    def reset_group(self, ask: Ask[Reset]) -> None:
        """Give the group again what came due since ``to``, in the background; answered with the
        bulk operation when it is durable. Raises BadRequest, and once its turn has come Conflict,
        NotFound, Overloaded, Refused."""
        wanted = self._checked(ask.request, ask.request.id, ask.request.rate, ask.now)
        wanted = wanted._replace(by=ask.caller.principal.name or "anonymous")
        storable.check_bulk(wanted)

        def done() -> None:
            parts, found = self._parts, self._bulks.known.get(wanted.id)
            if found is not None and not found.bulk.is_same(wanted):
                raise Conflict(f"there is a bulk operation {wanted.id} that does something else")
            if found is None:
                known = self._found(wanted)
                self._check_room(wanted)
                bulk = wanted._replace(until_id=parts.core.ids.last)
                found = parts.border.act().resets.begin(known, bulk, from_ms_of(bulk))
                self._runner.begin(bulk.id)
            parts.committer.reply(ask.caller.replies, ask.number, bulk_map(found))

        self._parts.commands.put(ask.caller, ask.number, (), _nothing, done)

    def preview_reset(self, ask: Ask[ResetTrial]) -> None:
        """What a reset would give now, without giving it: how many tasks, and the due times of the
        first and the last; ``lost``: of so many more nobody has the bodies; ``incomplete``: so
        many gaps the history has in the time. Raises BadRequest, Overloaded, and once its turn has
        come NotFound, Refused."""
        asked = self._checked(ask.request, None, None, ask.now)

        async def count() -> dict[str, Any]:
            parts = self._parts
            await parts.committer.barrier()
            bulk = asked._replace(until_id=parts.core.ids.last)
            try:
                found = await self._resets.count(wanted_of(bulk, self._found(bulk)), bulk.until_id)
            except CannotPlan as error:
                raise Refused(f"what a reset would give cannot be found out: {error}") from None
            return {
                "tasks": found.tasks,
                "first_ms": found.first_ms,
                "last_ms": found.last_ms,
                "lost": found.lost,
                "incomplete": found.incomplete,
                "from_ms": from_ms_of(bulk),
                "until_ms": bulk.made_ms,
            }

        self._resets.previews.answer(ask, count)

    def _checked(self, asked: ResetTrial, own: str | None, rate: float | None, now: Now) -> Bulk:
        """The checked bulk operation of a reset. Raises BadRequest."""
        to = asked.to
        if to != "first" and type(to) is not int:
            checks.wrong("to", "'first' or milliseconds", to)
        from_ms = 0 if to == "first" else checks.integer(to, "to", 0, TIME_MS_MAX)
        if from_ms > now.now_ms:
            raise BadRequest(
                f"to is {from_ms - now.now_ms} ms in the future: what comes due then comes anyway"
            )
        return Bulk(
            id=own or f"{RESET}-{secrets.token_hex(6)}",
            kind=RESET,
            topic=asked.topic,
            selection=Selection(),
            arguments=(("group", asked.group), ("from_ms", from_ms)),
            rate=rate,
            made_ms=now.now_ms,
            until_id=0,
        )

    def _found(self, bulk: Bulk) -> Group:
        name = bulk.argument("group")
        found = self._parts.core.find_group(bulk.topic, str(name))
        if found is None or found.is_closed:
            raise NotFound(f"topic {bulk.topic} has no group {name}")
        return found

    def _check_room(self, bulk: Bulk) -> None:
        core, resets = self._parts.core, 0
        if core.bulk_running >= core.config.bulk_max:
            raise Overloaded(
                f"{core.bulk_running} bulk operations are running; the limit is"
                f" {core.config.bulk_max} (bulk_max)"
            )
        for name, row in self._bulks.known.items():
            if row.state.is_over or row.bulk.kind != RESET:
                continue
            resets += 1
            if row.bulk.topic == bulk.topic and row.bulk.argument("group") == bulk.argument(
                "group"
            ):
                raise Conflict(
                    f"bulk operation {name} resets that group already; wait for it, or cancel it"
                )
        if resets >= self._parts.settings.resets_max:
            raise Overloaded(f"{resets} resets are running; the limit is {resets} (resets_max)")


def from_ms_of(bulk: Bulk) -> int:
    return int(bulk.argument("from_ms") or 0)


def _nothing(some: range, known: object) -> None:
    """A reset names no ids: its command is done when its turn has come."""
