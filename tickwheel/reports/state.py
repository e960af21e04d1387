"""What is known of a report without Spark, and so before it is started: which segments the history
has, which of them the table holds, and whether the last report still says all.

Which runs make up the table: one small JSON file a commit, the newest whole one holds (the layout
around it is in :mod:`~tickwheel.reports.table`). Which segments are new follows from names and
sizes only; no segment is opened.

The name of a segment (node, shard, epoch, number) and its hour are its own among all nodes of a
store, because each epoch of a shard has one leader. So files of one name are the same segment, in
whichever folder of the history they lie, and the best one stands for all: a sealed one has more
than an open one, a longer one more than a shorter one. Folders may be moved, copied into one
another and named in any order without anything being loaded again.

A report is kept with what it was made of: the run of the table, the options, the program, the
files it wrote. When all of these are as they were, and the history has nothing new, another report
would say the same: it is not made, and Spark is not started. What cannot be known for certain from
local files alone means that the report is made. No clock takes part: figures are measured against
the newest event, never against today.
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
"""The beginning of the names of files that are not whole yet."""


@dataclass(frozen=True)
class Found:
    """One file: its full path as Spark reads it, and its size."""

    path: str
    bytes: int


class Readable(Protocol):
    """Files that can be listed and read. Paths are text; a missing file reads as None or empty."""

    def matching(self, folder: str, pattern: str) -> list[Found]: ...
    def names(self, folder: str) -> list[str]: ...
    def exists(self, path: str) -> bool: ...
    def read(self, path: str) -> str | None: ...


def is_local(*paths: str) -> bool:
    """Whether these are plain paths; one with a scheme is for Spark's file systems."""
    return not any(":" in path for path in paths)


class LocalFiles:
    """The interface of :class:`~tickwheel.reports.files.Files` for plain paths."""

    def matching(self, folder: str, pattern: str) -> list[Found]:
        """The files in a folder that match a pattern."""
        found = Path(folder or "/").glob(pattern)
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


# --- the table's manifests -----------------------------------------------------------------------


FORMAT = 1


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
    histories: tuple[str, ...] = ()
    """The folders of history that the last load read."""
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
        for name in ("histories", "rollups", "journeys", "quarantine"):
            fields[name] = tuple(fields.get(name, ()))
        return replace(cls(), **fields)


def newest_manifest(files: Readable, table: str) -> Manifest:
    """The manifest that holds; an empty one when there is no table yet.

    Raises ReportError for a table of a newer version.
    """
    for name in reversed(manifest_names(files, table)):
        text = files.read(f"{manifest_folder(table)}/{name}")
        found = None if text is None else Manifest.from_text(text)
        if found is not None:
            return found
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
"""The pattern of a segment's name for Spark, which finds it in the path of a line's file."""


@dataclass(frozen=True)
class Segment:
    """One segment of history, and the file that stands for it."""

    path: str
    name: str
    """The path relative to the root, without ``.gz``: a segment keeps its name when sealed."""
    date: str
    bytes: int
    sealed: bool
    copies: tuple[str, ...] = ()
    """Other sealed files of this segment, the longest first."""

    @property
    def extent(self) -> tuple[bool, int]:
        """Of two files of one segment the one with the greater extent has all of the other."""
        return self.sealed, self.bytes


def listed(files: Readable, settings: ReportSettings, known: Collection[str] = ()) -> list[Segment]:
    """All segments of all folders, oldest first, each once: as the file with the most in it. Of one
    hour those of a shard are in the order of its epochs.

    Raises ReportError when a folder is missing, or has no segment and is not ``known`` from the
    last load: a volume that is not mounted looks like that.
    """
    found: dict[str, list[Segment]] = {}
    for root in settings.folders:
        if not files.exists(root):
            raise ReportError(f"{root}: there is no such folder; is it the daemon's history_dir?")
        there = files.matching(root, "dt=*/hour=*/*.jsonl*")
        matches = [(file, match) for file in there if (match := _SEGMENT.search(file.path))]
        if not matches and root not in known:
            raise ReportError(
                f"{root}: there is no history in it; is it the daemon's history_dir, and is its"
                " volume mounted?"
            )
        for file, match in matches:
            name, date, _, gz = match.groups()
            if gz is not None or settings.open_segments:
                segment = Segment(file.path, name, date, file.bytes, gz is not None)
                found.setdefault(name, []).append(segment)
    return [_best(found[name]) for name in sorted(found, key=_in_order)]


def _in_order(name: str) -> tuple[str, int, int, str]:
    """A key by which segments sort by hour, and then as their shard wrote them."""
    found = _LEADER.search(name)
    shard, epoch = (int(found[2]), int(found[3])) if found is not None else (-1, -1)
    return name.rpartition("/")[0], shard, epoch, name


def _best(same: Sequence[Segment]) -> Segment:
    best, *others = sorted(same, key=lambda segment: segment.extent, reverse=True)
    return replace(best, copies=tuple(other.path for other in others if other.sealed))


def new_segments(
    segments: Sequence[Segment], manifest: Manifest, again: Collection[str] = ()
) -> list[Segment]:
    """What the table does not hold yet: unknown, grown, or sealed since; and what ``again`` names.

    (The table knows events that it has read before, so to read a segment again is no risk. A
    smaller file than the one that was read is an older copy, and says nothing new.) Raises
    ReportError when these segments are of another store than the table, or of several.
    """
    _check_one_store({*manifest.segments, *(segment.name for segment in segments)})
    known = {name: (held.sealed, held.bytes) for name, held in manifest.segments.items()}
    return [
        segment
        for segment in segments
        if segment.name in again or segment.extent > known.get(segment.name, (False, -1))
    ]


