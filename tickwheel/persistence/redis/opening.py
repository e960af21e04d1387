"""Opens a shard: checks the server and the user's rights, then initializes the shard or begins an
epoch. A server that would lose tasks silently is refused, with a message that says what to change.

Without the check of rights, a missing right would make a script fail after its first writes. The
check changes nothing: every command is called with a key that never exists, or with arguments that
Redis refuses after checking the user's rights.

``tickwheel init`` initializes a shard that is empty, or whose data an operator discards. (A daemon
only initializes an empty shard that cannot belong to another daemon.) Invariants: ``init`` does
nothing while a daemon leads the shard; it removes only data that ``look`` has reported, and no keys
of other programs; the incarnation and the epoch fence earlier users of the shard.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from itertools import chain
from typing import Any

from tickwheel.persistence.contract import (
    LOST_BY,
    Evidence,
    Opened,
    StoredShard,
    StoreUnusable,
)
from tickwheel.persistence.identity import (
    NEW,
    EpochRecord,
    StoreIdentity,
    mark_of,
    next_epoch,
    past_text,
    read_past,
    restored,
)
from tickwheel.persistence.on_server import (
    INIT_OWNER,
    check_restored,
    connected,
    led,
    unreachable,
    unusable,
    watch_lease,
)
from tickwheel.persistence.redis.connection import Connection, check
from tickwheel.persistence.redis.driver import CLUSTER, Argument, RedisOptions, ServerError
from tickwheel.persistence.redis.layout import (
    INIT_LAY_OUT,
    INIT_LOOK,
    INIT_UPGRADE,
    LAYOUT,
    NUMBERS_MAX,
    OPEN,
    RIGHTS,
    TYPES,
    Keys,
)
from tickwheel.persistence.redis.mirror import TASK_BYTES
from tickwheel.upgrades import Upgrade

OUTSIDE = (
    "client|setname", "select", "eval", "evalsha", "wait", "memory|usage", "config|get",
    "role", "cluster|slots",
)  # fmt: skip
"""Commands that are called outside of scripts: ``select`` for databases other than 0, ``wait`` for
``wait_replicas``, ``role`` for Sentinels and a Cluster, ``cluster|slots`` for a Cluster. Without
``memory|usage`` the size of the data is unknown until it is loaded, and without ``config|get``
STATUS cannot show which tasks survive a power cut."""
_TRIED: dict[str, tuple[str, ...]] = {
    "get": (), "hdel": ("f",), "hget": ("f",), "hlen": (), "hmget": ("f",),
    "hscan": ("0",), "hset": ("f", "v", "f"), "lindex": ("0",), "lpop": (), "lrange": ("0", "0"),
    "pexpire": ("x",), "pttl": (), "set": ("v", "PX", "0"), "setrange": ("0", ""), "type": (),
    "unlink": (), "zadd": ("x", "m"), "zcard": (), "zcount": ("0", "0"), "zmscore": ("m",),
    "zrange": ("0", "0"), "zrangebylex": ("-", "+"), "zrem": ("m",), "zscan": ("0",),
}  # fmt: skip
"""Command in a script → the arguments that follow the key when the right to run it is checked."""
COMMANDS = ("exists", "del", "info", *_TRIED, "rpush")


async def missing_rights(
    connection: Connection, options: RedisOptions
) -> tuple[list[str], list[str]]:
    """Return the commands that scripts have no right to run, and those that the server does not
    know. Raise NotConnected, NoReply or, for commands outside of scripts, ServerError."""
    keys = Keys(options.prefix, options.namespace, options.shard)
    names = (*keys.all, keys.leader, keys.stage(1))
    tried: list[Argument] = []
    for name, trial_args in _TRIED.items():
        tried += (name, len(trial_args), *trial_args)
    reply: list[Any] = await connection.call("EVAL", RIGHTS.text, len(names), *names, *tried)
    try:
        await connection.call("EVALSHA", RIGHTS.sha, len(names), *names)
    except ServerError as error:
        if error.kind != "NOSCRIPT":  # a new server, or one whose scripts were flushed
            raise
    if options.wait_replicas:
        await connection.call("WAIT", 0, 1)
    missing, unknown = ([name.decode() for name in names] for names in reply)
    return missing, unknown


VERSION_MIN = (6, 2)
LOAD_POLL_S = 0.25
LOAD_LOG_S = 15.0
"""Seconds between two log lines while Redis is loading."""
SAMPLES = 1_000
REDIS_TASK_BYTES = 100
"""Bytes that Redis reports for a task in addition to its record (measured)."""
_POWER = "a power cut of Redis's machine"
DURABILITY = {
    "always": f"appendfsync always: a confirmed task survives {_POWER}",
    "everysec": f"appendfsync everysec: {_POWER} can lose the tasks confirmed in the last second or"
    " two, {unless}",
    "no": f"appendfsync no: {_POWER} can lose the tasks confirmed in the last half minute,"
    " {unless}",
}
_UNKNOWN = (
    f"appendfsync could not be read (CONFIG GET); unless it is `always`, {_POWER} can lose the"
    " tasks confirmed in the last second or more, {unless}"
)
_VOLATILE = "no append-only file: the end of Redis can lose confirmed tasks"
log = logging.getLogger(__name__)
_PASSING = ("CLUSTERDOWN", "TRYAGAIN", "ASK", "MOVED")
"""Temporary errors of a Cluster. A starting daemon waits until they no longer occur."""
_PASSWORD = ("WRONGPASS", "NOAUTH", "NOPERM")


async def inspect(connection: Connection, options: RedisOptions) -> None:
    """Raise StoreUnusable, which says what to change, if this server must not be used. Also raise
    NotConnected or NoReply."""
    info = await _info(connection, options)
    version = tuple(int(part) for part in info.get("redis_version", "0").split(".")[:2])
    if version < VERSION_MIN:
        raise unusable(
            options.name, f"its version must be at least 6.2, not {info.get('redis_version')}"
        )
    if info.get("cluster_enabled") == "1" and options.kind != CLUSTER:
        raise unusable(
            options.name,
            "it is a node of a Redis Cluster; name it with redis+cluster://HOST:PORT,…/",
        )
    if info.get("role") == "slave":
        raise unusable(
            options.name,
            f"it is a replica of {info.get('master_host')}:{info.get('master_port')};"
            " name the primary",
        )
    await _check_rights(connection, options)
    if options.allow_volatile_store:
        return
    if info.get("aof_enabled") != "1":
        raise unusable(
            options.name,
            "it has no append-only file and would lose tasks when it stops;"
            " set `appendonly yes` (CONFIG SET appendonly yes, then CONFIG REWRITE),"
            " or insist with --allow-volatile-store (or ?allow_volatile_store=1 in the URL)",
        )
    policy = info.get("maxmemory_policy")
    if policy != "noeviction":
        raise unusable(
            options.name,
            f"its maxmemory-policy {policy} would remove tasks when memory is short;"
            " set `maxmemory-policy noeviction` (CONFIG SET, then CONFIG REWRITE),"
            " or insist with --allow-volatile-store (or ?allow_volatile_store=1 in the URL)",
        )


async def _check_rights(connection: Connection, options: RedisOptions) -> None:
    try:
        missing, unknown = await missing_rights(connection, options)
    except ServerError as error:
        raise _refusal(options, error) from error
    if unknown:
        raise unusable(
            options.name,
            f"it does not know the command {', '.join(unknown)}, which the store needs; remove"
            " its `rename-command` from the configuration",
        )
    if missing:
        user = options.username or "default"
        raise unusable(
            options.name,
            f"user {user!r} has no right to run {', '.join(missing)};"
            f" ACL SETUSER {user} {' '.join(f'+{name}' for name in missing)}",
        )


async def _info(connection: Connection, options: RedisOptions) -> dict[str, str]:
    """Return the fields of INFO. Wait first if the server is loading its data."""
    loop = asyncio.get_running_loop()
    until_s, log_s = loop.time() + options.load_ms / 1000, loop.time()
    while True:
        try:
            text: bytes = await connection.call("INFO")
            pairs = (row.split(":", 1) for row in text.decode().splitlines() if ":" in row)
            info = dict(pairs)
            if info.get("loading", "0") == "0":
                return info
            if loop.time() >= until_s:
                raise unusable(options.name, "it is still loading its data")
            if loop.time() >= log_s:
                log_s += LOAD_LOG_S
                log.warning(
                    "store %s: waiting for Redis, which is loading its data (%s%% done), for at"
                    " most %.0f s (load_ms)",
                    options.name,
                    info.get("loading_loaded_perc", "?"),
                    until_s - loop.time(),
                )
        except ServerError as error:
            raise _refusal(options, error) from error
        await asyncio.sleep(LOAD_POLL_S)


async def durability(connection: Connection, options: RedisOptions) -> str:
    """See ``Store.durability``. Raise NotConnected or NoReply."""
    repair = _repair_text(options)
    unless = f"unless the daemon survives, which {repair}; the end of its process loses none"
    copies = "" if options.mirror else f"; {_stops(options)}"
    if options.wait_replicas:
        copies += f"; {options.wait_replicas} of its replicas have a task before it is confirmed"
    info = await _info(connection, options)
    if (policy := info.get("maxmemory_policy")) != "noeviction":
        copies += f"; its maxmemory-policy {policy} can remove tasks"
    if info.get("aof_enabled") != "1":
        return _VOLATILE + copies
    try:
        reply = await connection.call("CONFIG", "GET", "appendfsync")
    except ServerError:  # the user has no right to run CONFIG GET, or it was renamed
        return _UNKNOWN.format(unless=unless) + copies
    values = reply.values() if isinstance(reply, dict) else reply[1::2]
    texts = [DURABILITY[v] for v in map(_text, values) if v in DURABILITY]
    return (texts[0] if texts else _UNKNOWN).format(unless=unless) + copies


def _repair_text(options: RedisOptions) -> str:
    """Describe how a daemon repairs a Redis that has lost confirmed tasks."""
    if options.mirror:
        return "writes them again"
    return f"sends those of the last {options.keep_ms / 1000:g} s again (keep_ms, keep_bytes)"


def _stops(options: RedisOptions) -> str:
    return (
        "mirror=no: a Redis that came back empty, or without batches that are older than"
        f" {options.keep_ms / 1000:g} s, stops the daemon"
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


async def begin_epoch(
    connection: Connection,
    keys: Keys,
    options: RedisOptions,
    owner: str,
    now_ms: int,
    may_create: bool,
    epoch_min: int = 1,
    evidence: Sequence[Evidence] = (),
) -> tuple[Opened, list[bytes | None]]:
    """Begin an epoch. Return the opened shard, and the topics with the numbers from 1 on. Raise
    StoreUnusable or ServerTrouble. The shard's identity is read first, to detect losses. The read
    does not exclude other daemons; the leader's lease does."""
    shown_name = f"store {options.name}: {keys.shard}"
    identity, compared = await _read_identity(connection, keys, shown_name, owner, evidence)
    begun = next_epoch(shown_name, identity, compared, epoch_min)
    fresh = secrets.token_hex(8)
    past = past_text(begun.past, with_batches=False)
    args = (owner.encode(), now_ms, fresh, LAYOUT, int(may_create), begun.epoch, past, NUMBERS_MAX,
            *TYPES)  # fmt: skip
    reply: list[Any] = await connection.run(OPEN, keys.all, args)
    status = reply[0].decode()
    if status not in ("created", "opened"):
        raise _refused(options, keys, status, [part.decode() for part in reply[1:]])
    epoch, last, id_mark, position_ms, clean = map(int, reply[1:6])
    opened = Opened(
        epoch=epoch,
        last_batch=last,
        id_mark=id_mark,
        position_ms=position_ms,
        clean=bool(clean),
        created=status == "created",
        mark=mark_of(owner),
        incarnation=reply[6].decode(),
        after=begun.after,
        is_branch=begun.is_branch,
        is_behind=begun.is_behind,
    )
    return opened, reply[7]


