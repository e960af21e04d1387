"""Restores that clients have asked for: each in a process of its own, one at a time.

A restore reads a backup and the history and fills a new file beside the backups; the store that is
served is not touched, and the event loop only reads how far it is. Invariants:

* The process ends with this daemon, however that ends, and with its tenure: its standard input is
  a pipe from here.
* The file is there as a whole, or nothing of it is.
* What is remembered of restores is bounded, and is gone with the process: they are no tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tickwheel.errors import Conflict, NotFound
from tickwheel.history.daemon import kill
from tickwheel.history.restore import Plan
from tickwheel.history.stores import remove_leftovers
from tickwheel.persistence.urls import sqlite_url

if TYPE_CHECKING:
    from tickwheel.server.shard.parts import Parts

AT_A_TIME: Final = 1
RESTORES_KEPT_MAX: Final = 16
"""How many of the newest restores are remembered."""
STOP_S: Final = 10.0
"""A restore that shall stop is killed after this many seconds."""
LINE_BYTES_MAX: Final = 4 * 1024 * 1024
COMMAND: Final = (sys.executable, "-m", "tickwheel.history.restore")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a restore was asked to do; names are those of files in the folder for backups."""

    into: str
    backup: str | None
    history: bool
    ids: tuple[int, ...] | None
    include_overdue: bool
    allow_missing_bodies: bool
    dry_run: bool


@dataclass(slots=True, eq=False)
class Restore:
    """One restore, as it is now."""

    id: int
    wanted: Wanted
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

    async def begin(self, wanted: Wanted) -> Restore:
        """Begin a restore. Raises Conflict (one runs, the file is there), NotFound (no backup)."""
        await asyncio.to_thread(self._check_files, wanted)
        running = [one for one in self.all() if one.state == "running"]
        if len(running) >= AT_A_TIME:
            raise Conflict(f"restore {running[0].id} is under way; there is {AT_A_TIME} at a time")
        now_ms = self._clock.read().now_ms
        made = Restore(max([now_ms, *(number + 1 for number in self._known)]), wanted, now_ms)
        self._known[made.id] = made
        while len(self._known) > RESTORES_KEPT_MAX:
            del self._known[next(iter(self._known))]
        self._parts.spawn(self._see_through(made))
        return made

    def _check_files(self, wanted: Wanted) -> None:
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
            async with asyncio.timeout(STOP_S):
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
        process = await asyncio.create_subprocess_exec(
            *COMMAND, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=LINE_BYTES_MAX
        )
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

    def _plan(self, wanted: Wanted) -> bytes:
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
