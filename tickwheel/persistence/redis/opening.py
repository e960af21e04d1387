"""Opening a shard: look at the server and at the user's rights, then lay the shard out or begin an
epoch. Whatever would lose tasks silently is refused here, with what to change.

A right that is missing would otherwise show in the middle of a script, after its first writes, or
only when something is acknowledged. Nothing is changed by trying: every command gets the key that
never exists, or arguments that Redis refuses after it has looked at the user's rights.

Laying a shard out on an operator's word: an empty one, or one whose data is given up.

For ``tickwheel init``; a daemon lays out its shard by itself (``begin``), but never one that
may belong to another. Invariants: nothing is done while a daemon leads the shard; nothing is
removed but what was looked at before, nor any key that is not ours; whoever used the shard
before is fenced, by the incarnation and by the epoch.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tickwheel.persistence.contract import (
    Known,
    Opened,
    StoreError,
    StoreUnreachable,
    StoreUnusable,
)
from tickwheel.persistence.identity import (
    NEW,
    Began,
    Held,
    begin,
    mark_of,
    past_text,
    read_past,
    restored,
)
from tickwheel.persistence.redis.connection import Connection, check
from tickwheel.persistence.redis.driver import (
    CLUSTER,
    Argument,
    NoReply,
    NotConnected,
    RedisOptions,
    ServerError,
)
from tickwheel.persistence.redis.layout import (
    INIT_LAY_OUT,
    INIT_LOOK,
    LAYOUT,
    LOST_BY,
    OPEN,
    RIGHTS,
    TYPES,
    Keys,
)
from tickwheel.persistence.redis.mirror import TASK_BYTES

OUTSIDE = (
    "client|setname", "select", "eval", "evalsha", "wait", "memory|usage", "config|get",
    "role", "cluster|slots",
)  # fmt: skip
"""Commands outside of scripts: ``select`` for databases but 0, ``wait`` for ``wait_replicas``,
``role`` for a server that moves, ``cluster|slots`` for a Cluster;
without ``memory|usage`` the size of the data is known only when it is loaded, and without
``config|get`` STATUS cannot say what survives a power cut."""
_TRIED: dict[str, tuple[str, ...]] = {
    "get": (), "hdel": ("f",), "hget": ("f",), "hlen": (), "hmget": ("f",),
    "hscan": ("0",), "hset": ("f", "v", "f"), "lindex": ("0",), "lpop": (), "lrange": ("0", "0"),
    "pexpire": ("x",), "pttl": (), "set": ("v", "PX", "0"), "setrange": ("0", ""), "type": (),
    "unlink": (), "zadd": ("x", "m"), "zcard": (), "zcount": ("0", "0"), "zmscore": ("m",),
    "zrange": ("0", "0"), "zrangebylex": ("-", "+"), "zrem": ("m",), "zscan": ("0",),
}  # fmt: skip
"""Command in a script → the arguments behind the key in a trial."""
COMMANDS = ("exists", "del", "info", *_TRIED, "rpush")


async def missing_rights(line: Connection, options: RedisOptions) -> tuple[list[str], list[str]]:
    """The commands that scripts may not run, and those that this server does not know. Raises
    Answer for commands outside, Away, Lost."""
    keys = Keys(options.prefix, options.namespace, options.shard)
    names = (*keys.all, keys.leader, keys.stage(1))
    tried: list[Argument] = []
    for name, rest in _TRIED.items():
        tried += (name, len(rest), *rest)
    reply: list[Any] = await line.call("EVAL", RIGHTS.text, len(names), *names, *tried)
    try:
        await line.call("EVALSHA", RIGHTS.sha, len(names), *names)
    except ServerError as error:
        if error.kind != "NOSCRIPT":  # another server, or one whose scripts were flushed
            raise
    if options.wait_replicas:
        await line.call("WAIT", 0, 1)
    missing, unknown = ([name.decode() for name in names] for names in reply)
    return missing, unknown


VERSION_MIN = (6, 2)
LOAD_POLL_S = 0.25
LOAD_LOG_S = 15.0
"""How often a wait for a loading Redis is logged, in seconds."""
SAMPLES = 1_000
THEIR_TASK_BYTES = 100
"""The bytes that Redis reports for a task beside its record (measured)."""
_POWER = "a power cut of Redis' machine"
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
"""What a Cluster says for a while: a start waits for its end."""
_PASSWORD = ("WRONGPASS", "NOAUTH", "NOPERM")


async def inspect(line: Connection, options: RedisOptions) -> None:
    """Raises StoreUnusable when this server must not be used, naming what to change."""
    info = await _info(line, options)
    version = tuple(int(part) for part in info.get("redis_version", "0").split(".")[:2])
    if version < VERSION_MIN:
        raise _unusable(options, f"it is version {info.get('redis_version')}; 6.2 is the oldest")
    if info.get("cluster_enabled") == "1" and options.kind != CLUSTER:
        raise _unusable(
            options,
            "it is a node of a Redis Cluster; name it with redis+cluster://HOST:PORT,…/",
        )
    if info.get("role") == "slave":
        raise _unusable(
            options,
            f"it is a replica of {info.get('master_host')}:{info.get('master_port')};"
            " name the primary",
        )
    await _may_do_all(line, options)
    if options.allow_volatile_store:
        return
    if info.get("aof_enabled") != "1":
        raise _unusable(
            options,
            "it keeps no append-only file and would forget tasks when it stops;"
            " set `appendonly yes` (CONFIG SET appendonly yes, then CONFIG REWRITE),"
            " or insist with --allow-volatile-store (or ?allow_volatile_store=1 in the URL)",
        )
    policy = info.get("maxmemory_policy")
    if policy != "noeviction":
        raise _unusable(
            options,
            f"its maxmemory-policy {policy} would drop tasks when memory is short;"
            " set `maxmemory-policy noeviction` (CONFIG SET, then CONFIG REWRITE),"
            " or insist with --allow-volatile-store (or ?allow_volatile_store=1 in the URL)",
        )


async def _may_do_all(line: Connection, options: RedisOptions) -> None:
    try:
        missing, unknown = await missing_rights(line, options)
    except (NotConnected, NoReply) as error:
        raise _unreachable(options, error) from error
    except ServerError as error:
        raise _refusal(options, error) from error
    if unknown:
        raise _unusable(
            options,
            f"it does not know the command {', '.join(unknown)}; `rename-command` in its"
            " configuration takes commands away that are needed",
        )
    if missing:
        user = options.username or "default"
        raise _unusable(
            options,
            f"it does not let user {user!r} run {', '.join(missing)};"
            f" ACL SETUSER {user} {' '.join(f'+{name}' for name in missing)}",
        )


async def _info(line: Connection, options: RedisOptions) -> dict[str, str]:
    """What INFO says; waits for a server that is still loading its data."""
    loop = asyncio.get_running_loop()
    patience_s, log_s = loop.time() + options.load_ms / 1000, loop.time()
    while True:
        try:
            text: bytes = await line.call("INFO")
            pairs = (row.split(":", 1) for row in text.decode().splitlines() if ":" in row)
            info = dict(pairs)
            if info.get("loading", "0") == "0":
                return info
            if loop.time() >= patience_s:
                raise _unusable(options, "it is still loading its data")
            if loop.time() >= log_s:
                log_s += LOAD_LOG_S
                log.warning(
                    "store %s: waiting for Redis, which is loading its data (%s%% done): for %.0f s"
                    " at most (load_ms)",
                    options.name,
                    info.get("loading_loaded_perc", "?"),
                    patience_s - loop.time(),
                )
        except ServerError as error:
            raise _refusal(options, error) from error
        except (NotConnected, NoReply) as error:
            raise _unreachable(options, error) from error
        await asyncio.sleep(LOAD_POLL_S)


async def durability(line: Connection, options: RedisOptions) -> str:
    """See ``Store.durability``. Raises Away, Lost."""
    unless = (
        f"unless the daemon lives on, which {_again(options)}; the end of its process loses none"
    )
    copies = "" if options.mirror else f"; {_stops(options)}"
    if options.wait_replicas:
        copies += f"; {options.wait_replicas} of its replicas have it before it is confirmed"
    info = await _info(line, options)
    if (policy := info.get("maxmemory_policy")) != "noeviction":
        copies += f"; its maxmemory-policy {policy} can drop tasks"
    if info.get("aof_enabled") != "1":
        return _VOLATILE + copies
    try:
        found = await line.call("CONFIG", "GET", "appendfsync")
    except ServerError:  # not allowed to this user, or renamed
        return _UNKNOWN.format(unless=unless) + copies
    values = found.values() if isinstance(found, dict) else found[1::2]
    known = [DURABILITY[v] for v in map(_text, values) if v in DURABILITY]
    return (known[0] if known else _UNKNOWN).format(unless=unless) + copies


def _again(options: RedisOptions) -> str:
    """What a daemon does for a Redis that lacks what it had confirmed."""
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
    line: Connection,
    keys: Keys,
    options: RedisOptions,
    owner: str,
    now_ms: int,
    may_create: bool,
    epoch_min: int = 1,
    known: Sequence[Known] = (),
) -> tuple[Opened, str]:
    """Begin an epoch; returns also the incarnation. Raises StoreUnusable, Away, Lost, Answer.

    What the shard says of itself is read before: nobody else opens it while this daemon has the
    leader's lease, and it is no safeguard against those that do, but against loss.
    """
    held, compared = await _held(line, keys, known)
    begun = begin(f"store {options.name}: {keys.shard}", held, compared, epoch_min)
    fresh = secrets.token_hex(8)
    past = past_text([one._replace(batch=NO_BATCH) for one in begun.past])
    args = (owner.encode(), now_ms, fresh, LAYOUT, int(may_create), begun.epoch, past, *TYPES)
    reply: list[Any] = await line.run(OPEN, keys.all, args)
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
    return opened, opened.incarnation


async def _held(
    line: Connection, keys: Keys, known: Sequence[Known]
) -> tuple[Held | None, Sequence[Known]]:
    """What the shard says of itself, and what to compare it with: nothing, when it is not whole or
    none of ours, which the script says."""
    names = ("format", "epoch", "owner", "last", "incarnation", "rewriting", "past", "branch")
    try:
        found = await line.call("HMGET", keys.named["wheel"], *names)
    except ServerError as error:
        if error.kind != "WRONGTYPE":
            raise
        return None, ()
    said = {name: value.decode() for name, value in zip(names, found, strict=True) if value}
    if not said:
        return None, known
    if "rewriting" in said or not {"format", "epoch", "last"} <= said.keys():
        return None, ()
    last = Began(int(said["epoch"]), mark_of(said.get("owner", "")), int(said["last"]))
    past = read_past(said.get("past", ""))
    return Held(last, said.get("incarnation", ""), past, said.get("branch", "")), known


async def estimate(line: Connection, keys: Keys) -> int:
    """About how many bytes of this daemon's memory the tasks of the shard will take."""
    try:
        count: int = await line.call("HLEN", keys.named["task"])
        held: int | None
        held = await line.call("MEMORY", "USAGE", keys.named["task"], "SAMPLES", SAMPLES)
    except ServerError:  # not allowed to this user: it will be known when they are loaded
        return 0
    return max(0, (held or 0) + count * (TASK_BYTES - THEIR_TASK_BYTES))


