"""Processes of the program, forked from one that has imported it already.

Two thirds of what a short-lived daemon or command costs is the import of its modules, and the
tests start more than a thousand of them. ``start`` makes a real process: it has its own
environment, files, signals and exit code, it can be killed, and it runs what ``python -m tickwheel
ARGUMENTS`` runs. ``FORKED=0`` starts each anew by that command; a run that measures coverage does,
too, and so does what must be there before Python is (``LD_PRELOAD``).

This module is both sides: imported it asks, run as a program it is the process that forks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import resource
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

PRELOADED = (
    "uvloop",
    "tickwheel.cli.app",
    "tickwheel.server.daemon",
    "tickwheel.server.http.api",
    "tickwheel.server.http.app",
    "uvicorn.lifespan.off",
    "tickwheel.server.metrics.exposition",
    "tickwheel.persistence.sqlite.store",
    "tickwheel.persistence.redis.store",
    "tickwheel.persistence.redis.driver_redis",
    "tickwheel.history.daemon",
)
END_S = 5.0
_CODE = struct.Struct("<i")
_REQUEST_BYTES_MAX = 1 << 20


class Process(Protocol):
    """The part of ``subprocess.Popen`` that both kinds of process have."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...


def start(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    stdin: IO[bytes] | None,
    stdout: IO[bytes],
    stderr: IO[bytes],
    files_max: int | None = None,
    folder: Path | None = None,
) -> Process:
    """``tickwheel ARGUMENTS`` with this environment; without ``stdin`` it reads nothing.
    ``files_max``: so many descriptors and no more, as in a container. ``folder``: where it starts,
    if not here."""
    if not can_fork() or "LD_PRELOAD" in env:
        command = [sys.executable, "-m", "tickwheel", *arguments]
        if files_max is not None:
            command = ["sh", "-c", f'ulimit -n {files_max}; exec "$@"', "sh", *command]
        return subprocess.Popen(
            command, stdin=stdin or subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=env,
            cwd=folder,
        )  # fmt: skip
    with contextlib.ExitStack() as stack:
        stdin = stdin or stack.enter_context(open(os.devnull, "rb"))
        files = [stdin.fileno(), stdout.fileno(), stderr.fileno()]
        return fork(arguments, env, files, folder or Path.cwd(), files_max)


def fork(
    arguments: Sequence[str],
    env: Mapping[str, str],
    files: Sequence[int],
    folder: Path,
    files_max: int | None = None,
) -> Forked:
    """Start a forked process. `files` are its first three descriptors."""
    return _parent().fork(arguments, env, files, folder, files_max)


def can_fork() -> bool:
    """Return whether the platform supports it: on Linux a descriptor reports a process's end."""
    return (
        hasattr(os, "pidfd_open")
        and os.environ.get("FORKED") != "0"
        and "COVERAGE_PROCESS_CONFIG" not in os.environ
        and "coverage" not in sys.modules
    )


class Forked:
    """A forked process. Its exit code comes through a pipe from its real parent."""

    def __init__(self, pid: int, ended: int) -> None:
        self.pid = pid
        self._ended = ended
        self._lock = threading.Lock()
        self._code: int | None = None

    def fileno(self) -> int:
        """Return a descriptor that is readable once the process has ended."""
        return self._ended

    def poll(self) -> int | None:
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout_s: float | None) -> int | None:
        if self._code is None and self._has_ended(timeout_s):
            with self._lock:
                if self._code is None:
                    rows = os.read(self._ended, _CODE.size)
                    assert rows, "the process that forks has ended"
                    (self._code,) = _CODE.unpack(rows)
        return self._code

    def _has_ended(self, timeout_s: float | None) -> bool:
        ended = select.poll()
        ended.register(self._ended, select.POLLIN)
        return bool(ended.poll(None if timeout_s is None else timeout_s * 1_000))

    def __del__(self) -> None:
        os.close(self._ended)


class _Parent:
    """The forking process, which lives as long as this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=theirs, cwd=Path(__file__).parents[2]
        )
        theirs.close()
        atexit.register(self._end)

    def _end(self) -> None:
        """End the forking process when no caller is left."""
        self._socket.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:  # another process also has the socket
            self._process.kill()
            self._process.wait()

    def fork(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        files: Sequence[int],
        folder: Path,
        files_max: int | None,
    ) -> Forked:
        fields = {
            "arguments": list(arguments),
            "env": dict(env),
            "cwd": str(folder),
            "files_max": files_max,
        }
        ended, theirs = os.pipe()
        try:
            with self._lock:
                request = json.dumps(fields).encode()
                socket.send_fds(self._socket, [request], [*files, theirs])
                answer = self._socket.recv(64)
        finally:
            os.close(theirs)
        assert answer, "the process that forks has ended"
        return Forked(int(answer), ended)


@functools.cache
def _parent() -> _Parent:
    return _Parent()


# --- the process that forks ----------------------------------------------------------------------


class _Forking:
    def __init__(self) -> None:
        self._asked = socket.socket(fileno=os.dup(0))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._asked, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until no caller is left. Started processes live on."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._asked:
                    self._ended(key.fd, *key.data)
                elif not self._fork():
                    return

    def _ended(self, pidfd: int, pid: int, tell: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            os.write(tell, _CODE.pack(code))
        os.close(tell)

    def _fork(self) -> bool:
        request, received, _, _ = socket.recv_fds(self._asked, _REQUEST_BYTES_MAX, 4)
        if not request:
            return False
        *files, tell = received
        pid = os.fork()
        if pid == 0:
            _become(json.loads(request), files)
        for fd in files:
            os.close(fd)
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, tell))
        self._asked.send(str(pid).encode())
        return True


def _become(asked: dict[str, Any], files: list[int]) -> None:
    """Run the program in the child, as Python would start it. Never returns."""
    code = 1
    try:
        for number, fd in enumerate(files):
            os.dup2(fd, number)
        os.closerange(3, 1 << 16)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if asked["files_max"] is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (asked["files_max"],) * 2)
        os.chdir(asked["cwd"])
        sys.path[0] = asked["cwd"]
        os.environ.clear()
        os.environ.update(asked["env"])
        time.tzset()
        sys.argv = ["tickwheel", *asked["arguments"]]
        sys.stdout.reconfigure(write_through="PYTHONUNBUFFERED" in os.environ)  # type: ignore[union-attr]
        from tickwheel import failpoints
        from tickwheel.cli import main

        importlib.reload(failpoints)  # they are read from the environment by the import
        code = main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # as the interpreter does at the end of a program
        traceback.print_exc()
    finally:
        _end(code)


def _end(code: int) -> None:
    threading._shutdown()  # the interpreter's own wait for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _make_once() -> None:
    """Build what every process of the program builds alike.

    The command-line parser, the types of the HTTP API and its document take half of a start."""
    import typer.main

    from tickwheel.cli.app import app
    from tickwheel.server.http.pages import document_bytes
    from tickwheel.server.settings import load

    parser = typer.main.get_command(app)
    parser.make_context("tickwheel", ["status"], resilient_parsing=True)
    typer.main.get_command = lambda asked: parser
    document_bytes(int(load().http_wait_max_s * 1_000))


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[0] = os.getcwd()
    with contextlib.suppress(ModuleNotFoundError):  # an extra that is not installed
        for name in PRELOADED:
            importlib.import_module(name)
        _make_once()
    gc.collect()
    gc.freeze()
    _Forking().run()


if __name__ == "__main__":
    _main()
