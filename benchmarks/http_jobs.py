"""Load over HTTP: single enqueues on persistent connections, and a stream of lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate

from benchmarks import payload
from benchmarks.payload import Encoded
from benchmarks.pump import Stream, timed_pump
from benchmarks.wire import connect

Made = Callable[[bytes], bytes]
HTTP_CONNECTIONS = 32
_OBJECT_END = b"}"
"""End of an answer, which is an object without inner objects."""


def http_put(port: int, count: int, seed: int) -> payload.Job:
    """Enqueue one task per request, with one request at a time on each connection."""
    streams = [
        Stream(connect(port), _load(share, seed + index, _request), 1, _count)
        for index, share in enumerate(payload.shares(count, HTTP_CONNECTIONS))
    ]
    yield
    figures = timed_pump(streams)
    _check(streams, count)
    return {**figures, "count": count}


def http_lines(port: int, count: int, window: int, seed: int) -> payload.Job:
    """Send one request with this number of lines, at most ``window`` of them unanswered."""
    load = _load(count, seed, lambda task: task + b"\n")
    head = (
        b"POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
        b"Content-Length: %d\r\n\r\n" % len(load.blob)
    )
    whole = Encoded(head + load.blob, [len(head) + end for end in load.ends])
    streams = [Stream(connect(port), whole, window, _count)]
    yield
    figures = timed_pump(streams)
    _check(streams, count)
    return {**figures, "count": count}


def _load(count: int, seed: int, made: Made) -> Encoded:
    bodies, delays_s = payload.bodies(seed), payload.delays_s(count, seed)
    parts = [
        made(
            json.dumps(
                {
                    "topic": payload.TOPIC,
                    "body": bodies[index % len(bodies)].decode(),
                    "delay_ms": int(delay_s * 1000),
                },
                separators=(",", ":"),
            ).encode()
        )
        for index, delay_s in enumerate(delays_s)
    ]
    return Encoded(b"".join(parts), list(accumulate(map(len, parts))))


def _request(task: bytes) -> bytes:
    return (
        b"POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(task), task)
    )


def _count(data: bytes) -> int:
    return data.count(_OBJECT_END)


def _check(streams: list[Stream], count: int) -> None:
    texts = [b"".join(stream.replies) for stream in streams]
    for stream in streams:
        stream.sock.close()
    accepted = sum(data.count(b'{"id":"') for data in texts)
    assert accepted == count, f"{accepted} tasks were accepted, not {count}: {texts[0][:500]!r}"
