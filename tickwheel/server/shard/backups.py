"""Copies of the store, and restores.

A backup is made when a client asks for it, or daily at a set hour: so many of these are kept, each
with a mark for the history. One that was missed (the daemon did not run, or it failed) is made up
for. Only files named here are ever removed, and only after a newer one is whole.

A restore that a client has asked for runs in a process of its own, one at a time. It reads a backup
and the history and fills a new file beside the backups; the store that is served is not touched,
and the event loop only reads how far it is. Invariants:

* The process ends with this daemon, however that ends, and with its tenure: its standard input is
  a pipe from here.
* The file is there as a whole, or nothing of it is.
* What is remembered of restores is bounded, and is gone with the process: they are no tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import sys
from asyncio.subprocess import Process
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tickwheel.api.daemon import RESTORE_STOP_S, BackupName, NewRestore, Nothing, RestoreId
from tickwheel.errors import BadRequest, Conflict, LimitExceeded, NotFound, Overloaded, shown
from tickwheel.history.daemon import kill, start_process
from tickwheel.history.restore import Plan, remove_leftovers
from tickwheel.history.segments import write_last_backup
from tickwheel.persistence import sqlite_url
from tickwheel.persistence.contract import StoreError

if TYPE_CHECKING:
    from tickwheel.server.shard.callers import Ask
    from tickwheel.server.shard.parts import Listings, Parts

BACKUP_NAME_BYTES_MAX: Final = 200
"""Bytes of a backup's name: most file systems allow 255, and an unfinished copy's is longer."""
RESTORES_AT_A_TIME: Final = 1
RESTORES_KEPT_MAX: Final = 16
"""How many of the newest restores are remembered."""
LINE_BYTES_MAX: Final = 4 * 1024 * 1024
COMMAND: Final = (sys.executable, "-m", "tickwheel.history.restore")
LOOK_S = 60.0
"""How often the clock, which may be set meanwhile, is looked at, in seconds."""
RETRY_S = 600.0
_STAMP = "%Y%m%dT%H%M%SZ"


class DailyBackups:
    """Makes daily backups; ``run`` it as a task for as long as this daemon leads the shard."""

    def __init__(self, parts: Parts, folder: Path, hour: int) -> None:
        """``hour`` is by this machine's local time."""
        self._parts = parts
        self._folder = folder
        self._hour = hour
        self._shard = parts.core.config.shard
        self._failed = False
        self._name = re.compile(rf"tickwheel-s{self._shard}-(\d{{8}}T\d{{6}}Z)\.db")

    def _now_ms(self) -> int:
        return self._parts.clock.read().now_ms

    async def run(self) -> None:
        """Make a backup each day, for ever."""
        self._report_newest()
        while True:
            pause_s = LOOK_S
            if self.is_due() and not await self.once():
                pause_s = RETRY_S
            await asyncio.sleep(pause_s)

    def is_due(self) -> bool:
        """Whether the hour has come since the newest backup, or the last one failed (one that is
        there without its mark has failed, too)."""
        made = self._made()
        return self._failed or not made or made[-1][0] < self._last_hour()

    async def once(self) -> bool:
        """Make a backup now; whether it was made. Never raises for what a disk or a store does."""
        begun_ms = self._now_ms()
        at = datetime.fromtimestamp(begun_ms // 1000, UTC)
        path = self._folder / f"tickwheel-s{self._shard}-{at.strftime(_STAMP)}.db"
        try:
            check_folder(self._folder)
            size_bytes = await _copy(self._parts, path)
            history_dir = self._parts.settings.history_dir
            if history_dir is not None:
                write_last_backup(history_dir, self._shard, begun_ms, str(path))
        except (StoreError, Conflict, OSError) as error:
            self._failed = True
            self._parts.on_event("backup_failed", f"daily backup to {path}: {error}")
            return False
        self._failed = False
        self._parts.on_event("backup_made", f"{path}, {size_bytes} bytes")
        self._report_newest()
        self._rotate()
        return True

    def _report_newest(self) -> None:
        made = self._made()
        if made:
            self._parts.observed.backed_up(made[-1][0].timestamp())

    def _rotate(self) -> None:
        for _, path in self._made()[: -self._parts.settings.backup_keep]:
            with contextlib.suppress(OSError):
                path.unlink()

    def _made(self) -> list[tuple[datetime, Path]]:
        """(time, path) of the backups in the folder, oldest first."""
        found = []
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                name = self._name.fullmatch(path.name)
                if name is not None:
                    with contextlib.suppress(ValueError):
                        at = datetime.strptime(name[1], _STAMP).replace(tzinfo=UTC)
                        found.append((at, path))
        return sorted(found)

    def _last_hour(self) -> datetime:
        """The last time that it was the set hour, by local time."""
        now = datetime.fromtimestamp(self._now_ms() / 1000, UTC).astimezone()
        at = now.replace(hour=self._hour, minute=0, second=0, microsecond=0)
        return at if at <= now else at - timedelta(days=1)


class BackingUp:
    """The operation that makes a backup when it is asked for."""

    def __init__(self, parts: Parts, backups: Listings, folder: Path) -> None:
        """``backups``: the requests for one, which wait for their turn."""
        self._parts = parts
        self._backups = backups
        self._folder = folder

    def backup(self, ask: Ask[BackupName]) -> None:
        """A copy of the store as a new file in the folder for backups. Raises BadRequest,
        LimitExceeded, Overloaded."""
        path = self._folder / file_name(ask.request.name, "name")
        self._backups.answer(ask, lambda: self._backup(path))

    async def _backup(self, path: Path) -> dict[str, Any]:
        """Write the backup. What the file system says of the name is an answer to the client."""
        try:
            check_folder(self._folder)
            if os.path.lexists(path):
                raise Conflict(f"{path} exists; choose another name")
            size = await _copy(self._parts, path)
        except OSError as error:
            kind = Overloaded if error.errno in (errno.EMFILE, errno.ENFILE) else Conflict
            raise kind(f"cannot write {path}: {error.strerror}") from error
        return {"path": str(path), "bytes": size}


def check_folder(folder: Path) -> None:
    """Check that the folder for backups is there: it is never made, because a volume that is not
    mounted would become a folder of the disk that the store is on. Raises Conflict."""
    if not folder.is_dir():
        raise Conflict(f"backup_dir {folder} is not a folder; is its volume mounted?")


async def _copy(parts: Parts, path: Path) -> int:
    """Copy the store, with all that was accepted so far; returns the bytes of the copy."""
    await parts.committer.barrier()
    return await parts.store.backup(str(path))


def file_name(name: str, field: str) -> str:
    """The name of a file in the folder for backups. Raises BadRequest, LimitExceeded."""
    if not name or name in (".", "..") or Path(name).name != name or "\0" in name:
        raise BadRequest(f"{field} must be a file name without a folder, not {shown(name)}")
    size_bytes = len(os.fsencode(name))
    if size_bytes > BACKUP_NAME_BYTES_MAX:
        raise LimitExceeded(f"{field} has {size_bytes} bytes; the limit is {BACKUP_NAME_BYTES_MAX}")
    return name


# --- restores ------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Restore:
    """One restore, as it is now."""

    id: int
    wanted: NewRestore
    began_ms: int
    state: str = "running"
    """"running", then done, refused (nothing was written; see the report), failed or cancelled."""
    ended_ms: int | None = None
    step: str = "backup"
    done: int = 0
    of: int | None = None
    report: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    process: Process | None = None
    is_unwanted: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def view(self) -> dict[str, Any]:
        """The restore as an answer has it."""
        return {
            "id": self.id,
            "state": self.state,
            "into": self.wanted.into,
            "backup": self.wanted.backup,
            "dry_run": self.wanted.dry_run,
            "of_shards": self.wanted.of_shards,
            "began_ms": self.began_ms,
            "ended_ms": self.ended_ms,
            "progress": {"step": self.step, "done": self.done, "total": self.of},
            "report": self.report,
            "error": self.error,
        }


class Restores:
    """The restores of one tenure of the daemon."""

    def __init__(self, parts: Parts, folder: Path) -> None:
        """``folder``: the folder for backups."""
        self._parts = parts
        self._folder = folder
        self._history_dir = parts.settings.history_dir
        self._clock = parts.clock
        self._known: dict[int, Restore] = {}

    @property
    def has_history(self) -> bool:
        return self._history_dir is not None

    def all(self) -> list[Restore]:
        """All remembered restores, newest first."""
        return list(reversed(self._known.values()))

    def find(self, restore_id: int) -> Restore:
        """The restore of this id. Raises NotFound."""
        found = self._known.get(restore_id)
        if found is None:
            raise NotFound(f"there is no restore {restore_id}, or it is forgotten")
        return found

    async def begin(self, wanted: NewRestore) -> Restore:
        """Begin a restore. Raises Conflict (one runs, the file or the id is there), NotFound (no
        backup)."""
        await asyncio.to_thread(self._check_files, wanted)
        running = [one for one in self.all() if one.state == "running"]
        if len(running) >= RESTORES_AT_A_TIME:
            raise Conflict(
                f"restore {running[0].id} is under way; there is {RESTORES_AT_A_TIME} at a time"
            )
        now_ms = self._clock.read().now_ms
        made = Restore(self._new_id(wanted, now_ms), wanted, now_ms)
        self._known[made.id] = made
        while len(self._known) > RESTORES_KEPT_MAX:
            del self._known[next(iter(self._known))]
        self._parts.spawn(self._see_through(made))
        return made

    def _new_id(self, wanted: NewRestore, now_ms: int) -> int:
        """The id that is asked for, or else the next one from ``now_ms`` on that no restore has.
        Raises Conflict."""
        if wanted.id is None:
            return next(number for number in count(now_ms) if number not in self._known)
        if wanted.id in self._known:
            raise Conflict(f"there is a restore {wanted.id} already; id must be one that none has")
        return wanted.id

    def _check_files(self, wanted: NewRestore) -> None:
        into = self._folder / wanted.into
        if into.exists() or into.is_symlink():
            raise Conflict(f"{wanted.into} exists already; a restore goes into a new file")
        if wanted.backup is not None and not (self._folder / wanted.backup).is_file():
            raise NotFound(f"there is no backup {wanted.backup}")

    async def cancel(self, restore: Restore) -> None:
        """Cancel a restore, and return when it has ended. One that has ended stays as it is."""
        if restore.state != "running":
            return
        restore.is_unwanted = True
        process = restore.process
        if process is not None and process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(RESTORE_STOP_S):
                await restore.ended.wait()
        except TimeoutError:
            kill(process)
            await restore.ended.wait()

    # --- one of them -----------------------------------------------------------------------------

    async def _see_through(self, restore: Restore) -> None:
        code: int | None = None
        try:
            code = await self._run(restore)
        except OSError as error:
            restore.error = {"code": "internal", "message": f"no process: {error.strerror}"}
        except Exception as error:
            said = self._parts.border.survive(f"restore {restore.id}", error)
            restore.error = {"code": said.code, "message": said.message}
        finally:
            if restore.process is not None and code != 0:
                await self._clear(restore, restore.process)
            self._end(restore, code)

    async def _clear(self, restore: Restore, process: Process) -> None:
        """Kill the process of a restore that did not end by itself, and remove its files."""
        kill(process)
        await process.wait()
        into = self._folder / restore.wanted.into
        await asyncio.to_thread(remove_leftovers, into, process.pid)

    def _end(self, restore: Restore, code: int | None) -> None:
        if restore.report is not None:
            restore.state = "refused" if restore.report["refused"] else "done"
        elif restore.is_unwanted and restore.error is None:
            restore.state = "cancelled"
        else:
            restore.state = "failed"
            if restore.error is None:
                why = "it was ended" if code is None else f"its process ended with code {code}"
                restore.error = {"code": "internal", "message": why}
        restore.ended_ms = self._clock.read().now_ms
        restore.ended.set()

    async def _run(self, restore: Restore) -> int:
        """Run the process of a restore; returns its exit code. Raises OSError."""
        process = await start_process(COMMAND, answers=True, line_bytes_max=LINE_BYTES_MAX)
        restore.process = process
        assert process.stdin is not None and process.stdout is not None
        if restore.is_unwanted:
            process.stdin.close()
        else:
            process.stdin.write(self._plan(restore.wanted))
            with contextlib.suppress(ConnectionError):
                await process.stdin.drain()
        async for line in process.stdout:
            _note(restore, json.loads(line))
        return await process.wait()

    def _plan(self, wanted: NewRestore) -> bytes:
        history = (self._history_dir,) if wanted.history and self._history_dir is not None else ()
        plan = Plan(
            into=sqlite_url(self._folder / wanted.into),
            backup=None if wanted.backup is None else str(self._folder / wanted.backup),
            history=history,
            include_overdue=wanted.include_overdue,
            allow_missing_bodies=wanted.allow_missing_bodies,
            dry_run=wanted.dry_run,
            shard=self._parts.core.config.shard,
        )
        fields = asdict(plan) | {"ids": wanted.ids, "now_ms": self._clock.read().now_ms}
        return json.dumps(fields).encode() + b"\n"


def _note(restore: Restore, said: dict[str, Any]) -> None:
    if "report" in said:
        restore.report = said["report"] | {"backup": restore.wanted.backup}
    elif "error" in said:
        restore.error = said["error"]
    else:
        restore.step, restore.done, restore.of = said["step"], said["done"], said["of"]


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
        file_name(asked.into, "into")
        if asked.backup is not None:
            file_name(asked.backup, "backup")
        if asked.backup is None and not (asked.history and self._restores.has_history):
            raise BadRequest("a restore needs a backup, or a history (history_dir), or both")
        self._listings.answer(ask, partial(self._begin, asked))

    async def _begin(self, wanted: NewRestore) -> dict[str, Any]:
        return (await self._restores.begin(wanted)).view()

    def list_restores(self, ask: Ask[Nothing]) -> None:
        """Answer the remembered restores, newest first."""
        found = [restore.view() for restore in self._restores.all()]
        self._parts.committer.answer(ask, {"restores": found})

    def show_restore(self, ask: Ask[RestoreId]) -> None:
        """Answer how far a restore is, or how it ended. Raises NotFound."""
        found = self._restores.find(ask.request.id)
        self._parts.committer.answer(ask, found.view())

    def cancel_restore(self, ask: Ask[RestoreId]) -> None:
        """Cancel a restore, and answer when it has ended. Raises NotFound, Overloaded."""
        found = self._restores.find(ask.request.id)
        self._listings.answer(ask, partial(self._cancel, found))

    async def _cancel(self, restore: Restore) -> dict[str, Any]:
        await self._restores.cancel(restore)
        return restore.view()
