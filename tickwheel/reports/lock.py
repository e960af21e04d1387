"""One report at a time on one table.

The manifests alone keep two runs from both counting; the lock keeps the second from working in
vain, and from sweeping away what the first is writing. It is a file, so a killed run leaves it
behind: on the same machine that is seen by its process being gone, elsewhere by its age.
"""

from __future__ import annotations

import json
import os
import socket
import time
from types import TracebackType
from typing import Self

from tickwheel.reports.files import Files
from tickwheel.reports.settings import ReportError

STALE_S = 1_800.0
"""A run refreshes the lock with every batch; one that did not for so long is dead."""


class Lock:
    """Held inside a ``with`` block. Raises ReportError when somebody else holds it."""

    def __init__(self, files: Files, path: str) -> None:
        self._files, self._path = files, path
        self._mine = {"host": socket.gethostname(), "pid": os.getpid()}

    def __enter__(self) -> Self:
        text = self._files.read(self._path)
        if text is not None and self._held(text):
            raise ReportError(
                f"another report works on this table ({text.strip()}); if that is not so, "
                f"delete {self._path}"
            )
        self.refresh()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.delete(self._path)

    def refresh(self) -> None:
        """Say again that we are at work."""
        self._files.write(self._path, json.dumps(self._mine))

    def _held(self, text: str) -> bool:
        try:
            owner = json.loads(text)
            host, pid = str(owner["host"]), int(owner["pid"])
        except (ValueError, KeyError, TypeError):
            return False  # torn: its writer was killed
        if host == self._mine["host"]:
            return pid != self._mine["pid"] and _alive(pid)
        return self._files.age_s(self._path, time.time_ns() // 1_000_000) < STALE_S


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
