"""Processes of the history, as a daemon starts and ends them.

Each ends with the daemon, however that ends: its standard input is a pipe from here.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence

LINE_BYTES_MAX = 64 * 1024


async def begin(
    command: Sequence[str], *, answers: bool = False, line_bytes_max: int = LINE_BYTES_MAX
) -> Process:
    """Start a process that ``answers`` on its standard output, or reports on its standard error.
    Raises OSError."""
    stdout, stderr = (PIPE, DEVNULL) if answers else (DEVNULL, PIPE)
    return await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=stdout, stderr=stderr, limit=line_bytes_max
    )


def dismiss(process: Process) -> None:
    """Let a process end when it has done its current work."""
    if process.stdin is not None:
        process.stdin.close()


def kill(process: Process | None) -> None:
    """Kill a process at once, if it has not ended."""
    if process is not None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
