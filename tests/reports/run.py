"""``make report``: a daemon that writes its history under load for a while, and its report.

The load is that of ``make observe``: several topics and groups, nacks, dead letters, cancels,
times to live, a topic that nobody consumes. Nothing but the folder named at the end is left.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from observe.prometheus import ROOT, clean_environment
from observe.run import load, say
from support.daemon import Daemon
from tickwheel.reports.session import missing_part

PAGE = "report.html"
OPTIONS = ("--stuck-after", "10s", "--slo", "*=100ms@99%")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make report", description=__doc__)
    parser.add_argument("--seconds", type=float, default=25.0, help="of load")
    parser.add_argument("--rate", type=float, default=400.0, help="tasks a second")
    parser.add_argument("--out", type=Path, default=Path("report"), help="made anew")
    options = parser.parse_args()
    out = options.out.resolve()
    if reason := missing_part() or in_the_way(out):
        sys.stderr.write(f"report: {reason}\n")
        return 1
    shutil.rmtree(out, ignore_errors=True)
    (out / "history").mkdir(parents=True)
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    with tempfile.TemporaryDirectory(prefix="tickwheel-report-") as folder:
        live(Path(folder), out / "history", options.seconds, options.rate, asked)
    say("The daemon has stopped; its history becomes a report.")
    command = [sys.executable, "-m", "tickwheel", "report", *OPTIONS]
    command += ["--history", str(out / "history"), "--out", str(out)]
    code = subprocess.run(command, cwd=ROOT, env=clean_environment(), check=False).returncode
    if code == 0:
        say(f"Open {(out / PAGE).as_uri()}")
    return code


def in_the_way(out: Path) -> str:
    """Why ``out`` must not be made anew; empty when it may."""
    with contextlib.suppress(FileNotFoundError):
        if any(out.iterdir()) and not (out / "history").is_dir():
            return f"{out} is not empty and holds no earlier report; name another --out"
    return ""


def live(folder: Path, history: Path, seconds: float, per_s: float, asked: threading.Event) -> None:
    """A daemon's whole life, with load in it. A clean stop leaves its history sealed."""
    with Daemon(folder, history_dir=history, retry_base_s=0.5) as daemon:
        with load(daemon.url, per_s):
            say(f"A daemon at {daemon.url} gets {per_s:g} tasks a second for {seconds:g} s.")
            asked.wait(seconds)
        daemon.terminate()


if __name__ == "__main__":
    sys.exit(main())
