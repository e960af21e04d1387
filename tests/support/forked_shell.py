"""A shell's ``tickwheel`` that is forked: for scripts that call it many times.

``commands`` puts nothing but a small program in the place of the command. It hands its arguments,
folder, environment and files to this process, which forks what runs (``forked.py``), and from then
on stands for it: signals go through, its end is the other's, and the exit code as well. So pipes,
jobs and redirections of a script work as they do with the command itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from support import forked

_PROGRAM = Path(__file__).with_name("forked_command.py")
_REQUEST_BYTES_MAX = 1 << 20
_CODE = struct.Struct("<i")


@contextlib.contextmanager
def commands() -> Iterator[list[str]]:
    """Return the start of a command line that runs ``tickwheel``.

    Processes that outlive their caller are killed."""
    if not forked.can_fork():
        yield [sys.executable, "-m", "tickwheel"]
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        place = f"{folder}/forks"
        listener.bind(place)
        listener.listen(64)
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        try:
            yield [sys.executable, "-I", "-S", str(_PROGRAM), place]
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread


def _accept(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was closed
        while True:
            asking, _ = listener.accept()
            threading.Thread(target=_stand_in, args=(asking,), daemon=True).start()


def _stand_in(asking: socket.socket) -> None:
    with asking:
        process = _fork(asking)
        asking.send(str(process.pid).encode())
        watched = select.poll()
        for item in (asking, process):
            watched.register(item, select.POLLIN)
        watched.poll()
        if process.poll() is None:  # the caller was killed, and so is the process it stands for
            process.kill()
        with contextlib.suppress(BrokenPipeError):
            asking.send(_CODE.pack(process.wait()))


def _fork(asking: socket.socket) -> forked.Forked:
    said, files, _, _ = socket.recv_fds(asking, _REQUEST_BYTES_MAX, 3)
    try:
        folder, count, *words = (os.fsdecode(word) for word in said.split(b"\0"))
        arguments, variables = words[: int(count)], words[int(count) :]
        env = dict(variable.split("=", 1) for variable in variables)
        return forked.fork(arguments, env, files, Path(folder))
    finally:
        for fd in files:
            os.close(fd)
