"""A command on a terminal of its own, for what it does only there: ask, draw, follow."""

from __future__ import annotations

import codecs
import contextlib
import os
import pty
import re
import select
import subprocess
import time
from typing import Self

TIMEOUT_S = 60.0
AGAIN_S = 3.0
PICTURE = "\f"
"""Stands in the text where a picture begins: the cursor goes home."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|[\r\x07]")

_BEGUN = re.compile(r"\x1b([\[()][0-9;?]*)?$")
"""A control sequence whose end has not been read."""


class Terminal:
    """``read_until`` a text has been shown, ``type`` an answer, ``end``."""

    def __init__(self, command: list[str], *, lines: int = 40, columns: int = 160) -> None:
        self._parent, child = pty.openpty()
        env = {
            **os.environ, "TERM": "xterm", "LINES": str(lines), "COLUMNS": str(columns),
            "NO_COLOR": "1",
        }  # fmt: skip
        self.process = subprocess.Popen(
            command, stdin=child, stdout=child, stderr=child, env=env, start_new_session=True
        )
        os.close(child)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self.text = ""

    def read_until(self, text: str) -> str:
        """Return the output up to `text`; the next call starts after it."""
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self.text:
            assert time.monotonic() < deadline, f"{text!r} was never shown:\n{self.text}"
            assert self._read(), f"it ended without {text!r}:\n{self.text}"
        shown, _, self.text = self.text.partition(text)
        return shown + text

    def picture(self, text: str) -> str:
        """The first picture with this text, up to there."""
        return self.read_until(text).rpartition(PICTURE)[2]

    def type(self, text: str) -> None:
        os.write(self._parent, text.encode())

    def end(self, number: int | None = None) -> int:
        """Its exit code, after signal ``number`` if one is given: again and again, as a person
        would. Python loses one that comes between showing a prompt and reading."""
        deadline = time.monotonic() + TIMEOUT_S
        while number is not None and self.process.poll() is None and time.monotonic() < deadline:
            self.process.send_signal(number)
            # A full terminal would keep it from ending.
            while self._read(AGAIN_S):
                pass
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(AGAIN_S)
        while self._read():
            pass
        return self.process.wait(TIMEOUT_S)

    def _read(self, timeout_s: float = TIMEOUT_S) -> bool:
        if not select.select([self._parent], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self._parent, 65_536)
        except OSError:  # the other end is closed
            return False
        text = self._rest + self._decoder.decode(data)
        begun = _BEGUN.search(text)
        text, self._rest = (text, "") if begun is None else (text[: begun.start()], begun[0])
        self.text += _CONTROL.sub("", text.replace("\x1b[H", PICTURE))
        return bool(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(TIMEOUT_S)
        with contextlib.suppress(OSError):
            os.close(self._parent)
