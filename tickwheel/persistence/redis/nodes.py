"""Where nodes find each other in Redis: ``contract.NodeRegistry``.

All of it is under one hash tag of its own, ``S`` = ``{tw:default:nodes}``; nothing of a shard is:

| key | type | what |
|---|---|---|
| S:nodes | hash | node → its run and its record (JSON with a format) |
| S:until | hash | node → the millisecond, by Redis' clock, at which it counts as gone |
| S:placed | hash | shard → the node where an operator wants it |
| S:drained | hash | nodes that shall have no shards, as an operator says |
| S:route | hash | shards: how many; version; shard → the daemon that said last that it leads it |

A record lapses by the clock of Redis, so no two machines' clocks are ever compared. Losing all of
it loses no task: each node writes itself again with its next word. What is lost for good are the
wishes of operators.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any, Final

from tickwheel.limits import NODES_MAX
from tickwheel.persistence.contract import Claim, NodeRecord, NodesSeen, StoreUnusable
from tickwheel.persistence.redis.connection import Connection, check
from tickwheel.persistence.redis.driver import RedisOptions
from tickwheel.persistence.redis.layout import NODES_BEAT

FORMAT: Final = 1
PART: Final = "nodes"
NAMES: Final = ("nodes", "until", "placed", "drained", "route", "scratch")


class RedisNodes:
    """The registry of the nodes that share a Redis."""

    def __init__(self, options: RedisOptions, shards: int) -> None:
        check(options)
        self._shards = shards
        options = replace(options, part=PART)
        self._name = options.name
        self._line = Connection(options)
        self._keys = tuple(f"{{{options.tag}}}:{name}".encode() for name in NAMES)

    async def beat(self, me: NodeRecord, instead_of: str = "") -> NodesSeen:
        return await self._say(me, _to_text(me), instead_of)

    async def leave(self, me: NodeRecord) -> None:
        await self._say(replace(me, claims=()), "", "")

    async def _say(self, me: NodeRecord, text: str, instead_of: str) -> NodesSeen:
        args: list[str | int] = [self._shards, me.ttl_ms, me.name, me.run, text, instead_of]
        args.append(NODES_MAX)
        for claim in me.claims:
            args += [claim.shard, f"{claim.epoch}|{claim.address}"]
        shards, *reply = await self._line.run(NODES_BEAT, self._keys, args)
        if int(shards) != self._shards:
            raise StoreUnusable(
                f"store {self._name}: it was laid out for {int(shards)} shards, and shards is"
                f" {self._shards}"
            )
        if len(reply) == 1:
            raise StoreUnusable(
                f"store {self._name}: it has {int(reply[0])} nodes; the limit is {NODES_MAX}"
                " (NODES_MAX). One that has died counts for leader_ttl_s"
            )
        now_ms, is_mine, version, nodes, until, placed, drained = reply
        records = {name: _of_text(name, text) for name, text in _pairs(nodes).items()}
        known = {name: one for name, one in records.items() if one is not None}
        ends = _pairs(until)
        return NodesSeen(
            now_ms=now_ms,
            nodes=known if is_mine else {n: one for n, one in known.items() if n != me.name},
            seen_ms={name: int(ends.get(name, 0)) - one.ttl_ms for name, one in known.items()},
            placed={int(shard): node for shard, node in _pairs(placed).items()},
            drained=frozenset(_pairs(drained)),
            version=int(version),
            namesake=None if is_mine else known.get(me.name),
        )

    async def place(self, shard: int, node: str | None) -> None:
        key = self._keys[NAMES.index("placed")]
        if node is None:
            await self._line.call("HDEL", key, shard)
        else:
            await self._line.call("HSET", key, shard, node)

    async def drain(self, node: str, *, draining: bool) -> None:
        key = self._keys[NAMES.index("drained")]
        if draining:
            await self._line.call("HSET", key, node, 1)
        else:
            await self._line.call("HDEL", key, node)

    async def close(self) -> None:
        await self._line.close()


def _pairs(flat: list[bytes]) -> dict[str, str]:
    texts = [one.decode(errors="replace") for one in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _to_text(record: NodeRecord) -> str:
    return json.dumps({"format": FORMAT, **asdict(record)}, separators=(",", ":"))


def _of_text(name: str, text: str) -> NodeRecord | None:
    """The record in a value; None: a newer release has written it, or nobody of ours."""
    try:
        said: dict[str, Any] = json.loads(text.partition("|")[2])
        if said.pop("format") != FORMAT:
            return None
        claims = tuple(Claim(**one) for one in said.pop("claims"))
        record = NodeRecord(claims=claims, standbys=tuple(said.pop("standbys")), **said)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return replace(record, name=name)
