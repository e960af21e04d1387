"""Restores as clients ask for them: begun, looked at, cancelled. What they are: ``restores``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tickwheel.errors import BadRequest
from tickwheel.limits import ID_MAX
from tickwheel.server import checks
from tickwheel.server.shard.operations.listing import file_name
from tickwheel.server.shard.restores import Wanted

if TYPE_CHECKING:
    from tickwheel.server.shard.callers import Caller
    from tickwheel.server.shard.operations.listing import Listing
    from tickwheel.server.shard.restores import Restore
    from tickwheel.server.shard.shard import Shard

_YES_OR_NO = {
    "history": True,
    "include_overdue": True,
    "allow_missing_bodies": False,
    "dry_run": False,
}
"""The options that are true or false, with their defaults."""


class Restoring:
    """The operations on restores."""

    def __init__(self, shard: Shard, listing: Listing) -> None:
        self._shard = shard
        self._restores = shard.restores
        self._listing = listing

    def restore(
        self, caller: Caller, request: int, into: object, backup: object, options: dict[str, Any]
    ) -> None:
        """Begin a restore; the answer comes when it is under way. ``into`` and ``backup`` (or None)
        are names of files in the folder for backups. ``options``: ``ids``, and what ``_YES_OR_NO``
        has. Raises BadRequest, LimitExceeded, Overloaded; answers Conflict, NotFound."""
        wanted = Wanted(
            into=file_name(into, "into"),
            backup=None if backup is None else file_name(backup, "backup"),
            ids=self._ids(options.get("ids")),
            **{
                name: checks.boolean(options.get(name, default), name)
                for name, default in _YES_OR_NO.items()
            },
        )
        if wanted.backup is None and not (wanted.history and self._restores.has_history):
            raise BadRequest("a restore needs a backup, or a history (history_dir), or both")
        self._listing.answer(caller, request, partial(self._begin, wanted))

    def _ids(self, given: object) -> tuple[int, ...] | None:
        if given is None:
            return None
        ids = checks.sequence(given, "ids", self._shard.limits.ids_per_frame_max)
        if not ids:
            raise BadRequest("ids has 0 elements; leave it out to restore all")
        return tuple(
            checks.integer(one, f"ids[{index}]", 0, ID_MAX) for index, one in enumerate(ids)
        )

    async def _begin(self, wanted: Wanted) -> dict[str, Any]:
        return (await self._restores.begin(wanted)).view()

    def list_restores(self, caller: Caller, request: int) -> None:
        """Answer the remembered restores, newest first."""
        found = [restore.view() for restore in self._restores.all()]
        self._shard.committer.reply(caller.replies, request, {"restores": found})

    def show_restore(self, caller: Caller, request: int, restore_id: object) -> None:
        """Answer how far a restore is, or how it ended. Raises BadRequest, NotFound."""
        found = self._restores.find(checks.integer(restore_id, "id", 0, ID_MAX))
        self._shard.committer.reply(caller.replies, request, found.view())

    def cancel_restore(self, caller: Caller, request: int, restore_id: object) -> None:
        """Cancel a restore, and answer when it has ended. Raises BadRequest, NotFound,
        Overloaded."""
        found = self._restores.find(checks.integer(restore_id, "id", 0, ID_MAX))
        self._listing.answer(caller, request, partial(self._cancel, found))

    async def _cancel(self, restore: Restore) -> dict[str, Any]:
        await self._restores.cancel(restore)
        return restore.view()
