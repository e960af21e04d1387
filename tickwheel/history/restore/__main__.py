"""A restore in a process of its own, for a daemon: ``python -m tickwheel.history.restore``.

Standard input is a pipe from the daemon. Its first line is what is wanted, as JSON: the fields of
``Plan``, and ``now_ms``. Its end says that the restore shall stop, or that the daemon is gone: then
nothing is left behind. Standard output has a JSON object a line: ``step``, ``done`` and ``of``
while it works, at last ``report``, or ``error`` with ``code`` and ``message``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from typing import Any

from tickwheel.errors import TickwheelError
from tickwheel.history.restore import LISTED_MAX, Plan, Report, restore

NICE = 10
SAID_S = 0.2
"""Seconds between two reports of how far the restore is."""
PLAN_BYTES_MAX = 4 * 1024 * 1024
STDIN, STDOUT = 0, 1


class _Stopped(Exception):
    """The daemon does not want the restore any more, or is gone."""


class _Watch:
    """Reports how far the restore is; raises _Stopped."""

    def __init__(self) -> None:
        self._said_s = -SAID_S
        self._step = ""
        self._ended = threading.Event()
        threading.Thread(target=self._until_the_end, daemon=True).start()

    def _until_the_end(self) -> None:
        while os.read(STDIN, 4_096):
            pass
        self._ended.set()

    def __call__(self, step: str, done: int, of: int | None) -> None:
        if self._ended.is_set():
            raise _Stopped
        now_s = time.monotonic()
        if step != self._step or now_s - self._said_s >= SAID_S:
            self._step, self._said_s = step, now_s
            _say({"step": step, "done": done, "of": of})


def _say(fields: dict[str, Any]) -> None:
    data = json.dumps(fields).encode() + b"\n"
    try:
        while data:
            data = data[os.write(STDOUT, data) :]
    except BrokenPipeError:
        raise _Stopped from None


def _wanted() -> dict[str, Any]:
    data = b""
    while not data.endswith(b"\n"):
        more = os.read(STDIN, 65_536)
        if not more or len(data) > PLAN_BYTES_MAX:
            raise _Stopped
        data += more
    found: dict[str, Any] = json.loads(data)
    return found


def _fields(report: Report) -> dict[str, Any]:
    """The fields of the report, with at most as many names of a kind as ids."""
    fields = report.fields()
    for name in ("schedules_without_body", "transactions_lost"):
        names = fields[name]
        fields[name] = {"count": len(names), "names": names[:LISTED_MAX]}
    return fields


def main() -> int:
    """Run the restore. Exit code 0: its end was reported."""
    os.nice(NICE)
    try:
        wanted = _wanted()
        now_ms = wanted.pop("now_ms")
        ids = wanted.pop("ids")
        plan = Plan(
            **wanted | {"history": tuple(wanted["history"])},
            ids=None if ids is None else frozenset(ids),
        )
        try:
            report = asyncio.run(restore(plan, now_ms, _Watch()))
        except (TickwheelError, OSError) as error:
            code = error.code if isinstance(error, TickwheelError) else "store_error"
            _say({"error": {"code": code, "message": str(error)}})
        else:
            _say({"report": _fields(report)})
    except _Stopped:
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
