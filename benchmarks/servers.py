"""The daemon and its peers as processes, which are started on free ports, watched and ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from benchmarks.wire import Control, connect
from tickwheel.api.frames import FrameType

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.002
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
DAEMON_COMMAND = (sys.executable, "-m", "tickwheel")

ANY_DISK = {"TICKWHEEL_DISK_REFUSE": "1", "TICKWHEEL_HISTORY_DISK_CLEAN": "1"}
"""The disk can be nearly full already. A run removes its files."""


class ServerFailed(Exception):
    """A server did not start or ended by itself."""


class Process(Protocol):
    """The part of ``subprocess.Popen`` that a server uses."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...


class Launcher(Protocol):
    """Starts the process of a server. Tests replace `launch`."""

    def __call__(
        self, command: Sequence[str], *, log: Path, folder: Path, user: str | None
    ) -> Process: ...


def launch(
    command: Sequence[str], *, log: Path, folder: Path, user: str | None, detached: bool = False
) -> Process:
    """Start ``command`` in ``folder``, and append its output to ``log``. A ``detached`` process has
    a session of its own."""
    with log.open("ab") as said:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            cwd=folder,
            env=os.environ | ANY_DISK,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
            start_new_session=detached,
        )


class Server:
    """A process with its own folder."""

    launch: Launcher = staticmethod(launch)

    port: int

    def __init__(self, folder: Path, command: Sequence[str], user: str | None = None) -> None:
        """``user`` is the user of the process, which then starts in its folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.started_s = time.perf_counter()
        self._log = folder / "log"
        self._process = self.launch(
            command, log=self._log, folder=_project() if user is None else folder, user=user
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check_alive(self) -> None:
        code = self._process.poll()
        if code is not None:
            tail = self._log.read_text(errors="replace")[-1000:]
            raise ServerFailed(f"ended with {code}: {tail}")

    def cpu_s(self) -> float:
        """Return the CPU time of all threads so far."""
        return processor_s(self.pid)

    def switches(self) -> int:
        """Return the number of context switches of its threads so far."""
        return sum(
            int(number)
            for status in Path(f"/proc/{self.pid}/task").glob("*/status")
            for number in re.findall(r"ctxt_switches:\s+(\d+)", status.read_text())
        )

    def memory_bytes(self) -> dict[str, int]:
        """Return the resident memory: ``VmRSS`` and its parts."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        matches = re.findall(r"^(VmRSS|RssAnon|RssFile|RssShmem):\s+(\d+) kB", status, re.MULTILINE)
        return {name: int(kib) * 1024 for name, kib in matches}

    def quiet_memory_bytes(self, quiet_s: float, patience_s: float = 60.0) -> dict[str, int]:
        """Return the memory after commits and checkpoints: unchanged for ``quiet_s``, with almost
        no CPU time used."""
        deadline_s = time.monotonic() + patience_s
        last, last_cpu_s, since_s = self.memory_bytes(), self.cpu_s(), time.monotonic()
        while time.monotonic() < deadline_s:
            time.sleep(quiet_s / 8)
            now, cpu_s = self.memory_bytes(), self.cpu_s()
            if abs(now["VmRSS"] - last["VmRSS"]) > 65_536 or cpu_s - last_cpu_s > 0.2:
                last, last_cpu_s, since_s = now, cpu_s, time.monotonic()
            elif time.monotonic() - since_s >= quiet_s:
                break
        return self.memory_bytes()

    def kill(self) -> None:
        """Send SIGKILL, like a crash."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """End the process and delete its files."""
        if self._process.poll() is None:
            self._ask_to_end()
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ask_to_end(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class Tickwheel(Server):
    """A daemon with default settings except the given ones, on the embedded store unless another is
    named."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str] = DAEMON_COMMAND,
        store: str | None = None,
        settings: Sequence[str] = (),
    ) -> None:
        """``settings`` as ``NAME=VALUE``."""
        ready = folder / "ready.json"
        ready.unlink(missing_ok=True)
        store = store or f"sqlite:///{(folder / 'store.db').resolve()}"
        super().__init__(
            folder,
            [
                *command,
                *("serve", "--store", store, "--listen", "tcp://127.0.0.1:0"),
                *("--ready-file", str(ready.resolve())),
                *(word for setting in settings for word in ("--set", setting)),
            ],
        )
        try:
            self._wait_for(ready)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.perf_counter() - self.started_s
        """Return the seconds from the start of the process to the ready file."""
        self.port = int(json.loads(ready.read_text())["url"].rsplit(":", 1)[1])

    def _wait_for(self, ready: Path) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not ready.exists():
            self.check_alive()
            if time.monotonic() > deadline_s:
                raise ServerFailed(f"not ready within {_START_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)

    def stats(self) -> dict[str, Any]:
        control = Control(self.port)
        try:
            counts = control.ask(FrameType.STATS)
        finally:
            control.close()
        assert isinstance(counts, dict)
        if "scheduled" not in counts:  # a build before it was named so
            counts["scheduled"] = counts["pending"]
        return counts

    def ask_group(self, topic: str, group: str, settings: dict[str, Any]) -> None:
        """Create the group with these settings."""
        control = Control(self.port)
        try:
            control.ask(FrameType.GROUP_CREATE, topic, group, settings)
        finally:
            control.close()


class Shards(Tickwheel):
    """``serve --processes`` with a daemon per shard. ``port`` is that of the first daemon."""

    def __init__(self, folder: Path, count: int, command: Sequence[str] = DAEMON_COMMAND) -> None:
        store = f"sqlite:///{(folder / 'shards').resolve()}/"
        super().__init__(folder, command, store, [f"processes={count}"])
        answer = json.loads((folder / "ready.json").read_text())
        self.ports = [int(shard["url"].rsplit(":", 1)[1]) for shard in answer["shards"]]

    def cpu_s(self) -> float:
        """Return the CPU time of the parent and all daemons."""
        return processor_s(self.pid, with_children=True)


class StoreServer(Protocol):
    """A server that keeps the tasks of a daemon."""

    @property
    def url(self) -> str: ...

    def stop(self) -> None: ...


S = TypeVar("S", bound=StoreServer)


class TickwheelOn(Tickwheel, Generic[S]):
    """A daemon on a separate server of its store. Both end together."""

    def __init__(
        self,
        folder: Path,
        server: S,
        command: Sequence[str] = DAEMON_COMMAND,
        settings: Sequence[str] = (),
        query: str = "",
    ) -> None:
        """``query`` has the settings in the store's URL."""
        self.server = server
        super().__init__(folder, command, f"{server.url}{query}", settings)

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            self.server.stop()


BEANSTALKD_MODES: dict[str, tuple[str, ...]] = {
    "no_log": (),
    "log": ("-f", "50"),
    "log_each": ("-f", "0"),
}
"""Without a log; with a log and the default fsync every 50 ms; with an fsync per command."""


class Plain(Server):
    """A server that gets its port as an argument, and is ready when it accepts a connection."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        """``command`` contains {port} and {folder}."""
        folder.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        places = {"{port}": str(self.port), "{folder}": str(folder)}
        super().__init__(folder, [places.get(word, word) for word in command])
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            self.check_alive()
            try:
                connect(self.port).close()
                return
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(_POLL_S)


class Echo(Plain):
    """An echo server."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, [sys.executable, "-m", "benchmarks.echo", "{port}"])


class Beanstalkd(Plain):
    """beanstalkd in one of its modes."""

    def __init__(self, folder: Path, program: str, mode: str) -> None:
        log = () if mode == "no_log" else ("-b", "{folder}", *BEANSTALKD_MODES[mode])
        super().__init__(folder, [program, "-l", "127.0.0.1", "-p", "{port}", *log])

    def wait_until_ready(self, count: int, timeout_s: float = 60.0) -> None:
        """Wait until ``count`` jobs are ready."""
        deadline_s = time.monotonic() + timeout_s
        with connect(self.port) as sock:
            while True:
                sock.sendall(b"stats-tube default\r\n")
                ready = re.search(rb"current-jobs-ready: (\d+)", sock.recv(1 << 16))
                if ready is not None and int(ready[1]) >= count:
                    return
                if time.monotonic() > deadline_s:
                    raise ServerFailed(f"{count} jobs are not ready within {timeout_s:.0f} s")
                time.sleep(0.05)


def find_beanstalkd() -> tuple[str, str] | None:
    """Return (path, version), or None if it is not installed."""
    program = shutil.which("beanstalkd")
    if program is None:
        return None
    done = subprocess.run([program, "-v"], capture_output=True, text=True, timeout=10, check=False)
    return program, done.stdout.strip() or "beanstalkd"


def processor_s(pid: int, *, with_children: bool = False) -> float:
    """Return the CPU time of a process so far, including its live and ended children."""
    if not with_children:
        return _ticks(_stat(pid)) / _CLOCK_TICKS
    while True:
        ended = _stat(pid)[13:15]
        alive = sum(
            _ticks_of_child(int(name), pid) for name in os.listdir("/proc") if name.isdigit()
        )
        own = _stat(pid)
        if own[13:15] == ended:  # else one ended meanwhile, and may count twice or not at all
            return (_ticks(own) + sum(map(int, ended)) + alive) / _CLOCK_TICKS


def _ticks_of_child(pid: int, parent: int) -> int:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        fields = _stat(pid)
        if int(fields[1]) == parent:
            return _ticks(fields)
    return 0


def _ticks(fields: list[str]) -> int:
    return int(fields[11]) + int(fields[12])


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def _project() -> Path:
    return Path(__file__).parents[1]