def _refused(options: RedisOptions, keys: Keys, status: str, rest: list[str]) -> StoreUnusable:
    if status == "rewriting" and rest[0].startswith(LOST_BY):
        status, rest = "lost", [rest[0].removeprefix(LOST_BY)]
    message = {
        "foreign": "the key {0} is not ours; choose another ?prefix= or ?namespace=, or remove it",
        "unreleased": "{shard} was written before the first release and is not read any more; drain"
        " it with the program that wrote it, and choose another ?prefix= or ?namespace=",
        "newer": "{shard} has layout {0}; this release knows layouts up to {layout}: run a newer"
        " release",
        "damaged": "{shard}:wheel lacks fields; restore a backup",
        "empty": "{shard} is empty, and another daemon may still hold what was in it",
        "rewriting": "{shard} was being written anew by {0} and is not whole; start that daemon"
        " again if it is alive, or restore a backup",
        "lost": "{shard} lacks what {0} had confirmed; `tickwheel init --force`, then `tickwheel"
        " restore`",
    }[status]
    return _unusable(options, message.format(*rest, shard=keys.shard, layout=LAYOUT))


def _refusal(options: RedisOptions, error: ServerError) -> StoreUnusable:
    if error.kind in _PASSING:
        return _unreachable(options, error)
    if error.kind not in _PASSWORD:
        return _unusable(options, error.message)
    return _unusable(
        options,
        f"it refused user {options.username or 'default'!r}: {error.message};"
        " check user and password in the store's URL, and the user's ACL",
    )


