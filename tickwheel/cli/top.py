"""``tickwheel top``: topics and groups, live. Goes on while the daemon is away, and says so."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Annotated

import typer

from tickwheel.cli.call import Call
from tickwheel.cli.options import typed
from tickwheel.cli.top_frame import NOTHING, SORTS, Frame, Meter
from tickwheel.cli.top_view import View
from tickwheel.cli.values import parse_duration
from tickwheel.client import Client
from tickwheel.errors import BadRequest, TickwheelError

INTERVAL_S = 1.0
INTERVAL_S_MIN = 0.05
ANSWER_S = 2.0
"""A daemon that says nothing for so long is shown as away."""


async def top(
    call: Call,
    interval: Annotated[
        float | None,
        typer.Option(
            parser=typed(parse_duration),
            metavar="DURATION",
            help="From picture to picture. Default: 1s.",
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="One picture, its rates taken over one interval.")
    ] = False,
    sort: Annotated[
        str, typer.Option(metavar="BY", help=f"Largest first: {', '.join(SORTS)}.")
    ] = "busy",
) -> None:
    """Watch topics and groups: rates, ready, in flight, retrying, dead, lateness. Ctrl-C ends it.

    "busy" is by deliveries a second. With --json every picture is one object a line.
    """
    interval_s = INTERVAL_S if interval is None else interval
    if interval_s < INTERVAL_S_MIN:
        raise BadRequest(f"--interval is {interval_s:g} s; {INTERVAL_S_MIN:g} s is the least")
    if sort not in SORTS:
        raise BadRequest(f"--sort is {sort!r:.40}; known are {', '.join(SORTS)}")
    meter = Meter(sort)
    async with call.client(retries=0) as client:
        if once:
            await _ask(client, meter)
            await asyncio.sleep(interval_s)
            view = View(call.out, live=False)
            view.show(await _ask(client, meter))
        else:
            await _watch(call, client, meter, interval_s)


async def _ask(client: Client, meter: Meter) -> Frame:
    stats = await client.stats()
    return meter.read(stats.raw, str(client.server_info.get("role", "active")))


async def _watch(call: Call, client: Client, meter: Meter, interval_s: float) -> None:
    """Until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    frame = NOTHING
    with View(call.out) as view:
        while not stop.is_set():
            frame = await _next(client, meter, frame)
            view.show(frame)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), interval_s)


async def _next(client: Client, meter: Meter, last: Frame) -> Frame:
    """The picture of now; while the daemon cannot be asked, the last one and why."""
    if not client.connected:
        return last.lost("reconnecting: the connection to the daemon is lost")
    try:
        async with asyncio.timeout(ANSWER_S):
            return await _ask(client, meter)
    except TimeoutError:
        return last.lost(f"reconnecting: no answer within {ANSWER_S:g} s")
    except TickwheelError as error:
        if not error.retryable:
            raise
        return last.lost(f"reconnecting: {error.code}: {error.message}")
