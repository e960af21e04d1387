"""``python -m benchmarks.reports --events 20000000``: history made, loaded and reported on.

Three processes, as a user would start them: the generator; a first report of all but the newest
hundredth; a second one when that has arrived. Each says its seconds, events a second and peak
memory (of the JVM and of Python, from /proc). Everything is real: gzip segments on disk, Spark in
local mode, all figures and the page. What a part says is shown as it ends, and no part may take
longer than --patience: so a run is bounded. Making the history is not counted.

Disk: history, table and Spark's own files lie below --dir (default: /var/tmp) and are given back
at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EVENTS_PER_TASK = 3.6
DAYS = 7
NEW_SHARE = 0.01
SHARE_MAX = 0.25
"""A second run over a hundredth of new data takes less than this of the first."""
CHILD = """
import json, sys, time
began = time.monotonic()
from tickwheel.reports import ReportSettings
from tickwheel.reports.job import run
from tickwheel.reports.session import little_to_do, started
settings = ReportSettings(sys.argv[1], sys.argv[2])
peak = lambda pid: next(int(line.split()[1]) / 1024
    for line in open(f"/proc/{pid}/status") if line.startswith("VmHWM"))
with started(sys.argv[3], memory=sys.argv[4], quiet=True, little=little_to_do(settings)) as spark:
    start_s = time.monotonic() - began
    report = run(spark, settings)
    jvm = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()
    memory = {"jvm_peak_mb": round(peak(jvm)), "python_peak_mb": round(peak("self"))}
print(json.dumps({"events": report.loaded.rows, "start_s": start_s, "load_s": report.load_s,
    "figures_s": report.figures_s, "total_s": time.monotonic() - began, **memory,
    "events_in_all": report.loaded.manifest.rows}))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show, and write JSON where --json says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=2_000_000)
    parser.add_argument("--master", default="local[*]")
    parser.add_argument("--memory", default="2g", help="Spark's heap")
    parser.add_argument("--dir", default="/var/tmp", help="where to work, in a folder of its own")
    parser.add_argument("--patience", type=float, default=3_600.0, help="seconds for each part")
    parser.add_argument("--check", action="store_true", help="exit code 1 when the bound is missed")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="tickwheel-reports-", dir=given.dir))
    try:
        figures = measure(folder, given)
    finally:
        shutil.rmtree(folder)
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    return int(given.check and figures["second_share_of_first"] >= SHARE_MAX)


def measure(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """All three parts; folders of the history hold gzip segments of one hour each."""
    events = given.events
    limits: dict[str, Any] = {"patience_s": given.patience, "scratch": folder / "spark"}
    history, aside, out = folder / "history", folder / "aside", folder / "out"
    tasks = max(1, round(events / EVENTS_PER_TASK))
    began_s = time.monotonic()
    made = run(
        "-m", "tickwheel", "--json", "history", "generate", "--tasks", str(tasks),
        "--days", str(DAYS), "--out", str(history), **limits,
    )  # fmt: skip
    made["total_s"] = time.monotonic() - began_s
    show("generate", made, f"{made['bytes'] / 1e6:,.0f} MB")
    hold_back(history, aside, made["events"] * NEW_SHARE, made)
    arguments = ("-c", CHILD, str(history), str(out), given.master, given.memory)
    first = run(*arguments, **limits)
    show("first", first, details(first))
    shutil.copytree(aside, history, dirs_exist_ok=True)
    second = run(*arguments, **limits)
    show("second", second, details(second))
    table_bytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    new, share = second["events"] / second["events_in_all"], second["total_s"] / first["total_s"]
    print(f"{new:.1%} new data took {share:.1%} of the first run; wanted: < {SHARE_MAX:.0%}")
    return {
        "cores": os.cpu_count(),
        "generate": made,
        "first": first,
        "second": second,
        "table_bytes": table_bytes,
        "new_share": new,
        "second_share_of_first": share,
    }


def hold_back(history: Path, aside: Path, events: float, made: dict[str, Any]) -> None:
    """Take the newest segments away until they hold about so many events (by their bytes)."""
    wanted = events / made["events"] * made["bytes"]
    held = 0
    for path in sorted(history.glob("dt=*/hour=*/*.gz"), reverse=True):
        if held >= wanted:
            break
        held += path.stat().st_size
        place = aside / path.relative_to(history)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.rename(place)


def run(*arguments: str, patience_s: float, scratch: Path) -> dict[str, Any]:
    """One process; the JSON object that it says last."""
    done = subprocess.run(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE, check=True, timeout=patience_s,
        env={**os.environ, "SPARK_LOCAL_DIRS": str(scratch)},
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def details(part: dict[str, Any]) -> str:
    return (
        f"(start {part['start_s']:.1f} s, load {part['load_s']:.1f} s, "
        f"figures {part['figures_s']:.1f} s)  "
        f"peak: JVM {part['jvm_peak_mb']:,} MB, Python {part['python_peak_mb']:,} MB"
    )


def show(name: str, part: dict[str, Any], more: str) -> None:
    rate = part["events"] / part["total_s"]
    seconds = f"{part['total_s']:8.1f} s"
    print(f"{name:<9} {part['events']:>12,} events  {seconds}  {rate:>9,.0f}/s  {more}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
