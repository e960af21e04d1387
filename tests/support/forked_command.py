"""What a script starts as ``tickwheel``: the caller's side of ``forked_shell.py``.

Run as a program, without the environment's modules; it imports as little as it can.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(place: str, arguments: list[str]) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until there is somebody to get them
    variables = [f"{name}={value}" for name, value in os.environ.items()]
    words = [os.getcwd(), str(len(arguments)), *arguments, *variables]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(place)
        socket.send_fds(asking, [b"\0".join(map(os.fsencode, words))], [0, 1, 2])
        pid = int(asking.recv(64))
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: pass_on(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        (code,) = struct.unpack("<i", asking.recv(64))
    if code < 0:
        if -code != signal.SIGKILL:  # which cannot be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return int(code)


def pass_on(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # its exit code is on the way
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
