"""A connection to Redis, with time-outs, scripts and reconnection; and the location of a shard's
server (``Place``): a fixed address, the master that Sentinels name, or the node of a Cluster that
serves the shard's slot.

Calls run one at a time, in order. Invariant: a call that gets no answer closes the connection, so
an answer is never assigned to another call. ``check`` checks the driver and the files in the
options.

A shard is on one master, because its keys share a hash tag. So a Cluster differs from a single
Redis only in the address. ``Place.connect`` finds the server, connects and asks for its role. It is
called for each new connection, and relies on no earlier information. A Sentinel or node can have
outdated information after a partition or a pause, so all are asked at once, and the majority
decides.

A call that a server refuses because it no longer has the shard (MOVED, READONLY) is sent to the new
server. A call that is refused temporarily (a slot in migration, a Cluster without a master) is
retried until its time-out. Both are safe for every command here: Redis refuses before the first
write, and the connection has no other call in progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from binascii import crc_hqx
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tickwheel.persistence.contract import StoreUnusable
from tickwheel.persistence.on_server import Address, NoReply, NotConnected, ServerTrouble
from tickwheel.persistence.redis.driver import (
    CLUSTER,
    SENTINEL,
    Argument,
    Driver,
    RedisOptions,
    ServerError,
)
from tickwheel.persistence.redis.layout import Script
from tickwheel.waiting import cancel_all

SLOTS = 16_384
ASK_TIMEOUT_DIVISOR = 2
"""Divisor of ``connect_ms``: the limit for answers about the master's address is half of it."""
NODES_ASKED_MAX = 16
"""Maximum nodes of a Cluster to ask: the seeds, then the nodes in the last answer."""
REASONS_MAX = 3
"""Maximum number of servers whose failures a message lists."""


async def connect(options: RedisOptions) -> Driver:
    """Return a connected, authenticated driver with the database selected. Raise NotConnected,
    NoReply or ServerError."""
    if options.driver == "asyncio-redis":
        from tickwheel.persistence.redis.driver_asyncio_redis import AsyncioRedisWire

        return await AsyncioRedisWire.connect(options)
    from tickwheel.persistence.redis.driver_redis import RedisWire

    return await RedisWire.connect(options)


class Place(Protocol):
    """The location of a shard's server."""

    @property
    def can_move(self) -> bool:
        """Whether the shard can change its server."""
        ...

    @property
    def doing(self) -> str:
        """The current step of ``connect``, for messages; can be empty."""
        ...

    async def connect(self) -> tuple[Address, Driver]:
        """Connect to the current server. Raise ServerTrouble."""
        ...

    def note_redirect(self, error: ServerError) -> None:
        """Remember the address in this error, if it has one."""
        ...


def place_of(options: RedisOptions) -> Place:
    if options.kind == SENTINEL:
        return Sentinels(options)
    if options.kind == CLUSTER:
        return Nodes(options)
    return Fixed(options)


class Fixed:
    """One server at one address."""

    can_move = False
    doing = ""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options

    async def connect(self) -> tuple[Address, Driver]:
        options = self._options
        return Address(options.host, options.port), await connect(options)

    def note_redirect(self, error: ServerError) -> None:
        pass


