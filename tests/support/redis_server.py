"""Real Redis servers for tests: own port of 127.0.0.1, own data directory, ended by pid."""

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
from tickwheel.persistence.redis.opening import lay_out, look

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
    """The server's program; without one a test is skipped, on CI it fails."""
    for name in PROGRAMS:
        found = shutil.which(name)
        if found is not None:
            return found
    reason = f"none of {', '.join(PROGRAMS)} is installed"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


class RedisServer:
    """One server process, which may be started again on the same port and data."""

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
        """One command on a connection of its own; the reply's bytes as they come."""
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
        """So that the first daemon of a shard does not wait, for a leader's lease, whether an owner
        of the empty store comes back."""

        async def prepare() -> None:
            for shard in range(shards):
                options = options_from(self.url(f"shard={shard}"))
                await lay_out(options, await look(options), int(time.time() * 1000), watch_s=0)

        with ThreadPoolExecutor(1) as thread:  # this one may have an event loop
            thread.submit(lambda: asyncio.run(prepare())).result()
        return self

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """As a crash would: no last words."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """As an operator would: it writes what it has and ends."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def log_tail(self) -> Path:
        """The file to which it appends what it does."""
        return max((self.folder / "appendonlydir").glob("*.incr.aof"), key=_number)

    def restart(self) -> None:
        self.kill()
        self.start()

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def rewrite(self) -> None:
        """Put everything into the base of the append-only file; returns when it is done."""
        self.call("BGREWRITEAOF")
        while b"aof_rewrite_in_progress:0" not in self.call("INFO", "persistence"):
            time.sleep(0.01)  # real time: another process

    def snapshot(self) -> Path:
        """A copy of the append-only files as they are now."""
        copy = self.folder.with_name(f"{self.folder.name}-snapshot")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.folder, copy)
        return copy

    def restart_from(self, snapshot: Path | None) -> None:
        """Come back as of ``snapshot``; with None, empty."""
        self.kill()
        shutil.rmtree(self.folder)
        if snapshot is not None:
            shutil.copytree(snapshot, self.folder)
        self.start()


def _number(path: Path) -> int:
    """Which of the append-only files it is: ``appendonly.aof.NUMBER.incr.aof``."""
    return int(path.name.split(".")[2])
