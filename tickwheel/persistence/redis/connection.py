"""A line to Redis: one connection at a time, time-outs, scripts, reconnecting when used; and where
the server is that a shard is on (``Place``): at a fixed address, at the master that Sentinels name,
or at the node of a Cluster that has the shard's slot.

One call at a time, in order. Invariant: after a call whose answer did not come the connection
is closed, so that an answer is never taken for another call's. ``check`` looks at the driver and
at files that the options name.

A shard lives whole on one master, because its keys share a hash tag. So a Cluster is no other store
than a single Redis: only the address moves. ``Place.connect`` finds it, connects and asks the
server for its role; it is called for each new connection, and nothing is remembered that could be
wrong. Who is asked may be behind the others (a Sentinel that was cut off, a node that was frozen),
so all are asked at once, and what most of them say counts.

If the server moves, what one refuses because it is not the one any more (MOVED, READONLY) is sent
once more to the one that is; and what it cannot take for a while (a slot under way to another node,
a Cluster without a master) waits for as long as a call may take. Both are safe for every command
here: Redis says so before the first write, so that nothing was changed, and nothing else is under
way on the connection.
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
from tickwheel.persistence.redis.driver import (
    CLUSTER,
    SENTINEL,
    Address,
    Argument,
    Driver,
    NoReply,
    NotConnected,
    RedisOptions,
    ServerError,
)
from tickwheel.persistence.redis.layout import Script

SLOTS = 16_384
ASKING_PART = 2
"""The part (a half) of ``connect_ms`` in which those who are asked have to answer."""
NODES_ASKED_MAX = 16
"""Of a Cluster: the seeds, and the nodes that were named last."""
REASONS_MAX = 3
"""In a message: so many of those who did not answer are named with their reason."""


async def connect(options: RedisOptions) -> Driver:
    """A connected, authenticated driver with the database selected. Raises Away or Answer."""
    if options.driver == "asyncio-redis":
        from tickwheel.persistence.redis.driver_asyncio_redis import AsyncioRedisWire

        return await AsyncioRedisWire.connect(options)
    from tickwheel.persistence.redis.driver_redis import RedisWire

    return await RedisWire.connect(options)


class Place(Protocol):
    """The server that a shard is on."""

    @property
    def moves(self) -> bool:
        """Whether another server may have the shard after a while."""
        ...

    @property
    def doing(self) -> str:
        """What ``connect`` is at, for a message that says what it waited for; may be empty."""
        ...

    async def connect(self) -> tuple[Address, Driver]:
        """A connection to that server as it is now. Raises NotConnected, NoReply, ServerError."""
        ...

    def is_elsewhere(self, error: ServerError) -> None:
        """Take note of the address that this error names, if it names one."""
        ...


def place_of(options: RedisOptions) -> Place:
    """The place that the options name."""
    if options.kind == SENTINEL:
        return Sentinels(options)
    if options.kind == CLUSTER:
        return Nodes(options)
    return Fixed(options)


class Fixed:
    """One server at one address."""

    moves = False
    doing = ""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options

    async def connect(self) -> tuple[Address, Driver]:
        options = self._options
        return Address(options.host, options.port), await connect(options)

    def is_elsewhere(self, error: ServerError) -> None:
        pass


class _Asked:
    """What Sentinels and a Cluster have in common: who is asked, and what counts of it."""

    moves = True

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._last: Address | None = None
        self.doing = ""

    async def _connect_to(self, address: Address) -> tuple[Address, Driver]:
        """A connection to this server, if it says that it is a master."""
        self.doing = f"connecting to the master at {address}"
        host, port = address
        wire = await connect(replace(self._options, host=host, port=port))
        try:
            self.doing = f"asking {address} for its role"
            role: list[Any] = await wire.call("ROLE")
            if role[0] != b"master":
                raise NotConnected(f"{address} is named as the master, and says it is a replica")
        except BaseException:
            await wire.close()
            raise
        self._last, self.doing = address, ""
        return address, wire

    async def _named(self, asked: Sequence[Address]) -> Address:
        """The address that most of those who are ``asked`` name, as soon as more than half name the
        same, or when there is no time left. Raises NotConnected: nobody names any."""
        limit_s = self._options.connect_ms / 1000 / ASKING_PART
        tasks = {asyncio.create_task(self._ask(one)): one for one in asked}
        votes: Counter[Address] = Counter()
        reasons: dict[Address, str] = dict.fromkeys(asked, "no answer")
        try:
            async with asyncio.timeout(limit_s):
                for ended in asyncio.as_completed(tasks):
                    one, found = await ended
                    if isinstance(found, str):
                        reasons[one] = found
                        continue
                    votes[found] += 1
                    if votes[found] > len(asked) / 2:
                        return found
        except TimeoutError:
            pass
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not votes:
            raise NotConnected(_reasons(reasons))
        # Of two that are named as often, the one that is new was chosen later.
        return max(votes, key=lambda address: (votes[address], address != self._last))

    async def _ask(self, one: Address) -> tuple[Address, Address | str]:
        """Who was asked, and the address that it names, or why it names none."""
        try:
            wire = await connect(self._options_for(one))
        except (NotConnected, NoReply, ServerError) as error:
            return one, error.message
        try:
            return one, await self._ask_on(wire, one)
        except (NoReply, ServerError) as error:
            return one, error.message
        finally:
            await wire.close()

    def _options_for(self, one: Address) -> RedisOptions:
        return replace(self._options, host=one.host, port=one.port, db=0)

    async def _ask_on(self, wire: Driver, one: Address) -> Address | str:
        raise NotImplementedError


class Sentinels(_Asked):
    """The master that these Sentinels name."""

    async def connect(self) -> tuple[Address, Driver]:
        self.doing = f"asking {len(self._options.seeds)} sentinels for the master"
        return await self._connect_to(await self._named(self._options.seeds))

    def is_elsewhere(self, error: ServerError) -> None:
        """A master that was demoted does not say who follows it."""

    def _options_for(self, one: Address) -> RedisOptions:
        options = super()._options_for(one)
        file = options.sentinel_password_file
        try:
            password = Path(file).read_text().strip() if file else ""
        except OSError as error:
            why = f"sentinel_password_file {file}: {error.strerror}"
            raise NotConnected(why) from error
        return replace(options, username=options.sentinel_user, password=password)

    async def _ask_on(self, wire: Driver, one: Address) -> Address | str:
        name = self._options.master
        found = await wire.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name)
        if found is None:
            return f"it knows no master {name!r} (master=)"
        host, port = found
        return Address(host.decode(), int(port))


class Nodes(_Asked):
    """The node of a Cluster that has the slot of the shard."""

    def __init__(self, options: RedisOptions) -> None:
        super().__init__(options)
        self._slot = slot_of(options)
        self._known: tuple[Address, ...] = ()
        self._hint: Address | None = None

    async def connect(self) -> tuple[Address, Driver]:
        hint, self._hint = self._hint, None
        if hint is not None:
            try:
                return await self._connect_to(hint)
            except (NotConnected, NoReply, ServerError):
                pass  # the others know better
        asked = tuple(dict.fromkeys((*self._options.seeds, *self._known)))[:NODES_ASKED_MAX]
        self.doing = f"asking {len(asked)} nodes for the one that has slot {self._slot}"
        return await self._connect_to(await self._named(asked))

    def is_elsewhere(self, error: ServerError) -> None:
        kind, _, rest = error.message.partition(" ")
        host, _, port = rest.partition(" ")[2].rpartition(":")
        if kind == "MOVED" and port.isdecimal():
            # Without a host: at the one that said so, on another port.
            known = self._last.host if self._last is not None else ""
            self._hint = Address(host if host not in ("", "?") else known, int(port))

    async def _ask_on(self, wire: Driver, one: Address) -> Address | str:
        ranges = slot_ranges(await wire.call("CLUSTER", "SLOTS"), one)
        self._known = tuple(node for some in ranges for node in some.nodes)
        master = master_of(self._slot, ranges)
        return f"slot {self._slot} is served by no node" if master is None else master


class SlotRange(NamedTuple):
    """Slots of a Cluster that are on the same nodes."""

    first: int
    last: int
    nodes: Sequence[Address]
    """The master, then its replicas."""


def slot_of(options: RedisOptions) -> int:
    """The slot of a Cluster that a shard is in."""
    return crc_hqx(options.tag.encode(), 0) % SLOTS


def slot_ranges(answer: Sequence[Sequence[Any]], one: Address) -> list[SlotRange]:
    """What CLUSTER SLOTS answers. A node that does not know its own host is where it was asked,
    ``one``."""

    def address(node: Sequence[Any]) -> Address:
        host = node[0].decode() if node[0] else ""
        return Address(host if host not in ("", "?") else one.host, node[1])

    return [SlotRange(first, last, tuple(map(address, nodes))) for first, last, *nodes in answer]


def master_of(slot: int, ranges: Sequence[SlotRange]) -> Address | None:
    """The master that has this slot; None: no node serves it."""
    return next((some.nodes[0] for some in ranges if some.first <= slot <= some.last), None)


def _reasons(reasons: dict[Address, str]) -> str:
    shown = [f"{one}: {why}" for one, why in list(reasons.items())[:REASONS_MAX]]
    left = len(reasons) - len(shown)
    return "; ".join([*shown, *([f"and {left} more"] if left else [])])


# --- the connection -------------------------------------------------------------------------------

log = logging.getLogger(__name__)
_NOT_RUN = re.compile(
    r"(?:unknown .*command|NOPERM|can't run this command|ACL failure).*@user_script: ?(\d+)",
    re.IGNORECASE,
)
"""What Redis says of a command in a script that was renamed, or that the user may not run; it names
the line alone."""


def is_not_run(error: ServerError) -> bool:
    """Whether the server does not know a command, or the user may not run it."""
    said = error.message.lower()
    is_outside = error.kind == "NOPERM" or "unknown command" in said
    return is_outside or _NOT_RUN.search(said) is not None


def _placed(error: ServerError, script: Script) -> ServerError:
    """The error with the line of the script, which names the command."""
    if (found := _NOT_RUN.search(error.message)) is None:
        return error
    line = dict(enumerate(script.text.splitlines(), 1)).get(int(found[1]), "").strip()
    said = error.message.removeprefix(error.kind).strip()
    return ServerError(error.kind, f"{said}: {line}")


ELSEWHERE = frozenset(("READONLY", "MOVED", "MASTERDOWN", "LOADING", "NOAUTH"))
"""Errors after which the next call connects anew, as another server may answer."""
NOT_THE_ONE = frozenset(("READONLY", "MOVED", "MASTERDOWN"))
"""Of these: those that say that another server has the shard now."""
NOT_NOW = frozenset(("ASK", "TRYAGAIN", "CLUSTERDOWN"))
"""Errors of a Cluster that pass. While a slot is on its way to another node, the one that has it
answers ASK or TRYAGAIN to each script, from the beginning to the end: the keys of a script are
partly here and partly there, and some exist nowhere. Nor would the other node take it, for the same
reason; so an ASK is not followed, but waited for, until it is MOVED."""
NOT_NOW_RETRY_S = 0.02
FOLLOWED_MAX = 3
"""How often one call is sent to another server."""
RETRY_S = 0.2
"""How long after a failed try to connect nobody tries again, in seconds."""


class Connection:
    """One connection to Redis at a time, which is made anew when it is used after a failure."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._place = place_of(options)
        self._wire: Driver | None = None
        self._lock = asyncio.Lock()
        self._failed_s = float("-inf")
        self._why = ""
        self.connections = 0
        """How many connections there have been: a shard has to be claimed on each new one."""
        self.address: Address | None = None
        """The server of the last connection; None: there was none."""
        self._since_s = 0.0
        self.moves = 0
        """How often a connection was to another server than the one before."""
        self._patience = _Patience()

    @property
    def at(self) -> str:
        """The server of the last connection, ``HOST:PORT``; empty: there was none."""
        return "" if self.address is None else str(self.address)

    @property
    def connected(self) -> bool:
        return self._wire is not None

    @property
    def connected_s(self) -> int:
        """How old the connection is, in seconds, rounded down."""
        return int(asyncio.get_running_loop().time() - self._since_s) if self.connected else 0

    async def run(
        self,
        script: Script,
        keys: Sequence[bytes],
        args: Sequence[Argument],
        *,
        patience: int = 1,
    ) -> Any:
        """A script's reply, waited for ``patience`` times as long as for a command.

        Raises Away (nothing was sent), Lost, Answer.
        """
        rest = (len(keys), *keys, *args)
        timeout_ms = patience * self._options.call_ms
        try:
            return await self.call("EVALSHA", script.sha, *rest, timeout_ms=timeout_ms)
        except ServerError as error:
            if error.kind != "NOSCRIPT":
                raise _placed(error, script) from None
        try:
            return await self.call("EVAL", script.text, *rest, timeout_ms=timeout_ms)
        except ServerError as error:
            raise _placed(error, script) from None

    async def ready(self) -> None:
        """Connect, unless it is connected. What goes wrong with it, the next call says."""
        async with self._lock:
            if self._wire is None:
                with contextlib.suppress(NotConnected, ServerError):
                    await self._connect()

    async def call(self, *args: Argument, timeout_ms: int = 0) -> Any:
        """Run one command, connecting first if need be. Raises Away, Lost, Answer."""
        timeout_ms = timeout_ms or self._options.call_ms
        loop, followed = asyncio.get_running_loop(), 0
        until_s = loop.time() + timeout_ms / 1000
        async with self._lock:
            while True:
                wire = self._wire or await self._connect()
                try:
                    return await self._call(wire, args, timeout_ms)
                except ServerError as error:
                    if not self._place.moves:
                        raise
                    if error.kind in NOT_THE_ONE and followed < FOLLOWED_MAX:
                        followed += 1
                    elif error.kind not in NOT_NOW:
                        raise
                    elif loop.time() >= until_s:
                        await self._drop(error.message)  # another node may know better by now
                        raise
                    else:
                        await asyncio.sleep(NOT_NOW_RETRY_S)
                        if self._wire is not wire:
                            raise NotConnected(f"{self._options.name}: {self._why}") from None

    async def _call(self, wire: Driver, args: tuple[Argument, ...], timeout_ms: int) -> Any:
        patience = self._patience
        patience.begin(wire, timeout_ms / 1000)
        try:
            return await wire.call(*args)
        except ServerError as error:
            if error.kind in ELSEWHERE:
                self._place.is_elsewhere(error)
                await self._drop(error.message)
            raise
        except BaseException as error:
            if patience.is_over and isinstance(error, NoReply):
                await self._drop("it did not answer in time")
                message = f"{self._named} did not answer within {timeout_ms} ms"
                raise NoReply(message, silent=True) from None
            await self._drop(str(error))
            raise
        finally:
            patience.end()

    @property
    def _named(self) -> str:
        """The store, and the server if there are several, for messages."""
        return f"{self._options.name} at {self.at}" if self._place.moves else self._options.name

    async def doubt(self) -> None:
        """Find out anew where the shard is, before the next call: this server did not do what a
        master does."""
        if self._place.moves:
            await self._drop(f"{self.at} is in doubt")

    async def _connect(self) -> Driver:
        options, loop = self._options, asyncio.get_running_loop()
        if loop.time() < self._failed_s + RETRY_S:
            raise NotConnected(f"{options.name}: {self._why}")
        try:
            async with asyncio.timeout(options.connect_ms / 1000):
                address, self._wire = await self._place.connect()
        except TimeoutError:
            doing = f", {self._place.doing}" if self._place.doing else ""
            self._why = f"no connection within {options.connect_ms} ms{doing}"
        except (NotConnected, NoReply) as error:
            self._why = error.message
        except ServerError as error:
            self._failed_s, self._why = loop.time(), error.message
            if error.kind != "ERR":  # such as: max number of clients reached
                raise
        else:
            self.connections += 1
            self._since_s = loop.time()
            self._note(address)
            return self._wire
        self._failed_s = loop.time()
        raise NotConnected(f"{options.name}: {self._why}")

    def _note(self, address: Address) -> None:
        before, self.address = self.address, address
        if before is not None and before != address:
            self.moves += 1
            log.warning("store %s: moved from %s to %s", self._options.name, before, address)

    async def _drop(self, why: str) -> None:
        wire, self._wire = self._wire, None
        self._why = why
        if wire is not None:
            await wire.close()

    async def close(self) -> None:
        """Close the connection, and end a call under way."""
        self._patience.close()
        await self._drop("the store is closed")


