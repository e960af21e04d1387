"""What a history knows of the store that it is of: its epochs, and how far it has come.

``starts`` in a state folder has a line of JSON for every epoch of its daemons: number, mark, the
mark of the epoch that it followed, and whether it lacks the end of that one. ``reached`` has the
epoch and the number of the last batch that was durable. The store is always ahead of both, because
a batch is noted when its commit has returned. So a start compares them with the store
(``persistence/identity.py``), and a restore follows the branch of its backup (``Branch``).

Nothing is synced: what is written survives the end of the daemon. After a power cut ``reached`` may
be older, which is no harm, or torn, which its checksum shows. A folder from before there were marks
says the numbers of its epochs, by the names of its files.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tickwheel.history import segments, spool
from tickwheel.history.segments import PART, Event, replace_file, state_folders
from tickwheel.persistence.contract import Known, Opened

STARTS, REACHED = "starts", "reached"
STARTS_MAX = 1_024
"""Starts that a state folder keeps, the newest ones."""
MARK_BYTES = 32
_REACHED = struct.Struct(f"<QQ{MARK_BYTES}sI")
"""Epoch, batch, mark, and a checksum of these."""


class Start(NamedTuple):
    """The begin of an epoch."""

    epoch: int
    mark: str
    after: str = ""
    """The mark of the epoch that it followed; empty: none, or one that is unknown."""
    behind_ms: int | None = None
    """The store lacked what that epoch had done after this time, about; None: it lacked nothing."""
    is_branch: bool = False
    incarnation: str = ""


def start_of(opened: Opened) -> Start:
    """The begin of the epoch that a store was opened with."""
    behind_ms = opened.position_ms if opened.is_behind else None
    return Start(
        opened.epoch, opened.mark, opened.after, behind_ms, opened.is_branch, opened.incarnation
    )


# --- the daemon's end ----------------------------------------------------------------------------


class Reached:
    """Notes how far the store has come. Raises nothing: a disk may be full."""

    def __init__(self, folder: Path, start: Start, batch: int) -> None:
        """Also keep ``start``, once."""
        self._epoch, self._mark = start.epoch, start.mark.encode()[:MARK_BYTES]
        self._batch, self._fd = -1, -1
        with contextlib.suppress(OSError):
            _keep_start(folder, start)
        with contextlib.suppress(OSError):
            part = folder / f"{PART}{REACHED}"
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._fd = os.open(part, flags, 0o640)
            self.note(batch)
            # Another file each time: a daemon that was only frozen writes into the former one.
            part.rename(folder / REACHED)

    def note(self, batch: int) -> None:
        """Note that the batch is durable."""
        if self._fd < 0 or batch <= self._batch:
            return
        self._batch = batch
        data = _REACHED.pack(self._epoch, batch, self._mark, 0)
        data = data[:-4] + zlib.crc32(data[:-4]).to_bytes(4, "little")
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, data, 0)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _keep_start(folder: Path, start: Start) -> None:
    starts = [one for one in _starts(folder) if one.epoch != start.epoch]
    if len(starts) >= STARTS_MAX or len(starts) < len(list(_starts(folder))):
        text = "".join(map(_line, [*starts[-STARTS_MAX + 1 :], start]))
        replace_file(folder / STARTS, text)
        return
    with (folder / STARTS).open("a", encoding="ascii") as file:
        file.write(_line(start))


def _line(start: Start) -> str:
    return json.dumps(start._asdict()) + "\n"


def _starts(folder: Path) -> Iterator[Start]:
    with contextlib.suppress(OSError):
        for line in (folder / STARTS).read_text("ascii", "replace").splitlines():
            with contextlib.suppress(ValueError, TypeError):
                found: Any = Start(**json.loads(line))
                if type(found.epoch) is int and type(found.mark) is str:
                    yield found


# --- at a start ----------------------------------------------------------------------------------


def known(history_dir: Path, shard: int) -> list[Known]:
    """What the history knows of the store of a shard."""
    found = []
    for folder in state_folders(history_dir, shard):
        with contextlib.suppress(OSError):
            path = folder / REACHED
            data, until = path.read_bytes(), datetime.fromtimestamp(path.stat().st_mtime, UTC)
            if len(data) == _REACHED.size and zlib.crc32(data[:-4]) == _REACHED.unpack(data)[3]:
                epoch, batch, mark, _ = _REACHED.unpack(data)
                where = f"its history {folder}"
                found.append(
                    Known(where, epoch, mark.rstrip(b"\0").decode(), batch, f"{until:%F %T} UTC")
                )
    if found:
        return found
    newest = max((epoch for epoch, _ in epochs(history_dir, shard)), default=0)
    return [Known(f"its history {history_dir}", newest)] if newest else []


def epochs(history_dir: Path, shard: int) -> Iterator[tuple[int, int | None]]:
    """The epochs of which there is a file, each maybe several times, with its hour; None: it is a
    file of a spool, which has none."""
    for segment in segments.find(history_dir, shard=shard):
        yield segment.name.epoch, segment.hour_ms
    for folder in state_folders(history_dir, shard):
        for name in spool.files(folder):
            yield name.epoch, None


# --- at a restore --------------------------------------------------------------------------------


class Branch:
    """The epochs that led to one: those of the branch of a store that a restore follows.

    It ends with the newest epoch that goes back to the backup's; without a backup, with the newest
    one. What is of other branches is left out, and so is the end of an epoch that the next one
    lacked, as far as times tell. Epochs whose start is unknown count.
    """

    def __init__(self, folders: Sequence[Path], shard: int, epoch: int, mark: str) -> None:
        """``epoch`` and ``mark`` are the backup's; empty: there is none, or it is unknown."""
        self._every = {
            start.mark: start
            for history_dir in folders
            for folder in state_folders(history_dir, shard)
            for start in _starts(folder)
        }
        self.notes: list[str] = []
        """Why what comes of it is not certain, in words."""
        self.head = mark
        """The mark of its newest epoch; empty: unknown."""
        self._marks: dict[int, set[str]] = {}
        """Epoch → the marks of its starts."""
        self._untils: dict[int, int] = {}
        """Epoch → the time of its last event that counts."""
        for start in self._every.values():
            self._marks.setdefault(start.epoch, set()).add(start.mark)
        newest = sorted(self._every.values(), reverse=True)
        ways = (list(self._way(start)) for start in newest)
        way = next((one for one in ways if not mark or mark in _marks(one)), [])
        way = way or list(self._way(self._every[mark]) if mark in self._every else ())
        self._on = {start.epoch: start for start in way}
        if way:
            self.head = way[0].mark
        self._judge(way, epoch, has_backup=bool(mark))
        if mark and self._every and mark not in self._every:
            self.notes.append(f"it has nothing of epoch {epoch}, in which the backup was made")
        if newest and newest[0].epoch not in self._on:
            self.notes.append(
                f"it goes on to epoch {newest[0].epoch} in another branch of the store, to which"
                f" the backup does not belong; this one ends with epoch {max([epoch, *self._on])}"
            )

    def _way(self, start: Start | None) -> Iterator[Start]:
        """The start and all before it, the newest first."""
        seen: set[str] = set()
        while start is not None and start.mark not in seen:
            seen.add(start.mark)
            yield start
            start = self._every.get(start.after)

    def _judge(self, way: Sequence[Start], backup_epoch: int, *, has_backup: bool) -> None:
        for start, before in zip(way, [*way[1:], None], strict=False):
            if start.behind_ms is not None and before is not None:
                self._untils[before.epoch] = start.behind_ms
            if start.epoch <= backup_epoch:
                continue
            if start.behind_ms is not None:
                self.notes.append(
                    f"epoch {start.epoch} went on with an older copy of the store: what the epoch"
                    " before did last cannot be told exactly from what the copy lacked"
                )
            if start.is_branch and start.after and before is None and not has_backup:
                self.notes.append(
                    f"epoch {start.epoch} began with a store that was restored or copied, whose"
                    " content is not in the history"
                )
            if len(self._marks[start.epoch]) > 1:
                self.notes.append(f"epoch {start.epoch} was begun in two branches of the store")

    def has(self, event: Event) -> bool:
        """Whether the event is of this branch, as far as is known."""
        epoch = event.get("epoch")
        if epoch not in self._marks:
            return True
        return epoch in self._on and event["time_ms"] <= self._untils.get(epoch, event["time_ms"])

    def missing(self, epochs: Collection[int]) -> int:
        """How many epochs may have been between these, of which there is nothing."""
        missing = 0
        for former, epoch in pairwise(sorted(epochs)):
            start, before = self._on.get(epoch), self._on.get(former)
            follows = start is not None and before is not None and start.after == before.mark
            missing += 0 if follows else epoch - former - 1
        return missing


def _marks(way: Sequence[Start]) -> set[str]:
    """The marks of these epochs, and of the one that they go back to."""
    return {mark for start in way for mark in (start.mark, start.after)}
