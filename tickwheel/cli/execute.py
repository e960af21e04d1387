"""One command for one delivery: the body on its stdin, the verdict by its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import dataclass

from tickwheel.client import Delivery


@dataclass(frozen=True)
class Execution:
    """How a command ended; a negative code is the number of the signal that ended it."""

    exit_code: int


def reason_of(done: Execution) -> str:
    """What the task's record will say about the failure."""
    if done.exit_code >= 0:
        return f"exit code {done.exit_code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-done.exit_code).name}"
    return f"signal {-done.exit_code}"


def environment(delivery: Delivery) -> dict[str, str]:
    """What the command is told beside the body."""
    return {
        **os.environ,
        "TICKWHEEL_ID": str(delivery.id),
        "TICKWHEEL_TOPIC": delivery.topic,
        "TICKWHEEL_ATTEMPT": str(delivery.attempt),
        "TICKWHEEL_DUE_MS": str(delivery.due_ms),
    }


async def execute(cmd: str, delivery: Delivery, *, output_to_stderr: bool) -> Execution:
    """Run ``sh -c CMD`` to its end. Cancelled: the command and its children are killed.

    It has a process group of its own, so that Ctrl-C lets it finish what it has begun.
    """
    process = await asyncio.create_subprocess_shell(
        cmd,
        stdin=asyncio.subprocess.PIPE,
        stdout=sys.stderr.fileno() if output_to_stderr else None,
        env=environment(delivery),
        start_new_session=True,
    )
    try:
        await process.communicate(delivery.body)
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    assert process.returncode is not None
    return Execution(process.returncode)
