"""What of a report can be read without Spark: the files of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

ASIDE = ".tmp-"
"""The beginning of the names of files that are not whole yet."""


@dataclass(frozen=True)
class Found:
    """One file: its full path as Spark reads it, and its size."""

    path: str
    bytes: int


class Readable(Protocol):
    """Files that can be listed and read. Paths are text; a missing file reads as None or empty."""

    def matching(self, pattern: str) -> list[Found]: ...
    def names(self, folder: str) -> list[str]: ...
    def exists(self, path: str) -> bool: ...
    def read(self, path: str) -> str | None: ...


def is_local(*paths: str) -> bool:
    """Whether these are plain paths; one with a scheme is for Spark's file systems."""
    return not any(":" in path for path in paths)


class LocalFiles:
    """The interface of :class:`~tickwheel.reports.files.Files` for plain paths."""

    def matching(self, pattern: str) -> list[Found]:
        """The files that match a pattern; folders before its first ``*`` stand for themselves."""
        folder, _, last = pattern.partition("*")[0].rpartition("/")
        found = Path(folder or "/").glob(last + pattern[len(folder) + 1 + len(last) :])
        return [Found(str(path), path.stat().st_size) for path in found if path.is_file()]

    def names(self, folder: str) -> list[str]:
        """The names directly in ``folder``, sorted; empty: there is no such folder."""
        try:
            return sorted(path.name for path in Path(folder).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def exists(self, path: str) -> bool:
        return Path(path).exists()

    def read(self, path: str) -> str | None:
        try:
            return Path(path).read_text("utf-8", "replace")
        except (FileNotFoundError, NotADirectoryError):
            return None
