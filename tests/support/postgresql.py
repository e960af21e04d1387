"""Real PostgreSQL servers for tests, each with its own port of 127.0.0.1 and its own folder.

PostgreSQL refuses to run as root. Then the server belongs to the user of its package, who cannot
enter pytest's folders, so each server makes a folder of its own.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from support.ports import free_port
from tickwheel.persistence.postgresql import options_from
from tickwheel.persistence.postgresql.opening import PostgresAdministration

PLACES = Path("/usr/lib/postgresql")
PROGRAMS = ("initdb", "postgres")
USER = "postgres"
START_TIMEOUT_S = 60.0
DEFAULTS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "shared_buffers": "32MB",
    "max_connections": "90",
    "max_wal_size": "256MB",
    "fsync": "off",  # most tests end no server; those that do, end it by signals
    "full_page_writes": "off",
    "log_min_messages": "fatal",
}


def folder_of_programs() -> Path:
    """Return the folder of PostgreSQL's programs. Without them skip the test, or fail on CI."""
    versions = sorted(PLACES.glob("*/bin"), key=lambda place: float(place.parent.name))
    on_path = shutil.which("initdb")
    for place in [*versions[::-1], *([Path(on_path).resolve().parent] if on_path else [])]:
        if all((place / name).exists() for name in PROGRAMS):
            return place
    reason = f"PostgreSQL ({', '.join(PROGRAMS)}) is not installed"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


class PostgresServer:
    """A server that can be restarted on the same port and data."""

    def __init__(self, following: PostgresServer | None = None, **settings: str) -> None:
        """``following``: a running server of which this one is a streaming standby."""
        self._programs = folder_of_programs()
        self._user = USER if os.geteuid() == 0 else None
        self.folder = Path(tempfile.mkdtemp(prefix="tickwheel-postgresql-"))
        self.settings = DEFAULTS | settings
        self.port = free_port()
        self._schemas = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.own(self.folder)
        if following is not None:
            address = ("-h", "127.0.0.1", "-p", str(following.port), "-U", USER)
            self._run("pg_basebackup", *address, "-R", "-X", "stream", "-c", "fast", "--no-sync")
            return
        self._run("initdb", "-U", USER, "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync")

    def own(self, folder: Path) -> None:
        """Let the server's user own a folder."""
        if self._user is not None:
            owner = pwd.getpwnam(self._user)
            os.chown(folder, owner.pw_uid, owner.pw_gid)

    @property
    def as_user(self) -> dict[str, Any]:
        if self._user is None:
            return {}
        return {"user": self._user, "group": self._user, "extra_groups": []}

    def _run(self, name: str, *args: str) -> None:
        command = [str(self._programs / name), "-D", str(self.folder / "data"), *args]
        subprocess.run(
            command, check=True, capture_output=True, cwd=self.folder, timeout=60, **self.as_user
        )

    @classmethod
    @contextmanager
    def running(
        cls, following: PostgresServer | None = None, **settings: str
    ) -> Iterator[PostgresServer]:
        """Yield a running server, and remove it at the end."""
        server = cls(following, **settings)
        try:
            yield server.start()
        finally:
            server.close()

    def start(self) -> PostgresServer:
        command = [str(self._programs / "postgres"), "-D", str(self.folder / "data")]
        command += ["-p", str(self.port)]
        for name, value in self.settings.items():
            command += ["-c", f"{name}={value}"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder,
                start_new_session=True, **self.as_user,
            )  # fmt: skip
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:  # PostgreSQL has no other way to say that it is there
            try:
                self.sql("SELECT 1")
                return self
            except (OSError, asyncpg.PostgresError):
                pass
            if self._process.poll() is not None or time.monotonic() > deadline:
                log_text = (self.folder / "log").read_text(errors="replace")
                raise AssertionError(f"PostgreSQL did not start:\n{log_text[-2000:]}")
            time.sleep(0.02)  # real time: another process

    def url(self, query: str = "", *, schema: str = "", user: str = USER, db: str = USER) -> str:
        """Return the URL of a store. ``schema``: empty for a new one."""
        schema = schema or self.new_schema()
        settings = f"allow_volatile_store=1&schema={schema}{'&' if query else ''}{query}"
        return f"postgresql://{user}@127.0.0.1:{self.port}/{db}?{settings}"

    def database_url(self, database: str = USER, user: str = USER, query: str = "") -> str:
        """Return the URL of a database for any program."""
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}{query}"

    def new_schema(self) -> str:
        self._schemas += 1
        return f"t{self._schemas}"

    def sql(self, *statements: str, db: str = USER) -> list[Any]:
        """Execute statements on a new connection, each for itself. Return the last one's rows."""

        async def execute() -> list[Any]:
            connection = await asyncpg.connect(
                host="127.0.0.1", port=self.port, user=USER, database=db, timeout=20
            )
            try:
                rows: list[Any] = []
                for statement in statements:
                    rows = await connection.fetch(statement)
                return rows
            finally:
                await connection.close()

        return in_thread(execute)

    def lay_out(self, url: str) -> str:
        """Initialise the shard of this URL. Return the URL."""

        async def prepare() -> None:
            administration = PostgresAdministration(options_from(url))
            now_ms = int(time.time() * 1000)
            await administration.lay_out(await administration.look(), now_ms, watch_s=0)

        in_thread(prepare)
        return url

    def kill(self) -> None:
        """Send SIGKILL to all processes, as a crash of the machine would end them."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop: SIGINT ends all sessions (fast), SIGQUIT ends without a checkpoint (immediate)."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.stop(signal.SIGQUIT)
        self.start()

    def signal(self, number: signal.Signals) -> None:
        """Send SIGSTOP, SIGCONT or SIGKILL to all processes of the server, and wait for the end of
        those killed. Each child leads a session, so that a signal to the group would miss it."""
        if self._process is None:
            return
        first = self._process.pid
        os.kill(first, signal.SIGSTOP)  # it starts no child from now on
        children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(int(child), number)
        os.kill(first, number)
        while number == signal.SIGKILL and any(map(_is_running, children)):
            time.sleep(0.001)  # real time: another process

    def close(self) -> None:
        """End the server and remove its data."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_running(pid: str) -> bool:
    """Return whether a process exists and is not a zombie."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def in_thread(work: Any) -> Any:
    """Run a coroutine function in a thread, because this one may have an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(work())).result()
