"""A temporary PostgreSQL: a store of the daemon, the server of other queues, and the place where
users without a scheduler would keep delayed tasks.

Each server is a fresh cluster in a folder of its own, on a free port. Every commit is synced, as
the defaults have it; memory and the size of the log follow what PostgreSQL's documents say about
bulk loads, so that no checkpoint is forced in the middle of a run.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.servers import Server, ServerFailed, TickwheelOn, processor_s

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "synchronous_commit": "on",
    "fsync": "on",
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "30min",
}
USER = "postgres"
_PLACES = Path("/usr/lib/postgresql")
_START_TIMEOUT_S = 60.0
_POLL_S = 0.02


class Postgres(Server):
    """A cluster with only the empty database ``postgres``. Any local user can connect."""

    def __init__(self, folder: Path, binaries: str) -> None:
        # It refuses to be root: then it is the user whom its package made.
        self._user = USER if os.geteuid() == 0 else None
        folder.mkdir(parents=True, exist_ok=True)
        if self._user is not None:
            owner = pwd.getpwnam(self._user)
            os.chown(folder, owner.pw_uid, owner.pw_gid)
        data = folder / "data"
        self._initialize(folder, data, binaries)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        command = [f"{binaries}/postgres", "-D", str(data), "-p", str(self.port)]
        for name, value in SETTINGS.items():
            command += ["-c", f"{name}={value}"]
        super().__init__(folder, command, user=self._user)
        try:
            self._wait(binaries)
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        return f"postgresql://{USER}@127.0.0.1:{self.port}/postgres"

    def _initialize(self, folder: Path, data: Path, binaries: str) -> None:
        done = subprocess.run(
            [
                *(f"{binaries}/initdb", "-D", str(data), "-U", USER, "-A", "trust"),
                *("-E", "UTF8", "--no-locale", "--no-sync"),
            ],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            user=self._user,
            group=self._user,
            extra_groups=None if self._user is None else [],
        )
        if done.returncode != 0:
            raise ServerFailed(f"initdb: {done.stderr[-1000:]}")

    def _wait(self, binaries: str) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        ask = [f"{binaries}/pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(ask, check=False).returncode != 0:
            self.check_alive()
            if time.monotonic() > deadline_s:
                raise ServerFailed(f"PostgreSQL did not answer within {_START_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)

    def cpu_s(self) -> float:
        """Return the CPU time of all its processes, including ended ones."""
        return processor_s(self.pid, with_children=True)

    def _ask_to_end(self) -> None:
        """Stop the cluster with a fast shutdown, which ends its sessions."""
        self._process.send_signal(signal.SIGINT)


class TickwheelOnPostgres(TickwheelOn[Postgres]):
    """A daemon on a separate PostgreSQL. Both end together."""

    def cpu_s(self) -> float:
        """Return the CPU time of both."""
        return super().cpu_s() + self.server.cpu_s()


def find_postgres() -> tuple[str, str] | None:
    """Return (folder of its programs, versions of it and asyncpg), or None if one is missing."""
    try:
        driver = version("asyncpg")
    except PackageNotFoundError:
        return None
    on_path = shutil.which("initdb")
    places = sorted(_PLACES.glob("*/bin"), key=lambda place: float(place.parent.name), reverse=True)
    for place in [*places, *([Path(on_path).resolve().parent] if on_path else [])]:
        if all((place / name).exists() for name in ("initdb", "postgres", "pg_isready")):
            words = subprocess.run(
                [place / "postgres", "--version"], capture_output=True, text=True, check=False
            ).stdout.split()
            return str(place), f"PostgreSQL {words[2] if len(words) > 2 else '?'}, asyncpg {driver}"
    return None
