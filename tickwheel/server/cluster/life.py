"""Which life of which process this is, and whether another one is certainly over.

A node's name and its address are what an operator says, and two machines may say the same
(clones, a load balancer's address). What a process cannot share with another one is where its
kernel was started (boot), in which namespace its number counts, and when it began. Whoever
finds no such process in that very place knows that it is over; everybody else knows nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, Self

_BOOT = "/proc/sys/kernel/random/boot_id"
_GONE = frozenset("ZXx")
"""States of a process that has ended and was not waited for yet."""
_STATE, _START = 0, 19
"""Fields of /proc/PID/stat, counted from behind the command's name."""


class Life(NamedTuple):
    """The life of one process, from its start to its end."""

    boot: str
    """The id that the kernel makes at each start of the machine."""
    namespace: str
    """The namespace in which ``pid`` counts: containers of one machine have the same boot."""
    pid: int
    start: int
    """The start in clock ticks since the machine's: numbers of processes are used again."""

    @classmethod
    def own(cls) -> Self | None:
        """The life of this process; None: the system does not tell (it is no Linux)."""
        try:
            boot = Path(_BOOT).read_text().strip()
            namespace = os.readlink("/proc/self/ns/pid")
            state = _stat(os.getpid())
        except OSError:
            return None
        if not boot or state is None:
            return None
        return cls(boot, namespace.strip("pid:[]"), os.getpid(), state[1])

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The life in a text that ``str`` made; None: the text is something else."""
        parts = text.split("/")
        if len(parts) != 4 or not all(parts) or not (parts[2] + parts[3]).isdecimal():
            return None
        return cls(parts[0], parts[1], int(parts[2]), int(parts[3]))

    def __str__(self) -> str:
        return f"{self.boot}/{self.namespace}/{self.pid}/{self.start}"


def is_over(life: str, here: Life | None) -> bool:
    """Whether the process that said ``life`` of itself has certainly ended, seen from ``here``.

    False says nothing: it may live, or be where this process cannot look.
    """
    other = Life.parse(life)
    if other is None or here is None:
        return False
    if (other.boot, other.namespace) != (here.boot, here.namespace):
        return False
    try:
        os.kill(other.pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # it is there, and somebody else's
    state = _stat(other.pid)
    # A process that is hidden from this user has no readable state: nothing is known.
    return state is not None and (state[1] != other.start or state[0] in _GONE)


def _stat(pid: int) -> tuple[str, int] | None:
    """(state, start) of a process; None: there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        fields = text.rpartition(")")[2].split()
        return fields[_STATE], int(fields[_START])
    except (OSError, LookupError, ValueError):
        return None
