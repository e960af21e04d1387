"""The segments of a history: which there are, and which of them the table does not hold yet.

Follows from names and sizes only; no segment is opened. Needs no Spark, so that it is known without
starting it whether there is anything to do.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tickwheel.reports.settings import ReportError, ReportSettings

if TYPE_CHECKING:
    from tickwheel.reports.local import Readable
    from tickwheel.reports.manifest import Manifest

_SEGMENT = re.compile(r"(dt=(\d{4}-\d\d-\d\d)/hour=\d\d/([^/._][^/]*)\.jsonl)(\.gz)?$")
SEGMENT_SQL = r"(dt=[^/]+/hour=[^/]+/[^/]+\.jsonl)(\.gz)?$"
"""The pattern of a segment's name for Spark, which finds it in the path of a line's file."""


@dataclass(frozen=True)
class Segment:
    """One file of history."""

    path: str
    name: str
    """The path relative to the root, without ``.gz``: a segment keeps its name when sealed."""
    date: str
    bytes: int
    sealed: bool


def listed(files: Readable, settings: ReportSettings) -> list[Segment]:
    """All segments, oldest first; of one that is open and sealed at once the sealed one."""
    root = settings.history.rstrip("/")
    if not files.exists(root):
        raise ReportError(f"{root}: there is no such folder; is it the daemon's history_dir?")
    found: dict[str, Segment] = {}
    for file in files.matching(f"{root}/dt=*/hour=*/*.jsonl*"):
        match = _SEGMENT.search(file.path)
        if match is None:
            continue
        name, date, _, gz = match.groups()
        sealed = gz is not None
        if not sealed and (not settings.open_segments or (name in found and found[name].sealed)):
            continue
        found[name] = Segment(file.path, name, date, file.bytes, sealed)
    return sorted(found.values(), key=lambda segment: segment.name)


def new(
    segments: Sequence[Segment], manifest: Manifest, again: Collection[str] = ()
) -> list[Segment]:
    """What the table does not hold yet: unknown, grown, or sealed since; and what ``again`` names.

    (The table knows events that it has read before, so to read a segment again is no risk.)
    """

    def is_new(segment: Segment) -> bool:
        known = manifest.segments.get(segment.name)
        if known is None or segment.name in again:
            return True
        return (known.bytes, known.sealed) != (segment.bytes, segment.sealed)

    return [segment for segment in segments if is_new(segment)]


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
