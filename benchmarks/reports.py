"""Generate a history, load it and report on it: ``python -m benchmarks.reports --events 20000000``.

Three processes, as a user would start them: the generator; a first report of all but the newest
hundredth; a second one when that has arrived. Each says its seconds, events a second and peak
memory (of the JVM and of Python, from /proc). Everything is real: gzip segments on disk, Spark in
local mode, all figures and the page. What a part says is shown as it ends, and no part may take
longer than --patience: so a run is bounded. Making the history is not counted.

``--small`` instead: what somebody waits for on the first day. The command itself, from its start to
its end, on some 200,000 events: a first report, one without any news, one with a hundredth more;
and ``make report``, once its load is over. Each of --rounds begins anew, and the least counts: what
else the machine does only adds.

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
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EVENTS_PER_TASK = 3.6
DAYS = 7
NEW_SHARE = 0.01
SHARE_MAX = 0.25
"""Maximum time of a second run with a hundredth of new data, as a share of the first run's."""
SMALL_EVENTS = 202_500
"""The first report has all but the newest hundredth of them."""
SMALL_MAX_S = {"first": 25.0, "without news": 2.0, "1 % more": 20.0, "make report": 25.0}
LOADED = "The daemon has stopped"
"""The line that ``make report`` prints after its load."""
CHILD = """
import json, sys, time
began = time.monotonic()
from tickwheel.reports import ReportSettings
from tickwheel.reports.job import run
from tickwheel.reports.session import little_to_do, started
settings = ReportSettings((sys.argv[1],), sys.argv[2])
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
    """Measure, print, and write JSON to the file of --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, help="default: 2,000,000; --small: 202,500")
    parser.add_argument("--small", action="store_true", help="the command, on a small history")
    parser.add_argument("--rounds", type=int, default=1, help="of --small")
    parser.add_argument("--master", default="local[*]")
    parser.add_argument("--memory", default="2g", help="Spark's heap")
    parser.add_argument("--dir", default="/var/tmp", help="where to work, in a folder of its own")
    parser.add_argument("--patience", type=float, default=3_600.0, help="seconds for each part")
    parser.add_argument("--check", action="store_true", help="exit code 1 when a bound is missed")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="tickwheel-reports-", dir=given.dir))
    if given.events is None:
        given.events = SMALL_EVENTS if given.small else 2_000_000
    try:
        figures = (measure_small if given.small else measure)(folder, given)
    finally:
        shutil.rmtree(folder)
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")
    return int(given.check and bool(figures["missed"]))


def measure(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Measure all three parts. A history has a gzip segment per hour."""
    limits: dict[str, Any] = {"patience_s": given.patience, "scratch": folder / "spark"}
    history, aside, out = folder / "history", folder / "aside", folder / "out"
    made = generate(history, aside, given.events, limits)
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
        "missed": ["second"] if share >= SHARE_MAX else [],
    }


def measure_small(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Print the seconds of each part in each round, and compare the least with its bound."""
    limits: dict[str, Any] = {"patience_s": given.patience, "scratch": folder / "spark"}
    by_name: dict[str, list[float]] = {name: [] for name in SMALL_MAX_S}
    kept = folder / "kept"
    generate(kept / "history", kept / "aside", given.events, limits)
    for number in range(given.rounds):
        place = folder / f"round-{number}"
        shutil.copytree(kept, place)
        for name in ("first", "without news", "1 % more"):
            if name == "1 % more":
                shutil.copytree(place / "aside", place / "history", dirs_exist_ok=True)
            began_s = time.monotonic()
            made = run(
                "-m", "tickwheel", "--json", "report", "--history", str(place / "history"),
                "--out", str(place / "out"), **limits,
            )  # fmt: skip
            made |= {"total_s": time.monotonic() - began_s, "events": made["new_events"]}
            by_name[name].append(made["total_s"])
            show(name, made, f"(load {made['load_s']:.1f} s, figures {made['figures_s']:.1f} s)")
        by_name["make report"].append(after_its_load(place / "live", **limits))
        print(
            f"{'make report':<12} {by_name['make report'][-1]:31.1f} s after its load", flush=True
        )
        shutil.rmtree(place)
    least = {name: min(seconds) for name, seconds in by_name.items()}
    for name, bound_s in SMALL_MAX_S.items():
        word = "holds" if least[name] <= bound_s else "BROKEN"
        print(f"{name:<12} {least[name]:6.1f} s, wanted: <= {bound_s:g} s  {word}")
    missed = [name for name, bound_s in SMALL_MAX_S.items() if least[name] > bound_s]
    return {"cores": os.cpu_count(), "rounds": by_name, "least": least, "missed": missed}


def after_its_load(out: Path, *, patience_s: float, scratch: Path) -> float:
    """Return the seconds of ``make report`` after its load."""
    root = Path(__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "reports.run", "--out", str(out)],
        stdout=subprocess.PIPE, text=True, cwd=root,
        env={**os.environ, "SPARK_LOCAL_DIRS": str(scratch), "PYTHONPATH": f"{root}:{root}/tests"},
    )  # fmt: skip
    loaded_s = None
    patience = threading.Timer(patience_s, process.kill)
    patience.start()
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(LOADED):
                loaded_s = time.monotonic()
        code = process.wait()
    patience.cancel()
    if code or loaded_s is None:
        raise subprocess.CalledProcessError(code, process.args)
    return time.monotonic() - loaded_s


def generate(history: Path, aside: Path, events: int, limits: dict[str, Any]) -> dict[str, Any]:
    """Generate about this number of events, the newest hundredth of them in ``aside``."""
    tasks = max(1, round(events / EVENTS_PER_TASK))
    began_s = time.monotonic()
    made = run(
        "-m", "tickwheel", "--json", "history", "generate", "--tasks", str(tasks),
        "--days", str(DAYS), "--out", str(history), **limits,
    )  # fmt: skip
    made["total_s"] = time.monotonic() - began_s
    show("generate", made, f"{made['bytes'] / 1e6:,.0f} MB")
    hold_back(history, aside, made["events"] * NEW_SHARE, made)
    return made


def hold_back(history: Path, aside: Path, events: float, made: dict[str, Any]) -> None:
    """Move the newest segments away until these contain about this number of events (by bytes)."""
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
    """Run a process. Return the JSON object that it prints last."""
    done = subprocess.run(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE, check=True, timeout=patience_s,
        env={**os.environ, "SPARK_LOCAL_DIRS": str(scratch)},
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def details(part: dict[str, Any]) -> str:
    return (
        f"(start {part['start_s']:.1f} s, load {part['load_s']:.1f} s, "
        f"figures {part['figures_s']:.1f} s)  "
        f"peak: JVM {part['jvm_peak_mb']:,} MB, Python {part['python_peak_mb']:,} MB"
    )


def show(name: str, part: dict[str, Any], more: str) -> None:
    rate = part["events"] / part["total_s"]
    seconds = f"{part['total_s']:8.1f} s"
    print(
        f"{name:<12} {part['events']:>12,} events  {seconds}  {rate:>9,.0f}/s  {more}", flush=True
    )


if __name__ == "__main__":
    sys.exit(main())