async def _read_identity(
    connection: Connection, keys: Keys, shown_name: str, opener: str, evidence: Sequence[Evidence]
) -> tuple[StoreIdentity | None, Sequence[Evidence]]:
    """Return the shard's identity, and the facts to compare it with. For an incomplete or foreign
    shard, return neither, because the script reports such a shard. Raise StoreUnusable for an
    interrupted restore."""
    names = ("format", "epoch", "owner", "last", "incarnation", "rewriting", "past", "branch")
    try:
        values = await connection.call("HMGET", keys.named["wheel"], *names)
    except ServerError as error:
        if error.kind != "WRONGTYPE":
            raise
        return None, ()
    fields = {name: value.decode() for name, value in zip(names, values, strict=True) if value}
    if not fields:
        return None, evidence
    if "rewriting" in fields or not {"format", "epoch", "last"} <= fields.keys():
        return None, ()
    owner, branch = fields.get("owner", ""), fields.get("branch", "")
    check_restored(shown_name, owner, branch, opener)
    last = EpochRecord(int(fields["epoch"]), mark_of(owner), int(fields["last"]))
    past = read_past(fields.get("past", ""))
    return StoreIdentity(last, fields.get("incarnation", ""), past, branch), evidence


async def estimate(connection: Connection, keys: Keys) -> int:
    """Return the approximate bytes of memory that the shard's tasks will take in this daemon."""
    try:
        count: int = await connection.call("HLEN", keys.named["task"])
        size_bytes: int | None
        size_bytes = await connection.call(
            "MEMORY", "USAGE", keys.named["task"], "SAMPLES", SAMPLES
        )
    except ServerError:  # the user has no right to run MEMORY USAGE
        return 0
    return max(0, (size_bytes or 0) + count * (TASK_BYTES - REDIS_TASK_BYTES))


