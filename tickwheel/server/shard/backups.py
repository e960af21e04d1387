"""Creates backups of the store, and runs restores.

Backups are created on request, or daily at a configured hour. A limited number of daily backups is
kept; the history records the last (``write_last_backup``). A missed backup (the daemon was down,
or the copy failed) is created later. Only files named like daily backups are removed, complete ones
only once a newer backup is complete, unfinished ones once their process has ended.

A restore runs in a separate process, one at a time. The process reads a backup and the history and
fills a new file next to the backups. It does not touch the served store, and the event loop reads
only its progress. Invariants:

* The process ends when this daemon ends or stops serving, because its standard input is a pipe of
  the daemon.
* The new file is complete or does not exist.
* A bounded number of restores is remembered, in memory only.
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
from tickwheel.history.segments import unsealed_numbers, write_last_backup
from tickwheel.persistence import sqlite_url
from tickwheel.persistence.contract import StoreError

if TYPE_CHECKING:
    from tickwheel.server.shard.callers import Call
    from tickwheel.server.shard.parts import Parts, SlowRequests

BACKUP_NAME_BYTES_MAX: Final = 200
"""Maximum bytes of a backup's name. Most file systems allow 255; an unfinished copy needs more."""
RESTORES_AT_A_TIME: Final = 1
RESTORES_KEPT_MAX: Final = 16
"""Number of the newest restores that are remembered."""
LINE_BYTES_MAX: Final = 4 * 1024 * 1024
COMMAND: Final = (sys.executable, "-m", "tickwheel.history.restore")
CHECK_S = 60.0
"""Seconds between two reads of the clock, which an operator can change."""
RETRY_S = 600.0
_STAMP = "%Y%m%dT%H%M%SZ"


