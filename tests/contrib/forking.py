"""Programs forked from a process that has imported their framework, which is most of their start.

Imported, this module asks; run as a program, it is the process that forks.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path

from support.forked import can_fork


class Forking:
    """A process with some modules, in which programs start."""

    def __init__(self, *modules: str) -> None:
        self._command = [sys.executable, __file__, *modules]
        self._process: subprocess.Popen[str] | None = None

    def run(
        self, code: str, *arguments: str, env: Mapping[str, str], cwd: Path, stdin: str = ""
    ) -> tuple[int, str, str]:
        """`python -c CODE ARGUMENTS`: its exit code, output and errors."""
        if not can_fork():
            done = subprocess.run(
                [sys.executable, "-c", code, *arguments], cwd=cwd, env=env, input=stdin,
                capture_output=True, text=True, check=False, timeout=120,
            )  # fmt: skip
            return done.returncode, done.stdout, done.stderr
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        asked = {"code": code, "arguments": arguments, "env": dict(env), "cwd": str(cwd)}
        self._process.stdin.write(json.dumps(asked | {"stdin": stdin}) + "\n")
        self._process.stdin.flush()
        result, out, err = json.loads(self._process.stdout.readline())
        return result, out, err

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate(timeout=20)


def _forked(asked: dict[str, str]) -> tuple[int, str, str]:
    files = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115  # closed below
    given, out, err = files
    given.write(asked["stdin"].encode())
    given.seek(0)
    pid = os.fork()
    if pid == 0:
        for number, file in enumerate(files):
            os.dup2(file.fileno(), number)
        _become(asked)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    out.seek(0)
    err.seek(0)
    texts = out.read().decode(), err.read().decode()
    for file in files:
        file.close()
    return code, *texts


def _become(asked: dict[str, str]) -> None:
    """Run the program as Python would. Never returns."""
    code = 1
    try:
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["env"])
        sys.path.insert(0, "")
        sys.argv = ["-c", *asked["arguments"]]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        exec(asked["code"], vars(importlib.import_module("__main__")))  # noqa: S102  # the program
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # as the interpreter does
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(_forked(json.loads(line))), flush=True)  # noqa: T201  # the answer
