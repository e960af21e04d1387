"""Requests about single tasks, by ids in random order: many ids a frame, few frames unanswered.

Every answer is checked when the clock has stopped: a word that says something else than success
ends the run.
"""

from __future__ import annotations

import array
import random
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from benchmarks import payload
from benchmarks.consume import GROUP
from benchmarks.payload import TOPIC
from benchmarks.pump import READ_BYTES, Stream, timed_pump
from benchmarks.scale import CONNECTIONS, RUN_TIMEOUT_S
from benchmarks.wire import OK, Control, FrameCounter, results, unpacker
from tickwheel.api.frames import FrameType
from tickwheel.protocol import encode

Job = Generator[None, None, dict[str, Any]]

_DELIVER = int(FrameType.DELIVER)
_SUBSCRIPTIONS = 4
KEYS_UNANSWERED = 2_000
_CREDIT_REQUEST, _FIRST_NACK = 100, 200
"""First request number, above those of other requests on the connection."""
_PREFETCH_MAX = 65_535
_LEASE_MS = 3_600_000
_RETRY_MS = 3_600_000
"""Longer than a run, so that leases do not end and tasks do not return during it."""

SUCCESS: dict[str, Callable[[Any], bool]] = {
    "reschedule": lambda answer: answer[1] == "scheduled",
    "run_now": lambda answer: answer[1] == "scheduled",
    "cancel": lambda answer: answer[1] == "cancelled",
    "lookup": lambda answer: answer["state"] == "scheduled",
}


def by_id(
    port: int,
    ids_file: str,
    verb: str,
    ids_per_frame: int,
    window: int,
    seed: int,
    start: int = 0,
    count: int | None = None,
) -> Job:
    """Send a verb for ``count`` ids of the file, from index ``start`` of the order shuffled with
    ``seed``."""
    ids = array.array("q")
    ids.frombytes(Path(ids_file).read_bytes())
    shuffled = list(ids)
    random.Random(seed).shuffle(shuffled)
    some = shuffled[start : None if count is None else start + count]
    if verb == "reschedule":
        load = payload.reschedule_frames(some, ids_per_frame, seed)
    else:
        load = payload.id_frames(FrameType[verb.upper()], some, ids_per_frame)
    stream = Stream(Control(port).sock, load, window, FrameCounter())
    yield
    figures = timed_pump([stream])
    right = SUCCESS[verb]
    done = sum(right(item) for answer in results(stream.replies) for item in answer)
    assert done == len(some), f"{verb}: {done} of {len(some)} succeeded"
    return {**figures, "count": done}


def by_key(port: int, verb: str, fill_seed: int, fill_count: int, count: int, seed: int) -> Job:
    """Send a verb for random keys of a filling, one request per key."""
    share = fill_count // CONNECTIONS
    some = random.Random(seed).sample(range(share), count // CONNECTIONS)
    keys = [payload.key_of(fill_seed + c, index) for index in some for c in range(CONNECTIONS)]
    load = payload.key_frames(FrameType[verb.upper()], keys)
    stream = Stream(Control(port).sock, load, KEYS_UNANSWERED, FrameCounter())
    yield
    figures = timed_pump([stream])
    answers = list(results(stream.replies))
    right = {"cancel": lambda a: a[0][1] == "cancelled", "lookup": lambda a: a[0]["key"]}[verb]
    done = sum(len(answer) == 1 and bool(right(answer)) for answer in answers)
    assert done == len(keys), f"{verb} by key: {done} of {len(keys)} succeeded"
    return {**figures, "count": done}


def nack(port: int, count: int, ids_per_frame: int, window: int, seed: int) -> Job:
    """Take ``count`` due deliveries, then nack them in random order."""
    control = Control(port)
    for number in range(1, _SUBSCRIPTIONS + 1):
        options = {"lease_ms": _LEASE_MS}
        control.ask(FrameType.SUBSCRIBE, number, TOPIC, GROUP, 0, options)
    held = _take(control, count)
    random.Random(seed).shuffle(held)
    load = payload.nack_frames(GROUP, held, ids_per_frame, _RETRY_MS, _FIRST_NACK)
    stream = Stream(control.sock, load, window, FrameCounter())
    yield
    figures = timed_pump([stream])
    done = sum(
        word == "retrying" for answer in results(stream.replies, _FIRST_NACK) for word in answer
    )
    assert done == count, f"nack: {done} of {count} succeeded"
    return {**figures, "count": done}


def _take(control: Control, count: int) -> list[tuple[int, int, int]]:
    """Return the receipts (id, epoch, attempt) of the first ``count`` deliveries."""
    credit = min(_PREFETCH_MAX, -(-count // _SUBSCRIPTIONS))
    assert credit * _SUBSCRIPTIONS >= count, f"{count} are more than the subscriptions may hold"
    for number in range(1, _SUBSCRIPTIONS + 1):
        frame = (int(FrameType.PREFETCH), _CREDIT_REQUEST + number, number, credit)
        control.sock.sendall(encode(frame))
    held: list[tuple[int, int, int]] = []
    deadline_s, answers, reader = time.monotonic() + RUN_TIMEOUT_S, 0, unpacker()
    while len(held) < count or answers < _SUBSCRIPTIONS:
        assert time.monotonic() < deadline_s, f"{len(held)} of {count} deliveries"
        reader.feed(control.sock.recv(READ_BYTES))
        for frame in reader:
            if frame[0] == _DELIVER:
                held += [(row[0], frame[2], row[1]) for row in frame[4]]
            else:
                assert frame[0] == OK, f"{frame!r:.200}"
                answers += 1
    assert len(held) == count, f"{len(held)} deliveries instead of {count}"
    return held
