"""Named places at which a test may end the process, to prove that nothing is lost there.

Off unless ``TICKWHEEL_FAILPOINTS`` is set, for example ``commit.before=3,recovery.middle=1``:
the process is killed (SIGKILL, no clean-up) when that place is passed for the third time.
``TICKWHEEL_FAILPOINTS_LOG`` names a file to which the name of a place that killed is appended.
"""

from __future__ import annotations

import os
import signal

NAMES = (
    "commit.before",
    "commit.after",
    "deliver.before_checkpoint",
    "sqlite.checkpoint",
    "recovery.middle",
    "takeover.elected",
    "takeover.opened",
)
"""Places that a daemon passes."""
OFFLINE = (
    "reshard.begun",
    "reshard.middle",
    "reshard.copied",
    "reshard.verified",
    "reshard.given_up",
    "reshard.switching",
    "reshard.switched",
)
"""Places that commands pass which need a store that no daemon has open."""


def _parse(text: str) -> dict[str, int]:
    armed: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, count = part.partition("=")
        if name not in (*NAMES, *OFFLINE):
            known = (*NAMES, *OFFLINE)
            raise ValueError(f"TICKWHEEL_FAILPOINTS: unknown place {name!r}; known: {known}")
        armed[name] = int(count or 1)
    return armed


def _opened(path: str) -> int:
    """The log's descriptor, opened while there are descriptors: a test may use them up."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


_armed = _parse(os.environ.get("TICKWHEEL_FAILPOINTS", ""))
_log = os.environ.get("TICKWHEEL_FAILPOINTS_LOG", "")
_log_fd = _opened(_log) if _armed and _log else -1


def hit(name: str) -> None:
    """Pass the place ``name``; called once a batch at most, so it may cost a dictionary look."""
    if not _armed or name not in _armed:
        return
    _armed[name] -= 1
    if _armed[name] > 0:
        return
    if _log_fd >= 0:
        os.write(_log_fd, f"{name}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)