def _unusable(options: RedisOptions, why: str) -> StoreUnusable:
    return StoreUnusable(_named(options, why))


def _unreachable(options: RedisOptions, error: StoreError) -> StoreUnreachable:
    return StoreUnreachable(_named(options, error.message))


def _named(options: RedisOptions, why: str) -> str:
    return f"store {options.name}: {why.removeprefix(f'{options.name}: ')}"


NO_BATCH = 1 << 62
"""In place of an epoch's last batch: not compared, because a shard that was led by another machine
since then would never be led again by one that knows of batches that Redis had lost."""
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
    """The owner whose writing of the shard anew was cut short, or ``LOST_BY`` and the owner who
    had confirmed more; empty: it is whole."""
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
        if self.rewriting.startswith(LOST_BY):
            trouble += f"; it lacks what {self.rewriting.removeprefix(LOST_BY)} had confirmed"
        elif self.rewriting:
            trouble += f"; it was being written anew by {self.rewriting} and is not whole"
        return f"laid out (epoch {self.epoch}): {held}{trouble}"


async def look(options: RedisOptions) -> Found:
    """What the shard holds. Raises StoreUnusable if this server or shard must not be touched."""
    keys = Keys(options.prefix, options.namespace, options.shard)
    async with _line(options) as line:
        await inspect(line, options)
        reply: list[Any] = await line.run(INIT_LOOK, (*keys.all, keys.leader), (LAYOUT, *TYPES))
    status, *rest = reply
    if status != b"seen":
        raise _not_laid_out(options, keys, status.decode(), rest)
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
    options: RedisOptions, found: Found, now_ms: int, *, watch_s: float | None = None,
    is_branch: bool = False,
) -> str:  # fmt: skip
    """Remove what ``found`` lists, and lay the shard out; its new incarnation. ``is_branch``: the
    next epoch begins a new branch, whatever is known of the shard.

    Looks for a living daemon for ``watch_s`` first (default: LEADER_WATCH_S). Raises
    StoreUnusable: one leads the shard, or it is not any more as it was found.
    """
    keys = Keys(options.prefix, options.namespace, options.shard)
    incarnation = secrets.token_hex(8)
    async with _line(options) as line:
        await _watch(line, options, keys, LEADER_WATCH_S if watch_s is None else watch_s)
        args = (LAYOUT, int(found.exists), found.epoch, found.incarnation, incarnation, OWNER,
                now_ms, NEW if is_branch else "", *TYPES)  # fmt: skip
        status, *rest = await line.run(INIT_LAY_OUT, (*keys.all, keys.leader), args)
        if status != b"laid out":
            raise _not_laid_out(options, keys, status.decode(), rest)
        part = 1
        while await line.call("UNLINK", keys.stage(part)) or part < found.parts:
            part += 1
    return incarnation


