"""The test wheel: how long a week of virtual time takes a test."""

from __future__ import annotations

import asyncio
import random
import time

from benchmarks.context import Context, Result
from benchmarks.payload import TOPIC
from benchmarks.scale import DUE_SPAN_S
from tickwheel import Worker
from tickwheel.client import Delivery
from tickwheel.testing import TestWheel

PER_CALL = 5_000


def virtual_week(context: Context) -> Result:
    """Tasks of random due times within a week: through a handler, and without a consumer."""
    result, scale = Result("virtual_week"), context.scale
    for name, count, has_handler in (
        ("handled", scale.week_handled, True),
        ("unread", scale.week_unread, False),
    ):
        took_s = asyncio.run(_week(count, has_handler=has_handler))
        what = "through a handler" if has_handler else "without a consumer"
        result.metric(f"{name}_s", took_s)
        result.row(
            f"a week with {count:,} tasks, {what}",
            f"{took_s:.1f} s ({took_s / count * 1e6:.0f} us a task)",
        )
    return result


async def _week(count: int, *, has_handler: bool) -> float:
    """Seconds from the first step to the last; every task has its own moment."""
    handled = 0
    rnd = random.Random(1)
    async with TestWheel(backlog_max=count) as wheel:
        worker = Worker(wheel.client)

        @worker.on(TOPIC)
        async def handle(_: Delivery) -> None:
            nonlocal handled
            handled += 1

        for begin in range(0, count, PER_CALL):
            some = min(PER_CALL, count - begin)
            delays = [rnd.uniform(0, DUE_SPAN_S) for _ in range(some)]
            await wheel.client.enqueue_columns(TOPIC, [b"x" * 100] * some, delays=delays)
        began_s = time.monotonic()
        async with wheel.working(*([worker] if has_handler else [])):
            await wheel.advance(DUE_SPAN_S)
        took_s = time.monotonic() - began_s
        ready = (await wheel.client.stats()).ready
    assert (handled, ready) == ((count, 0) if has_handler else (0, count)), "all came due"
    return took_s
