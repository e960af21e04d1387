"""A load process: ``python -m benchmarks.load``, a job as JSON on its standard input.

Says ``ready``, waits for a line, works, prints its figures as JSON. It ends itself when its
time is over or when no line comes.
"""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.scale import RUN_TIMEOUT_S

LOAD_COMMAND = (sys.executable, "-m", "benchmarks.load")


class LoadFailed(Exception):
    """A load process did not finish its job. The message has its output."""


class Load:
    """The parent's side of one load process, ready to start when constructed."""

    command: Sequence[str] = LOAD_COMMAND
    folder = Path(__file__).parents[1]

    def __init__(
        self,
        job: str,
        *,
        limit_s: int = RUN_TIMEOUT_S,
        command: Sequence[str] | None = None,
        folder: Path | None = None,
        **arguments: object,
    ) -> None:
        """The process ends itself after ``limit_s``. ``command`` is another program with the same
        interface, which is started in ``folder``."""
        self._job = job
        self._process = subprocess.Popen(
            command or self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder or self.folder,
        )
        try:
            self._say(json.dumps({"job": job, "limit_s": limit_s, "arguments": arguments}))
            self._expect("ready")
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        self._say("go")

    def result(self) -> dict[str, Any]:
        figures = json.loads(self._line())
        if "failed" in figures:
            raise LoadFailed(f"{self._job}: {figures['failed']}")
        assert isinstance(figures, dict)
        return figures

    def run(self) -> dict[str, Any]:
        self.start()
        return self.result()

    def close(self) -> None:
        """Kill the process and forget it."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LoadFailed(f"{self._job}: the load process ended ({self._process.wait()})")
        return line

    def _expect(self, word: str) -> None:
        line = self._line().strip()
        if line != word:
            raise LoadFailed(f"{self._job}: {json.loads(line).get('failed', line)}")


@contextmanager
def client_of(python: str, folder: Path) -> Iterator[None]:
    """Run the jobs of load processes with the client of another interpreter, ``python``. ``folder``
    gets the files of its search path."""
    before = Load.command, Load.folder
    folder.mkdir(exist_ok=True)
    (folder / "benchmarks").unlink(missing_ok=True)
    (folder / "benchmarks").symlink_to(Path(__file__).parent)
    Load.command, Load.folder = (python, "-m", "benchmarks.load"), folder
    try:
        yield
    finally:
        Load.command, Load.folder = before


def main(jobs: Mapping[str, Callable[..., Any]]) -> int:
    """Run the load process with one of these jobs."""
    signal.alarm(RUN_TIMEOUT_S)
    given = json.loads(sys.stdin.readline())
    signal.alarm(given["limit_s"])
    job = jobs[given["job"]](**given["arguments"])
    try:
        next(job)
        gc.collect()
        gc.freeze()
        print("ready", flush=True)
        if not sys.stdin.readline():
            return 1
        try:
            next(job)
        except StopIteration as stop:
            print(json.dumps(stop.value), flush=True)
            return 0
        raise AssertionError("a job yields once")
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), flush=True)
        return 1


if __name__ == "__main__":
    from benchmarks.jobs import JOBS

    sys.exit(main(JOBS))
