"""A consumer that its parent freezes: ``python -m crash.frozen_consumer SEED PORTS TOPIC GROUP``.

It is the real client and acks what it gets. When its standard input ends it settles what was not
answered and writes its journal to its standard output.
"""

from __future__ import annotations

import asyncio
import itertools
import sys

from crash import link
from crash.fair_clients import FairConsumer
from crash.network import journal_text
from crash.plan import Plan

FIRST_CONNECTION = 1_000_000
"""Connections differ by number, those of other processes too."""


async def main(seed: str, ports: str, topic: str, group: str) -> None:
    plan = Plan(int(seed), list(map(int, ports.split(","))))
    consumer = FairConsumer(plan, f"frozen-{topic}-{group}", topic, group)
    running = asyncio.create_task(consumer.run())
    await asyncio.to_thread(sys.stdin.read)
    plan.consumed.set()
    await running
    sys.stdout.write(journal_text(plan.journals))


if __name__ == "__main__":
    link._names = itertools.count(FIRST_CONNECTION)  # this process's own
    asyncio.run(main(*sys.argv[1:]))