def _check_one_store(names: Collection[str]) -> None:
    """In one store an epoch of a shard has one leader; with two, events of the one would be taken
    for events of the other. Raises ReportError."""
    first: dict[tuple[str, str], tuple[str, str]] = {}
    for name in sorted(names):
        found = _LEADER.search(name)
        if found is None:
            continue
        node, shard, epoch = found.groups()
        leader, other = first.setdefault((shard, epoch), (node, name))
        if leader != node:
            raise ReportError(
                f"history: {other} and {name} are of different stores, because both have epoch"
                f" {epoch} of shard {shard}; make a report of each store, with an --out of its own"
            )


def left_out(manifest: Manifest, settings: ReportSettings) -> list[str]:
    """The folders that the last load read and that this report does not."""
    return [place for place in manifest.histories if place not in settings.folders]


def left_out_remark(place: str) -> str:
    """What is said of a folder that was left out."""
    return (
        f"left out: {place} was loaded by the last report and is not named now;"
        " what was written there since is in no figure"
    )


def news(settings: ReportSettings) -> tuple[Manifest, list[Segment]]:
    """What the table holds, and the segments that it lacks, from local files."""
    there = LocalFiles()
    held = newest_manifest(there, settings.table)
    return held, new_segments(listed(there, settings, held.histories), held)


def batches(segments: Sequence[Segment], bytes_max: int) -> Iterator[list[Segment]]:
    """The segments in order, in batches of at most ``bytes_max`` where possible."""
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
NO_FIGURE = ("history", "out", "batch_bytes")
"""Settings that change no figure of a report."""


@dataclass(frozen=True)
class Summary:
    """A report in short, as the command line shows it. Times in seconds."""

    page: str
    left_out: list[str]
    """Folders of history that the last load read and this report did not."""
    new_events: int
    events: int
    duplicates: int
    synthetic: int
    stuck: int
    stuck_listed: int
    """How many of them are in the table ``stuck``: the longest overdue."""
    all: dict[str, Any]
    topics: Rows
    slo: Rows
    quarantine: Rows
    load_s: float
    figures_s: float


def still_holds(settings: ReportSettings) -> Summary | None:
    """What the last report said, when another one would say the same; None when in doubt."""
    if not is_local(*settings.history, settings.out) or _at(settings, LOCK).exists():
        return None
    try:
        kept = json.loads(_at(settings, REPORT).read_text("utf-8"))
        if kept["made_of"] != _made_of(settings, kept["run"]):
            return None
        held, new = news(settings)
        if held.run != kept["run"] or new:
            return None
        said = Summary(**kept["summary"])
    except (OSError, ValueError, KeyError, TypeError, ReportError):
        return None
    return replace(
        said, page=page_path(settings), left_out=left_out(held, settings), new_events=0,
        load_s=0.0, figures_s=0.0,
    )  # fmt: skip


def forget_last(settings: ReportSettings) -> None:
    """Forget the last report, before other figures are written."""
    if is_local(settings.out):
        _at(settings, REPORT).unlink(missing_ok=True)


def keep_last(settings: ReportSettings, run: int, said: Summary) -> None:
    """Keep the summary at the end; ``run`` is that of the table which the figures are made of."""
    if not is_local(*settings.history, settings.out):
        return
    text = json.dumps(
        {"run": run, "made_of": _made_of(settings, run), "summary": asdict(said)}, indent=1
    )
    aside = _at(settings, f"{ASIDE}{REPORT}")
    # Only a help for the next run: a report that is made does not fail for want of it.
    with contextlib.suppress(OSError):
        aside.write_text(text, "utf-8")
        os.replace(aside, _at(settings, REPORT))


def page_path(settings: ReportSettings) -> str:
    """The path of the page."""
    return f"{settings.out.rstrip('/')}/report.html"


def _at(settings: ReportSettings, name: str) -> Path:
    return Path(settings.table) / name


def _made_of(settings: ReportSettings, run: int) -> dict[str, Any]:
    """All that decides what a report says, as JSON."""
    options = {k: v for k, v in asdict(settings).items() if k not in NO_FIGURE}
    out = Path(settings.out)
    written = [out / "report.html", *out.glob("csv/*.csv"), *out.glob("metrics/*.parquet/*")]
    found = {
        "format": REPORT_FORMAT, "run": run, "options": options, "program": _program(),
        "files": {str(path.relative_to(out)): path.stat().st_size for path in written},
    }  # fmt: skip
    read: dict[str, Any] = json.loads(json.dumps(found))
    return read


def _program() -> str:
    """A digest of this package's files: it imports nothing else of ours, so it is the version."""
    digest = hashlib.sha256()
    for name, content in sorted(_parts(files("tickwheel.reports"), "")):
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _parts(folder: Traversable, under: str) -> Iterator[tuple[str, bytes]]:
    for part in folder.iterdir():
        name = f"{under}{part.name}"
        if part.is_dir():
            yield from _parts(part, f"{name}/")
        elif not name.endswith(".pyc"):
            yield name, part.read_bytes()