class _DiscoveredPlace:
    """The common part of Sentinels and a Cluster: several servers name the master's address."""

    can_move = True

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._last: Address | None = None
        self.doing = ""

    async def _connect_to(self, address: Address) -> tuple[Address, Driver]:
        """Connect to this server. Raise NotConnected unless it is a master."""
        self.doing = f"connecting to the master at {address}"
        host, port = address
        wire = await connect(replace(self._options, host=host, port=port))
        try:
            self.doing = f"asking {address} for its role"
            role: list[Any] = await wire.call("ROLE")
            if role[0] != b"master":
                raise NotConnected(f"{address} is named as the master, but it is a replica")
        except BaseException:
            await wire.close()
            raise
        self._last, self.doing = address, ""
        return address, wire

    async def _find_master(self, servers: Sequence[Address]) -> Address:
        """Ask these servers for the master. Return the address that more than half of them name or,
        at the time-out, the address named most often. Raise NotConnected if none names any."""
        limit_s = self._options.connect_ms / 1000 / ASK_TIMEOUT_DIVISOR
        tasks = {asyncio.create_task(self._ask(server)): server for server in servers}
        votes: Counter[Address] = Counter()
        reasons: dict[Address, str] = dict.fromkeys(servers, "no answer")
        try:
            async with asyncio.timeout(limit_s):
                for ended in asyncio.as_completed(tasks):
                    server, answer = await ended
                    if isinstance(answer, str):
                        reasons[server] = answer
                        continue
                    votes[answer] += 1
                    if votes[answer] > len(servers) / 2:
                        return answer
        except TimeoutError:
            pass
        finally:
            await cancel_all(tasks)
        if not votes:
            raise NotConnected(_reasons(reasons))
        # If votes are equal, an address other than the last one is newer.
        return max(votes, key=lambda address: (votes[address], address != self._last))

    async def _ask(self, server: Address) -> tuple[Address, Address | str]:
        """Return the server, and the address that it names or the reason why it names none."""
        try:
            wire = await connect(self._options_for(server))
        except ServerTrouble as error:
            return server, error.message
        try:
            return server, await self._ask_on(wire, server)
        except (NoReply, ServerError) as error:
            return server, error.message
        finally:
            await wire.close()

    def _options_for(self, server: Address) -> RedisOptions:
        return replace(self._options, host=server.host, port=server.port, db=0)

    async def _ask_on(self, wire: Driver, server: Address) -> Address | str:
        raise NotImplementedError


class Sentinels(_DiscoveredPlace):
    """Finds the master by asking Sentinels."""

    async def connect(self) -> tuple[Address, Driver]:
        self.doing = f"asking {len(self._options.seeds)} sentinels for the master"
        return await self._connect_to(await self._find_master(self._options.seeds))

    def note_redirect(self, error: ServerError) -> None:
        """Do nothing: a demoted master does not name its successor."""

    def _options_for(self, server: Address) -> RedisOptions:
        options = super()._options_for(server)
        file = options.sentinel_password_file
        try:
            password = Path(file).read_text().strip() if file else ""
        except OSError as error:
            reason = f"sentinel_password_file {file}: {error.strerror}"
            raise NotConnected(reason) from error
        return replace(options, username=options.sentinel_user, password=password)

    async def _ask_on(self, wire: Driver, server: Address) -> Address | str:
        name = self._options.master
        address = await wire.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name)
        if address is None:
            return f"it does not know the master {name!r} (master=)"
        host, port = address
        return Address(host.decode(), int(port))


class Nodes(_DiscoveredPlace):
    """Finds the node of a Cluster that serves the shard's slot."""

    def __init__(self, options: RedisOptions) -> None:
        super().__init__(options)
        self._slot = slot_of(options)
        self._nodes: tuple[Address, ...] = ()
        self._hint: Address | None = None

    async def connect(self) -> tuple[Address, Driver]:
        hint, self._hint = self._hint, None
        if hint is not None:
            try:
                return await self._connect_to(hint)
            except ServerTrouble:
                pass  # ask all nodes
        servers = tuple(dict.fromkeys((*self._options.seeds, *self._nodes)))[:NODES_ASKED_MAX]
        self.doing = f"asking {len(servers)} nodes for the one that has slot {self._slot}"
        return await self._connect_to(await self._find_master(servers))

    def note_redirect(self, error: ServerError) -> None:
        kind, _, location = error.message.partition(" ")
        host, _, port = location.partition(" ")[2].rpartition(":")
        if kind == "MOVED" and port.isdecimal():
            # An address without a host means the host of the answering server.
            last_host = self._last.host if self._last is not None else ""
            self._hint = Address(host if host not in ("", "?") else last_host, int(port))

    async def _ask_on(self, wire: Driver, server: Address) -> Address | str:
        ranges = slot_ranges(await wire.call("CLUSTER", "SLOTS"), server)
        self._nodes = tuple(node for slots in ranges for node in slots.nodes)
        master = master_of(self._slot, ranges)
        return f"no node serves slot {self._slot}" if master is None else master


