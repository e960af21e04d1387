"""One report at a time on one table.

The manifests alone keep two runs from both counting; the lock keeps the second from working in
vain, and from sweeping away what the first is writing or still reading its figures from. It is a
file, so a killed run leaves it behind: on the same machine that is seen by its process being
gone, elsewhere by its age.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from types import TracebackType
from typing import Self

from tickwheel.reports.files import Files
from tickwheel.reports.settings import ReportError

_HELD: set[object] = set()
"""The locks of this process."""
STALE_S = 1_800.0
"""A run refreshes the lock with every batch; one that did not for so long is dead."""


class Lock:
    """Held inside a ``with`` block. Raises ReportError when somebody else holds it."""

    def __init__(self, files: Files, path: str) -> None:
        self._files, self._path = files, path
        self._mine = {
            "host": socket.gethostname(), "pid": os.getpid(), "id": uuid.uuid4().hex[:12],
        }  # fmt: skip

    def __enter__(self) -> Self:
        text = self._files.read(self._path)
        if text is not None and not self._held(text):
            self._files.delete(self._path)
        if not self._files.create(self._path, json.dumps(self._mine)):
            raise self._refusal()
        _HELD.add(self._mine["id"])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _HELD.discard(self._mine["id"])
        if self._is_ours():
            self._files.delete(self._path)

    def refresh(self) -> None:
        """Say again that we are at work. Raises ReportError when another took us for dead."""
        if not self._is_ours():
            raise self._refusal()
        self._files.write(self._path, json.dumps(self._mine))

    def _is_ours(self) -> bool:
        text = self._files.read(self._path)
        return text is not None and text == json.dumps(self._mine)

    def _refusal(self) -> ReportError:
        owner = (self._files.read(self._path) or "unknown").strip()
        return ReportError(
            f"another report works on this table ({owner}); if that is not so, delete {self._path}"
        )

    def _held(self, text: str) -> bool:
        try:
            owner = json.loads(text)
            host, pid = str(owner["host"]), int(owner["pid"])
        except (ValueError, KeyError, TypeError):
            return False  # torn: its writer was killed
        if host == self._mine["host"]:
            # Our own number may have been another's before the machine was started anew.
            return owner.get("id") in _HELD if pid == self._mine["pid"] else _alive(pid)
        return self._files.age_s(self._path, time.time_ns() // 1_000_000) < STALE_S


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
