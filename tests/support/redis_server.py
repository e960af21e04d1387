"""Real Redis servers for tests, each with its own port of 127.0.0.1 and its own folder."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.ports import free_port
from tickwheel.persistence.redis.driver import options_from
from tickwheel.persistence.redis.opening import RedisAdministration

PROGRAMS = ("redis-server", "valkey-server")
START_TIMEOUT_S = 60.0
DEFAULTS = {
    "save": '""',
    "appendonly": "yes",
    "appendfsync": "no",  # the tests end servers by signals, never by power cuts
    "maxmemory-policy": "noeviction",
    "repl-diskless-sync-delay": "0",
}


def program() -> str:
    """Return the path of redis-server. Without it skip the test, or fail on CI."""
    for name in PROGRAMS:
        result = shutil.which(name)
        if result is not None:
            return result
    reason = f"none of {', '.join(PROGRAMS)} is installed"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


PATIENT = "connect_ms=20000&call_ms=20000"
"""Options of a client that can wait: a machine may pause for a second during a test."""


class RedisServer:
    """A server process that can be restarted on the same port and data."""

    def __init__(self, folder: Path, **options: str) -> None:
        self.folder = folder
        self.options = DEFAULTS | {key.replace("_", "-"): value for key, value in options.items()}
        self.password = self.options.get("requirepass", "")
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    def url(self, query: str = "", user: str = "") -> str:
        return f"redis://{user}127.0.0.1:{self.port}/0{'?' if query else ''}{query}"

    def start(self, *, loaded: bool = True) -> RedisServer:
        self.folder.mkdir(exist_ok=True)
        command = [program(), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self.folder), "--logfile", str(self.folder / "log")]
        for name, value in self.options.items():
            command += [f"--{name}", *value.split()]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:  # Redis has no other way to say that it is there
            try:
                answer = self.call("PING")
            except OSError:
                answer = b""
            if answer.startswith((b"+PONG", b"-NOAUTH")) or (answer and not loaded):
                return self
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = (self.folder / "log").read_text(errors="replace")
                raise AssertionError(f"redis-server did not start:\n{log[-2000:]}")
            time.sleep(0.01)  # real time: another process

    def call(self, *args: str | bytes | int) -> bytes:
        """Run a command on a new connection and return the bytes of the reply."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            commands = [("AUTH", self.password)] if self.password else []
            for command in (*commands, args):
                parts = [arg if isinstance(arg, bytes) else str(arg).encode() for arg in command]
                frame = b"*%d\r\n" % len(parts)
                frame += b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
                connection.sendall(frame)
                reply = connection.recv(1 << 16)
        return reply

    def lay_out(self, shards: int = 1) -> RedisServer:
        """Initialise the shard, so that the first daemon does not wait a lease time for an
        owner."""

        async def prepare() -> None:
            for shard in range(shards):
                options = options_from(self.url(f"{PATIENT}&shard={shard}"))
                administration = RedisAdministration(options)
                now_ms = int(time.time() * 1000)
                await administration.lay_out(await administration.look(), now_ms, watch_s=0)

        with ThreadPoolExecutor(1) as thread:  # this one may have an event loop
            thread.submit(lambda: asyncio.run(prepare())).result()
        return self

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Send SIGTERM: the server saves its data and ends."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def log_tail(self) -> Path:
        """Return the append-only file that is being written."""
        return max((self.folder / "appendonlydir").glob("*.incr.aof"), key=_number)

    def restart(self) -> None:
        self.kill()
        self.start()

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def rewrite(self) -> None:
        """Rewrite the append-only file into its base. Return when it is done."""
        self.call("BGREWRITEAOF")
        while b"aof_rewrite_in_progress:0" not in self.call("INFO", "persistence"):
            time.sleep(0.01)  # real time: another process

    def snapshot(self) -> Path:
        """Return a copy of the append-only files."""
        copy = self.folder.with_name(f"{self.folder.name}-snapshot")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.folder, copy)
        return copy

    def restart_from(self, snapshot: Path | None) -> None:
        """Restart with the data of `snapshot`, or empty if it is None."""
        self.kill()
        shutil.rmtree(self.folder)
        if snapshot is not None:
            shutil.copytree(snapshot, self.folder)
        self.start()


def _number(path: Path) -> int:
    """Return the number of an append-only file: ``appendonly.aof.NUMBER.incr.aof``."""
    return int(path.name.split(".")[2])
