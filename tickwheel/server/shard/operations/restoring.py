"""Restores as clients ask for them: begun, looked at, cancelled. What they are: ``restores``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tickwheel.api.daemon import NewRestore, Nothing, RestoreId
from tickwheel.errors import BadRequest
from tickwheel.server.shard.operations.listing import file_name
from tickwheel.server.shard.restores import Wanted

if TYPE_CHECKING:
    from tickwheel.server.shard.callers import Ask
    from tickwheel.server.shard.listings import Listings
    from tickwheel.server.shard.parts import Parts
    from tickwheel.server.shard.restores import Restore, Restores


class Restoring:
    """The operations on restores."""

    def __init__(self, parts: Parts, restores: Restores, listings: Listings) -> None:
        self._parts = parts
        self._restores = restores
        self._listings = listings

    def restore(self, ask: Ask[NewRestore]) -> None:
        """Begin a restore; the answer comes when it is under way. Raises BadRequest, LimitExceeded,
        Overloaded; answers Conflict, NotFound."""
        asked = ask.request
        if asked.ids is not None and not asked.ids:
            raise BadRequest("ids has 0 elements; leave it out to restore all")
        wanted = Wanted(
            into=file_name(asked.into, "into"),
            backup=None if asked.backup is None else file_name(asked.backup, "backup"),
            ids=None if asked.ids is None else tuple(asked.ids),
            history=asked.history,
            include_overdue=asked.include_overdue,
            allow_missing_bodies=asked.allow_missing_bodies,
            dry_run=asked.dry_run,
        )
        if wanted.backup is None and not (wanted.history and self._restores.has_history):
            raise BadRequest("a restore needs a backup, or a history (history_dir), or both")
        self._listings.answer(ask, partial(self._begin, wanted))

    async def _begin(self, wanted: Wanted) -> dict[str, Any]:
        return (await self._restores.begin(wanted)).view()

    def list_restores(self, ask: Ask[Nothing]) -> None:
        """Answer the remembered restores, newest first."""
        found = [restore.view() for restore in self._restores.all()]
        self._parts.committer.reply(ask.caller.replies, ask.number, {"restores": found})

    def show_restore(self, ask: Ask[RestoreId]) -> None:
        """Answer how far a restore is, or how it ended. Raises NotFound."""
        found = self._restores.find(ask.request.id)
        self._parts.committer.reply(ask.caller.replies, ask.number, found.view())

    def cancel_restore(self, ask: Ask[RestoreId]) -> None:
        """Cancel a restore, and answer when it has ended. Raises NotFound, Overloaded."""
        found = self._restores.find(ask.request.id)
        self._listings.answer(ask, partial(self._cancel, found))

    async def _cancel(self, restore: Restore) -> dict[str, Any]:
        await self._restores.cancel(restore)
        return restore.view()
