"""The writer process of the history: it turns what the daemon has put into the spool into files.

Here is how it is started: its arguments, for those who start it and for itself. The daemon imports
this and nothing else of the process. ``conversion`` is the work, step by step, with ``position``
(how far it is), ``open_segments`` (what it writes and seals) and ``retention`` (what it removes).
"""

from __future__ import annotations

import argparse
import sys

SEGMENT_BYTES = 64 << 20
RETENTION_S = 72 * 3600.0
CLEAN_HOUR = 4
DISK_WARN, DISK_CLEAN = 0.75, 0.85
"""The shares of the disk from which on it is warned, and history is removed."""


def writer_command(
    history_dir: str,
    node: str,
    shard: int,
    *,
    segment_bytes: int = SEGMENT_BYTES,
    retention_s: float | None = RETENTION_S,
    bytes_max: int | None = None,
    clean_hour: int = CLEAN_HOUR,
    disk_warn: float = 1.0,
    disk_clean: float = 1.0,
) -> list[str]:
    """The command line of the writer of one daemon. Its standard input is to be a pipe that ends
    with the daemon; its standard error holds lines for the daemon's log."""
    command = [sys.executable, "-m", "tickwheel.history.writer", "--dir", history_dir]
    command += ["--node", node, "--shard", str(shard), "--segment-bytes", str(segment_bytes)]
    command += ["--clean-hour", str(clean_hour)]
    command += ["--disk-warn", repr(disk_warn), "--disk-clean", repr(disk_clean)]
    if retention_s is not None:
        command += ["--retention-s", repr(float(retention_s))]
    if bytes_max is not None:
        command += ["--bytes-max", str(bytes_max)]
    return command


def parser() -> argparse.ArgumentParser:
    """The parser of the writer's arguments. Without --retention-s, --bytes-max and --disk-clean
    nothing is removed."""
    found = argparse.ArgumentParser(
        prog="python -m tickwheel.history.writer", description=__doc__.partition("\n")[0]
    )
    found.add_argument("--dir", required=True)
    found.add_argument("--node", required=True)
    found.add_argument("--shard", type=int, default=0)
    found.add_argument("--segment-bytes", type=int, default=SEGMENT_BYTES)
    found.add_argument("--retention-s", type=float, default=None)
    found.add_argument("--bytes-max", type=int, default=None)
    found.add_argument("--clean-hour", type=int, default=CLEAN_HOUR)
    found.add_argument("--disk-warn", type=float, default=1.0)
    found.add_argument("--disk-clean", type=float, default=1.0)
    return found
