"""Convert a Redis shard to JSON and back, for the golden files of the layout."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

CHANGING = ("incarnation", "opened_ms", "link")
"""Fields of the wheel that differ from run to run."""


def _text(value: bytes) -> str:
    """Decode as Latin-1, which keeps every byte."""
    return value.decode("latin-1")


async def dump(url: str, masked: tuple[str, ...] = CHANGING) -> dict[str, Any]:
    """Return [type, content] by key, with sorted fields and members. Values of `masked` fields
    are hidden."""
    result: dict[str, Any] = {}
    async with Redis.from_url(url) as redis:
        for key in sorted(await redis.keys("*")):
            kind = (await redis.type(key)).decode()
            content: Any
            if kind == "hash":
                fields = await redis.hgetall(key)
                content = {_text(name): _text(fields[name]) for name in sorted(fields)}
                for name in masked:
                    if name in content:
                        content[name] = f"<{name}>"
            elif kind == "zset":
                members = await redis.zrange(key, 0, -1, withscores=True)
                content = [[_text(member), score] for member, score in members]
            else:
                content = [_text(item) for item in await redis.lrange(key, 0, -1)]
            result[_text(key)] = [kind, content]
    return result


async def load(url: str, dumped: dict[str, Any]) -> None:
    """Write a dump into an empty server."""
    async with Redis.from_url(url) as redis:
        for key, (kind, content) in dumped.items():
            args: list[Any] = []
            if kind == "hash":
                command = "HSET"
                for name, value in content.items():
                    fresh = "7" if value == f"<{name}>" else value
                    args += [name.encode("latin-1"), fresh.encode("latin-1")]
            elif kind == "zset":
                command = "ZADD"
                for member, score in content:
                    args += [repr(score), member.encode("latin-1")]
            else:
                command = "RPUSH"
                args = [item.encode("latin-1") for item in content]
            await redis.execute_command(command, key, *args)
