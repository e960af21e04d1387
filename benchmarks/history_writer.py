"""Cost of the delivery history: appends to the spool, and the process that writes the files.

    python -m benchmarks.history_writer [--events 3000000] [--batch 500]

Spools enqueued, delivered and acked events as a daemon would, then lets the writing process turn
them into sealed segments. Events a second by the clock, and by the processor's time (which does
not depend on what else the machine does). The files' bytes an event, open and sealed.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.environment import choose_folder
from tickwheel.history import segments
from tickwheel.history.lines import EventKind
from tickwheel.history.segments import Tally, state_folder
from tickwheel.history.spool import Spool
from tickwheel.history.writer import WriterOptions

NODE = "bench"
ID_STEP = 1024
FIRST_ID = 1 << 60
CONSUMER = "billing-1@10.0.0.3:50124"


def fill(folder: Path, batches: int, batch: int, now_ms: int) -> tuple[float, int]:
    """Return the seconds of all appends, and the spool's bytes."""
    spool = Spool(state_folder(folder, NODE, 0), 1, bytes_max=1 << 40)
    spent_s = 0.0
    ones = [1] * batch
    for n in range(batches):
        first = FIRST_ID + n * batch * ID_STEP
        ids = list(range(first, first + batch * ID_STEP, ID_STEP))
        dues = [now_ms + n + i % 50 for i in range(batch)]
        at = [now_ms + n + 60 + i % 7 for i in range(batch)]
        topic = f"orders.{n % 5}"
        began_s = time.perf_counter()
        spool.append(
            n,
            [
                [EventKind.ENQUEUED, now_ms + n, "shop@10.0.0.1:40000", ids, dues, topic, {}, None],
                [EventKind.DELIVERED, now_ms + n + 60, topic, "billing", CONSUMER, ids, ones, dues],
                [
                    EventKind.ACKED,
                    now_ms + n + 75,
                    topic,
                    "billing",
                    CONSUMER,
                    1,
                    ids,
                    ones,
                    at,
                    True,
                ],
            ],
        )
        spent_s += time.perf_counter() - began_s
    size = spool.measure()
    spool.close()
    return spent_s, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=3_000_000)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--dir", default=None, help="a folder on a real disk")
    arguments = parser.parse_args()
    batches = max(1, arguments.events // (3 * arguments.batch))
    events = batches * 3 * arguments.batch
    now_ms = int(time.time() * 1000)
    with tempfile.TemporaryDirectory(dir=choose_folder(arguments.dir)) as name:
        folder = Path(name)
        append_s, spool_bytes = fill(folder, batches, arguments.batch, now_ms)
        began_s = time.perf_counter()
        command = WriterOptions(name, NODE).command()
        subprocess.run(command, stdin=subprocess.DEVNULL, check=True)
        wall_s = time.perf_counter() - began_s
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        sealed = segments.find(folder)
        sealed_bytes = sum(segment.path.stat().st_size for segment in sealed)
        lines = sum(len(line) for line in segments.raw_lines(sealed[0].path, Tally()))
        count = sum(1 for _ in segments.raw_lines(sealed[0].path, Tally()))
    cpu_s = used.ru_utime + used.ru_stime
    figures = {
        "events": events,
        "batch": arguments.batch,
        "append_ns_per_event": round(append_s / events * 1e9),
        "spool_bytes_per_event": round(spool_bytes / events, 1),
        "writer_events_per_s": round(events / wall_s),
        "writer_events_per_cpu_s": round(events / cpu_s),
        "writer_user_s": round(used.ru_utime, 2),
        "writer_system_s": round(used.ru_stime, 2),
        "writer_rss_mib": round(used.ru_maxrss / 1024),
        "line_bytes": round(lines / count, 1),
        "sealed_bytes_per_event": round(sealed_bytes / events, 1),
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
