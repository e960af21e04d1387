"""Which runs make up the table: one small JSON file a commit, the newest whole one holds.

Needs no Spark to be read. The layout around it is in :mod:`~tickwheel.reports.table`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from tickwheel.reports.local import ASIDE
from tickwheel.reports.settings import ReportError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tickwheel.reports.files import Files
    from tickwheel.reports.local import Readable

FORMAT = 1
KEPT = 3
"""Manifests that stay: who has just read an older one finds its files for one more run."""


@dataclass(frozen=True)
class Loaded:
    """One segment as it was when it was loaded last."""

    bytes: int
    sealed: bool
    run: int
    schema: int
    """The newest version of lines that its reader knew."""


@dataclass(frozen=True)
class Manifest:
    """The parts of the table after ``run``."""

    run: int = 0
    segments: Mapping[str, Loaded] = field(default_factory=dict)
    """Segments by name without ``.gz``, relative to the history's root."""
    events: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Date → the runs that hold rows of it."""
    rollups: tuple[int, ...] = ()
    journeys: tuple[int, ...] = ()
    """Runs with finished journeys; the unfinished are those of ``open`` alone."""
    open: int | None = None
    quarantine: tuple[int, ...] = ()
    rows: int = 0
    duplicates: int = 0
    lines: int = 0
    first_ms: int | None = None
    last_ms: int | None = None
    synthetic: int = 0
    """Rows that are marked as synthetic."""

    @property
    def runs(self) -> set[int]:
        """Every run whose files are still needed."""
        used = {run for runs in self.events.values() for run in runs}
        used |= {*self.rollups, *self.journeys, *self.quarantine}
        return used if self.open is None else used | {self.open}

    def to_text(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self), "end": True}, sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> Manifest | None:
        """The manifest of a file; None: the file is torn. Raises ReportError for a newer format."""
        try:
            fields = json.loads(text)
        except ValueError:
            return None
        if not isinstance(fields, dict) or fields.pop("end", None) is not True:
            return None
        found = fields.pop("format", None)
        if found != FORMAT:
            raise ReportError(
                f"the table was written in format {found}, this version knows {FORMAT}: "
                "use the newer version, or report into another folder"
            )
        fields["segments"] = {k: Loaded(**v) for k, v in fields["segments"].items()}
        fields["events"] = {date: tuple(runs) for date, runs in fields["events"].items()}
        for name in ("rollups", "journeys", "quarantine"):
            fields[name] = tuple(fields[name])
        return replace(cls(), **fields)


def newest(files: Readable, table: str) -> Manifest:
    """The manifest that holds; an empty one when there is no table yet.

    Raises ReportError for a table of a newer version.
    """
    for name in reversed(_names(files, table)):
        text = files.read(f"{_folder(table)}/{name}")
        found = None if text is None else Manifest.from_text(text)
        if found is not None:
            return found
    return Manifest()


def _folder(table: str) -> str:
    return f"{table}/_manifests"


def _names(files: Readable, table: str) -> list[str]:
    return [n for n in files.names(_folder(table)) if n[:8].isdecimal() and n[8:] == ".json"]


class Manifests:
    """The manifests of one table, in ``_manifests/`` below it."""

    def __init__(self, files: Files, table: str) -> None:
        self._files, self._table = files, table
        self._folder = _folder(table)

    def newest(self) -> Manifest:
        """The manifest that holds; an empty one when there is no table yet."""
        return newest(self._files, self._table)

    def sweep(self) -> None:
        """Delete torn manifests: their numbers would be taken for ever. Only with the lock."""
        for name in self._files.names(self._folder):
            text = self._files.read(f"{self._folder}/{name}")
            torn = text is None or (name in self._names() and Manifest.from_text(text) is None)
            if torn or name.startswith(ASIDE):
                self._files.delete(f"{self._folder}/{name}")

    def commit(self, manifest: Manifest) -> None:
        """Make ``manifest`` the newest. Raises ReportError when another run was quicker."""
        path = f"{self._folder}/{manifest.run:08d}.json"
        names = self._names()
        newer = bool(names) and int(names[-1].partition(".")[0]) >= manifest.run
        if newer or not self._files.create(path, manifest.to_text()):
            raise ReportError(
                "another report changed this table meanwhile; nothing of this run was kept"
            )
        for name in names[: -(KEPT - 1)]:
            self._files.delete(f"{self._folder}/{name}")

    def _names(self) -> list[str]:
        return _names(self._files, self._table)
