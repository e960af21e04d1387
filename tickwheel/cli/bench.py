"""``tickwheel bench``: how fast one daemon is from here. `make bench` compares with others."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Annotated

import typer

from tickwheel.cli.call import EXIT_FAILED, Call, command
from tickwheel.cli.output import facts_grid
from tickwheel.errors import SendTimeout

if TYPE_CHECKING:
    from tickwheel.demo.demonstration import Result

TIMEOUT_S = 300.0


def register(app: typer.Typer, panel: str) -> None:
    command(app, panel=panel)(bench)


async def bench(
    call: Call,
    tasks: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Of each way to enqueue.")
    ] = 20_000,
    rate: Annotated[
        int, typer.Option(min=0, max=50_000, help="Tasks a second while lateness is measured.")
    ] = 2_000,
    seconds: Annotated[int, typer.Option(min=1, max=60, help="How long that is done.")] = 5,
    body_bytes: Annotated[
        int, typer.Option("--body", metavar="BYTES", min=0, max=1 << 20, help="Size of a body.")
    ] = 100,
) -> int:
    """Measure a running daemon: enqueues, deliveries with acks, lateness. Uses its own topic.

    All of it is durable work on the daemon's real store; nothing is left there afterwards.
    """
    from tickwheel.demo.demonstration import Bench

    topic = f"tickwheel.bench.{secrets.token_hex(4)}"
    async with call.client(send_timeout=30.0) as client:
        run = Bench(client, topic, body_bytes)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await run.enqueue_single(tasks)
                await run.enqueue_batched(tasks)
                await run.deliver(2 * tasks)
                if rate:
                    await run.lateness(rate, seconds)
        except TimeoutError:
            raise SendTimeout(f"not through after {TIMEOUT_S:g} s; try fewer --tasks") from None
        finally:
            await run.clear()
    _show(call, run.result, rate)
    return EXIT_FAILED if run.result.early else 0


def _show(call: Call, result: Result, rate: int) -> None:
    from tickwheel.demo.demonstration import percentile

    fields: dict[str, str | int] = {
        "tasks": result.tasks,
        "enqueue_single_per_s": round(result.enqueue_single_per_s),
        "enqueue_batched_per_s": round(result.enqueue_batched_per_s),
        "delivery_per_s": round(result.delivery_per_s),
        "early": result.early,
    }
    if rate:
        fields |= {
            "late_p50_ms": percentile(result.late_ms, 0.50),
            "late_p99_ms": percentile(result.late_ms, 0.99),
            "late_max_ms": max(result.late_ms, default=0),
        }
    if call.out.as_json:
        call.out.record(fields)
        return
    named = {
        name.replace("_per_s", " a second").replace("_ms", " ms").replace("_", " "): value
        for name, value in fields.items()
    }
    call.out.grid(facts_grid(("measured", "value"), named, right=True))
