"""The part of a report's state that can be read without Spark: the segments of the history, the
loaded segments, and whether the last report is still up to date.

Each commit writes a manifest, a small JSON file that lists the runs of the table. The newest
complete manifest is valid (:mod:`~tickwheel.reports.table` describes the layout). New segments are
detected by name and size, without opening them.

The name of a segment (node, shard, epoch, number) and its hour are unique among all nodes of a
store, because each epoch of a shard has one leader. So files with the same name, in any folder of
the history, are the same segment. The most complete file is used: a sealed file rather than an open
one, a longer file rather than a shorter one. Folders can be moved, copied into one another and
named in any order without loading segments again.

A report is saved with a fingerprint: the run of the table, the options, the program, and the sizes
of the files that it wrote. If none of these has changed and the history has no new events, a new
report would be the same, so it is skipped without starting Spark. If local files do not prove this,
the report is made. Clocks do not matter: figures refer to the newest event, never to the current
time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tickwheel.reports import ReportError, ReportSettings, Rows

if TYPE_CHECKING:
    from collections.abc import Mapping


# --- local files ---------------------------------------------------------------------------------


ASIDE = ".tmp-"
"""Prefix of the names of incomplete files."""


@dataclass(frozen=True)
class Found:
    """A file: its full path for Spark, and its size."""

    path: str
    bytes: int


class Readable(Protocol):
    """Files that can be listed and read. Paths are strings. For a missing file, methods return None
    or []."""

    def matching(self, folder: str, pattern: str) -> list[Found]: ...
    def names(self, folder: str) -> list[str]: ...
    def exists(self, path: str) -> bool: ...
    def read(self, path: str) -> str | None: ...


def is_local(*paths: str) -> bool:
    """Return whether these are plain paths, without the scheme of another file system."""
    return not any(":" in path for path in paths)


class LocalFiles:
    """The interface of :class:`~tickwheel.reports.files.Files` for plain paths."""

    def matching(self, folder: str, pattern: str) -> list[Found]:
        """Return the files in a folder that match a pattern."""
        paths = Path(folder or "/").glob(pattern)
        return [Found(str(path), path.stat().st_size) for path in paths if path.is_file()]

    def names(self, folder: str) -> list[str]:
        """Return the names in ``folder``, sorted; empty if it does not exist."""
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


# --- the table's manifests -----------------------------------------------------------------------


FORMAT = 1


@dataclass(frozen=True)
class Loaded:
    """A segment at its last load."""

    bytes: int
    sealed: bool
    run: int
    schema: int
    """The newest version of lines known to the release that loaded the segment."""


@dataclass(frozen=True)
class Manifest:
    """The contents of the table once ``run`` is committed."""

    run: int = 0
    segments: Mapping[str, Loaded] = field(default_factory=dict)
    """Name of a segment, without ``.gz``, relative to the history's root → its last load."""
    histories: tuple[str, ...] = ()
    """The folders of history that the last load read."""
    events: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Date → the runs that have rows of this date."""
    rollups: tuple[int, ...] = ()
    journeys: tuple[int, ...] = ()
    """Runs with finished journeys."""
    open: int | None = None
    """The run with all unfinished journeys."""
    quarantine: tuple[int, ...] = ()
    rows: int = 0
    duplicates: int = 0
    lines: int = 0
    first_ms: int | None = None
    last_ms: int | None = None
    synthetic: int = 0
    """Number of rows that are marked as synthetic."""

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
        """Return the manifest in a file's text, or None if the text is torn. Raise ReportError for
        another format."""
        try:
            fields = json.loads(text)
        except ValueError:
            return None
        if not isinstance(fields, dict) or fields.pop("end", None) is not True:
            return None
        file_format = fields.pop("format", None)
        if file_format != FORMAT:
            raise ReportError(
                f"the table has format {file_format}, but this release reads {FORMAT}: "
                "use the newer release, or another --out"
            )
        fields["segments"] = {k: Loaded(**v) for k, v in fields["segments"].items()}
        fields["events"] = {date: tuple(runs) for date, runs in fields["events"].items()}
        for name in ("histories", "rollups", "journeys", "quarantine"):
            fields[name] = tuple(fields.get(name, ()))
        return replace(cls(), **fields)


def newest_manifest(files: Readable, table: str) -> Manifest:
    """Return the valid manifest, or an empty one if there is no table. Raise ReportError for a
    table of another format."""
    for name in reversed(manifest_names(files, table)):
        text = files.read(f"{manifest_folder(table)}/{name}")
        manifest = None if text is None else Manifest.from_text(text)
        if manifest is not None:
            return manifest
    return Manifest()


def manifest_folder(table: str) -> str:
    return f"{table}/_manifests"


def manifest_names(files: Readable, table: str) -> list[str]:
    return [
        n for n in files.names(manifest_folder(table)) if n[:8].isdecimal() and n[8:] == ".json"
    ]


# --- the segments of the history -----------------------------------------------------------------


_SEGMENT = re.compile(r"(dt=(\d{4}-\d\d-\d\d)/hour=\d\d/([^/._][^/]*)\.jsonl)(\.gz)?$")
_LEADER = re.compile(r"/([^/]+)-s(\d+)-e(\d+)-\d+\.jsonl$")
SEGMENT_SQL = r"(dt=[^/]+/hour=[^/]+/[^/]+\.jsonl)(\.gz)?$"
"""The pattern with which Spark extracts a segment's name from a file's path."""


@dataclass(frozen=True)
class Segment:
    """A segment of the history, with its most complete file."""

    path: str
    name: str
    """The path relative to the root, without ``.gz``; sealing does not change it."""
    date: str
    bytes: int
    sealed: bool
    copies: tuple[str, ...] = ()
    """Other sealed files of this segment, longest first."""

    @property
    def extent(self) -> tuple[bool, int]:
        """A rank. If a segment has two files, the one with the higher rank contains the other."""
        return self.sealed, self.bytes


def listed(
    files: Readable, settings: ReportSettings, known_folders: Collection[str] = ()
) -> list[Segment]:
    """Return the segments of all folders, each once with its most complete file, ordered by hour,
    then by shard and epoch. Raise ReportError if a folder is missing, or if it has no segments and
    is not in ``known_folders`` of the last load, for example because a volume is not mounted."""
    files_by_name: dict[str, list[Segment]] = {}
    for root in settings.folders:
        if not files.exists(root):
            raise ReportError(f"{root}: the folder does not exist; is it the daemon's history_dir?")
        paths = files.matching(root, "dt=*/hour=*/*.jsonl*")
        matches = [(file, match) for file in paths if (match := _SEGMENT.search(file.path))]
        if not matches and root not in known_folders:
            raise ReportError(
                f"{root}: the folder has no history; is it the daemon's history_dir, and is its"
                " volume mounted?"
            )
        for file, match in matches:
            name, date, _, gz = match.groups()
            if gz is not None or settings.open_segments:
                segment = Segment(file.path, name, date, file.bytes, gz is not None)
                files_by_name.setdefault(name, []).append(segment)
    return [_best(files_by_name[name]) for name in sorted(files_by_name, key=_in_order)]


def _in_order(name: str) -> tuple[str, int, int, str]:
    """Return a sort key: by hour, then in the order in which their shard wrote the segments."""
    match = _LEADER.search(name)
    shard, epoch = (int(match[2]), int(match[3])) if match is not None else (-1, -1)
    return name.rpartition("/")[0], shard, epoch, name


def _best(files_of_segment: Sequence[Segment]) -> Segment:
    best, *others = sorted(files_of_segment, key=lambda segment: segment.extent, reverse=True)
    return replace(best, copies=tuple(other.path for other in others if other.sealed))


def new_segments(
    segments: Sequence[Segment], manifest: Manifest, reloaded: Collection[str] = ()
) -> list[Segment]:
    """Return the segments to load: new segments, segments that were extended or sealed since their
    last load, and those in ``reloaded``. Loading a segment again is harmless, because the table
    ignores duplicate events. A file smaller than the loaded one is an older copy. Raise ReportError
    if the segments belong to several stores, or to another store than the table."""
    _check_one_store({*manifest.segments, *(segment.name for segment in segments)})
    loaded = {name: (last.sealed, last.bytes) for name, last in manifest.segments.items()}
    return [
        segment
        for segment in segments
        if segment.name in reloaded or segment.extent > loaded.get(segment.name, (False, -1))
    ]


def _check_one_store(names: Collection[str]) -> None:
    """Check that each epoch of a shard has one leader. Otherwise the segments belong to two stores,
    whose events must not be mixed. Raise ReportError."""
    first: dict[tuple[str, str], tuple[str, str]] = {}
    for name in sorted(names):
        match = _LEADER.search(name)
        if match is None:
            continue
        node, shard, epoch = match.groups()
        leader, other = first.setdefault((shard, epoch), (node, name))
        if leader != node:
            raise ReportError(
                f"history: {other} and {name} belong to different stores, because both have epoch"
                f" {epoch} of shard {shard}; make a report of each store, each with its own --out"
            )


def left_out(manifest: Manifest, settings: ReportSettings) -> list[str]:
    """Return the folders of the last load that are not among this report's folders."""
    return [folder for folder in manifest.histories if folder not in settings.folders]