class DailyBackups:
    """Creates daily backups while ``run`` is active."""

    def __init__(self, parts: Parts, folder: Path, hour: int) -> None:
        """``hour`` is in the local time of this machine."""
        self._parts = parts
        self._folder = folder
        self._hour = hour
        self._shard = parts.core.config.shard
        self._failed = False
        name = rf"tickwheel-s{self._shard}-(\d{{8}}T\d{{6}}Z)\.db"
        self._name, self._part = re.compile(name), re.compile(rf"{name}\.part-(\d+)\D*")

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._parts.clock.read().now_ms / 1000, UTC)

    async def run(self) -> None:
        """Create a backup each day, forever."""
        await asyncio.to_thread(self._remove_leftovers)
        while True:
            pause_s = CHECK_S
            await self._report_newest()
            if await self.is_due() and not await self.once():
                pause_s = RETRY_S
            await asyncio.sleep(pause_s)

    async def is_due(self) -> bool:
        """Return whether the configured hour has passed since the newest backup, or the last backup
        failed. A backup that the history could not record counts as failed."""
        newest = await self._newest()
        return self._failed or newest is None or newest < self._last_hour()

    async def once(self) -> bool:
        """Create a backup now, and return whether it succeeded. Log errors of disk and store."""
        begun_ms = self._parts.clock.read().now_ms
        at = datetime.fromtimestamp(begun_ms // 1000, UTC)
        path = self._folder / f"tickwheel-s{self._shard}-{at.strftime(_STAMP)}.db"
        history_dir, numbers = self._parts.settings.history_dir, None
        try:
            if history_dir is not None:
                numbers = await asyncio.to_thread(unsealed_numbers, history_dir, self._shard)
            size_bytes = await _copy(self._parts, path)
            # Rotate first: until the mark can be written, each attempt makes another backup.
            await asyncio.to_thread(self._rotate, at)
            if history_dir is not None:
                await asyncio.to_thread(
                    write_last_backup, history_dir, self._shard, begun_ms, str(path), numbers
                )
        except (StoreError, Conflict, OSError) as error:
            self._failed = True
            self._parts.on_event("backup_failed", f"daily backup to {path}: {error}")
            return False
        self._failed = False
        self._parts.on_event("backup_made", f"{path}, {size_bytes} bytes")
        await self._report_newest()
        return True

    async def _report_newest(self) -> None:
        newest = await self._newest()
        if newest is not None:
            self._parts.observed.note_backup(newest.timestamp())

    async def _newest(self) -> datetime | None:
        """Return the time of the newest backup. Backups with a time after now do not count: they
        were made before the clock was set back."""
        now = self._now()
        backups = await asyncio.to_thread(self._existing)
        return max((at for at, _ in backups if at <= now), default=None)

    def _rotate(self, made: datetime) -> None:
        """Remove all but the newest backups. ``made`` is the time of the newest; backups with a
        later time were made before the clock was set back."""
        backups = sorted(self._existing(), key=lambda backup: (backup[0] <= made, backup))
        for _, path in backups[: -self._parts.settings.backup_keep]:
            with contextlib.suppress(OSError):
                path.unlink()

    def _remove_leftovers(self) -> None:
        """Remove the unfinished backups of processes that were killed."""
        with contextlib.suppress(OSError):
            for path in list(self._folder.iterdir()):
                part = self._part.fullmatch(path.name)
                if part is not None and not _is_running(int(part[2])):
                    path.unlink()

    def _existing(self) -> list[tuple[datetime, Path]]:
        """Return (time, path) of the backups in the folder, in any order."""
        backups = []
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                name = self._name.fullmatch(path.name)
                if name is not None:
                    with contextlib.suppress(ValueError):
                        at = datetime.strptime(name[1], _STAMP).replace(tzinfo=UTC)
                        backups.append((at, path))
        return backups

    def _last_hour(self) -> datetime:
        """Return the last time at which the configured hour began, in local time."""
        now = self._now().astimezone()
        at = now.replace(hour=self._hour, minute=0, second=0, microsecond=0)
        return at if at <= now else at - timedelta(days=1)


def _is_running(pid: int) -> bool:
    """Return whether another process has this number."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        pass  # it belongs to another user
    except (ProcessLookupError, OverflowError):
        return False
    return pid != os.getpid()


class BackingUp:
    """The operation that creates a backup on request."""

    def __init__(self, parts: Parts, backups: SlowRequests, folder: Path) -> None:
        """``backups`` is the queue of requests."""
        self._parts = parts
        self._backups = backups
        self._folder = folder

    def backup(self, call: Call[BackupName]) -> None:
        """Copy the store to a new file for backups. Raise BadRequest, LimitExceeded, Overloaded."""
        path = self._folder / file_name(call.request.name, "name")
        self._backups.answer(call, lambda: self._backup(path))

    async def _backup(self, path: Path) -> dict[str, Any]:
        """Write the backup. Convert errors of the file system to errors for the client."""
        try:
            size = await _copy(self._parts, path)
        except OSError as error:
            kind = Overloaded if error.errno in (errno.EMFILE, errno.ENFILE) else Conflict
            raise kind(f"cannot write {path}: {error.strerror}") from error
        return {"path": str(path), "bytes": size}


def _check_target(path: Path) -> None:
    """Raise Conflict if the file exists or the folder for backups does not. The folder is never
    created, because backups would go to another disk if its volume is not mounted."""
    if not path.parent.is_dir():
        raise Conflict(f"backup_dir {path.parent} is not a folder; is its volume mounted?")
    if os.path.lexists(path):
        raise Conflict(f"{path} exists; choose another name")


async def _copy(parts: Parts, path: Path) -> int:
    """Copy the store with everything accepted so far. Return the size of the copy in bytes. Raise
    Conflict, OSError."""
    await asyncio.to_thread(_check_target, path)
    # A restore tells by the position which events the copy contains.
    await parts.committer.barrier(is_timed=True)
    return await parts.store.backup(str(path))


def file_name(name: str, field: str) -> str:
    """Return ``name`` if it is a valid file name for a backup. Raise BadRequest, LimitExceeded."""
    if not name or name in (".", "..") or Path(name).name != name or "\0" in name:
        raise BadRequest(f"{field} must be a file name without a folder, not {shown(name)}")
    size_bytes = len(os.fsencode(name))
    if size_bytes > BACKUP_NAME_BYTES_MAX:
        raise LimitExceeded(f"{field} has {size_bytes} bytes; the limit is {BACKUP_NAME_BYTES_MAX}")
    return name


# --- restores ------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Restore:
    """The current state of a restore."""

    id: int
    wanted: NewRestore
    began_ms: int
    state: str = "running"
    """``running``, then ``done``, ``refused`` (nothing written), ``failed`` or ``cancelled``."""
    ended_ms: int | None = None
    step: str = "backup"
    done: int = 0
    total: int | None = None
    report: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    process: Process | None = None
    is_cancelled: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def view(self) -> dict[str, Any]:
        """Return the restore as the map that all answers use."""
        return {
            "id": self.id,
            "state": self.state,
            "into": self.wanted.into,
            "backup": self.wanted.backup,
            "dry_run": self.wanted.dry_run,
            "of_shards": self.wanted.of_shards,
            "began_ms": self.began_ms,
            "ended_ms": self.ended_ms,
            "progress": {"step": self.step, "done": self.done, "total": self.total},
            "report": self.report,
            "error": self.error,
        }


class Restores:
    """The restores since this daemon began to serve."""

    def __init__(self, parts: Parts, folder: Path) -> None:
        """``folder`` is the folder for backups."""
        self._parts = parts
        self._folder = folder
        self._history_dir = parts.settings.history_dir
        self._clock = parts.clock
        self._known: dict[int, Restore] = {}

    @property
    def has_history(self) -> bool:
        return self._history_dir is not None

    def all(self) -> list[Restore]:
        """Return all remembered restores, newest first."""
        return list(reversed(self._known.values()))

    def find(self, restore_id: int) -> Restore:
        """Return the restore with this id. Raise NotFound."""
        restore = self._known.get(restore_id)
        if restore is None:
            raise NotFound(
                f"there is no restore {restore_id}, or it ended so long ago that its record was"
                " removed"
            )
        return restore

    async def begin(self, wanted: NewRestore) -> Restore:
        """Begin a restore. Raise Conflict if another restore is running, or if the file or id
        exists; NotFound if there is no such backup."""
        await asyncio.to_thread(self._check_files, wanted)
        running = [restore for restore in self.all() if restore.state == "running"]
        if len(running) >= RESTORES_AT_A_TIME:
            raise Conflict(
                f"restore {running[0].id} is running; the limit is {RESTORES_AT_A_TIME} at a time"
            )
        now_ms = self._clock.read().now_ms
        restore = Restore(self._new_id(wanted, now_ms), wanted, now_ms)
        self._known[restore.id] = restore
        while len(self._known) > RESTORES_KEPT_MAX:
            del self._known[next(iter(self._known))]
        self._parts.spawn(self._supervise(restore))
        return restore

    def _new_id(self, wanted: NewRestore, now_ms: int) -> int:
        """Return the requested id, or the first unused one from ``now_ms`` on. Raise Conflict."""
        if wanted.id is None:
            return next(number for number in count(now_ms) if number not in self._known)
        if wanted.id in self._known:
            raise Conflict(f"restore {wanted.id} already exists; choose another id")
        return wanted.id

    def _check_files(self, wanted: NewRestore) -> None:
        into = self._folder / wanted.into
        if into.exists() or into.is_symlink():
            raise Conflict(f"{wanted.into} already exists; restore into a new file")
        if wanted.backup is not None and not (self._folder / wanted.backup).is_file():
            raise NotFound(f"there is no backup {wanted.backup}")

    async def cancel(self, restore: Restore) -> None:
        """Cancel a restore and wait for its end. Do nothing if it has ended."""
        if restore.state != "running":
            return
        restore.is_cancelled = True
        process = restore.process
        if process is not None and process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(RESTORE_STOP_S):
                await restore.ended.wait()
        except TimeoutError:
            kill(process)
            await restore.ended.wait()

    # --- the process -----------------------------------------------------------------------------

    async def _supervise(self, restore: Restore) -> None:
        code: int | None = None
        try:
            code = await self._run(restore)
        except OSError as error:
            message = f"its process cannot be started: {error.strerror}"
            restore.error = {"code": "internal", "message": message}
        except Exception as error:
            answer = self._parts.border.survive(f"restore {restore.id}", error)
            restore.error = {"code": answer.code, "message": answer.message}
        finally:
            if restore.process is not None and code != 0:
                await self._clear(restore, restore.process)
            self._end(restore, code)

    async def _clear(self, restore: Restore, process: Process) -> None:
        """Kill the process of a failed restore and remove its files."""
        kill(process)
        await process.wait()
        into = self._folder / restore.wanted.into
        await asyncio.to_thread(remove_leftovers, into, process.pid)

    def _end(self, restore: Restore, code: int | None) -> None:
        if restore.report is not None:
            restore.state = "refused" if restore.report["refused"] else "done"
        elif restore.is_cancelled and restore.error is None:
            restore.state = "cancelled"
        else:
            restore.state = "failed"
            if restore.error is None:
                why = (
                    "it was interrupted" if code is None else f"its process ended with code {code}"
                )
                restore.error = {"code": "internal", "message": why}
        restore.ended_ms = self._clock.read().now_ms
        restore.ended.set()

    async def _run(self, restore: Restore) -> int:
        """Run the process of a restore and return its exit code. Raise OSError."""
        process = await start_process(COMMAND, answers=True, line_bytes_max=LINE_BYTES_MAX)
        restore.process = process
        assert process.stdin is not None and process.stdout is not None
        if restore.is_cancelled:
            process.stdin.close()
        else:
            process.stdin.write(self._plan(restore.wanted))
            with contextlib.suppress(ConnectionError):
                await process.stdin.drain()
        async for line in process.stdout:
            _update(restore, json.loads(line))
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


def _update(restore: Restore, message: dict[str, Any]) -> None:
    if "report" in message:
        restore.report = message["report"] | {"backup": restore.wanted.backup}
    elif "error" in message:
        restore.error = message["error"]
    else:
        restore.step, restore.done, restore.total = message["step"], message["done"], message["of"]


class Restoring:
    """The operations on restores."""

    def __init__(self, parts: Parts, restores: Restores, listings: SlowRequests) -> None:
        self._parts = parts
        self._restores = restores
        self._listings = listings

    def restore(self, call: Call[NewRestore]) -> None:
        """Begin a restore, and answer when it is running. Raise BadRequest, LimitExceeded,
        Overloaded; answer with Conflict, NotFound."""
        request = call.request
        if request.ids is not None and not request.ids:
            raise BadRequest("ids has 0 elements; leave it out to restore all")
        file_name(request.into, "into")
        if request.backup is not None:
            file_name(request.backup, "backup")
        if request.backup is None and not (request.history and self._restores.has_history):
            raise BadRequest("a restore needs a backup or a history (history_dir)")
        self._listings.answer(call, partial(self._begin, request))

    async def _begin(self, wanted: NewRestore) -> dict[str, Any]:
        return (await self._restores.begin(wanted)).view()

    def list_restores(self, call: Call[Nothing]) -> None:
        """Answer with the remembered restores, newest first."""
        views = [restore.view() for restore in self._restores.all()]
        self._parts.committer.answer(call, {"restores": views})

    def show_restore(self, call: Call[RestoreId]) -> None:
        """Answer with the progress or result of a restore. Raise NotFound."""
        restore = self._restores.find(call.request.id)
        self._parts.committer.answer(call, restore.view())

    def cancel_restore(self, call: Call[RestoreId]) -> None:
        """Cancel a restore and answer when it has ended. Raise NotFound, Overloaded."""
        restore = self._restores.find(call.request.id)
        self._listings.answer(call, partial(self._cancel, restore))

    async def _cancel(self, restore: Restore) -> dict[str, Any]:
        await self._restores.cancel(restore)
        return restore.view()
