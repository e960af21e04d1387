"""Which store the settings ask for, and the engine settings that depend on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tickwheel.engine.state import EngineConfig
from tickwheel.errors import BadRequest
from tickwheel.persistence import open_url
from tickwheel.persistence.store import Store
from tickwheel.persistence.urls import parse, with_setting
from tickwheel.server.settings import HOT_BYTES_MAX, REDIS_RESIDENT_BYTES_MAX, Settings


def store_url(settings: Settings) -> str:
    """The store's address with what other settings say of it."""
    url = settings.store
    if settings.allow_volatile_store and parse(url).kind == "redis":
        url = with_setting(url, "allow_volatile", "1")
    return url


def open_store(settings: Settings) -> tuple[Store, EngineConfig]:
    """The store, not opened yet. Raises StoreUnusable, BadRequest."""
    url, config = store_url(settings), settings.engine()
    if parse(url).kind != "redis":
        return open_url(url, disk_refuse=settings.disk_refuse), config
    from tickwheel.persistence.redis import options_from

    shard = options_from(url).shard
    if settings.shard not in (0, shard):
        raise BadRequest(
            f"setting shard: {settings.shard} is not the shard {shard} of the store's URL"
        )
    resident_bytes_max = settings.resident_bytes_max or REDIS_RESIDENT_BYTES_MAX
    hot_bytes_max = min(resident_bytes_max, HOT_BYTES_MAX)
    config = replace(config, shard=shard, resident_bytes_max=hot_bytes_max)
    return open_url(url, resident_bytes_max=resident_bytes_max), config


def backup_folder(settings: Settings) -> Path:
    """Where backups go: beside the store, unless a folder is named."""
    if settings.backup_dir is not None:
        return Path(settings.backup_dir)
    parsed = parse(settings.store)
    return Path(parsed.path).resolve().parent if parsed.kind == "sqlite" else Path.cwd()