def _refused(options: RedisOptions, keys: Keys, status: str, details: list[str]) -> StoreUnusable:
    if status == "rewriting" and details[0].startswith(LOST_BY):
        status, details = "lost", [details[0].removeprefix(LOST_BY)]
    message = {
        "foreign": "the key {0} belongs to another program; choose another ?prefix= or ?namespace=,"
        " or remove it",
        "unreleased": "{shard} was written before the first release, and its format is no longer"
        " supported; drain it with the program that wrote it, and choose another ?prefix= or"
        " ?namespace=",
        "newer": "{shard} has layout {0}; this release reads layouts up to {layout}: use a newer"
        " release",
        "damaged": "{shard}:wheel lacks fields; restore a backup",
        "empty": "{shard} is empty, and another daemon may still have its data in memory",
        "rewriting": "{shard} is incomplete, because {0} was rewriting it; keep that daemon running"
        " if it still runs, or restore a backup",
        "lost": "{shard} lacks data that {0} had confirmed; run `tickwheel init --force`, then"
        " `tickwheel restore`",
    }[status]
    return unusable(options.name, message.format(*details, shard=keys.shard, layout=LAYOUT))


def _refusal(options: RedisOptions, error: ServerError) -> StoreUnusable:
    if error.kind in _PASSING:
        return unreachable(options.name, error)
    if error.kind not in _PASSWORD:
        return unusable(options.name, error.message)
    return unusable(
        options.name,
        f"it refused user {options.username or 'default'!r}: {error.message};"
        " check user and password in the store's URL, and the user's ACL",
    )


