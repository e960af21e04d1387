"""The recorder between a daemon and its files: built, read back, and undone to a power cut.

``shim.c`` is preloaded into a real daemon. It appends one record for every write, sync, cut and
removal under the store's folder, and for what goes over sockets, in an order that the kernel
saw too. Without a C compiler there is no such test: that is an error, not a skip.
"""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from support.daemon import Daemon
from tickwheel.errors import ProtocolError
from tickwheel.protocol import Decoder, Frame

SOURCE = Path(__file__).with_name("shim.c")
SECTOR_BYTES = 512
"""What a disk writes whole."""
_HEADER = struct.Struct("<cIQI")


class Event(NamedTuple):
    """One record; ``kind`` is W written, S sync begins, F sync ended, T cut to ``offset``,
    U removed, R about to be sent, G received."""

    kind: str
    path: str
    offset: int
    data: bytes


def build(folder: Path) -> Path:
    """The shared object, compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler is needed (on Debian: apt install gcc libc6-dev)"
    made = folder / "shim.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(made), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return made


class Shimmed(Daemon):
    """A daemon with the shim in it. ``fail(what)`` and ``mend()`` while it runs."""

    def __init__(self, folder: Path, **options: Any) -> None:
        folder.mkdir(parents=True)
        self.data = folder / "data"
        self.data.mkdir()
        self._events = folder / "events"
        self._switch = folder / "switch"
        query = options.pop("query", "reserve_bytes=0")
        env = {
            "LD_PRELOAD": str(build(folder)),
            "SHIM_LOG": str(self._events),
            "SHIM_UNDER": str(self.data),
            "SHIM_SWITCH": str(self._switch),
        }
        store = f"sqlite:///{self.data / 'store.db'}?{query}"
        super().__init__(folder, store=store, env=env, **options)

    def fail(self, what: str) -> None:
        self._switch.write_text(what)

    def mend(self) -> None:
        self._switch.unlink()

    def events(self) -> list[Event]:
        return list(_read(self._events.read_bytes()))


def _read(log: bytes) -> Iterator[Event]:
    at = 0
    while at + _HEADER.size <= len(log):
        kind, path_bytes, offset, data_bytes = _HEADER.unpack_from(log, at)
        at += _HEADER.size
        path = log[at : at + path_bytes].decode()
        at += path_bytes
        yield Event(kind.decode(), path, offset, log[at : at + data_bytes])
        at += data_bytes


class Said(NamedTuple):
    """A frame on a socket and where it stands among the events."""

    at: int
    socket: str
    frame: Frame


def frames(events: Sequence[Event], kind: str) -> list[Said]:
    """Frames sent (R, placed at the first byte's event) or received (G, at the last byte's)."""
    decoders: dict[str, Decoder] = {}
    begun: dict[str, int] = {}
    results: list[Said] = []
    foreign: set[str] = set()
    for index, event in enumerate(events):
        path = event.path
        if event.kind != kind or not path.startswith("socket:") or path in foreign:
            continue
        decoder = decoders.setdefault(path, Decoder(1 << 26))
        first = begun.pop(path, index)
        try:
            whole = decoder.feed(event.data)
        except ProtocolError:
            foreign.add(path)  # the event loop's own wake-ups
            continue
        for frame in whole:
            results.append(Said(first if kind == "R" else index, path, frame))
            first = index
        if decoder.pending_bytes:
            begun[path] = first
    return results


# --- what a power cut leaves -----------------------------------------------------------------


@dataclass(slots=True)
class _File:
    synced: bytearray = field(default_factory=bytearray)
    waiting: list[Event] = field(default_factory=list)
    """Writes and cuts since the begin of the last sync that ended."""
    named: bool = False
    """Whether its name in the folder is durable."""


class Disk:
    """Files as the disk may hold them: what was synced, and of the rest any part."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._files: dict[str, _File] = defaultdict(_File)
        self._removed: dict[str, _File] = {}
        self._began: dict[str, int] = {}

    def play(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.kind in {"W", "T"}:
                self._files[event.path].waiting.append(event)
            elif event.kind == "S":
                self._began[event.path] = len(self._files[event.path].waiting)
            elif event.kind == "F":
                self._synced(event.path)
            elif event.kind == "U" and event.path in self._files:
                self._removed[event.path] = self._files.pop(event.path)

    def _synced(self, path: str) -> None:
        if path == self._folder:
            for file in self._files.values():
                file.named = True
            self._removed.clear()
            return
        file = self._files[path]
        count = self._began.pop(path)
        for event in file.waiting[:count]:
            _apply(file.synced, event, len(event.data))
        del file.waiting[:count]

    def cut(self, folder: Path, rnd: random.Random) -> None:
        """Write to ``folder`` what one power cut here may leave."""
        self._files.pop(self._folder, None)
        for path, file in {**self._removed, **self._files}.items():
            if path.endswith(("-shm", ".lock")):
                continue  # rebuilt at every start
            if (not file.named or path in self._removed) and rnd.random() < 0.5:
                continue
            data = bytearray(file.synced)
            for event in file.waiting:
                if rnd.random() < 0.5:
                    _apply(data, event, _torn(len(event.data), rnd))
            (folder / Path(path).name).write_bytes(data)


def _torn(size: int, rnd: random.Random) -> int:
    """All of a write, mostly; else some of its sectors."""
    if rnd.random() < 0.6:
        return size
    return min(size, rnd.randrange(size // SECTOR_BYTES + 1) * SECTOR_BYTES)


def _apply(data: bytearray, event: Event, count: int) -> None:
    if event.kind == "T":
        del data[event.offset :]
        data.extend(bytes(event.offset - len(data)))
    elif count:
        data.extend(bytes(max(0, event.offset - len(data))))
        data[event.offset : event.offset + count] = event.data[:count]
