"""The epochs of a store in its history, and the last batch that the history contains.

In a state folder, ``starts`` has a line of JSON for every epoch of its daemons: its number, its
mark, the mark of the preceding epoch, and whether it lacks the end of that epoch. ``reached`` has
the epoch and the number of the last durable batch. A batch is recorded after its commit, so the
store is never behind ``reached``. A starting daemon compares both files with the store
(``persistence/identity.py``), and a restore follows the branch of its backup (``Branch``).

Nothing is synced, so the files survive the end of the daemon, but after a power cut ``reached`` can
be older, which is harmless, or torn, which its checksum detects. In a folder from before marks
existed, only file names show the epochs.
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
from tickwheel.history.segments import PARTIAL_PREFIX, Event, replace_file, state_folders
from tickwheel.persistence.contract import Evidence, Opened

STARTS, REACHED = "starts", "reached"
STARTS_MAX = 1_024
"""Maximum number of starts that a state folder keeps."""
MARK_BYTES = 32
_REACHED = struct.Struct(f"<QQ{MARK_BYTES}sI")
"""Epoch, batch, mark, and a checksum of all three."""


class Start(NamedTuple):
    """The start of an epoch."""

    epoch: int
    mark: str
    after: str = ""
    """The mark of the preceding epoch; empty: there is none, or it is unknown."""
    behind_ms: int | None = None
    """Approximate time after which the store lacked the preceding epoch's changes, or None."""
    is_branch: bool = False
    incarnation: str = ""


def start_of(opened: Opened) -> Start:
    """Return the start of an opened store's epoch."""
    behind_ms = opened.position_ms if opened.is_behind else None
    return Start(
        opened.epoch, opened.mark, opened.after, behind_ms, opened.is_branch, opened.incarnation
    )


# --- in the daemon -------------------------------------------------------------------------------


class Reached:
    """Records the last durable batch. Errors, such as a full disk, are ignored."""

    def __init__(self, folder: Path, start: Start, batch: int) -> None:
        """Record ``start`` in the folder."""
        self._epoch, self._mark = start.epoch, start.mark.encode()[:MARK_BYTES]
        self._batch, self._fd = -1, -1
        with contextlib.suppress(OSError):
            _keep_start(folder, start)
        with contextlib.suppress(OSError):
            part = folder / f"{PARTIAL_PREFIX}{REACHED}"
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            self._fd = os.open(part, flags, 0o640)
            self.note(batch)
            # Create a new file each time, because an old daemon that was only paused still writes
            # into the old file.
            part.rename(folder / REACHED)

    def note(self, batch: int) -> None:
        """Record a durable batch."""
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
    starts = [other for other in _starts(folder) if other.epoch != start.epoch]
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
                start: Any = Start(**json.loads(line))
                if type(start.epoch) is int and type(start.mark) is str:
                    yield start


# --- at a start ----------------------------------------------------------------------------------


def find_evidence(history_dir: Path, shard: int) -> list[Evidence]:
    """Return the facts about a shard's store in the history."""
    facts = []
    for folder in state_folders(history_dir, shard):
        with contextlib.suppress(OSError):
            path = folder / REACHED
            data, until = path.read_bytes(), datetime.fromtimestamp(path.stat().st_mtime, UTC)
            if len(data) == _REACHED.size and zlib.crc32(data[:-4]) == _REACHED.unpack(data)[3]:
                epoch, batch, mark, _ = _REACHED.unpack(data)
                where = f"its history {folder}"
                facts.append(
                    Evidence(where, epoch, mark.rstrip(b"\0").decode(), batch, f"{until:%F %T} UTC")
                )
    if facts:
        return facts
    newest = max((epoch for epoch, _ in epochs(history_dir, shard)), default=0)
    return [Evidence(f"its history {history_dir}", newest)] if newest else []


def epochs(history_dir: Path, shard: int) -> Iterator[tuple[int, int | None]]:
    """Yield (epoch, hour) for every file; the hour is None for a spool file. Epochs can repeat."""
    for segment in segments.find(history_dir, shard=shard):
        yield segment.name.epoch, segment.hour_ms
    for folder in state_folders(history_dir, shard):
        for name in spool.files(folder):
            yield name.epoch, None


# --- at a restore --------------------------------------------------------------------------------


