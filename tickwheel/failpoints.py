"""Named points at which a test can kill the process, to prove that nothing is lost there.

They have no effect unless ``TICKWHEEL_FAILPOINTS`` is set. With
``commit.before=3,recovery.middle=1``, the process kills itself (SIGKILL, no clean-up) when it
passes ``commit.before`` for the third time or ``recovery.middle`` for the first time. The name of
that point is appended to the file that ``TICKWHEEL_FAILPOINTS_LOG`` names.
"""

from __future__ import annotations

import os
import signal

NAMES = (
    "commit.before",
    "commit.after",
    "deliver.before_checkpoint",
    "sqlite.checkpoint",
    "postgresql.copied",
    "recovery.middle",
    "takeover.elected",
    "takeover.opened",
)
"""Failpoints of the daemon."""
OFFLINE = (
    "reshard.begun",
    "reshard.middle",
    "reshard.copied",
    "reshard.verified",
    "reshard.given_up",
    "reshard.switching",
    "reshard.switched",
)
"""Failpoints of commands that work on a store offline."""


def _parse(text: str) -> dict[str, int]:
    armed: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, count = part.partition("=")
        if name not in (*NAMES, *OFFLINE):
            names = ", ".join((*NAMES, *OFFLINE))
            raise ValueError(f"TICKWHEEL_FAILPOINTS: {name!r} is not one of {names}")
        armed[name] = int(count or 1)
    return armed


def _open_log(path: str) -> int:
    """Return a descriptor of the log. It is opened at the start, because a test may later exhaust
    the file descriptors."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


_armed = _parse(os.environ.get("TICKWHEEL_FAILPOINTS", ""))
_log = os.environ.get("TICKWHEEL_FAILPOINTS_LOG", "")
_log_fd = _open_log(_log) if _armed and _log else -1


def hit(name: str) -> None:
    """Kill the process if the failpoint ``name`` is armed and its count is reached. This is called
    at most once for each batch, so a dictionary lookup is cheap enough."""
    if not _armed or name not in _armed:
        return
    _armed[name] -= 1
    if _armed[name] > 0:
        return
    if _log_fd >= 0:
        os.write(_log_fd, f"{name}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)
