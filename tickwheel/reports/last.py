"""The last report: what it said, and whether it still holds.

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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from tickwheel.reports import manifest as manifests
from tickwheel.reports.local import ASIDE, LocalFiles, is_local
from tickwheel.reports.segments import listed, new
from tickwheel.reports.settings import ReportError, ReportSettings

NAME = "_report.json"
FORMAT = 1
LOCK = "_lock"
NO_FIGURE = ("history", "out", "batch_bytes")
"""Settings that change no figure of a report."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Summary:
    """A report in short, as the command line shows it. Times in seconds."""

    page: str
    new_events: int
    events: int
    duplicates: int
    synthetic: int
    stuck: int
    all: dict[str, Any]
    topics: Rows
    slo: Rows
    quarantine: Rows
    load_s: float
    figures_s: float


def holds(settings: ReportSettings) -> Summary | None:
    """What the last report said, when another one would say the same; None when in doubt."""
    if not is_local(settings.history, settings.out) or _at(settings, LOCK).exists():
        return None
    try:
        kept = json.loads(_at(settings, NAME).read_text("utf-8"))
        if kept["made_of"] != _made_of(settings, kept["run"]) or _news(settings, kept["run"]):
            return None
        said = Summary(**kept["summary"])
    except (OSError, ValueError, KeyError, TypeError, ReportError):
        return None
    return replace(said, page=page(settings), new_events=0, load_s=0.0, figures_s=0.0)


def forget(settings: ReportSettings) -> None:
    """Forget the last report, before other figures are written."""
    if is_local(settings.out):
        _at(settings, NAME).unlink(missing_ok=True)


def keep(settings: ReportSettings, run: int, said: Summary) -> None:
    """Keep the summary at the end; ``run`` is that of the table which the figures are made of."""
    if not is_local(settings.history, settings.out):
        return
    text = json.dumps(
        {"run": run, "made_of": _made_of(settings, run), "summary": asdict(said)}, indent=1
    )
    aside = _at(settings, f"{ASIDE}{NAME}")
    # Only a help for the next run: a report that is made does not fail for want of it.
    with contextlib.suppress(OSError):
        aside.write_text(text, "utf-8")
        os.replace(aside, _at(settings, NAME))


def page(settings: ReportSettings) -> str:
    """The path of the page."""
    return f"{settings.out.rstrip('/')}/report.html"


def _at(settings: ReportSettings, name: str) -> Path:
    return Path(settings.table) / name


def _news(settings: ReportSettings, run: int) -> bool:
    """Whether the table has changed, or lacks some of the history."""
    there = LocalFiles()
    held = manifests.newest(there, settings.table)
    return held.run != run or bool(new(listed(there, settings), held))


def _made_of(settings: ReportSettings, run: int) -> dict[str, Any]:
    """All that decides what a report says, as JSON."""
    options = {k: v for k, v in asdict(settings).items() if k not in NO_FIGURE}
    found = {
        "format": FORMAT, "run": run, "options": options, "program": _program(),
        "files": _written(Path(settings.out)),
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


def _written(out: Path) -> dict[str, int]:
    """The files of page and figures, with their sizes in bytes."""
    found = [out / "report.html", *out.glob("csv/*.csv"), *out.glob("metrics/*.parquet/*")]
    return {str(path.relative_to(out)): path.stat().st_size for path in found}
