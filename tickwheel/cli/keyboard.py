"""Keys that a person presses while a command draws on the terminal: one at a time, not a line.

``Keyboard`` is a context: it sets the terminal so that keys come at once and unseen, and sets it
back. Ctrl-C stays a signal. Where standard input is no terminal, or the system has no such
terminals, no key ever comes.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import re
import sys
from collections.abc import Callable
from typing import Any, Self

UP, DOWN, PAGE_UP, PAGE_DOWN, HOME, END = "up", "down", "page up", "page down", "home", "end"
ENTER, ESCAPE, BACKSPACE = "enter", "escape", "backspace"
_NAMES = {
    "\x1b[A": UP, "\x1bOA": UP, "\x1b[B": DOWN, "\x1bOB": DOWN, "\x1b[5~": PAGE_UP,
    "\x1b[6~": PAGE_DOWN, "\x1b[H": HOME, "\x1bOH": HOME, "\x1b[1~": HOME, "\x1b[F": END,
    "\x1bOF": END, "\x1b[4~": END, "\r": ENTER, "\n": ENTER, "\x1b": ESCAPE, "\x7f": BACKSPACE,
    "\x08": BACKSPACE,
}  # fmt: skip
_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Z]|.", re.DOTALL)
READ_BYTES = 1_024


def keys_of(text: str) -> list[str]:
    """The pressed keys: characters as they are, others by name; keys without a name are left
    out."""
    found = (_NAMES.get(key, key) for key in _KEY.findall(text))
    return [key for key in found if key in _NAMES.values() or key.isprintable()]


class Keyboard:
    """Calls ``pressed`` with the keys that came together, from the running event loop."""

    def __init__(self, pressed: Callable[[list[str]], None]) -> None:
        self._pressed = pressed
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._fd: int | None = None
        self._before: list[Any] = []

    def __enter__(self) -> Self:
        try:
            import termios
            import tty
        except ImportError:  # not a POSIX system
            return self
        if not sys.stdin.isatty():
            return self
        fd = sys.stdin.fileno()
        self._before = termios.tcgetattr(fd)
        tty.setcbreak(fd)
        self._fd = fd
        asyncio.get_running_loop().add_reader(fd, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        fd, self._fd = self._fd, None
        if fd is None:
            return
        import termios

        asyncio.get_running_loop().remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, self._before)

    @property
    def is_there(self) -> bool:
        """Whether keys may come: there is a terminal."""
        return self._fd is not None

    def _read(self) -> None:
        assert self._fd is not None
        try:
            data = os.read(self._fd, READ_BYTES)
        except OSError:
            data = b""
        if not data:  # the terminal is gone
            asyncio.get_running_loop().remove_reader(self._fd)
            return
        keys = keys_of(self._decode(data))
        if keys:
            self._pressed(keys)
