"""A temporary redis-server and a daemon on it, for the Redis cases.

Every server has a free port and a fresh folder. Both sides of a comparison get the same settings:
those that Tickwheel asks for, an append-only file synced each second. Its rewrite is off, which
would start in the middle of some runs and not of others.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.servers import Server, ServerFailed, TickwheelOn
from benchmarks.wire import connect

PROGRAMS = ("redis-server", "valkey-server")
SETTINGS = {
    "bind": "127.0.0.1",
    "save": "",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "auto-aof-rewrite-percentage": "0",
    "maxmemory-policy": "noeviction",
}
_START_TIMEOUT_S = 20.0
_POLL_S = 0.005


class Redis(Server):
    """A redis-server."""

    def __init__(self, folder: Path, program: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        command = [program, "--port", str(self.port), "--dir", str(folder)]
        for name, value in SETTINGS.items():
            command += [f"--{name}", value]
        super().__init__(folder, command)
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def info(self) -> dict[str, str]:
        """Return the complete ``INFO``."""
        with connect(self.port) as sock:
            sock.sendall(b"INFO everything\r\n")
            data = sock.recv(1 << 16)
            size = int(data[1 : data.index(b"\r\n")])
            while len(data) < size + data.index(b"\r\n") + 4:
                data += sock.recv(1 << 16)
        rows = (row.split(":", 1) for row in data.decode().splitlines() if ":" in row)
        return dict(rows)

    def pttl_ms(self, key: str) -> int:
        """Return the time to live of a key in ms; negative if it is missing or does not expire."""
        with connect(self.port) as sock:
            sock.sendall(f"PTTL {key}\r\n".encode())
            return int(sock.recv(64)[1:])

    def _wait(self) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            self.check_alive()
            try:
                with connect(self.port) as sock:
                    sock.sendall(b"PING\r\n")
                    if sock.recv(64).startswith(b"+PONG"):
                        return
            except OSError:
                pass
            if time.monotonic() > deadline_s:
                raise ServerFailed(f"redis-server did not answer within {_START_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)


class TickwheelOnRedis(TickwheelOn[Redis]):
    """A daemon on a separate redis-server. Both end together."""


def find_redis() -> tuple[str, str] | None:
    """Return (path, version), or None if it is not installed."""
    for name in PROGRAMS:
        program = shutil.which(name)
        if program is not None:
            answer = subprocess.run(
                [program, "--version"], capture_output=True, text=True, timeout=10, check=False
            ).stdout
            number = next((word[2:] for word in answer.split() if word.startswith("v=")), "?")
            return program, f"{name} {number}"
    return None


def describe_redis(server_version: str) -> dict[str, Any]:
    """Return the versions of the server and the libraries."""
    versions = {"server": server_version}
    for name in ("redis", "hiredis", "uvloop"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    return versions
