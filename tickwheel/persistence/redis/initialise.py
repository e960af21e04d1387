"""Laying a shard out on an operator's word: an empty one, or one whose data is given up.

For ``tickwheel init``; a daemon lays out its shard by itself (``opening``), but never one that
may belong to another. Invariants: nothing is done while a daemon leads the shard; nothing is
removed but what was looked at before, nor any key that is not ours; whoever used the shard
before is fenced, by the incarnation and by the epoch.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tickwheel.persistence.contract import StoreUnusable
from tickwheel.persistence.redis import opening
from tickwheel.persistence.redis.connection import Connection, check
from tickwheel.persistence.redis.driver import NoReply, NotConnected, ServerError
from tickwheel.persistence.redis.keys import LAYOUT, TYPES, Keys
from tickwheel.persistence.redis.options import RedisOptions
from tickwheel.persistence.redis.scripts import INIT_LAY_OUT, INIT_LOOK

OWNER = "init"
LEADER_WATCH_S = 4.0
"""How long a leader's lease is looked for, in seconds: a living daemon renews it within 3 s, and a
Redis that came back empty has forgotten it."""
WATCH_STEP_S = 0.25
COUNTED = ("tasks", "in_flight_or_waiting", "dead", "records")


@dataclass(frozen=True, slots=True)
class Found:
    """What ``look`` has found in a shard."""

    store: str
    """The server's address, without secrets."""
    shard: str
    exists: bool
    whole: bool
    """Whether all fields are there without which no daemon opens the shard."""
    rewriting: str
    """The owner whose writing of the shard anew was cut short; empty: nobody's was."""
    epoch: int
    incarnation: str
    counts: dict[str, int]
    """How many records of each kind there are, by the names in ``COUNTED``."""
    parts: int = 0
    """How many parts of a large batch are being applied."""
    last: int = 0
    """The number of the last batch."""

    @property
    def unused(self) -> bool:
        """Whether the shard is laid out and nothing was ever kept in it."""
        return self.exists and self.whole and not self.rewriting and self.last == 0

    @property
    def state(self) -> str:
        """The findings in words, for a person."""
        if not self.exists:
            return "empty"
        held = ", ".join(f"{n:,} {name.replace('_', ' ')}" for name, n in self.counts.items())
        trouble = "" if self.whole else "; it is damaged"
        if self.rewriting:
            trouble += f"; it was being written anew by {self.rewriting} and is not whole"
        return f"laid out (epoch {self.epoch}): {held}{trouble}"


async def look(options: RedisOptions) -> Found:
    """What the shard holds. Raises StoreUnusable if this server or shard must not be touched."""
    keys = Keys(options.prefix, options.namespace, options.shard)
    async with _line(options) as line:
        await opening.inspect(line, options)
        reply: list[Any] = await line.run(INIT_LOOK, (*keys.all, keys.leader), (LAYOUT, *TYPES))
    status, *rest = reply
    if status != b"seen":
        raise _refused(options, keys, status.decode(), rest)
    exists, whole, epoch, incarnation, _, rewriting, parts, last, *counts = rest
    return Found(
        store=options.name,
        shard=keys.shard,
        exists=exists == b"1",
        whole=whole == b"1" or exists == b"0",
        rewriting=rewriting.decode(),
        epoch=int(epoch),
        incarnation=incarnation.decode(),
        counts=dict(zip(COUNTED, map(int, counts), strict=True)),
        parts=int(parts),
        last=int(last),
    )


async def lay_out(
    options: RedisOptions, found: Found, now_ms: int, *, watch_s: float | None = None
) -> str:
    """Remove what ``found`` lists, and lay the shard out; its new incarnation.

    Looks for a living daemon for ``watch_s`` first (default: LEADER_WATCH_S). Raises
    StoreUnusable: one leads the shard, or it is not any more as it was found.
    """
    keys = Keys(options.prefix, options.namespace, options.shard)
    incarnation = secrets.token_hex(8)
    async with _line(options) as line:
        await _watch(line, options, keys, LEADER_WATCH_S if watch_s is None else watch_s)
        args = (LAYOUT, int(found.exists), found.epoch, found.incarnation, incarnation, OWNER,
                now_ms, *TYPES)  # fmt: skip
        status, *rest = await line.run(INIT_LAY_OUT, (*keys.all, keys.leader), args)
        if status != b"laid out":
            raise _refused(options, keys, status.decode(), rest)
        part = 1
        while await line.call("UNLINK", keys.stage(part)) or part < found.parts:
            part += 1
    return incarnation


async def _watch(line: Connection, options: RedisOptions, keys: Keys, watch_s: float) -> None:
    loop = asyncio.get_running_loop()
    until_s = loop.time() + watch_s
    while True:
        value = await line.call("GET", keys.leader)
        if value is not None:
            raise _refused(options, keys, "led", [value])
        left_s = until_s - loop.time()
        if left_s <= 0:
            return
        await asyncio.sleep(min(WATCH_STEP_S, left_s))


@asynccontextmanager
async def _line(options: RedisOptions) -> AsyncIterator[Connection]:
    check(options)
    line = Connection(options)
    try:
        yield line
    except (NotConnected, NoReply, ServerError) as error:
        raise StoreUnusable(f"store {options.name}: {error.message}") from error
    finally:
        await line.close()


def _refused(options: RedisOptions, keys: Keys, status: str, rest: list[Any]) -> StoreUnusable:
    first = rest[0].decode(errors="replace") if rest else ""
    if status == "led":
        owner, _, other = first.partition("|")
        address = other.partition("|")[0]
        why = f"{owner} at {address} leads {keys.shard}; stop it, and all that stand by, first"
    elif status == "foreign":
        why = f"the key {first} is not ours; choose another ?prefix= or ?namespace=, or remove it"
    elif status == "newer":
        why = (
            f"{keys.shard} has layout {first}; this release knows layouts up to {LAYOUT}: run a"
            " newer release"
        )
    else:
        why = f"{keys.shard} has changed since it was looked at; look again"
    return StoreUnusable(f"store {options.name}: {why}")
