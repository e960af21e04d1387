"""What a daemon does to its process before it serves."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Threads that allocate at the same time, then glibc's own account of its heaps.
_ARENAS = """
import ctypes, sys, threading
from tickwheel.server.daemon import use_one_arena
if sys.argv[1] == "one":
    use_one_arena()
meeting = threading.Barrier(4)
def allocate():
    meeting.wait()
    kept = [bytearray(1_000) for _ in range(1_000)]
    meeting.wait()
threads = [threading.Thread(target=allocate) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc = ctypes.CDLL(None)
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


def _heaps(which: str, **environment: str) -> int:
    inherited = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    shown = subprocess.run(
        [sys.executable, "-c", _ARENAS, which],
        env={**inherited, **environment},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return shown.stdout.count("<heap nr=")


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc")
def test_threads_share_one_malloc_arena_by_default() -> None:
    assert _heaps("many") > 1
    assert _heaps("one") == 1
    assert _heaps("one", MALLOC_ARENA_MAX="3") > 1