class SlotRange(NamedTuple):
    """A range of a Cluster's slots on the same nodes."""

    first: int
    last: int
    nodes: Sequence[Address]
    """The master, then its replicas."""


def slot_of(options: RedisOptions) -> int:
    """Return the Cluster slot of a shard."""
    return crc_hqx(options.tag.encode(), 0) % SLOTS


def slot_ranges(answer: Sequence[Sequence[Any]], server: Address) -> list[SlotRange]:
    """Parse the answer to CLUSTER SLOTS. A node without a host has the host of ``server``,
    which sent the answer."""

    def address(node: Sequence[Any]) -> Address:
        host = node[0].decode() if node[0] else ""
        return Address(host if host not in ("", "?") else server.host, node[1])

    return [SlotRange(first, last, tuple(map(address, nodes))) for first, last, *nodes in answer]


def master_of(slot: int, ranges: Sequence[SlotRange]) -> Address | None:
    """Return the master of this slot, or None if no node serves it."""
    return next((slots.nodes[0] for slots in ranges if slots.first <= slot <= slots.last), None)


def _reasons(reasons: dict[Address, str]) -> str:
    shown = [f"{server}: {reason}" for server, reason in list(reasons.items())[:REASONS_MAX]]
    omitted = len(reasons) - len(shown)
    return "; ".join([*shown, *([f"and {omitted} more"] if omitted else [])])


# --- the connection -------------------------------------------------------------------------------

log = logging.getLogger(__name__)
_UNAVAILABLE = re.compile(
    r"(?:unknown .*command|NOPERM|can't run this command|ACL failure).*@user_script: ?(\d+)",
    re.IGNORECASE,
)
"""Redis's error when a script calls a command that was renamed or that the user may not run. It
contains only the line number, not the command."""


def is_command_unavailable(error: ServerError) -> bool:
    """Return whether the server does not know a command, or the user may not run it."""
    message = error.message.lower()
    is_outside = error.kind == "NOPERM" or "unknown command" in message
    return is_outside or _UNAVAILABLE.search(message) is not None


def _with_script_line(error: ServerError, script: Script) -> ServerError:
    """Return the error with the text of the script line, which contains the command."""
    if (match := _UNAVAILABLE.search(error.message)) is None:
        return error
    line = dict(enumerate(script.text.splitlines(), 1)).get(int(match[1]), "").strip()
    message = error.message.removeprefix(error.kind).strip()
    return ServerError(error.kind, f"{message}: {line}")


RECONNECT_ERRORS = frozenset(("READONLY", "MOVED", "MASTERDOWN", "LOADING", "NOAUTH"))
"""Errors after which the next call reconnects, possibly to another server."""
SHARD_MOVED_ERRORS = frozenset(("READONLY", "MOVED", "MASTERDOWN"))
"""Errors in ``RECONNECT_ERRORS`` from a server that no longer has the shard."""
TEMPORARY_ERRORS = frozenset(("ASK", "TRYAGAIN", "CLUSTERDOWN"))
"""Temporary errors of a Cluster. During the migration of a slot, its node answers ASK or TRYAGAIN
to every script, because the script's keys are on both nodes or do not exist. The other node would
refuse the script for the same reason. Therefore the redirect of an ASK is ignored, and the call is
retried until it gets MOVED."""
TEMPORARY_RETRY_S = 0.02
REDIRECTS_MAX = 3
"""Maximum number of times that one call is sent to another server."""
RETRY_S = 0.2
"""Minimum seconds between a failed connection attempt and the next one."""