def connected_to(options: RedisOptions) -> AbstractAsyncContextManager[Connection]:
    """Return a connection for a short while. Raise StoreUnusable or StoreUnreachable."""
    check(options)
    return connected(options.name, Connection(options))


# --- administration ------------------------------------------------------------------------------

COUNTED = ("tasks", "in_flight_or_waiting", "dead", "records")


class RedisAdministration:
    """See ``contract.Administration``."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._keys = Keys(options.prefix, options.namespace, options.shard)
        self.shard = options.shard

    async def look(self) -> StoredShard:
        options, keys = self._options, self._keys
        async with connected_to(self._options) as connection:
            await inspect(connection, options)
            reply: list[Any] = await connection.run(
                INIT_LOOK, (*keys.all, keys.leader), (LAYOUT, *TYPES)
            )
        status, *fields = reply
        if status != b"seen":
            raise self._refused(status.decode(), fields)
        exists, is_complete, epoch, incarnation, _, rewriting, parts, last, *counts = fields
        return StoredShard(
            store=options.name,
            shard=keys.shard,
            exists=exists == b"1",
            is_complete=is_complete == b"1" or exists == b"0",
            rewriting=rewriting.decode(),
            epoch=int(epoch),
            incarnation=incarnation.decode(),
            counts=dict(zip(COUNTED, map(int, counts), strict=True)),
            parts=int(parts),
            last=int(last),
        )

    async def lay_out(
        self, stored: StoredShard, now_ms: int, *, watch_s: float | None = None,
        is_branch: bool = False,
    ) -> str:  # fmt: skip
        keys, incarnation = self._keys, secrets.token_hex(8)
        async with connected_to(self._options) as connection:
            await self._watch(connection, watch_s)
            args = (LAYOUT, int(stored.exists), stored.epoch, stored.incarnation, incarnation,
                    INIT_OWNER, now_ms, NEW if is_branch else "", *TYPES)  # fmt: skip
            status, *details = await connection.run(INIT_LAY_OUT, (*keys.all, keys.leader), args)
            if status != b"laid out":
                raise self._refused(status.decode(), details)
            part = 1
            while await connection.call("UNLINK", keys.stage(part)) or part < stored.parts:
                part += 1
        return incarnation

    async def upgrade(self, *, dry_run: bool = False, watch_s: float | None = None) -> Upgrade:
        options, keys = self._options, self._keys
        steps: tuple[str, ...] = ()
        async with connected_to(self._options) as connection:
            await inspect(connection, options)
            layout = await self._layout(connection)
            if 0 < layout < LAYOUT:
                # The next opening changes the scores of ``store``; see ``Recovering.upgrade``.
                steps = (f"HSET {keys.shard}:wheel format {LAYOUT}",)
                if not dry_run:
                    await self._watch(connection, watch_s)
                    await self._layout(connection, upgrades=True)
        return Upgrade(f"{keys.shard} in {options.name}", layout, LAYOUT, steps)

    async def _layout(self, connection: Connection, *, upgrades: bool = False) -> int:
        """Return the layout of the shard, 0 if it is empty. If it ``upgrades``, set the layout."""
        names, args = (*self._keys.all, self._keys.leader), (LAYOUT, int(upgrades), *TYPES)
        status, detail = await connection.run(INIT_UPGRADE, names, args)
        if status != b"seen":
            raise self._refused(status.decode(), [detail])
        return int(detail)

    async def begin_branch(self, *, watch_s: float | None = None) -> None:
        options, keys = self._options, self._keys
        async with connected_to(self._options) as connection:
            await self._watch(connection, watch_s)
            if not await connection.call("HLEN", keys.named["wheel"]):
                reason = f"{keys.shard} is empty: there is no store to continue with"
                raise unusable(options.name, reason)
            # The new incarnation fences earlier users of the shard.
            values = ("branch", NEW, "incarnation", secrets.token_hex(8))
            await connection.call("HSET", keys.named["wheel"], *values)

    async def end_restore(self, after: str) -> None:
        values = chain.from_iterable(restored(after).items())
        async with connected_to(self._options) as connection:
            await connection.call("HSET", self._keys.named["wheel"], *values)

    async def _watch(self, connection: Connection, watch_s: float | None) -> None:
        """Raise StoreUnusable if a daemon leads the shard within ``watch_s``."""

        async def find() -> StoreUnusable | None:
            value = await connection.call("GET", self._keys.leader)
            return None if value is None else self._refused("led", [value])

        await watch_lease(find, watch_s)

    def _refused(self, status: str, details: list[Any]) -> StoreUnusable:
        """Return the error for the reply of a script."""
        options, keys = self._options, self._keys
        first = details[0].decode(errors="replace") if details else ""
        if status == "led":
            owner, _, other = first.partition("|")
            return led(options.name, owner, other.partition("|")[0], keys.shard)
        if status in ("foreign", "newer"):
            return _refused(options, keys, status, [first])
        reason = f"{keys.shard} has changed since it was read; run the command again"
        return unusable(options.name, reason)