def left_out_remark(folder: str) -> str:
    """Return a remark about a folder of ``left_out``."""
    return (
        f"left out: {folder} was loaded by the last report and is not named now;"
        " the figures lack what was written there since"
    )


def find_new_segments(settings: ReportSettings) -> tuple[Manifest, list[Segment]]:
    """Return the manifest and the segments to load, judging from local files."""
    local = LocalFiles()
    manifest = newest_manifest(local, settings.table)
    return manifest, new_segments(listed(local, settings, manifest.histories), manifest)


def batches(segments: Sequence[Segment], bytes_max: int) -> Iterator[list[Segment]]:
    """Yield the segments in order, in batches of at most ``bytes_max``; a larger one is alone."""
    batch: list[Segment] = []
    size = 0
    for segment in segments:
        if batch and size + segment.bytes > bytes_max:
            yield batch
            batch, size = [], 0
        batch.append(segment)
        size += segment.bytes
    if batch:
        yield batch


# --- the last report -----------------------------------------------------------------------------


REPORT = "_report.json"
REPORT_FORMAT = 1
LOCK = "_lock"
UNRELATED_TO_FIGURES = ("history", "out", "batch_bytes")
"""Settings that do not affect figures."""


@dataclass(frozen=True)
class Summary:
    """The summary of a report on the command line. Times are in seconds."""

    page: str
    left_out: list[str]
    """Folders of the last load that are not among this report's folders."""
    new_events: int
    events: int
    duplicates: int
    synthetic: int
    stuck: int
    stuck_listed: int
    """Number of tasks in the table ``stuck``, which contains the longest overdue."""
    all: dict[str, Any]
    topics: Rows
    slo: Rows
    quarantine: Rows
    load_s: float
    figures_s: float