class _Patience:
    """How long one call after the other may take, with one timer for many of them: it rings at the
    end of a call that is over by then, and is set anew for the one that is under way."""

    def __init__(self) -> None:
        self.is_over = False
        """Whether the call under way, or the last one, took too long."""
        self._wire: Driver | None = None
        """Has the call under way; None: there is none."""
        self._until_s = self._rings_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, wire: Driver, patience_s: float) -> None:
        """A call begins, which may take so long."""
        loop = asyncio.get_running_loop()
        self._wire, self.is_over = wire, False
        self._until_s = until_s = loop.time() + patience_s
        if self._timer is None or until_s < self._rings_s:
            self._set(loop)

    def end(self) -> None:
        """The call is over."""
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
        """No timer is left."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()


def check(options: RedisOptions) -> None:
    """Raises StoreUnusable if the driver is not installed or cannot do what the options ask."""
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
            f"store {options.name}: the driver asyncio-redis has no TLS;"
            " leave ?driver=asyncio-redis out, or use redis://"
        )
    for setting in ("tls_ca", "tls_cert", "tls_key", "sentinel_password_file"):
        path = getattr(options, setting)
        if path and setting.startswith("tls") and not options.tls:
            raise StoreUnusable(
                f"store {options.name}: {setting} is for TLS; use rediss://, or leave it out"
            )
        if path and not Path(path).is_file():
            raise StoreUnusable(f"store {options.name}: {setting}: there is no file {path}")
