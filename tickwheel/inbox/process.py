"""The process that takes tasks from an inbox for one active daemon.

The daemon writes a JSON line to its standard input: its address, a temporary secret, and the URL of
the inbox; later ``{"stop": true}``. The process writes JSON lines with the state of the taker to
its standard output. If the input ends without ``stop``, the daemon is dead and the process exits at
once, which is safe at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from typing import Any, Final, TextIO

from tickwheel.errors import TickwheelError
from tickwheel.inbox import open_inbox
from tickwheel.inbox.taker import Taker

STATE_S: Final = 0.5
"""Seconds between two reports of the state, if it has changed."""


async def report_forever(taker: Taker, out: TextIO) -> None:
    """Write the state of a taker whenever it has changed, until cancelled."""
    before: dict[str, Any] = {}
    while True:
        state = {
            "leads": taker.leads, "taken": taker.taken, "refused": taker.refused,
            "delay_s": round(taker.delay_s, 4), "trouble": taker.trouble,
        }  # fmt: skip
        if state != before:
            before = state
            out.write(json.dumps({"state": state}) + "\n")
            out.flush()
        await asyncio.sleep(STATE_S)


async def run(out: TextIO) -> int:
    """Take tasks until ``stop`` or the end of the input. Return the exit code."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    first = await reader.readline()
    if not first:
        return 0
    config = json.loads(first)
    try:
        taker = Taker(open_inbox(config["inbox"]), config["url"], config["token"])
        working = asyncio.create_task(taker.run())
        reporting = asyncio.create_task(report_forever(taker, out))
        reading = asyncio.create_task(reader.readline())
        await asyncio.wait((working, reading), return_when=asyncio.FIRST_COMPLETED)
        if reading.done() and not reading.result():
            os._exit(0)  # the daemon is dead
        taker.stop()
        await working
        reporting.cancel()
    except TickwheelError as error:
        out.write(json.dumps({"failed": f"{error.code}: {error.message}"}) + "\n")
        out.flush()
        return 1
    return 0


def main() -> int:
    # Output of imports and libraries must not mix with the lines to the daemon.
    out, sys.stdout = sys.stdout, sys.stderr
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        return asyncio.run(run(out))
    return 1


if __name__ == "__main__":
    sys.exit(main())
