"""A real daemon in a process of its own, for tests that start, kill and restart it.

    with Daemon(tmp_path) as daemon:            # or: async with
        ... daemon.url ... daemon.kill() ... daemon.start() ...

The ports are free at the first start and kept from then on, as a real daemon's would be, so that
clients find it again. Every process is ended by its own pid; its output stays in ``log``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support import forked
from support.ports import free_port, free_ports

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0
_GLANCE_S = 0.02
"""Seconds between two checks for the ready file."""
NO_DISK_LIMITS = {"disk_refuse": 1, "history_disk_warn": 1, "history_disk_clean": 1}
"""Settings that make tests independent of how full the machine's disk is."""
ANY_DISK = {f"TICKWHEEL_{name.upper()}": str(value) for name, value in NO_DISK_LIMITS.items()}
"""The same as environment variables."""


class DaemonFailed(Exception):
    """The daemon ended, or was not ready in time; the message holds its log."""


class Daemon:
    """The folder, store and address of a daemon over any number of starts.

    `settings` are fields of ``tickwheel.server.settings.Settings`` (``lease_default_s=1``).
    `failpoints` apply to the next start only; `hits` lists those that killed the daemon.
    `files_max` limits its file descriptors, as in a container.
    """

    def __init__(
        self,
        folder: Path,
        *,
        store: str | None = None,
        http: bool = False,
        args: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        failpoints: str = "",
        files_max: int | None = None,
        **settings: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.store = store or f"sqlite:///{folder / 'store.db'}"
        self.log = folder / "daemon.log"
        self.args = args
        self.env = dict(env or {})
        self.failpoints = failpoints
        self.files_max = files_max
        self.settings = settings
        self.starts = 0
        has_tls = "tls_cert" in settings
        # Not one that the system chooses: while the daemon is away between two starts it would
        # give that to any connection. Shards take the ports behind, or any when this is 0.
        port, http_port = (0, 0) if "--processes" in args else (free_port(), free_port())
        self._listen = f"{'tls' if has_tls else 'tcp'}://127.0.0.1:{port}"
        self._http = f"{'https://' if has_tls else ''}127.0.0.1:{http_port}" if http else None
        self._ready_file = folder / "ready.json"
        self._hits_file = folder / "failpoints.log"
        self._process: forked.Process | None = None
        self._ready: dict[str, Any] = {}

    # --- what it says about itself ------------------------------------------------------

    @property
    def url(self) -> str:
        """Return ``tcp://127.0.0.1:PORT``, or ``tls://…`` with `tls_cert`. Valid after the first
        start."""
        return str(self._ready["url"])

    @property
    def http(self) -> str:
        """Return ``http://127.0.0.1:PORT``, or ``https://…``. Needs ``http=True``."""
        return str(self._ready["http"])

    @property
    def http_all(self) -> str:
        """Return the HTTP address of all shards. Needs ``--http-all`` in `args`."""
        return str(self._ready["http_all"])

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def hits(self) -> list[str]:
        """Return the failpoints that killed the daemon, in order, over all starts."""
        return self._hits_file.read_text().split() if self._hits_file.exists() else []

    def log_text(self) -> str:
        """Return the standard output and error of all starts."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def logs(self, text: str, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Return whether the log holds a text in time: it is written beside the event loop."""
        deadline = time.monotonic() + timeout_s
        while text not in self.log_text() and time.monotonic() < deadline:
            time.sleep(_GLANCE_S)  # real time: another process
        return text in self.log_text()

    # --- starting and ending ------------------------------------------------------------

    def start(self, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Start the daemon and return once it serves. Raise DaemonFailed with its log."""
        self.spawn()
        self.wait_ready(timeout_s)
        return self

    def spawn(self) -> None:
        """Start the daemon without waiting until it serves."""
        assert not self.alive, "it is running"
        self._ready_file.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self._process = forked.start(
                self._arguments(),
                env=self._environment(),
                stdin=None,
                stdout=log,
                stderr=log,
                files_max=self.files_max,
            )
        self.starts += 1

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for the ready file of this start."""
        process = self._running()
        deadline = time.monotonic() + timeout_s
        while not self._ready_file.exists():
            try:
                code = process.wait(_GLANCE_S)
            except subprocess.TimeoutExpired:
                code = None
            if code is not None:
                raise DaemonFailed(f"ended with {code} before it was ready\n{self.log_text()}")
            if time.monotonic() > deadline:
                self.kill()
                raise DaemonFailed(f"not ready after {timeout_s} s\n{self.log_text()}")
        self._ready = json.loads(self._ready_file.read_text())
        self._listen = self.url
        if self._http is not None:
            self._http = self.http.removeprefix("http://")

    def kill(self) -> None:
        """Send SIGKILL and wait for the end. Do nothing if the daemon is not running."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)

    def pause(self) -> None:
        """Send SIGSTOP; connections stay open."""
        self._running().send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._running().send_signal(signal.SIGCONT)

    def terminate(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Send SIGTERM and return the exit code."""
        self._running().send_signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait until the daemon ends by itself. Return its exit code, negative for a signal."""
        try:
            return self._running().wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise DaemonFailed(f"still running after {timeout_s} s\n{self.log_text()}") from None

    def close(self) -> None:
        """End the daemon in any state, gracefully if possible, which also saves its coverage."""
        if self.alive:
            self.go_on()
            self._running().send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running().wait(CLOSE_TIMEOUT_S)
        self.kill()

    def restart(self, *, kill: bool = True) -> Self:
        """End the daemon by SIGKILL or SIGTERM and start it at the same address."""
        if kill:
            self.kill()
        else:
            self.terminate()
        return self.start()

    # --- the same without blocking the loop ----------------------------------------------

    async def astart(self, timeout_s: float = START_TIMEOUT_S) -> Self:
        return await asyncio.to_thread(self.start, timeout_s)

    async def akill(self) -> None:
        await asyncio.to_thread(self.kill)

    async def aterminate(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        return await asyncio.to_thread(self.terminate, timeout_s)

    async def awaited(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        return await asyncio.to_thread(self.wait, timeout_s)

    async def arestart(self, *, kill: bool = True) -> Self:
        return await asyncio.to_thread(lambda: self.restart(kill=kill))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await self.astart()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)

    # --- details ------------------------------------------------------------------------

    def _running(self) -> forked.Process:
        assert self._process is not None, "it was never started"
        return self._process

    def _arguments(self) -> list[str]:
        command = ["serve", "--store", self.store]
        command += ["--listen", self._listen, "--ready-file", str(self._ready_file)]
        if self._http is not None:
            command += ["--http", self._http]
        for name, value in self.settings.items():
            command += ["--set", f"{name}={value}"]
        return [*command, *self.args]

    def _environment(self) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("TICKWHEEL_")}
        result = {**clean, **ANY_DISK, "PYTHONUNBUFFERED": "1", **self.env}
        if self.failpoints:
            result["TICKWHEEL_FAILPOINTS"] = self.failpoints
            result["TICKWHEEL_FAILPOINTS_LOG"] = str(self._hits_file)
            self.failpoints = ""
        return result


class TwoShards(Daemon):
    """Two shards; ``http`` is the HTTP of all shards."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        where = ("--listen", f"tcp://127.0.0.1:{free_ports(2)}", "--http-all", "127.0.0.1:0")
        store, args = f"sqlite:///{folder / 'shards'}/", ("--processes", "2", *where)
        super().__init__(folder, store=store, args=args, **settings)

    @property
    def http(self) -> str:
        return self.http_all
