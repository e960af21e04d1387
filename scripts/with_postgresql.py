"""Run a command with a temporary PostgreSQL: ``python -m scripts.with_postgresql COMMAND...``.

``{url}`` in the command stands for the URL of an empty database. The exit code is the command's.
The server ends after the command. It has a session of its own, so Ctrl-C ends the command first.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

from benchmarks.postgres_server import USER, Postgres, find_postgres
from benchmarks.servers import launch


class Detached(Postgres):
    """A cluster that signals from the terminal do not reach."""

    launch = staticmethod(partial(launch, detached=True))


def main() -> int:
    installed = find_postgres()
    if installed is None:
        print("PostgreSQL or asyncpg is not installed", file=sys.stderr)
        return 1
    programs, versions = installed
    with (
        tempfile.TemporaryDirectory(prefix="tickwheel-postgresql-") as folder,
        Detached(Path(folder), programs) as server,
    ):
        url = f"postgresql://{USER}@127.0.0.1:{server.port}/{USER}"
        print(f"a temporary {versions.partition(',')[0]}: {url}", file=sys.stderr)
        command = [word.replace("{url}", url) for word in sys.argv[1:]]
        process = subprocess.Popen(command)  # noqa: S603  # the caller's own
        # A terminal sends SIGINT to the command as well.
        signal.signal(signal.SIGINT, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: process.send_signal(signal.SIGINT))
        return process.wait()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
