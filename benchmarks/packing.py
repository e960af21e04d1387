"""CPU time of the client for packing one task: ``python -m benchmarks.packing``.

A task is checked as for an enqueue, which is where bodies are packed, and unpacked as a delivery
is; nothing is sent. The first row is a client without options, which must cost what it did before.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from tickwheel.client import Task
from tickwheel.client.encodings import Codec
from tickwheel.client.tasks import TaskChecker
from tickwheel.client.typed import task

SIZES = (200, 20_000)
SECONDS = 0.3
"""Seconds to measure a figure. The best of TURNS is shown."""
TURNS = 3
KEYS = {"2026-11": os.urandom(32)}


def cost_us(work: Callable[[], object]) -> float:
    """Return the lowest CPU time of a call in microseconds."""
    best = float("inf")
    for _ in range(TURNS):
        count, began_s = 0, time.process_time()
        while (took_s := time.process_time() - began_s) < SECONDS:
            for _ in range(100):
                work()
            count += 100
        best = min(best, took_s / count * 1e6)
    return best


def text(size: int) -> str:
    """Return text that compresses about as well as a program's JSON."""
    lines = (f'{{"sku": "A-{n * 7919 % 10_007}", "count": {n % 13}}}' for n in range(size))
    return "\n".join(next(lines) for _ in range(size // 30 + 1))[:size]


@task("t")
async def typed(order_id: int, note: str) -> None:
    """A typed task. Only its arguments are used."""


def rows(size: int) -> dict[str, tuple[Callable[[], object], Callable[[], object] | None]]:
    """Return name → (work of an enqueue, work of a delivery)."""
    note = text(size)
    body = note.encode()

    def packed(**options: Any) -> tuple[Callable[[], object], Callable[[], object] | None]:
        checker, codec = TaskChecker(), Codec(**options)
        checker.codec = codec if codec.packs else None
        checker.name("t", "topic")
        found, encoding = codec.pack("t", body, None)

        def send() -> object:
            return checker.plain("t", body, None) or checker.check(Task("t", body))

        if encoding is None:
            return send, None
        return send, lambda: codec.unpack("t", found, encoding)

    arguments = typed.body(7, note)
    schema = typed._definition.schema
    return {
        "plain": packed(),
        "typed": (lambda: typed.body(7, note), lambda: schema._readers["json"].decode(arguments)),
        "zlib": packed(compress="zlib", compress_over=0),
        "zstd": packed(compress="zstd", compress_over=0),
        "encrypted": packed(keys=KEYS),
        "zstd, encrypted": packed(compress="zstd", compress_over=0, keys=KEYS),
    }


def main() -> None:
    """Print a line of JSON for each size and encoding."""
    for size in SIZES:
        for name, (send, receive) in rows(size).items():
            figures = {"bytes": size, "way": name, "enqueue_us": round(cost_us(send), 2)}
            if receive is not None:
                figures["delivery_us"] = round(cost_us(receive), 2)
            print(json.dumps(figures))


if __name__ == "__main__":
    main()
