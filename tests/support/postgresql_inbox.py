"""A real PostgreSQL server for the tests of inboxes, on a port of its own and in its own folder.

PostgreSQL refuses to run as root: then it runs as the user of its package.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from support.ports import free_port

USER = "postgres"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "fsync": "off",  # the tests end servers by signals, never by power cuts
    "full_page_writes": "off",
    "shared_buffers": "32MB",
    "max_prepared_transactions": "4",
    "log_min_messages": "fatal",
}


def programs() -> str:
    """Return the folder of PostgreSQL's programs. Without them skip the test, or fail on CI."""
    places = Path("/usr/lib/postgresql").glob("*/bin")
    on_path = shutil.which("initdb")
    found = [*places, *([Path(on_path).resolve().parent] if on_path else [])]
    usable = [place for place in found if (place / "postgres").exists()]
    if usable:
        return str(max(usable, key=lambda place: place.parent.name))
    reason = "PostgreSQL is not installed"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


class PostgresServer:
    """A server process that can be killed and restarted on the same port and data."""

    def __init__(self) -> None:
        self._programs = programs()
        self._user = USER if os.geteuid() == 0 else None
        self.folder = Path(tempfile.mkdtemp(prefix="tickwheel-postgresql-"))
        if self._user is not None:
            owner = pwd.getpwnam(self._user)
            os.chown(self.folder, owner.pw_uid, owner.pw_gid)
        self._data = self.folder / "data"
        self._run(
            "initdb", "-D", str(self._data), "-U", USER, "-A", "trust", "-E", "UTF8",
            "--no-locale", "--no-sync",
        )  # fmt: skip
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [f"{self._programs}/{program}", *arguments],
            capture_output=True, text=True, check=program != "pg_isready", cwd=self.folder,
            user=self._user, group=self._user, extra_groups=None if self._user is None else [],
        )  # fmt: skip

    def url(self, database: str = "postgres", user: str = USER, query: str = "") -> str:
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}{query}"

    def start(self) -> PostgresServer:
        command = [f"{self._programs}/postgres", "-D", str(self._data), "-p", str(self.port)]
        for name, value in SETTINGS.items():
            command += ["-c", f"{name}={value}"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder,
                user=self._user, group=self._user,
                extra_groups=None if self._user is None else [],
            )  # fmt: skip
        deadline_s = time.monotonic() + START_TIMEOUT_S
        ask = "-q", "-h", "127.0.0.1", "-p", str(self.port)
        while self._run("pg_isready", *ask).returncode != 0:
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                log_text = (self.folder / "log").read_text(errors="replace")
                raise AssertionError(f"PostgreSQL did not start:\n{log_text[-2000:]}")
            time.sleep(0.02)  # real time: another process
        return self

    def kill(self) -> None:
        """Stop immediately, as in a crash: SIGQUIT, because SIGKILL would leave children."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(STOP_TIMEOUT_S)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
