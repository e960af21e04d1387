"""A daemon that lives at another time: Python imports this first when its folder is on the path.

The wall clock goes ``SAMPLE_CLOCK_BEHIND_MS`` behind the machine's, so that leases, retries and
sessions of a sample are as old as they were, whenever the test runs.
"""

import os
import time

_behind_ns = int(os.environ.get("SAMPLE_CLOCK_BEHIND_MS", "0")) * 1_000_000
_machine_ns = time.time_ns


def _time_ns() -> int:
    return _machine_ns() - _behind_ns


def _time() -> float:
    return _time_ns() / 1e9


if _behind_ns:
    time.time_ns = _time_ns
    time.time = _time
