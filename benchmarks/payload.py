"""Load that is encoded before the clock starts, with the same bodies and due times for all systems.

Knows both protocols' requests and no socket. A stream of requests is one block of bytes and
where each request ends in it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from benchmarks.scale import BODY_BYTES, DUE_SPAN_S
from tickwheel.api.frames import FrameType
from tickwheel.protocol import encode

TOPIC = "bench"
FIRST_REQUEST = 2
"""HELLO is request 1."""
_BODIES = 1_024
"""Number of different bodies, so that no system gains from repeated ones."""
_CALLS_MADE = 200

T = TypeVar("T")
Job = Generator[None, None, dict[str, Any]]
"""See ``jobs.py``."""


class Encoded(NamedTuple):
    """Encoded requests. ``ends[i]`` is the end of request i in ``blob``."""

    blob: bytes
    ends: list[int]


def shares(count: int, connections: int) -> list[int]:
    """Return the number of requests of each connection, in total ``count``."""
    share, odd = divmod(count, connections)
    return [share + (index < odd) for index in range(connections)]


def bodies(seed: int) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(BODY_BYTES // 2).hex().encode() for _ in range(_BODIES)]


def delays_s(count: int, seed: int, span_s: float = DUE_SPAN_S) -> list[float]:
    """Return delays spread evenly over the span, in random order. No task comes due during a
    run."""
    source = random.Random(seed)
    return [source.uniform(span_s / 720, span_s) for _ in range(count)]


def in_calls(make: Callable[[int], T], count: int, per_call: int) -> Iterator[T]:
    """Return the inputs of a run's calls, made by ``make(number)`` before the clock starts. A long
    run repeats the first inputs, because all of them would not fit into memory."""
    calls, odd = divmod(count, per_call)
    assert not odd, f"{count} tasks are not whole calls of {per_call}"
    made = [make(number) for number in range(min(calls, _CALLS_MADE))]
    return (made[number % len(made)] for number in range(calls))


def key_frames(kind: FrameType, keys: Sequence[str]) -> Encoded:
    """Return requests with one key each."""
    requests = enumerate(keys, FIRST_REQUEST)
    named = ((number, {"topic": TOPIC, "key": key}) for number, key in requests)
    return _join([encode((int(kind), number, None, selection)) for number, selection in named])


def _join(parts: Sequence[bytes]) -> Encoded:
    return Encoded(b"".join(parts), list(accumulate(map(len, parts))))


def key_of(seed: int, index: int) -> str:
    """Return the key of a task in a stream, as a shop could choose it."""
    return f"order-{seed}-{index:07}"


ORDER_KEYS = 10_000
TENANTS = 100
SHAPES: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "order": lambda seed, i: {"order_key": f"customer-{i % ORDER_KEYS}"},
    "order_each": lambda seed, i: {"order_key": key_of(seed, i)},
    "tag_each": lambda seed, i: {"tag": key_of(seed, i)},
    "tenant": lambda seed, i: {"properties": {"tenant": i % TENANTS}},
    "half": lambda seed, i: {"tag": "half" if i % 2 else "other"},
}
"""Returns the options of a stream's task, by the stream's seed and the task's number."""


def enqueue_frames(
    count: int,
    tasks_per_frame: int,
    window: int,
    seed: int,
    due_ms: int | None = None,
    *,
    keyed: bool = False,
    shape: str | None = None,
) -> Encoded:
    """ENQUEUE frames of ``count`` tasks, due over the span or all at ``due_ms``; ``keyed``: each
    has a key of its own; ``shape``: of those that are due at one moment, one of ``SHAPES``.

    The floor of each is right for a client that never has more than ``window`` requests from
    its lowest unanswered one up, which is what the pump does.
    """
    texts = bodies(seed)
    delays = delays_s(count, seed) if due_ms is None else []
    parts: list[bytes] = []
    for number, start in enumerate(range(0, count, tasks_per_frame)):
        indexes = range(start, min(count, start + tasks_per_frame))
        tasks: list[tuple[object, ...]]
        if keyed:
            tasks = [
                (TOPIC, texts[i % _BODIES], int(delays[i] * 1000), {"key": key_of(seed, i)})
                for i in indexes
            ]
        elif due_ms is None:
            tasks = [(TOPIC, texts[i % _BODIES], int(delays[i] * 1000)) for i in indexes]
        else:
            more = SHAPES[shape] if shape is not None else _nothing
            tasks = [
                (TOPIC, texts[i % _BODIES], None, {"due_ms": due_ms, **more(seed, i)})
                for i in indexes
            ]
        parts.append(_enqueue(FIRST_REQUEST + number, window, tasks))
    return _join(parts)


def _nothing(seed: int, index: int) -> dict[str, Any]:
    return {}


def paced_frames(count: int, window: int, seed: int, delay_ms: tuple[int, int]) -> Encoded:
    """Return ENQUEUE frames of one task each, due within the range of delays."""
    texts = bodies(seed)
    source = random.Random(seed)
    return _join(
        [
            _enqueue(
                FIRST_REQUEST + i, window, [(TOPIC, texts[i % _BODIES], source.randint(*delay_ms))]
            )
            for i in range(count)
        ]
    )


def _enqueue(request: int, window: int, tasks: Sequence[tuple[object, ...]]) -> bytes:
    floor = max(FIRST_REQUEST, request - window + 1)
    return encode((int(FrameType.ENQUEUE), request, floor, tasks))


def reschedule_frames(ids: Sequence[int], ids_per_frame: int, seed: int) -> Encoded:
    """Return RESCHEDULE frames that move their ids to a new time in the span."""
    delays = delays_s(-(-len(ids) // ids_per_frame), seed)
    parts: list[bytes] = []
    for number, start in enumerate(range(0, len(ids), ids_per_frame)):
        some, move = ids[start : start + ids_per_frame], {"delay_ms": int(delays[number] * 1000)}
        parts.append(encode((int(FrameType.RESCHEDULE), FIRST_REQUEST + number, some, move)))
    return _join(parts)


def id_frames(kind: FrameType, ids: Sequence[int], ids_per_frame: int) -> Encoded:
    """Return frames with ids as their only field: CANCEL, RUN_NOW or LOOKUP."""
    starts = range(0, len(ids), ids_per_frame)
    return _join(
        [
            encode((int(kind), FIRST_REQUEST + number, ids[start : start + ids_per_frame]))
            for number, start in enumerate(starts)
        ]
    )


def nack_frames(
    group: str,
    receipts: Sequence[tuple[int, int, int]],
    per_frame: int,
    delay_ms: int,
    first_request: int,
) -> Encoded:
    """Return NACK frames of receipts (id, epoch, attempt), whose tasks are due after the delay."""
    parts: list[bytes] = []
    for number, start in enumerate(range(0, len(receipts), per_frame)):
        items = [(*receipt, delay_ms, "no") for receipt in receipts[start : start + per_frame]]
        frame = (int(FrameType.NACK), first_request + number, TOPIC, group, items)
        parts.append(encode(frame))
    return _join(parts)


def beanstalkd_puts(count: int, seed: int, delay_s: int | None = None) -> Encoded:
    """Return ``put`` commands, due over the span or all after ``delay_s``."""
    texts = bodies(seed)
    delays: Iterable[float] = (
        delays_s(count, seed) if delay_s is None else (delay_s for _ in range(count))
    )
    return _join(
        [
            b"put 0 %d 120 %d\r\n%b\r\n" % (delay, BODY_BYTES, texts[i % _BODIES])
            for i, delay in enumerate(delays)
        ]
    )