async def begin_branch(options: RedisOptions, *, watch_s: float | None = None) -> None:
    """Let the next epoch of the shard begin a new branch, on an operator's word. Raises
    StoreUnusable when there is no shard, or a daemon leads it."""
    keys = Keys(options.prefix, options.namespace, options.shard)
    async with _line(options) as line:
        await _watch(line, options, keys, LEADER_WATCH_S if watch_s is None else watch_s)
        if not await line.call("HLEN", keys.named["wheel"]):
            raise _unusable(options, f"{keys.shard} is empty: there is no store to go on with")
        # Another incarnation: whoever used the shard before does not write to it any more.
        values = ("branch", NEW, "incarnation", secrets.token_hex(8))
        await line.call("HSET", keys.named["wheel"], *values)


async def end_restore(options: RedisOptions, after: str) -> None:
    """Let the next epoch begin a new branch of a shard that was filled, by who has the lease.
    ``after``: the mark of the epoch whose end it has."""
    wheel = Keys(options.prefix, options.namespace, options.shard).named["wheel"]
    async with _line(options) as line:
        await line.call("HSET", wheel, *chain.from_iterable(restored(after).items()))


async def _watch(line: Connection, options: RedisOptions, keys: Keys, watch_s: float) -> None:
    loop = asyncio.get_running_loop()
    until_s = loop.time() + watch_s
    while True:
        value = await line.call("GET", keys.leader)
        if value is not None:
            raise _not_laid_out(options, keys, "led", [value])
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


def _not_laid_out(options: RedisOptions, keys: Keys, status: str, rest: list[Any]) -> StoreUnusable:
    first = rest[0].decode(errors="replace") if rest else ""
    if status in ("foreign", "newer"):
        return _refused(options, keys, status, [first])
    why = f"{keys.shard} has changed since it was looked at; look again"
    if status == "led":
        owner, _, other = first.partition("|")
        address = other.partition("|")[0]
        why = f"{owner} at {address} leads {keys.shard}; stop it, and all that stand by, first"
    return _unusable(options, why)