class Branch:
    """The sequence of epochs that a restore follows: one branch of a store. The branch ends with
    the newest epoch that descends from the backup's epoch; without a backup, with the newest epoch.
    Events of other branches are excluded. So are events at the end of an epoch that the next epoch
    lacked, judged by their times. Epochs with unknown starts are included."""

    def __init__(self, folders: Sequence[Path], shard: int, epoch: int, mark: str) -> None:
        """``epoch`` and ``mark`` are those of the backup; 0 and empty: none, or unknown."""
        self._by_mark = {
            start.mark: start
            for history_dir in folders
            for folder in state_folders(history_dir, shard)
            for start in _starts(folder)
        }
        self.notes: list[str] = []
        """Why the result is uncertain, in sentences."""
        self.head = mark
        """The mark of the branch's newest epoch; empty: unknown."""
        self._marks: dict[int, set[str]] = {}
        """Epoch → the marks of its starts."""
        self._untils: dict[int, int] = {}
        """Epoch → the time of its last included event."""
        for start in self._by_mark.values():
            self._marks.setdefault(start.epoch, set()).add(start.mark)
        newest = sorted(self._by_mark.values(), reverse=True)
        paths = (list(self._ancestry(start)) for start in newest)
        branch = next((path for path in paths if not mark or mark in _marks(path)), [])
        branch = branch or list(self._ancestry(self._by_mark.get(mark)))
        self._by_epoch = {start.epoch: start for start in branch}
        if branch:
            self.head = branch[0].mark
        self._judge(branch, epoch, has_backup=bool(mark))
        if mark and self._by_mark and mark not in self._by_mark:
            self.notes.append(f"it has no events of epoch {epoch}, in which the backup was made")
        if newest and newest[0].epoch not in self._by_epoch:
            self.notes.append(
                f"it continues to epoch {newest[0].epoch} in another branch of the store, to which"
                " the backup does not belong; the backup's branch ends with epoch"
                f" {max([epoch, *self._by_epoch])}"
            )

    def _ancestry(self, start: Start | None) -> Iterator[Start]:
        """Yield the start and its predecessors, newest first."""
        visited: set[str] = set()
        while start is not None and start.mark not in visited:
            visited.add(start.mark)
            yield start
            start = self._by_mark.get(start.after)

    def _judge(self, branch: Sequence[Start], backup_epoch: int, *, has_backup: bool) -> None:
        for start, before in zip(branch, [*branch[1:], None], strict=False):
            if start.behind_ms is not None and before is not None:
                self._untils[before.epoch] = start.behind_ms
            if start.epoch <= backup_epoch:
                continue
            if start.behind_ms is not None:
                self.notes.append(
                    f"epoch {start.epoch} continued with an older copy of the store: the last"
                    " changes of the preceding epoch that the copy has cannot be determined exactly"
                )
            if start.is_branch and start.after and before is None and not has_backup:
                self.notes.append(
                    f"epoch {start.epoch} began with a store that was restored or copied, whose"
                    " content is not in the history"
                )
            if len(self._marks[start.epoch]) > 1:
                self.notes.append(f"epoch {start.epoch} was begun in two branches of the store")

    def includes(self, event: Event) -> bool:
        """Return whether the event belongs to this branch, as far as is known."""
        epoch = event.get("epoch")
        if epoch not in self._marks:
            return True
        time_ms = event["time_ms"]
        return epoch in self._by_epoch and time_ms <= self._untils.get(epoch, time_ms)

    def includes_whole(self, epoch: int) -> bool:
        """Return whether all events of an epoch belong to this branch, as far as is known."""
        if epoch not in self._marks:
            return True
        return epoch in self._by_epoch and epoch not in self._untils

    def missing(self, epochs: Collection[int]) -> int:
        """Return the number of epochs between the given ones that may exist and have no events."""
        missing = 0
        for former, epoch in pairwise(sorted(epochs)):
            start, before = self._by_epoch.get(epoch), self._by_epoch.get(former)
            follows = start is not None and before is not None and start.after == before.mark
            missing += 0 if follows else epoch - former - 1
        return missing


def _marks(path: Sequence[Start]) -> set[str]:
    """Return the marks of these epochs, and of the epoch before the first."""
    return {mark for start in path for mark in (start.mark, start.after)}
