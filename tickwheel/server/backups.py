"""Daily backups: a copy of the store at a set hour, so many kept, and a mark for the history.

A backup that was missed (the daemon did not run, or it failed) is made up for. Only files named
here are ever removed, and only after a newer one is whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tickwheel.history.writer.retention import write_last_backup
from tickwheel.persistence.store import StoreError

LOOK_S = 60.0
"""How often to look at the clock, which may be set meanwhile."""
RETRY_S = 600.0
_STAMP = "%Y%m%dT%H%M%SZ"


class DailyBackups:
    """``run`` it as a task for as long as this daemon leads the shard."""

    def __init__(
        self,
        backup: Callable[[str], Awaitable[int]],
        folder: Path,
        *,
        hour: int,
        keep: int,
        shard: int,
        history_dir: str | None,
        now_ms: Callable[[], int],
        noticed: Callable[[str, str], None],
        made: Callable[[float], None] = lambda begun_s: None,
    ) -> None:
        """``backup`` is the store's; ``hour`` is by this machine's local time. ``made`` is told
        when the newest one was begun (Unix time), whenever that is known anew."""
        self._backup = backup
        self._folder = folder
        self._hour = hour
        self._keep = keep
        self._shard = shard
        self._history_dir = history_dir
        self._now_ms = now_ms
        self._noticed = noticed
        self._tell_made = made
        self._failed = False
        self._name = re.compile(rf"tickwheel-s{shard}-(\d{{8}}T\d{{6}}Z)\.db")

    async def run(self) -> None:
        """For ever."""
        self._tell_newest()
        while True:
            pause_s = LOOK_S
            if self.is_due() and not await self.once():
                pause_s = RETRY_S
            await asyncio.sleep(pause_s)

    def is_due(self) -> bool:
        """Whether the hour has come since the newest backup was made, or the last one failed:
        one that is there without its mark did, too."""
        made = self._made()
        return self._failed or not made or made[-1][0] < self._last_hour()

    async def once(self) -> bool:
        """One backup now; whether it was made. Never raises for what a disk or a store does."""
        begun_ms = self._now_ms()
        at = datetime.fromtimestamp(begun_ms // 1000, UTC)
        path = self._folder / f"tickwheel-s{self._shard}-{at.strftime(_STAMP)}.db"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            size_bytes = await self._backup(str(path))
            if self._history_dir is not None:
                write_last_backup(self._history_dir, self._shard, begun_ms, str(path))
        except (StoreError, OSError) as error:
            self._failed = True
            self._noticed("backup_failed", f"daily backup to {path}: {error}")
            return False
        self._failed = False
        self._noticed("backup_made", f"{path}, {size_bytes} bytes")
        self._tell_newest()
        self._rotate()
        return True

    def _tell_newest(self) -> None:
        made = self._made()
        if made:
            self._tell_made(made[-1][0].timestamp())

    def _rotate(self) -> None:
        for _, path in self._made()[: -self._keep]:
            with contextlib.suppress(OSError):
                path.unlink()

    def _made(self) -> list[tuple[datetime, Path]]:
        """The backups that are there, oldest first."""
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
        """When it was the set hour last, by local time."""
        now = datetime.fromtimestamp(self._now_ms() / 1000, UTC).astimezone()
        at = now.replace(hour=self._hour, minute=0, second=0, microsecond=0)
        return at if at <= now else at - timedelta(days=1)
