"""``tickwheel`` as a person or a script calls it: every call is a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from support.daemon import Daemon

TIMEOUT_S = 60.0


class Cli:
    """``tickwheel`` for one daemon; every call is a process of its own."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "tickwheel", "--url", self._daemon.url, *arguments]

    def run(
        self, *arguments: str, stdin: bytes = b"", expect: int = 0
    ) -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run(
            self.command(*arguments), input=stdin, capture_output=True, timeout=TIMEOUT_S,
            check=False,
        )  # fmt: skip
        said = done.stdout + b"\n" + done.stderr
        assert done.returncode == expect, said.decode() + self._daemon.log_text()
        assert b"Traceback" not in said, said.decode()
        return done

    def json(self, *arguments: str, stdin: bytes = b"", expect: int = 0) -> list[dict[str, Any]]:
        """The objects that a call prints with ``--json``."""
        done = self.run(*arguments, "--json", stdin=stdin, expect=expect)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def one(self, *arguments: str, stdin: bytes = b"") -> dict[str, Any]:
        found = self.json(*arguments, stdin=stdin)
        assert len(found) == 1, found
        return found[0]

    def fails(self, code: int, *arguments: str) -> str:
        """The one line that a call which fails so says."""
        error = self.run(*arguments, expect=code).stderr.decode()
        assert error.count("\n") == 1, error
        return error