class Connection:
    """A connection to Redis. After a failure, the next call connects again."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._place = place_of(options)
        self._wire: Driver | None = None
        self._lock = asyncio.Lock()
        self._failed_s = float("-inf")
        self._failure = ""
        self.connections = 0
        """Number of connections made so far; each new one must claim the shard."""
        self.address: Address | None = None
        """The server of the last connection, or None before the first connection."""
        self._since_s = 0.0
        self.server_changes = 0
        """Number of connections to a server other than the previous one."""
        self._timeout = _CallTimeout()

    @property
    def address_text(self) -> str:
        """The server of the last connection, ``HOST:PORT``; empty before the first connection."""
        return "" if self.address is None else str(self.address)

    @property
    def connected(self) -> bool:
        return self._wire is not None

    @property
    def connected_s(self) -> int:
        """Age of the connection in seconds, rounded down; 0 if there is no connection."""
        return int(asyncio.get_running_loop().time() - self._since_s) if self.connected else 0

    async def run(
        self,
        script: Script,
        keys: Sequence[bytes],
        args: Sequence[Argument],
        *,
        patience: int = 1,
    ) -> Any:
        """Run a script and return its reply. The time-out is ``patience`` times that of a command.
        Raise NotConnected (nothing was sent), NoReply or ServerError."""
        key_args = (len(keys), *keys, *args)
        timeout_ms = patience * self._options.call_ms
        try:
            return await self.call("EVALSHA", script.sha, *key_args, timeout_ms=timeout_ms)
        except ServerError as error:
            if error.kind != "NOSCRIPT":
                raise _with_script_line(error, script) from None
        try:
            return await self.call("EVAL", script.text, *key_args, timeout_ms=timeout_ms)
        except ServerError as error:
            raise _with_script_line(error, script) from None

    async def ready(self) -> None:
        """Connect if there is no connection. If that fails, the next call raises the error."""
        async with self._lock:
            if self._wire is None:
                with contextlib.suppress(NotConnected, ServerError):
                    await self._connect()

    async def call(self, *args: Argument, timeout_ms: int = 0) -> Any:
        """Run one command, and connect first if necessary. Raise NotConnected, NoReply or
        ServerError."""
        timeout_ms = timeout_ms or self._options.call_ms
        loop, redirects = asyncio.get_running_loop(), 0
        until_s = loop.time() + timeout_ms / 1000
        async with self._lock:
            while True:
                wire = self._wire or await self._connect()
                try:
                    return await self._call(wire, args, timeout_ms)
                except ServerError as error:
                    if not self._place.can_move:
                        raise
                    if error.kind in SHARD_MOVED_ERRORS and redirects < REDIRECTS_MAX:
                        redirects += 1
                    elif error.kind not in TEMPORARY_ERRORS:
                        raise
                    elif loop.time() >= until_s:
                        await self._drop(error.message)  # the next call asks all nodes
                        raise
                    else:
                        await asyncio.sleep(TEMPORARY_RETRY_S)
                        if self._wire is not wire:
                            raise NotConnected(f"{self._options.name}: {self._failure}") from None

    async def _call(self, wire: Driver, args: tuple[Argument, ...], timeout_ms: int) -> Any:
        timeout = self._timeout
        timeout.begin(wire, timeout_ms / 1000)
        try:
            return await wire.call(*args)
        except ServerError as error:
            if error.kind in RECONNECT_ERRORS:
                self._place.note_redirect(error)
                await self._drop(error.message)
            raise
        except BaseException as error:
            if timeout.is_over and isinstance(error, NoReply):
                await self._drop("it did not answer in time")
                message = f"{self._named} did not answer within {timeout_ms} ms"
                raise NoReply(message, silent=True) from None
            await self._drop(str(error))
            raise
        finally:
            timeout.end()

    @property
    def _named(self) -> str:
        """The store, and the server if there are several, for messages."""
        return (
            f"{self._options.name} at {self.address_text}"
            if self._place.can_move
            else self._options.name
        )

    async def drop_if_movable(self) -> None:
        """Make the next call look up the shard's server again, because this server did not behave
        as a master."""
        if self._place.can_move:
            await self._drop(f"{self.address_text} is in doubt")

    async def _connect(self) -> Driver:
        options, loop = self._options, asyncio.get_running_loop()
        if loop.time() < self._failed_s + RETRY_S:
            raise NotConnected(f"{options.name}: {self._failure}")
        try:
            async with asyncio.timeout(options.connect_ms / 1000):
                address, self._wire = await self._place.connect()
        except TimeoutError:
            doing = f", {self._place.doing}" if self._place.doing else ""
            self._failure = f"no connection within {options.connect_ms} ms{doing}"
        except (NotConnected, NoReply) as error:
            self._failure = error.message
        except ServerError as error:
            self._failed_s, self._failure = loop.time(), error.message
            if error.kind != "ERR":  # such as: max number of clients reached
                raise
        else:
            self.connections += 1
            self._since_s = loop.time()
            self._note(address)
            return self._wire
        self._failed_s = loop.time()
        raise NotConnected(f"{options.name}: {self._failure}")

    def _note(self, address: Address) -> None:
        before, self.address = self.address, address
        if before is not None and before != address:
            self.server_changes += 1
            log.warning("store %s: moved from %s to %s", self._options.name, before, address)

    async def _drop(self, reason: str) -> None:
        wire, self._wire = self._wire, None
        self._failure = reason
        if wire is not None:
            await wire.close()

    async def close(self) -> None:
        """Close the connection, and end a call in progress."""
        self._timeout.close()
        await self._drop("the store is closed")


class _CallTimeout:
    """The time-out of calls, with one timer for many calls. When it expires, it is set again for
    the time-out of the current call."""

    def __init__(self) -> None:
        self.is_over = False
        """Whether the most recent call has timed out."""
        self._wire: Driver | None = None
        """The driver of the current call, or None if no call is in progress."""
        self._until_s = self._rings_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, wire: Driver, timeout_s: float) -> None:
        """Begin a call that may take up to ``timeout_s`` seconds."""
        loop = asyncio.get_running_loop()
        self._wire, self.is_over = wire, False
        self._until_s = until_s = loop.time() + timeout_s
        if self._timer is None or until_s < self._rings_s:
            self._set(loop)

    def end(self) -> None:
        """End the call."""
        self._wire = None

    def _set(self, loop: asyncio.AbstractEventLoop) -> None:
        self.close()
        self._rings_s = self._until_s
        self._timer = loop.call_at(self._rings_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._wire is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._until_s:
            self._set(loop)
        else:
            self.is_over = self._wire.give_up()

    def close(self) -> None:
        """Cancel the timer."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()


def check(options: RedisOptions) -> None:
    """Raise StoreUnusable if the driver is missing, or does not support the options."""
    try:
        if options.driver == "asyncio-redis":
            import tickwheel.persistence.redis.driver_asyncio_redis
        else:
            import tickwheel.persistence.redis.driver_redis  # noqa: F401
    except ModuleNotFoundError as error:
        raise StoreUnusable(
            f"store {options.name}: the module {error.name!r} is missing;"
            f" pip install 'tickwheel[{options.driver}]'"
        ) from None
    if options.driver == "asyncio-redis" and options.tls:
        raise StoreUnusable(
            f"store {options.name}: the driver asyncio-redis does not support TLS;"
            " remove ?driver=asyncio-redis, or use redis://"
        )
    for setting in ("tls_ca", "tls_cert", "tls_key", "sentinel_password_file"):
        path = getattr(options, setting)
        if path and setting.startswith("tls") and not options.tls:
            raise StoreUnusable(
                f"store {options.name}: {setting} needs TLS; use rediss://, or remove it"
            )
        if path and not Path(path).is_file():
            raise StoreUnusable(f"store {options.name}: {setting}: the file {path} does not exist")
