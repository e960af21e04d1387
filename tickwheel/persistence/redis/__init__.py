"""The Redis store: a shard's keys have one hash tag, and each batch is one Lua script."""

from __future__ import annotations

from dataclasses import replace

from tickwheel.persistence.on_server import ServerKind
from tickwheel.persistence.redis.connection import check
from tickwheel.persistence.redis.driver import RedisOptions, options_from
from tickwheel.persistence.redis.opening import RedisAdministration
from tickwheel.persistence.redis.siblings import RedisSiblings
from tickwheel.persistence.redis.store import RedisElection, RedisNodes, RedisStore

__all__ = ["KIND", "RedisOptions", "RedisStore", "options_from"]


def _store(options: RedisOptions, resident_bytes_max: int | None) -> RedisStore:
    if resident_bytes_max is not None:
        options = replace(options, resident_bytes_max=resident_bytes_max)
    return RedisStore(options)


KIND = ServerKind(
    options_from, check, _store, RedisElection, RedisNodes, RedisSiblings, RedisAdministration,
    has_one_layout=False,
)  # fmt: skip
