"""How far the writer is: spool position, last number given, and lengths of open segments, as one.

Saved after the lines are written, so a writer that is killed in between finds the old position,
cuts the segments to the lengths in it, and writes the same lines with the same numbers again.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from tickwheel.history.segments import PART

POSITION = "position.json"
VERSION = 1
EPOCHS_MAX = 512
"""Past epochs whose last numbers are kept: an epoch begins anew with a new store, and its numbers
must go on."""


@dataclass(slots=True)
class Place:
    """The place in one epoch: spool file, offset of its next array, number of the last event."""

    file: int = 0
    offset: int = 0
    seq: int = 0
    last_ms: int = 0
    """The time of the newest event."""


@dataclass(slots=True)
class Position:
    """All that a writer must know when it starts again."""

    number: int = 0
    """The number of the newest segment."""
    epochs: dict[int, Place] = field(default_factory=dict)
    """Epoch → its place; the epoch that was written last is at the end."""
    open: dict[str, int] = field(default_factory=dict)
    """Segments that are being written: path below the history's folder → length in bytes."""
    cleaned_ms: int = 0
    """When retention was last enforced at its hour."""

    def place(self, epoch: int) -> Place:
        return self.epochs.get(epoch) or Place()

    def moved(self, epoch: int, place: Place) -> dict[int, Place]:
        """The epochs, with one of them at another place."""
        others = {other: at for other, at in self.epochs.items() if other != epoch}
        return others | {epoch: place}

    def save(self, folder: Path) -> None:
        """Save the position. Raises OSError; then the former one is still there."""
        for epoch in list(self.epochs)[:-EPOCHS_MAX]:
            del self.epochs[epoch]
        text = json.dumps(
            {
                "v": VERSION,
                "number": self.number,
                "epochs": {
                    str(epoch): [place.file, place.offset, place.seq, place.last_ms]
                    for epoch, place in self.epochs.items()
                },
                "open": self.open,
                "cleaned_ms": self.cleaned_ms,
            }
        )
        part = folder / (PART + POSITION)
        try:
            part.write_text(text)
            part.rename(folder / POSITION)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise


def load(folder: Path) -> Position | None:
    """The position that was saved; None when there is none that can be read. Raises OSError."""
    try:
        saved = json.loads((folder / POSITION).read_bytes())
        if saved["v"] != VERSION:
            return None
        return Position(
            number=int(saved["number"]),
            epochs={int(epoch): Place(*map(int, p)) for epoch, p in saved["epochs"].items()},
            open={str(path): int(length) for path, length in saved["open"].items()},
            cleaned_ms=int(saved["cleaned_ms"]),
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def sync(path: Path) -> None:
    """Make what was written to a file survive a power cut. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)
