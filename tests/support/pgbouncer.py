"""A real PgBouncer in front of a real PostgreSQL, on a port of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import pytest

from support.ports import free_port
from support.postgresql import USER, PostgresServer, in_thread

START_TIMEOUT_S = 20.0
CONFIG = """
[databases]
* = host=127.0.0.1 port={server} user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
ignore_startup_parameters = {ignored}
"""


@contextmanager
def pooled(server: PostgresServer, mode: str, user: str, ignored: str = "") -> Iterator[int]:
    """Yield the port of a PgBouncer whose connections to the server are of one user. ``mode``:
    session or transaction. ``ignored``: the startup parameters that it drops; it refuses others
    that it does not know. Without the program skip the test, or fail on CI."""
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        reason = "pgbouncer is not installed"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="tickwheel-pgbouncer-") as name:
        config, log = Path(name) / "pgbouncer.ini", Path(name) / "log"
        config.write_text(
            CONFIG.format(server=server.port, user=user, port=port, mode=mode, ignored=ignored)
        )
        server.own(Path(name))
        server.own(config)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [program, str(config)], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True, **server.as_user,
            )  # fmt: skip
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not _answers(port):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)  # real time: another process
            yield port
        finally:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    async def connect() -> bool:
        try:
            connection = await asyncpg.connect(
                host="127.0.0.1", port=port, user=USER, database=USER, timeout=5
            )
        except (OSError, asyncpg.PostgresError):
            return False
        await connection.close()
        return True

    return bool(in_thread(connect))