def unchanged_summary(settings: ReportSettings) -> Summary | None:
    """Return the summary of the last report if a new report would certainly be the same, or
    None."""
    if not is_local(*settings.history, settings.out) or _at(settings, LOCK).exists():
        return None
    try:
        saved = json.loads(_at(settings, REPORT).read_text("utf-8"))
        if saved["made_of"] != _fingerprint(settings, saved["run"]):
            return None
        manifest, new_segments_found = find_new_segments(settings)
        if manifest.run != saved["run"] or new_segments_found:
            return None
        summary = Summary(**saved["summary"])
    except (OSError, ValueError, KeyError, TypeError, ReportError):
        return None
    return replace(
        summary, page=page_path(settings), left_out=left_out(manifest, settings), new_events=0,
        load_s=0.0, figures_s=0.0,
    )  # fmt: skip


def forget_report(settings: ReportSettings) -> None:
    """Forget the last report before new figures are written."""
    if is_local(settings.out):
        _at(settings, REPORT).unlink(missing_ok=True)


def save_report(settings: ReportSettings, run: int, summary: Summary) -> None:
    """Save the summary of a finished report. ``run`` is the run of the table from which its figures
    come."""
    if not is_local(*settings.history, settings.out):
        return
    text = json.dumps(
        {"run": run, "made_of": _fingerprint(settings, run), "summary": asdict(summary)}, indent=1
    )
    aside = _at(settings, f"{ASIDE}{REPORT}")
    # The summary only saves time in the next run, so a failure does not matter.
    with contextlib.suppress(OSError):
        aside.write_text(text, "utf-8")
        os.replace(aside, _at(settings, REPORT))


def page_path(settings: ReportSettings) -> str:
    return f"{settings.out.rstrip('/')}/report.html"


def _at(settings: ReportSettings, name: str) -> Path:
    return Path(settings.table) / name


def _fingerprint(settings: ReportSettings, run: int) -> dict[str, Any]:
    """Return what a report was made of and the sizes of its files, as JSON values."""
    options = {k: v for k, v in asdict(settings).items() if k not in UNRELATED_TO_FIGURES}
    out_path = Path(settings.out)
    written = [
        out_path / "report.html",
        *out_path.glob("csv/*.csv"),
        *out_path.glob("metrics/*.parquet/*"),
    ]
    fields = {
        "format": REPORT_FORMAT, "run": run, "options": options, "program": _program(),
        "files": {str(path.relative_to(out_path)): path.stat().st_size for path in written},
    }  # fmt: skip
    as_json: dict[str, Any] = json.loads(json.dumps(fields))
    return as_json


def _program() -> str:
    """Return a digest of this package's files, which identifies its version."""
    digest = hashlib.sha256()
    for name, content in sorted(_parts(files("tickwheel.reports"), "")):
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _parts(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for part in folder.iterdir():
        name = f"{prefix}{part.name}"
        if part.is_dir():
            yield from _parts(part, f"{name}/")
        elif not name.endswith(".pyc"):
            yield name, part.read_bytes()
