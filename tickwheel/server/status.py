"""What a daemon says of itself: STATUS, ``/readyz``. Reads, changes nothing."""

from __future__ import annotations

import mmap
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tickwheel import disk
from tickwheel.persistence import parse, without_secrets
from tickwheel.persistence.contract import Leader, Standby
from tickwheel.server.failover import why_held
from tickwheel.version import __version__

if TYPE_CHECKING:
    from tickwheel.server.failover import Roles
    from tickwheel.server.settings import Settings

NOT_READY = frozenset(
    (
        "starting",
        "recovering",
        "standby",
        "draining",
        "store_full",
        "store_trouble",
        "rows_missing",
        "clock_held",
    )
)
"""States in which a load balancer should send nobody here. A daemon that loads serves."""
IDS_NAMED_MAX = 3


class Running(Protocol):
    """A daemon as STATUS and metrics ask about it."""

    settings: Settings
    roles: Roles
    draining: bool
    started_mono_s: float

    @property
    def connection_count(self) -> int: ...


def state_of(daemon: Running) -> tuple[str, str | None]:
    """(state, reason) of the daemon."""
    shard = daemon.roles.shard
    if daemon.draining:
        return "draining", None
    if shard is None:
        return ("standby" if daemon.roles.role == "standby" else "recovering"), None
    committer = shard.committer
    if committer.full:
        return "store_full", committer.trouble
    if committer.trouble is not None:
        return "store_trouble", committer.trouble
    if shard.core.missing:
        ids = ", ".join(map(str, islice(shard.core.missing, IDS_NAMED_MAX)))
        return "rows_missing", (
            f"{len(shard.core.missing)} tasks have not ended, and the store does not have their"
            f" rows: {ids}{' …' if len(shard.core.missing) > IDS_NAMED_MAX else ''}"
        )
    if daemon.roles.clock.held:
        return "clock_held", why_held(daemon.roles.clock)
    if not shard.loaded.is_set():
        return "loading", None
    return "ready", None


def status_map(daemon: Running) -> dict[str, Any]:
    """The answer to STATUS; ``docs/protocol.md`` lists the fields."""
    state, detail = state_of(daemon)
    shard = daemon.roles.shard
    now = daemon.roles.clock.read()
    leader = daemon.roles.leader
    return {
        "node": daemon.settings.node,
        "version": __version__,
        "role": daemon.roles.role,
        "state": state,
        "detail": detail,
        "epoch": shard.epoch if shard is not None else 0,
        "address": daemon.roles.address,
        "since_ms": daemon.roles.role_since_ms,
        "active": _leader_map(leader) if leader is not None else None,
        "standbys": [_standby_map(one) for one in daemon.roles.standbys],
        "store": without_secrets(daemon.settings.store),
        "durability": daemon.roles.store.durability if shard is not None else None,
        "store_ok": shard is None or shard.committer.trouble is None,
        "now_ms": now.now_ms,
        "uptime_s": round(time.monotonic() - daemon.started_mono_s, 3),
        "loaded": daemon.roles.loaded,
        "http": daemon.roles.http_url,
        "memory_bytes": memory_bytes(),
        **_disk(daemon.settings.store),
    }


def memory_bytes() -> int | None:
    """The bytes of memory that the process occupies; None: the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return None


def _disk(store: str) -> dict[str, Any]:
    """The use of the disk that holds an embedded store."""
    path = parse(store).path
    try:
        use = disk.measure(Path(path).parent) if path else None
    except OSError:
        use = None
    return {
        "disk_used": None if use is None else round(use.share, 4),
        "disk_free_bytes": None if use is None else use.free_bytes,
    }


def _leader_map(leader: Leader) -> dict[str, Any]:
    return {
        "node": leader.node,
        "address": leader.address,
        "epoch": leader.epoch or None,
        "since_ms": leader.since_ms,
        "http": leader.http or None,
    }


def _standby_map(one: Standby) -> dict[str, Any]:
    return {
        "node": one.node,
        "address": one.address,
        "since_ms": one.since_ms,
        "http": one.http or None,
    }


def readiness(daemon: Running) -> tuple[bool, dict[str, Any]]:
    """Whether enqueues are taken and deliveries go out; and details, with the reason if not."""
    state, detail = state_of(daemon)
    answer: dict[str, Any] = {"status": state, "role": daemon.roles.role}
    if detail is not None:
        answer["reason"] = detail
    if daemon.roles.shard is not None:
        answer["epoch"] = daemon.roles.shard.epoch
    elif daemon.roles.leader is not None:
        answer["active"] = daemon.roles.leader.address
        answer["active_http"] = daemon.roles.leader.http or None
    return state not in NOT_READY, answer
