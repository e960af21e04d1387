"""``tickwheel`` as a person or a script calls it: every call is a process of its own."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import IO, Any

from support import forked, forked_shell
from support.daemon import Daemon
from support.waiting import until
from tickwheel.client import Stats
from tickwheel.sync import Client

TIMEOUT_S = 60.0
NOWHERE: Any = SimpleNamespace(url="tcp://127.0.0.1:1", log_text=str)
"""A daemon for commands that ask none."""


class Cli:
    """``tickwheel`` for one daemon; every call is a process of its own."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def command(self, *arguments: str) -> list[str]:
        """For a process that a test signals."""
        return [*tickwheel(), "--url", self._daemon.url, *arguments]

    def alone(self, *arguments: str) -> list[str]:
        """For a process that is not forked: one with a terminal, or one that a test looks at."""
        return [sys.executable, "-m", "tickwheel", "--url", self._daemon.url, *arguments]

    def run(
        self, *arguments: str, stdin: bytes = b"", expect: int = 0
    ) -> subprocess.CompletedProcess[bytes]:
        done = _run(["--url", self._daemon.url, *arguments], stdin)
        answer = done.stdout + b"\n" + done.stderr
        assert done.returncode == expect, answer.decode() + self._daemon.log_text()
        assert b"Traceback" not in answer, answer.decode()
        return done

    def code(self, *arguments: str) -> int:
        """The exit code of a call that may fail."""
        return _run(["--url", self._daemon.url, *arguments], b"").returncode

    def json(self, *arguments: str, stdin: bytes = b"", expect: int = 0) -> list[dict[str, Any]]:
        """The objects that a call prints with ``--json``."""
        done = self.run(*arguments, "--json", stdin=stdin, expect=expect)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def one(self, *arguments: str, stdin: bytes = b"") -> dict[str, Any]:
        answer = self.json(*arguments, stdin=stdin)
        assert len(answer) == 1, answer
        return answer[0]

    def fails(self, code: int, *arguments: str) -> str:
        """The one line that a call which fails so says."""
        error = self.run(*arguments, expect=code).stderr.decode()
        assert error.count("\n") == 1, error
        return error


def emptied(daemon: Daemon) -> Daemon:
    """A daemon that tests share: it runs, and the topics of earlier tests are deleted."""
    if not daemon.alive:
        daemon.start()
    with Client(daemon.url) as client:
        for topic in client.stats().topics:
            client.delete_topic(topic, force=True)
        until(lambda: not holds(client.stats()), log=daemon.log_text)
    return daemon


def holds(stats: Stats) -> bool:
    return bool(stats.topics or stats.scheduled or stats.ready or stats.in_flight)


@functools.cache
def tickwheel() -> tuple[str, ...]:
    """Return the start of a command line that forks ``tickwheel``."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return tuple(stack.enter_context(forked_shell.commands()))


def _run(arguments: Sequence[str], stdin: bytes) -> subprocess.CompletedProcess[bytes]:
    with TemporaryFile() as stdout, TemporaryFile() as stderr:
        with _piped(stdin) as given:
            process = forked.start(
                arguments, env=os.environ, stdin=given, stdout=stdout, stderr=stderr
            )
        try:
            code = process.wait(TIMEOUT_S)
        finally:
            process.kill()
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(arguments, code, stdout.read(), stderr.read())


@contextlib.contextmanager
def _piped(content: bytes) -> Iterator[IO[bytes]]:
    """A pipe that ``content`` comes out of; a command distinguishes it from a file."""
    reading, writing = os.pipe()

    def write() -> None:
        with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "wb") as out:
            out.write(content)

    threading.Thread(target=write, daemon=True).start()
    with os.fdopen(reading, "rb") as given:
        yield given
