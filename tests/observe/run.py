"""``make observe``: a daemon, load and a Prometheus, until Ctrl-C.

Everything listens on free ports of 127.0.0.1 and is ended with this program. Grafana is not
started; ``grafana/README.md`` says how to point one at this Prometheus.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from observe.prometheus import ROOT, Prometheus, clean_environment, missing
from support.daemon import Daemon


def main() -> int:
    parser = argparse.ArgumentParser(prog="make observe", description=__doc__)
    parser.add_argument("--rate", type=float, default=200.0, help="tasks a second")
    parser.add_argument("--seconds", type=float, help="end by itself after so long")
    options = parser.parse_args()
    if reason := missing():
        sys.stderr.write(f"observe: {reason}\n")
        return 1
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    with (
        tempfile.TemporaryDirectory(prefix="tickwheel-observe-") as folder,
        observed_daemon(Path(folder) / "daemon") as daemon,
        load(daemon.url, options.rate),
        Prometheus(Path(folder) / "prometheus", [daemon.http.removeprefix("http://")]) as server,
    ):
        say(f"daemon      {daemon.url}")
        say(f"history     {daemon.settings['history_dir']}")
        say(f"console     {daemon.http}/console/")
        say(f"metrics     {daemon.http}/metrics")
        say(f"Prometheus  {server.url}/graph")
        say(f"alerts      {server.url}/alerts")
        say("Ctrl-C ends all of them.")
        asked.wait(options.seconds)
    return 0


def observed_daemon(folder: Path) -> Daemon:
    """One that has a value for every metric: with a history and daily backups."""
    history = {"history_dir": folder / "history", "backup_daily_hour": 0}
    return Daemon(folder, http=True, **history)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def load(url: str, per_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """The load as a process of its own. It gets no Ctrl-C: this program ends it."""
    command = [sys.executable, "-m", "observe.load", url, str(per_s)]
    environment = clean_environment()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    sys.exit(main())
