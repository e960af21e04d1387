"""The Redis store: a shard's keys have one hash tag, and each batch is one Lua script."""

from __future__ import annotations

from tickwheel.persistence.redis.driver import RedisOptions, options_from
from tickwheel.persistence.redis.store import RedisStore

__all__ = ["RedisOptions", "RedisStore", "options_from"]
